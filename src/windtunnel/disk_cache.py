"""The user's cache folder: files that make a later run start sooner, checked when they are read.

A file that is missing, damaged or cannot be written costs time and nothing else.
"""

import os
import zlib
from contextlib import suppress
from pathlib import Path

_CHECKSUM_BYTES = 4


def home() -> Path:
    """Return the user's cache folder of this program."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windtunnel"


def recall(path: Path) -> bytes | None:
    """Return what `keep` wrote to a file; None where it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    content, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return content if content and _checksum(content) == checksum else None


def keep(path: Path, content: bytes) -> None:
    """Write a file with a checksum; it appears completely or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content + _checksum(content))
        draft.replace(path)


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")
