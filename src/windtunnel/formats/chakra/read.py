"""Read Chakra traces; fields of newer schemas are skipped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import read_bytes
from windtunnel.formats.chakra.messages import LIST, messages
from windtunnel.formats.chakra.schema import Attribute, ChakraKind, ChakraNode, ChakraTrace, Operands


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
    for number, ((start, end), kind) in enumerate(zip(_messages(content, path), messages().of_file(), strict=False)):
        try:
            message = kind.FromString(content[start:end])
            if number:
                nodes.append(_node(message))
            else:
                version, attributes = message.version, tuple(map(_attribute, message.attributes))
        except (ValueError, messages().error) as error:
            what = f"node {number}" if number else "the metadata"
            raise InputError(f"{path}, byte {start}: {what} is no message of a Chakra trace: {error}") from None
    return ChakraTrace(tuple(nodes), version, attributes)


def _messages(content: bytes, path: Path) -> Iterator[tuple[int, int]]:
    """Yield where each message begins and ends; its length stands before it, seven bits a byte, the lowest first."""
    position = 0
    while position < len(content):
        start, length = position, 0
        while start < len(content) and content[start] & 0x80:
            length |= (content[start] & 0x7F) << 7 * (start - position)
            start += 1
        if start == len(content) or start - position > 9:
            raise InputError(f"{path}, byte {position}: no length of a message stands here", "is the file cut off?")
        length |= content[start] << 7 * (start - position)
        start += 1
        if start + length > len(content):
            raise InputError(
                f"{path}, byte {position} begins a message of {length} bytes; {len(content) - start} are left",
                "is the file cut off, or no Chakra trace?",
            )
        yield start, start + length
        position = start + length


def _node(message: Any) -> ChakraNode:
    return ChakraNode(
        id=message.id,
        name=message.name,
        kind=ChakraKind(message.kind),
        control_dependencies=tuple(message.control_dependencies),
        data_dependencies=tuple(message.data_dependencies),
        start_us=message.start_us,
        duration_us=message.duration_us,
        inputs=_operands(message.inputs) if message.HasField("inputs") else None,
        outputs=_operands(message.outputs) if message.HasField("outputs") else None,
        attributes=tuple(map(_attribute, message.attributes)),
    )


def _operands(message: Any) -> Operands:
    return Operands(message.values, message.shapes, message.types)


def _attribute(message: Any) -> Attribute:
    field = message.WhichOneof("value")
    if field is None:
        return Attribute(message.name, "string", None, message.documentation)
    content = getattr(message, field)
    value = tuple(content.values) if field.endswith(LIST) else content
    return Attribute(message.name, field.removesuffix(LIST), value, message.documentation)
