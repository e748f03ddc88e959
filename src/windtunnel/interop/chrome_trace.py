"""A run as a timeline: the Trace Event Format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
What Perfetto asks beyond it was read from its importer (google/perfetto, src/trace_processor/importers/json): slices of
one thread must not overlap, flow ids are hexadecimal, and a time with a fraction is cut off at its nanosecond, so that
neighbours overlap by one. Times are therefore whole microseconds.
"""

import gzip
import heapq
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.metrics.fleet import PHASES
from windtunnel.metrics.records import Table

Event = dict[str, Any]
Ints = NDArray[np.int64]

MAX_EVENTS = 200_000
"""About 30 MB, which Perfetto opens in a few seconds."""

SUFFIXES = (".json", ".json.gz")

_EVENTS_PER_SLICE = 7
"""At most: the slice, three counters, and the three that fall to zero where the replica idles after it."""
_EVENTS_PER_REQUEST = 11
"""At most: begin and end of the request and of three phases, and three points of its flow."""


@dataclass(frozen=True)
class Detail:
    """How much of a run a timeline shows: all of it where `batches_per_slice` is 1 and all requests are shown."""

    num_events: int
    num_batches: int
    """Rows of the step table."""
    batches_per_slice: int
    num_requests: int
    num_shown_requests: int

    @property
    def is_complete(self) -> bool:
        """Whether no batch was merged with another and every request is shown."""
        return self.batches_per_slice == 1 and self.num_shown_requests == self.num_requests

    @property
    def sampling(self) -> str:
        """What was left out, in words."""
        parts = []
        if self.batches_per_slice > 1:
            parts.append(f"a slice is {self.batches_per_slice:,} successive batches, as long as they were busy")
        if self.num_shown_requests < self.num_requests:
            parts.append(f"{self.num_shown_requests:,} of {self.num_requests:,} requests are shown")
        return "; ".join(parts) or "none"


@dataclass(frozen=True, eq=False)
class Batches:
    """Rows of the step table ordered by (replica, lane, start). Rows of one lane do not overlap."""

    rows: Ints
    """Positions in the step table."""
    replica: Ints
    lane: Ints
    start_us: Ints
    end_us: Ints

    @property
    def is_new_lane(self) -> NDArray[np.bool_]:
        """Whether each row is the first of its lane."""
        changes = (np.diff(self.replica) != 0) | (np.diff(self.lane) != 0)
        return np.concatenate([np.ones(min(self.rows.size, 1), np.bool_), changes])


@dataclass(frozen=True, eq=False)
class _Slices:
    """What a thread shows, ordered as the batches: each slice is one batch or several in succession.

    A slice of several batches starts with the first and lasts as long as all were busy, idle time between them left
    out.
    """

    first: Ints
    """Position in `batches` of the first batch."""
    num_batches: Ints
    start_us: Ints
    end_us: Ints
    last_end_us: Ints
    """When the last batch ended."""


@dataclass(frozen=True, eq=False)
class _Requests:
    """Requests to be shown, one after another; times ascend within each."""

    request: Ints
    """Positions in the request table."""
    times_us: Ints
    """[n, 4] arrival, scheduled, first token, finish."""


@dataclass(frozen=True, eq=False)
class _Points:
    """Events of one kind, ordered by time: `what[i]` happens at `at_us[i]`."""

    at_us: Ints
    what: Ints


@dataclass(frozen=True, eq=False)
class _Flows(_Points):
    """`what` is 3 x position in `shown` + position in `_FLOW`."""

    slices: Ints
    """That each point lies in."""


@dataclass(frozen=True, eq=False)
class _Plan:
    """All that the events are read from."""

    steps: Table
    requests: Table
    batches: Batches
    slices: _Slices
    idles: Ints
    """Slices after which their replica has nothing to do."""
    shown: _Requests
    phases: _Points
    """`what` is 8 x position in `shown` + position in `_PHASES`."""
    flows: _Flows
    pids: Mapping[int, int]
    tids: Mapping[tuple[int, int], int]
    detail: Detail
    lives: tuple[Event, ...] = ()
    """Names and slices of the replicas' phases, where they come and go."""


_REQUEST = 0
_PHASES = (
    ("b", "request"),
    ("b", "queueing"),
    ("e", "queueing"),
    ("b", "prefill"),
    ("e", "prefill"),
    ("b", "decode"),
    ("e", "decode"),
    ("e", "request"),
)
"""A request's async events in their order. All requests share the outer name: Perfetto then draws them on one track."""
_PHASE_TIMES = [0, 0, 1, 1, 2, 2, 3, 3]
_FLOW = "stf"
"""Phases of a request's flow: the batch that it is scheduled in, that gives its first token, and its last."""


def timeline(requests: Table, steps: Table, max_events: int = MAX_EVENTS) -> Iterator[Event]:
    """The events of a run in order of time, after the metadata that names processes and threads.

    One process a replica; one thread for each batch that a replica has in flight at once; a slice (`X`) for each row of
    the step table. Requests are async slices (`b`, `e`) with their phases inside, and flows (`s`, `t`, `f`) from
    the batch that schedules a request to those of its first and last token. Counters (`C`) show KV blocks, requests
    and tokens/s. Times are whole microseconds.

    A run of more events is shown as follows. Successive batches of a thread are drawn as one slice, as many as it
    takes to bring slices and counters under half of `max_events`, or under what requests leave of it; busy time is
    conserved. Then as many whole requests as fit are shown, evenly spaced in the order of sending.

    Args:
        requests: a request table (`REQUEST_COLUMNS`). Requests that have not finished are not shown.
        steps: a step table (`STEP_COLUMNS`).
        max_events: no more than so many.

    Raises:
        InputError: `max_events` is less than the threads of the run need.
    """
    return _events(_plan(requests, steps, max_events))


def write_timeline(
    path: Path,
    requests: Table,
    steps: Table,
    max_events: int = MAX_EVENTS,
    about: Mapping[str, str | float] | None = None,
    replica_phases: Table | None = None,
) -> Detail:
    """Write the timeline of a run as JSON, compressed where `path` ends in `.gz`; returns what it shows.

    The file is written beside its place and moved there at the end. The same run gives the same bytes.

    Args:
        path: `*.json` or `*.json.gz`; folders are made, and a file of that name is replaced.
        requests: a request table.
        steps: a step table.
        max_events: see `timeline`.
        about: noted in the file's `otherData`, with what was left out.
        replica_phases: where replicas come and go, when each began which phase (`metrics.fleet.PHASE_COLUMNS`).

    Raises:
        InputError: the file cannot be written, or `max_events` is too few.
    """
    plan = _plan(requests, steps, max_events, replica_phases)
    notes = {**(about or {}), **asdict(plan.detail), "sampling": plan.detail.sampling}
    with new_file(path) as file:
        encode = msgspec.json.Encoder().encode
        # Perfetto tells formats apart by the first key: `{"meta` would be another one.
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(notes) + b',"traceEvents":[\n')
        events = _events(plan)
        separator = b""
        while chunk := list(itertools.islice(events, 1000)):
            file.write(separator + b",\n".join(map(encode, chunk)))
            separator = b",\n"
        file.write(b"\n]}\n")
    return plan.detail


def check_file(path: Path, overwrite: bool) -> None:
    """Raise InputError where no timeline can be written to `path`: its name, a file there, no right to its folder."""
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"a timeline's file ends in {' or '.join(SUFFIXES)}; {path} does not")
    if path.is_dir():
        raise InputError(f"{path} is a folder; a timeline is a file", f"for instance {path / 'timeline.json'}")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists", "choose another file, or replace it with --overwrite")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path} cannot be written: {folder} is not a folder that you may write to")


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
        raise InputError(f"the timeline cannot be written to {path}: {error.strerror or error}") from None


def _plan(requests: Table, steps: Table, max_events: int, replica_phases: Table | None = None) -> _Plan:
    """Choose what is shown, so that there are at most `max_events` events."""
    batches = batches_by_lane(steps)
    known = [batches.replica, requests["replica"]]
    if replica_phases is not None:
        known.append(replica_phases["replica"])
    replicas = np.unique(np.concatenate(known)).tolist()
    lanes = list(dict.fromkeys(zip(batches.replica.tolist(), batches.lane.tolist(), strict=True)))
    # No thread has the number of a process: Perfetto takes such a one for the process's main thread.
    pids = {replica: number for number, replica in enumerate(replicas, 1)}
    tids = {lane: number for number, lane in enumerate(lanes, len(replicas) + 1)}
    lives = _lives(replica_phases, steps, pids, 1 + len(pids) + len(tids))
    room = max_events - 2 * (len(pids) + len(tids)) - len(lives)
    least = _EVENTS_PER_SLICE * len(lanes) + _EVENTS_PER_REQUEST
    if room < 2 * least:
        raise InputError(
            f"a timeline of {max_events:,} events has no room for the {len(replicas) + len(lanes):,} processes and "
            "threads of this run",
            f"allow it {max_events - room + 2 * least:,} events or more",
        )
    everyone = _finished(requests)
    num_wanted = _num_phases(everyone)
    if num_wanted < room:
        num_wanted += _flows(everyone, requests, steps, batches, _slices(batches, 1)).what.size
    slices, idles, batches_per_slice = _slices_within(max(room // 2, room - num_wanted), batches, requests)
    num_slice_events = _num_slice_events(slices, idles)

    def flows_of(shown: _Requests) -> _Flows:
        return _flows(shown, requests, steps, batches, slices)

    shown, flows = _requests_within(room - num_slice_events, everyone, flows_of)
    phases = _phases(shown)
    detail = Detail(
        num_events=max_events - room + num_slice_events + phases.what.size + flows.what.size,
        num_batches=len(steps),
        batches_per_slice=batches_per_slice,
        num_requests=len(requests),
        num_shown_requests=shown.request.size,
    )
    return _Plan(steps, requests, batches, slices, idles, shown, phases, flows, pids, tids, detail, lives)


def _microseconds(seconds: NDArray[np.float64]) -> Ints:
    return np.rint(seconds * 1e6).astype(np.int64)


def batches_by_lane(steps: Table) -> Batches:
    """The rows of a step table, each in the first lane of its replica that is free: one lane a batch in flight."""
    start_us = _microseconds(steps["start_s"])
    end_us = _microseconds(steps["start_s"] + steps["duration_s"])
    rows = np.lexsort((start_us, steps["replica"]))
    replica, start_us, end_us = steps["replica"][rows].astype(np.int64), start_us[rows], end_us[rows]
    lane = _lanes(replica, start_us, end_us)
    order = np.lexsort((start_us, lane, replica))
    batches = Batches(rows[order], replica[order], lane[order], start_us[order], end_us[order])
    # The end of a batch and the start of the next are one time that may have been rounded to two.
    follows = ~batches.is_new_lane[1:]
    batches.end_us[:-1][follows] = np.minimum(batches.end_us[:-1], batches.start_us[1:])[follows]
    return batches


def _lanes(replica: Ints, start_us: Ints, end_us: Ints) -> Ints:
    """The first lane of its replica that is free when a row starts, for rows ordered by (replica, start)."""
    lane = np.zeros(replica.size, np.int64)
    overlaps = (replica[1:] == replica[:-1]) & (start_us[1:] < end_us[:-1] - 1)
    for busy in np.unique(replica[1:][overlaps]):
        first, last = np.searchsorted(replica, [busy, busy + 1])
        free_us: list[int] = []
        times = zip(start_us[first:last].tolist(), end_us[first:last].tolist(), strict=True)
        for row, (start, end) in enumerate(times, first):
            for number, free in enumerate(free_us):
                if start >= free - 1:
                    free_us[number] = end
                    lane[row] = number
                    break
            else:
                lane[row] = len(free_us)
                free_us.append(end)
    return lane


def _slices(batches: Batches, batches_per_slice: int) -> _Slices:
    lane_starts = np.flatnonzero(batches.is_new_lane)
    sizes = np.diff(np.append(lane_starts, batches.rows.size))
    position = np.arange(batches.rows.size) - np.repeat(lane_starts, sizes)
    first = np.flatnonzero(position % batches_per_slice == 0)
    last = np.append(first, batches.rows.size)[1:] - 1
    start_us = batches.start_us[first]
    busy_us = np.append(0, np.cumsum(batches.end_us - batches.start_us))
    end_us = start_us + busy_us[last + 1] - busy_us[first]
    return _Slices(first, last + 1 - first, start_us, end_us, batches.end_us[last])


def _slices_within(room: int, batches: Batches, requests: Table) -> tuple[_Slices, Ints, int]:
    """The slices with fewest batches in each that, with their counters, are at most `room` events."""
    batches_per_slice = 1
    while True:
        slices = _slices(batches, batches_per_slice)
        idles = _idles(slices, batches, requests)
        num_events = _num_slice_events(slices, idles)
        if num_events <= room:
            return slices, idles, batches_per_slice
        batches_per_slice = max(batches_per_slice + 1, batches_per_slice * num_events // room)


def _num_slice_events(slices: _Slices, idles: Ints) -> int:
    return 4 * slices.first.size + 3 * idles.size


def _idles(slices: _Slices, batches: Batches, requests: Table) -> Ints:
    """Slices at whose end no slice of their replica is under way and no request of it is unfinished."""
    replica = batches.replica[slices.first]
    order = np.lexsort((slices.start_us, replica))
    # One axis of time for all replicas, one after another.
    horizon_us = int(slices.last_end_us.max(initial=0)) + 4
    zero_us = replica[order] * horizon_us
    starts, ends = zero_us + slices.start_us[order], zero_us + slices.last_end_us[order]
    latest = np.maximum.accumulate(ends)
    is_last = np.append(starts[1:] > latest[:-1], np.ones(min(ends.size, 1), np.bool_))
    idle, latest, zero_us = order[is_last], latest[is_last], zero_us[is_last]

    def count(name: str, until: Ints) -> Ints:
        known = np.isfinite(requests[name])
        times_us = np.minimum(_microseconds(requests[name][known]), horizon_us - 1)
        axis = np.sort(requests["replica"][known] * horizon_us + times_us)
        return np.asarray(np.searchsorted(axis, until, side="right") - np.searchsorted(axis, zero_us))

    # A finish and the end of its batch are one time that may have been rounded to two.
    return np.sort(idle[count("arrival_s", latest) <= count("finish_s", latest + 1)])


def _finished(requests: Table) -> _Requests:
    times_s = np.stack([requests[name] for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")], axis=1)
    known = np.flatnonzero(np.isfinite(times_s).all(axis=1))
    return _Requests(known, np.maximum.accumulate(_microseconds(times_s[known]), axis=1))


def _requests_within(
    room: int, everyone: _Requests, flows_of: Callable[[_Requests], _Flows]
) -> tuple[_Requests, _Flows]:
    """The most requests, evenly spaced, that with their flows are at most `room` events."""
    num_all = everyone.request.size
    num_shown = num_all
    while True:
        some = np.arange(num_shown) * num_all // max(num_shown, 1)
        shown = _Requests(everyone.request[some], everyone.times_us[some])
        num_events = _num_phases(shown)
        if num_events <= room:
            flows = flows_of(shown)
            num_events += flows.what.size
            if num_events <= room:
                return shown, flows
        num_shown = min(num_shown - 1, num_shown * room // num_events)


def _is_shown(times_us: Ints) -> NDArray[np.bool_]:
    """[n, 8] which of `_PHASES` a request has: it may not have queued, or have ended with its first token."""
    queued, decoded = times_us[:, 1] > times_us[:, 0], times_us[:, 3] > times_us[:, 2]
    always = np.ones_like(queued)
    return np.stack([always, queued, queued, always, always, decoded, decoded, always], axis=1)


def _num_phases(requests: _Requests) -> int:
    return int(_is_shown(requests.times_us).sum())


def _phases(shown: _Requests) -> _Points:
    what = np.flatnonzero(_is_shown(shown.times_us))
    return _in_order(shown.times_us[:, _PHASE_TIMES].ravel()[what], what)


def _in_order(at_us: Ints, what: Ints) -> _Points:
    order = np.argsort(at_us, kind="stable")
    return _Points(at_us[order], what[order])


def _flows(shown: _Requests, requests: Table, steps: Table, batches: Batches, slices: _Slices) -> _Flows:
    """The points of the requests' flows.

    The batch that scheduled a request starts at that time, those of its first and last token end then; where several
    do, the first of them is taken. A request that lives within one slice has no flow.
    """
    replica = requests["replica"][shown.request]
    prefills_at = requests.columns.get("prefill_replica", requests["replica"])[shown.request]
    slice_of = np.repeat(np.arange(slices.first.size), slices.num_batches)
    busy_us = np.append(0, np.cumsum(batches.end_us - batches.start_us))
    drawn_us = slices.start_us[slice_of] + (busy_us[:-1] - busy_us[slices.first[slice_of]])
    has_prefill = np.flatnonzero(steps["prefill_tokens"][batches.rows] > 0)
    anything = np.arange(batches.rows.size)
    first_token = [
        _batch_at(batches.end_us, has_prefill, shown.times_us[:, 2], batches.replica, at)
        for at in (prefills_at, replica)
    ]
    which = [
        _batch_at(batches.start_us, has_prefill, shown.times_us[:, 1], batches.replica, prefills_at),
        np.where(first_token[0] >= 0, *first_token),
        _batch_at(batches.end_us, anything, shown.times_us[:, 3], batches.replica, replica),
    ]
    batch = np.stack(which, axis=1)
    points = np.append(slice_of, -1)[batch]
    at_us = np.append(drawn_us, -1)[batch]
    # Where batches are merged, one of a later time may be drawn before that of another lane.
    in_order = (at_us[:, 0] <= at_us[:, 1]) & (at_us[:, 1] <= at_us[:, 2])
    is_drawn = (batch >= 0).all(axis=1) & in_order & (points[:, 0] != points[:, 2])
    repeats = (points[:, 1] == points[:, 0]) | (points[:, 1] == points[:, 2])
    points[~is_drawn] = -1
    points[:, 1][repeats] = -1
    what = np.flatnonzero(points.ravel() >= 0)
    ordered = _in_order(at_us.ravel()[what], what)
    return _Flows(ordered.at_us, ordered.what, points.ravel()[ordered.what])


def _batch_at(times_us: Ints, among: Ints, wanted_us: Ints, replica: Ints, wanted_replica: Ints) -> Ints:
    """The batch whose time is the wanted one, but for rounding, on the wanted replica; -1: there is none."""
    if among.size == 0:
        return np.full(wanted_us.size, -1, np.int64)
    horizon_us = int(max(times_us.max(), wanted_us.max(initial=0))) + 4
    axis = replica[among] * horizon_us + times_us[among]
    among = among[np.argsort(axis, kind="stable")]
    axis = np.sort(axis)
    wanted = wanted_replica * horizon_us + wanted_us
    found = np.searchsorted(axis, wanted - 1)
    exact = np.searchsorted(axis, wanted)
    found = np.where(axis[np.minimum(exact, axis.size - 1)] == wanted, exact, found)
    found = np.minimum(found, axis.size - 1)
    return np.where(np.abs(axis[found] - wanted) <= 1, among[found], -1)


def _events(plan: _Plan) -> Iterator[Event]:
    yield from _names(plan)
    # Of events at one time the merge gives those of the first kind first: a flow must find the slice that it enters.
    lives = (event for event in plan.lives if event["ph"] == "X")
    kinds = (lives, _slice_events(plan), *_counter_events(plan), _phase_events(plan), _flow_events(plan))
    yield from heapq.merge(*kinds, key=itemgetter("ts"))


def _names(plan: _Plan) -> Iterator[Event]:
    for replica, pid in plan.pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"replica {replica}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    num_lanes: dict[int, int] = {}
    for replica, _ in plan.tids:
        num_lanes[replica] = num_lanes.get(replica, 0) + 1
    for (replica, lane), tid in plan.tids.items():
        name = "batches" if num_lanes[replica] == 1 else f"batches in flight, {lane + 1} of {num_lanes[replica]}"
        thread = {"pid": plan.pids[replica], "tid": tid}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": tid}}
    yield from (event for event in plan.lives if event["ph"] == "M")


def _lives(phases: Table | None, steps: Table, pids: Mapping[int, int], first_tid: int) -> tuple[Event, ...]:
    """One thread a replica with a slice for each phase but `off`, in order of time, after the threads' names."""
    if phases is None:
        return ()
    end_us = int(_microseconds(steps["start_s"] + steps["duration_s"]).max())
    names: list[Event] = []
    slices: list[Event] = []
    for tid, (replica, pid) in enumerate(pids.items(), first_tid):
        thread = {"pid": pid, "tid": tid}
        names.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": "phase"}})
        mine = np.flatnonzero(phases["replica"] == replica)
        starts_us = [*np.minimum(_microseconds(phases["time_s"][mine]), end_us).tolist(), end_us]
        for kind, (begin, end) in zip(phases["phase"][mine].tolist(), itertools.pairwise(starts_us), strict=True):
            if PHASES[kind] != "off" and end > begin:
                slices.append({"ph": "X", "name": PHASES[kind], **thread, "ts": begin, "dur": end - begin})
    return (*names, *sorted(slices, key=itemgetter("ts")))


@dataclass(frozen=True, eq=False)
class _Sums:
    """Columns of the step table by slice."""

    num_steps: Ints
    decode_tokens: Ints
    """Of all steps together, as the two that follow."""
    prefill_tokens: Ints
    num_prefills: Ints


def _sums(plan: _Plan) -> _Sums:
    def sum_of(name: str | None = None) -> Ints:
        column = num_steps if name is None else plan.steps[name][plan.batches.rows] * num_steps
        total = np.append(0, np.cumsum(column))
        return np.asarray(total[plan.slices.first + plan.slices.num_batches] - total[plan.slices.first])

    num_steps = plan.steps["num_steps"][plan.batches.rows].astype(np.int64)
    return _Sums(sum_of(), *(sum_of(name) for name in ("decode_tokens", "prefill_tokens", "num_prefills")))


def _slice_events(plan: _Plan) -> Iterator[Event]:
    slices, batches, steps = plan.slices, plan.batches, plan.steps
    sums = _sums(plan)
    first = batches.rows[slices.first]
    duration_us = slices.end_us - slices.start_us
    args: dict[str, list[Any]] = {
        "decode_tokens": _per_step(sums.decode_tokens, sums.num_steps),
        "prefill_tokens": _per_step(sums.prefill_tokens, sums.num_steps),
        "num_steps": sums.num_steps.tolist(),
        "step_ms": np.round(duration_us / sums.num_steps / 1000, 4).tolist(),
        **{name: steps[name][first].tolist() for name in ("context_tokens", "num_running", "num_waiting")},
        "used_blocks": steps["used_blocks"][_last_rows(plan)].tolist(),
    }
    if plan.detail.batches_per_slice > 1:
        args["num_batches"] = slices.num_batches.tolist()
    parts = (sums.decode_tokens / sums.num_steps, sums.prefill_tokens, sums.num_prefills, slices.num_batches)
    names = list(map(_composition, *(part.tolist() for part in parts)))
    start, duration = slices.start_us.tolist(), duration_us.tolist()
    replica, lane = batches.replica[slices.first].tolist(), batches.lane[slices.first].tolist()
    for i in np.argsort(slices.start_us, kind="stable").tolist():
        yield {
            "ph": "X",
            "cat": "batch",
            "name": names[i],
            "pid": plan.pids[replica[i]],
            "tid": plan.tids[replica[i], lane[i]],
            "ts": start[i],
            "dur": duration[i],
            "args": {name: column[i] for name, column in args.items()},
        }


def _last_rows(plan: _Plan) -> Ints:
    """The row of the step table of each slice's last batch."""
    return np.asarray(plan.batches.rows[plan.slices.first + plan.slices.num_batches - 1])


def _per_step(tokens: Ints, num_steps: Ints) -> list[float]:
    """Mean per step: whole numbers, where all are."""
    is_whole = not (tokens % num_steps).any()
    mean: list[float] = (tokens // num_steps if is_whole else np.round(tokens / num_steps, 2)).tolist()
    return mean


def _composition(decodes: float, prefill_tokens: int, num_prefills: int, num_batches: int) -> str:
    """`prefill 3 x 2,048 + decode 61`: prompts x tokens of each (~: their mean), requests decoded in a step."""
    parts = []
    if prefill_tokens:
        each, rest = divmod(prefill_tokens, max(num_prefills, 1))
        times = f"{num_prefills} x " if num_prefills > 1 else ""
        parts.append(f"prefill {times}{'~' if rest else ''}{each:,}")
    if decodes:
        parts.append(f"decode {'' if decodes == int(decodes) else '~'}{max(round(decodes), 1)}")
    name = " + ".join(parts) or "cut short by a failure"
    return f"{num_batches} batches: {name}" if num_batches > 1 else name


def _counter_events(plan: _Plan) -> tuple[Iterator[Event], ...]:
    """One stream a counter: KV blocks in use, requests running and waiting, tokens/s of the batches under way."""
    slices, batches, steps = plan.slices, plan.batches, plan.steps
    sums = _sums(plan)
    first = batches.rows[slices.first]
    # Of a row's steps the last has taken all its blocks when it starts.
    used_us = slices.end_us - (slices.end_us - slices.start_us) // sums.num_steps
    requests = {"running": steps["num_running"][first], "waiting": steps["num_waiting"][first]}
    tokens_per_s = {"decode": _rate(plan, sums.decode_tokens), "prefill": _rate(plan, sums.prefill_tokens)}
    return (
        _counter(plan, "KV blocks", used_us, {"used": steps["used_blocks"][_last_rows(plan)]}),
        _counter(plan, "requests", slices.start_us, requests),
        _counter(plan, "tokens/s", slices.start_us, tokens_per_s),
    )


def _rate(plan: _Plan, tokens: Ints) -> Ints:
    """Tokens a second of all slices of the replica that are under way when a slice starts."""
    slices = plan.slices
    own = np.rint(tokens * 1e6 / np.maximum(slices.end_us - slices.start_us, 1)).astype(np.int64)
    replica = plan.batches.replica[slices.first]
    is_start = np.repeat([False, True], own.size)
    at_us = np.concatenate([slices.end_us, slices.start_us])
    order = np.lexsort((is_start, at_us, np.tile(replica, 2)))
    rate = np.empty(2 * own.size, np.int64)
    rate[order] = np.cumsum(np.concatenate([-own, own])[order])
    return rate[own.size :]


def _counter(plan: _Plan, name: str, at_us: Ints, values: Mapping[str, NDArray[Any]]) -> Iterator[Event]:
    """A counter's values by slice, and zeros where a replica begins to idle."""
    replica = plan.batches.replica[plan.slices.first]
    num_slices = at_us.size
    at_us = np.append(at_us, plan.slices.last_end_us[plan.idles])
    replica = np.append(replica, replica[plan.idles])
    order = np.argsort(at_us, kind="stable").tolist()
    at, of = at_us.tolist(), replica.tolist()
    keys = tuple(values)
    rows = list(zip(*(column.tolist() for column in values.values()), strict=True))
    zeros = (0,) * len(keys)
    for i in order:
        pid = plan.pids[of[i]]
        args = dict(zip(keys, rows[i] if i < num_slices else zeros, strict=True))
        yield {"ph": "C", "name": name, "pid": pid, "tid": plan.tids[of[i], 0], "ts": at[i], "args": args}


def _phase_events(plan: _Plan) -> Iterator[Event]:
    request = plan.shown.request.tolist()
    replica = plan.requests["replica"][plan.shown.request].tolist()
    for at_us, what in zip(plan.phases.at_us.tolist(), plan.phases.what.tolist(), strict=True):
        position, phase = divmod(what, len(_PHASES))
        kind, name = _PHASES[phase]
        number, home = request[position], replica[position]
        event = {
            "ph": kind,
            "cat": "request",
            "id": hex(number),
            "name": name,
            "pid": plan.pids[home],
            "tid": plan.tids.get((home, 0), plan.pids[home]),
            "ts": at_us,
        }
        if phase == _REQUEST:
            event["args"] = _request_args(plan.requests, number)
        yield event


def _request_args(requests: Table, number: int) -> Event:
    names = ("request", "input_tokens", "output_tokens", "priority", "num_preemptions")
    args: dict[str, float] = {name: int(requests[name][number]) for name in names}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        seconds = float(requests[name][number])
        if math.isfinite(seconds):
            args[f"{name[:-2]}_ms"] = round(seconds * 1e3, 3)
    return args


def _flow_events(plan: _Plan) -> Iterator[Event]:
    request = plan.shown.request.tolist()
    replica = plan.batches.replica[plan.slices.first].tolist()
    lane = plan.batches.lane[plan.slices.first].tolist()
    flows = plan.flows
    for at_us, what, at in zip(flows.at_us.tolist(), flows.what.tolist(), flows.slices.tolist(), strict=True):
        position, point = divmod(what, len(_FLOW))
        event = {
            "ph": _FLOW[point],
            "cat": "request",
            "id": hex(request[position]),
            "name": "request",
            "pid": plan.pids[replica[at]],
            "tid": plan.tids[replica[at], lane[at]],
            "ts": at_us,
        }
        if _FLOW[point] == "f":
            event["bp"] = "e"  # it ends in the slice around it, not in the next one
        yield event
