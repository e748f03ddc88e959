"""Text files of other programs: read whole, plain or gzipped, and written whole or not at all."""

import gzip
import os
import tempfile
import zlib
from pathlib import Path

from windtunnel.errors import InputError, WindtunnelError


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked where it is gzipped, whatever its name.

    Raises:
        InputError: the file is missing, unreadable or a broken gzip file.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is a broken gzip file: {error}", "fetch or compress it again") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """The text of a file, plain or gzipped.

    Raises:
        InputError: as `read_bytes`; or it is not UTF-8 text.
    """
    content = read_bytes(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file") from None


def check_writable(path: Path) -> None:
    """Raise InputError where no file can be written to `path`, before hours of work are lost for it."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; a file is written")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            f"{path} cannot be written: {folder} is not a folder that you may write to", "choose another place"
        )


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, gzipped where its name ends in `.gz`; it appears whole or not at all.

    Raises:
        WindtunnelError: it cannot be written.
    """
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}-", dir=path.parent) as folder:
            draft = Path(folder) / "draft"
            draft.write_bytes(content)
            draft.replace(path)
    except OSError as error:
        raise WindtunnelError(f"{path} cannot be written: {error.strerror or error}") from None


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, of text in UTF-8."""
    write_bytes(path, text.encode("utf-8"))
