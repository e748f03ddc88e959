import csv
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.launches.forward import prefill_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token, loaded_bytes, state_bytes_per_request, weight_bytes
from windtunnel.model.operators import Gemm
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import BITS, Format, Precision
from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.defaults import for_architecture, with_defaults
from windtunnel.serving.setup.memory import (
    MemoryPlan,
    activations,
    group_layers,
    plan_memory,
    profiled_memory,
    sampler_bytes,
)

LLAMA, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
MIXTRAL, QWEN_MOE = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
DEEPSEEK, NEXT = "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct"
MISTRAL, GPT_OSS = "mistralai/Mistral-7B-v0.1", "openai/gpt-oss-20b"
H100, H200 = catalog.device("h100_sxm"), catalog.device("h200_sxm")
KIB, GIB = 2**10, 2**30
DEFAULTS = with_defaults(EngineSettings(), H200)


def shard(name: str, precision: Precision | None = None, **parallelism: Any) -> Shard:
    model = catalog.model(name)
    return Shard(model, precision or model.precision, Parallelism(**parallelism))


def plan(part: Shard, max_model_len: int = 8192, engine: str = "vllm", **given_settings: object) -> MemoryPlan:
    resolved = with_defaults(EngineSettings(name=engine, **given_settings), H100)  # type: ignore[arg-type]
    return plan_memory(part, H100, resolved, max_model_len)


# Weights


def test_layers_in_several_formats_weigh_what_each_does() -> None:
    """As unsloth/Qwen3.8-27B-NVFP4: the feed-forwards of some layers have 8 bits, those of most NVFP4."""
    eight = {"num_bits": 8, "type": "float", "strategy": "channel"}
    four = {"num_bits": 4, "type": "float", "group_size": 16}
    groups = [
        {"targets": ["re:.*self_attn.*", "re:.*layers.[0-7].mlp.*"], "weights": eight, "input_activations": eight},
        {"targets": ["Linear"], "weights": four, "input_activations": four},
    ]
    quantised = {"quant_method": "compressed-tensors", "config_groups": dict(zip("ab", groups, strict=True))}
    config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096}
    model = model_from_config(config | {"quantization_config": quantised}, "mixed")
    attention, feed_forward = 1024 * (8 + 2 * 2 + 8) * 128, 3 * 1024 * 4096
    expected = 32 * attention + feed_forward * (8 + 24 * 4.5 / 8) + 2 * 2 * 1000 * 1024
    assert model.precision.weights == Format.NVFP4
    assert weight_bytes(Shard(model, model.precision, Parallelism())) == pytest.approx(expected)
    # Served in one format, every layer has it.
    whole = 32 * (attention + feed_forward) + 2 * 2 * 1000 * 1024
    assert weight_bytes(Shard(model, Precision(weights=Format.FP8), Parallelism())) == pytest.approx(whole)


@pytest.mark.parametrize("name", [LLAMA, LLAMA_70B, MIXTRAL, DEEPSEEK, NEXT, GPT_OSS, "google/gemma-2-9b"])
def test_one_device_holds_every_parameter(name: str) -> None:
    count = count_parameters(catalog.model(name))
    assert weight_bytes(shard(name, Precision())) == pytest.approx(2 * (count.total - count.norms), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        # "total_size" in each checkpoint's model.safetensors.index.json on huggingface.co.
        (LLAMA_70B, 141.107),
        (LLAMA, 16.061),
        (MIXTRAL, 93.406),
        (QWEN_MOE, 61.065),
    ],
)
def test_weights_equal_the_published_files(name: str, gigabytes: float) -> None:
    assert weight_bytes(shard(name)) / 1e9 == pytest.approx(gigabytes, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "parallelism"),
    [
        (LLAMA, {"tp": 1}),
        (LLAMA, {"tp": 16}),
        (MIXTRAL, {"tp": 8}),
        (QWEN_MOE, {"tp": 8, "ep": 8}),
        (QWEN_MOE, {"tp": 2, "attention_dp": 4, "ep": 4}),
        (DEEPSEEK, {"tp": 8}),
        (DEEPSEEK, {"attention_dp": 8, "ep": 8}),
        (NEXT, {"tp": 4}),
    ],
)
def test_memory_holds_what_the_step_reads(name: str, parallelism: dict[str, Any]) -> None:
    """With so many tokens that every expert is used, the operators' weights are the planner's."""
    part = shard(name, **parallelism)
    read = 0.0
    for launch in [*token_launches(part, 1e6), *prefill_launches(part, 1, 1e6)]:
        op = launch.op
        if isinstance(op, Gemm):
            read += launch.count * op.n * op.k * BITS[op.format] / 8
        elif isinstance(op, Experts):
            values = op.num_experts / op.ep * 3 * op.hidden_size * op.intermediate_size / op.tp
            read += launch.count * values * BITS[op.format] / 8
    tables = (1 if part.model.tie_word_embeddings else 2) * part.model.vocab_size * part.model.hidden_size * 2 / part.tp
    assert weight_bytes(part) == pytest.approx(read + tables, rel=2e-3)


def test_formats_and_stages_shrink_the_weights() -> None:
    bf16 = weight_bytes(shard(LLAMA_70B))
    tables = 2 * 128256 * 8192 * 2
    assert weight_bytes(shard(LLAMA_70B, Precision(weights=Format.FP8))) == pytest.approx((bf16 + tables) / 2)
    assert weight_bytes(shard(LLAMA_70B, Precision(weights=Format.NVFP4))) == pytest.approx(
        (bf16 - tables) * 4.5 / 16 + tables
    )
    assert weight_bytes(shard(LLAMA_70B, pp=2)) == pytest.approx(bf16 / 2)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("deepseek-ai/DeepSeek-V3", 61 * 128 * 128 * 7168),
        ("deepseek-ai/DeepSeek-V3.2", 61 * 128 * 128 * 7168),
        ("meta-llama/Llama-3.1-8B", 32 * 4096 * 4096),
    ],
)
def test_output_projections_in_a_format_of_their_own_shrink_and_no_others(name: str, output: int) -> None:
    whole, mixed = Precision(), Precision(attention_output=Format.NVFP4)
    saved = output * (BITS[Format.BF16] - BITS[Format.NVFP4]) / 8
    assert weight_bytes(shard(name, whole)) - weight_bytes(shard(name, mixed)) == pytest.approx(saved)
    assert weight_bytes(shard(name, whole, tp=8)) - weight_bytes(shard(name, mixed, tp=8)) == pytest.approx(saved / 8)
    launches = token_launches(shard(name, mixed), 1.0)
    formats = {one.name: one.op.format for one in launches if isinstance(one.op, Gemm) and "proj" in one.name}
    assert formats.pop("o_proj") == Format.NVFP4
    assert set(formats.values()) == {Format.BF16}


def test_every_rank_keeps_the_down_projections_of_latent_attention() -> None:
    """vLLM `deepseek_v2.py`, `fused_qkv_a_proj`: replicated."""
    ranks, alone = weight_bytes(shard(DEEPSEEK, Precision(), tp=8)), weight_bytes(shard(DEEPSEEK, Precision()))
    down = 7168 * (1536 + 512 + 64) * 61 * 2
    router = (7168 * 256 + 256) * 58 * 2
    assert ranks * 8 == pytest.approx(alone + 7 * (down + router))


# KV cache


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        (LLAMA_70B, Precision(), 320 * KIB),  # 2 x 80 layers x 8 heads x 128 x 2 bytes
        (LLAMA, Precision(), 128 * KIB),
        (LLAMA, Precision(kv_cache=Format.FP8), 64 * KIB),
        ("meta-llama/Llama-2-7b-hf", Precision(), 512 * KIB),
        (DEEPSEEK, Precision(), 70_272),  # arXiv:2412.19437 and arXiv:2505.09343, table 1: 70.272 KB
        ("meta-llama/Llama-3.1-405B", Precision(), 516_096),  # arXiv:2505.09343, table 1: 516.096 KB
        ("Qwen/Qwen2.5-72B", Precision(), 327_680),  # the same table: 327.680 KB
    ],
)
def test_bytes_of_a_token(name: str, precision: Precision, expected: float) -> None:
    assert kv_bytes_per_token(shard(name, precision), 8192) == expected


def test_key_value_heads_are_shared_down_to_one_and_latent_vectors_never() -> None:
    assert [kv_bytes_per_token(shard(LLAMA, tp=tp), 99) / KIB for tp in (1, 2, 8, 16)] == [128, 64, 16, 16]
    assert kv_bytes_per_token(shard(DEEPSEEK, tp=8), 99) == kv_bytes_per_token(shard(DEEPSEEK), 99)
    assert kv_bytes_per_token(shard(LLAMA, pp=4), 99) == 32 * KIB


def test_windows_bound_a_request_only_where_it_outgrows_them() -> None:
    """Mistral-7B attends to 4,096 tokens in each of its 32 layers, 4 KiB a token and layer."""
    part = shard(MISTRAL)
    assert (kv_bytes_per_token(part, 4096), state_bytes_per_request(part, 4096)) == (128 * KIB, 0)
    assert (kv_bytes_per_token(part, 4097), state_bytes_per_request(part, 4097)) == (0, 4096 * 128 * KIB)
    mixed = shard(GPT_OSS)  # every other layer has a window of 128 tokens
    assert kv_bytes_per_token(mixed, 1024) == 12 * 2 * 8 * 64 * 2
    assert state_bytes_per_request(mixed, 1024) == 128 * 12 * 2 * 8 * 64 * 2


def test_short_requests_fit_a_windowed_model_as_they_fit_another() -> None:
    """v0.3 is v0.1 without its window and with 768 more words."""
    windowed, plain = plan(shard(MISTRAL), 2048), plan(shard("mistralai/Mistral-7B-v0.3"), 2048)
    assert windowed.kv_tokens == pytest.approx(plain.kv_tokens, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "groups", "windows", "layers"),
    [
        # vllm/v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size: layers of a block, groups.
        (MISTRAL, 1, 1, 32),  # 32 layers of one kind
        (GPT_OSS, 2, 1, 12),  # 12 and 12
        ("google/gemma-2-9b", 2, 1, 21),
        ("google/gemma-3-27b-it", 7, 6, 10),  # 10 full, 52 with a window: six groups of ten, the last padded
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 4, 3, 12),
    ],
)
def test_vllm_groups_layers_so_that_all_blocks_are_equal(name: str, groups: int, windows: int, layers: int) -> None:
    part = shard(name, Precision(kv_cache=Format.FP8), tp=4)
    planned = group_layers(part, with_defaults(EngineSettings(), H100), 32768)
    attention = part.model.layers[0].attention
    assert isinstance(attention, GroupedQueryAttention)
    assert (planned.num_groups, planned.num_window_groups) == (groups, windows)
    assert planned.block_bytes_per_token == layers * 2 * max(attention.num_kv_heads // 4, 1) * attention.head_dim
    assert planned.window_tokens == {MISTRAL: 4096, GPT_OSS: 128}.get(name, planned.window_tokens)


def test_vllm_kept_every_token_before_its_hybrid_manager() -> None:
    old, new = plan(shard(GPT_OSS), version="0.9.0"), plan(shard(GPT_OSS), version="0.9.1")
    assert (old.window_tokens, new.window_tokens) == (0, 128)
    assert old.kv_bytes_per_token == 2 * new.kv_bytes_per_token == 24 * 2 * 8 * 64 * 2
    # As many tokens if no window has passed any; with windows of 128 tokens nearly twice as many of long requests.
    assert old.kv_tokens == pytest.approx(new.kv_tokens, rel=1e-4)
    assert old.num_blocks / old.most_blocks(8192, 1)[0] < 0.52 * new.num_blocks / new.most_blocks(8192, 1)[0]


def test_sglang_gives_windows_a_pool_of_their_own() -> None:
    """model_runner.py, `set_num_token_hybrid`: 0.8 tokens there for each of the other layers'."""
    sglang_settings = for_architecture(
        EngineSettings(name="sglang"), with_defaults(EngineSettings(name="sglang"), H100), "gpt_oss"
    )
    planned = plan_memory(shard(GPT_OSS), H100, sglang_settings, 8192)
    assert planned.num_window_blocks == int(0.8 * planned.num_blocks)
    assert planned.kv_cache_bytes == (planned.num_blocks + planned.num_window_blocks) * 12 * 2 * 8 * 64 * 2
    assert planned.most_blocks(4000, 1) == (4000, 129)
    assert for_architecture(EngineSettings(name="sglang"), sglang_settings, "gemma2").window_kv == "full"


def test_tensorrt_llm_divides_memory_by_window_and_bytes() -> None:
    planned = plan(shard(GPT_OSS), engine="trtllm", window_kv="own_pool")
    assert planned.num_window_blocks == int(planned.num_blocks * 128 / 8192)
    assert plan(shard(GPT_OSS), engine="trtllm").window_tokens == 0


@given(st.integers(1, 500), st.integers(1, 400), st.sampled_from([1, 4, 16]), st.integers(1, 100), st.integers(1, 60))
def test_no_request_ever_holds_more_than_its_most(
    prompt: int, output: int, block_size: int, window: int, step: int
) -> None:
    """Blocks of a window group, step by step: what the new tokens need from the first block that is still seen on."""
    memory = MemoryPlan(0, 0, 0, 0, 0, 0, 0, block_size, 10**6, 0, window, 1, 1)
    computed, largest = 0, 0
    while computed < prompt + output:
        chunk = min(step, prompt - computed) if computed < prompt else 1
        first_seen = max(computed - window + 1, 0) // block_size
        computed += chunk
        largest = max(largest, -(-computed // block_size) - first_seen)
    assert largest <= memory.most_blocks(prompt + output, step)[0]


def test_linear_attention_keeps_a_state() -> None:
    """Qwen3-Next: 32 value heads of 128 x 128 in fp32, and three columns of the convolution, in 36 layers."""
    state = 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert state_bytes_per_request(shard(NEXT), 8192) == state
    assert state_bytes_per_request(shard(NEXT, tp=4), 8192) == state / 4
    planned = plan(shard(NEXT, tp=4))
    assert planned.blocks_per_request == -(-state // 4 // (planned.kv_bytes_per_token * planned.block_size))


# The plan


def test_vllms_share_holds_everything() -> None:
    """vLLM `gpu_worker.py`, `determine_available_memory`: less weights, activations and what is not torch's."""
    planned = plan(shard(LLAMA), gpu_memory_utilization=0.8, reserved_bytes=GIB)
    assert planned.activation_bytes > 0
    left = 0.8 * planned.usable_bytes - planned.weight_bytes - planned.activation_bytes - GIB - planned.graph_bytes
    assert 0 <= left - planned.kv_cache_bytes < 16 * 128 * KIB
    assert planned.kv_tokens == planned.num_blocks * 16


def test_sglangs_static_share_leaves_activations_out() -> None:
    """SGLang model_runner.py, `profile_max_num_token`: the share is of what is free before the weights."""
    planned = plan(shard(LLAMA), engine="sglang", gpu_memory_utilization=0.8, reserved_bytes=GIB)
    left = 0.8 * (planned.usable_bytes - GIB) - planned.weight_bytes
    assert planned.kv_cache_bytes == pytest.approx(left, rel=1e-5)


def test_tensorrt_llms_share_is_of_what_is_free() -> None:
    planned = plan(shard(LLAMA), engine="trtllm", gpu_memory_utilization=0.8, reserved_bytes=0)
    free = planned.usable_bytes - planned.weight_bytes - planned.activation_bytes
    assert planned.kv_cache_bytes == pytest.approx(0.8 * free, rel=1e-3)


@pytest.mark.parametrize("name", [LLAMA, QWEN_MOE, MISTRAL, GPT_OSS, NEXT])
@settings(max_examples=30)
@given(data=st.data())
def test_more_memory_or_more_devices_never_hold_less(name: str, data: st.DataObject) -> None:
    max_model_len = data.draw(st.integers(1, 32768))
    less, more = sorted(data.draw(st.tuples(st.floats(78, 200), st.floats(78, 200))))
    tp = data.draw(st.sampled_from([4, 8]))
    sharded = {ways: shard(name, tp=ways) for ways in (4, 8)}
    held = []
    for gib, ways in ((less, 4), (more, 4), (more, tp)):
        device = msgspec.structs.replace(H200, memory_bytes=int(gib * GIB), usable_bytes=None)
        held.append(plan_memory(sharded[ways], device, DEFAULTS, max_model_len))
    assert held[0].kv_cache_bytes <= held[1].kv_cache_bytes
    assert held[0].num_blocks <= held[1].num_blocks
    assert held[1].num_blocks * (1 - 1e-3) <= held[2].num_blocks * (1 + held[1].blocks_per_request)
    for part in held:
        complete = part.weight_bytes + part.activation_bytes + part.reserved_bytes + part.kv_cache_bytes
        assert complete <= part.device_bytes


def test_what_does_not_fit_is_one_sentence() -> None:
    with pytest.raises(InputError) as caught:
        plan(shard(LLAMA_70B))
    assert caught.value.message.startswith(
        "meta-llama/Llama-3.1-70B in bf16 over tp = 1, pp = 1 does not fit NVIDIA H100"
    )
    assert "weights 131 GiB" in caught.value.message
    assert caught.value.hint == "use more devices (tp x pp of 2 or more for the weights alone) or a smaller format"
    assert plan(shard(LLAMA_70B, tp=4)).num_blocks > 1000


def test_a_share_that_is_too_small_is_named() -> None:
    with pytest.raises(InputError, match=r"of which gpu_memory_utilization is 0\.2") as caught:
        plan(shard(LLAMA), gpu_memory_utilization=0.2)
    assert str(caught.value.hint).startswith("set a larger gpu_memory_utilization")


def test_given_blocks_do_not_make_weights_fit() -> None:
    assert plan(shard(LLAMA), num_gpu_blocks=1000).num_blocks == 1000
    with pytest.raises(InputError, match="does not fit"):
        plan(shard(LLAMA_70B), num_gpu_blocks=1000)


def test_a_cap_on_tokens_makes_the_cache_smaller_and_never_larger() -> None:
    whole = plan(shard(LLAMA))
    assert plan(shard(LLAMA), max_kv_tokens=10**9) == whole
    capped = plan(shard(LLAMA), max_kv_tokens=10_000)
    assert (capped.kv_tokens, capped.weight_bytes) == (10_000, whole.weight_bytes)
    # Layers with a window keep a tenth of the tokens, so that the others keep more than the cap.
    windows = plan(shard(GPT_OSS), window_kv="own_pool", window_pool_ratio=0.1, max_kv_tokens=11_000, block_size=1)
    assert (windows.num_blocks, windows.num_window_blocks) == (20_000, 2_000)
    # Recurrent states have memory of their own.
    states = plan(shard(NEXT, tp=4), max_kv_tokens=10_000, max_num_seqs=8)
    of_states = 8 * states.state_bytes_per_request / states.kv_bytes_per_token
    assert states.kv_tokens == pytest.approx(10_000 + of_states, abs=states.block_size)


def test_activations_grow_with_the_widest_layer() -> None:
    settings = with_defaults(EngineSettings(max_num_seqs=1), H100)
    part = activations(shard(LLAMA), H100, settings, 8192)
    assert part.forward_bytes == 8192 * 2 * (3 * 14336 + 4 * 4096)
    assert part.peak_bytes == part.forward_bytes + 32 * 2**20  # and cuBLAS's workspace
    assert activations(shard(LLAMA, tp=8), H100, settings, 8192).forward_bytes < part.forward_bytes


@pytest.mark.parametrize(
    ("version", "bytes_per_logit", "rows"),
    [
        ("0.16.0", 2 + 4 + 12 + 8 + 12, 0),  # sorted with torch.sort
        ("0.17.0", 2 + 4 + 4 + 4, 132),  # masked in place by a Triton kernel, a row for each of 132 multiprocessors
        ("0.23.0", 2 + 4 + 4 + 4, 0),  # FlashInfer
    ],
)
def test_vllm_samples_dummy_requests_with_the_sampler_of_its_version(
    version: str, bytes_per_logit: int, rows: int
) -> None:
    part = shard(LLAMA)
    for num_seqs in (256, 1024):
        settings = with_defaults(EngineSettings(version=version, max_num_seqs=num_seqs), H100)
        hidden = (8192 + 2 * num_seqs) * 4096 * 2
        expected = num_seqs * 128256 * bytes_per_logit + rows * 128256 * 4 + hidden
        assert sampler_bytes(part, H100, settings, 8192) == expected
        # Every rank has gathered the whole vocabulary.
        assert sampler_bytes(shard(LLAMA, tp=4), H100, settings, 8192) == expected


def test_tensorrt_llm_samples_the_prompts_of_its_profiling_run() -> None:
    settings = with_defaults(EngineSettings(name="trtllm"), H100)
    rows = sampler_bytes(shard(LLAMA), H100, settings, 1024) - sampler_bytes(shard(LLAMA), H100, settings, 8192)
    assert rows == 7 * (128256 * (2 + 8) + 2 * 4096 * 2)


def test_experts_keep_their_workspace_from_vllm_0_13_on() -> None:
    """Qwen3-30B-A3B: two buffers of 8,192 tokens for 8 experts, 2,048 wide; with experts of four bits none."""
    part, kept = shard(QWEN_MOE), {}
    for version in ("0.12.0", "0.13.0"):
        settings = with_defaults(EngineSettings(version=version), H100)
        kept[version] = activations(part, H100, settings, 8192).kept_bytes
    assert kept["0.13.0"] - kept["0.12.0"] == 2 * 8192 * 8 * 2048 * 2
    settings = with_defaults(EngineSettings(version="0.13.0"), H100)
    assert activations(shard(GPT_OSS), H100, settings, 8192).kept_bytes == kept["0.12.0"]


def test_only_the_last_pipeline_stage_samples() -> None:
    settings = with_defaults(EngineSettings(version="0.19.0"), H100, shape=Parallelism(pp=2))
    part = shard(LLAMA, pp=2)
    first = profiled_memory(part, H100, settings, 8192, last_stage=False)
    last = plan_memory(part, H100, settings, 8192)
    assert first.sampler_bytes == 0 < last.sampler_bytes
    assert first.activation_bytes < last.activation_bytes
    assert first.reserved_bytes == last.reserved_bytes == 72 * 2**20


def test_memory_outside_pytorch_grows_with_the_ranks() -> None:
    """vLLM 0.19: 0.25 GiB alone, 2.07 over two ranks, 2.13 over four."""
    shapes = [Parallelism(tp=tp) for tp in (1, 2, 4, 8)] + [Parallelism(attention_dp=2)]
    resolved = [with_defaults(EngineSettings(version="0.19.0"), H100, shape=shape) for shape in shapes]
    assert [round((one.reserved_bytes or 0) / GIB, 2) for one in resolved] == [0.25, 2.07, 2.13, 2.13, 2.07]


def test_one_rank_of_vllm_0_10_has_no_communicators_to_count() -> None:
    """vLLM 0.10.2 on one H100 logs 0.07 GiB outside PyTorch."""
    shapes = [Parallelism(), Parallelism(tp=2)]
    resolved = [with_defaults(EngineSettings(version="0.10.2"), H100, shape=shape) for shape in shapes]
    assert [round((one.reserved_bytes or 0) / GIB, 2) for one in resolved] == [0.07, 1.5]


def test_graphs_are_set_aside_from_vllm_0_20_on() -> None:
    """86 graphs by default: 51 sizes to 512 in pieces, 35 of them to 256 requests whole."""
    planned = {
        version: plan(shard(LLAMA), version=version, max_num_seqs=256, gpu_memory_utilization=0.9)
        for version in ("0.19.0", "0.20.0")
    }
    assert planned["0.19.0"].graph_bytes == 0
    assert planned["0.20.0"].graph_bytes == pytest.approx(0.2 * GIB + 86 * 4 * 2**20)
    eager = plan(shard(LLAMA), version="0.20.0", max_cudagraph_capture_size=0)
    assert eager.graph_bytes == 0
    assert plan(shard(LLAMA), version="0.20.0", max_num_seqs=8).graph_bytes < planned["0.20.0"].graph_bytes / 2


def test_an_a100_keeps_the_batch_of_smaller_devices() -> None:
    """vllm/engine/arg_utils.py: 70 GiB and more, "a100" not in the device's name."""
    a100 = with_defaults(EngineSettings(), catalog.device("a100_sxm"))
    assert (a100.max_num_seqs, a100.max_num_batched_tokens) == (256, 2048)


def test_a_loaded_model_has_more_than_its_checkpoint() -> None:
    """Llama 3.1 adds 131,072 rotary positions of 128 values; its tensors fill whole segments."""
    part = shard(LLAMA)
    assert loaded_bytes(part) - weight_bytes(part) == 131072 * 128 * 2
    assert loaded_bytes(shard(LLAMA, Precision(weights=Format.FP32))) == 2 * loaded_bytes(part)
    # Qwen2.5-7B: 31.5 MiB of qkv, 259 of gate and up, 129.5 of down in segments of whole 2 MiB, in 28 layers.
    part = shard("Qwen/Qwen2.5-7B-Instruct")
    padding = 28 * (0.5 + 1 + 0.5) + 2 * 0.5
    assert loaded_bytes(part) - weight_bytes(part) == padding * 2**20 + 32768 * 128 * 2
    # Gemma 3: a table of eight times the positions, one of its windows, and the vision tower.
    gemma = catalog.model("google/gemma-3-12b-it")
    assert gemma.rotary_values == 131072 * 256 * (8 + 1)
    assert gemma.tower_parameters == pytest.approx(421e6, rel=1e-3)  # arXiv:2503.19786: 417 M, and the projector
    # Latent attention keeps its up-projection twice.
    part = shard("deepseek-ai/DeepSeek-V2-Lite")
    twice = 27 * 16 * 512 * (128 + 128) * 2
    assert 0 <= loaded_bytes(part) - weight_bytes(part) - twice - part.model.rotary_values * 2 < 27 * 8 * 2**20


def test_pools_are_as_large_as_vllm_reported(reference: Path) -> None:
    """Llama-3.3-70B in nvfp4 on two and four B200, 16 to 512 sequences: 136.96 to 148.79 GiB within 1%."""
    with (reference / "serving" / "inferencex_multiturn_llama70b_fp4.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if float(row["kv_cache_GiB_per_gpu"] or 0) > 100]
    assert len(rows) == 14
    b200 = catalog.device("b200_sxm")
    for row in rows:
        engine = with_defaults(
            EngineSettings(name="vllm", version="0.15.0", max_num_seqs=int(row["max_num_seqs"])), b200
        )
        model = catalog.model("nvidia/Llama-3.3-70B-Instruct-FP4")
        part = Shard(model, model.precision, Parallelism(tp=int(row["tp"])), 8)
        pool = plan_memory(part, b200, engine, 131072).kv_cache_bytes / GIB
        assert pool == pytest.approx(float(row["kv_cache_GiB_per_gpu"]), rel=0.01)


def test_an_indexer_keeps_a_key_of_every_token_in_fp8() -> None:
    """DeepSeek-V3.2: 61 layers of 576 bf16 values and 128 fp8 ones with an fp32 scale; V3 has only the former."""
    sparse, dense = shard("deepseek-ai/DeepSeek-V3.2", tp=8), shard(DEEPSEEK, tp=8)
    assert kv_bytes_per_token(dense, 4096) == 61 * 576 * 2
    assert kv_bytes_per_token(sparse, 4096) == 61 * (576 * 2 + 128 + 4)


def test_an_indexer_is_whole_on_every_rank() -> None:
    """Its 14.0 M weights a layer in fp8, with a scale for each block of 128 x 128, are not divided by tp."""
    indexer = 61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    more = {
        tp: weight_bytes(shard("deepseek-ai/DeepSeek-V3.2", tp=tp)) - weight_bytes(shard(DEEPSEEK, tp=tp))
        for tp in (1, 8)
    }
    assert more[1] == more[8] == pytest.approx(indexer * (1 + 4 / 128**2))
