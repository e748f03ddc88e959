"""A kind of feed-forward from an installed package: one file, found by its entry point, priced as matrix products."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import windtunnel
from plugin_package import installed_plugin
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.config import known_architectures
from windtunnel.model.memory import weight_bytes
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Precision
from windtunnel.model.shape import LayerGroup, ModelSpec, Shard
from windtunnel.schema import decode, encode

MOST_FILES = 2

SOURCE = '''
from windtunnel.model.architectures import KNOWN
from windtunnel.model.operators import Gemm, Launch
from windtunnel.model.shape import FeedForward, FeedForwardParameters
from windtunnel.schema import Schema


class LowRankFeedForward(Schema, FeedForward, tag="low_rank", tag_field="type"):
    """Two products through a narrow rank, computed whole on every device."""

    model_types = {"low_rank_former": KNOWN.architectures["llama"]}
    rank: int

    @classmethod
    def layers(cls, reader):
        return [reader.model_type == "low_rank_former"] * reader.num_layers

    @classmethod
    def read(cls, reader):
        return cls(rank=reader.count("mlp_rank"))

    def parameters(self, hidden_size):
        return FeedForwardParameters(dense=2 * hidden_size * self.rank)

    def weight_bits(self, shard):
        return 16.0 * self.parameters(shard.model.hidden_size).dense

    def launches(self, shard, num_tokens):
        width = shard.model.hidden_size
        yield Launch("low_rank_down", Gemm(num_tokens, self.rank, width, shard.precision.weights))
        yield Launch("low_rank_up", Gemm(num_tokens, width, self.rank, shard.precision.weights))

    def peak_values(self, shard):
        return 2.0 * shard.model.hidden_size + self.rank


KIND = LowRankFeedForward
'''

CONFIG: dict[str, Any] = {
    "name": "tiny low-rank former",
    "architectures": ["LowRankFormerForCausalLM"],
    "model_type": "low_rank_former",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "mlp_rank": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[Path]]:
    with installed_plugin(tmp_path, "windtunnel.feed_forward", "low_rank", SOURCE) as files:
        yield files


def test_a_kind_of_feed_forward_is_at_most_two_files(files: list[Path]) -> None:
    """It simulates, and a step holds its two products beside the shipped launches."""
    assert len(files) <= MOST_FILES
    scenario = windtunnel.scenario(
        model=CONFIG, device="h100_sxm", tp=2, concurrency=4, input_tokens=256, output_tokens=16, num_requests=8
    )
    assert windtunnel.simulate(scenario).summary.num_requests == 8
    step = windtunnel.explain_step(windtunnel.resolve(scenario), windtunnel.step_batch(4, 256, 0, 0))
    counts = {launch.name: launch.count for launch in step.launches}
    assert (counts["low_rank_down"], counts["low_rank_up"]) == (4, 4)
    assert "gate_up_proj" not in counts
    assert "feed_forward_all_reduce" not in counts


@pytest.mark.usefixtures("files")
def test_its_counts_are_the_models() -> None:
    model = catalog.model(CONFIG)
    assert count_parameters(model).feed_forward.dense == 4 * 2 * 1024 * 256
    one, two = (weight_bytes(Shard(model, Precision(), Parallelism(tp=tp))) for tp in (1, 2))
    assert one / 2 < two < one
    assert decode(encode(model), ModelSpec) == model


def test_without_the_package_its_models_are_refused() -> None:
    assert "low_rank_former" not in known_architectures()
    with pytest.raises(InputError, match="unknown kind of feed-forward 'low_rank'"):
        decode({"num_layers": 1, "feed_forward": {"type": "low_rank", "rank": 4}}, LayerGroup)
