"""Run the walking loop: arrays in, records out, and a user's policy called where one was given."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.kernels import state, walked_state
from windtunnel.kernels.serve import DONE, MORE, OUT_OF_STEPS, STUCK
from windtunnel.kernels.walked import OUT_OF_TABLES, run_walked
from windtunnel.metrics.records import STEP_COLUMNS, Table

BUFFER_ROWS = 100_000
BUFFER_MEMBERS = 2_000_000

Progress = Callable[[int, int], None]
"""Called with (requests finished, requests in all)."""


@dataclass(frozen=True, eq=False)
class Trail:
    """What every batch held, and when it was in each pipeline stage."""

    members: NDArray[np.int64]
    """[m, 3] row of the step table, request, tokens; in the order of the batch."""
    stage_s: NDArray[np.float64]
    """[rows, stages, 2] start and end."""


@dataclass(frozen=True, eq=False)
class WalkedRun:
    """A finished run of the walking loop."""

    requests: NDArray[np.void]
    """`kernels.state.REQUEST` records in order of sending."""
    walks: NDArray[np.void]
    """`kernels.walked_state.WALK` records beside them."""
    steps: Table
    engine_time_s: float
    """Wall time of the loop."""
    trail: Trail | None = None

    @property
    def execution_s(self) -> NDArray[np.float64]:
        """[requests] time that each spent in pipeline stages; NaN where it did not finish."""
        started_s = self.walks["started_s"]
        started_s = np.where(np.isnan(started_s), self.requests["scheduled_s"], started_s)
        return np.asarray(self.requests["finish_s"] - started_s - self.walks["paused_s"])


def walk(
    settings: walked_state.WalkedSettings,
    records: Any,
    cost: state.StepCost | None = None,
    tables: walked_state.Tables | None = None,
    sessions: state.Sessions | None = None,
    keeps_trail: bool = False,
    progress: Progress | None = None,
) -> WalkedRun:
    """Run the walking loop to its end.

    Args:
        settings: how batches are formed.
        records: fresh `REQUEST` records in order of arrival; changed in place.
        cost: prices steps; or
        tables: does.
        sessions: which request waits for which other one.
        keeps_trail: record what every batch held.
        progress: called now and then.

    Raises:
        InputError: a batch lies outside `tables`, or a request can never be scheduled.
    """
    walks, replicas = walked_state.new_walks(records), walked_state.new_replicas(settings)
    slots, batches = walked_state.new_slots(settings), walked_state.new_batches(settings)
    stages = np.zeros((settings.num_replicas, settings.num_stages))
    events = np.zeros(settings.num_replicas * (settings.num_stages + 1) + 1, state.EVENT).view(np.recarray)
    clock = walked_state.new_walk_clock(settings)
    buffers, members, stage_s = [], [], []
    started_s = time.perf_counter()
    while True:
        buffer = state.new_steps(BUFFER_ROWS)
        trail = walked_state.new_trail(settings, BUFFER_ROWS, BUFFER_MEMBERS) if keeps_trail else None
        status = run_walked(
            settings, cost, tables, trail, sessions, records, walks, replicas, slots, batches, stages, events, clock, buffer
        )
        buffers.append(buffer[: clock[0].rows])
        if trail is not None:
            members.append(trail.members[: clock[0].members])
            stage_s.append(trail.stage_s[: clock[0].rows])
        if progress is not None:
            progress(int(clock[0].finished), records.size)
        if status != MORE:
            break
    engine_time_s = time.perf_counter() - started_s
    if status == OUT_OF_TABLES:
        raise InputError(
            f"a batch of {clock[0].culprit} requests after {clock[0].now_s:g} s lies outside the look-up tables",
            "use tables that reach further, or a smaller batch",
        )
    if status == OUT_OF_STEPS:
        raise InputError("the recorded steps end before the requests do")
    if status == STUCK:
        raise InputError(
            f"{records.size - clock[0].finished} of {records.size} requests can never be scheduled",
            "a prompt does not fit the KV cache, or the tokens that a batch may have",
        )
    assert status == DONE
    return WalkedRun(
        requests=records.view(np.ndarray),
        walks=walks.view(np.ndarray),
        steps=Table({name: np.concatenate([b[name] for b in buffers]) for name in STEP_COLUMNS}, STEP_COLUMNS),
        engine_time_s=engine_time_s,
        trail=Trail(np.concatenate(members), np.concatenate(stage_s)) if keeps_trail else None,
    )
