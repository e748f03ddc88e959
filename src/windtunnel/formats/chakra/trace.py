"""A Chakra trace: protobuf's messages, whose classes are made from the numbers of et_def.proto, read and written."""

import json
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.errors import InputError, MissingExtraError
from windtunnel.files import read_bytes
from windtunnel.formats.collective_calls import CollectiveCall, Contents, totals
from windtunnel.schema import read_yaml

VERSION = "0.0.4"

ChakraKind = IntEnum("ChakraKind", "INVALID METADATA MEMORY_LOAD MEMORY_STORE COMPUTE SEND RECEIVE COLLECTIVE", start=0)
"""Kinds of nodes."""
ChakraCollective = IntEnum(
    "ChakraCollective",
    "ALL_REDUCE REDUCE ALL_GATHER GATHER SCATTER BROADCAST ALL_TO_ALL REDUCE_SCATTER REDUCE_SCATTER_BLOCK BARRIER",
    start=0,
)
"""Values of a collective's attribute `comm_type`. ASTRA-sim 2 runs the first, third, seventh and eighth."""


def _fields() -> dict[str, list[tuple[int, str, str]]]:
    """Return message -> (number, name, type) of its fields, those of the types of an attribute's value among them."""
    raw = read_yaml(Path(__file__).with_name("messages.yaml"))
    messages: dict[str, list[tuple[int, str, str]]] = raw["messages"]
    for place, kind in enumerate(raw["kinds"]):
        messages[f"{kind}_list"] = [(1, "values", f"{kind}*")]
        messages["Attribute"] += [(3 + 2 * place, kind, kind), (4 + 2 * place, f"{kind}_list", f"{kind}_list")]
    return messages


class Messages(NamedTuple):
    """The classes, protobuf's functions for files of them, and the error that parsing raises."""

    metadata: Any
    node: Any
    proto: Any
    error: type[Exception]


@cache
def messages() -> Messages:
    """Return the classes. MissingExtraError where protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto
        from google.protobuf.message import DecodeError
    except ImportError:
        raise MissingExtraError("protobuf", "chakra") from None
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    known = _fields()
    for name, fields in known.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            member = message.field.add(name=field, number=number, label=3 if kind.endswith("*") else 1)
            kind = kind.rstrip("*")
            member.type = getattr(member, f"TYPE_{kind.upper()}", member.TYPE_MESSAGE)
            if member.type == member.TYPE_MESSAGE:
                member.type_name = f".et.{kind}"
            if name == "Attribute" and number > 2:
                member.oneof_index = 0
    file.message_type[list(known).index("Attribute")].oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    metadata, node = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"et.{name}")) for name in ("Metadata", "Node")
    )
    return Messages(metadata, node, proto, DecodeError)


class ChakraTrace(NamedTuple):
    """A whole file: its messages."""

    metadata: Any
    nodes: list[Any]
    """Computations and communications; each starts when all its dependencies have ended."""


def value_of(node: Any, name: str) -> Any:
    """Return the value of a node's attribute; None where there is no such attribute or value."""
    for attribute in node.attributes:
        if attribute.name == name:
            field = attribute.WhichOneof("value")
            return getattr(attribute, field) if field else None
    return None


def read_trace(path: Path) -> ChakraTrace:
    """Read one rank's trace, also gzipped. InputError where the file is missing, empty, cut off or no Chakra trace;
    names the byte at which it breaks."""
    content, classes, read = BytesIO(read_bytes(path)), messages(), list[Any]()
    if not content.getbuffer():
        raise InputError(f"{path} is empty; a Chakra trace begins with its metadata")
    while True:
        start = content.tell()
        try:
            message = classes.proto.parse_length_prefixed(classes.node if read else classes.metadata, content)
            if message is None:
                return ChakraTrace(read[0], read[1:])
            if read:
                ChakraKind(message.kind)
        except (ValueError, OverflowError, classes.error) as error:
            what = f"node {len(read)}" if read else "the metadata"
            wrong = f"{path}, byte {start}: {what} is no message of a Chakra trace: {error}"
            raise InputError(wrong, "is the file cut off?") from None
        read.append(message)


def trace_bytes(trace: ChakraTrace) -> bytes:
    """Return the file that holds `trace`: its metadata, then its nodes, each with its length before it."""
    file = BytesIO()
    for message in (trace.metadata, *trace.nodes):
        messages().proto.serialize_length_prefixed(message, file)
    return file.getvalue()


TRACE = "Chakra trace"
START = re.compile(rb"[\x02-\xff]{1,3}?\n[\x05-\x10]\d+\.\d+\.\d+")
"""The length of the metadata, then its first field, the version."""
_COLLECTIVES: dict[int, str] = {member.value: member.name.lower() for member in ChakraCollective}
_KINDS: dict[int, str] = {ChakraKind.SEND: "send", ChakraKind.RECEIVE: "receive"}


def read_contents(path: Path) -> Contents:
    """Read a trace and sum up its computation and communication.

    A rank's share of an all-gather, which ASTRA-sim counts, is multiplied by the ranks of its group where
    `PREFIX.groups.json` beside `PREFIX.RANK.et` says them.
    """
    trace, groups = read_trace(path), path.with_name(f"{path.name.split('.')[0]}.groups.json")
    sizes = {name: len(ranks) for name, ranks in json.loads(groups.read_text()).items()} if groups.is_file() else {}
    facts = [("version", trace.metadata.version), ("nodes", f"{len(trace.nodes):,}")]
    calls = tuple(totals(_calls(trace, sizes)))
    if any(call.operation == "all_gather" and call.group_size is None for call in calls):
        facts.append(("all-gathers", f"a rank's share, as {groups.name} does not say how many ranks gather"))
    compute_us = sum(node.duration_us for node in trace.nodes if node.kind == ChakraKind.COMPUTE)
    return Contents(TRACE, tuple(facts), calls, compute_us * 1e-6 if compute_us else None)


def _calls(trace: ChakraTrace, sizes: Mapping[str, int]) -> Iterator[CollectiveCall]:
    for node in trace.nodes:
        raw = value_of(node, "comm_size")
        size = raw if isinstance(raw, int) else None
        if node.kind == ChakraKind.COLLECTIVE:
            raw = value_of(node, "comm_type")
            name = _COLLECTIVES.get(raw, f"collective {raw!r}") if isinstance(raw, int) else "collective"
            group = str(value_of(node, "pg_name") or "")
            ranks = sizes.get(group)
            share = (ranks or 1) if name == "all_gather" else 1
            yield CollectiveCall(name, group, ranks, None if size is None else size * share)
        elif node.kind in _KINDS:
            yield CollectiveCall(_KINDS[node.kind], "", None, size)
