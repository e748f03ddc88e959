"""A kind of attention from an installed package: one file, found by its entry point and priced by its own operator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import windtunnel
from plugin_package import installed_plugin
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.config import known_architectures, model_from_config
from windtunnel.model.launches.forward import decode_launches
from windtunnel.model.memory import kv_bytes_per_token, recurrent_state_bytes
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Precision
from windtunnel.model.shape import LayerGroup, ModelSpec, Shard
from windtunnel.schema import decode, encode

MOST_FILES = 2

SOURCE = '''
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from windtunnel.model.architectures import KNOWN
from windtunnel.model.operators import Launch, PrefillBatch
from windtunnel.model.shape import Attention
from windtunnel.schema import Schema


@dataclass(frozen=True)
class RunningMean(PrefillBatch):
    kind: ClassVar[str] = "running_mean"
    width: int

    @property
    def flops(self):
        return 2.0 * self.batch * self.num_tokens * self.width

    @property
    def num_bytes(self):
        return 4.0 * self.batch * (self.num_tokens + 2) * self.width

    @property
    def text(self):
        return f"{self.batch_text}, {self.width} channels"


class MeanMixer(Schema, Attention, tag="mean", tag_field="type"):
    """Each token meets the mean of those before it."""

    is_recurrent: ClassVar[bool] = True
    operators = (RunningMean,)
    layer_types = ("running_mean",)
    model_types = {"mean_former": KNOWN.architectures["llama"]}
    width: int

    @classmethod
    def read(cls, reader, index, layer_type):
        return cls(width=reader.count("mean_width"))

    @property
    def widest_tp(self):
        return self.width

    @property
    def text(self):
        return "mean"

    def num_parameters(self, hidden_size):
        return 2 * hidden_size * self.width

    def projections(self, shard, num_tokens):
        width = self.width // shard.tp
        yield shard.attention_gemm("mean_in_proj", num_tokens, width, shard.model.hidden_size)
        yield shard.attention_gemm("mean_out_proj", num_tokens, shard.model.hidden_size, width)

    def decode_launches(self, shard, batch, context_tokens):
        yield Launch("mean_decode", RunningMean(batch, 1.0 + 0.0 * context_tokens, self.width // shard.tp))

    def prefill_launches(self, shard, batch, num_tokens):
        yield Launch("mean_prefill", RunningMean(batch, num_tokens, self.width // shard.tp))

    def state_bytes(self, shard):
        return 4.0 * self.width / shard.tp


KIND = MeanMixer
'''

CONFIG: dict[str, Any] = {
    "name": "tiny mean-former",
    "architectures": ["MeanFormerForCausalLM"],
    "model_type": "mean_former",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "layer_types": ["running_mean", "running_mean", "running_mean", "full_attention"],
    "mean_width": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[Path]]:
    with installed_plugin(tmp_path, "windtunnel.attention", "mean", SOURCE) as files:
        yield files


def test_a_kind_of_attention_is_at_most_two_files(files: list[Path]) -> None:
    """It simulates, and the step consists of its own launches, priced by a plain roofline, beside the shipped ones."""
    assert len(files) <= MOST_FILES
    scenario = windtunnel.scenario(
        model=CONFIG, device="h100_sxm", tp=2, concurrency=4, input_tokens=256, output_tokens=16, num_requests=8
    )
    result = windtunnel.simulate(scenario)
    assert result.summary.num_requests == 8
    step = windtunnel.explain_step(windtunnel.resolve(scenario), windtunnel.step_batch(4, 256, 0, 0))
    (core,) = [launch for launch in step.launches if launch.name == "mean_decode"]
    assert (core.count, core.source) == (3, "plain roofline, not fitted to running_mean")
    assert core.each_s > 0


@pytest.mark.usefixtures("files")
def test_its_counts_are_the_models() -> None:
    model = catalog.model(CONFIG)
    assert [(group.num_layers, group.attention and group.attention.text) for group in model.layers] == [
        (3, "mean"),
        (1, "GQA"),
    ]
    assert count_parameters(model).attention == 3 * 2 * 1024 * 2048 + 1024 * 64 * (2 * 16 + 2 * 4)
    shard = Shard(model, Precision(), Parallelism(tp=2))
    assert recurrent_state_bytes(shard) == 3 * 4 * 2048 / 2
    assert kv_bytes_per_token(shard, 4096) == 2 * 2 * 64 * 2
    assert [launch.name for launch in decode_launches(shard, 1, 1)] == ["mean_decode", "attention_decode"]


@pytest.mark.usefixtures("files")
def test_a_spec_with_it_is_written_and_read() -> None:
    model = catalog.model(CONFIG)
    assert decode(encode(model), ModelSpec) == model
    with pytest.raises(InputError, match=r"kind of attention: \$.width is 'wide'; a whole number is needed"):
        decode({"num_layers": 1, "attention": {"type": "mean", "width": "wide"}}, LayerGroup)


@pytest.mark.parametrize("model_type", ["doge", "rwkv"])
def test_a_kind_reads_layers_that_are_refused_without_it(tmp_path: Path, model_type: str) -> None:
    """By a key (Doge's `keep_window_size`) or by the model type: the kind that names the type answers for both."""
    config = CONFIG | {"model_type": model_type, "keep_window_size": 3, "architectures": ["OwnForCausalLM"]}
    config |= {"layer_types": ["own", "own", "own", "full_attention"]}
    source = SOURCE.replace("mean_former", model_type).replace('("running_mean",)', '("own",)')
    with installed_plugin(tmp_path, "windtunnel.attention", "mean", source):
        model = model_from_config(config, "tiny")
    assert [(group.num_layers, group.attention and group.attention.text) for group in model.layers] == [
        (3, "mean"),
        (1, "GQA"),
    ]
    with pytest.raises(InputError, match="cannot be modelled"):
        model_from_config(config, "tiny")


def test_without_the_package_its_models_are_refused() -> None:
    assert "mean_former" not in known_architectures()
    with pytest.raises(InputError, match="model_type 'mean_former' is not known"):
        model_from_config(CONFIG, "tiny")
    spec = {"num_layers": 1, "attention": {"type": "mean", "width": 4}}
    with pytest.raises(InputError, match="unknown kind of attention 'mean'"):
        decode(spec, LayerGroup)
    for wrong in ({"attention": "mean"}, {"feed_forward": {"type": "dense"}}):
        with pytest.raises(ValueError, match=r"is no kind of (attention|feed-forward)"):
            LayerGroup(num_layers=1, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("good", "wrong", "problem"),
    [
        ('"mean_former"', '"llama"', "MeanMixer brings the model_type 'llama', which ships"),
        ("def read(cls", "def reed(cls", "the kind of attention MeanMixer defines no read"),
        ("def widest_tp", "def heads", "the kind of attention MeanMixer defines no widest_tp"),
        ("def num_parameters", "def count", "the kind of attention MeanMixer defines no num_parameters"),
        ("def decode_launches", "def decode", "the kind of attention MeanMixer defines no decode_launches"),
        ("def state_bytes", "def state", "the kind of attention MeanMixer defines no state_bytes"),
        ("is_recurrent: ClassVar[bool] = True", "", "the kind of attention MeanMixer defines no bytes_per_token"),
        (
            "def state_bytes",
            "num_heads, bytes_per_token = 8, lambda *_: -1.0\n    is_recurrent = False\n    def state_bytes",
            "MeanMixer keeps -1.0 bytes of a token",
        ),
        (
            "def state_bytes",
            "num_heads, bytes_per_token = 8, lambda *_: float('nan')\n    is_recurrent = False\n    def state_bytes",
            "MeanMixer keeps nan bytes of a token",
        ),
        ("return 2 * hidden_size * self.width", "return 'many'", "MeanMixer: num_parameters is 'many'"),
        ("return 2 * hidden_size * self.width", "return -1", "MeanMixer: num_parameters is -1; a number of at least 0"),
        ("return self.width\n", "return None\n", "MeanMixer: widest_tp is None; a number of at least 1"),
        ('yield Launch("mean_decode", ', "return print(", "a kind of layer launches None, which is no Launch"),
        ('yield Launch("mean_decode", ', "yield (", "a kind of layer launches RunningMean.*, which is no Launch"),
        ("return 4.0 *", "return None and", "running_mean: its arithmetic or its bytes are below"),
        ("return 2.0 * self.batch", "return -2.0 * self.batch", "running_mean: its arithmetic or its bytes are below"),
        ("return 4.0 * self.batch", "return float('nan')", "running_mean: its arithmetic or its bytes are below"),
    ],
)
def test_a_kind_that_is_incomplete_or_counts_nonsense_is_named(
    tmp_path: Path, good: str, wrong: str, problem: str
) -> None:
    assert good in SOURCE
    with (
        installed_plugin(tmp_path, "windtunnel.attention", "mean", SOURCE.replace(good, wrong, 1)),
        pytest.raises(InputError, match=problem),
    ):
        windtunnel.explain(model=CONFIG, device="h100_sxm", batch=4, context=256, prefill_tokens=64)
