"""Results of verbs, read from their documents: the figures, texts and intervals that tables of results show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.metrics.limits import limits_from
from windtunnel.metrics.records import Table
from windtunnel.pricing.table import read_parquet
from windtunnel.report.layout import filled, layouts_beside, value_at
from windtunnel.report.search.figures import limit_name
from windtunnel.report.serving.setup import deployment_text, workload_text
from windtunnel.schema import decode, short_path
from windtunnel.serving.scenario import Scenario

SUMMARY, STUDY = "summary.json", "search.json"
KINDS: Mapping[str, Any] = layouts_beside(__file__)
_GIVE = "give a folder of --out, its summary.json, what --json printed, or a scenario"


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
    intervals: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Figure -> where 80% of measurements are expected."""
    coverage: Mapping[str, float] = field(default_factory=dict)
    """Share of the device's time by how operator times were found."""
    problem: str = ""
    """Why it cannot be read, or that it failed."""
    not_starting: Sequence[str] = ()
    """Why its server would not start."""


def document_file(path: Path) -> Path | None:
    """Return the document of a result: a folder's summary or study, or the file itself; None where there is none."""
    if path.is_file():
        return path
    return next((path / name for name in (SUMMARY, STUDY) if (path / name).is_file()), None)


def read_document(file: Path) -> dict[str, Any]:
    """Read a JSON object; InputError where it is none."""
    try:
        document = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise InputError(f"{file.name} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise InputError(f"{file.name} is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{file.name} is not JSON ({str(error).lower()})", _GIVE) from None
    if not isinstance(document, dict):
        raise InputError(f"{file.name} holds no JSON object", _GIVE)
    return document


def records(path: Path, columns: list[str] | None = None) -> Table:
    """Read a Parquet file of a run as columns; InputError where it is missing or broken."""
    table = read_parquet(path, columns)
    meanings = {field.name: (field.metadata or {}).get(b"meaning", b"").decode() for field in table.schema}
    return Table({name: table[name].to_numpy() for name in table.column_names}, meanings)


def read_entry(file: Path, name: str) -> ResultEntry:
    """Read the entry of a document; one of the kind `broken`, with the reason, where it cannot be read."""
    changed_s = file.stat().st_mtime
    try:
        return entry_of(read_document(file), name, changed_s)
    except InputError as error:
        return ResultEntry(name, "broken", changed_s, problem=error.message)


def entry_of(document: dict[str, Any], name: str, changed_s: float = 0.0) -> ResultEntry:
    """Return the entry of a document; InputError where it is none of a verb, or not whole."""
    try:
        kind = next((kind for kind, known in KINDS.items() if all(key in document for key in known["keys"])), None)
        if kind is None:
            raise InputError(f"{name} is not a result of windtunnel", _GIVE)
        return _filled(ResultEntry(name, kind, changed_s), document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{name} is not whole: {error!r}") from None


def _filled(entry: ResultEntry, document: dict[str, Any]) -> ResultEntry:
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
        not_starting=document.get("from_command", document).get("would_not_start", ()),
    )


def _first(document: Mapping[str, Any], paths: str | list[str]) -> Any:
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
                "limit": limit_name(document.get("limited_by") or "") or None,
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
            found = [each["points"][0]["choice"] for each in document.get("workloads", ()) if each["ranking"]]
            best = [f"{short_path(name)} {value}" for choice in found[:1] for name, value in choice.items()]
            return {
                "best": ", ".join(best) or None,
                "varied": ", ".join(short_path(name) for name in vary),
                "limits_text": _limits_text(document["space"].get("limits", {})),
                "num_points": prod(len(values) for values in vary.values()),
            }
    return {}


def _limits_text(limits: Mapping[str, Any]) -> str:
    return ", ".join(limit.title for limit in limits_from(limits))
