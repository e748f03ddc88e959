"""Run a serving scenario: names -> setup -> server -> records and summary."""

from dataclasses import dataclass, field, replace

import msgspec

from windtunnel.metrics.checks import check_run
from windtunnel.metrics.fleet import fleet_summary, lost_steps
from windtunnel.metrics.power import PowerModel
from windtunnel.metrics.records import Table, request_table
from windtunnel.metrics.summary import DeploymentSize, DeviceTerms, ServiceLimits, Summary, span_of, summarise
from windtunnel.metrics.tokens import rows_by_replica, with_token_times
from windtunnel.metrics.uncertainty import Interval
from windtunnel.pricing.estimator import Coverage, Estimator
from windtunnel.serving.analysis.attribution import provenance, time_fractions
from windtunnel.serving.analysis.device_use import stage_uses, total_work
from windtunnel.serving.analysis.intervals import intervals, remarks
from windtunnel.serving.custom.policy import Policy, policy_name
from windtunnel.serving.custom.router import Router
from windtunnel.serving.runners.batched import Progress
from windtunnel.serving.scenario import Scenario, Setup, resolve
from windtunnel.serving.server import prepare, serve, users_router
from windtunnel.serving.setup.fleet_plan import (
    FleetRecord,
    comes_and_goes,
    fleet_plan,
    has_fleet,
    phase_table,
    start_fleet,
    stay_table,
    with_retries,
)
from windtunnel.serving.setup.frontend import streams
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.serving.setup.prefix_cache import cache_for, tier_tokens
from windtunnel.serving.state.per_request import PerRequestSettings
from windtunnel.units import format_count, format_seconds
from windtunnel.workload.generate.requests import RequestArrays, generate

ENGINE_COLUMNS = (
    "arrival_s",
    "scheduled_s",
    "first_token_s",
    "finish_s",
    "input_tokens",
    "output_tokens",
    "priority",
    "num_preemptions",
)


@dataclass(frozen=True, eq=False)
class Result:
    """A finished run."""

    scenario: Scenario
    """Resolved: every default that decided the result is filled in."""
    setup: Setup
    memory: MemoryPlan
    requests: Table
    steps: Table
    summary: Summary
    coverage: dict[Coverage, float]
    """How sure the operator times are: share of the device's time by how it was found."""
    sources: dict[str, float]
    """Measured table or fit -> share of the device's time that it prices."""
    operators: dict[str, float]
    """Operator, as `windtunnel explain` names it -> share of the device's time."""
    engine_time_s: float
    """Wall time of the simulation loop alone."""
    intervals: dict[str, Interval] = field(default_factory=dict)
    """Metric (`tpot`, `ttft`, `e2e`, `throughput`) -> where 80% of measurements are expected."""
    calibration_remarks: tuple[str, ...] = ()
    """In what the setup lies outside its calibration's runs."""
    pools: tuple["PoolResult", ...] = ()
    """Empty where all replicas are alike; else `setup` and `memory` are those of the first."""
    fleet: FleetRecord | None = None
    """None where all replicas are there all the time."""

    def __repr__(self) -> str:
        """What a notebook shows: the records alone would be thousands of numbers."""
        found, rate = self.summary, self.summary.throughput
        tpot = "" if found.tpot_s is None else f", TPOT {format_seconds(found.tpot_s.mean)}"
        return (
            f"Result({self.scenario.model} on {found.num_devices:,} x {self.scenario.deployment.device}: "
            f"{format_count(found.num_requests, 'request')}, mean TTFT {format_seconds(found.ttft_s.mean)}{tpot}, "
            f"{rate.output_tokens_per_s:,.0f} output tokens/s; see .summary, .requests, .steps)"
        )


@dataclass(frozen=True, eq=False)
class PoolResult:
    """What one pool of a finished run consisted of."""

    name: str
    role: str
    setup: Setup
    memory: MemoryPlan


def simulate(
    scenario: Scenario,
    estimator: Estimator | None = None,
    progress: Progress | None = None,
    allow_download: bool = False,
    policy: Policy | None = None,
    router: Router | None = None,
) -> Result:
    """Simulate a `scenario` whose replicas are all alike.

    Args:
        scenario: what to run.
        estimator: prices operators; None reads the tables measured on the scenario's device, or its calibrated
            roofline.
        progress: called now and then.
        allow_download: look models up on the Hugging Face hub too.
        policy: a scheduler of one's own, instead of the engine's: see `serving.custom.policy.Policy`.
        router: a router of one's own, instead of the deployment's: see `serving.custom.router.Router`.

    Raises:
        InputError: the scenario's parts do not go together, or a request that this deployment can never serve.
    """
    if router is not None:
        scenario = with_router(scenario, router)
    setup = resolve(scenario, allow_download)
    if policy is not None:
        setup = replace(setup, engine=msgspec.structs.replace(setup.engine, scheduler=policy_name(policy)))
    requests = generate(scenario.workload, scenario.seed)
    server = prepare(scenario, setup, requests, estimator, policy=policy)
    setup, shard, memory, settings = server.setup, server.shard, server.memory, server.settings
    lowered, speculation, deployment = server.lowered, server.speculation, scenario.deployment
    num_replicas = deployment.most_replicas
    cache, fleet = None, None
    if not isinstance(settings, PerRequestSettings):
        cache = cache_for(setup, memory, settings, requests)
        if has_fleet(deployment):
            plan = fleet_plan(deployment, settings.max_num_seqs * settings.ranks_per_replica, scenario.seed)
            fleet = start_fleet(plan, settings, requests.arrival_s.size)
            router = router or users_router(deployment)
    records, steps, engine_time_s = serve(server, requests, cache, progress, fleet=fleet, router=router)
    stays = None
    if fleet is not None:
        stays = stay_table(fleet, records, settings.ranks_per_replica)
        records["arrival_s"] = fleet.fleet.sent_s
    replica = records["rank"] // settings.ranks_per_replica
    table = request_table(
        {name: records[name].copy() for name in ENGINE_COLUMNS},
        replica,
        setup.engine.host.frontend_s(requests.input_tokens, streams(records, replica, num_replicas)),
        requests.num_warmup,
        tenant=requests.tenant,
        cached_tokens=None if cache is None else cache.requests["cached_tokens"],
        loaded_tokens=None if cache is None else cache.loaded.sum(axis=0) * memory.block_size,
    )
    del records
    rows = rows_by_replica(table, steps, num_replicas)
    table = with_token_times(table, steps, rows, setup.parallelism.pp)
    found, ended = None, steps
    if fleet is not None and stays is not None:
        rows = rows_by_replica(stays, steps, num_replicas)
        if comes_and_goes(deployment):
            table = with_retries(table, fleet.fleet.num_retries, fleet.fleet.discarded_tokens)
            found = FleetRecord(phase_table(fleet, deployment.replicas), stays)
            ended = steps.where(~lost_steps(steps))
    fleet_use = None if found is None else fleet_summary(found.phases, table, steps, num_replicas)
    price = scenario.deployment.price_usd_per_hour
    summary = summarise(
        table,
        steps,
        DeploymentSize(
            num_replicas=num_replicas,
            num_devices=scenario.deployment.num_devices,
            num_blocks=memory.num_blocks * settings.ranks_per_replica,
            num_stages=setup.parallelism.pp,
        ),
        time_fractions(lowered, ended, settings),
        limits_of(scenario, requests),
        DeviceTerms(setup.device.price_usd_per_hour if price is None else price, power_model(scenario, setup)),
        tier_tokens=None if cache is None else tier_tokens(setup, memory, cache),
        fleet=fleet_use,
    )
    summary = msgspec.structs.replace(
        summary,
        # A verified step gives more tokens than it samples for.
        checks=check_run(table, steps, rows, setup.parallelism.pp, stays) if speculation is None else None,
        stages=stage_uses(
            total_work(setup.device, shard, ended),
            ended,
            setup.parallelism.pp,
            num_replicas if fleet_use is None else fleet_use.mean_replicas,
            span_of(table),
        ),
    )
    coverage, sources, operators = provenance(server.estimator, shard, ended, settings.ranks_per_replica)
    return Result(
        scenario=resolved_scenario(scenario, setup, memory),
        setup=setup,
        memory=memory,
        requests=table,
        steps=steps,
        summary=summary,
        coverage=coverage,
        sources=sources,
        operators=operators,
        engine_time_s=engine_time_s,
        intervals=intervals(
            setup,
            summary,
            table,
            {how.value: share for how, share in coverage.items()},
            is_open_loop=not requests.concurrency and requests.previous is None,
        ),
        calibration_remarks=tuple(remarks(setup)),
        fleet=found,
    )


def with_router(scenario: Scenario, router: Router) -> Scenario:
    """`scenario` with the name of a router that was given as a function."""
    deployment = msgspec.structs.replace(scenario.deployment, router=policy_name(router), router_limit=None)
    return msgspec.structs.replace(scenario, deployment=deployment)


def limits_of(scenario: Scenario, requests: RequestArrays) -> ServiceLimits:
    """Return the scenario's limits, and those of its tenants in the order of their numbers."""
    by_name = {tenant.name: tenant.slo for tenant in scenario.workload.tenants}
    return ServiceLimits(scenario.slo, {name: by_name.get(name) for name in requests.tenant_names})


def power_model(scenario: Scenario, setup: Setup) -> PowerModel | None:
    """What one device draws; None where nobody says."""
    busy_w = scenario.deployment.busy_w or setup.device.tdp_w
    return None if busy_w is None else PowerModel(scenario.deployment.idle_fraction * busy_w, busy_w)


def resolved_scenario(scenario: Scenario, setup: Setup, memory: MemoryPlan) -> Scenario:
    """`scenario` with the defaults that decided the result written out; names of files stay as they were given."""
    engine = msgspec.structs.replace(setup.engine, max_model_len=setup.max_model_len, num_gpu_blocks=memory.num_blocks)
    node = scenario.deployment.node or setup.node.name
    deployment = msgspec.structs.replace(scenario.deployment, node=node, engine=engine)
    return msgspec.structs.replace(scenario, precision=setup.precision, deployment=deployment)
