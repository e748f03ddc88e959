"""A Chakra trace in memory: protobuf's messages, whose classes are made from the numbers of et_def.proto."""

from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

from windtunnel.errors import MissingExtraError

VERSION = "0.0.4"


class ChakraKind(IntEnum):
    """Kinds of nodes."""

    INVALID = 0
    METADATA = 1
    MEMORY_LOAD = 2
    MEMORY_STORE = 3
    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


class ChakraCollective(IntEnum):
    """Values of a collective's attribute `comm_type`. ASTRA-sim 2 runs the first, third, seventh and eighth."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


KINDS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64"),
    *("sfixed32", "sfixed64", "bool", "string", "bytes"),
)
"""Types of an attribute's value; each has the next free field from 3 on, and its list (`KIND_list`) the one behind."""
_FIELDS: dict[str, tuple[tuple[int, str, str], ...]] = {
    "Operands": ((1, "values", "string"), (2, "shapes", "string"), (3, "types", "string")),
    **{f"{kind}_list": ((1, "values", f"{kind}*"),) for kind in KINDS},
    "Attribute": (
        (1, "name", "string"),
        (2, "documentation", "string"),
        *((3 + 2 * place, kind, kind) for place, kind in enumerate(KINDS)),
        *((4 + 2 * place, f"{kind}_list", f"{kind}_list") for place, kind in enumerate(KINDS)),
    ),
    "Metadata": ((1, "version", "string"), (2, "attributes", "Attribute*")),
    "Node": (
        (1, "id", "uint64"),
        (2, "name", "string"),
        (3, "kind", "int32"),
        (4, "control_dependencies", "uint64*"),
        (5, "data_dependencies", "uint64*"),
        (6, "start_us", "uint64"),
        (7, "duration_us", "uint64"),
        (8, "inputs", "Operands"),
        (9, "outputs", "Operands"),
        (10, "attributes", "Attribute*"),
    ),
}
"""Message -> (number, name, type) of its fields; the type has a star where the field repeats."""


class Messages(NamedTuple):
    """The classes, and the error that parsing raises."""

    metadata: Any
    node: Any
    error: type[Exception]


@cache
def messages() -> Messages:
    """Return the classes.

    Raises:
        MissingExtraError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from google.protobuf.message import DecodeError
    except ImportError:
        raise MissingExtraError("protobuf", "chakra") from None
    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            member = message.field.add(name=field, number=number, label=3 if kind.endswith("*") else 1)
            kind = kind.rstrip("*")
            member.type = getattr(member, f"TYPE_{kind.upper()}", member.TYPE_MESSAGE)
            if member.type == member.TYPE_MESSAGE:
                member.type_name = f".et.{kind}"
            if name == "Attribute" and number > 2:
                member.oneof_index = 0
    file.message_type[list(_FIELDS).index("Attribute")].oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    metadata, node = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"et.{name}")) for name in ("Metadata", "Node")
    )
    return Messages(metadata, node, DecodeError)


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
