"""MLCommons Chakra execution traces (`.et`): one file a rank, a graph of computations and communications.

A file is a sequence of protobuf messages, each with its length before it: the trace's metadata, then nodes to the end
(mlcommons/chakra, schema/protobuf/et_def.proto, 0.0.4 and 1.0.0; ASTRA-sim's fork has the same numbers). The few rules
of the wire format that this needs are written out here; the tests hold them against protobuf itself and a sample
of ASTRA-sim, to the byte.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import read_bytes, write_bytes

VERSION = "0.0.4"


class NodeKind(IntEnum):
    """What a node does."""

    INVALID = 0
    METADATA = 1
    MEMORY_LOAD = 2
    MEMORY_STORE = 3
    COMPUTE = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


class Collective(IntEnum):
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
    """Protobuf's name of the type, such as `int64`, `uint64`, `bool`, `double` or `string`; a tuple is a list of it."""
    value: Value | None = None
    """None where the file gives none."""
    documentation: str = ""


@dataclass(frozen=True)
class Operands:
    """Inputs or outputs of a node, each a text that its writer chose."""

    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True)
class Node:
    """A computation or communication; it starts when all that it depends on has ended."""

    id: int
    name: str
    kind: NodeKind
    control_dependencies: tuple[int, ...] = ()
    data_dependencies: tuple[int, ...] = ()
    start_us: int = 0
    duration_us: int = 0
    inputs: Operands | None = None
    outputs: Operands | None = None
    attributes: tuple[Attribute, ...] = ()

    def get(self, name: str) -> Value | None:
        """The value of the attribute of that name, or None."""
        return next((one.value for one in self.attributes if one.name == name), None)


@dataclass(frozen=True)
class ChakraTrace:
    """A whole file."""

    nodes: tuple[Node, ...]
    version: str = VERSION
    attributes: tuple[Attribute, ...] = ()


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_SCALARS = {
    "double": (3, _FIXED64, "<d"),
    "float": (5, _FIXED32, "<f"),
    "int32": (7, _VARINT, ""),
    "int64": (9, _VARINT, ""),
    "uint32": (11, _VARINT, ""),
    "uint64": (13, _VARINT, ""),
    "sint32": (15, _VARINT, "zigzag"),
    "sint64": (17, _VARINT, "zigzag"),
    "fixed32": (19, _FIXED32, "<I"),
    "fixed64": (21, _FIXED64, "<Q"),
    "sfixed32": (23, _FIXED32, "<i"),
    "sfixed64": (25, _FIXED64, "<q"),
    "bool": (27, _VARINT, ""),
    "string": (29, _BYTES, ""),
    "bytes": (31, _BYTES, ""),
}
"""Kind -> its field in an attribute, how it stands on the wire, and its layout. A list has the next field."""
_KINDS = {field: kind for kind, (field, _, _) in _SCALARS.items()}


# ------------------------------------------------------------------------------------------------------------- writing


def write_trace(path: Path, trace: ChakraTrace) -> None:
    """Write one rank's trace, gzipped where the name ends in `.gz`.

    Raises:
        InputError: it cannot be written.
    """
    write_bytes(path, trace_bytes(trace))


def trace_bytes(trace: ChakraTrace) -> bytes:
    """The file that holds `trace`, as protobuf's own encoder writes it: fields in order, defaults left out."""
    metadata = _text(1, trace.version) + b"".join(_sized(2, _attribute(one)) for one in trace.attributes)
    messages = (metadata, *map(_node, trace.nodes))
    return b"".join(_varint(len(message)) + message for message in messages)


def _varint(number: int) -> bytes:
    number &= 0xFFFF_FFFF_FFFF_FFFF  # negative numbers take ten bytes
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _sized(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _sized(field, text.encode()) if text else b""


def _number(field: int, number: int) -> bytes:
    return _key(field, _VARINT) + _varint(number) if number else b""


def _numbers(field: int, numbers: Iterable[int]) -> bytes:
    content = b"".join(map(_varint, numbers))
    return _sized(field, content) if content else b""


def _node(node: Node) -> bytes:
    operands = [
        _sized(field, _text(1, found.values) + _text(2, found.shapes) + _text(3, found.types))
        for field, found in ((8, node.inputs), (9, node.outputs))
        if found is not None
    ]
    return b"".join(
        [
            _number(1, node.id),
            _text(2, node.name),
            _number(3, node.kind),
            _numbers(4, node.control_dependencies),
            _numbers(5, node.data_dependencies),
            _number(6, node.start_us),
            _number(7, node.duration_us),
            *operands,
            *(_sized(10, _attribute(one)) for one in node.attributes),
        ]
    )


def _attribute(one: Attribute) -> bytes:
    """A member of a oneof stands on the wire even where it is 0 or empty; within lists nothing is left out either."""
    head = _text(1, one.name) + _text(2, one.documentation)
    if one.value is None:
        return head
    field, wire, _ = _SCALARS[one.kind]
    if not isinstance(one.value, tuple):
        return head + _key(field, wire) + _scalar(one.kind, one.value)
    elements = [_scalar(one.kind, value) for value in one.value]
    if wire == _BYTES:
        content = b"".join(_key(1, _BYTES) + element for element in elements)
    else:
        content = _sized(1, b"".join(elements)) if elements else b""
    return head + _sized(field + 1, content)


def _scalar(kind: str, value: Any) -> bytes:
    _, wire, layout = _SCALARS[kind]
    if wire == _BYTES:
        content = value.encode() if isinstance(value, str) else value
        return _varint(len(content)) + bytes(content)
    if layout == "zigzag":
        return _varint(2 * value if value >= 0 else -2 * value - 1)
    return struct.pack(layout, value) if layout else _varint(int(value))


# ------------------------------------------------------------------------------------------------------------- reading


def read_trace(path: Path) -> ChakraTrace:
    """One rank's trace, also gzipped. Fields of newer schemas are passed over.

    Raises:
        InputError: the file is missing, empty, cut off or no Chakra trace; names the byte at which it breaks.
    """
    content = read_bytes(path)
    if not content:
        raise InputError(f"{path} is empty; a Chakra trace begins with its metadata")
    nodes: list[Node] = []
    version = ""
    attributes: tuple[Attribute, ...] = ()
    for number, (start, end) in enumerate(_messages(content, path)):
        where = f"{path}, byte {start}"
        try:
            if number:
                nodes.append(_read_node(content[start:end]))
            else:
                version, attributes = _read_metadata(content[start:end])
        except (ValueError, TypeError, KeyError, struct.error) as error:
            what = f"node {number}" if number else "the metadata"
            raise InputError(f"{where}: {what} is no message of a Chakra trace: {error}") from None
    return ChakraTrace(tuple(nodes), version, attributes)


def _messages(content: bytes, path: Path) -> Iterator[tuple[int, int]]:
    position = 0
    while position < len(content):
        try:
            length, start = _read_varint(content, position)
        except ValueError as error:
            raise InputError(f"{path}, byte {position}: {error}", "is the file cut off?") from None
        if start + length > len(content):
            raise InputError(
                f"{path}, byte {position} begins a message of {length} bytes; {len(content) - start} are left",
                "is the file cut off, or no Chakra trace?",
            )
        yield start, start + length
        position = start + length


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if position >= len(content):
            raise ValueError("it ends within a number")
        byte = content[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, position
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than ten bytes")


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """(field, wire type, value): an int, or the bytes of it."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _read_varint(message, position)
            yield field, wire, value
            continue
        if wire == _BYTES:
            length, position = _read_varint(message, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} is unknown")
        if field == 0 or position + length > len(message):
            raise ValueError(f"field {field} is cut off")
        yield field, wire, message[position : position + length]
        position += length


def _read_metadata(message: bytes) -> tuple[str, tuple[Attribute, ...]]:
    version, attributes = "", []
    for field, wire, value in _fields(message):
        if field == 1:
            version = _as_text(value, wire)
        elif field == 2:
            attributes.append(_read_attribute(_as_bytes(value, wire)))
    return version, tuple(attributes)


def _read_node(message: bytes) -> Node:
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    lists: dict[int, list[int]] = {4: [], 5: []}
    operands: dict[int, Operands] = {}
    name, attributes = "", []
    for field, wire, value in _fields(message):
        if field in numbers:
            numbers[field] = _as_int(value, wire)
        elif field in lists:
            lists[field] += [value] if wire == _VARINT else list(_packed("uint64", value))
        elif field == 2:
            name = _as_text(value, wire)
        elif field in (8, 9):
            operands[field] = _read_operands(_as_bytes(value, wire))
        elif field == 10:
            attributes.append(_read_attribute(_as_bytes(value, wire)))
    return Node(
        numbers[1],
        name,
        NodeKind(numbers[3]),
        tuple(lists[4]),
        tuple(lists[5]),
        numbers[6],
        numbers[7],
        operands.get(8),
        operands.get(9),
        tuple(attributes),
    )


def _read_operands(message: bytes) -> Operands:
    texts = {1: "", 2: "", 3: ""}
    for field, wire, value in _fields(message):
        if field in texts:
            texts[field] = _as_text(value, wire)
    return Operands(*texts.values())


def _read_attribute(message: bytes) -> Attribute:
    name = documentation = ""
    kind = "string"
    found: Value | None = None
    for field, wire, value in _fields(message):
        if field == 1:
            name = _as_text(value, wire)
        elif field == 2:
            documentation = _as_text(value, wire)
        elif field in _KINDS:
            kind, found = _KINDS[field], _value(_KINDS[field], value, wire)
        elif field - 1 in _KINDS:
            kind = _KINDS[field - 1]
            found = tuple(_list(kind, _as_bytes(value, wire)))
    return Attribute(name, kind, found, documentation)


def _list(kind: str, message: bytes) -> Iterator[Scalar]:
    is_packable = _SCALARS[kind][1] != _BYTES
    for field, wire, value in _fields(message):
        if field != 1:
            continue
        if is_packable and wire == _BYTES:
            yield from _packed(kind, value)
        else:
            yield _value(kind, value, wire)


def _packed(kind: str, content: bytes) -> Iterator[Any]:
    wire = _SCALARS[kind][1]
    position = 0
    while position < len(content):
        if wire == _VARINT:
            value, position = _read_varint(content, position)
            yield _value(kind, value, wire)
        else:
            width = 4 if wire == _FIXED32 else 8
            yield _value(kind, content[position : position + width], wire)
            position += width


def _value(kind: str, raw: Any, found_wire: int) -> Scalar:
    _, wire, layout = _SCALARS[kind]
    if wire != found_wire:
        raise ValueError(f"a {kind} has wire type {found_wire}")
    if kind == "string":
        return _as_text(raw, found_wire)
    if wire == _BYTES:
        return bytes(raw)
    if layout == "zigzag":
        return int(raw >> 1) ^ -int(raw & 1)
    if layout:
        return struct.unpack(layout, raw)[0]  # type: ignore[no-any-return]
    if kind == "bool":
        return bool(raw)
    return _signed(raw) if kind in ("int32", "int64") else int(raw)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _as_int(value: Any, wire: int) -> int:
    if wire != _VARINT:
        raise ValueError(f"a number has wire type {wire}")
    return int(value)


def _as_bytes(value: Any, wire: int) -> bytes:
    if wire != _BYTES:
        raise ValueError(f"a message has wire type {wire}")
    return bytes(value)


def _as_text(value: Any, wire: int) -> str:
    return _as_bytes(value, wire).decode("utf-8")
