"""Tokens of a step with prefill that SGLang's graphs cover, by version."""

import math

import pytest

from windtunnel import catalog
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import EngineSettings, Speculative
from windtunnel.serving.engines.sglang.limits import most_tokens_in_pieces

DENSE, LATENT, HYBRID = "Qwen/Qwen3-32B", "deepseek-ai/DeepSeek-R1", "Qwen/Qwen3-Next-80B-A3B-Instruct"
DRAFTS = Speculative(method="ngram", num_draft_tokens=2, acceptance_fraction=0.5)


def most(model: str, version: str, drafts: Speculative | None = None, **split: int) -> float:
    spec = catalog.model(model)
    shard = Shard(model=spec, precision=spec.precision, parallelism=Parallelism(**split), devices_per_node=8)
    engine = EngineSettings(name="sglang", version=version, speculative=drafts)
    return most_tokens_in_pieces(shard, engine, 256.0)


@pytest.mark.parametrize(
    ("version", "dense", "latent", "hybrid", "drafting", "data_parallel"),
    [
        ("0.5.14", math.inf, 2048, 0, 0, 0),
        ("0.5.15", math.inf, 0, math.inf, math.inf, 0),
        ("0.5.17", math.inf, 0, math.inf, math.inf, math.inf),
        ("0.5.20", math.inf, 2048, math.inf, math.inf, math.inf),
        ("0.5.23", math.inf, 8192, math.inf, math.inf, math.inf),
    ],
)
def test_breakable_graphs_cover_other_models_than_compiled_ones(
    version: str, dense: float, latent: float, hybrid: float, drafting: float, data_parallel: float
) -> None:
    """The rules of `server_args.py` and `arg_groups/cuda_graph_hook.py`, one model for each."""
    assert most(DENSE, version) == dense
    assert most(LATENT, version) == latent
    assert most(HYBRID, version) == hybrid
    assert most(DENSE, version, DRAFTS) == drafting
    assert most(DENSE, version, attention_dp=2) == data_parallel
    assert most(DENSE, version, pp=2) == 0
