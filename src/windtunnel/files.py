"""Files of other programs: read completely, plain or gzipped, and written completely or not at all; their numbers."""

import codecs
import csv
import gzip
import io
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from windtunnel.errors import InputError, unreadable, unwritable

T = TypeVar("T")


@contextmanager
def opened(path: Path, buffer_bytes: int = 1 << 16) -> Iterator[io.BufferedReader]:
    """Open a file for reading behind its byte order mark; a gzipped file is unpacked, whatever its name. InputError
    where the file is missing, unreadable or a broken gzip file."""
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] == b"\x1f\x8b":
                with gzip.open(file) as unpacked:
                    yield behind_mark(io.BufferedReader(unpacked, buffer_bytes))
            else:
                yield behind_mark(file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is a broken gzip file: {error}", "fetch or compress it again") from None
    except OSError as error:
        raise unreadable(path, error) from None


def behind_mark(file: io.BufferedReader) -> io.BufferedReader:
    """Return a file of UTF-8 text behind its byte order mark, if it has one."""
    if file.peek(3)[:3] == codecs.BOM_UTF8:
        file.read(3)
    return file


def is_file(path: Path) -> bool:
    """Whether there is a file at `path`; False for what no file can be called."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder at `path`; False for what no folder can be called."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_bytes(path: Path, limit: int = -1) -> bytes:
    """Read at most `limit` bytes of a file, or all, as `opened`."""
    with opened(path) as file:
        return file.read(limit)


def read_text(path: Path) -> str:
    """Return the text of a file, plain or gzipped; errors are those of `read_bytes`, or InputError where not UTF-8."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise unreadable(path, error) from None


def parse_number(text: Any, what: str) -> float:
    """Return a finite number of at least 0; `what` names it and its place in the InputError for anything else."""
    try:
        number = float(text)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{what} is {text!r}; a number is needed") from None
    if not 0 <= number < float("inf"):
        raise InputError(f"{what} is {text}; at least 0 is needed")
    return number


def parse_whole(text: Any, what: str, least: int | None = 0) -> int:
    """Return a whole number of at least `least`; `what` names it and its place in the InputError for anything else."""
    try:
        number = int(text)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{what} is {text!r:.60}; a whole number is needed") from None
    if least is not None and number < least:
        raise InputError(f"{what} is {number}; at least {least} is needed")
    return number


def decode_json(path: Path, kind: type[T], what: str, hint: str | None = None) -> T:
    """Decode JSON, plain or gzipped, leaving out what `kind` does not have; InputError where missing or not `what`."""
    content = read_bytes(path)
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not {what}: {error}", hint) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"{path} is not {what}: it cannot be read as JSON: {error}"
        raise InputError(text, "is the file cut off?") from None


def check_writable(path: Path) -> None:
    """Raise InputError where no file can be written to `path`, before hours of work are lost."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; a file is written", f"for instance {path / 'NAME'}")
    if not _is_special(path):
        check_writable_folder(path, path.absolute().parent)


def check_replaceable(path: Path | None, overwrite: bool, *suffixes: str) -> None:
    """Raise InputError where no file can be written to `path`, or one is there that may not be replaced.

    Args:
        path: None where nothing is to be written.
        suffixes: ends of its name, of which it has to have one.
    """
    if path is None:
        return
    if suffixes and not path.name.endswith(suffixes):
        raise InputError(f"{path} does not end in {' or '.join(suffixes)}", f"for instance run{suffixes[0]}")
    check_writable(path)
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists already", "choose another name, or replace it with --overwrite")


def check_writable_folder(path: Path, folder: Path) -> None:
    """Raise InputError unless a file can be made in `folder`, or in its nearest parent where `folder` is missing."""
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError:
        raise InputError(
            f"{path} cannot be written: {nearest} is not a folder that you may write to", "choose another place"
        ) from None


def _is_special(path: Path) -> bool:
    """Whether a path is a device, a pipe or a link, which must be written to and not replaced."""
    return path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir())


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path`, gzipped for `.gz`, completely or not at all; InputError where it cannot be written."""
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    try:
        if _is_special(path):
            path.write_bytes(content)
            return
        with draft_of(path) as draft:
            draft.write_bytes(content)
    except OSError as error:
        raise unwritable(path, error) from None


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; that file replaces `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}-", dir=path.parent) as folder:
        draft = Path(folder) / "draft"
        yield draft
        draft.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, otherwise like `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def csv_text(headers: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV text; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(rows)
    return text.getvalue()


@contextmanager
def new_files(folder: Path) -> Iterator[Path]:
    """Yield a draft folder, which becomes `folder` at once when the block ends without an error.

    Of a folder that is there, each file is replaced as a whole, and others stay. InputError where the folder cannot be
    written to.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
            draft = Path(name) / "draft"
            draft.mkdir()
            yield draft
            if not folder.exists():
                draft.rename(folder)
                return
            for file in sorted(file for file in draft.rglob("*") if file.is_file()):
                target = folder / file.relative_to(draft)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
    except OSError as error:
        raise unwritable(folder, error) from None
