"""vLLM's command line: data parallelism, drafts and formats."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.exchange import MEGA_MOE
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.deployment import Deployment, EngineSettings
from windtunnel.serving.engines.command_line import CommandLine, Reading, shares
from windtunnel.serving.engines.workloads import GENERATE, lora_options, read_task
from windtunnel.units import GIB

DRAFTS = "speculative-config"
"""The option that holds JSON, or a field of it in each of `speculative-config.method`, ..."""
MOE_BACKENDS = {"triton": "triton", "deepgemm": "deep_gemm", "trtllm": "flashinfer_trtllm", "marlin": "marlin"}
"""Kernels of experts -> vLLM's word; `cutlass` is two of its backends."""
METHODS = {name: name for name in ("ngram", "mtp", "eagle", "draft_model")} | {"eagle3": "eagle", "None": "draft_model"}
"""Word for a method of drafting -> ours; `deepseek_mtp` and the like are `mtp`."""
GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "none": {"max_cudagraph_capture_size": 0},
    "pieces": {"piecewise_cudagraphs": True, "full_cudagraphs": False},
    "decode_only": {"piecewise_cudagraphs": False, "full_cudagraphs": True},
    "with_pieces": {"piecewise_cudagraphs": True, "full_cudagraphs": True},
}
"""What CUDA graphs hold (`CUDAGraphMode`, vllm/config/compilation.py) -> our settings."""


def read(reading: Reading) -> None:
    """Set the split, whose data parallelism shares the experts of a model that has some, and the drafts.

    The requests that may run are those that are admitted, though buffers and graphs are for `max_num_seqs`.
    """
    dp = reading.later.get("data_parallel", 1)
    reading.split(reading.later.get("tp", 1), dp, is_attention=dp > 1 and reading.has_experts)
    reading.set_moe_backend()
    if "active_seqs" in reading.later:
        reading.set_engine(max_num_seqs=reading.later["active_seqs"])
    if graphs := reading.later.get("graph_sizes"):
        largest = {"max_cudagraph_capture_size": graphs[0]}
        reading.set_engine(**(largest if len(graphs) == 1 else {"cudagraph_sizes": graphs}))
    reading.set_engine(**GRAPHS.get(reading.later.get("graph_mode", ""), {}))
    if size := reading.later.get("kv_offloading"):
        reading.set_engine(kv_tiers=[{"capacity_bytes": round(size * GIB)}])
    if "kv_transfer" in reading.later:
        _keep_on_host(reading, reading.later["kv_transfer"])
    if "lora" in reading.later:
        reading.set_engine(lora=reading.engine.get("lora") or {})
    if reading.engine.get("num_redundant_experts") and not reading.engine.get("enable_eplb"):
        raise InputError(
            "--from-command: --eplb-config.num_redundant_experts without --enable-eplb, which vLLM refuses",
            "add --enable-eplb, or leave the redundant experts out",
        )
    read_task(reading)
    if "speculative" in reading.later:
        _speculate(reading, reading.later["speculative"])


def _keep_on_host(reading: Reading, config: dict[str, Any]) -> None:
    """Set `OffloadingConnector`'s KV cache in host memory: bytes of all workers (0.14 `v1/kv_offload/cpu/spec.py`)."""
    extra = config.get("kv_connector_extra_config")
    size = extra.get("cpu_bytes_to_use") if isinstance(extra, dict) and "secondary_tiers" not in extra else None
    if config.get("kv_connector") == "OffloadingConnector" and isinstance(size, int):
        reading.set_engine(kv_tiers=[{"capacity_bytes": size}])
    else:
        keeps = "OffloadingConnector" in json.dumps(config)
        reading.not_modelled.append("--kv-transfer-config" + " (KV cache in host memory)" * keeps)


def _speculate(reading: Reading, config: dict[str, Any]) -> None:
    """Set speculative decoding from vLLM's JSON, which may hold our `acceptance_fraction` too."""
    word, draft_model = str(config.get("method")), config.get("model")
    method = METHODS.get("mtp" if word.endswith("_mtp") else word, "draft_model" if draft_model else None)
    try:
        num_drafts = int(config.get("num_speculative_tokens", 1))
        if "acceptance_fraction" in config:
            reading.later["acceptance_fraction"] = shares(config["acceptance_fraction"])
    except (OverflowError, TypeError, ValueError):
        raise InputError(
            f"--from-command: --{DRAFTS} has no numbers as num_speculative_tokens and acceptance_fraction",
            '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1, "acceptance_fraction": 0.7}\'',
        ) from None
    if method == "draft_model" and not draft_model:
        method = None
    reading.set_drafts(word, method, num_drafts, draft_model)


def write_split(split: Parallelism) -> dict[str, Any]:
    """Return the parallelism; experts are spread over all ranks or none."""
    degrees = {"[tp]": split.tp}
    if split.attention_dp > 1:
        degrees["[data_parallel]"] = split.attention_dp
    if split.ep > 1:
        degrees["[expert_parallel]"] = True
    if split.pp > 1:
        degrees["parallelism.pp"] = split.pp
    if split.dcp > 1:
        degrees["parallelism.dcp"] = split.dcp
    return degrees


def write_rest(engine: EngineSettings, weights: str | None, kv_cache: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the formats, and the drafts without their acceptance, for which there is no option."""
    if engine.all2all_backend == MEGA_MOE:
        yield "moe-backend", "deep_gemm_mega_moe"
    elif engine.moe_backend in MOE_BACKENDS:
        yield "moe-backend", MOE_BACKENDS[engine.moe_backend]
    if weights == "fp8":
        yield "quantization", "fp8"
    if kv_cache == "fp8":
        yield "kv-cache-dtype", "fp8"
    if (drafts := engine.speculative) is not None and drafts.method != "eagle":
        config: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.num_draft_tokens}
        if drafts.draft_model:
            config["model"] = catalog.model(drafts.draft_model).name
        yield DRAFTS, json.dumps(config)
    for tier in engine.kv_tiers or ():
        if tier.capacity_bytes and tier.name == "host":
            yield "kv-offloading-size", f"{tier.capacity_bytes / GIB:g}"
    if engine.num_redundant_experts and not engine.enable_eplb:  # without it the copies get no work by load
        yield "enable-eplb", None
    yield from lora_options(engine, "max-loras", "max-cpu-loras")
    if engine.lora is not None and engine.lora.fully_sharded:
        yield "fully-sharded-loras", None


def write_task(task: str, is_encoder: bool) -> Iterator[tuple[str, Any]]:
    """Yield the runner of embeddings and scores, and for scores the conversion; encoders have theirs."""
    if task != GENERATE:
        yield "runner", "pooling"
        if task == "rerank" and not is_encoder:
            yield "convert", "classify"


def remaining_work(deployment: Deployment) -> Iterator[str]:
    """Yield what the command cannot say: experts spread over some of the ranks."""
    split = deployment.parallelism
    ranks = split.tp * split.attention_dp
    if split.ep not in (1, ranks):
        yield f"vLLM spreads experts over all {ranks} ranks or none: the command does not have ep = {split.ep}"


COMMAND_LINE = CommandLine(
    read=read,
    write_split=write_split,
    write_rest=write_rest,
    write_task=write_task,
    writes_drafts=lambda drafts: drafts.method != "eagle",  # whose head the scenario does not name
    remaining_work=remaining_work,
)
