"""Read server command lines as deployments.

Every option is one of four: it decides a field of the deployment; it has no effect on time (addresses, names, logs); it
has one that is not modelled; or it is unknown. All four are reported.
"""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.files import read_text
from windtunnel.formats.launch.flags import CONFIG_FILES, ENGINE, FLAGS, OTHER_NAMES, SPECULATIVE, SPLIT, sizes
from windtunnel.schema import Schema, decode, read_yaml, set_path
from windtunnel.serving.deployment import BALANCE_BATCHING_ITERS, BALANCE_TIMEOUT_ITERS


@dataclass(frozen=True)
class LaunchCommand:
    """A server's command line as a deployment."""

    engine: str
    raw: dict[str, Any]
    """Model, precision and deployment of a scenario, as builtins; without a device."""
    taken: dict[str, str]
    """Option -> its value."""
    without_effect: tuple[str, ...]
    """Options that do not change any time."""
    not_modelled: tuple[str, ...]
    """Options that change times in a way that is not modelled."""
    unknown: tuple[str, ...]

    @property
    def remarks(self) -> list[str]:
        """Sentences that name the options which are not in the prediction."""
        reasons = {
            "without effect on time": self.without_effect,
            "not modelled": self.not_modelled,
            "unknown, ignored": self.unknown,
        }
        return [f"{reason}: {', '.join(names)}" for reason, names in reasons.items() if names]


class OtherOptions(Schema):
    """Options that decide no setting, by kind (`catalog/launch_options.yaml`)."""

    sources: dict[str, str]
    without_effect: frozenset[str]
    not_modelled: frozenset[str]
    switches: frozenset[str]


@cache
def other_options() -> OtherOptions:
    """Return the options that are reported and not taken."""
    path = catalog.shipped("launch_options.yaml")
    return decode(read_yaml(path), OtherOptions, path.name)


def read_launch_command(text: str) -> LaunchCommand:
    """Read a server's command line as a deployment.

    Args:
        text: `vllm serve ...`, `python -m vllm.entrypoints.openai.api_server ...`, `python -m sglang.launch_server ...`
            or `trtllm-serve ...`; words before it (`VAR=1`, `docker run ...`) are ignored. Or the path of a file with
            such a command.

    Raises:
        InputError: no such command, no model, or a value that its option does not take.
    """
    engine, words = _engine_of(_words(text))
    reading = _LaunchReading(engine)
    for name, value in _options_of(engine, words):
        reading.take(name, value)
    return reading.finished()


def _words(text: str) -> list[str]:
    if "\n" not in text and _is_file(text):
        text = read_text(Path(text))
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
    for i, word in enumerate(words, 1):
        name, rest = word.rsplit("/", 1)[-1], words[i:]
        serves = rest[:1] == ["serve"]
        if word == "vllm.entrypoints.openai.api_server" or name.startswith("vllm-openai"):
            return "vllm", rest
        if word == "sglang.launch_server":
            return "sglang", rest
        if name in ("vllm", "sglang") and serves:
            return name, rest[1:]
        if name == "trtllm-serve":
            return "trtllm", rest[1:] if serves else rest
    shown = " ".join(words[:4])
    raise InputError(
        f"--from-command: {shown!r} starts no server that is known",
        "vllm serve MODEL ..., python -m sglang.launch_server --model-path MODEL ..., or trtllm-serve MODEL ...",
    )


def _options_of(engine: str, words: list[str]) -> list[tuple[str, Any]]:
    """Return (name, value) of every option; True for a switch. A word alone is the model."""
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
        several = flag is not None and flag.convert is sizes
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
    """Return the option, or the options of the YAML file that it names."""
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
        elif value is False or value is None:
            no = f"no-{name}"
            options += [(no, True)] if no in FLAGS[engine] else []
        else:
            options.append((name, ",".join(map(str, value)) if isinstance(value, list) else value))
    return options


@dataclass(eq=False)
class _LaunchReading:
    """Options taken so far."""

    engine: str
    raw: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    without_effect: list[str] = field(default_factory=list)
    not_modelled: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def take(self, name: str, value: Any) -> None:
        option, _, below = name.partition(".")
        if option == SPECULATIVE and below and self.engine == "vllm":
            self.later.setdefault("speculative", {})[below.replace("-", "_")] = value
            self.taken[f"--{name}"] = str(value)
            return
        flag = FLAGS[self.engine].get(name)
        if flag is None:
            known = other_options()
            lists = ((known.without_effect, self.without_effect), (known.not_modelled, self.not_modelled))
            next((into for names, into in lists if {name, option} & names), self.unknown).append(f"--{name}")
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
                raise InputError(
                    f"--from-command: --{name} is {value}; {error}", "mend it in the command line"
                ) from None
        if flag.path.startswith("["):
            self.later[flag.path[1:-1]] = converted
        elif converted is not None:
            set_path(self.raw, flag.path, converted)
        self.taken[f"--{name}"] = "" if value is True else str(value)

    def finished(self) -> LaunchCommand:
        """Return the command, with the settings that several options decide together."""
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
        if "windows" in self.later:
            self._keep_windows(self.later["windows"])
        lists = tuple(self.without_effect), tuple(self.not_modelled), tuple(self.unknown)
        return LaunchCommand(self.engine, self.raw, self.taken, *lists)

    def _split(self) -> None:
        """Set tensor, data and expert parallelism, which each engine divides differently."""
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
        return catalog.model(self.raw["model"]).has_experts

    def _keep_windows(self, listed: Sequence[int]) -> None:
        """Set TensorRT-LLM's windows, listed layer by layer and repeated; a window as long as a request is none.

        They decide the kept KV, with separate blocks for each. Windows other than the model's would change its output.
        """
        model = catalog.model(str(self.raw["model"]))
        longest = self.raw["deployment"]["engine"].get("max_model_len") or model.max_context_tokens
        of_model = Counter[int]()
        for num_layers, attention in model.attentions:
            of_model[min(attention.window_tokens or longest, longest)] += num_layers
        given = Counter(min(listed[i % len(listed)], longest) for i in range(of_model.total()))
        if set(given) == {longest}:
            set_path(self.raw, ENGINE + "window_kv", "full")
        elif given == of_model:
            set_path(self.raw, ENGINE + "window_kv", "own_pool")
        else:
            name = "--max-attention-window"
            self.taken.pop(name, None)
            self.not_modelled.append(f"{name} (other windows than those of {model.name})")

    def _speculate(self, config: dict[str, Any]) -> None:
        """Set speculative decoding from vLLM's JSON; the acceptance of drafts is not a setting, so it must be given."""
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
