"""Write Chakra traces."""

import dataclasses
from pathlib import Path
from typing import Any

from windtunnel.files import write_bytes
from windtunnel.formats.chakra.messages import LIST, messages
from windtunnel.formats.chakra.schema import Attribute, ChakraTrace


def write_trace(path: Path, trace: ChakraTrace) -> None:
    """Write one rank's trace, gzipped where the name ends in `.gz`.

    Raises:
        InputError: it cannot be written.
    """
    write_bytes(path, trace_bytes(trace))


def trace_bytes(trace: ChakraTrace) -> bytes:
    """Return the file that holds `trace`: its metadata, then its nodes, each with its length before it."""
    kinds = messages()
    parts = [kinds.metadata(version=trace.version, attributes=map(_attribute, trace.attributes))]
    for node in trace.nodes:
        fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        fields["attributes"] = map(_attribute, node.attributes)
        for name in ("inputs", "outputs"):
            fields[name] = dataclasses.asdict(fields[name]) if fields[name] is not None else None
        parts.append(kinds.node(**fields))
    contents = [part.SerializeToString() for part in parts]
    return b"".join(_length(len(content)) + content for content in contents)


def _length(number: int) -> bytes:
    """Encode a length, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _attribute(attribute: Attribute) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": attribute.name, "documentation": attribute.documentation}
    if isinstance(attribute.value, tuple):
        fields[f"{attribute.kind}{LIST}"] = {"values": attribute.value}
    elif attribute.value is not None:
        fields[attribute.kind] = attribute.value
    return fields
