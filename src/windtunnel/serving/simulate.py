"""Simulate any scenario: names -> prepared pools -> loop -> records and summary."""

from __future__ import annotations  # `help` prints them as they are written

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Unpack

import msgspec
import numpy as np

from windtunnel.arguments import checked
from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.metrics import summary as summaries
from windtunnel.metrics.checks import check_run
from windtunnel.metrics.fleet import fleet_summary, lost_steps, mean_replicas
from windtunnel.metrics.records import POOL_COLUMNS, Table
from windtunnel.metrics.tokens import ReplicaRows, rows_by_replica, with_token_times
from windtunnel.model.launches.forward import attention_side
from windtunnel.model.parallelism import Parallelism
from windtunnel.pricing.estimator import Coverage, Estimator, users_estimator
from windtunnel.serving.analysis.attribution import provenance, time_fractions
from windtunnel.serving.analysis.device_use import power_model, side_uses, stage_uses, step_work, total_work
from windtunnel.serving.analysis.intervals import intervals, remarks
from windtunnel.serving.custom.policy import Policy, policy_name
from windtunnel.serving.custom.router import Router
from windtunnel.serving.prepared import PreparedDeployment, PreparedPool, prepare, users_router
from windtunnel.serving.results import PoolResult, Result, limits_of, resolved_scenario
from windtunnel.serving.run import LoopRun, Progress, Watch, first_pool, replicas_of
from windtunnel.serving.scenario import Described, Scenario, pool_scenario
from windtunnel.serving.setup import fleet_plan
from windtunnel.serving.setup.adapters import adapter_summary, adapter_times_s
from windtunnel.serving.setup.encoder import EncodePool, EncodeRun
from windtunnel.serving.setup.estimators import estimator_for
from windtunnel.serving.setup.frontend import client_table
from windtunnel.serving.setup.transfers import transfer_of
from windtunnel.serving.shorthand import SimulateOptions, described_by
from windtunnel.workload.generate.requests import RequestArrays, generate


@checked
def simulate(
    scenario: Described | None = None,
    estimator: Estimator | str | None = None,
    progress: Progress | None = None,
    allow_download: bool = False,
    policy: Policy | None = None,
    router: Router | str | None = None,
    **options: Unpack[SimulateOptions],
) -> Result:
    """Simulate `scenario`, or what options such as `model`, `device` and `concurrency` describe.

    Args:
        scenario: what to run: a scenario, its file, or a table of a scenario's keys; None: `options` say it.
        estimator: prices operators, or names how a profile is read; None reads the tables measured on each pool's
            device, or its calibrated roofline.
        progress: called now and then.
        allow_download: look models up on the Hugging Face hub too.
        policy: the user's scheduler, in place of the engines': see `serving.custom.policy.Policy`.
        router: the user's router, in place of the deployment's, or a name: see `serving.custom.router.Router`.
        options: as `windtunnel.scenario` takes them; they change a scenario that is given.

    Raises:
        InputError: the scenario's parts do not go together, or a request that this deployment can never serve.
    """
    named: dict[str, Any] = {**options}
    if isinstance(router, str):
        named["router"], router = router, None
    if isinstance(estimator, str):
        named["estimator"], estimator = estimator, None
    scenario = described_by(scenario, named, ("policy", "progress", "allow_download"))
    if router is not None:
        scenario = scenario.with_deployment(router=policy_name(router), router_limit=None)
    requests = generate(scenario.workload, scenario.seed)
    prepared = prepare(
        scenario,
        requests,
        None,
        allow_download,
        lambda setup: users_estimator(estimator) if estimator else estimator_for(setup),
        policy=policy,
    )
    return serve_scenario(scenario, prepared, requests, progress, router)


def serve_scenario(
    scenario: Scenario,
    prepared: PreparedDeployment,
    requests: RequestArrays,
    progress: Progress | None = None,
    router: Router | None = None,
) -> Result:
    """Run a scenario on its prepared deployment; `router` is the user's."""
    fleet = prepared.start_fleet(requests.arrival_s.size)
    run = prepared.serve(requests, fleet, router or users_router(scenario.deployment), Watch(progress))
    records = _records_of(scenario, prepared, requests, run, fleet)
    summary = _summary(scenario, prepared, requests, records)
    first, decoder = prepared.pools[0], next(pool for pool in prepared.pools if pool.pool.role != "prefill")
    coverage, sources, operators = _with_adapters(_provenance(records), summary)
    return Result(
        scenario=_resolved(scenario, prepared),
        setup=first.setup,
        memory=first.memory,
        requests=records.requests,
        steps=run.steps,
        summary=summary,
        coverage=coverage,
        sources=sources,
        operators=operators,
        engine_time_s=run.engine_time_s,
        intervals=intervals(
            decoder.setup, summary, records.requests, coverage, requests.is_open_loop, decoder.pool.role == "decode"
        ),
        calibration_remarks=() if scenario.deployment.pools else tuple(remarks(first.setup)),
        pools=tuple(
            PoolResult(pool.name, pool.role, made.setup, made.memory)
            for pool in scenario.deployment.pools
            for made in (*prepared.pools, prepared.encoder)
            if made is not None and made.pool.name == pool.name
        ),
        fleet=records.fleet,
        trace_remarks=requests.remarks,
    )


@dataclass(frozen=True, eq=False)
class _Records:
    """Tables of a finished run."""

    run: LoopRun
    pools: Sequence[PreparedPool]
    requests: Table
    rows: ReplicaRows
    """Rows of the request table by replica; of the table of stays where a request may leave its replica."""
    stays: Table | None
    """None where no request can leave its replica."""
    tier_tokens: dict[str, Ints] | None
    """Tier -> tokens of each prompt that came from it; None where nothing is cached."""
    fleet: fleet_plan.FleetRecord | None

    @property
    def span_s(self) -> float:
        return summaries.span_of(self.requests)

    def replicas_of(self, number: int) -> tuple[int, int]:
        """Return the first replica of a pool, counted through all pools, and the one behind its last."""
        ends = [0, *accumulate(pool.settings.num_replicas for pool in self.pools)]
        return ends[number], ends[number + 1]

    def encoded_s(self, number: int) -> float:
        """Return the time of the vision towers of a pool's replicas."""
        first, end = self.replicas_of(number)
        return 0.0 if self.run.encoded_s is None else float(self.run.encoded_s[first:end].sum())

    def adapters_s(self, number: int) -> float:
        """Return the time that LoRA adapters added to the steps of a pool's replicas: products and loads, seconds."""
        if self.run.adapters is None:
            return 0.0
        return sum(adapter_times_s(self.run.adapters, number, self.pools[number].settings.ranks_per_replica))

    @property
    def adapter_summary(self) -> summaries.AdapterSummary | None:
        """How the run used its LoRA adapters; None where no request has one."""
        if self.run.adapters is None:
            return None
        ranks = [pool.settings.ranks_per_replica for pool in self.pools]
        return adapter_summary(self.run.adapters, ranks, float(self.run.steps["duration_s"].sum()))

    def steps_of(self, number: int) -> Table:
        """Return the steps of a pool's replicas that no failure cut short."""
        steps = self.run.steps
        if len(self.pools) > 1:
            first, end = self.replicas_of(number)
            steps = steps.where((steps["replica"] >= first) & (steps["replica"] < end))
        return steps if self.fleet is None else steps.where(~lost_steps(steps))

    def mean_replicas(self, number: int) -> float:
        """Return the mean number of a pool's replicas that hold their devices."""
        first, end = self.replicas_of(number)
        if self.fleet is None:
            return end - first
        return mean_replicas(self.fleet.phases, self.requests, first, end)


def _records_of(
    scenario: Scenario,
    prepared: PreparedDeployment,
    requests: RequestArrays,
    run: LoopRun,
    fleet: fleet_plan.FleetRun | None,
) -> _Records:
    """Return the tables of a run, as the client and the metrics see it."""
    deployment, records, first = scenario.deployment, run.requests, prepared.pools[0]
    began, ended, num_replicas = replicas_of(run)
    stays = None
    if fleet is not None:
        stays = fleet_plan.stay_table(fleet, records, ended)
        records["arrival_s"] = fleet.fleet.sent_s
    loaded = _tier_tokens(prepared.pools, run, first_pool(run))
    is_cached = run.cache is not None or bool(deployment.pools)
    table = client_table(
        first.setup,
        requests,
        records,
        ended,
        num_replicas,
        tenant=requests.tenant,
        cached_tokens=_cached_tokens(run) if is_cached else None,
        loaded_tokens=sum(loaded.values(), np.zeros(len(records), np.int64)) if is_cached else None,
    )
    rows = rows_by_replica(table, run.steps, num_replicas)
    record = None
    if deployment.pools:
        table = table.with_columns({"prefill_replica": began, **_transfer_times(run)}, POOL_COLUMNS)
    else:
        table = with_token_times(table, run.steps, rows, first.setup.parallelism.pp)
    if fleet is not None and stays is not None:
        rows = rows_by_replica(stays, run.steps, num_replicas)
        if fleet_plan.comes_and_goes(deployment):
            table = fleet_plan.with_retries(table, fleet.fleet.num_retries, fleet.fleet.discarded_tokens)
            record = fleet_plan.FleetRecord(fleet_plan.phase_table(fleet), stays)
    tokens = None if run.cache is None else loaded
    return _Records(run, prepared.pools, table, rows, stays, tokens, record)


def _transfer_times(run: LoopRun) -> dict[str, Floats]:
    """Return the columns of KV transfers; NaN where nothing is handed off."""
    names = list(POOL_COLUMNS)[1:]
    if run.pools is None:
        return {name: np.full(run.requests.size, np.nan) for name in names}
    return {name: np.array(run.pools.transfers[name]) for name in names}


def _cached_tokens(run: LoopRun) -> Ints:
    """Return the tokens of each prompt that were found cached where it was first admitted."""
    if run.cache is None:
        return np.zeros(run.requests.size, np.int64)
    by_pool = run.cache.requests["cached_tokens"].reshape(len(run.plans), -1)
    return np.asarray(by_pool[first_pool(run), np.arange(run.requests.size)])


def _tier_tokens(pools: Sequence[PreparedPool], run: LoopRun, began: Ints) -> dict[str, Ints]:
    """Return tier -> tokens of each prompt that came from it in the pool where the prompt `began`."""
    by_tier: dict[str, Ints] = {}
    if run.cache is None:
        return by_tier
    row = 0
    for number, pool in enumerate(pools):
        for tier in pool.setup.engine.kv_tiers or ():
            tokens = np.where(began == number, run.cache.loaded[row] * pool.memory.block_size, 0)
            by_tier[tier.name] = by_tier.get(tier.name, np.zeros_like(tokens)) + tokens
            row += 1
    return by_tier


def _summary(
    scenario: Scenario, prepared: PreparedDeployment, requests: RequestArrays, records: _Records
) -> summaries.Summary:
    """Summarise a run over all replicas, and each pool alone where there are pools."""
    deployment, pools, table, all_steps = scenario.deployment, prepared.pools, records.requests, records.run.steps
    num_replicas, first = deployment.most_replicas, pools[0]
    fleet = None
    if records.fleet is not None:
        fleet = fleet_summary(records.fleet.phases, table, all_steps, num_replicas)
    num_blocks = max(pool.memory.num_blocks * pool.settings.ranks_per_replica for pool in pools)
    limits = limits_of(scenario, requests)
    if deployment.pools:
        by_pool = _pool_summaries(scenario, prepared, records)
        mean_devices = sum(pool.mean_devices or 0.0 for pool in by_pool)
        size = summaries.DeploymentSize(num_replicas, deployment.num_devices, num_blocks, mean_devices=mean_devices)
        prices = [pool.usd_per_hour for pool in by_pool if pool.usd_per_hour is not None]
        terms = summaries.DeviceTerms(sum(prices) / mean_devices if len(prices) == len(by_pool) else None)
        fractions = next(pool.time_fractions for pool in by_pool if pool.time_fractions)
        summary = summaries.summarise(table, all_steps, size, fractions, limits, terms, records.tier_tokens, fleet)
        summary = summaries.with_pools(summary, table, by_pool, deployment.power)
        return msgspec.structs.replace(summary, adapters=records.adapter_summary)
    num_stages, price = first.setup.parallelism.pp, deployment.price_usd_per_hour
    steps = records.steps_of(0)
    summary = summaries.summarise(
        table,
        all_steps,
        summaries.DeploymentSize(num_replicas, deployment.num_devices, num_blocks, num_stages),
        time_fractions(first.lowered, steps, first.settings, records.encoded_s(0), records.adapters_s(0)),
        limits,
        summaries.DeviceTerms(
            first.setup.device.price_usd_per_hour if price is None else price,
            power_model(deployment, first.setup, attention_side(first.shard), steps),
        ),
        records.tier_tokens,
        fleet,
    )
    return _with_details(summary, scenario, first, records, steps)


def _with_details(
    summary: summaries.Summary, scenario: Scenario, first: PreparedPool, records: _Records, steps: Table
) -> summaries.Summary:
    """Add what only a deployment of one kind of replica has: the use of its stages and sides, adapters, and checks."""
    table, num_stages, num_replicas = records.requests, first.setup.parallelism.pp, scenario.deployment.most_replicas
    held_s = records.mean_replicas(0) * records.span_s
    # A verified step gives more tokens than it samples for.
    is_checked = first.plan.speculation is None
    return msgspec.structs.replace(
        summary,
        adapters=records.adapter_summary,
        query_s=_query_s(table, scenario.workload.documents),
        checks=check_run(table, records.run.steps, records.rows, num_stages, records.stays) if is_checked else None,
        stages=tuple(
            stage_uses(
                total_work(first.setup.device, attention_side(first.shard), steps),
                steps,
                num_stages,
                records.mean_replicas(0),
                records.span_s,
            )
        ),
        sides=tuple(side_uses(first.lowered, steps, first.setup.parallelism, num_replicas, held_s)),
    )


def _pool_summaries(scenario: Scenario, prepared: PreparedDeployment, records: _Records) -> list[summaries.PoolSummary]:
    """Summarise each pool, one of encoders too, in the order of the scenario."""
    names, encoded = [pool.name for pool in scenario.deployment.pools], records.run.encode
    by_pool = [_pool_summary(scenario, number, records) for number in range(len(records.pools))]
    if prepared.encoder is not None and encoded is not None:
        by_pool.append(_encoder_summary(scenario, prepared.encoder, encoded, records.span_s))
    return sorted(by_pool, key=lambda each: names.index(each.name))


def _query_s(requests: Table, num_documents: int) -> summaries.Distribution | None:
    """Return the latency of queries whose documents are `num_documents` rows, one after the other, sent together."""
    if num_documents == 1:
        return None
    return summaries.known_distribution(requests["e2e_s"].reshape(-1, num_documents).max(axis=1))


def _pool_summary(scenario: Scenario, number: int, records: _Records) -> summaries.PoolSummary:
    """Summarise the steps of one of several pools."""
    prepared, requests = records.pools[number], records.requests
    pool, setup, pp = prepared.pool, prepared.setup, prepared.setup.parallelism.pp
    first_replica, end_replica = records.replicas_of(number)
    num_replicas, mean_number = end_replica - first_replica, records.mean_replicas(number)
    num_devices = num_replicas * setup.parallelism.num_devices
    mean_devices = mean_number * setup.parallelism.num_devices
    price = setup.device.price_usd_per_hour if pool.price_usd_per_hour is None else pool.price_usd_per_hour
    utilisation, fractions, stages = summaries.Utilisation(), {}, []
    steps = records.steps_of(number)
    steps = steps.replaced(replica=steps["replica"] - first_replica)
    if len(steps):
        num_blocks = prepared.memory.num_blocks * prepared.settings.ranks_per_replica
        size = summaries.DeploymentSize(num_replicas, num_devices, num_blocks, pp)
        utilisation = summaries.utilisation_of(requests, steps, size, mean_number)
        own_s = records.encoded_s(number), records.adapters_s(number)
        fractions = time_fractions(prepared.lowered, steps, prepared.settings, *own_s)
        work = step_work(setup.device, attention_side(prepared.shard), steps)
        stages = stage_uses(work, steps, pp, mean_number, records.span_s)
    ended_here = (requests["replica"] >= first_replica) & (requests["replica"] < end_replica)
    preemptions = int(requests["num_preemptions"][ended_here].sum())
    power = power_model(scenario.deployment, setup, attention_side(prepared.shard), steps)
    return summaries.PoolSummary(
        name=pool.name,
        role=pool.role,
        num_replicas=num_replicas,
        num_devices=num_devices,
        mean_devices=mean_devices,
        utilisation=msgspec.structs.replace(utilisation, num_preemptions=preemptions),
        time_fractions=fractions,
        stages=tuple(stages),
        mean_w=None if power is None else power.at(utilisation.busy_fraction) * mean_devices,
        usd_per_hour=None if price is None else price * mean_devices,
        sides=tuple(side_uses(prepared.lowered, steps, setup.parallelism, num_replicas, mean_number * records.span_s)),
    )


def _encoder_summary(scenario: Scenario, encoder: EncodePool, run: EncodeRun, span_s: float) -> summaries.PoolSummary:
    pool, setup = encoder.pool, encoder.setup
    num_devices = pool.replicas * setup.parallelism.num_devices
    price = setup.device.price_usd_per_hour if pool.price_usd_per_hour is None else pool.price_usd_per_hour
    busy_fraction = float(run.busy_s.sum()) / (span_s * pool.replicas)
    power = power_model(scenario.deployment, setup)
    return summaries.PoolSummary(
        name=pool.name,
        role=pool.role,
        num_replicas=pool.replicas,
        num_devices=num_devices,
        mean_devices=num_devices,
        utilisation=summaries.Utilisation(busy_fraction=busy_fraction),
        time_fractions={"encoder": 1.0},
        stages=(),
        mean_w=None if power is None else power.at(busy_fraction) * num_devices,
        usd_per_hour=None if price is None else price * num_devices,
        images=summaries.EncodedImages(num_sent=run.num_sent, num_encoded=run.num_encoded, sent_bytes=run.sent_bytes),
    )


def _provenance(records: _Records) -> list[dict[Any, float]]:
    """Return shares of the device's time by coverage, table and operator, pools weighted by their busy time."""
    pools, tables = records.pools, [records.steps_of(number) for number in range(len(records.pools))]
    shares: list[tuple[dict[Any, float], ...]] = [
        provenance(pool.estimator, pool.shard, steps, pool.settings.ranks_per_replica) if len(steps) else ({}, {}, {})
        for pool, steps in zip(pools, tables, strict=True)
    ]
    if len(pools) == 1:
        return list(shares[0])
    total_s = sum(float(steps["duration_s"].sum()) for steps in tables)
    totals: list[Any] = [Counter() for _ in range(3)]
    for steps, each in zip(tables, shares, strict=True):
        busy_fraction = float(steps["duration_s"].sum()) / total_s
        for total, share in zip(totals, each, strict=True):
            for name, fraction in share.items():
                total[name] += busy_fraction * fraction
    return [dict(total.most_common()) for total in totals]


def _with_adapters(provenance: list[dict[Any, float]], summary: summaries.Summary) -> list[dict[Any, float]]:
    """Add the kernels of LoRA adapters, which nobody has measured, to the shares of the device's time."""
    if summary.adapters is None:
        return provenance
    share = summary.adapters.product_fraction
    names = (Coverage.ROOFLINE, "plain roofline of LoRA kernels", "lora")
    scaled = [{name: each * (1.0 - share) for name, each in shares.items()} for shares in provenance]
    for shares, name in zip(scaled, names, strict=True):
        shares[name] = shares.get(name, 0.0) + share
    return [dict(sorted(shares.items(), key=lambda item: -item[1])) for shares in scaled]


def _resolved(scenario: Scenario, prepared: PreparedDeployment) -> Scenario:
    """Write out in `scenario`, or in every pool of it, the defaults that decided the result."""
    first = prepared.pools[0]
    if not scenario.deployment.pools:
        return resolved_scenario(scenario, first.setup, first.memory)
    pools = []
    encoders = () if prepared.encoder is None else (prepared.encoder,)
    for each in (*prepared.pools, *encoders):
        alone = resolved_scenario(pool_scenario(scenario, each.pool), each.setup, each.memory).deployment
        fields = {name: getattr(alone, name) for name in ("device", "node", "parallelism", "engine")}
        pools.append(msgspec.structs.replace(each.pool, **fields))
    pools.sort(key=lambda pool: [each.name for each in scenario.deployment.pools].index(pool.name))
    transfer = transfer_of(scenario, [each.setup for each in prepared.pools])
    decided = {"pools": tuple(pools), "parallelism": Parallelism(), "transfer": transfer}
    deployment = msgspec.structs.replace(scenario.deployment, **decided)
    return msgspec.structs.replace(scenario, precision=first.setup.precision, deployment=deployment)
