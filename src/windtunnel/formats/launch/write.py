"""Write deployments as server command lines, so that reading one back gives the same deployment."""

import json
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
    """The words of a command that starts one replica; settings that are the engine's default are left out by giving
    them as None.

    Args:
        model: as the engine is to load it.
        parallelism: of one replica.
        engine: settings as asked for, not resolved.
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


def _split_options(engine: str, split: Parallelism) -> list[tuple[str, Any]]:
    if engine == "vllm":
        options: list[tuple[str, Any]] = [("tensor-parallel-size", split.tp)]
        options += [("data-parallel-size", split.attention_dp)] if split.attention_dp > 1 else []
        options += [("enable-expert-parallel", None)] if split.ep > 1 else []
        return options + ([("pipeline-parallel-size", split.pp)] if split.pp > 1 else [])
    options = [("tp-size", split.tp * split.attention_dp)]
    options += [("pp-size", split.pp)] if split.pp > 1 else []
    options += [("ep-size", split.ep)] if split.ep > 1 else []
    if engine == "sglang" and split.attention_dp > 1:
        options += [("dp-size", split.attention_dp), ("enable-dp-attention", None)]
    return options


def _engine_options(engine: EngineSettings) -> list[tuple[str, Any]]:
    """Options for the settings that `engine` has and that an option alone decides."""
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
    if engine.name == "sglang" and engine.enable_chunked_prefill is False:
        options.append(("chunked-prefill-size", -1))
    elif engine.name == "sglang" and engine.max_num_batched_tokens is not None:
        options.append(("chunked-prefill-size", engine.max_num_batched_tokens))
    return options


def _formats(engine: str, weights: str | None, kv_cache: str | None) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = []
    if weights == "fp8" and engine != "trtllm":
        options.append(("quantization", "fp8"))
    if kv_cache == "fp8" and engine != "trtllm":
        options.append(("kv-cache-dtype", {"vllm": "fp8", "sglang": "fp8_e4m3"}[engine]))
    return options


def _draft_options(engine: EngineSettings) -> list[tuple[str, Any]]:
    """Speculative decoding; how often drafts are right is no option of any engine."""
    drafts = engine.speculative
    if drafts is None or engine.name == "trtllm" or not says_drafts(engine.name, drafts):
        return []
    drafter = catalog.model(drafts.draft_model).name if drafts.draft_model else None
    if engine.name == "vllm":
        config = {"method": drafts.method, "num_speculative_tokens": drafts.num_draft_tokens}
        return [("speculative-config", json.dumps(config | ({"model": drafter} if drafter else {})))]
    algorithm = {"mtp": "EAGLE", "draft_model": "STANDALONE"}[drafts.method]
    model = [("speculative-draft-model-path", drafter)] if drafter else []
    # A chain of drafts; SGLang counts the token that they follow among those that it verifies.
    return [
        ("speculative-algorithm", algorithm),
        *model,
        ("speculative-num-steps", drafts.num_draft_tokens),
        ("speculative-eagle-topk", 1),
        ("speculative-num-draft-tokens", drafts.num_draft_tokens + 1),
    ]


def says_drafts(engine: str, drafts: Speculative) -> bool:
    """Whether a command is written for these drafts: SGLang's NGRAM drafts a tree, which is not what is simulated."""
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
    """The content of the YAML file for `trtllm-serve --config`: what has no option of its own."""
    content: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    if engine.enable_prefix_caching is not None:
        cache["enable_block_reuse"] = engine.enable_prefix_caching
    if engine.block_size is not None:
        cache["tokens_per_block"] = engine.block_size
    if kv_cache == "fp8":
        cache["dtype"] = "fp8"
    if cache:
        content["kv_cache_config"] = cache
    if parallelism.attention_dp > 1:
        content["enable_attention_dp"] = True
    if engine.async_scheduling is False:
        content["disable_overlap_scheduler"] = True
    for name in ("enable_chunked_prefill", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio"):
        if getattr(engine, name) is not None:
            content[name] = getattr(engine, name)
    if engine.attention_dp_timeout_iters:
        content["attention_dp_config"] = {
            "enable_balance": True,
            "timeout_iters": engine.attention_dp_timeout_iters,
            "batching_wait_iters": engine.attention_dp_batching_wait_iters or 0,
        }
    if engine.piecewise_cudagraphs:
        content["torch_compile_config"] = {"enable_piecewise_cuda_graph": True}
    if engine.moe_backend is not None:
        content["moe_config"] = {"backend": engine.moe_backend.upper()}
    if engine.cudagraph_sizes is not None:
        content["cuda_graph_config"] = {"batch_sizes": list(engine.cudagraph_sizes)}
    elif engine.max_cudagraph_capture_size is not None:
        most = engine.max_cudagraph_capture_size
        content["cuda_graph_config"] = {"max_batch_size": most} if most else None
    if engine.speculative is not None:
        content["speculative_config"] = _trtllm_drafts(engine.speculative)
    return content
