"""Choose the parts of a run that a timeline shows: batches are merged and requests left out until the events fit."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.errors import InputError
from windtunnel.formats.timeline.file import Event, thread_name
from windtunnel.metrics.fleet import PHASES
from windtunnel.metrics.records import Table

_EVENTS_PER_SLICE = 7
"""Upper limit: the slice, three counters, and three counters at zero where the replica becomes idle."""
_EVENTS_PER_REQUEST = 11
"""Upper limit: begin and end of the request and of three phases, and three points of its flow."""


@dataclass(frozen=True)
class Detail:
    """Size of a timeline beside the size of its run."""

    num_events: int
    num_batches: int
    """Rows of the step table."""
    batches_per_slice: int
    num_requests: int
    num_shown_requests: int

    @property
    def is_complete(self) -> bool:
        """Whether no batches were merged and every request is shown."""
        return self.batches_per_slice == 1 and self.num_shown_requests == self.num_requests

    @property
    def sampling(self) -> str:
        """Description of the parts that were left out."""
        parts = []
        if self.batches_per_slice > 1:
            parts.append(f"a slice is {self.batches_per_slice:,} successive batches, as long as they were busy")
        if self.num_shown_requests < self.num_requests:
            parts.append(f"{self.num_shown_requests:,} of {self.num_requests:,} requests are shown")
        return "; ".join(parts) or "none"


@dataclass(frozen=True, eq=False)
class TrackBatches:
    """Rows of the step table ordered by (replica, track, start). Rows of one track do not overlap."""

    rows: Ints
    """Positions in the step table."""
    replica: Ints
    track: Ints
    start_us: Ints
    end_us: Ints

    @property
    def is_new_track(self) -> Bools:
        changes = (np.diff(self.replica) != 0) | (np.diff(self.track) != 0)
        return np.concatenate([np.ones(min(self.rows.size, 1), np.bool_), changes])


class Slices(NamedTuple):
    """Slices of the threads, ordered as the batches: each is one batch or several in succession.

    A slice of several batches starts with the first and lasts as long as all were busy, without idle time between.
    """

    first: Ints
    """Position in `batches` of the first batch."""
    num_batches: Ints
    start_us: Ints
    end_us: Ints
    last_end_us: Ints
    """End of the last batch."""


class ShownRequests(NamedTuple):
    """The requests that are shown; times ascend within each."""

    request: Ints
    """Positions in the request table."""
    times_us: Ints
    """[n, 4] arrival, scheduled, first token, finish."""


class Points(NamedTuple):
    """Events of requests, ordered by time: `codes[i]` happens at `time_us[i]`."""

    time_us: Ints
    codes: Ints
    places: Ints
    """Position in `shown` of a phase's request; slice of a flow's point."""


@dataclass(frozen=True, eq=False)
class TimelinePlan:
    """Source of all events."""

    steps: Table
    requests: Table
    batches: TrackBatches
    slices: Slices
    idles: Ints
    """Slices after which their replica has nothing to do."""
    shown: ShownRequests
    phases: Points
    """Begins and ends; a code is 8 x position in `shown` + position in `REQUEST_PHASES`."""
    flows: Points
    """Points of flows; a code is 3 x position in `shown` + position in `FLOW`."""
    pids: Mapping[int, int]
    tids: Mapping[tuple[int, int], int]
    detail: Detail
    lives: tuple[Event, ...] = ()
    """Names and slices of the phases of replicas that come and go."""


REQUEST_PHASES = (
    ("b", "request"),
    *((kind, phase) for phase in ("queueing", "prefill", "decode") for kind in "be"),
    ("e", "request"),
)
"""A request's async events in their order. All requests share the outer name: Perfetto then draws them on one track."""
_PHASE_TIMES = [0, 0, 1, 1, 2, 2, 3, 3]
FLOW = (("s", "request"), ("t", "request"), ("f", "request"))
"""Events of a request's flow: the batches that schedule it, give its first token, and give its last token."""


def plan_timeline(requests: Table, steps: Table, max_events: int, replica_phases: Table | None = None) -> TimelinePlan:
    """Choose the batches and requests to show, so that there are at most `max_events` events."""
    batches = batches_by_track(steps)
    with_replicas = [requests, *([] if replica_phases is None else [replica_phases])]
    replicas = np.unique(np.concatenate([batches.replica, *(table["replica"] for table in with_replicas)])).tolist()
    tracks = list(dict.fromkeys(zip(batches.replica.tolist(), batches.track.tolist(), strict=True)))
    # No thread has the number of a process: Perfetto would take it for the process's main thread.
    pids = {replica: number for number, replica in enumerate(replicas, 1)}
    tids = {track: number for number, track in enumerate(tracks, len(replicas) + 1)}
    lives = _lives(replica_phases, steps, pids, 1 + len(pids) + len(tids))
    room = max_events - 2 * (len(pids) + len(tids)) - len(lives)
    least = _EVENTS_PER_SLICE * len(tracks) + _EVENTS_PER_REQUEST
    if room < 2 * least:
        raise InputError(
            f"a timeline of {max_events:,} events has no room for the {len(replicas) + len(tracks):,} processes and "
            "threads of this run",
            f"allow it {max_events - room + 2 * least:,} events or more",
        )
    times_s = np.stack([requests[name] for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")], axis=1)
    known = np.flatnonzero(np.isfinite(times_s).all(axis=1))
    everyone = ShownRequests(known, np.maximum.accumulate(_microseconds(times_s[known]), axis=1))
    for_requests = int(_is_shown(everyone).sum())
    if for_requests < room:
        for_requests += _flows(everyone, requests, steps, batches, _slices(batches, 1)).codes.size
    room_for_slices = max(room // 2, room - for_requests)
    slices, idles, batches_per_slice, num_slice_events = _slices_within(room_for_slices, batches, requests)
    flows_of = partial(_flows, requests=requests, steps=steps, batches=batches, slices=slices)
    shown, flows = _requests_within(room - num_slice_events, everyone, flows_of)
    is_shown = _is_shown(shown)
    phases = _in_order(shown.times_us[:, _PHASE_TIMES], is_shown, np.indices(is_shown.shape)[0])
    detail = Detail(
        num_events=max_events - room + num_slice_events + phases.codes.size + flows.codes.size,
        num_batches=len(steps),
        batches_per_slice=batches_per_slice,
        num_requests=len(requests),
        num_shown_requests=shown.request.size,
    )
    return TimelinePlan(steps, requests, batches, slices, idles, shown, phases, flows, pids, tids, detail, lives)


def _microseconds(seconds: Floats) -> Ints:
    return np.rint(seconds * 1e6).astype(np.int64)


def batches_by_track(steps: Table) -> TrackBatches:
    """Assign the rows of a step table to tracks, each to the first free one of its replica."""
    start_us = _microseconds(steps["start_s"])
    end_us = _microseconds(steps["start_s"] + steps["duration_s"])
    rows = np.lexsort((start_us, steps["replica"]))
    replica, start_us, end_us = steps["replica"][rows].astype(np.int64), start_us[rows], end_us[rows]
    track = np.zeros(replica.size, np.int64)
    overlaps = (replica[1:] == replica[:-1]) & (start_us[1:] < end_us[:-1] - 1)
    for busy in np.unique(replica[1:][overlaps]):
        first, last = np.searchsorted(replica, [busy, busy + 1])
        free_us: list[int] = []
        times = zip(start_us[first:last].tolist(), end_us[first:last].tolist(), strict=True)
        for row, (start, end) in enumerate(times, first):
            for number, free in enumerate(free_us):
                if start >= free - 1:
                    free_us[number] = end
                    track[row] = number
                    break
            else:
                track[row] = len(free_us)
                free_us.append(end)
    order = np.lexsort((start_us, track, replica))
    batches = TrackBatches(rows[order], replica[order], track[order], start_us[order], end_us[order])
    # The end of a batch and the start of the next one may be the same time, rounded to two.
    follows = ~batches.is_new_track[1:]
    batches.end_us[:-1][follows] = np.minimum(batches.end_us[:-1], batches.start_us[1:])[follows]
    return batches


def _slices(batches: TrackBatches, batches_per_slice: int) -> Slices:
    track_starts = np.flatnonzero(batches.is_new_track)
    sizes = np.diff(np.append(track_starts, batches.rows.size))
    position = np.arange(batches.rows.size) - np.repeat(track_starts, sizes)
    first = np.flatnonzero(position % batches_per_slice == 0)
    last = np.append(first, batches.rows.size)[1:] - 1
    start_us = batches.start_us[first]
    busy_us = np.append(0, np.cumsum(batches.end_us - batches.start_us))
    end_us = start_us + busy_us[last + 1] - busy_us[first]
    return Slices(first, last + 1 - first, start_us, end_us, batches.end_us[last])


def _slices_within(room: int, batches: TrackBatches, requests: Table) -> tuple[Slices, Ints, int, int]:
    """Return the slices with the fewest batches in each that, with their counters, are at most `room` events.

    Behind them come those after which a replica is idle, the batches in each slice, and the number of events.
    """
    batches_per_slice = 1
    while True:
        slices = _slices(batches, batches_per_slice)
        idles = _idles(slices, batches, requests)
        num_events = 4 * slices.first.size + 3 * idles.size
        if num_events <= room:
            return slices, idles, batches_per_slice, num_events
        batches_per_slice = max(batches_per_slice + 1, batches_per_slice * num_events // room)


def _idles(slices: Slices, batches: TrackBatches, requests: Table) -> Ints:
    """Return slices at whose end their replica has no other slice under way and no unfinished request."""
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

    # A finish and the end of its batch may be the same time, rounded to two.
    return np.sort(idle[count("arrival_s", latest) <= count("finish_s", latest + 1)])


def _requests_within(
    room: int, everyone: ShownRequests, flows_of: Callable[[ShownRequests], Points]
) -> tuple[ShownRequests, Points]:
    """Return as many requests, evenly spaced, as fit into `room` events with their flows."""
    num_all = everyone.request.size
    num_shown = num_all
    while True:
        some = np.arange(num_shown) * num_all // max(num_shown, 1)
        shown = ShownRequests(everyone.request[some], everyone.times_us[some])
        num_events = int(_is_shown(shown).sum())
        if num_events <= room:
            flows = flows_of(shown)
            num_events += flows.codes.size
            if num_events <= room:
                return shown, flows
        num_shown = min(num_shown - 1, num_shown * room // num_events)


def _is_shown(requests: ShownRequests) -> Bools:
    """Return [n, 8] whether a request has each of `REQUEST_PHASES`: some do not queue, or end with the first token."""
    times_us = requests.times_us
    queued, decoded = times_us[:, 1] > times_us[:, 0], times_us[:, 3] > times_us[:, 2]
    always = np.ones_like(queued)
    return np.stack([always, queued, queued, always, always, decoded, decoded, always], axis=1)


def _in_order(times_us: Ints, is_shown: Bools, places: Ints) -> Points:
    """Return the points that are shown, by time; codes are positions in the arrays, all of the same shape."""
    codes = np.flatnonzero(is_shown)
    codes = codes[np.argsort(times_us.ravel()[codes], kind="stable")]
    return Points(times_us.ravel()[codes], codes, places.ravel()[codes])


def _flows(shown: ShownRequests, requests: Table, steps: Table, batches: TrackBatches, slices: Slices) -> Points:
    """Return the points of the requests' flows.

    The batch that scheduled a request starts at that time, the batches of its first and last token end then; of
    several, the first is taken. A request that lives within one slice has no flow.
    """
    replica = requests["replica"][shown.request]
    prefill_replica = requests.columns.get("prefill_replica", requests["replica"])[shown.request]
    slice_of = np.repeat(np.arange(slices.first.size), slices.num_batches)
    busy_us = np.append(0, np.cumsum(batches.end_us - batches.start_us))
    drawn_us = slices.start_us[slice_of] + (busy_us[:-1] - busy_us[slices.first[slice_of]])
    prefills = np.flatnonzero(steps["prefill_tokens"][batches.rows] > 0)
    everything = np.arange(batches.rows.size)
    _, scheduled_us, first_token_us, finish_us = shown.times_us.T
    on_prefill, on_decode = (
        _batch_at(batches.end_us, prefills, first_token_us, batches.replica, number)
        for number in (prefill_replica, replica)
    )
    batch = np.column_stack(
        [
            _batch_at(batches.start_us, prefills, scheduled_us, batches.replica, prefill_replica),
            np.where(on_prefill >= 0, on_prefill, on_decode),
            _batch_at(batches.end_us, everything, finish_us, batches.replica, replica),
        ]
    )
    points = np.append(slice_of, -1)[batch]
    time_us = np.append(drawn_us, -1)[batch]
    # Where batches are merged, one of a later time may be drawn before that of another track.
    in_order = (time_us[:, 0] <= time_us[:, 1]) & (time_us[:, 1] <= time_us[:, 2])
    is_drawn = (batch >= 0).all(axis=1) & in_order & (points[:, 0] != points[:, 2])
    repeats = (points[:, 1] == points[:, 0]) | (points[:, 1] == points[:, 2])
    points[~is_drawn] = -1
    points[:, 1][repeats] = -1
    return _in_order(time_us, points >= 0, points)


def _batch_at(times_us: Ints, among: Ints, time_us: Ints, replica: Ints, request_replica: Ints) -> Ints:
    """Return the batch of each request by its time, but for rounding, and its replica; -1 without one.

    `times_us` and `replica` have a value for every batch, `among` are those to choose from; `time_us` and
    `request_replica` have one for each request.
    """
    if among.size == 0:
        return np.full(time_us.size, -1, np.int64)
    # One axis of time for all replicas, one after another.
    horizon_us = int(max(times_us.max(), time_us.max(initial=0))) + 4
    axis = replica[among] * horizon_us + times_us[among]
    among = among[np.argsort(axis, kind="stable")]
    axis = np.sort(axis)
    target = request_replica * horizon_us + time_us
    exact = np.searchsorted(axis, target)
    is_exact = axis[np.minimum(exact, axis.size - 1)] == target
    nearest = np.minimum(np.where(is_exact, exact, np.searchsorted(axis, target - 1)), axis.size - 1)
    return np.where(np.abs(axis[nearest] - target) <= 1, among[nearest], -1)


def _lives(phases: Table | None, steps: Table, pids: Mapping[int, int], first_tid: int) -> tuple[Event, ...]:
    """Return a thread for each replica with a slice for each phase but `off`, in order of time, after their names."""
    if phases is None:
        return ()
    end_us = int(_microseconds(steps["start_s"] + steps["duration_s"]).max())
    names: list[Event] = []
    slices: list[Event] = []
    for tid, (replica, pid) in enumerate(pids.items(), first_tid):
        names.append(thread_name(pid, tid, "phase"))
        rows = np.flatnonzero(phases["replica"] == replica)
        starts_us = [*np.minimum(_microseconds(phases["time_s"][rows]), end_us).tolist(), end_us]
        for kind, (begin, end) in zip(phases["phase"][rows].tolist(), itertools.pairwise(starts_us), strict=True):
            if PHASES[kind] != "off" and end > begin:
                span = {"pid": pid, "tid": tid, "ts": begin, "dur": end - begin}
                slices.append({"ph": "X", "name": PHASES[kind], **span})
    return (*names, *sorted(slices, key=itemgetter("ts")))
