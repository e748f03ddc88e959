"""Write Chakra traces."""

from pathlib import Path

from windtunnel.files import write_bytes
from windtunnel.formats.chakra.messages import ChakraTrace


def write_trace(path: Path, trace: ChakraTrace) -> None:
    """Write one rank's trace, gzipped where the name ends in `.gz`."""
    write_bytes(path, trace_bytes(trace))


def trace_bytes(trace: ChakraTrace) -> bytes:
    """Return the file that holds `trace`: its metadata, then its nodes, each with its length before it."""
    contents = [message.SerializeToString() for message in (trace.metadata, *trace.nodes)]
    return b"".join(_length(len(content)) + content for content in contents)


def _length(number: int) -> bytes:
    """Encode a length, seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
