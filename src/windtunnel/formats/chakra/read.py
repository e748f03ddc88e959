"""Read Chakra traces; fields of newer schemas are skipped."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import read_bytes
from windtunnel.formats.chakra.schema import (
    BYTES,
    FIXED32,
    FIXED64,
    SCALARS,
    VARINT,
    Attribute,
    ChakraKind,
    ChakraNode,
    ChakraTrace,
    Operands,
    Scalar,
    Value,
)

_KINDS = {field: kind for kind, (field, _, _) in SCALARS.items()}


def read_trace(path: Path) -> ChakraTrace:
    """Read one rank's trace, also gzipped.

    Raises:
        InputError: the file is missing, empty, cut off or no Chakra trace; names the byte at which it breaks.
    """
    content = read_bytes(path)
    if not content:
        raise InputError(f"{path} is empty; a Chakra trace begins with its metadata")
    nodes: list[ChakraNode] = []
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
    """Yield (field, wire type, value); the value is an int, or bytes."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        field, wire = key >> 3, key & 7
        if wire == VARINT:
            value, position = _read_varint(message, position)
            yield field, wire, value
            continue
        if wire == BYTES:
            length, position = _read_varint(message, position)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
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


def _read_node(message: bytes) -> ChakraNode:
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    lists: dict[int, list[int]] = {4: [], 5: []}
    operands: dict[int, Operands] = {}
    name, attributes = "", []
    for field, wire, value in _fields(message):
        if field in numbers:
            numbers[field] = _as_int(value, wire)
        elif field in lists:
            lists[field] += [value] if wire == VARINT else list(_packed("uint64", value))
        elif field == 2:
            name = _as_text(value, wire)
        elif field in (8, 9):
            operands[field] = _read_operands(_as_bytes(value, wire))
        elif field == 10:
            attributes.append(_read_attribute(_as_bytes(value, wire)))
    return ChakraNode(
        id=numbers[1],
        name=name,
        kind=ChakraKind(numbers[3]),
        control_dependencies=tuple(lists[4]),
        data_dependencies=tuple(lists[5]),
        start_us=numbers[6],
        duration_us=numbers[7],
        inputs=operands.get(8),
        outputs=operands.get(9),
        attributes=tuple(attributes),
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
    content: Value | None = None
    for field, wire, value in _fields(message):
        if field == 1:
            name = _as_text(value, wire)
        elif field == 2:
            documentation = _as_text(value, wire)
        elif field in _KINDS:
            kind = _KINDS[field]
            content = _value(kind, value, wire)
        elif field - 1 in _KINDS:
            kind = _KINDS[field - 1]
            content = tuple(_list(kind, _as_bytes(value, wire)))
    return Attribute(name, kind, content, documentation)


def _list(kind: str, message: bytes) -> Iterator[Scalar]:
    is_packable = SCALARS[kind][1] != BYTES
    for field, wire, value in _fields(message):
        if field != 1:
            continue
        if is_packable and wire == BYTES:
            yield from _packed(kind, value)
        else:
            yield _value(kind, value, wire)


def _packed(kind: str, content: bytes) -> Iterator[Any]:
    wire = SCALARS[kind][1]
    position = 0
    while position < len(content):
        if wire == VARINT:
            value, position = _read_varint(content, position)
            yield _value(kind, value, wire)
        else:
            width = 4 if wire == FIXED32 else 8
            yield _value(kind, content[position : position + width], wire)
            position += width


def _value(kind: str, raw: Any, raw_wire: int) -> Scalar:
    _, wire, layout = SCALARS[kind]
    if wire != raw_wire:
        raise ValueError(f"a {kind} has wire type {raw_wire}")
    if kind == "string":
        return _as_text(raw, wire)
    if wire == BYTES:
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
    if wire != VARINT:
        raise ValueError(f"a number has wire type {wire}")
    return int(value)


def _as_bytes(value: Any, wire: int) -> bytes:
    if wire != BYTES:
        raise ValueError(f"a message has wire type {wire}")
    return bytes(value)


def _as_text(value: Any, wire: int) -> str:
    return _as_bytes(value, wire).decode("utf-8")
