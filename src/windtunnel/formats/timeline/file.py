"""Write a timeline's file: checked before the run, and whole or not at all."""

import gzip
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from windtunnel.errors import InputError, unwritable
from windtunnel.files import check_writable

SUFFIXES = (".json", ".json.gz")


def check_file(path: Path, overwrite: bool) -> None:
    """Raise InputError where no timeline can be written to `path`: its name, a file there, no right to its folder."""
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"a timeline's file ends in {' or '.join(SUFFIXES)}; {path} does not", "for instance run.json")
    if path.is_dir():
        raise InputError(f"{path} is a folder; a timeline is a file", f"for instance {path / 'timeline.json'}")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists", "choose another file, or replace it with --overwrite")
    check_writable(path)


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """A file that is at `path` when the block has ended well, and nowhere otherwise."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            draft = Path(folder) / "timeline"
            with draft.open("wb") as raw:
                if path.suffix == ".gz":
                    # No time and no name in the header: the same run gives the same bytes.
                    with gzip.GzipFile(filename="", mode="wb", compresslevel=4, fileobj=raw, mtime=0) as packed:
                        yield packed
                else:
                    yield raw
            draft.replace(path)
    except OSError as error:
        raise unwritable(path, error) from None
