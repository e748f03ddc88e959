"""Run the compiled loop: fresh records and arrays, one buffer of steps after the other, and the end."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, WindtunnelError
from windtunnel.metrics.records import STEP_COLUMNS, Table
from windtunnel.serving import codes
from windtunnel.serving.custom.router import Router, RouterCaller
from windtunnel.serving.loop.serve import serve
from windtunnel.serving.setup.fleet_plan import FleetRun
from windtunnel.serving.setup.prefix_cache import session_state
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import Pools
from windtunnel.serving.state.status import ASK_ROUTER, DONE, MORE, OUT_OF_STEPS, STUCK
from windtunnel.serving.state.tables import PoolTables, RunTables
from windtunnel.workload.generate.requests import RequestArrays

STEP_BUFFER_ROWS = 100_000
"""Rows between two looks at progress and Ctrl-C: 30 to 100 ms."""
ROWS_PER_REQUEST = 4
"""Rows of the first buffer; few runs need more, and a short run takes as long to get its memory as to run."""
LEAST_IMPATIENT_ROWS = 1_000
"""Fewest rows between two calls of `GiveUp`; more for more requests, as each call then takes longer."""

Progress = Callable[[int, int], None]
"""Called with (requests finished, requests in all)."""
GiveUp = Callable[[state.Table, float], bool]
"""Called with (`REQUEST` records so far, simulated time); True stops the run."""


class Watch(NamedTuple):
    """Who follows a run: called between two buffers of steps."""

    progress: Progress | None = None
    give_up: GiveUp | None = None
    """Requests under way when the run is given up have no end."""


UNWATCHED = Watch()


def run_loop(
    settings: state.KernelSettings,
    cost: state.StepCost,
    requests: RequestArrays,
    cache: state.Cache | None = None,
    speculation: state.Speculation | None = None,
    fleet: FleetRun | None = None,
    router: Router | None = None,
    watch: Watch = UNWATCHED,
) -> tuple[NDArray[np.void], Table, float]:
    """Run the compiled loop to its end, with one pool of replicas.

    Args:
        settings, cost: how the replicas form batches, and what their steps take.
        requests: in order of sending.
        cache: prefix caches, changed in place; None without prefix caching.
        speculation: None where a decode step gives one token.
        fleet: None where all replicas are there all the time; it keeps the log.
        router: the user's, if `settings` say so.
        watch: who follows the run.

    Returns:
        `REQUEST` records in order of sending, the step table, and the loop's wall time in seconds.

    Raises:
        WindtunnelError: recorded step durations ran out before the requests did.
    """
    ranks, slots, lists = state.new_ranks(settings), state.new_slots(settings), state.new_lists(settings)
    pool = pool_tables(settings, [settings], cache, speculation, (ranks, slots, lists, state.new_stages(settings)))
    run = run_tables(settings, requests, state.new_events(settings))
    caller = None
    if router is not None:
        assert fleet is not None
        caller = RouterCaller(router, settings, requests, run.requests, ranks, fleet.fleet)
    steps, engine_time_s = run_to_end(pool, cost, run, None, fleet, caller, watch)
    return run.requests.view(np.ndarray), steps, engine_time_s


def new_records(requests: RequestArrays) -> state.Table:
    """Return fresh `REQUEST` records."""
    records = state.new_requests(requests.arrival_s, requests.input_tokens, requests.output_tokens, requests.priority)
    if requests.tenant is not None:
        records.tenant = np.unique(requests.tenant, return_inverse=True)[1]
    if requests.ttft_limit_s is not None:
        records.ttft_limit_s = requests.ttft_limit_s
    return records


def run_tables(settings: Any, requests: RequestArrays, events: state.Table) -> RunTables:
    """Return a run at its beginning; `run_to_end` gives it buffers of steps."""
    return RunTables(
        new_records(requests), session_state(requests), events, state.new_clock(settings), state.new_steps(0)
    )


def pool_tables(
    settings: Any,
    plans: Iterable[Any],
    cache: state.Cache | None,
    speculation: state.Speculation | None,
    arrays: Sequence[state.Table],
) -> PoolTables:
    """Return the tables of the only pool, or of the first one; `plans` are the settings of all of them.

    A run compiles only the features that one of its pools uses: SGLang's scheduler is a seventh of the loop.
    """
    plans = list(plans)
    ranks, slots, lists, stages = arrays
    return PoolTables(
        settings=settings,
        cache=cache,
        speculation=speculation,
        windows=1 if any(plan.window_tokens > 0 for plan in plans) else None,
        vllm_v1=1 if any(plan.scheduler != codes.SGLANG for plan in plans) else None,
        sglang=1 if any(plan.scheduler == codes.SGLANG for plan in plans) else None,
        balance=1 if any(plan.balance_steps > 0 for plan in plans) else None,
        ranks=ranks,
        slots=slots,
        lists=lists,
        stages=stages,
    )


def run_to_end(
    pool: PoolTables,
    cost: state.StepCost,
    run: RunTables,
    pools: Pools | None,
    fleet: FleetRun | None = None,
    caller: RouterCaller | None = None,
    watch: Watch = UNWATCHED,
) -> tuple[Table, float]:
    """Run the loop buffer by buffer until it ends; the tables are changed in place.

    Returns the step table and the loop's wall time in seconds.
    """
    num_requests = run.requests.size
    num_rows = min(STEP_BUFFER_ROWS, ROWS_PER_REQUEST * (num_requests + 100))
    if watch.give_up is not None:
        num_rows = min(num_rows, max(LEAST_IMPATIENT_ROWS, num_requests // 8))
    replicas = None if fleet is None else fleet.fleet
    buffers = []
    started_s = time.perf_counter()
    while True:
        buffer = state.new_steps(num_rows)
        status = ASK_ROUTER
        while status == ASK_ROUTER:
            status = serve(pool, cost, run._replace(steps=buffer), pools, replicas)
            if status == ASK_ROUTER:
                assert caller is not None
                caller.route()
        buffers.append(buffer[: run.clock[0].rows])
        if fleet is not None:
            fleet.collect()
        if watch.progress is not None:
            watch.progress(int(run.clock[0].finished), num_requests)
        if status != MORE or (watch.give_up is not None and watch.give_up(run.requests, float(buffer[-1].start_s))):
            break
    engine_time_s = time.perf_counter() - started_s
    if status == OUT_OF_STEPS:
        raise WindtunnelError(f"the {cost.recorded_step_s.size} recorded steps end before the requests do")
    if status == STUCK and replicas is not None:
        raise InputError(
            f"{replicas.control[0].num_at_router} requests wait at the router and no replica will ever take them",
            "a router that holds a request back is asked again when another one ends",
        )
    assert status in (DONE, MORE), "a request can never be scheduled"
    return step_table(buffers), engine_time_s


def step_table(buffers: Sequence[state.Table]) -> Table:
    """Return the rows of all buffers as one table; one buffer is not copied."""
    if len(buffers) == 1:
        rows = np.asarray(buffers[0])
        return Table({name: rows[name] for name in STEP_COLUMNS}, STEP_COLUMNS)
    return Table({name: np.concatenate([rows[name] for rows in buffers]) for name in STEP_COLUMNS}, STEP_COLUMNS)
