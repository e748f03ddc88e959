"""Around the compiled loop: fresh records and arrays, one buffer of steps after the other, what stops it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, WindtunnelError
from windtunnel.metrics.records import STEP_COLUMNS, Table
from windtunnel.serving.custom.policy import Policy
from windtunnel.serving.custom.router import Router, RouterCaller
from windtunnel.serving.engines.compiled_policies import in_use
from windtunnel.serving.loop.serve import run
from windtunnel.serving.runners.per_request import schedule_per_request
from windtunnel.serving.setup.fleet_plan import FleetRun
from windtunnel.serving.setup.prefix_cache import session_state
from windtunnel.serving.state import records as state
from windtunnel.serving.state.per_request import PerRequestSettings
from windtunnel.serving.state.pools import Pools
from windtunnel.serving.state.status import ASK_ROUTER, DONE, MORE, OUT_OF_STEPS, STUCK
from windtunnel.workload.generate.requests import RequestArrays

STEP_BUFFER_ROWS = 100_000
"""Rows between two looks at progress and Ctrl-C: 30 to 100 ms."""
ROWS_PER_REQUEST = 4
"""Few runs have more, and a short run takes as long to be given its memory as to run."""
LEAST_IMPATIENT_ROWS = 1_000
"""Where a run may be given up; more for more requests, as each look at them takes longer."""

Progress = Callable[[int, int], None]
"""Called with (requests finished, requests in all)."""
GiveUp = Callable[[state.Table, float], bool]
"""Called with (`REQUEST` records so far, the time that the run has reached); whether to stop it."""


def run_loop(
    settings: state.KernelSettings,
    cost: state.StepCost,
    requests: RequestArrays,
    progress: Progress | None = None,
    cache: state.Cache | None = None,
    speculation: state.Speculation | None = None,
    fleet: FleetRun | None = None,
    router: Router | None = None,
    give_up: GiveUp | None = None,
) -> tuple[NDArray[np.void], Table, float]:
    """Run the compiled loop to its end, one pool of replicas.

    Args:
        settings, cost: of the replicas.
        requests: in order of sending.
        progress: called now and then.
        cache: prefix caches, None without prefix caching; holds what each request found.
        speculation: None where a decode step gives one token.
        fleet: None where all replicas are there all the time; it keeps the log.
        router: the user's, if `settings` say so.
        give_up: see `serving.server.serve`.

    Returns:
        `REQUEST` records in order of sending, the step table, and the loop's wall time in seconds.

    Raises:
        WindtunnelError: recorded step durations ran out before the requests did.
    """
    arrays = (
        state.new_ranks(settings),
        state.new_slots(settings),
        state.new_lists(settings),
        state.new_stages(settings),
    )
    records = new_records(requests)
    events = state.new_events(settings)
    steps, engine_time_s = run_to_end(
        settings,
        cost,
        requests,
        records,
        arrays,
        events,
        progress,
        cache=cache,
        speculation=speculation,
        fleet=fleet,
        router=router,
        give_up=give_up,
    )
    return records.view(np.ndarray), steps, engine_time_s


def new_records(requests: RequestArrays) -> state.Table:
    """Fresh `REQUEST` records."""
    records = state.new_requests(requests.arrival_s, requests.input_tokens, requests.output_tokens, requests.priority)
    if requests.tenant is not None:
        records.tenant = np.unique(requests.tenant, return_inverse=True)[1]
    if requests.ttft_limit_s is not None:
        records.ttft_limit_s = requests.ttft_limit_s
    return records


def run_to_end(
    settings: Any,
    cost: state.StepCost,
    requests: RequestArrays,
    records: state.Table,
    arrays: Sequence[state.Table],
    events: state.Table,
    progress: Progress | None,
    *,
    cache: state.Cache | None = None,
    speculation: state.Speculation | None = None,
    pools: Pools | None = None,
    fleet: FleetRun | None = None,
    router: Router | None = None,
    give_up: GiveUp | None = None,
) -> tuple[Table, float]:
    """Run the loop buffer by buffer; `records`, `arrays` and what belongs to them are changed in place."""
    clock, sessions = state.new_clock(settings), session_state(requests)
    policies = in_use([settings.scheduler] if pools is None else pools.pools["scheduler"])
    have_windows = settings.window_tokens > 0 if pools is None else pools.pools["window_tokens"].any()
    replicas = None if fleet is None else fleet.fleet
    caller = None
    if router is not None:
        assert replicas is not None
        caller = RouterCaller(router, settings, requests, records, arrays[0], replicas)
    buffers = []
    num_rows = min(STEP_BUFFER_ROWS, ROWS_PER_REQUEST * (records.size + 100))
    if give_up is not None:
        num_rows = min(num_rows, max(LEAST_IMPATIENT_ROWS, records.size // 8))
    started_s = time.perf_counter()
    while True:
        buffer = state.new_steps(num_rows)
        status = ASK_ROUTER
        while status == ASK_ROUTER:
            status = run(
                settings,
                cost,
                cache,
                sessions,
                speculation,
                records,
                *arrays,
                events,
                clock,
                buffer,
                pools,
                replicas,
                *policies,
                1 if have_windows else None,
            )
            if status == ASK_ROUTER:
                assert caller is not None
                caller.route()
        buffers.append(buffer[: clock[0].rows])
        if fleet is not None:
            fleet.collect()
        if progress is not None:
            progress(int(clock[0].finished), records.size)
        if status != MORE or (give_up is not None and give_up(records, float(buffer[-1].start_s))):
            break
    engine_time_s = time.perf_counter() - started_s
    if status == OUT_OF_STEPS:
        raise WindtunnelError(f"the {cost.recorded_step_s.size} recorded steps end before the requests do")
    if status == STUCK and fleet is not None:
        raise InputError(
            f"{fleet.fleet.control[0].num_at_router} requests are held at the router and no replica "
            "will ever take them",
            "a router that holds a request back is asked again when another one ends",
        )
    assert status in (DONE, MORE), "a request can never be scheduled"
    if len(buffers) == 1:
        whole = np.asarray(buffers[0])
        return Table({name: whole[name] for name in STEP_COLUMNS}, STEP_COLUMNS), engine_time_s
    steps = Table({name: np.concatenate([b[name] for b in buffers]) for name in STEP_COLUMNS}, STEP_COLUMNS)
    return steps, engine_time_s


def run_per_request_scheduler(
    settings: PerRequestSettings,
    cost: state.StepCost,
    requests: RequestArrays,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> tuple[NDArray[np.void], Table, float]:
    """Run the per-request loop to its end; returns what `run_loop` does."""
    records = new_records(requests)
    run = schedule_per_request(
        settings, records, cost, sessions=session_state(requests), policy=policy, progress=progress
    )
    return run.requests, run.steps, run.engine_time_s
