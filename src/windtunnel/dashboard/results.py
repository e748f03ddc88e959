"""Results of every verb below a folder, broken ones with the reason, and search stores."""

import os
import re
import stat
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.report.results import STUDY, SUMMARY, ResultEntry, document_file, read_document, read_entry

RECORDS = ("requests.parquet", "steps.parquet", "tokens.parquet")
"""Files of a run; without a summary beside them it is broken, or still being written."""
STORE_SUFFIX = ".sqlite"
MOST_DOCUMENT_BYTES = 64 << 20
"""A larger JSON file is a timeline or data, not the answer of a verb."""
MOST_RESULTS = 20_000
MOST_STAMPS = 5_000

_OURS = re.compile(rb'\s*\{\s*"windtunnel"\s*:')
"""The beginning of every document of a verb."""


class NotThereError(InputError):
    """There is no such result or page."""


class Results:
    """The results below an existing folder, safe for several threads; only changed files are read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[tuple[int, int], ResultEntry]] = {}
        self._version = 0
        self._stamps: dict[str, tuple[int, int] | None] = {}
        self.is_cut = False
        """Whether the last search for results stopped at `MOST_RESULTS`."""

    def entries(self) -> list[ResultEntry]:
        """Return all results, sorted by name; at most `MOST_RESULTS`."""
        with self._lock:
            files = list(islice(_candidates(self.folder), MOST_RESULTS + 1))
            self.is_cut = len(files) > MOST_RESULTS
            del files[MOST_RESULTS:]
            seen = (self._entry(*candidate) for candidate in files)
            self._known = {file: self._known[file] for file, _ in files if file in self._known}
            return sorted((entry for entry in seen if entry is not None), key=lambda entry: entry.name)

    def version(self) -> int:
        """Return a number that changes with the folder: a file or folder that came, went or was written to.

        Of more than `MOST_STAMPS`, to look at which takes longer than most pages, it always changes.
        """
        with self._lock:
            if len(self._stamps) > MOST_STAMPS:
                self._version += 1
            elif not self._stamps or any(_stamp(path) != stamp for path, stamp in self._stamps.items()):
                self._version += 1
                paths = [
                    path for place, names in _folders(self.folder) for path in (place, *map(place.joinpath, names))
                ]
                self._stamps = {str(path): _stamp(str(path)) for path in paths}
            return self._version

    def stores(self) -> list[str]:
        """Return the names of SQLite files, in which searches keep their answers."""
        files = (place / name for place, names in _folders(self.folder) for name in names if name[0] != ".")
        return sorted(self._name(path) for path in files if path.suffix == STORE_SUFFIX)

    def path(self, name: str) -> Path:
        """Return the file or folder of a result; NotThereError where there is none of that name below the folder."""
        if not name:
            return self.folder
        parts = name.split("/")
        hidden = any(part.startswith(".") or not part or "\0" in part or "\\" in part for part in parts)
        path = self.folder.joinpath(*parts) if not hidden else self.folder
        try:
            is_there = not hidden and path.resolve().is_relative_to(self.folder) and path.exists()
        except OSError:
            is_there = False  # too long for a name
        if not is_there:
            raise NotThereError(f"there is no {name!r} in {self.folder.name}")
        return path

    def read(self, name: str) -> tuple[ResultEntry, dict[str, Any]]:
        """Return a result and its whole document. NotThereError where there is none of that name; InputError where it
        is broken."""
        file = document_file(self.path(name))
        if file is None or not file.resolve().is_relative_to(self.folder):
            raise InputError(f"{name} holds no result: {SUMMARY} is missing", "is the run still under way?")
        entry = read_entry(file, name)
        if entry.kind == "broken":
            raise InputError(f"{name} cannot be shown: {entry.problem}")
        return entry, read_document(file)

    def _entry(self, file: Path, is_whole: bool) -> ResultEntry | None:
        try:
            status = file.stat()
        except OSError:
            return None  # it went away since the folder was listed
        # To open a pipe would wait for whoever writes it, and a link may lead out of the folder.
        if not stat.S_ISREG(status.st_mode) or not file.resolve().is_relative_to(self.folder):
            return None
        stamp = (status.st_mtime_ns, status.st_size)
        if file not in self._known or self._known[file][0] != stamp:
            name = self._name(file if is_whole else file.parent)
            if is_whole or file.name in (SUMMARY, STUDY):
                entry = read_entry(file, name)
            else:
                problem = f"{SUMMARY} is missing beside {file.name}: still being written, or broken off"
                entry = ResultEntry(name, "broken", status.st_mtime, problem=problem)
            self._known[file] = (stamp, entry)
        return self._known[file][1]

    def _name(self, path: Path) -> str:
        return "" if path == self.folder else path.relative_to(self.folder).as_posix()


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 a Path for each takes as long as the call
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _folders(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield `folder` and all below it, with the names of their files; hidden folders are left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(place), sorted(names)


def _candidates(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (document, whether the file and not its folder is the result), and records without a document."""
    for place, names in _folders(folder):
        document = next((name for name in (SUMMARY, STUDY, *RECORDS) if name in names), None)
        if document is not None:
            yield place / document, False
        if document not in (SUMMARY, STUDY):
            yield from ((place / name, True) for name in names if _is_document(place / name))


def _is_document(path: Path) -> bool:
    """Whether a file is the `--json` of a verb, by its first bytes."""
    if path.suffix != ".json" or path.name.startswith(".") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return bool(_OURS.match(file.read(64))) and os.fstat(file.fileno()).st_size <= MOST_DOCUMENT_BYTES
    except OSError:
        return False
