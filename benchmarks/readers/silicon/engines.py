"""Read engine settings from a row of measured runs: strings of many tools, each in its own notation.

An engine's own default is left open.
"""

import re

from readers.silicon.rows import Row, image_version
from windtunnel.pricing.choices import MOE_BACKENDS
from windtunnel.serving.deployment import BALANCE_BATCHING_ITERS, BALANCE_TIMEOUT_ITERS, EngineSettings

GENERATED_SLACK_TOKENS = {"vllm": 1500, "sglang": 1500, "trtllm": 1000}
"""Tokens that the generator's budget adds to the prompt. Its first version, of the summer of TensorRT-LLM 1.0.0rc3,
writes 1,500 as all later ones do, below a comment that says "+1000 is for holding the largest isl"; budgets in whole
blocks came later. The runs speak for the comment. With 1,500, two prompts of 1,024 tokens or three of 512 share a step;
what another request's prompt adds, by TPOT of two output lengths, is a step for each prompt of 1,024 (Llama-3.1-8B on
four devices: 11 to 17 ms, as for 2,048 tokens) and half a step for each of 512."""


def recorded_engine(name: str, measured: Row, row: Row, server: Row) -> EngineSettings:
    """Return the settings in a row of measurements, its recovered row, and the row of its configuration.

    Raises:
        InputError: a value that is none; names the row.
    """
    prefill = re.search(r"\d+", server.text("max_prefill_tokens"))
    interval = re.search(r"scheduler-recv-interval (\d+)", row.text("scheduler"))
    wait_steps = re.search(r"batch_wait_timeout_iters (\d+)", row.text("scheduler"))
    conservativeness = re.search(r"schedule-conservativeness ([\d.]+)", row.text("scheduler"))
    wait_ratio = re.search(r"batch_wait_max_tokens_ratio ([\d.]+)", row.text("scheduler"))
    return EngineSettings(
        name=name,
        version=image_version(server.text("engine_image")) or image_version(measured.text("backend_version")),
        max_num_seqs=row.count_or_none("max_num_seqs"),
        max_num_batched_tokens=row.count_or_none("max_batched_tokens"),
        max_prefill_tokens=int(prefill[0]) if prefill else None,
        max_cudagraph_capture_size=row.graph_limit("cuda_graph_max_bs"),
        cudagraph_padding=True if "padding on" in server.text("cuda_graph") else None,
        piecewise_cudagraphs=_piecewise_cudagraphs(server),
        full_cudagraphs=_full_cudagraphs(server),
        piecewise_sizes=_piecewise_sizes(name, row, server),
        block_size=server.count_or_none("block_size"),
        gpu_memory_utilization=server.share("gpu_mem_util_or_mem_fraction_static_or_kv_free_fraction"),
        schedule_conservativeness=float(conservativeness[1]) if conservativeness else None,
        receive_interval_steps=int(interval[1]) if interval else None,
        async_scheduling=_switch(server.text("async_or_overlap_scheduling")),
        batch_wait_timeout_iters=int(wait_steps[1]) if wait_steps else None,
        batch_wait_max_tokens_ratio=float(wait_ratio[1]) if wait_ratio else None,
        attention_dp_timeout_iters=_balance(server, "timeout_iters", BALANCE_TIMEOUT_ITERS),
        attention_dp_batching_wait_iters=_balance(server, "batching_wait_iters", BALANCE_BATCHING_ITERS),
        moe_backend=_moe_backend(server),
        fused_all_reduce=_fused_all_reduce(server),
        tf32=_tf32(server),
    )


def _switch(text: str) -> bool | None:
    """Read `on (default)`, `async-scheduling on`, `off`; None where the engine's own default was in force."""
    switch = re.match(r"(?:async-scheduling )?(on|off)\b", text)
    return switch[1] == "on" if switch else None


def _moe_backend(server: Row) -> str | None:
    """Return the family of kernels that a flag or variable named: `flashinfer_trtllm`, `Marlin (VLLM_...)`, `DEEPGEMM`.

    In `FlashInfer FP8 MoE off, DeepGEMM MoE off (Triton)` the parts that are off do not count. None: the engine chose.
    """
    text = re.sub(r"\w+( \w+)* off\b", "", server.text("moe_backend").lower())
    return next((name for name in MOE_BACKENDS if name in text), None)


def _balance(server: Row, name: str, default: int) -> int | None:
    """Read `batching_wait_iters 0, enable_balance true, timeout_iters 60`; None where balancing is off."""
    text = server.text("attention_dp_config")
    steps = re.search(rf"{name} (\d+)", text)
    return (int(steps[1]) if steps else default) if "enable_balance true" in text else None


def _piecewise_cudagraphs(server: Row) -> bool | None:
    """Read `FULL_AND_PIECEWISE`, `FULL_DECODE_ONLY`, `padding on; piecewise off`; None: the engine's default."""
    text = server.text("cuda_graph")
    switch = re.search(r"\bpiecewise (on|off)\b", text)
    if switch:
        return switch[1] == "on"
    return True if "PIECEWISE" in text else False if "FULL_DECODE_ONLY" in text else None


def _full_cudagraphs(server: Row) -> bool | None:
    """Read `FULL_AND_PIECEWISE`, `FULL_DECODE_ONLY` or `PIECEWISE`; None: the engine's default."""
    mode = re.search(r"\b(FULL_|PIECEWISE\b)", server.text("cuda_graph"))
    return mode and mode[1] == "FULL_"


def _piecewise_sizes(name: str, row: Row, server: Row) -> tuple[int, ...] | None:
    """Return the tokens that TensorRT-LLM's recipes capture where they ask for piecewise graphs: up to a whole step.

    Source: InferenceX `benchmarks/dsr1_fp4_b200_trt_mtp.sh`.
    """
    most = row.count_or_none("max_batched_tokens")
    return (most,) if name == "trtllm" and most and _piecewise_cudagraphs(server) else None


def _fused_all_reduce(server: Row) -> bool | None:
    """Read `all-reduce fusion on`, `fuse_allreduce_rms`, `all-reduce fusion off`; None: the engine's default."""
    fusion = re.search(r"all-reduce fusion (on|off)|fuse_allreduce_rms", server.text("gemm_and_allreduce_fusion"))
    return fusion and fusion[1] != "off"


def _tf32(server: Row) -> bool | None:
    """Read `VLLM_FLOAT32_MATMUL_PRECISION=high`; None: PyTorch's default, which is off."""
    return True if "FLOAT32_MATMUL_PRECISION=high" in server.text("gemm_and_allreduce_fusion") else None


def default_engine(name: str, measured: Row) -> EngineSettings:
    """Return an engine of which only the version was recorded."""
    return EngineSettings(name=name, version=measured.text("backend_version") or None)


def generated_engine(name: str, measured: Row, concurrency: int) -> EngineSettings:
    """Return the settings that AIConfigurator's generator writes for a server whose batch is the client's concurrency.

    Source: aiconfigurator 0.12 `generator/rule_plugin/{trtllm,vllm,sglang}.rule` and
    `generator/config/backend_templates/trtllm/extra_engine_args.1.0.0rc3.yaml.j2`; its client in
    `backend_templates/benchmark/bench_run.sh.j2` and `deployment_config.yaml`: lengths without deviation.
    """
    longest, of_trtllm = measured.count("isl") + GENERATED_SLACK_TOKENS[name], name == "trtllm"
    return EngineSettings(
        name=name,
        version=measured.text("backend_version") or None,
        max_num_seqs=concurrency,
        max_num_batched_tokens=None if name == "sglang" else concurrency + longest,
        max_prefill_tokens=longest if name == "sglang" else None,
        max_cudagraph_capture_size=concurrency,
        cudagraph_sizes=tuple(range(1, concurrency + 1)),
        gpu_memory_utilization=0.8 if of_trtllm else None,
        enable_prefix_caching=False if of_trtllm else None,
    )
