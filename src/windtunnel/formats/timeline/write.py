"""Write a serving run as a timeline; or a training step: a process for each pipeline device, a slice for each pass."""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError
from windtunnel.formats.timeline.file import Event, process_names, thread_name, write_events
from windtunnel.formats.timeline.plan import FLOW, REQUEST_PHASES, Detail, Points, TimelinePlan, plan_timeline
from windtunnel.metrics.records import Table
from windtunnel.training.pipeline.actions import PAIRED
from windtunnel.training.pipeline.schedules import Schedule

MAX_EVENTS = 200_000
"""About 30 MB, which Perfetto opens in a few seconds."""


def write_timeline(
    path: Path,
    requests: Table,
    steps: Table,
    max_events: int = MAX_EVENTS,
    about: Mapping[str, str | float] | None = None,
    replica_phases: Table | None = None,
) -> Detail:
    """Write the timeline of a run as JSON, compressed where `path` ends in `.gz`; return how much it shows.

    The file appears completely or not at all. The same run gives the same bytes.

    A longer run is reduced. Successive batches of a thread are drawn as one slice, as many as it takes to bring slices
    and counters under half of `max_events`, or under the part that requests leave; busy time is conserved. Then as many
    whole requests as fit are shown, evenly spaced in the order of sending. InputError where the file cannot be written,
    or `max_events` is less than the threads of the run need.

    Args:
        path: `*.json` or `*.json.gz`; folders are made, and a file of that name is replaced.
        requests: a request table (`REQUEST_COLUMNS`). Requests that have not finished are not shown.
        steps: a step table (`STEP_COLUMNS`).
        max_events: upper limit of the number of events.
        about: notes for the file's `otherData`, beside those on what was left out.
        replica_phases: starts of the phases of replicas that come and go (`metrics.fleet.PHASE_COLUMNS`).
    """
    plan = plan_timeline(requests, steps, max_events, replica_phases)
    notes = {**(about or {}), **asdict(plan.detail), "sampling": plan.detail.sampling}
    write_events(path, notes, timeline(plan))
    return plan.detail


def timeline(plan: TimelinePlan) -> Iterator[Event]:
    """Yield the events of a run in order of time, after the metadata that names processes and threads.

    There is one process for each replica, one thread for each batch that a replica has in flight at once, and a slice
    (`X`) for each row of the step table. Requests are async slices (`b`, `e`) with their phases inside, and flows (`s`,
    `t`, `f`) from the batch that schedules a request to the batches of its first and last token. Counters (`C`) show KV
    blocks, requests and tokens/s. Times are whole microseconds.
    """
    yield from _names(plan)
    # The merge orders events at one time by kind: a flow must find the slice that it enters.
    lives = (event for event in plan.lives if event["ph"] == "X")
    first = plan.slices.first
    batches = zip(plan.batches.replica[first].tolist(), plan.batches.track[first].tolist(), strict=True)
    slices = [(plan.pids[replica], plan.tids[replica, track]) for replica, track in batches]
    replicas = plan.requests["replica"][plan.shown.request].tolist()
    homes = [(plan.pids[replica], plan.tids.get((replica, 0), plan.pids[replica])) for replica in replicas]
    phases = _point_events(plan, plan.phases, REQUEST_PHASES, homes)
    flows = _point_events(plan, plan.flows, FLOW, slices)
    kinds = (lives, _slice_events(plan), *_counter_events(plan), phases, flows)
    yield from heapq.merge(*kinds, key=itemgetter("ts"))


def _names(plan: TimelinePlan) -> Iterator[Event]:
    for replica, pid in plan.pids.items():
        yield from process_names(pid, f"replica {replica}")
    num_tracks = Counter(replica for replica, _ in plan.tids)
    for (replica, track), tid in plan.tids.items():
        name = "batches" if num_tracks[replica] == 1 else f"batches in flight, {track + 1} of {num_tracks[replica]}"
        yield thread_name(plan.pids[replica], tid, name)
        sort = {"name": "thread_sort_index", "pid": plan.pids[replica], "tid": tid, "args": {"sort_index": tid}}
        yield {"ph": "M", **sort}
    yield from (event for event in plan.lives if event["ph"] == "M")


def _sums(plan: TimelinePlan) -> dict[str, Ints]:
    """Return the number of steps of each slice, and their tokens and prefills in all."""
    num_steps = plan.steps["num_steps"][plan.batches.rows].astype(np.int64)
    names = ("decode_tokens", "prefill_tokens", "num_prefills")
    columns = {name: plan.steps[name][plan.batches.rows] * num_steps for name in names}
    return {
        name: np.add.reduceat(column, plan.slices.first) for name, column in {"num_steps": num_steps, **columns}.items()
    }


def _slice_events(plan: TimelinePlan) -> Iterator[Event]:
    slices, batches, steps = plan.slices, plan.batches, plan.steps
    sums = _sums(plan)
    num_steps = sums["num_steps"]
    first = batches.rows[slices.first]
    duration_us = slices.end_us - slices.start_us
    args: dict[str, list[Any]] = {
        **{name: _per_step(sums[name], num_steps) for name in ("decode_tokens", "prefill_tokens")},
        "num_steps": num_steps.tolist(),
        "step_ms": np.round(duration_us / num_steps / 1000, 4).tolist(),
        **{name: steps[name][first].tolist() for name in ("context_tokens", "num_running", "num_waiting")},
        "used_blocks": steps["used_blocks"][_last_rows(plan)].tolist(),
    }
    if plan.detail.batches_per_slice > 1:
        args["num_batches"] = slices.num_batches.tolist()
    parts = (sums["decode_tokens"] / num_steps, sums["prefill_tokens"], sums["num_prefills"], slices.num_batches)
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


def _last_rows(plan: TimelinePlan) -> Ints:
    return np.asarray(plan.batches.rows[plan.slices.first + plan.slices.num_batches - 1])


def _per_step(tokens: Ints, num_steps: Ints) -> list[float]:
    """Return the mean per step: as whole numbers where all are whole."""
    is_whole = not (tokens % num_steps).any()
    mean: list[float] = (tokens // num_steps if is_whole else np.round(tokens / num_steps, 2)).tolist()
    return mean


def _composition(decodes: float, prefill_tokens: int, num_prefills: int, num_batches: int) -> str:
    """Return a slice's name, `prefill 3 x 2,048 + decode 61`: prompts x tokens (~: their mean), decoding requests."""
    parts = []
    if prefill_tokens:
        each, rest = divmod(prefill_tokens, max(num_prefills, 1))
        times = f"{num_prefills} x " if num_prefills > 1 else ""
        parts.append(f"prefill {times}{'~' if rest else ''}{each:,}")
    if decodes:
        parts.append(f"decode {'' if decodes == int(decodes) else '~'}{max(round(decodes), 1)}")
    name = " + ".join(parts) or "cut short by a failure"
    return f"{num_batches} batches: {name}" if num_batches > 1 else name


def _counter_events(plan: TimelinePlan) -> tuple[Iterator[Event], ...]:
    """Return a stream for each counter: KV blocks in use, requests running and waiting, tokens/s of running batches."""
    slices, batches, steps = plan.slices, plan.batches, plan.steps
    sums = _sums(plan)
    first = batches.rows[slices.first]
    # The last of a row's steps has allocated all its blocks when it starts.
    used_us = slices.end_us - (slices.end_us - slices.start_us) // sums["num_steps"]
    requests = {"running": steps["num_running"][first], "waiting": steps["num_waiting"][first]}
    tokens_per_s = {"decode": _rate(plan, sums["decode_tokens"]), "prefill": _rate(plan, sums["prefill_tokens"])}
    return (
        _counter(plan, "KV blocks", used_us, {"used": steps["used_blocks"][_last_rows(plan)]}),
        _counter(plan, "requests", slices.start_us, requests),
        _counter(plan, "tokens/s", slices.start_us, tokens_per_s),
    )


def _rate(plan: TimelinePlan, tokens: Ints) -> Ints:
    """Return, at the start of each slice, the tokens a second of all slices of its replica that are then under way."""
    slices = plan.slices
    rate = np.rint(tokens * 1e6 / np.maximum(slices.end_us - slices.start_us, 1)).astype(np.int64)
    replica = plan.batches.replica[slices.first]
    # At one time ends come before starts, but for slices without duration, which end after their own start.
    priority = np.append(np.where(slices.end_us > slices.start_us, 0, 2), np.ones(rate.size))
    time_us = np.concatenate([slices.end_us, slices.start_us])
    order = np.lexsort((priority, time_us, np.tile(replica, 2)))
    total = np.empty(2 * rate.size, np.int64)
    total[order] = np.cumsum(np.concatenate([-rate, rate])[order])
    return total[rate.size :]


def _counter(plan: TimelinePlan, name: str, time_us: Ints, values: Mapping[str, NDArray[Any]]) -> Iterator[Event]:
    """Yield a counter's values by slice, and zeros where a replica becomes idle."""
    replica = plan.batches.replica[plan.slices.first]
    rows = list(zip(*(column.tolist() for column in values.values()), strict=True))
    rows += [(0,) * len(values)] * plan.idles.size
    times_us = np.append(time_us, plan.slices.last_end_us[plan.idles])
    replicas = np.append(replica, replica[plan.idles]).tolist()
    for i in np.argsort(times_us, kind="stable").tolist():
        place = {"pid": plan.pids[replicas[i]], "tid": plan.tids[replicas[i], 0], "ts": int(times_us[i])}
        yield {"ph": "C", "name": name, **place, "args": dict(zip(values, rows[i], strict=True))}


def _point_events(
    plan: TimelinePlan, points: Points, kinds: Sequence[tuple[str, str]], places: Sequence[tuple[int, int]]
) -> Iterator[Event]:
    """Yield the events of shown requests; `places` has process and thread of each place of the points."""
    request = plan.shown.request.tolist()
    for time_us, code, place in zip(*(column.tolist() for column in points), strict=True):
        position, kind = divmod(code, len(kinds))
        (phase, name), (pid, tid), number = kinds[kind], places[place], request[position]
        event = {"ph": phase, "cat": "request", "id": hex(number), "name": name, "pid": pid, "tid": tid, "ts": time_us}
        if (phase, name) == REQUEST_PHASES[0]:
            event["args"] = _request_args(plan.requests, number)
        elif phase == "f":
            event["bp"] = "e"  # it ends in the slice around it, not in the next one
        yield event


def _request_args(requests: Table, number: int) -> Event:
    names = ("request", "input_tokens", "output_tokens", "priority", "num_preemptions")
    args: dict[str, float] = {name: int(requests[name][number]) for name in names}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        seconds = float(requests[name][number])
        if math.isfinite(seconds):
            args[f"{name[:-2]}_ms"] = round(seconds * 1e3, 3)
    return args


KINDS = ("forward", "backward", "weight gradient")
_COLOURS = ("thread_state_running", "thread_state_runnable", "thread_state_iowait")


def step_events(
    schedule: Schedule, starts: Floats, ends: Floats, closes: Floats, closing: Mapping[str, float]
) -> Iterator[Event]:
    """Yield the events of one step. Times are whole microseconds; slices of one thread do not overlap.

    `starts` and `ends` of each action are in seconds; so is when each device's pipeline `closes`, and each part of
    the step behind it, by name.
    """
    starts_us, ends_us = np.rint(starts * 1e6).astype(np.int64), np.rint(ends * 1e6).astype(np.int64)
    for device in range(schedule.num_devices):
        yield from process_names(device, f"pipeline device {device}")
        yield thread_name(device, 0, "passes")
        first, last = int(schedule.offsets[device]), int(schedule.offsets[device + 1])
        for index in range(first, last):
            kind, chunk, microbatch = (int(value) for value in schedule.actions[index])
            name = KINDS[kind % PAIRED]
            yield {
                "ph": "X",
                "name": f"{name} {microbatch}",
                "cat": name,
                "cname": _COLOURS[kind % PAIRED],
                "pid": device,
                "tid": 0,
                "ts": int(starts_us[index]),
                "dur": int(ends_us[index] - starts_us[index]),
                "args": {"chunk": chunk, "microbatch": microbatch},
            }
        yield thread_name(device, 1, "end of step")
        edges_us = np.rint(1e6 * (closes[device] + np.cumsum([0.0, *closing.values()]))).astype(np.int64).tolist()
        for name, (start_us, end_us) in zip(closing, pairwise(edges_us), strict=True):
            yield {"ph": "X", "name": name, "pid": device, "tid": 1, "ts": start_us, "dur": end_us - start_us}


def write_step_timeline(
    path: Path,
    schedule: Schedule,
    starts: Floats,
    ends: Floats,
    closes: Floats,
    closing: Mapping[str, float],
    about: Mapping[str, str | float],
) -> int:
    """Write the timeline of a step as JSON, compressed where `path` ends in `.gz`; return the number of events.
    InputError where it cannot be written, or has more events than a browser shows."""
    if len(starts) > MAX_EVENTS:
        raise InputError(
            f"the step has {len(starts):,} passes; a timeline shows at most {MAX_EVENTS:,}",
            "use fewer microbatches: a smaller global_batch shows the same pattern",
        )
    return write_events(path, about, step_events(schedule, starts, ends, closes, closing))
