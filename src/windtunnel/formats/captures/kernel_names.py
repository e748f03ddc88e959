"""Classify kernels and operators by name, and shorten their names for people."""

import re
from functools import cache
from pathlib import Path

from windtunnel.formats.captures.capture import CLASSES
from windtunnel.schema import read_yaml

_PATTERNS = tuple(
    (CLASSES.index(name), re.compile("|".join(patterns), re.IGNORECASE))
    for name, patterns in read_yaml(Path(__file__).with_name("kernel_classes.yaml")).items()
)
_OTHER = CLASSES.index("other")


@cache
def kernel_class(name: str) -> int:
    """Return the position in CLASSES of a kernel's or operator's purpose, by its name; `other` where it is unclear."""
    return next((code for code, pattern in _PATTERNS if pattern.search(name)), _OTHER)


@cache
def short_name(name: str) -> str:
    """Return a kernel's name without its return type, template arguments, namespace and parameters.

    `void at::native::elementwise_kernel<128, 4, ...>(int, ...)` -> `elementwise_kernel`.
    """
    if name.startswith("["):
        return name
    text = name.replace("(anonymous namespace)::", "")
    depth, kept = 0, list[str]()
    for letter in text:
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and kept:
            break
        if depth == 0 and letter != ">":
            kept.append(letter)
    plain = "".join(kept).strip().split(" ")[-1]
    return plain.rsplit("::", 1)[-1] or name


def call_name(name: str) -> str:
    """Return a function's name without CUPTI's version: `cudaLaunchKernel_v7000` -> `cudaLaunchKernel`."""
    return re.sub(r"_v\d{4,5}$", "", name)
