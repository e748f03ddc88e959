"""Mamba-2 and the hybrids that have it: counts by hand and as published, memory, launches, prices, refusals."""

from typing import Any

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.mamba2 import CausalConvolution, Mamba2, StateSpaceScan
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.launches.forward import (
    StepBatch,
    decode_launches,
    forward_launches,
    prefill_launches,
    token_launches,
)
from windtunnel.model.memory import kv_bytes_per_token, recurrent_state_bytes, weight_bytes
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format, Precision
from windtunnel.model.shape import LayerGroup, ModelSpec, Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.estimator import Coverage
from windtunnel.schema import decode, encode

NANO, LARGE = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/Nemotron-H-56B-Base-8K"

NEMOTRON_H_8B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
}


def shard(name: str = NANO, **degrees: int) -> Shard:
    model = catalog.model(name)
    return Shard(model, model.precision, Parallelism(**degrees))


def read(**changes: Any) -> ModelSpec:
    return model_from_config(NEMOTRON_H_8B | changes, "tiny")


def recurrence(name: str) -> Mamba2:
    return next(attention for _, attention in catalog.model(name).attentions if isinstance(attention, Mamba2))


def test_an_8b_hybrid_is_counted_to_the_last_parameter() -> None:
    """Elements over all tensors of nvidia/Nemotron-H-8B-Base-8K (safetensors metadata)."""
    assert count_parameters(read()).total == 8_100_852_736


def test_letters_name_layers_of_one_part() -> None:
    kinds = [
        (group.num_layers, type(group.attention), type(group.feed_forward), group.num_norms) for group in read().layers
    ]
    nothing = type(None)
    assert kinds == [
        (24, Mamba2, nothing, 1),
        (24, nothing, DenseFeedForward, 1),
        (4, GroupedQueryAttention, nothing, 1),
    ]


def test_names_of_blocks_say_the_same_as_letters() -> None:
    names = {"M": "mamba", "-": "mlp", "*": "attention"}
    listed = [names[letter] for letter in NEMOTRON_H_8B["hybrid_override_pattern"]]
    assert read(hybrid_override_pattern=None, layers_block_type=listed) == read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M-M"}, "one entry for each of the 52 layers"),
        ({"hybrid_override_pattern": 7}, "one entry for each of the 52 layers"),
        ({"hybrid_override_pattern": "Z" * 52}, r"has 'Z', which cannot be modelled; allowed: M, \*, -, E"),
        ({"mamba_num_heads": 12}, "mamba_num_heads 12 is not a multiple of n_groups 8"),
        ({"ssm_state_size": None}, "has no ssm_state_size"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(**changes)


def test_a_layer_has_at_least_one_part() -> None:
    with pytest.raises(InputError, match="neither attention nor a feed-forward"):
        decode({"num_layers": 1}, LayerGroup)


def test_a_hybrid_is_written_and_read() -> None:
    assert decode(encode(catalog.model(NANO)), ModelSpec) == catalog.model(NANO)


def test_state_is_that_of_vllm() -> None:
    """vLLM 0.18 `MambaStateShapeCalculator.mamba2_state_shape`: [heads, head_dim, state] and [kernel - 1, channels]."""
    assert recurrent_state_bytes(shard()) == 23 * (64 * 64 * 128 * 4 + 3 * (4096 + 2 * 8 * 128) * 2)
    # In 16 bits where the config does not say, and of two ranks half as much.
    assert recurrent_state_bytes(shard(LARGE, tp=2)) == 54 * (256 * 64 * 256 * 2 + 3 * (16384 + 2 * 8 * 256) * 2) / 2
    assert kv_bytes_per_token(shard(), 4096) == 6 * 2 * 2 * 128 * 2


def test_ranks_beyond_the_groups_repeat_one() -> None:
    """vLLM 0.18 `extra_groups_for_head_shards`: B and C of a group are on every rank that has heads of it."""
    repeated = 54 * 2 * 8 * 256 * 8192 * 2  # bytes of all groups' B and C rows in every layer
    assert weight_bytes(shard(LARGE, tp=16)) * 16 - weight_bytes(shard(LARGE, tp=8)) * 8 == pytest.approx(
        repeated + 10 * 8 * 2 * 128 * 8192 * 2,
        rel=1e-9,  # and attention's 8 key/value heads
    )
    convolution = next(x.op for x in decode_launches(shard(LARGE, tp=16), 1, 1) if isinstance(x.op, CausalConvolution))
    assert convolution.num_channels == 16384 // 16 + 2 * 256


def test_a_token_meets_two_operations_for_each_weight_of_a_matrix() -> None:
    one = shard(LARGE)
    matrices = sum(x.op.flops * x.count for x in token_launches(one, 1) if x.op.kind == "gemm")
    count, layer = count_parameters(one.model), recurrence(LARGE)
    vectors = 54 * ((layer.inner_size + 2 * 8 * 256) * (4 + 1) + 3 * 256)  # the convolution, its bias, three a head
    assert matrices == 2 * (count.attention + count.feed_forward.dense - vectors)


def test_a_layer_of_one_part_has_one_norm_and_one_sum_over_ranks() -> None:
    launches = token_launches(shard(LARGE, tp=2), 64)
    assert not {launch.name for launch in launches} & {"post_attention_norm", "rope"}
    assert sum(launch.count for launch in launches if launch.name == "input_norm") == 118
    assert sum(launch.count for launch in launches if launch.name.endswith("_all_reduce")) == 1 + 54 + 54 + 10


def test_a_decoding_request_reads_and_writes_its_state() -> None:
    scan = next(x.op for x in decode_launches(shard(), 8, 4096) if isinstance(x.op, StateSpaceScan))
    tokens = 8 * (2 * 4096 + 2 * 8 * 128 + 64) * 2
    assert scan.num_bytes == 2 * 8 * 64 * 64 * 128 * 4 + tokens
    assert scan.flops == 5 * 8 * 64 * 64 * 128


@pytest.mark.parametrize(
    ("command", "value_bytes"),
    [
        ("vllm serve {} --mamba-ssm-cache-dtype float32", 4),
        ("vllm serve {} --mamba-ssm-cache-dtype auto", 2),
        ("python -m sglang.launch_server --model-path {} --mamba-ssm-dtype float32", 4),
    ],
)
def test_a_server_names_the_format_of_its_states(command: str, value_bytes: int) -> None:
    raw = read_launch_command(command.format(LARGE)).raw
    precision = decode(raw.get("precision", {}), Precision)
    one = Shard(catalog.model(LARGE), precision, Parallelism())
    convolution = 3 * (16384 + 2 * 8 * 256) * 2
    assert recurrent_state_bytes(one) == 54 * (256 * 64 * 256 * value_bytes + convolution)
    scan = next(x.op for x in decode_launches(one, 1, 4096) if isinstance(x.op, StateSpaceScan))
    assert scan.state_bytes == 256 * 64 * 256 * value_bytes
    # Nano's config.json says fp32; a server may say 16 bits.
    narrow = Shard(catalog.model(NANO), Precision(recurrent_state=Format.BF16), Parallelism())
    assert recurrent_state_bytes(narrow) == 23 * (64 * 64 * 128 * 2 + 3 * (4096 + 2 * 8 * 128) * 2)


def test_a_prompt_costs_in_proportion_to_its_tokens() -> None:
    def flops(num_tokens: int) -> float:
        cores = prefill_launches(shard(), 1, num_tokens)
        return float(sum(x.op.flops * x.count for x in cores if isinstance(x.op, StateSpaceScan)))

    assert flops(8192) == 8 * flops(1024)


def test_every_launch_has_a_price_on_devices_with_and_without_tables() -> None:
    step = forward_launches(shard(), StepBatch(16, 2048.0, 512, 512 * 256.0, 17))
    for name in ("h100_sxm", "a100_sxm", "mi300x"):
        estimator = measured_estimator(catalog.device(name), catalog.node("pcie"), "vllm", "0.24.0")
        for launch in step:
            assert float(np.asarray(estimator.estimate(launch.op).seconds)) > 0


def test_the_convolution_is_measured_and_the_scan_says_that_it_is_not() -> None:
    """The measured table holds `causal_conv1d_fn` and `causal_conv1d_update` alone, and so no scan."""
    estimator = measured_estimator(catalog.device("h100_sxm"), None, "trtllm", "1.3.0rc20")
    convolution = estimator.estimate(CausalConvolution(64.0, 1.0, 6144, 4, decode=True))
    assert convolution.coverage is Coverage.MEASURED
    assert 3e-6 < float(convolution.seconds) < 10e-6  # rows of 5.2 us at this point
    prompt = estimator.estimate(CausalConvolution(1.0, 4096.0, 6144, 4))
    assert float(prompt.seconds) == pytest.approx(44.5e-6, rel=0.01)
    scan = estimator.estimate(StateSpaceScan(64.0, 1.0, 64, 64, 8, 128, 128, 2.0**21, decode=True))
    assert (scan.coverage, scan.source) == (Coverage.ROOFLINE, "plain roofline, not fitted to state_space_scan")


def test_tensor_parallelism_is_as_wide_as_the_heads() -> None:
    assert recurrence(NANO).widest_tp == 64
    shared = Shard(catalog.model(NANO), Precision(), Parallelism(tp=4))
    assert [launch.name for launch in decode_launches(shared, 1, 1)] == [
        "mamba_convolution_decode",
        "mamba_scan_decode",
        "attention_decode",
    ]
