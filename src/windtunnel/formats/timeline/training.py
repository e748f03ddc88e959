"""Write a training step as a timeline: a process for every pipeline device, a slice for every pass."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.formats.timeline.file import Event, process_names, thread_name, write_events
from windtunnel.formats.timeline.write import MAX_EVENTS
from windtunnel.training.pipeline.actions import PAIRED
from windtunnel.training.pipeline.schedules import Schedule

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

    Raises:
        InputError: it cannot be written, or has more events than a browser shows.
    """
    if len(starts) > MAX_EVENTS:
        raise InputError(
            f"the step has {len(starts):,} passes; a timeline shows at most {MAX_EVENTS:,}",
            "use fewer microbatches: a smaller global_batch shows the same pattern",
        )
    return write_events(path, about, step_events(schedule, starts, ends, closes, closing))
