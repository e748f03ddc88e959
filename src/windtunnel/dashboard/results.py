"""Results of every verb below a folder, broken ones with the reason, and search stores."""

import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.metrics.records import Table
from windtunnel.pricing.table import read_parquet
from windtunnel.report.layout import filled, layouts_beside, value_at
from windtunnel.report.serving.setup import deployment_text, workload_text
from windtunnel.schema import decode
from windtunnel.search.capacity.limits import limits_from
from windtunnel.serving.scenario import Scenario

SUMMARY, STUDY = "summary.json", "search.json"
RECORDS = ("requests.parquet", "steps.parquet", "tokens.parquet")
"""Files of a run; without a summary beside them it is broken, or still being written."""
STORE_SUFFIX = ".sqlite"
MOST_DOCUMENT_BYTES = 64 << 20
"""A larger JSON file is a timeline or data, not the answer of a verb."""
MOST_RESULTS = 20_000

_OURS = re.compile(rb'\s*\{\s*"windtunnel"\s*:')
"""The beginning of every document of a verb."""


class NotThereError(InputError):
    """There is no such result or page."""


@dataclass(frozen=True)
class ResultEntry:
    """One result, with the figures that the table of all results shows."""

    name: str
    """Its path below the folder, with `/`; empty for the folder itself."""
    kind: str
    """The verb that wrote it; `broken` where it cannot be read."""
    changed_s: float
    """When it was written, in seconds since 1970."""
    model: str = ""
    deployment: str = ""
    load: str = ""
    bound_by: str = ""
    calibration: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """SI, units in the names; latencies are means where no percentile is named."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Figure -> where 80% of measurements are expected."""
    coverage: Mapping[str, float] = field(default_factory=dict)
    """Share of the device's time by how operator times were found."""
    problem: str = ""
    """Why it cannot be read, or that it failed."""


class Results:
    """The results below a folder, safe for several threads; only changed files are read again.

    Args:
        folder: exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[tuple[int, int], ResultEntry | None]] = {}
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

    def stores(self) -> list[str]:
        """Return the names of SQLite files, in which searches keep their answers."""
        return sorted(self._name(path) for path in _files(self.folder) if path.suffix == STORE_SUFFIX)

    def path(self, name: str) -> Path:
        """Return the file or folder of a result.

        Raises:
            NotThereError: there is none of that name below the folder.
        """
        if not name:
            return self.folder
        parts = name.split("/")
        hidden = any(part.startswith(".") or not part or "\0" in part or "\\" in part for part in parts)
        path = self.folder.joinpath(*parts) if not hidden else self.folder
        if hidden or not path.resolve().is_relative_to(self.folder) or not path.exists():
            raise NotThereError(f"there is no {name!r} in {self.folder.name}")
        return path

    def read(self, name: str) -> tuple[ResultEntry, dict[str, Any]]:
        """Return a result and its whole document.

        Raises:
            NotThereError: there is none of that name.
            InputError: it is broken.
        """
        file = document_file(self.path(name))
        if file is None or not file.resolve().is_relative_to(self.folder):
            raise InputError(f"{name} holds no result: {SUMMARY} is missing", "is the run still under way?")
        entry = _read(file, name)
        if entry is None or entry.kind == "broken":
            raise InputError(f"{name} cannot be shown: {entry.problem if entry else 'it is no result'}")
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
                entry = _read(file, name)
            else:
                problem = f"{SUMMARY} is missing beside {file.name}: still being written, or broken off"
                entry = ResultEntry(name, "broken", status.st_mtime, problem=problem)
            self._known[file] = (stamp, entry)
        return self._known[file][1]

    def _name(self, path: Path) -> str:
        return "" if path == self.folder else path.relative_to(self.folder).as_posix()


def document_file(path: Path) -> Path | None:
    """Return the document of a result: a folder's summary or study, or the file itself; None where there is none."""
    if path.is_file():
        return path
    return next((path / name for name in (SUMMARY, STUDY) if (path / name).is_file()), None)


def read_document(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        InputError: it is none.
    """
    try:
        document = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise InputError(f"{file.name} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise InputError(f"{file.name} is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{file.name} is not JSON ({str(error).lower()})") from None
    if not isinstance(document, dict):
        raise InputError(f"{file.name} holds no JSON object")
    return document


def records(path: Path, columns: list[str] | None = None) -> Table:
    """Read a Parquet file of a run as columns.

    Raises:
        InputError: it is missing or broken.
    """
    table = read_parquet(path, columns)
    meanings = {field.name: (field.metadata or {}).get(b"meaning", b"").decode() for field in table.schema}
    return Table({name: table[name].to_numpy() for name in table.column_names}, meanings)


# ---------------------------------------------------------------------------------------------------- what is there


def _folders(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield `folder` and all below it, with the names of their files; hidden folders are left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(place), sorted(names)


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files below `folder` but hidden ones and those behind links to folders."""
    for place, names in _folders(folder):
        yield from (place / name for name in names if not name.startswith("."))


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


# ------------------------------------------------------------------------------------------------------ what it says


def _read(file: Path, name: str) -> ResultEntry | None:
    changed_s = file.stat().st_mtime
    try:
        document = read_document(file)
        kind = next((kind for kind, known in KINDS.items() if all(key in document for key in known["keys"])), None)
        if kind is None:
            raise InputError(f"{file.name} is none that a verb of windtunnel writes")
        return _filled(ResultEntry(name, kind, changed_s), document)
    except InputError as error:
        return ResultEntry(name, "broken", changed_s, problem=error.message)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return ResultEntry(name, "broken", changed_s, problem=f"{file.name} is not whole: {error!r}")


def _filled(entry: ResultEntry, document: dict[str, Any]) -> ResultEntry:
    """Fill an entry in with what its document says."""
    known, layout = document | _derived(entry, document), KINDS[entry.kind]
    figures = {name: _first(known, paths) for name, paths in layout.get("figures", {}).items()}
    intervals = {name: value_at(known, path) for name, path in layout.get("intervals", {}).items()}
    texts: dict[str, Any] = {name: filled(template, known) for name, template in layout.get("texts", {}).items()}
    return replace(
        entry,
        **texts,
        figures={name: float(value) for name, value in figures.items() if value is not None},
        intervals={name: (span["low"], span["high"]) for name, span in intervals.items() if span is not None},
        coverage=known.get("coverage", {}),
    )


def _first(document: Mapping[str, Any], paths: str | list[str]) -> Any:
    """Return the value at the first of some paths that the document has."""
    values = (value_at(document, path) for path in ([paths] if isinstance(paths, str) else paths))
    return next((value for value in values if value is not None), None)


def _derived(entry: ResultEntry, document: dict[str, Any]) -> dict[str, Any]:
    """Return what the texts of an entry need and its document only implies."""
    match entry.kind:
        case "simulate" | "bench" | "capacity":
            scenario = decode(document["scenario"], Scenario, entry.name)
            return {
                "endpoint_model": document["model"] if entry.kind == "bench" else None,
                "scenario_model": scenario.model_name,
                "scenario_deployment": deployment_text(scenario.deployment),
                "scenario_load": workload_text(scenario.workload),
                "limits_text": _limits_text(document.get("limits", {})),
            }
        case "lab":
            reason = f"{document['status']}: {document.get('error', 'see its experiment.log')}"
            return {"problem": "" if document["status"] == "done" else reason}
        case "train":
            degrees, seconds = document["degrees"], document["coverage_s"]
            names = (name for name in ("tp", "cp", "pp", "ep", "dp") if degrees[name] > 1)
            whole_s = sum(seconds.values()) or 1.0
            return {
                "split": ", ".join(f"{name.upper()} {degrees[name]}" for name in names),
                "coverage": {how: part_s / whole_s for how, part_s in seconds.items()},
                "problem": "" if document["fits"] else "does not fit the devices' memory",
            }
        case "search" | "whatif":
            vary = document["space"].get("vary", {})
            return {
                "varied": ", ".join(name.rpartition(".")[2] for name in vary),
                "limits_text": _limits_text(document["space"].get("limits", {})),
                "num_points": prod(len(values) for values in vary.values()),
            }
    return {}


def _limits_text(limits: Mapping[str, Any]) -> str:
    return ", ".join(limit.title for limit in limits_from(limits))


KINDS: Mapping[str, Any] = layouts_beside(__file__)
