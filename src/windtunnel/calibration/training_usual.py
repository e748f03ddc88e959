"""What a table of training runs leaves out, and what its framework, model, device, date or note tells of it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel.schema import Schema, decode, read_yaml

Row = Mapping[str, str]


class Conditions(Schema):
    """When an entry counts: regular expressions in lower case; an empty one always holds."""

    framework: str = ""
    model: str = ""
    """Of the beginning of the plain name."""
    device: str = ""
    precision: str = ""
    task: str = ""
    note: str = ""
    until: str = ""
    """A date that the run's release is before."""


class Usual(Schema):
    """Columns and settings of a job that are usual where its conditions hold."""

    when: Conditions
    columns: dict[str, str] = {}
    job: dict[str, Any] = {}


@dataclass
class Completed:
    """A row with what is usual for it."""

    columns: dict[str, str]
    job: dict[str, Any] = field(default_factory=dict)
    """Settings of the job that no column gives."""
    taken: list[str] = field(default_factory=list)
    """What was taken for a column that is empty: `seq_len 8192`."""


@cache
def _entries() -> list[Usual]:
    path = Path(__file__).with_name("training_usual.yaml")
    entries: list[Usual] = decode(read_yaml(path), list[Usual], path.name)
    return entries


def completed(row: Row, framework: str, model: str, device: str, shape: Mapping[str, str] = {}) -> Completed:
    """Return a row of columns that are not empty with what is usual for it, by the known names of its framework, model
    and device; `shape` are columns that other rows of its model say, taken where it says none of them.
    """
    done = Completed(dict(row))
    if not shape.keys() & row.keys():
        done.columns |= shape
        done.taken += [f"{name} {float(text):g}" for name, text in shape.items()]
    for entry in _entries():
        note = _note_of(entry.when, row, framework, model, device)
        if note is None:
            continue
        for name, text in entry.columns.items():
            if name not in done.columns:
                done.columns[name] = note.expand(text)
                if not entry.when.note:
                    done.taken.append(f"{name} {text}")
        add_missing(done.job, entry.job)
    _add_derived(done)
    return done


def add_missing(job: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Add settings to a job's fields, where they do not say them."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            add_missing(job.setdefault(name, {}), value)
        else:
            job.setdefault(name, value)


def _note_of(when: Conditions, row: Row, framework: str, model: str, device: str) -> re.Match[str] | None:
    """Return the match of the note where all conditions hold, of an empty expression where there is none."""
    release = row.get("release", "")
    if when.until and not (_is_comparable(release, when.until) and release < when.until):
        return None
    said = (framework, device, row.get("precision", ""), row.get("task", ""))
    asked = (when.framework, when.device, when.precision, when.task)
    if any(
        expression and not re.fullmatch(expression, text.lower()) for expression, text in zip(asked, said, strict=True)
    ):
        return None
    if not re.match(when.model, model):
        return None
    return re.search(when.note, row.get("note", "").lower())


def _is_comparable(release: str, other: str) -> bool:
    """Whether releases are written the same way, with years of as many digits."""
    first, second = re.match(r"\d+", release), re.match(r"\d+", other)
    return first is not None and second is not None and len(first[0]) == len(second[0])


def shapes_of(rows: Iterable[Row]) -> dict[str, dict[str, str]]:
    """Return name of a model -> layers and width, where all rows that say them agree."""
    said: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        if row.get("layers") and row.get("hidden"):
            said.setdefault(row.get("model", ""), set()).add((row["layers"], row["hidden"]))
    return {
        name: dict(zip(("layers", "hidden"), *shapes, strict=True)) for name, shapes in said.items() if len(shapes) == 1
    }


def _add_derived(done: Completed) -> None:
    """Add columns that follow from others: the ranks of a slice, and sequences of a step from its tokens."""
    columns = done.columns

    def whole(name: str) -> int:
        return int(float(columns.get(name, 1)))

    try:
        if columns.get("fsdp") == "slice":
            columns["fsdp"] = str(whole("n_gpus") // (whole("slices") * whole("tp") * whole("pp")))
        replicas = max(whole("n_gpus") // (whole("tp") * whole("pp") * whole("cp")), 1)
        if "gbs" not in columns and "seq_len" in columns and (tokens := _tokens_per_step(columns)):
            sequences = tokens / float(columns["seq_len"]) / replicas
            columns["gbs"] = str(max(round(sequences * replicas) if sequences < 1 else round(sequences) * replicas, 1))
            done.columns.setdefault("mbs", str(max(round(sequences), 1)) if whole("pp") == 1 else "1")
        if "mbs" not in columns and "gbs" in columns and "ga" in columns:
            columns["mbs"] = str(max(whole("gbs") // (replicas * whole("ga")), 1))
    except ValueError:
        return  # a column that is no number is refused where it is read


def _tokens_per_step(columns: Row) -> float:
    """Return the tokens of a step, as said or by its time and rate; 0 where neither is there."""
    if "tokens_per_step" in columns:
        return float(columns["tokens_per_step"])
    if {"iter_time_s", "tokens_per_s_per_gpu"} <= columns.keys():
        return float(columns["iter_time_s"]) * float(columns["tokens_per_s_per_gpu"]) * float(columns["n_gpus"])
    return 0.0
