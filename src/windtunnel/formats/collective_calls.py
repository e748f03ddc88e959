"""Contents of workloads and traces in one vocabulary: collectives by operation, group, bytes and measured time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.files import parse_whole
from windtunnel.schema import read_yaml

_TORCH: Mapping[str, Mapping[Any, list[str]]] = read_yaml(Path(__file__).with_name("torch_names.yaml"))
ELEMENT_BYTES: Mapping[str, int] = {name: width for width, names in _TORCH["element_bytes"].items() for name in names}
TORCH_NAMES: Mapping[str, str] = {name: op for op, names in _TORCH["collectives"].items() for name in names}
"""PyTorch's names of collectives -> operation."""


class CollectiveCall(NamedTuple):
    """One communication of one rank, or `num_calls` equal ones."""

    operation: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `receive`, `barrier`, ..."""
    group: str
    """`tp`, `dp`, ... or the name that its program gave it; empty where it is unknown."""
    group_size: int | None
    size_bytes: int | None
    """Size of the whole logical tensor, as NCCL counts: gathered for an all-gather, the input of a reduce-scatter."""
    num_calls: int = 1
    duration_s: float | None = None
    """Measured time of all calls together."""


@dataclass(frozen=True)
class Contents:
    """Summary of a workload or trace."""

    kind: str
    facts: tuple[tuple[str, str], ...]
    """Label and value, for people."""
    calls: tuple[CollectiveCall, ...]
    """Collectives, equal ones added up."""
    compute_s: float | None = None
    """Time of all computation, where the file has times."""
    modules_s: Mapping[str, float] | None = None
    """Mean time of each module, for AIOB files."""


def totals(calls: Iterable[CollectiveCall]) -> list[CollectiveCall]:
    """Add up equal calls (operation, group, size), in the order of their first appearance."""
    sums: dict[tuple[Any, ...], list[Any]] = {}
    for call in calls:
        counts = sums.setdefault(call[:4], [0, None])
        counts[0] += call.num_calls
        if call.duration_s is not None:
            counts[1] = (counts[1] or 0.0) + call.duration_s
    return [CollectiveCall(*key, *counts) for key, counts in sums.items()]


def element_bytes(name: str) -> int | None:
    """Return the bytes of an element in PyTorch's format `name`, such as `c10::BFloat16`; None for unknown formats."""
    return ELEMENT_BYTES.get(name.removeprefix("c10::").lower())


def torch_call(
    name: str, attributes: Mapping[str, Any], keys: tuple[str, str, str, str, str], duration_s: float | None
) -> CollectiveCall | None:
    """Return a collective from PyTorch's record of it, or None where `name` is no collective. InputError where a count
    is no whole number of at least 0.

    Args:
        name: PyTorch's name, such as `_allgather_base`.
        attributes: metadata of the call.
        keys: metadata keys of input elements, output elements, format, group and group size.
        duration_s: measured time; None where it is unknown.
    """
    operation = TORCH_NAMES.get(name)
    if operation is None:
        return None
    of_elements = keys[operation in ("all_gather", "receive")]
    elements, num_ranks = (
        None if attributes.get(key) is None else parse_whole(attributes[key], f"{key} of {name}")
        for key in (of_elements, keys[4])
    )
    width, group = element_bytes(str(attributes.get(keys[2]))), attributes.get(keys[3])
    size = elements * width if elements is not None and width is not None else None
    return CollectiveCall(operation, str(group or ""), num_ranks, size, duration_s=duration_s)
