"""AIOB files: times that AICB measured of a model's modules on one GPU, and how AICB reads them into a workload.

The first line names the run (`train_iter:10`, `inference_term:decode`), then each module has a section with the
largest, smallest and mean time in microseconds (utils/utils.py).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from windtunnel.errors import InputError
from windtunnel.files import parse_number, read_text
from windtunnel.formats.aicb.arguments import WORDS

FIELDS = ("time_gpu_max", "time_gpu_min", "time_gpu_avg")


class ModuleTime(NamedTuple):
    """Times of one section, in microseconds as in the file."""

    max_us: float
    min_us: float
    mean_us: float


class AiobTimes(NamedTuple):
    """A whole file."""

    title: str
    """The first line."""
    modules: dict[str, ModuleTime]
    """Times by section, in the file's order."""


def read_aiob_times(path: Path) -> AiobTimes:
    """Read an AIOB file, also gzipped. InputError where the file is missing, is another file, or a section is
    incomplete; names the line."""
    lines = read_text(path).splitlines()
    if not lines or not re.match(r"(train_iter|inference_term):", lines[0]):
        raise InputError(f"{path} is not an AIOB file", "its first line is train_iter:N or inference_term:PHASE")
    sections: dict[str, dict[str, float]] = {}
    section: dict[str, float] | None = None
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}, line {number}"
        name, colon, text = line.strip().partition(":")
        if not line.strip():
            continue
        if not line[0].isspace():
            if not colon or text.strip():
                raise InputError(f"{where} is no section of an AIOB file: {line[:60]!r}", "a section is NAME: alone")
            section = sections.setdefault(name, {})
        elif section is None:
            raise InputError(f"{where} stands before the first section")
        elif name not in FIELDS:
            raise InputError(f"{where}: {name!r} is no time of an AIOB file", f"it has {', '.join(FIELDS)}")
        else:
            section[name] = parse_number(text.strip(), f"{where}: {name}")
    for name, fields in sections.items():
        if missing := [field for field in FIELDS if field not in fields]:
            raise InputError(f"{path}: the section {name} has no {' and no '.join(missing)}", "is the file cut off?")
    modules = {name: ModuleTime(*(fields[field] for field in FIELDS)) for name, fields in sections.items()}
    return AiobTimes(lines[0], modules)


def training_ns(times: AiobTimes, recompute: bool) -> dict[str, int]:
    """Return nanoseconds by the names under which AICB looks them up.

    Its rules (`extract_averages`): all of attention is one number, the first norm included and flash attention doubled
    where activations are recomputed; likewise the feed-forward network with the second norm. The backward pass takes as
    long as the forward pass. `param_time` is the optimizer's. Other sections keep their names, and parts of DeepSeek's
    attention that the file does not time take no time.
    """
    attention_ns = feed_forward_ns = 0.0
    others: dict[str, int] = {}
    parts = dict.fromkeys(WORDS["latent_modules"], 0)
    optimizer = times.modules.get("param_time", ModuleTime(0.0, 0.0, 0.0))
    for name, module in times.modules.items():
        mean_ns = module.mean_us * 1000
        if name == "param_time":
            continue
        if "atten" in name or name == "layernorm":
            attention_ns += mean_ns * 2 if recompute and "flash" in name else mean_ns
        elif "mlp" in name or name == "layernorm2":
            feed_forward_ns += mean_ns
        else:
            others[name] = round(mean_ns)
        if name in parts:
            parts[name] = round(mean_ns)
    return {
        "attention_forward": round(attention_ns),
        "attention_backward": round(attention_ns),
        "mlp_forward": round(feed_forward_ns),
        "mlp_backward": round(feed_forward_ns),
        "grad_forward": round(optimizer.min_us * 1000),
        "grad_backward": round(optimizer.mean_us * 1000),
        **others,
        **parts,
    }


def inference_ns(times: AiobTimes) -> dict[str, int]:
    """Return nanoseconds by module of an inference workload, without modules of 0 (`extract_inference_averages`)."""
    modules: Mapping[str, str] = WORDS["inference_modules"]
    sums = dict.fromkeys(modules.values(), 0.0)
    for name, time in times.modules.items():
        module = next((module for part, module in modules.items() if part in name), None)
        if module is not None:
            sums[module] += time.mean_us * 1000
    return {module: round(total) for module, total in sums.items() if round(total)}
