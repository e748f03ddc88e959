"""Read Chakra traces; fields of newer schemas are skipped."""

from collections.abc import Iterator
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.files import read_bytes
from windtunnel.formats.chakra.messages import ChakraKind, ChakraTrace, messages


def read_trace(path: Path) -> ChakraTrace:
    """Read one rank's trace, also gzipped.

    Raises:
        InputError: the file is missing, empty, cut off or no Chakra trace; names the byte at which it breaks.
    """
    content = read_bytes(path)
    if not content:
        raise InputError(f"{path} is empty; a Chakra trace begins with its metadata")
    classes, read = messages(), []
    for number, (start, end) in enumerate(_messages(content, path)):
        try:
            message = (classes.node if number else classes.metadata).FromString(content[start:end])
            if number:
                ChakraKind(message.kind)
        except (ValueError, classes.error) as error:
            what = f"node {number}" if number else "the metadata"
            raise InputError(f"{path}, byte {start}: {what} is no message of a Chakra trace: {error}") from None
        read.append(message)
    return ChakraTrace(read[0], read[1:])


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
