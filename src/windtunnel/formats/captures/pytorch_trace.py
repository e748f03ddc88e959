"""PyTorch's execution traces: the operators of a process as a tree, with their tensors (`ExecutionTraceObserver`).

Written as JSON, schemas 1.0.2 to 1.1.1 with Chakra 0.0.4 attributes
(torch/csrc/profiler/standalone/execution_trace_observer.cpp). `rf_id` leads to the same operator in a Kineto trace.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.files import decode_json
from windtunnel.formats.captures.kineto import is_kineto
from windtunnel.formats.collective_calls import CollectiveCall, Contents, torch_call, totals
from windtunnel.formats.recognise import FileContent

TRACE = "PyTorch execution trace"
SCHEMAS = ("1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4")

_CALL_KEYS = ("in_msg_nelems", "out_msg_nelems", "dtype", "pg_desc", "pg_size")


class Tensors(msgspec.Struct, frozen=True):
    """Inputs or outputs of an operator, an entry each."""

    values: list[Any] = []
    """A tensor is [tensor, storage, offset, elements, bytes an element, device]."""
    shapes: list[Any] = []
    types: list[str] = []
    """`Tensor(float)`, `GenericList[Int,Int]`, `Bool`, ..."""


class TraceAttribute(msgspec.Struct, frozen=True):
    """One attribute of a node."""

    name: str
    value: Any


class Operator(msgspec.Struct, frozen=True, dict=True):
    """One node: an operator, an autograd function, or a thread that holds them."""

    id: int
    name: str
    parent: int = msgspec.field(name="ctrl_deps")
    """Id of the operator that called it; the root is its own parent."""
    inputs: Tensors
    outputs: Tensors
    attrs: list[TraceAttribute] = []

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """`rf_id`, `seq_id`, `scope`, `tid`, ..., and the metadata of collectives."""
        return {attribute.name: attribute.value for attribute in self.attrs}


class ExecutionTrace(msgspec.Struct, frozen=True):
    """A whole file, operators in order of their ids: the order in which they began."""

    schema: str
    operators: list[Operator] = msgspec.field(name="nodes")


def is_execution_trace(file: FileContent) -> bool:
    """Whether a JSON file holds the nodes of a schema."""
    return file.is_json and b'"schema"' in file.start and '"nodes"' in file.text and not is_kineto(file)


def read_contents(path: Path) -> Contents:
    """Read a trace and sum up its communication."""
    trace = read_execution_trace(path)
    facts = (("schema", trace.schema), ("operators", f"{len(trace.operators):,}"))
    return Contents(TRACE, facts, tuple(totals(collective_calls(trace))))


def read_execution_trace(path: Path) -> ExecutionTrace:
    """Read a trace, plain or gzipped.

    Raises:
        InputError: the file is missing, cut off, not JSON, no execution trace, or of an unknown schema.
    """
    trace = decode_json(path, ExecutionTrace, "a PyTorch execution trace", "it has schema and nodes")
    if trace.schema not in SCHEMAS:
        raise InputError(
            f"{path} has the schema {trace.schema!r}, which is not read", f"known are {', '.join(SCHEMAS)}"
        )
    trace.operators.sort(key=lambda operator: operator.id)
    ids = {operator.id for operator in trace.operators}
    if len(ids) != len(trace.operators):
        raise InputError(f"{path}: two nodes have the same id")
    orphan = next((operator for operator in trace.operators if operator.parent not in ids), None)
    if orphan is not None:
        raise InputError(
            f"{path}: node {orphan.id} ({orphan.name}) belongs to node {orphan.parent}, which is not there",
            "is the file cut off?",
        )
    return trace


def collective_calls(trace: ExecutionTrace) -> Iterator[CollectiveCall]:
    """Yield the collectives in order: `record_param_comms` with its metadata, or without it the backend's node."""
    for operator in trace.operators:
        backend, colon, name = operator.name.partition(":")
        if "collective_name" in operator.attributes:
            name, metadata = str(operator.attributes["collective_name"]), operator.attributes
        elif colon and backend in ("gloo", "mpi", "nccl"):
            metadata = _from_tensors(operator)
        else:
            continue
        call = torch_call(name, metadata, _CALL_KEYS, None)
        if call is not None:
            yield call


def _from_tensors(operator: Operator) -> dict[str, Any]:
    tensor = operator.inputs.values[0] if operator.inputs.values else None
    kind = operator.inputs.types[0] if operator.inputs.types else ""
    if not isinstance(tensor, list) or len(tensor) < 5 or not kind.startswith("Tensor("):
        return {}
    elements = tensor[3]
    return {"in_msg_nelems": elements, "out_msg_nelems": elements, "dtype": kind[len("Tensor(") : -1]}
