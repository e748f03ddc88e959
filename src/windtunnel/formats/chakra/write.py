"""Write Chakra traces as protobuf's own encoder does."""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from windtunnel.files import write_bytes
from windtunnel.formats.chakra.schema import BYTES, SCALARS, VARINT, Attribute, ChakraTrace, Node


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
    return _key(field, BYTES) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _sized(field, text.encode()) if text else b""


def _number(field: int, number: int) -> bytes:
    return _key(field, VARINT) + _varint(number) if number else b""


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
    field, wire, _ = SCALARS[one.kind]
    if not isinstance(one.value, tuple):
        return head + _key(field, wire) + _scalar(one.kind, one.value)
    elements = [_scalar(one.kind, value) for value in one.value]
    if wire == BYTES:
        content = b"".join(_key(1, BYTES) + element for element in elements)
    else:
        content = _sized(1, b"".join(elements)) if elements else b""
    return head + _sized(field + 1, content)


def _scalar(kind: str, value: Any) -> bytes:
    _, wire, layout = SCALARS[kind]
    if wire == BYTES:
        content = value.encode() if isinstance(value, str) else value
        return _varint(len(content)) + bytes(content)
    if layout == "zigzag":
        return _varint(2 * value if value >= 0 else -2 * value - 1)
    return struct.pack(layout, value) if layout else _varint(int(value))
