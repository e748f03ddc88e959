"""Write deployments as server command lines, so that reading one back gives the same deployment."""

import json
from collections.abc import Iterator
from typing import Any

from windtunnel import catalog
from windtunnel.formats.launch.flags import ENGINE, FLAGS, IN_FILE_ONLY, Words
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.deployment import EngineSettings, Speculative


def write_launch_command(
    model: str,
    parallelism: Parallelism,
    engine: EngineSettings,
    weights: str | None = None,
    kv_cache: str | None = None,
) -> tuple[str, ...]:
    """Return the words of a command that starts one replica; settings that are None keep the engine's default.

    Args:
        model: model name that the engine loads.
        parallelism: parallelism of one replica.
        engine: settings as requested, not resolved.
        weights, kv_cache: formats that differ from the published checkpoint's.
    """
    words = {
        "vllm": ["vllm", "serve", model],
        "sglang": ["python", "-m", "sglang.launch_server", "--model-path", model],
        "trtllm": ["trtllm-serve", model],
    }[engine.name]
    prefix = "_" if engine.name == "trtllm" else "-"
    for name, value in (
        *_split_options(engine.name, parallelism),
        *_engine_options(engine),
        *_formats(engine.name, weights, kv_cache),
        *_draft_options(engine),
    ):
        option, dot, key = name.partition(".")
        words.append("--" + option.replace("-", prefix) + dot + key.replace("-", "_"))
        if value is not None:
            words.append(str(value))
    return tuple(words)


def _split_options(engine: str, split: Parallelism) -> Iterator[tuple[str, Any]]:
    if engine == "vllm":
        yield "tensor-parallel-size", split.tp
        if split.attention_dp > 1:
            yield "data-parallel-size", split.attention_dp
        if split.ep > 1:
            yield "enable-expert-parallel", None
        if split.pp > 1:
            yield "pipeline-parallel-size", split.pp
        return
    yield "tp-size", split.tp * split.attention_dp
    if split.pp > 1:
        yield "pp-size", split.pp
    if split.ep > 1:
        yield "ep-size", split.ep
    if engine == "sglang" and split.attention_dp > 1:
        yield "dp-size", split.attention_dp
        yield "enable-dp-attention", None


def _engine_options(engine: EngineSettings) -> list[tuple[str, Any]]:
    """Return options for the settings of `engine` that one option decides."""
    options: list[tuple[str, Any]] = []
    written: set[str] = set()
    for name, flag in FLAGS[engine.name].items():
        setting = flag.path.removeprefix(ENGINE)
        value = getattr(engine, setting, None) if setting != flag.path else None
        if value is None or setting in written or (engine.name == "trtllm" and name in IN_FILE_ONLY):
            continue
        if flag.value is None:
            if setting == "max_cudagraph_capture_size" and value == 0:
                continue
            if isinstance(flag.convert, Words):
                value = flag.convert.word_for(value)
                if value is None:
                    continue
            options.append((name, " ".join(map(str, value)) if isinstance(value, tuple) else value))
            written.add(setting)
        elif flag.value == value and isinstance(flag.value, bool) == isinstance(value, bool):
            options.append((name, None))
            written.add(setting)
    if engine.name == "sglang":
        chunk = -1 if engine.enable_chunked_prefill is False else engine.max_num_batched_tokens
        options += [("chunked-prefill-size", chunk)] if chunk is not None else []
    return options


def _formats(engine: str, weights: str | None, kv_cache: str | None) -> Iterator[tuple[str, Any]]:
    if weights == "fp8" and engine != "trtllm":
        yield "quantization", "fp8"
    if kv_cache == "fp8" and engine != "trtllm":
        yield "kv-cache-dtype", {"vllm": "fp8", "sglang": "fp8_e4m3"}[engine]


def _draft_options(engine: EngineSettings) -> list[tuple[str, Any]]:
    """Return options of speculative decoding; no engine has one for the acceptance of drafts."""
    drafts = engine.speculative
    if drafts is None or engine.name == "trtllm" or not says_drafts(engine.name, drafts):
        return []
    drafter = catalog.model(drafts.draft_model).name if drafts.draft_model else None
    if engine.name == "vllm":
        config = {"method": drafts.method, "num_speculative_tokens": drafts.num_draft_tokens}
        return [("speculative-config", json.dumps(config | ({"model": drafter} if drafter else {})))]
    algorithm = {"mtp": "EAGLE", "draft_model": "STANDALONE"}[drafts.method]
    model = [("speculative-draft-model-path", drafter)] if drafter else []
    # A chain of drafts; SGLang counts the preceding token among the verified ones.
    return [
        ("speculative-algorithm", algorithm),
        *model,
        ("speculative-num-steps", drafts.num_draft_tokens),
        ("speculative-eagle-topk", 1),
        ("speculative-num-draft-tokens", drafts.num_draft_tokens + 1),
    ]


def says_drafts(engine: str, drafts: Speculative) -> bool:
    """Whether a command can say these drafts: SGLang's NGRAM drafts a tree, which is not simulated."""
    return engine != "sglang" or drafts.method != "ngram"


def _trtllm_drafts(drafts: Speculative) -> dict[str, Any]:
    if drafts.method == "mtp":
        return {"decoding_type": "MTP", "num_nextn_predict_layers": drafts.num_draft_tokens}
    if drafts.method == "ngram":
        return {"decoding_type": "NGram", "max_draft_len": drafts.num_draft_tokens}
    return {
        "decoding_type": "Draft_Target",
        "max_draft_len": drafts.num_draft_tokens,
        "speculative_model": catalog.model(str(drafts.draft_model)).name,
    }


def trtllm_file(engine: EngineSettings, parallelism: Parallelism, kv_cache: str | None) -> dict[str, Any]:
    """Return the content of the YAML file for `trtllm-serve --config`: settings without a command-line option."""
    balance = engine.attention_dp_timeout_iters
    largest = engine.max_cudagraph_capture_size
    cache = {
        "enable_block_reuse": engine.enable_prefix_caching,
        "tokens_per_block": engine.block_size,
        "dtype": "fp8" if kv_cache == "fp8" else None,
    }
    content: dict[str, Any] = {
        "kv_cache_config": _given(cache) or None,
        "enable_attention_dp": True if parallelism.attention_dp > 1 else None,
        "disable_overlap_scheduler": True if engine.async_scheduling is False else None,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "batch_wait_timeout_iters": engine.batch_wait_timeout_iters,
        "batch_wait_max_tokens_ratio": engine.batch_wait_max_tokens_ratio,
        "attention_dp_config": {
            "enable_balance": True,
            "timeout_iters": balance,
            "batching_wait_iters": engine.attention_dp_batching_wait_iters or 0,
        }
        if balance
        else None,
        "torch_compile_config": {"enable_piecewise_cuda_graph": True} if engine.piecewise_cudagraphs else None,
        "moe_config": {"backend": engine.moe_backend.upper()} if engine.moe_backend is not None else None,
    }
    content = _given(content)
    if engine.cudagraph_sizes is not None:
        content["cuda_graph_config"] = {"batch_sizes": list(engine.cudagraph_sizes)}
    elif largest is not None:
        content["cuda_graph_config"] = {"max_batch_size": largest} if largest else None
    if engine.speculative is not None:
        content["speculative_config"] = _trtllm_drafts(engine.speculative)
    return content


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
