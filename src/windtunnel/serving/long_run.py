"""Simulate tens of millions of requests, one replica after the other, each reduced to what a summary needs.

A router that does not look at the replicas gives each a stream of its own, and replicas share nothing else. So each is
simulated alone, with the same times as all together, and its steps are dropped once they are counted. Memory is 24
bytes a request for its arrival and lengths, 28 for its latencies, and one replica's records at a time.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.metrics.checks import Checks, check_run
from windtunnel.metrics.power import Power, PowerModel, power_of
from windtunnel.metrics.records import Table
from windtunnel.metrics.summary import Distribution, Goodput, goodput, known_distribution
from windtunnel.metrics.tokens import rows_by_replica, with_token_times
from windtunnel.schema import Schema
from windtunnel.serving import codes
from windtunnel.serving.analysis.device_use import power_model
from windtunnel.serving.deployment import Deployment
from windtunnel.serving.prepared import PreparedPool, prepare
from windtunnel.serving.results import limits_of
from windtunnel.serving.run import Progress, prepare_loop
from windtunnel.serving.scenario import Scenario, Setup, resolve
from windtunnel.serving.setup.fleet_plan import has_fleet
from windtunnel.serving.setup.frontend import client_table
from windtunnel.workload.arrivals import ClosedLoop
from windtunnel.workload.generate.requests import RequestArrays, generate

LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "queueing_s", "prefill_s", "itl_max_s")
STATIC_ROUTERS = ("round_robin",)


class LongSummary(Schema):
    """Summary of a long run; percentiles are exact, of latencies kept as 32-bit floats."""

    num_requests: int
    num_steps: int
    span_s: float
    ttft_s: Distribution
    tpot_s: Distribution | None
    e2e_s: Distribution
    queueing_s: Distribution
    prefill_s: Distribution
    itl_max_s: Distribution | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    busy_fraction: float
    num_preemptions: int
    goodput: Goodput | None
    tenants: dict[str, Goodput]
    """Tenant -> its goodput, where limits are given."""
    power: Power | None
    checks: Checks
    """The worst of the replicas' self-checks."""


@dataclass(frozen=True, slots=True, eq=False)
class LongRun:
    """A finished long run."""

    summary: LongSummary
    generate_time_s: float
    """Wall time to draw or read the requests."""
    engine_cpu_s: float
    """CPU time of the simulation loop, summed over replicas."""


def simulate_long(scenario: Scenario, progress: Progress | None = None, num_threads: int = 1) -> LongRun:
    """Simulate `scenario` without keeping its records.

    Args:
        scenario: with the router round_robin, an open loop, and requests that do not wait for each other.
        progress: called after each replica.
        num_threads: replicas at once; the loop lets other threads run.

    Raises:
        InputError: as `simulate`, or a scenario whose replicas are not independent.
    """
    _check_independent(scenario)
    setup = resolve(scenario)
    _check_engine(setup)
    started_s = time.perf_counter()
    requests = generate(scenario.workload, scenario.seed)
    generate_time_s = time.perf_counter() - started_s
    if requests.previous is not None or requests.prefixes is not None:
        raise InputError("sessions and shared prompts need all replicas at once", "use simulate, or leave them out")
    pool = prepare(scenario, requests, [setup]).pools[0]
    num_replicas = scenario.deployment.replicas
    latencies = {name: np.empty(requests.num_requests, np.float32) for name in LATENCIES}

    def run_replica(index: int) -> _Counts:
        own = requests.mapped(lambda _, column: np.ascontiguousarray(column[index::num_replicas]))
        table, counts = _run_replica(scenario.deployment, pool, own)
        for name in LATENCIES:
            latencies[name][index::num_replicas] = table[name]
        return counts

    counts: list[_Counts] = []
    with ThreadPoolExecutor(num_threads) as threads:
        for done in threads.map(run_replica, range(min(num_replicas, requests.num_requests))):
            counts.append(done)
            if progress is not None:
                progress(sum(count.num_requests for count in counts), requests.num_requests)
    summary = _summary(scenario, requests, latencies, counts, pool.setup)
    return LongRun(summary, generate_time_s, sum(count.engine_cpu_s for count in counts))


def _check_independent(scenario: Scenario) -> None:
    """Raise InputError where the replicas depend on each other."""
    if scenario.deployment.pools:
        raise InputError("pools hand requests over; a long run needs equal replicas", "use simulate")
    router = scenario.deployment.router
    if has_fleet(scenario.deployment):
        raise InputError("a long run needs all replicas all the time, and a router that holds nothing", "use simulate")
    if scenario.deployment.replicas > 1 and router not in STATIC_ROUTERS:
        raise InputError(
            f"the router {router} looks at all replicas; a long run needs one that does not",
            f"possible: {', '.join(STATIC_ROUTERS)}; or use simulate",
        )
    if isinstance(scenario.workload.arrivals, ClosedLoop):
        raise InputError("a closed loop joins all replicas; a long run needs an open loop", "use simulate")


def _check_engine(setup: Setup) -> None:
    """Raise InputError for an engine that a long run cannot simulate."""
    if setup.engine.scheduler not in codes.SCHEDULERS:
        raise InputError(
            f"a long run cannot use the scheduler {setup.engine.scheduler}",
            f"possible: {', '.join(codes.SCHEDULERS)}; or use simulate",
        )
    if setup.engine.speculative is not None:
        raise InputError("a long run cannot decode speculatively", "use simulate, or leave engine.speculative out")


def _run_replica(deployment: Deployment, pool: PreparedPool, requests: RequestArrays) -> tuple[Table, "_Counts"]:
    """Simulate one replica; return its request table and what the summary counts."""
    setup, plan = pool.setup, pool.plan._replace(settings=pool.settings._replace(num_replicas=1))
    started_cpu_s = time.thread_time()
    run = prepare_loop([plan], requests).run()
    engine_cpu_s = time.thread_time() - started_cpu_s
    steps, table = run.steps, client_table(setup, requests, run.requests, np.zeros(requests.num_requests, np.int64), 1)
    del run
    rows = rows_by_replica(table, steps, 1)
    table = with_token_times(table, steps, rows, setup.parallelism.pp)
    checks = check_run(table, steps, rows, setup.parallelism.pp)
    return table, _Counts(
        len(table),
        int(steps["num_steps"].sum(dtype=np.int64)),
        float(table["arrival_s"].min()),
        float(table["finish_s"].max()),
        float(steps["duration_s"].sum()),
        int(table["num_preemptions"].sum()),
        checks,
        engine_cpu_s,
        power_model(deployment, setup, pool.shard, steps),
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of a replica, all that is kept of it beside its latencies."""

    num_requests: int
    num_steps: int
    first_s: float
    last_s: float
    busy_s: float
    num_preemptions: int
    checks: Checks
    engine_cpu_s: float
    power: PowerModel | None


def _summary(
    scenario: Scenario,
    requests: RequestArrays,
    latencies: dict[str, NDArray[np.float32]],
    counts: list[_Counts],
    setup: Setup,
) -> LongSummary:
    """Summarise a run from the latencies of all requests and the counts of each replica."""
    span_s = max(count.last_s for count in counts) - min(count.first_s for count in counts)
    output = int(requests.output_tokens.sum())
    busy_fraction = sum(count.busy_s for count in counts) / (
        span_s * scenario.deployment.replicas * setup.parallelism.pp
    )
    slots_s, mean_w, idle = span_s * setup.parallelism.pp, None, power_model(scenario.deployment, setup)
    if idle is not None:
        watts = [count.power.at(count.busy_s / slots_s) for count in counts if count.power is not None]
        watts += [idle.at(0.0)] * (scenario.deployment.replicas - len(watts))
        mean_w = sum(watts) * setup.parallelism.num_devices
    limits, table = limits_of(scenario, requests), Table(latencies, {})
    tenants = {}
    for index, (name, own) in enumerate(limits.tenants.items()):
        in_force, rows = own or limits.slo, np.flatnonzero(requests.tenant == index)
        if in_force is not None and rows.size:
            tenants[name] = goodput(table.where(rows), in_force, span_s)
    distributions: dict[str, Any] = {name: known_distribution(values) for name, values in latencies.items()}
    return LongSummary(
        num_requests=requests.num_requests,
        num_steps=sum(count.num_steps for count in counts),
        span_s=span_s,
        **distributions,
        requests_per_s=requests.num_requests / span_s,
        output_tokens_per_s=output / span_s,
        total_tokens_per_s=(output + int(requests.input_tokens.sum())) / span_s,
        busy_fraction=busy_fraction,
        num_preemptions=sum(count.num_preemptions for count in counts),
        goodput=None if scenario.slo is None else goodput(table, scenario.slo, span_s),
        tenants=tenants,
        power=power_of(mean_w, span_s, requests.num_requests, output, scenario.deployment.power),
        checks=_worst([count.checks for count in counts]),
    )


def _worst(checks: list[Checks]) -> Checks:
    """Return the worst of the replicas' self-checks."""
    return Checks(
        passed=all(check.passed for check in checks),
        num_out_of_order=sum(check.num_out_of_order for check in checks),
        num_missing_tokens=sum(abs(check.num_missing_tokens) for check in checks),
        littles_law_error_fraction=max(check.littles_law_error_fraction for check in checks),
        idle_with_work_fraction=max(check.idle_with_work_fraction for check in checks),
    )
