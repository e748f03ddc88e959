"""TensorRT-LLM's command line and its YAML file: attention data parallelism, its balance, windows and drafts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.exchange import MEGA_MOE
from windtunnel.model.parallelism import Parallelism
from windtunnel.schema import set_path
from windtunnel.serving.deployment import (
    BALANCE_BATCHING_ITERS,
    BALANCE_TIMEOUT_ITERS,
    Deployment,
    EngineSettings,
    Speculative,
)
from windtunnel.serving.engines.command_line import CommandLine, Reading

WINDOWS = "--max-attention-window"


def read(reading: Reading) -> None:
    """Set the split, where attention data parallelism takes all ranks, its balance, and the windows."""
    tp, is_attention = reading.later.get("tp", 1), bool(reading.later.get("attention_dp"))
    if is_attention:
        reading.split(1, tp, is_attention=True)
    else:
        reading.split(tp)
    reading.set_moe_backend()
    if reading.later.get("balance"):
        reading.set_engine(
            attention_dp_timeout_iters=reading.later.get("balance_timeout", BALANCE_TIMEOUT_ITERS),
            attention_dp_batching_wait_iters=reading.later.get("balance_batching", BALANCE_BATCHING_ITERS),
        )
    if "num_slots" in reading.later:
        _balance_experts(reading, reading.later["num_slots"])
    if algorithm := reading.later.get("algorithm"):
        words = {"MTP": "mtp", "Eagle": "eagle", "Eagle3": "eagle", "NGram": "ngram", "Draft_Target": "draft_model"}
        drafts = reading.later.get("draft_tokens"), reading.later.get("draft_model")
        reading.set_drafts(algorithm, words.get(algorithm), *drafts)
    # `PyTorchModelEngine._init_max_seq_len`, 1.0 to 1.3.
    with suppress(InputError):  # an unknown model is an error once it is looked up
        given, longest = reading.engine.get("max_model_len", 0), reading.model.max_context_tokens
        if given > longest:
            reading.set_engine(max_model_len=longest)
            reading.container.append(f"trtllm-serve lowers --max_seq_len {given:,} to the {longest:,} of the model")
    if "windows" in reading.later:
        _keep_windows(reading, reading.later["windows"])


def _balance_experts(reading: Reading, num_slots: int) -> None:
    """Set the copies of experts that are more than one of each (`MoeLoadBalancerConfig` of 1.0 to 1.3)."""
    num_experts = max(feed_forward.num_experts for _, feed_forward in reading.model.feed_forwards)
    if not num_experts or num_slots < num_experts:
        raise InputError(
            f"--from-command: load_balancer.num_slots is {num_slots}; {reading.model.name} has {num_experts} experts",
            "give at least one slot for each expert",
        )
    reading.set_engine(enable_eplb=True, num_redundant_experts=num_slots - num_experts)


def _keep_windows(reading: Reading, listed: Sequence[int]) -> None:
    """Set the windows, listed layer by layer and repeated; a window as long as a request is none.

    They decide the kept KV, with separate blocks for each. Windows other than the model's would change its output.
    """
    model = reading.model
    longest = reading.raw["deployment"]["engine"].get("max_model_len") or model.max_context_tokens
    of_model = Counter[int]()
    for num_layers, attention in model.attentions:
        of_model[min(attention.window_tokens or longest, longest)] += num_layers
    given = Counter(min(listed[i % len(listed)], longest) for i in range(model.num_layers))
    if set(given) == {longest}:
        reading.set_engine(window_kv="full")
    elif given == of_model:
        reading.set_engine(window_kv="own_pool")
    else:
        reading.taken.pop(WINDOWS, None)
        reading.not_modelled.append(f"{WINDOWS} (other windows than those of {model.name})")


def _moe_backend(engine: EngineSettings) -> str | None:
    if engine.all2all_backend == MEGA_MOE:
        return "MEGAMOE_DEEPGEMM"
    return engine.moe_backend.upper() if engine.moe_backend else None


def write_file(engine: EngineSettings, parallelism: Parallelism, kv_cache: str | None) -> dict[str, Any]:
    """Return the content of the YAML file for `trtllm-serve --config`: settings without a command-line option."""
    balance, largest = engine.attention_dp_timeout_iters, engine.max_cudagraph_capture_size
    balances = {"enable_balance": True, "timeout_iters": balance}
    balances["batching_wait_iters"] = engine.attention_dp_batching_wait_iters or 0
    content: dict[str, Any] = {}
    for path, value in (
        ("kv_cache_config.enable_block_reuse", engine.enable_prefix_caching),
        ("kv_cache_config.tokens_per_block", engine.block_size),
        ("kv_cache_config.max_tokens", engine.max_kv_tokens),
        ("kv_cache_config.dtype", "fp8" if kv_cache == "fp8" else None),
        ("enable_attention_dp", True if parallelism.attention_dp > 1 else None),
        ("disable_overlap_scheduler", True if engine.async_scheduling is False else None),
        ("enable_chunked_prefill", engine.enable_chunked_prefill),
        ("batch_wait_timeout_iters", engine.batch_wait_timeout_iters),
        ("batch_wait_max_tokens_ratio", engine.batch_wait_max_tokens_ratio),
        ("attention_dp_config", balances if balance else None),
        ("torch_compile_config.enable_piecewise_cuda_graph", engine.piecewise_cudagraphs or None),
        ("torch_compile_config.capture_num_tokens", engine.piecewise_sizes and list(engine.piecewise_sizes)),
        ("moe_config.backend", _moe_backend(engine)),
        ("cuda_graph_config.batch_sizes", engine.cudagraph_sizes and list(engine.cudagraph_sizes)),
        ("cuda_graph_config.max_batch_size", largest if engine.cudagraph_sizes is None and largest else None),
        ("cuda_graph_config.enable_padding", True if engine.cudagraph_padding else None),
    ):
        if value is not None:
            set_path(content, path, value)
    if engine.cudagraph_sizes is None and largest == 0:
        content["cuda_graph_config"] = None
    if engine.speculative is not None and writes_drafts(engine.speculative):
        content["speculative_config"] = _drafts(engine.speculative)
    return content


def _drafts(drafts: Speculative) -> dict[str, Any]:
    if drafts.method == "mtp":
        return {"decoding_type": "MTP", "num_nextn_predict_layers": drafts.num_draft_tokens}
    if drafts.method == "ngram":
        return {"decoding_type": "NGram", "max_draft_len": drafts.num_draft_tokens}
    return {
        "decoding_type": "Draft_Target",
        "max_draft_len": drafts.num_draft_tokens,
        "speculative_model": catalog.model(str(drafts.draft_model)).name,
    }


def remaining_work(deployment: Deployment) -> Iterator[str]:
    """Yield what neither the command nor its file says."""
    engine, split = deployment.engine, deployment.parallelism
    if split.attention_dp > 1 and split.tp > 1:
        yield (
            f"TensorRT-LLM cannot split attention over tp = {split.tp} within attention_dp = {split.attention_dp}: the "
            f"command has attention_dp = {split.tp * split.attention_dp}"
        )
    if engine.enable_eplb or engine.num_redundant_experts:
        more = f" and {engine.num_redundant_experts} more" if engine.num_redundant_experts else ""
        yield f"set moe_config.load_balancer with num_slots of one for each expert{more}"
    if engine.attention_backend or engine.window_kv == "own_pool":
        yield "set attn_backend and kv_cache_config.max_attention_window as the scenario has them"


def writes_drafts(drafts: Speculative) -> bool:
    """Whether the file can say these drafts: the scenario does not name EAGLE's head."""
    return drafts.method != "eagle"


COMMAND_LINE = CommandLine(read=read, write_file=write_file, writes_drafts=writes_drafts, remaining_work=remaining_work)
