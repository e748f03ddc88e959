"""Write Chakra traces as protobuf's own encoder does."""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from windtunnel.files import write_bytes
from windtunnel.formats.chakra.schema import BYTES, SCALARS, VARINT, Attribute, ChakraNode, ChakraTrace


def write_trace(path: Path, trace: ChakraTrace) -> None:
    """Write one rank's trace, gzipped where the name ends in `.gz`.

    Raises:
        InputError: it cannot be written.
    """
    write_bytes(path, trace_bytes(trace))


def trace_bytes(trace: ChakraTrace) -> bytes:
    """Return the file that holds `trace`, as protobuf's own encoder writes it: fields in order, defaults left out."""
    metadata = _text(1, trace.version) + b"".join(_sized(2, _attribute(attribute)) for attribute in trace.attributes)
    messages = (metadata, *map(_node, trace.nodes))
    return b"".join(_varint(len(message)) + message for message in messages)


def _varint(number: int) -> bytes:
    number &= 0xFFFF_FFFF_FFFF_FFFF  # negative numbers take ten bytes
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


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


def _node(node: ChakraNode) -> bytes:
    operands = [
        _sized(field, _text(1, texts.values) + _text(2, texts.shapes) + _text(3, texts.types))
        for field, texts in ((8, node.inputs), (9, node.outputs))
        if texts is not None
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
            *(_sized(10, _attribute(attribute)) for attribute in node.attributes),
        ]
    )


def _attribute(attribute: Attribute) -> bytes:
    """Encode an attribute: a member of a oneof is written even where it is 0 or empty, and so is a list's element."""
    head = _text(1, attribute.name) + _text(2, attribute.documentation)
    if attribute.value is None:
        return head
    field, wire, _ = SCALARS[attribute.kind]
    if not isinstance(attribute.value, tuple):
        return head + _key(field, wire) + _scalar(attribute.kind, attribute.value)
    elements = [_scalar(attribute.kind, value) for value in attribute.value]
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
