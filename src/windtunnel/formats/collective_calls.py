"""Collectives in one vocabulary for every format: operation, group, bytes and, where measured, time."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

ELEMENT_BYTES = {
    "double": 8,
    "float64": 8,
    "long": 8,
    "int64": 8,
    "float": 4,
    "float32": 4,
    "int": 4,
    "int32": 4,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "short": 2,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
"""PyTorch's names of its formats, in lower case and without `c10::`."""

TORCH_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather": "all_gather",
    "_all_gather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
}
"""PyTorch's names of collectives (torch/csrc/distributed/c10d, backends' calls) -> operation."""


class CollectiveCall(NamedTuple):
    """One communication of one rank, or `num_calls` equal ones."""

    operation: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `receive`, `barrier`, ..."""
    group: str
    """`tp`, `dp`, ... or the name that its program gave it; empty where nobody says."""
    group_size: int | None
    size_bytes: int | None
    """Of the whole logical tensor, as NCCL counts: the gathered one of an all-gather, the input of a reduce-scatter."""
    num_calls: int = 1
    duration_s: float | None = None
    """Of all calls together, where it was measured."""


def totals(calls: Iterable[CollectiveCall]) -> list[CollectiveCall]:
    """Equal calls (operation, group, size) as one, with how many there were and their time; in order of appearance."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for call in calls:
        counts = found.setdefault(call[:4], [0, None])
        counts[0] += call.num_calls
        if call.duration_s is not None:
            counts[1] = (counts[1] or 0.0) + call.duration_s
    return [CollectiveCall(*key, *counts) for key, counts in found.items()]


def element_bytes(name: str) -> int | None:
    """Bytes of an element of PyTorch's format of that name, `Float` or `c10::BFloat16`; None where it is unknown."""
    return ELEMENT_BYTES.get(name.removeprefix("c10::").lower())


def torch_call(
    name: str, attributes: Mapping[str, Any], keys: tuple[str, str, str, str, str], duration_s: float | None
) -> CollectiveCall | None:
    """A collective from what PyTorch records of it, or None where `name` is no collective.

    Args:
        name: PyTorch's, such as `_allgather_base`.
        attributes: its metadata.
        keys: what the metadata calls input elements, output elements, format, group and group size.
        duration_s: where measured.
    """
    operation = TORCH_NAMES.get(name)
    if operation is None:
        return None
    sent, received, dtype, group, group_size = (attributes.get(key) for key in keys)
    elements = received if operation in ("all_gather", "receive") else sent
    width = element_bytes(str(dtype))
    size = int(elements) * width if elements is not None and width is not None else None
    return CollectiveCall(
        operation, str(group or ""), int(group_size) if group_size is not None else None, size, duration_s=duration_s
    )
