"""A run's steps as tracks: the page's timeline, one interval at a time, and the file for Perfetto."""

import tempfile
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.dashboard.pages.run import result_view
from windtunnel.dashboard.view import Dashboard, Download, Query, View, link
from windtunnel.errors import InputError
from windtunnel.files import parse_number
from windtunnel.formats.timeline.plan import TrackBatches, batches_by_track
from windtunnel.formats.timeline.write import write_timeline
from windtunnel.metrics.records import Table
from windtunnel.report.layout import layouts_beside
from windtunnel.report.report import Report
from windtunnel.report.results import records

MAX_TRACKS = 64
MOST_SLICES = 1_000
"""Most slices of a track; an interval with more steps is cut into this many equal parts."""
SLICE_COLUMNS: Mapping[str, str] = layouts_beside(__file__)
"""Column of a slice -> its meaning, in this order."""
_MEANS = ("decode_tokens", "prefill_tokens", "num_running", "num_waiting", "used_blocks")


def page(dashboard: Dashboard, name: str, _query: Query) -> View:
    """Show the timeline, whose script loads the data."""
    entry, _ = dashboard.results.read(name)
    if not (dashboard.results.path(name) / "steps.parquet").is_file():
        raise InputError(f"{name} has no steps.parquet: its engine's steps are not known")
    values = {"data": link("api", "timeline", name), "trace": link("trace", name)}
    return result_view(entry, Report(""), "timeline", template="timeline.html", values=values, scripts=("timeline.js",))


def document(dashboard: Dashboard, name: str, query: Query) -> dict[str, Any]:
    """Document the tracks between the fields `from` and `to`, in seconds of the run."""
    path = dashboard.results.path(name) / "steps.parquet"
    steps, batches = _read(path, path.stat().st_mtime_ns if path.is_file() else 0)
    starts_s, ends_s = steps["start_s"][batches.rows], (steps["start_s"] + steps["duration_s"])[batches.rows]
    first_s, last_s = float(starts_s.min(initial=np.inf)), float(ends_s.max(initial=-np.inf))
    if not len(steps):
        first_s = last_s = 0.0
    from_s, to_s = (parse_number(query.get(name) or usual, name) for name, usual in (("from", first_s), ("to", last_s)))
    if to_s < from_s:
        raise InputError(f"{from_s:g} s to {to_s:g} s is no interval")
    edges = np.append(np.flatnonzero(batches.is_new_track), batches.rows.size)
    tracks = []
    for low, high in islice(pairwise(edges), MAX_TRACKS):
        # Ends ascend as starts do: rows of a track do not overlap.
        begin = low + np.searchsorted(ends_s[low:high], from_s, side="right")
        end = low + np.searchsorted(starts_s[low:high], to_s)
        rows = batches.rows[begin:end]
        replica, track = int(batches.replica[low]), int(batches.track[low])
        tracks.append(
            {
                "name": f"replica {replica}" + (f", batch {track + 1} in flight" if track else ""),
                "is_merged": rows.size > MOST_SLICES,
                "slices": _merged(steps, rows, from_s, to_s) if rows.size > MOST_SLICES else _single(steps, rows),
            }
        )
    return {
        "first_s": first_s,
        "last_s": last_s,
        "from_s": from_s,
        "to_s": to_s,
        "num_tracks": len(edges) - 1,
        "columns": list(SLICE_COLUMNS),
        "tracks": tracks,
    }


@lru_cache(maxsize=1)
def _read(path: Path, _changed_ns: int) -> tuple[Table, TrackBatches]:
    steps = records(path)
    return steps, batches_by_track(steps)


def _single(steps: Table, rows: Ints) -> list[list[float]]:
    some = Table({name: column[rows] for name, column in steps.columns.items()}, steps.meanings)
    columns = [
        some["start_s"],
        some["start_s"] + some["duration_s"],
        np.ones(rows.size),
        (some["prefill_tokens"] > 0).astype(np.float64),
        some["num_steps"],
        *(some[name] for name in _MEANS),
    ]
    return np.column_stack(columns).tolist() if rows.size else []


def _merged(steps: Table, rows: Ints, from_s: float, to_s: float) -> list[list[float]]:
    """Return equal parts of the interval with the means of their steps; parts without a step are left out."""
    edges = np.linspace(from_s, to_s, MOST_SLICES + 1)
    begin, took_s = steps["start_s"][rows], steps["duration_s"][rows]
    # Rows of a track do not overlap: what is summed up to each of their ends needs no sorting.
    times = np.column_stack([begin, begin + took_s]).ravel()

    def integral(values: NDArray[Any]) -> Floats:
        areas = values * took_s
        after = np.cumsum(areas)
        return np.diff(np.interp(edges, times, np.column_stack([after - areas, after]).ravel()))

    busy_s = integral(np.ones(rows.size))
    known = busy_s > 0

    def mean_of(values: NDArray[Any]) -> Floats:
        sums = integral(values)
        return np.divide(sums, busy_s, out=np.zeros_like(sums), where=known)

    means = {name: mean_of(steps[name][rows]) for name in _MEANS}
    rate = mean_of(steps["num_steps"][rows] / took_s)
    columns = [
        edges[:-1],
        edges[1:],
        busy_s / np.diff(edges),
        mean_of(steps["prefill_tokens"][rows] > 0),
        rate * busy_s,
        *means.values(),
    ]
    return list(np.column_stack(columns)[known].tolist())


def trace(dashboard: Dashboard, name: str, _query: Query) -> Download:
    """Return the run as `windtunnel simulate --timeline` writes it."""
    folder = dashboard.results.path(name)
    phases = records(folder / "replicas.parquet") if (folder / "replicas.parquet").is_file() else None
    requests, steps = records(folder / "requests.parquet"), records(folder / "steps.parquet")
    with tempfile.TemporaryDirectory(prefix="windtunnel-") as draft:
        file = Path(draft) / "timeline.json.gz"
        write_timeline(file, requests, steps, about={"run": name}, replica_phases=phases)
        return Download(f"{folder.name}-timeline.json.gz", "application/gzip", file.read_bytes())
