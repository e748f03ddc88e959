"""Kernels of a step told apart by operator: of a real engine's trace, by modules' ranges, by order and by shapes."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import Capture, Names, capture_table, kernel_class, read_capture
from windtunnel.formats.captures.step_operators import (
    CapturedStep,
    captured_steps,
    measured_steps,
    measurement_tables,
    row_of_launch,
    rows_of_kernels,
    step_batch_of,
    step_name,
)
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import StepBatch, forward_launches
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.profile import write_profile
from windtunnel.pricing.table import read_tables


def model(**changes: Any) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 16384,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    return model_from_config(config | changes, "tiny")


def shard(**changes: Any) -> Shard:
    spec = model(**changes)
    return Shard(spec, spec.precision, Parallelism())


def capture_of(kernels: list[tuple[str, str]], flops: list[float] | None = None) -> tuple[Capture, CapturedStep]:
    """(name, module) of kernels that take 1 s each, in one decode step."""
    names = Names()
    name = step_name([1, 1], [101, 103], 0)
    modules = list(dict.fromkeys(module for _, module in kernels))
    ranges = capture_table(
        "ranges",
        len(modules),
        {"name": names.codes(modules), "start_s": np.zeros(len(modules)), "duration_s": np.ones(len(modules))},
    )
    table = capture_table(
        "kernels",
        len(kernels),
        {
            "name": names.codes([kernel for kernel, _ in kernels]),
            "activity": np.zeros(len(kernels)),
            "kernel_class": [kernel_class(kernel) for kernel, _ in kernels],
            "duration_s": np.ones(len(kernels)),
            "start_s": np.arange(len(kernels)),
            "range": [modules.index(module) if module else -1 for _, module in kernels],
            "flops": flops,
        },
    )
    batch = step_batch_of(name)
    assert batch is not None
    step = CapturedStep(name, batch, float(len(kernels)), np.arange(len(kernels)))
    return Capture("test", tuple(names), table, capture_table("calls", 0, {}), ranges, {}), step


GPU_LAYER = [
    ("void fused_add_rms_norm_kernel", "norms"),
    ("nvjet_1", "qkv_proj"),
    ("void rotary_embedding_kernel", "rope and cache"),
    ("reshape_and_cache_flash_kernel", "rope and cache"),
    ("flash_fwd_splitkv_kernel", "attention"),
    ("flash_fwd_splitkv_combine_kernel", "attention"),
    ("nvjet_2", "o_proj"),
    ("void splitKreduce_kernel", "o_proj"),
    ("void fused_add_rms_norm_kernel", "norms"),
    ("nvjet_3", "gate_up_proj"),
    ("triton_poi_fused_1", "activation"),
    ("nvjet_4", "down_proj"),
]
GPU_STEP = [
    ("vectorized_embedding", "embedding"),
    *GPU_LAYER * 2,
    ("triton_red_fused_2", "norms"),
    ("nvjet_5", "lm_head"),
    ("argmax_kernel", "sample"),
    ("elementwise_kernel", "sample"),
]


def test_kernels_without_shapes_are_told_by_their_order() -> None:
    capture, step = capture_of([(name, "") for name, _ in GPU_STEP])
    launches = forward_launches(shard(num_hidden_layers=2), step.batch)
    assert rows_of_kernels(capture, step, launches) == [row for _, row in GPU_STEP]


def test_products_that_do_not_fit_the_model_are_left_unclear() -> None:
    capture, step = capture_of([(name, "") for name, _ in GPU_STEP])
    rows = rows_of_kernels(capture, step, forward_launches(shard(num_hidden_layers=3), step.batch))
    assert "qkv_proj" not in rows
    assert rows.count("attention") == 4


def test_shapes_tell_products_whatever_their_order() -> None:
    launches = forward_launches(shard(), captured_batch())
    by_name = {launch.name: float(np.asarray(launch.op.flops)) for launch in launches}
    names = ["down_proj", "lm_head", "qkv_proj"]
    capture, step = capture_of([("nvjet", "")] * 3, [by_name[name] for name in names])
    assert rows_of_kernels(capture, step, launches) == names


def captured_batch() -> Any:
    return step_batch_of(step_name([1, 1], [101, 103], 0))


def test_modules_tell_kernels_whatever_their_names() -> None:
    kernels = [
        ("a", "module:model.embed_tokens", "embedding"),
        ("a", "module:model.rotary_emb", "rope and cache"),
        ("a", "module:model.layers.0.input_layernorm", "norms"),
        ("a", "module:model.layers.0.self_attn.k_proj", "qkv_proj"),
        ("a", "module:model.layers.0.self_attn.q_norm", "rope and cache"),
        ("mul", "module:model.layers.0.self_attn", "rope and cache"),
        ("flash_fwd", "module:model.layers.0.self_attn", "attention"),
        ("a", "module:model.layers.0.self_attn.o_proj", "o_proj"),
        ("add", "module:model.layers.0", "norms"),
        ("a", "module:model.layers.0.mlp.up_proj", "gate_up_proj"),
        ("a", "module:model.layers.0.mlp.act_fn", "activation"),
        ("mul", "module:model.layers.0.mlp", "activation"),
        ("a", "module:model.layers.0.mlp.down_proj", "down_proj"),
        ("nccl", "module:model.layers.0.mlp.down_proj", "communication"),
        ("a", "module:model.layers.1.mlp.experts.3.down_proj", "experts"),
        ("a", "", "other"),
        ("a", "module:lm_head", "lm_head"),
        ("multinomial", "", "sample"),
    ]
    capture, step = capture_of([(name, module) for name, module, _ in kernels])
    rows = rows_of_kernels(capture, step, forward_launches(shard(), step.batch))
    assert rows == [row for *_, row in kernels]


@pytest.mark.parametrize(
    ("computed", "seen", "num_prefills"), [([5, 7, 1], [5, 20, 33], 2), ([1, 1], [9, 11], 0), ([64], [64], 1)]
)
def test_a_steps_name_holds_its_batch(computed: list[int], seen: list[int], num_prefills: int) -> None:
    batch = step_batch_of(step_name(computed, seen, num_prefills))
    assert batch is not None
    prompts = list(zip(computed, seen, strict=True))[:num_prefills]
    assert batch.prefill_tokens == sum(tokens for tokens, _ in prompts)
    assert batch.prefill_pairs == sum(tokens * (keys - tokens / 2) for tokens, keys in prompts)
    assert batch.decode_requests == len(computed) - num_prefills
    assert batch.decode_requests * batch.decode_context_tokens == sum(seen[num_prefills:])


def test_other_ranges_are_no_steps() -> None:
    assert step_batch_of("execute_step") is None
    assert step_batch_of("execute_4_context_0_generation_4") is None


def test_every_launch_of_every_kind_of_model_has_a_row() -> None:
    for changes in ({}, {"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2}):
        spec = model(**changes, moe_intermediate_size=128, shared_expert_intermediate_size=128)
        for launch in forward_launches(Shard(spec, spec.precision, Parallelism(tp=2)), captured_batch()):
            assert row_of_launch(launch.name) != "other", launch.name


@pytest.mark.full
def test_a_real_engines_kernels_find_their_operators(reference: Path) -> None:
    """The recorded vLLM run: 12 layers of 768, of which a trace of a CPU knows the shapes and no modules."""
    capture = read_capture(reference / "profiler" / "vllm_cpu_kineto.json.gz")
    steps = measured_steps(capture, shard())
    assert len(steps) == 21
    for step in steps:
        num_kernels = Counter(rows_of_kernels(capture, step.step, step.launches))
        numbers = {name: num_kernels[name] for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}
        assert set(numbers.values()) == {12}
        assert num_kernels["lm_head"] == 1
        assert num_kernels["attention"] == 12
        # Rotation and cache write, and the six views that make their inputs.
        assert num_kernels["rope and cache"] == 12 * 8
        assert step.unmatched_fraction < 0.02
        assert sum(step.seconds.values()) + step.between_s == pytest.approx(step.step.host_s)
    # Weights are read whole in every decode step: the time of a product goes with its size.
    decode = steps[2].seconds
    assert decode["gate_up_proj"] / decode["o_proj"] == pytest.approx(4096 / 768, rel=0.2)


@pytest.mark.full
def test_tables_of_a_real_trace_are_read_back(reference: Path, tmp_path: Path) -> None:
    capture = read_capture(reference / "profiler" / "vllm_cpu_kineto.json.gz")
    steps = measured_steps(capture, shard())
    tables = measurement_tables(steps, "cpu, vllm 0.32")
    paths = write_profile(tmp_path / "profiles", tables, {"profiler": capture.tool})
    assert all(path.is_file() for path in paths)
    (gemm,) = read_tables(tmp_path / "profiles" / "gemm.parquet")
    assert len(gemm) == 21 * 5
    sites = {tuple(map(int, key)) for key in gemm.rows_by_site}
    assert sites == {(1280, 768), (768, 768), (4096, 768), (768, 2048), (16384, 768)}
    # Steps that mix prompts and decoding have no row of their own for either kind of attention.
    (decode,) = read_tables(tmp_path / "profiles" / "decode_attention.parquet")
    assert len(decode) == sum(not step.step.batch.prefill_tokens for step in steps)
    seconds = gemm.seconds[(gemm.sites["n"] == 4096) & (gemm.axes["m"] == 4)]
    expected = [step.seconds["gate_up_proj"] / 12 for step in steps if step.step.batch.num_tokens == 4]
    assert seconds == pytest.approx(expected)


def test_a_capture_without_named_steps_says_what_to_do() -> None:
    capture, _ = capture_of([("nvjet", "")])
    assert captured_steps(capture) == []
    with pytest.raises(InputError, match="no step of the capture can be told") as caught:
        measured_steps(capture, shard())
    assert "windtunnel lab run" in str(caught.value.hint)


@pytest.mark.parametrize(
    "name",
    [
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",  # Mamba-2, experts at a latent width
        "moonshotai/Kimi-K3",
        "deepseek-ai/DeepSeek-V4-Flash",
        "MiniMaxAI/MiniMax-M3",
        "stepfun-ai/Step-3.7-Flash",
        "Alibaba-NLP/gte-modernbert-base",
    ],
)
def test_every_launch_has_a_row(name: str) -> None:
    spec = catalog.model(name)
    batch = StepBatch(
        decode_requests=2, decode_context_tokens=100.0, prefill_tokens=64, prefill_pairs=2048.0, sampled=2
    )
    launches = forward_launches(Shard(spec, spec.precision, Parallelism(tp=2)), batch)
    assert "other" not in {row_of_launch(launch.name) for launch in launches}


@pytest.mark.parametrize(
    ("launch", "row"),
    [
        ("conv_in_proj", "qkv_proj"),
        ("short_convolution_decode", "attention"),
        ("conv_output_gate", "attention"),
        ("conv_out_proj", "o_proj"),
        ("mamba_scan_prefill", "attention"),
        ("mamba_x_proj", "qkv_proj"),
        ("lightning_attention_decode", "attention"),
        ("qkv_activation", "attention"),
        ("activation", "activation"),
        ("shared_activation", "experts"),
        ("layer_input_gate", "norms"),
    ],
)
def test_recurrences_and_convolutions_count_as_attention(launch: str, row: str) -> None:
    assert row_of_launch(launch) == row
