"""A Chakra trace in memory: nodes and their attributes."""

from dataclasses import dataclass
from enum import IntEnum

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


Scalar = bool | int | float | str | bytes
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True)
class Attribute:
    """A named value of a node or of the trace."""

    name: str
    kind: str
    """Protobuf's name of the type, such as `int64`, `bool` or `string`; a tuple value is a list of that type."""
    value: Value | None = None
    """None where the file gives none."""
    documentation: str = ""


@dataclass(frozen=True)
class Operands:
    """Inputs or outputs of a node, as texts of its writer."""

    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True)
class ChakraNode:
    """A computation or communication; it starts when all its dependencies have ended."""

    id: int
    name: str
    kind: ChakraKind
    control_dependencies: tuple[int, ...] = ()
    data_dependencies: tuple[int, ...] = ()
    start_us: int = 0
    duration_us: int = 0
    inputs: Operands | None = None
    outputs: Operands | None = None
    attributes: tuple[Attribute, ...] = ()

    def get(self, name: str) -> Value | None:
        """Return the value of the attribute of that name, or None."""
        return next((attribute.value for attribute in self.attributes if attribute.name == name), None)


@dataclass(frozen=True)
class ChakraTrace:
    """A whole file."""

    nodes: tuple[ChakraNode, ...]
    version: str = VERSION
    attributes: tuple[Attribute, ...] = ()
