"""A Chakra trace in memory: its metadata, and nodes with attributes."""

from enum import IntEnum
from typing import Any, NamedTuple

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


class ChakraTrace(NamedTuple):
    """A whole file: protobuf messages of the classes in `messages`."""

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
