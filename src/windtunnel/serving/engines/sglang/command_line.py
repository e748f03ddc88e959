"""SGLang's command line: attention data parallelism, chunks, drafts and formats."""

from collections.abc import Iterator
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.deployment import EngineSettings, Speculative
from windtunnel.serving.engines.command_line import CommandLine, Reading, plain_split
from windtunnel.serving.engines.workloads import lora_options, read_task

MIB = 1 << 20
CACHE_SIZE = "SGLANG_VLM_CACHE_SIZE_MB"
ALGORITHMS = {"mtp": "EAGLE", "draft_model": "STANDALONE"}
"""Our name of a method of drafting -> SGLang's algorithm."""

DEEPEP_MODES = {"deepep_normal": "normal", "deepep_low_latency": "low_latency"}
"""Kernels of DeepEP -> their mode; the automatic choice is the default."""


def read(reading: Reading) -> None:
    """Set the split, whose `tp` counts all ranks where attention is data-parallel, and the chunk of a prefill."""
    tp, dp = reading.later.get("tp", 1), reading.later.get("data_parallel", 1)
    is_attention = bool(reading.later.get("attention_dp"))
    if is_attention:
        if tp % dp:
            raise InputError(f"--from-command: --dp-size {dp} does not divide --tp-size {tp}")
        tp //= dp
    reading.split(tp, dp, is_attention)
    if "lora" in reading.later:
        reading.set_engine(lora=reading.engine.get("lora") or {})
    read_task(reading)
    if reading.later.get("fused_all_reduce"):
        reading.set_engine(fused_all_reduce=True)
    if mode := reading.later.get("deepep_mode"):
        reading.set_engine(all2all_backend=mode)
    if (cache_mib := reading.later.get("encoder_cache_mib")) is not None:
        reading.set_engine(encoder_cache_bytes=cache_mib * MIB)
    if (chunk := reading.later.get("chunked_prefill")) is not None:
        reading.set_engine(enable_chunked_prefill=chunk > 0)
        if chunk > 0:
            reading.set_engine(max_num_batched_tokens=chunk)


def write_split(split: Parallelism) -> dict[str, Any]:
    """Return the parallelism, with attention data parallelism as a part of `tp`."""
    attention = {"[data_parallel]": split.attention_dp, "[attention_dp]": True} if split.attention_dp > 1 else {}
    return plain_split(split) | attention


def write_rest(engine: EngineSettings, weights: str | None, kv_cache: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the chunk of a prefill, the formats, and the drafts without their acceptance."""
    chunk = -1 if engine.enable_chunked_prefill is False else engine.max_num_batched_tokens
    if chunk is not None:
        yield "chunked-prefill-size", chunk
    if engine.all2all_backend in DEEPEP_MODES:
        yield "moe-a2a-backend", "deepep"
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
