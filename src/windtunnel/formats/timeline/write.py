"""Write a serving run as a timeline."""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.formats.timeline.file import trace_head, write_events
from windtunnel.formats.timeline.plan import FLOW, REQUEST_PHASES, Detail, Event, Ints, Plan, plan_timeline
from windtunnel.metrics.records import Table

MAX_EVENTS = 200_000
"""About 30 MB, which Perfetto opens in a few seconds."""


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
    return _events(plan_timeline(requests, steps, max_events))


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
    plan = plan_timeline(requests, steps, max_events, replica_phases)
    notes = {**(about or {}), **asdict(plan.detail), "sampling": plan.detail.sampling}
    write_events(path, trace_head(notes), _events(plan), b"\n]}\n")
    return plan.detail


def _events(plan: Plan) -> Iterator[Event]:
    yield from _names(plan)
    # Of events at one time the merge gives those of the first kind first: a flow must find the slice that it enters.
    lives = (event for event in plan.lives if event["ph"] == "X")
    kinds = (lives, _slice_events(plan), *_counter_events(plan), _phase_events(plan), _flow_events(plan))
    yield from heapq.merge(*kinds, key=itemgetter("ts"))


def _names(plan: Plan) -> Iterator[Event]:
    for replica, pid in plan.pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"replica {replica}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    num_tracks: dict[int, int] = {}
    for replica, _ in plan.tids:
        num_tracks[replica] = num_tracks.get(replica, 0) + 1
    for (replica, track), tid in plan.tids.items():
        name = "batches" if num_tracks[replica] == 1 else f"batches in flight, {track + 1} of {num_tracks[replica]}"
        thread = {"pid": plan.pids[replica], "tid": tid}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": tid}}
    yield from (event for event in plan.lives if event["ph"] == "M")


@dataclass(frozen=True, eq=False)
class _Sums:
    """Columns of the step table by slice."""

    num_steps: Ints
    decode_tokens: Ints
    """Of all steps together, as the two that follow."""
    prefill_tokens: Ints
    num_prefills: Ints


def _sums(plan: Plan) -> _Sums:
    def sum_of(name: str | None = None) -> Ints:
        column = num_steps if name is None else plan.steps[name][plan.batches.rows] * num_steps
        total = np.append(0, np.cumsum(column))
        return np.asarray(total[plan.slices.first + plan.slices.num_batches] - total[plan.slices.first])

    num_steps = plan.steps["num_steps"][plan.batches.rows].astype(np.int64)
    return _Sums(sum_of(), *(sum_of(name) for name in ("decode_tokens", "prefill_tokens", "num_prefills")))


def _slice_events(plan: Plan) -> Iterator[Event]:
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
    replica, track = batches.replica[slices.first].tolist(), batches.track[slices.first].tolist()
    for i in np.argsort(slices.start_us, kind="stable").tolist():
        yield {
            "ph": "X",
            "cat": "batch",
            "name": names[i],
            "pid": plan.pids[replica[i]],
            "tid": plan.tids[replica[i], track[i]],
            "ts": start[i],
            "dur": duration[i],
            "args": {name: column[i] for name, column in args.items()},
        }


def _last_rows(plan: Plan) -> Ints:
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


def _counter_events(plan: Plan) -> tuple[Iterator[Event], ...]:
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


def _rate(plan: Plan, tokens: Ints) -> Ints:
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


def _counter(plan: Plan, name: str, at_us: Ints, values: Mapping[str, NDArray[Any]]) -> Iterator[Event]:
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


def _phase_events(plan: Plan) -> Iterator[Event]:
    request = plan.shown.request.tolist()
    replica = plan.requests["replica"][plan.shown.request].tolist()
    for at_us, what in zip(plan.phases.at_us.tolist(), plan.phases.what.tolist(), strict=True):
        position, phase = divmod(what, len(REQUEST_PHASES))
        kind, name = REQUEST_PHASES[phase]
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
        if (kind, name) == REQUEST_PHASES[0]:
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


def _flow_events(plan: Plan) -> Iterator[Event]:
    request = plan.shown.request.tolist()
    replica = plan.batches.replica[plan.slices.first].tolist()
    track = plan.batches.track[plan.slices.first].tolist()
    flows = plan.flows
    for at_us, what, at in zip(flows.at_us.tolist(), flows.what.tolist(), flows.slices.tolist(), strict=True):
        position, point = divmod(what, len(FLOW))
        event = {
            "ph": FLOW[point],
            "cat": "request",
            "id": hex(request[position]),
            "name": "request",
            "pid": plan.pids[replica[at]],
            "tid": plan.tids[replica[at], track[at]],
            "ts": at_us,
        }
        if FLOW[point] == "f":
            event["bp"] = "e"  # it ends in the slice around it, not in the next one
        yield event
