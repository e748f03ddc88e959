"""Simulate equal replicas: names -> setup -> server -> records and summary."""

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from windtunnel.metrics.checks import check_run
from windtunnel.metrics.fleet import fleet_summary, lost_steps
from windtunnel.metrics.records import Table
from windtunnel.metrics.summary import DeploymentSize, DeviceTerms, Summary, span_of, summarise
from windtunnel.metrics.tokens import rows_by_replica, with_token_times
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.analysis.attribution import provenance, time_fractions
from windtunnel.serving.analysis.device_use import stage_uses, total_work
from windtunnel.serving.analysis.intervals import intervals, remarks
from windtunnel.serving.custom.policy import Policy, policy_name
from windtunnel.serving.custom.router import Router
from windtunnel.serving.deployment import Deployment
from windtunnel.serving.results import Result, limits_of, power_model, resolved_scenario
from windtunnel.serving.runners.batched import Progress
from windtunnel.serving.scenario import Scenario, resolve
from windtunnel.serving.server import Server, prepare, serve, users_router
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
from windtunnel.serving.setup.frontend import client_table
from windtunnel.serving.setup.prefix_cache import cache_for, tier_tokens
from windtunnel.serving.state import records as state
from windtunnel.serving.state.per_request import PerRequestSettings
from windtunnel.workload.generate.requests import RequestArrays, generate


def simulate_replicas(
    scenario: Scenario,
    estimator: Estimator | None = None,
    progress: Progress | None = None,
    allow_download: bool = False,
    policy: Policy | None = None,
    router: Router | None = None,
) -> Result:
    """Simulate a scenario without pools; arguments and errors as of `serving.simulate.simulate`."""
    if router is not None:
        scenario = _with_router(scenario, router)
    setup = resolve(scenario, allow_download)
    if policy is not None:
        setup = replace(setup, engine=msgspec.structs.replace(setup.engine, scheduler=policy_name(policy)))
    requests = generate(scenario.workload, scenario.seed)
    server = prepare(scenario, setup, requests, estimator, policy=policy)
    setup = server.setup
    run = _serve(scenario.deployment, server, requests, scenario.seed, progress, router)
    finished_steps = run.steps if run.fleet is None else run.steps.where(~lost_steps(run.steps))
    summary = _summary(scenario, server, requests, run, finished_steps)
    coverage, sources, operators = provenance(
        server.estimator, server.shard, finished_steps, server.settings.ranks_per_replica
    )
    return Result(
        scenario=resolved_scenario(scenario, setup, server.memory),
        setup=setup,
        memory=server.memory,
        requests=run.requests,
        steps=run.steps,
        summary=summary,
        coverage=coverage,
        sources=sources,
        operators=operators,
        engine_time_s=run.engine_time_s,
        intervals=intervals(setup, summary, run.requests, coverage, is_open_loop=requests.is_open_loop),
        calibration_remarks=tuple(remarks(setup)),
        fleet=run.fleet,
    )


def _with_router(scenario: Scenario, router: Router) -> Scenario:
    """Name in `scenario` a router that was given as a function."""
    deployment = msgspec.structs.replace(scenario.deployment, router=policy_name(router), router_limit=None)
    return msgspec.structs.replace(scenario, deployment=deployment)


class _Run(NamedTuple):
    """Tables of a finished run of equal replicas."""

    requests: Table
    steps: Table
    rows: Any
    """Rows of the request table by replica; of the table of stays where replicas come and go."""
    engine_time_s: float
    cache: state.Cache | None
    stays: Table | None
    """None where no request can leave its replica."""
    fleet: FleetRecord | None


def _serve(
    deployment: Deployment,
    server: Server,
    requests: RequestArrays,
    seed: int,
    progress: Progress | None,
    router: Router | None,
) -> _Run:
    """Run the compiled loop and make tables of its records."""
    settings, num_replicas, num_stages = server.settings, deployment.most_replicas, server.setup.parallelism.pp
    cache, fleet = None, None
    if not isinstance(settings, PerRequestSettings):
        cache = cache_for(server.setup, server.memory, settings, requests)
        if has_fleet(deployment):
            plan = fleet_plan(deployment, settings.max_num_seqs * settings.ranks_per_replica, seed)
            fleet = start_fleet(plan, settings, requests.arrival_s.size)
            router = router or users_router(deployment)
    records, steps, engine_time_s = serve(server, requests, cache, progress, fleet=fleet, router=router)
    stays = None
    if fleet is not None:
        stays = stay_table(fleet, records, settings.ranks_per_replica)
        records["arrival_s"] = fleet.fleet.sent_s
    table = client_table(
        server.setup,
        requests,
        records,
        records["rank"] // settings.ranks_per_replica,
        num_replicas,
        tenant=requests.tenant,
        cached_tokens=None if cache is None else cache.requests["cached_tokens"],
        loaded_tokens=None if cache is None else cache.loaded.sum(axis=0) * server.memory.block_size,
    )
    del records
    rows = rows_by_replica(table, steps, num_replicas)
    table = with_token_times(table, steps, rows, num_stages)
    record = None
    if fleet is not None and stays is not None:
        rows = rows_by_replica(stays, steps, num_replicas)
        if comes_and_goes(deployment):
            table = with_retries(table, fleet.fleet.num_retries, fleet.fleet.discarded_tokens)
            record = FleetRecord(phase_table(fleet, deployment.replicas), stays)
    return _Run(table, steps, rows, engine_time_s, cache, stays, record)


def _summary(scenario: Scenario, server: Server, requests: RequestArrays, run: _Run, finished_steps: Table) -> Summary:
    """Summarise a run; `finished_steps` are those that no failure cut short."""
    setup, deployment, settings = server.setup, scenario.deployment, server.settings
    num_replicas, num_stages = deployment.most_replicas, setup.parallelism.pp
    fleet_use = None if run.fleet is None else fleet_summary(run.fleet.phases, run.requests, run.steps, num_replicas)
    price = deployment.price_usd_per_hour
    summary = summarise(
        run.requests,
        run.steps,
        DeploymentSize(
            num_replicas=num_replicas,
            num_devices=deployment.num_devices,
            num_blocks=server.memory.num_blocks * settings.ranks_per_replica,
            num_stages=num_stages,
        ),
        time_fractions(server.lowered, finished_steps, settings),
        limits_of(scenario, requests),
        DeviceTerms(setup.device.price_usd_per_hour if price is None else price, power_model(scenario, setup)),
        tier_tokens=None if run.cache is None else tier_tokens(setup, server.memory, run.cache),
        fleet=fleet_use,
    )
    # A verified step gives more tokens than it samples for.
    is_checked = server.speculation is None
    return msgspec.structs.replace(
        summary,
        checks=check_run(run.requests, run.steps, run.rows, num_stages, run.stays) if is_checked else None,
        stages=tuple(
            stage_uses(
                total_work(setup.device, server.shard, finished_steps),
                finished_steps,
                num_stages,
                num_replicas if fleet_use is None else fleet_use.mean_replicas,
                span_of(run.requests),
            )
        ),
    )
