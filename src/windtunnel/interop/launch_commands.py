"""Command lines of vLLM, SGLang and TensorRT-LLM's servers, read as deployments and written from them.

Every option is one of four: it decides a field of the deployment; it has no effect on time (addresses, names, logs); it
has one that is not modelled; or nobody here knows it. Nothing is passed over in silence.

Sources: `vllm serve --help` of 0.24, `python -m sglang.launch_server --help` of 0.5.14, `trtllm-serve --help` and
`tensorrt_llm/llmapi/llm_args.py` of 1.3.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.spec import catalog
from windtunnel.spec.deployment import BALANCE_BATCHING_ITERS, BALANCE_TIMEOUT_ITERS, EngineSettings, Parallelism
from windtunnel.spec.model import ExpertsFeedForward
from windtunnel.spec.noun import Noun, decode, read_yaml
from windtunnel.spec.scenario import set_path


@dataclass(frozen=True)
class LaunchCommand:
    """A server's command line, understood."""

    engine: str
    raw: dict[str, Any]
    """Model, precision and deployment of a scenario, as builtins; without a device."""
    taken: dict[str, str]
    """Option -> what it decides."""
    without_effect: tuple[str, ...]
    """Options that do not change any time."""
    not_modelled: tuple[str, ...]
    """Options that change times in a way that is left out."""
    unknown: tuple[str, ...]


KV_FORMATS = {
    "auto": None,
    "bfloat16": "bf16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_ds_mla": "fp8",
}
# The checkpoint itself says which format compressed-tensors holds.
WEIGHT_FORMATS = {
    "compressed-tensors": None,
    "fp8": "fp8",
    "modelopt": "fp8",
    "modelopt_fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "w8a8_fp8": "fp8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "w8a8_int8": "int8",
    "modelopt_fp4": "nvfp4",
    "mxfp4": "mxfp4",
}

Convert = Callable[[str], Any]


def whole(text: str) -> int:
    """`8192`, `8k` (8,000) or `8K` (8,192), as vLLM reads them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.replace(",", "").replace("_", ""))
    if match is None:
        raise ValueError("a whole number is needed")
    scale = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]
    return int(float(match[1]) * scale)


def _format(known: Mapping[str, str | None]) -> Convert:
    def convert(text: str) -> str | None:
        if text not in known:
            raise ValueError(f"known: {', '.join(known)}")
        return known[text]

    return convert


def _one_of(*words: str) -> Convert:
    return _format({word: word for word in words})


def _sizes(text: str) -> list[int]:
    return [whole(part) for part in re.split(r"[\s,]+", text.strip("[] ")) if part]


ENGINE = "deployment.engine."
SPLIT = "deployment.parallelism."


@dataclass(frozen=True)
class Flag:
    """What one option decides."""

    path: str
    """In a scenario; or a word in brackets that is resolved once all options are known."""
    convert: Convert = whole
    value: Any = None
    """Of an option without an argument; None: it has one."""
    is_lenient: bool = False
    """Whether a value that is not known is named as not modelled, and does not stop the reading."""


def _on(path: str, value: Any = True) -> Flag:
    return Flag(path, whole, value)


SIXTEEN_BIT = Flag("[dtype]", _one_of("auto", "bfloat16", "float16", "half"), is_lenient=True)
"""Both formats of 16 bit have the same rates and bytes; `float` is not modelled."""

VLLM: dict[str, Flag] = {
    "model": Flag("model", str),
    "tensor-parallel-size": Flag(SPLIT + "tp"),
    "pipeline-parallel-size": Flag(SPLIT + "pp"),
    "data-parallel-size": Flag("[data_parallel]"),
    "enable-expert-parallel": _on("[expert_parallel]"),
    "max-num-seqs": Flag(ENGINE + "max_num_seqs"),
    "max-num-batched-tokens": Flag(ENGINE + "max_num_batched_tokens"),
    "max-model-len": Flag(ENGINE + "max_model_len"),
    "gpu-memory-utilization": Flag(ENGINE + "gpu_memory_utilization", float),
    "block-size": Flag(ENGINE + "block_size"),
    "num-gpu-blocks-override": Flag(ENGINE + "num_gpu_blocks"),
    "disable-hybrid-kv-cache-manager": _on(ENGINE + "window_kv", "full"),
    "long-prefill-token-threshold": Flag(ENGINE + "long_prefill_token_threshold"),
    "scheduling-policy": Flag(ENGINE + "scheduling_policy", _one_of("fcfs", "priority")),
    "kv-cache-dtype": Flag("precision.kv_cache", _format(KV_FORMATS)),
    "quantization": Flag("precision.weights", _format(WEIGHT_FORMATS)),
    "enable-prefix-caching": _on(ENGINE + "enable_prefix_caching"),
    "no-enable-prefix-caching": _on(ENGINE + "enable_prefix_caching", False),
    "enable-chunked-prefill": _on(ENGINE + "enable_chunked_prefill"),
    "no-enable-chunked-prefill": _on(ENGINE + "enable_chunked_prefill", False),
    "async-scheduling": _on(ENGINE + "async_scheduling"),
    "no-async-scheduling": _on(ENGINE + "async_scheduling", False),
    "enforce-eager": _on(ENGINE + "max_cudagraph_capture_size", 0),
    "max-cudagraph-capture-size": Flag(ENGINE + "max_cudagraph_capture_size"),
    "cudagraph-capture-sizes": Flag(ENGINE + "cudagraph_sizes", _sizes),
    "speculative-config": Flag("[speculative]", json.loads),
    "dtype": SIXTEEN_BIT,
}
SGLANG: dict[str, Flag] = {
    "model-path": Flag("model", str),
    "tp-size": Flag("[sglang_tp]"),
    "pp-size": Flag(SPLIT + "pp"),
    "dp-size": Flag("[data_parallel]"),
    "ep-size": Flag(SPLIT + "ep"),
    "enable-dp-attention": _on("[attention_dp]"),
    "mem-fraction-static": Flag(ENGINE + "gpu_memory_utilization", float),
    "max-running-requests": Flag(ENGINE + "max_num_seqs"),
    "chunked-prefill-size": Flag("[chunked_prefill]", int),
    "max-prefill-tokens": Flag(ENGINE + "max_prefill_tokens"),
    "context-length": Flag(ENGINE + "max_model_len"),
    "page-size": Flag(ENGINE + "block_size"),
    "swa-full-tokens-ratio": Flag(ENGINE + "window_pool_ratio", float),
    "disable-hybrid-swa-memory": _on(ENGINE + "window_kv", "full"),
    "schedule-policy": Flag(ENGINE + "scheduling_policy", _one_of("fcfs", "lpm", "priority")),
    "schedule-conservativeness": Flag(ENGINE + "schedule_conservativeness", float),
    "scheduler-recv-interval": Flag(ENGINE + "receive_interval_steps"),
    "kv-cache-dtype": Flag("precision.kv_cache", _format(KV_FORMATS)),
    "quantization": Flag("precision.weights", _format(WEIGHT_FORMATS)),
    "disable-radix-cache": _on(ENGINE + "enable_prefix_caching", False),
    "disable-overlap-schedule": _on(ENGINE + "async_scheduling", False),
    "disable-cuda-graph": _on(ENGINE + "max_cudagraph_capture_size", 0),
    "cuda-graph-max-bs": Flag(ENGINE + "max_cudagraph_capture_size"),
    "cuda-graph-bs": Flag(ENGINE + "cudagraph_sizes", _sizes),
    "moe-runner-backend": Flag(
        ENGINE + "moe_backend",
        _format(
            {
                "auto": None,
                "triton": "triton",
                "deep_gemm": "deepgemm",
                "cutlass": "cutlass",
                "flashinfer_trtllm": "trtllm",
            }
        ),
        is_lenient=True,
    ),
    "dtype": SIXTEEN_BIT,
}
TRTLLM: dict[str, Flag] = {
    "model": Flag("model", str),
    "tp-size": Flag("[trtllm_tp]"),
    "pp-size": Flag(SPLIT + "pp"),
    "ep-size": Flag(SPLIT + "ep"),
    "max-batch-size": Flag(ENGINE + "max_num_seqs"),
    "max-num-tokens": Flag(ENGINE + "max_num_batched_tokens"),
    "max-seq-len": Flag(ENGINE + "max_model_len"),
    "kv-cache-free-gpu-memory-fraction": Flag(ENGINE + "gpu_memory_utilization", float),
    "tokens-per-block": Flag(ENGINE + "block_size"),
    "kv-cache-dtype": Flag("precision.kv_cache", _format(KV_FORMATS)),
    "enable-attention-dp": _on("[attention_dp]"),
    "enable-chunked-prefill": _on(ENGINE + "enable_chunked_prefill"),
    "enable-block-reuse": _on(ENGINE + "enable_prefix_caching"),
    "disable-block-reuse": _on(ENGINE + "enable_prefix_caching", False),
    "disable-overlap-scheduler": _on(ENGINE + "async_scheduling", False),
    "batch-wait-timeout-iters": Flag(ENGINE + "batch_wait_timeout_iters"),
    "batch-wait-max-tokens-ratio": Flag(ENGINE + "batch_wait_max_tokens_ratio", float),
    "attention-dp-config.enable-balance": _on("[balance]"),
    "attention-dp-config.timeout-iters": Flag("[balance_timeout]"),
    "attention-dp-config.batching-wait-iters": Flag("[balance_batching]"),
    "torch-compile-config.enable-piecewise-cuda-graph": _on(ENGINE + "piecewise_cudagraphs"),
    "cuda-graph-max-batch-size": Flag(ENGINE + "max_cudagraph_capture_size"),
    "cuda-graph-batch-sizes": Flag(ENGINE + "cudagraph_sizes", _sizes),
    "moe-backend": Flag(
        ENGINE + "moe_backend",
        _format({"CUTLASS": "cutlass", "TRTLLM": "trtllm", "DEEPGEMM": "deepgemm", "AUTO": None}),
        is_lenient=True,
    ),
}
FLAGS = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM}

OTHER_NAMES: dict[str, dict[str, str]] = {
    "vllm": {
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
        "ep": "enable-expert-parallel",
        "q": "quantization",
        "cuda-graph-sizes": "cudagraph-capture-sizes",
    },
    "sglang": {
        "model": "model-path",
        "tp": "tp-size",
        "tensor-parallel-size": "tp-size",
        "pp": "pp-size",
        "pipeline-parallel-size": "pp-size",
        "dp": "dp-size",
        "data-parallel-size": "dp-size",
        "ep": "ep-size",
        "expert-parallel-size": "ep-size",
        "cuda-graph-bs-decode": "cuda-graph-bs",
        "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    },
    "trtllm": {
        "tensor-parallel-size": "tp-size",
        "pipeline-parallel-size": "pp-size",
        "moe-expert-parallel-size": "ep-size",
        "free-gpu-memory-fraction": "kv-cache-free-gpu-memory-fraction",
        "kv-cache-config.free-gpu-memory-fraction": "kv-cache-free-gpu-memory-fraction",
        "kv-cache-config.dtype": "kv-cache-dtype",
        "kv-cache-config.enable-block-reuse": "enable-block-reuse",
        "kv-cache-config.tokens-per-block": "tokens-per-block",
        "moe-config.backend": "moe-backend",
        "cuda-graph-config.max-batch-size": "cuda-graph-max-batch-size",
        "cuda-graph-config.batch-sizes": "cuda-graph-batch-sizes",
    },
}
"""Engine -> other name of an option, or its place in the engine's YAML -> its name in `FLAGS`."""


IN_FILE_ONLY = (
    "tokens-per-block",
    "enable-chunked-prefill",
    "enable-block-reuse",
    "disable-block-reuse",
    "disable-overlap-scheduler",
    "batch-wait-timeout-iters",
    "batch-wait-max-tokens-ratio",
    "torch-compile-config.enable-piecewise-cuda-graph",
    "cuda-graph-max-batch-size",
    "cuda-graph-batch-sizes",
    "moe-backend",
)
"""What trtllm-serve takes from its YAML file and not from its command line."""


class OtherOptions(Noun):
    """`catalog/launch_options.yaml`: options that decide nothing here, by what is said of them."""

    sources: dict[str, str]
    without_effect: frozenset[str]
    not_modelled: frozenset[str]
    switches: frozenset[str]


@cache
def other_options() -> OtherOptions:
    """The options that are named and not taken."""
    path = catalog.shipped("launch_options.yaml")
    return decode(read_yaml(path), OtherOptions, path.name)


SPECULATIVE = "speculative-config"
"""vLLM's option that holds JSON, or a field of it in each of `speculative-config.method`, ..."""

CONFIG_FILES = {"vllm": ("config",), "sglang": ("config",), "trtllm": ("extra-llm-api-options", "config")}
"""Options that name a YAML file of further options."""


def read_launch_command(text: str) -> LaunchCommand:
    """A server's command line as a deployment.

    Args:
        text: `vllm serve ...`, `python -m vllm.entrypoints.openai.api_server ...`, `python -m sglang.launch_server ...`
            or `trtllm-serve ...`; what stands before it (`VAR=1`, `docker run ...`) is passed over. Or the path of a
            file that holds one.

    Raises:
        InputError: no such command, no model, or an option whose value is not one.
    """
    words = _words(text)
    engine, words = _engine_of(words)
    options = _options_of(engine, words)
    found = _Reading(engine)
    for name, value in options:
        found.take(name, value)
    return found.finished()


def _words(text: str) -> list[str]:
    if "\n" not in text and _is_file(text):
        text = Path(text).read_text(encoding="utf-8")
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"--from-command: {error} in the command line") from None


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:
        # A command is often longer than the name of any file may be.
        return False


def _engine_of(words: list[str]) -> tuple[str, list[str]]:
    for at, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        if name == "vllm" and words[at + 1 : at + 2] == ["serve"]:
            return "vllm", words[at + 2 :]
        if word == "vllm.entrypoints.openai.api_server":
            return "vllm", words[at + 1 :]
        if word == "sglang.launch_server" or (name == "sglang" and words[at + 1 : at + 2] == ["serve"]):
            return "sglang", words[at + (1 if word == "sglang.launch_server" else 2) :]
        if name == "trtllm-serve":
            rest = words[at + 1 :]
            return "trtllm", rest[1:] if rest[:1] == ["serve"] else rest
        if name.startswith("vllm-openai"):
            return "vllm", words[at + 1 :]
    shown = " ".join(words[:4])
    raise InputError(
        f"--from-command: {shown!r} starts no server that is known",
        "vllm serve MODEL ..., python -m sglang.launch_server --model-path MODEL ..., or trtllm-serve MODEL ...",
    )


def _options_of(engine: str, words: list[str]) -> list[tuple[str, Any]]:
    """(name, value) of every option; True for a switch. A word alone is the model."""
    options: list[tuple[str, Any]] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            options.append(("model-path" if engine == "sglang" else "model", word))
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        name = _name(engine, name)
        if has_value:
            options.append((name, value))
            continue
        flag = FLAGS[engine].get(name)
        is_switch = flag.value is not None if flag else name in other_options().switches
        values: list[str] = []
        several = flag is not None and flag.convert is _sizes
        while not is_switch and position < len(words) and not _is_option(words[position]) and (several or not values):
            values.append(words[position])
            position += 1
        options.append((name, " ".join(values) if values else True))
    return [pair for name, value in options for pair in _with_file(engine, name, value)]


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _name(engine: str, name: str) -> str:
    name = name.replace("_", "-")
    return OTHER_NAMES[engine].get(name, name)


def _with_file(engine: str, name: str, value: Any) -> list[tuple[str, Any]]:
    """The option, or those of the YAML file that it names."""
    if name not in CONFIG_FILES[engine]:
        return [(name, value)]
    content = read_yaml(Path(str(value)))
    if not isinstance(content, dict):
        raise InputError(f"{value} holds no options: keys and values are needed")
    return list(_flattened(engine, content, ""))


def _flattened(engine: str, content: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = _name(engine, f"{prefix}{key}")
        if isinstance(value, dict):
            options += _flattened(engine, value, f"{name}.")
        elif value is False and name == "enable-block-reuse":
            options.append(("disable-block-reuse", True))
        elif value is False:
            no = f"no-{name}"
            options += [(no, True)] if no in FLAGS[engine] else []
        elif value is not None:
            options.append((name, ",".join(map(str, value)) if isinstance(value, list) else value))
    return options


@dataclass(eq=False)
class _Reading:
    """Options taken so far."""

    engine: str
    raw: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    not_modelled: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def take(self, name: str, value: Any) -> None:
        whole_name, _, below = name.partition(".")
        if whole_name == SPECULATIVE and below and self.engine == "vllm":
            self.later.setdefault("speculative", {})[below.replace("-", "_")] = value
            self.taken[f"--{name}"] = str(value)
            return
        flag = FLAGS[self.engine].get(name)
        if flag is None:
            known = other_options()
            lists = ((known.without_effect, self.without_effect), (known.not_modelled, self.not_modelled))
            found = next((into for names, into in lists if {name, whole_name} & names), self.unknown)
            found.append(f"--{name}")
            return
        converted = flag.value
        if flag.value is None:
            if value is True:
                raise InputError(f"--from-command: --{name} has no value")
            try:
                converted = flag.convert(str(value))
            except ValueError as error:
                if flag.is_lenient:
                    self.not_modelled.append(f"--{name} {value}")
                    return
                raise InputError(f"--from-command: --{name} is {value}; {error}") from None
        if flag.path.startswith("["):
            self.later[flag.path[1:-1]] = converted
        elif converted is not None:
            set_path(self.raw, flag.path, converted)
        self.taken[f"--{name}"] = "" if value is True else str(value)

    def finished(self) -> LaunchCommand:
        """The command, with what several options decide together."""
        if "model" not in self.raw:
            raise InputError("--from-command: the command names no model")
        set_path(self.raw, ENGINE + "name", self.engine)
        self._split()
        if self.later.get("balance"):
            timeout = self.later.get("balance_timeout", BALANCE_TIMEOUT_ITERS)
            batching = self.later.get("balance_batching", BALANCE_BATCHING_ITERS)
            set_path(self.raw, ENGINE + "attention_dp_timeout_iters", timeout)
            set_path(self.raw, ENGINE + "attention_dp_batching_wait_iters", batching)
        if (chunk := self.later.get("chunked_prefill")) is not None:
            set_path(self.raw, ENGINE + "enable_chunked_prefill", chunk > 0)
            if chunk > 0:
                set_path(self.raw, ENGINE + "max_num_batched_tokens", chunk)
        if "speculative" in self.later:
            self._speculate(self.later["speculative"])
        return LaunchCommand(
            self.engine,
            self.raw,
            self.taken,
            tuple(self.without_effect),
            tuple(self.not_modelled),
            tuple(self.unknown),
        )

    def _split(self) -> None:
        """Tensor, data and expert parallelism, which each engine divides its own way."""
        later = self.later
        split = self.raw.get("deployment", {}).get("parallelism", {})
        tp = later.get("sglang_tp") or later.get("trtllm_tp") or split.get("tp", 1)
        dp = later.get("data_parallel", 1)
        if self.engine == "trtllm" and later.get("attention_dp"):
            tp, dp = 1, tp
        elif self.engine == "sglang" and later.get("attention_dp"):
            if tp % dp:
                raise InputError(f"--from-command: --dp-size {dp} does not divide --tp-size {tp}")
            tp //= dp
        together = bool(later.get("attention_dp")) or (self.engine == "vllm" and dp > 1 and self._has_experts())
        set_path(self.raw, SPLIT + "tp", tp)
        if together:
            set_path(self.raw, SPLIT + "attention_dp", dp)
        elif dp > 1:
            set_path(self.raw, "deployment.replicas", dp)
        if later.get("expert_parallel") and self._has_experts():
            set_path(self.raw, SPLIT + "ep", tp * (dp if together else 1))

    def _has_experts(self) -> bool:
        model = catalog.model(str(self.raw["model"]))
        return any(isinstance(group.feed_forward, ExpertsFeedForward) for group in model.layers)

    def _speculate(self, config: dict[str, Any]) -> None:
        """vLLM's JSON; how often drafts are right is not a setting, so it must be said."""
        method = {"ngram": "ngram", "mtp": "mtp", "deepseek_mtp": "mtp"}.get(str(config.get("method")), "draft_model")
        acceptance = config.get("acceptance_fraction")
        if acceptance is None or (method == "draft_model" and "model" not in config):
            self.taken = {name: value for name, value in self.taken.items() if SPECULATIVE not in name}
            self.not_modelled.append(
                '--speculative-config (say how often drafts are right: "acceptance_fraction": 0.7)'
            )
            return
        speculative = {
            "method": method,
            "num_draft_tokens": int(config.get("num_speculative_tokens", 1)),
            "acceptance_fraction": float(acceptance),
        }
        if method == "draft_model":
            speculative["draft_model"] = config["model"]
        set_path(self.raw, ENGINE + "speculative", speculative)


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
        _split_options(engine.name, parallelism) + _engine_options(engine) + _formats(engine.name, weights, kv_cache)
    ):
        words.append("--" + name.replace("-", prefix))
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
            if setting == "moe_backend":
                value = {"deepgemm": "deep_gemm", "trtllm": "flashinfer_trtllm"}.get(value, value)
            options.append((name, " ".join(map(str, value)) if isinstance(value, tuple) else value))
            written.add(setting)
        elif flag.value == value and isinstance(flag.value, bool) == isinstance(value, bool):
            options.append((name, None))
            written.add(setting)
    if engine.name == "sglang" and engine.max_num_batched_tokens is not None:
        options.append(("chunked-prefill-size", engine.max_num_batched_tokens))
    return options


def _formats(engine: str, weights: str | None, kv_cache: str | None) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = []
    if weights == "fp8" and engine != "trtllm":
        options.append(("quantization", "fp8"))
    if kv_cache == "fp8" and engine != "trtllm":
        options.append(("kv-cache-dtype", {"vllm": "fp8", "sglang": "fp8_e4m3"}[engine]))
    return options


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
    elif engine.max_cudagraph_capture_size:
        content["cuda_graph_config"] = {"max_batch_size": engine.max_cudagraph_capture_size}
    return content
