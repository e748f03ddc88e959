"""SGLang's command line: attention data parallelism, chunks, drafts and formats."""

from collections.abc import Iterator
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.exchange import ALL_GATHER, DEEPEP, MEGA_MOE, NVLINK_ONE_SIDED
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.deployment import EngineSettings, Speculative
from windtunnel.serving.engines.command_line import CommandLine, Reading, plain_split
from windtunnel.serving.engines.workloads import lora_options, read_task
from windtunnel.units import GB

MIB = 1 << 20
CACHE_SIZE = "SGLANG_VLM_CACHE_SIZE_MB"
ALGORITHMS = {"mtp": "EAGLE", "draft_model": "STANDALONE"}
"""Our name of a method of drafting -> SGLang's algorithm."""

ONE_LAYER = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms whose drafts come from one layer behind the model, its own or one that was trained apart."""

HICACHE_RATIO = 2.0
"""Default of `--hicache-ratio`."""

DEEPEP_MODES = {"deepep_normal": "normal", "deepep_low_latency": "low_latency"}
"""Kernels of DeepEP -> their mode; the automatic choice is the default."""


def read(reading: Reading) -> None:
    """Set the split, whose `tp` counts all ranks where attention is data-parallel, and the chunk of a prefill."""
    tp, dp = reading.later.get("tp", 1), reading.later.get("data_parallel", 1)
    is_attention = bool(reading.later.get("attention_dp"))
    if is_attention:
        if dp < 1 or tp % dp:
            raise InputError(f"--from-command: --dp-size {dp} does not divide --tp-size {tp}")
        tp //= dp
    if reading.engine.get("all2all_backend", ALL_GATHER) != ALL_GATHER:
        reading.later["expert_parallel"] = True  # `ep_size` becomes `tp_size` (0.5 `server_args.py`)
    reading.split(tp, dp, is_attention)
    if "lora" in reading.later:
        reading.set_engine(lora=reading.engine.get("lora") or {})
    read_task(reading)
    if reading.later.get("fused_all_reduce"):
        reading.set_engine(fused_all_reduce=True)
    if (mode := reading.later.get("deepep_mode")) and reading.engine.get("all2all_backend") in DEEPEP:
        reading.set_engine(all2all_backend=mode)
    if reading.later.get("hicache"):
        _keep_on_host(reading, tp * (dp if is_attention else 1))
    if algorithm := reading.later.get("algorithm"):
        _speculate(reading, algorithm)
    if (cache_mib := reading.later.get("encoder_cache_mib")) is not None:
        reading.set_engine(encoder_cache_bytes=cache_mib * MIB)
    if (chunk := reading.later.get("chunked_prefill")) is not None:
        reading.set_engine(enable_chunked_prefill=chunk > 0)
        if chunk > 0:
            reading.set_engine(max_num_batched_tokens=chunk)


def _keep_on_host(reading: Reading, num_ranks: int) -> None:
    """Set HiCache's blocks in host memory: so many GB for each rank, or a multiple of the device's (0.5
    `server_args.py`)."""
    size, ratio = reading.later.get("hicache_size"), reading.later.get("hicache_ratio", HICACHE_RATIO)
    capacity = {"capacity_bytes": round(size * GB) * num_ranks} if size else {"capacity_ratio": ratio}
    reading.set_engine(kv_tiers=[capacity])


def _speculate(reading: Reading, algorithm: str) -> None:
    """Set a chain of drafts; drafts in a tree, and n-grams, which are one, are not modelled."""
    draft_model, steps = reading.later.get("draft_model"), reading.later.get("draft_steps")
    is_chain = reading.later.get("draft_topk", 1) == 1
    method = "draft_model" if algorithm == "STANDALONE" and draft_model else None
    if algorithm in ONE_LAYER:
        method = "eagle" if draft_model or reading.model.prediction_layers == 0 else "mtp"
    word = algorithm if is_chain else f"{algorithm} with a tree of drafts"
    reading.set_drafts(word, method if is_chain else None, steps, draft_model)


def write_split(split: Parallelism) -> dict[str, Any]:
    """Return the parallelism, with attention data parallelism as a part of `tp`."""
    attention = {"[data_parallel]": split.attention_dp, "[attention_dp]": True} if split.attention_dp > 1 else {}
    return plain_split(split) | attention


def write_rest(engine: EngineSettings, weights: str | None, kv_cache: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the chunk of a prefill, the formats, and the drafts without their acceptance."""
    chunk = -1 if engine.enable_chunked_prefill is False else engine.max_num_batched_tokens
    if chunk is not None:
        yield "chunked-prefill-size", chunk
    if engine.all2all_backend == MEGA_MOE:
        yield "moe-a2a-backend", "megamoe"
    if engine.all2all_backend == NVLINK_ONE_SIDED:
        yield "moe-a2a-backend", "flashinfer"
    if engine.all2all_backend in DEEPEP:
        yield "moe-a2a-backend", "deepep"
    if engine.all2all_backend in DEEPEP_MODES:
        yield "deepep-mode", DEEPEP_MODES[engine.all2all_backend]
    if weights == "fp8":
        yield "quantization", "fp8"
    if kv_cache == "fp8":
        yield "kv-cache-dtype", "fp8_e4m3"
    if engine.num_redundant_experts and not engine.enable_eplb:  # without it the copies get no work by load
        yield "enable-eplb", None
    yield from lora_options(engine, "max-loras-per-batch", "max-loaded-loras")
    drafts = engine.speculative
    if drafts is None or not writes_drafts(drafts):
        return
    yield "speculative-algorithm", ALGORITHMS[drafts.method]
    if drafts.draft_model:
        yield "speculative-draft-model-path", catalog.model(drafts.draft_model).name
    # A chain of drafts; SGLang counts the preceding token among the verified ones.
    yield "speculative-num-steps", drafts.num_draft_tokens
    yield "speculative-eagle-topk", 1
    yield "speculative-num-draft-tokens", drafts.num_draft_tokens + 1


def write_environment(engine: EngineSettings) -> dict[str, str]:
    """Return the size of the cache of embeddings, for which there is no option."""
    if engine.encoder_cache_bytes is None:
        return {}
    return {CACHE_SIZE: str(round(engine.encoder_cache_bytes / MIB))}


def write_task(task: str, is_encoder: bool) -> Iterator[tuple[str, Any]]:
    """Yield the switch of embeddings; a decoder scores by the probability of its next token, without it."""
    if task == "embed" or (task == "rerank" and is_encoder):
        yield "is-embedding", None


def writes_drafts(drafts: Speculative) -> bool:
    """Whether a command can say these drafts: SGLang's NGRAM drafts a tree, which is not simulated."""
    return drafts.method in ALGORITHMS


COMMAND_LINE = CommandLine(
    read=read,
    write_split=write_split,
    write_rest=write_rest,
    write_environment=write_environment,
    write_task=write_task,
    writes_drafts=writes_drafts,
)
