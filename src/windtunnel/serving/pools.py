"""Simulate a deployment of several pools: prefill and decode on separate replicas, or several kinds of replicas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.metrics.records import POOL_COLUMNS, Table
from windtunnel.metrics.summary import (
    DeploymentSize,
    DeviceTerms,
    PoolSummary,
    Summary,
    Utilisation,
    span_of,
    summarise,
    utilisation_of,
    with_pools,
)
from windtunnel.metrics.uncertainty import Interval
from windtunnel.model.forward import Shard
from windtunnel.model.memory import kv_bytes_per_token, state_bytes_per_request
from windtunnel.model.parallelism import Parallelism
from windtunnel.network.cluster import handoff_bytes_per_s, network_of
from windtunnel.pricing.estimator import Coverage, Estimator
from windtunnel.serving import codes
from windtunnel.serving.analysis.attribution import provenance, time_fractions
from windtunnel.serving.analysis.device_use import stage_uses, step_work
from windtunnel.serving.analysis.intervals import disaggregated_intervals, intervals
from windtunnel.serving.calibration import Calibration
from windtunnel.serving.codes import BOTH, DECODE, PREFILL
from windtunnel.serving.deployment import (
    DECODE_STREAMS_FIRST,
    LINK_EFFICIENCY,
    TRANSFER_LATENCY_S,
    KvTier,
    Pool,
    Transfer,
    TransferLink,
)
from windtunnel.serving.engines.defaults import ENGINE_SCHEDULERS
from windtunnel.serving.results import PoolResult, Result, limits_of, power_model, resolved_scenario
from windtunnel.serving.runners.batched import GiveUp, Progress, Watch, pool_tables, run_tables, run_to_end
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.serving.server import Lower, check_requests, with_model_len
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.serving.setup.frontend import client_table
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.kv_retention import KvRetention, caches_of, has_one_group, shares_prefixes
from windtunnel.serving.setup.memory import MemoryPlan, plan_memory
from windtunnel.serving.setup.prefix_cache import MAX_ENTRIES, check_windows, kv_tiers
from windtunnel.serving.setup.speculation import drafter_of, speculation_of, with_drafter
from windtunnel.serving.setup.step_prices import LoweredSteps, lower_steps
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import HandoffRules, PoolPlan, Pools, joined_caches, new_pool_events, new_pools
from windtunnel.workload.generate.requests import RequestArrays, generate

ROLES = {"both": BOTH, "prefill": PREFILL, "decode": DECODE}


@dataclass(frozen=True, eq=False)
class PoolServer:
    """One pool, ready to run."""

    pool: Pool
    setup: Setup
    shard: Shard
    memory: MemoryPlan
    estimator: Estimator
    lowered: LoweredSteps
    settings: state.KernelSettings
    retention: KvRetention

    def plan(self, link: TransferLink) -> PoolPlan:
        """Return the pool as the loop takes it; `link` carries its KV."""
        link_bytes_per_s = _link_bytes_per_s(self.setup, link)
        return PoolPlan(self.settings, self.lowered.cost, ROLES[self.pool.role], link_bytes_per_s, self._kv_copies)

    @property
    def _kv_copies(self) -> float:
        """Copies of a request's KV on one rank's devices.

        Latent attention keeps all of it on each device, grouped queries what their key and value heads cannot be spread
        over.
        """
        model, shape = replace(self.shard, parallelism=Parallelism()), self.setup.parallelism
        once = kv_bytes_per_token(model, self.setup.max_model_len)
        each = kv_bytes_per_token(self.shard, self.setup.max_model_len)
        return max(each * shape.tp * shape.pp / once, 1.0) if once else 1.0


@dataclass(frozen=True, eq=False)
class PreparedPools:
    """All pools of a deployment, ready to serve requests of known lengths at any load."""

    servers: list[PoolServer]
    plans: list[PoolPlan]
    handoff_rules: HandoffRules
    speculation: state.Speculation | None

    @property
    def retention(self) -> list[KvRetention]:
        """KV retention of each pool."""
        return [server.retention for server in self.servers]


def prepare_pools(
    scenario: Scenario,
    requests: RequestArrays,
    estimator: Estimator | None = None,
    allow_download: bool = False,
    estimator_of: Callable[[Setup], Estimator] = estimator_for,
    lower: Lower = lower_steps,
    calibration_of: Callable[[Scenario], Calibration | None] = lambda _: None,
) -> PreparedPools:
    """Prepare all pools of a deployment, as `serving.server.prepare` does for equal replicas.

    Args:
        scenario: its deployment has pools.
        requests: as of `serving.server.prepare`.
        estimator: prices operators of all pools; None: `estimator_of` finds one for each.
        allow_download: look models up on the Hugging Face hub too.
        estimator_of: setup of a pool -> its estimator.
        lower: prices the steps.
        calibration_of: scenario of one pool alone -> a calibration in place of the pool's own; None keeps that one.

    Raises:
        InputError: a pool cannot serve the requests, or the pools do not go together.
    """
    servers = []
    for pool in scenario.deployment.pools:
        alone = pool_scenario(scenario, pool)
        setup = with_model_len(resolve(alone, allow_download, calibration_of(alone)), requests)
        servers.append(_prepared(scenario, pool, setup, requests, estimator or estimator_of(setup), lower))
    _check_first_tokens(scenario, servers)
    servers = _with_stores(servers)
    _check_retention(servers, requests)
    if scenario.deployment.transfer.router == "prefix_affinity":
        raise InputError(
            "transfer.router is prefix_affinity, which chooses where a prompt is computed, not where it decodes",
            "set deployment.router to prefix_affinity, and transfer.router to another one, such as least_kv",
        )
    plans = [server.plan(scenario.deployment.transfer.link) for server in servers]
    plans = _with_given_link(scenario, servers, _on_network(scenario, servers, plans))
    return PreparedPools(servers, plans, handoff_rules_of(scenario, servers), _speculation(servers))


def simulate_pools(
    scenario: Scenario,
    estimator: Estimator | None = None,
    progress: Progress | None = None,
    allow_download: bool = False,
    estimator_of: Callable[[Setup], Estimator] = estimator_for,
) -> Result:
    """Simulate a scenario whose deployment has pools.

    Arguments and errors as of `serving.simulate.simulate`, `estimator_of` as of `prepare_pools`.
    """
    requests = generate(scenario.workload, scenario.seed)
    prepared = prepare_pools(scenario, requests, estimator, allow_download, estimator_of)
    servers = prepared.servers
    run = run_pools(
        prepared.plans,
        prepared.handoff_rules,
        requests,
        progress,
        prepared.speculation,
        retention=prepared.retention,
    )
    loaded = _tier_tokens(servers, run.pools, first_pool(run.records, run.pools), run.loaded_blocks)
    table = _request_table(run, servers[0].setup, requests, loaded)
    steps_by_pool = [_steps_of(run.steps, pool) for pool in run.pools.pools]
    summary = _summary(
        scenario,
        servers,
        requests,
        run,
        table,
        steps_by_pool,
        tier_tokens=loaded if loaded or shares_prefixes(prepared.retention, requests) else None,
    )
    coverage, sources, operators = _provenance(servers, steps_by_pool)
    return Result(
        scenario=_resolved(scenario, servers),
        setup=servers[0].setup,
        memory=servers[0].memory,
        requests=table,
        steps=run.steps,
        summary=summary,
        coverage=coverage,
        sources=sources,
        operators=operators,
        engine_time_s=run.engine_time_s,
        intervals=_intervals(servers, summary, table, coverage, requests.is_open_loop),
        pools=tuple(PoolResult(server.pool.name, server.pool.role, server.setup, server.memory) for server in servers),
    )


def _summary(
    scenario: Scenario,
    servers: Sequence[PoolServer],
    requests: RequestArrays,
    run: "PoolRun",
    table: Table,
    steps_by_pool: Sequence[Table],
    tier_tokens: Mapping[str, NDArray[np.int64]] | None,
) -> Summary:
    """Summarise a run over several pools, and each pool alone."""
    num_devices = scenario.deployment.num_devices
    summaries = [
        _pool_summary(scenario, server, steps, table, int(pool.first_replica))
        for server, steps, pool in zip(servers, steps_by_pool, run.pools.pools, strict=True)
    ]
    prices = [summary.usd_per_hour for summary in summaries]
    known = [price for price in prices if price is not None]
    summary = summarise(
        table,
        run.steps,
        DeploymentSize(
            num_replicas=len(run.pools.pool_of_replica),
            num_devices=num_devices,
            num_blocks=max(server.memory.num_blocks * server.settings.ranks_per_replica for server in servers),
        ),
        next(pool.time_fractions for pool in summaries if pool.time_fractions),
        limits_of(scenario, requests),
        DeviceTerms(sum(known) / num_devices if len(known) == len(prices) else None),
        tier_tokens=tier_tokens,
    )
    return with_pools(summary, table, summaries)


def _intervals(
    servers: Sequence[PoolServer],
    summary: Summary,
    table: Table,
    coverage: Mapping[Coverage, float],
    is_open_loop: bool,
) -> dict[str, Interval]:
    """Return the intervals of a run, by the engine of the first pool that decodes."""
    decoder = next(server for server in servers if server.pool.role != "prefill")
    if decoder.pool.role == "decode":
        return disaggregated_intervals(decoder.setup.engine.name, summary, table, coverage, is_open_loop)
    return intervals(decoder.setup, summary, table, coverage, is_open_loop)


class PoolRun(NamedTuple):
    """A finished run over several pools."""

    records: NDArray[np.void]
    """`REQUEST` records in order of sending."""
    pools: Pools
    """Pools after the run, with every request's KV transfer."""
    steps: Table
    engine_time_s: float
    """Wall time of the loop."""
    loaded_blocks: NDArray[np.int64]
    """`[tier of all pools, request]` blocks of each prompt that each lower tier gave when it was first admitted."""


def run_pools(
    plans: Sequence[PoolPlan],
    handoff_rules: HandoffRules,
    requests: RequestArrays,
    progress: Progress | None = None,
    speculation: state.Speculation | None = None,
    give_up: GiveUp | None = None,
    retention: Sequence[KvRetention] = (),
) -> PoolRun:
    """Run the compiled loop to its end over several pools.

    Args:
        plans: the pools.
        handoff_rules: how requests go from pool to pool.
        requests: what they serve.
        progress, give_up: see `serving.server.serve`.
        speculation: of the pools that decode.
        retention: KV retention of each pool; empty: no pool keeps KV.
    """

    def run_with(kept: Sequence[KvRetention]) -> PoolRun:
        return _run(plans, handoff_rules, requests, kept, progress, speculation, give_up)

    if shares_prefixes(retention, requests):
        return run_with(retention)
    # Lower tiers still take the KV blocks of preempted requests: preemption by swap.
    requests = replace(requests, prefixes=None)
    countable = [
        replace(kept, on_device=kept.on_device and has_one_group(plan.settings))
        for kept, plan in zip(retention, plans, strict=False)
    ]
    if any(kept.tiers.size for kept in countable):
        return run_with(countable)
    first = run_with(())
    if any(kept.on_device for kept in countable) and first.records["num_preemptions"].any():
        # A cache changes nothing until a preempted request finds its own blocks in it.
        again = run_with(countable)
        again.pools.transfers["cached_tokens"] = 0
        return again._replace(engine_time_s=first.engine_time_s + again.engine_time_s)
    return first


def _run(
    plans: Sequence[PoolPlan],
    handoff_rules: HandoffRules,
    requests: RequestArrays,
    retention: Sequence[KvRetention],
    progress: Progress | None,
    speculation: state.Speculation | None,
    give_up: GiveUp | None,
) -> PoolRun:
    """Run the loop once, with caches for the KV that the pools keep."""
    pools = new_pools(plans, handoff_rules, requests.num_requests)
    cache = None
    if retention:
        caches = [caches_of(plan.settings, kept, requests) for plan, kept in zip(plans, retention, strict=True)]
        cache = joined_caches(pools, caches)
    cost = state.StepCost(*(np.asarray(field)[0] for field in pools.cost))
    first = pools.pools[0]
    pool = pool_tables(first, pools.pools, cache, speculation, (pools.ranks, pools.slots, pools.lists, pools.stages))
    run = run_tables(first, requests, new_pool_events(plans))
    steps, engine_time_s = run_to_end(pool, cost, run, pools, watch=Watch(progress, give_up))
    records = run.requests
    loaded_blocks = np.zeros((0, records.size), np.int64)
    if cache is not None:
        by_pool = cache.requests["cached_tokens"].reshape(len(plans), -1)
        pools.transfers["cached_tokens"] = by_pool[first_pool(records.view(np.ndarray), pools), np.arange(records.size)]
        loaded_blocks = cache.loaded
    return PoolRun(records.view(np.ndarray), pools, steps, engine_time_s, loaded_blocks)


def first_pool(records: NDArray[np.void], pools: Pools) -> NDArray[np.int64]:
    """Run the loop once, with caches for the KV that the pools keep."""
    """The pool that computed each prompt."""
    moved = ~np.isnan(pools.transfers["handed_s"])
    return np.asarray(pools.pool_of_rank[np.where(moved, pools.transfers["prefill_rank"], records["rank"])])


def _prepared(
    scenario: Scenario,
    pool: Pool,
    setup: Setup,
    requests: RequestArrays,
    estimator: Estimator,
    lower: Lower,
) -> PoolServer:
    """Prepare one pool; errors name it."""
    if setup.engine.scheduler not in ENGINE_SCHEDULERS:
        raise InputError(
            f"pool {pool.name}: the scheduler {setup.engine.scheduler} does not run in pools",
            f"those that do: {', '.join(ENGINE_SCHEDULERS)}",
        )
    shard = shard_of(setup)
    drafter = drafter_of(setup, shard)
    memory = plan_memory(shard, setup.device, with_drafter(setup, drafter).engine, setup.max_model_len)
    served, computes_prompts = requests, True
    if pool.role == "prefill":
        served = replace(requests, output_tokens=np.ones_like(requests.output_tokens))
    elif pool.role == "decode" and scenario.deployment.transfer.local_prefill_tokens == 0:
        # Preempted ones are computed again; TensorRT-LLM's policy never preempts.
        computes_prompts = setup.engine.scheduler != "trtllm"
    settings = kernel_settings(setup, memory, pool.replicas, requests, scenario.deployment.router, scenario.seed)
    try:
        check_requests(served, setup, memory, computes_prompts)
        tiers = kv_tiers(setup, memory, settings)
    except InputError as error:
        raise InputError(f"pool {pool.name}: {error.message}", error.hint) from None
    retention = KvRetention(bool(setup.engine.enable_prefix_caching), tiers, bool(setup.engine.kv_load_overlaps))
    lowered = lower(estimator, setup.device, shard, setup.engine, setup.max_model_len, drafter)
    return PoolServer(pool, setup, shard, memory, estimator, lowered, settings, retention)


def _with_stores(servers: Sequence[PoolServer]) -> list[PoolServer]:
    """Give pools that name the same tier of the whole deployment one store for it.

    Raises:
        InputError: pools that cannot read each other's blocks.
    """
    first: dict[str, tuple[PoolServer, KvTier]] = {}
    with_stores = []
    for server in servers:
        tiers = server.retention.tiers.copy()
        for row, tier in zip(tiers, server.setup.engine.kv_tiers or (), strict=True):
            if tier.shared_by != "deployment":
                continue
            other, same = first.setdefault(tier.name, (server, tier))
            if other.memory.block_size != server.memory.block_size or same.capacity_bytes != tier.capacity_bytes:
                raise InputError(
                    f"pools {other.pool.name} and {server.pool.name} share the KV tier {tier.name!r}, but its size or "
                    "that of their blocks differs",
                    "give both one capacity_bytes and one block_size, or tiers of different names",
                )
            row.store = 1 + list(first).index(tier.name)
            row.ranks_per_pool = MAX_ENTRIES
        with_stores.append(replace(server, retention=replace(server.retention, tiers=tiers)))
    return with_stores


def _check_retention(servers: Sequence[PoolServer], requests: RequestArrays) -> None:
    """Raise InputError where what a pool would keep cannot be counted."""
    shares = shares_prefixes([server.retention for server in servers], requests)
    for server in servers:
        if server.retention.tiers.size or (shares and server.retention.on_device):
            check_windows(server.setup, server.memory)
        if shares and server.retention.tiers.size and not server.retention.on_device:
            raise InputError(
                f"pool {server.pool.name} has kv_tiers and no prefix caching, which other pools have",
                "set enable_prefix_caching for all pools or for none, or leave out this pool's kv_tiers",
            )


def _tier_tokens(
    servers: Sequence[PoolServer], pools: Pools, began: NDArray[np.int64], loaded_blocks: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Return tier -> tokens of each prompt that came from it in the pool where the prompt `began`."""
    by_tier: dict[str, NDArray[np.int64]] = {}
    for index, server in enumerate(servers):
        rows = loaded_blocks[pools.pools[index].first_tier : pools.pools[index].end_tier]
        for tier, blocks in zip(server.setup.engine.kv_tiers or (), rows, strict=False):
            tokens = np.where(began == index, blocks * server.memory.block_size, 0)
            by_tier[tier.name] = by_tier.get(tier.name, np.zeros_like(tokens)) + tokens
    return by_tier


def _speculation(servers: Sequence[PoolServer]) -> state.Speculation | None:
    """Return the speculation of the pools that decode; one that only prefills has no decode steps."""
    speculations = {speculation_of(server.setup) for server in servers if server.pool.role != "prefill"}
    if len(speculations) > 1:
        raise InputError(
            "the pools that decode speculate differently",
            "give deployment.engine.speculative instead of a pool's own",
        )
    return speculations.pop()


def _check_first_tokens(scenario: Scenario, servers: Sequence[PoolServer]) -> None:
    """Raise InputError where the decode side would compute the first output, and its engine does not."""
    if scenario.deployment.transfer.first_token == "decode":
        for server in servers:
            if server.setup.engine.scheduler == "sglang":
                raise InputError(
                    f"pool {server.pool.name}: SGLang's decode side takes the first output from the prefill side",
                    "leave transfer.first_token out, or set it to prefill",
                )


def handoff_rules_of(scenario: Scenario, servers: Sequence[PoolServer]) -> HandoffRules:
    """Return the handoff rules as the loop takes them; the KV of a request is what one copy of the model caches."""
    transfer, first = transfer_of(scenario, servers), servers[0]
    assert transfer.latency_s is not None
    model = replace(first.shard, parallelism=Parallelism())
    num_layers = first.setup.model.num_layers
    return HandoffRules(
        decode_router=codes.ROUTERS.index(transfer.router),
        local_tokens=transfer.local_prefill_tokens,
        decode_samples_first=int(transfer.first_token == "decode"),
        decode_streams_first=int(transfer.first_token == "prefill" and transfer.streamed_by == "decode"),
        bytes_per_token=kv_bytes_per_token(model, first.setup.max_model_len),
        bytes_per_request=state_bytes_per_request(model, first.setup.max_model_len),
        latency_s=transfer.latency_s,
        tail_fraction=1.0 / num_layers if transfer.overlap else 1.0,
    )


def transfer_of(scenario: Scenario, servers: Sequence[PoolServer]) -> Transfer:
    """Fill in the deployment's transfer: defaults of the engine that decodes, and of the calibration in force there."""
    decodes = next((server.setup for server in servers if server.pool.role != "prefill"), servers[-1].setup)
    streams_first = decodes.engine.name in DECODE_STREAMS_FIRST or scenario.deployment.transfer.first_token == "decode"
    default = Transfer(
        link_efficiency=LINK_EFFICIENCY,
        latency_s=TRANSFER_LATENCY_S,
        streamed_by="decode" if streams_first else "prefill",
    )
    learnt = None if decodes.calibration is None else decodes.calibration.transfer
    if learnt is not None:
        default = msgspec.structs.replace(default, link_efficiency=learnt.link_efficiency, latency_s=learnt.latency_s)
    return scenario.deployment.transfer.over(default)


def _link_bytes_per_s(setup: Setup, over: TransferLink) -> float:
    """Return the published bandwidth of the links of one rank's devices, out of its node or inside it."""
    link = setup.node.scale_out if over == "scale_out" else setup.node.scale_up
    return 0.0 if link is None else link.bytes_per_s * setup.parallelism.tp * setup.parallelism.pp


def _on_network(scenario: Scenario, servers: Sequence[PoolServer], plans: list[PoolPlan]) -> list[PoolPlan]:
    """Limit the plans' links to what the deployment's network carries from rank to rank.

    Pools lie on the network one after the other, their replicas too.
    """
    settings = scenario.deployment.network
    if settings is None or not any(plan.role == PREFILL for plan in plans):
        return plans
    if len({server.setup.node.name for server in servers}) > 1:
        raise InputError(
            "the pools stand in different nodes, and a network is made of one kind",
            "leave deployment.network out, or give the pools one device",
        )
    network = network_of(settings, servers[0].setup.node, scenario.deployment.num_devices)
    first, sides = 0, dict[bool, list[NDArray[np.int64]]]({True: [], False: []})
    for server, plan in zip(servers, plans, strict=True):
        width = server.setup.parallelism.tp * server.setup.parallelism.pp
        ranks = first + np.arange(plan.settings.num_replicas * plan.settings.ranks_per_replica * width)
        sides[plan.role == PREFILL].append(ranks.reshape(-1, width))
        first += ranks.size
    rates = [handoff_bytes_per_s(network, senders, receivers) for senders in sides[True] for receivers in sides[False]]
    slowest = min(rates)
    return [plan._replace(link_bytes_per_s=min(plan.link_bytes_per_s, slowest)) for plan in plans]


def _with_given_link(scenario: Scenario, servers: Sequence[PoolServer], plans: Sequence[PoolPlan]) -> list[PoolPlan]:
    """Give the plans the bandwidth that transfers reach: the scenario's, or a share of the links'."""
    transfer = transfer_of(scenario, servers)
    assert transfer.link_efficiency is not None
    if transfer.bytes_per_s is not None:
        return [plan._replace(link_bytes_per_s=transfer.bytes_per_s) for plan in plans]
    named = zip(scenario.deployment.pools, plans, strict=True)
    hands_off = any(plan.role == PREFILL for plan in plans)
    for pool, plan in named:
        if plan.link_bytes_per_s == 0.0 and hands_off:
            raise InputError(
                f"pool {pool.name}: its node has no link to others over which a KV cache could be sent",
                "give deployment.transfer.bytes_per_s, or take a node with scale_out",
            )
    return [plan._replace(link_bytes_per_s=plan.link_bytes_per_s * transfer.link_efficiency) for plan in plans]


def replicas_of(records: NDArray[np.void], pools: Pools) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Run the loop once, with caches for the KV that the pools keep."""
    """Where every request began and where it ended, of how many replicas in all pools."""
    moved = ~np.isnan(pools.transfers["handed_s"])
    per_replica = pools.pools["ranks_per_replica"][pools.pool_of_replica]
    of_rank = np.repeat(np.arange(per_replica.size), per_replica)
    began = of_rank[np.where(moved, pools.transfers["prefill_rank"], records["rank"])]
    ended = of_rank[np.where(moved, pools.transfers["decode_rank"], records["rank"])]
    return began, ended, per_replica.size


def _request_table(
    run: PoolRun, setup: Setup, requests: RequestArrays, loaded: Mapping[str, NDArray[np.int64]]
) -> Table:
    """Return the request table of a run, with the columns of pools."""
    began, ended, num_replicas = replicas_of(run.records, run.pools)
    transfers, cached_tokens = run.pools.transfers, run.pools.transfers["cached_tokens"]
    table = client_table(
        setup,
        requests,
        run.records,
        ended,
        num_replicas,
        tenant=requests.tenant,
        cached_tokens=cached_tokens,
        loaded_tokens=sum(loaded.values(), np.zeros_like(cached_tokens)),
    )
    pool_columns = {name: np.array(transfers[name]) for name in list(POOL_COLUMNS)[1:]}
    return table.with_columns({"prefill_replica": began, **pool_columns}, POOL_COLUMNS)


def _steps_of(steps: Table, pool: Any) -> Table:
    """Return the steps of the replicas of a pool, given as its row in the loop's table."""
    return steps.where((steps["replica"] >= pool.first_replica) & (steps["replica"] < pool.end_replica))


def _pool_summary(
    scenario: Scenario, server: PoolServer, steps: Table, requests: Table, first_replica: int
) -> PoolSummary:
    """Summarise the steps of one pool; `requests` are those of all pools."""
    pool, setup, pp = server.pool, server.setup, server.setup.parallelism.pp
    num_devices = pool.replicas * setup.parallelism.num_devices
    price = setup.device.price_usd_per_hour if pool.price_usd_per_hour is None else pool.price_usd_per_hour
    utilisation, fractions, stages = IDLE, {}, []
    steps = steps.replaced(replica=steps["replica"] - first_replica)
    if len(steps):
        num_blocks = server.memory.num_blocks * server.settings.ranks_per_replica
        utilisation = utilisation_of(requests, steps, DeploymentSize(pool.replicas, num_devices, num_blocks, pp))
        fractions = time_fractions(server.lowered, steps, server.settings)
        work = step_work(setup.device, server.shard, steps)
        stages = stage_uses(work, steps, pp, pool.replicas, span_of(requests))
    ended_here = requests["replica"] - first_replica
    ended_here = (ended_here >= 0) & (ended_here < pool.replicas)
    preemptions = int(requests["num_preemptions"][ended_here].sum())
    power = power_model(pool_scenario(scenario, pool), setup)
    return PoolSummary(
        name=pool.name,
        role=pool.role,
        num_replicas=pool.replicas,
        num_devices=num_devices,
        utilisation=msgspec.structs.replace(utilisation, num_preemptions=preemptions),
        time_fractions=fractions,
        stages=tuple(stages),
        mean_w=None if power is None else power.at(utilisation.busy_fraction) * num_devices,
        usd_per_hour=None if price is None else price * num_devices,
    )


IDLE = Utilisation(
    busy_fraction=0.0,
    mean_running=0.0,
    mean_waiting=0.0,
    mean_present=0.0,
    bubble_fraction=0.0,
    kv_mean_fraction=0.0,
    kv_peak_fraction=0.0,
    num_preemptions=0,
)


def _provenance(servers: Sequence[PoolServer], steps: Sequence[Table]) -> list[dict[Any, float]]:
    """Return shares of the device's time as `provenance` does, pools weighted by their busy time."""
    total_s = sum(float(table["duration_s"].sum()) for table in steps)
    totals: list[dict[Any, float]] = [{}, {}, {}]
    for server, table in zip(servers, steps, strict=True):
        if not len(table):
            continue
        busy_fraction = float(table["duration_s"].sum()) / total_s
        shares: tuple[dict[Any, float], ...] = provenance(
            server.estimator, server.shard, table, server.settings.ranks_per_replica
        )
        for total, share in zip(totals, shares, strict=True):
            for name, fraction in share.items():
                total[name] = total.get(name, 0.0) + busy_fraction * fraction
    return [dict(sorted(total.items(), key=lambda item: -item[1])) for total in totals]


def _resolved(scenario: Scenario, servers: Sequence[PoolServer]) -> Scenario:
    """Write out in every pool of `scenario` the defaults that decided the result."""
    pools = []
    for server in servers:
        alone = resolved_scenario(pool_scenario(scenario, server.pool), server.setup, server.memory).deployment
        fields = {name: getattr(alone, name) for name in ("device", "node", "parallelism", "engine")}
        pools.append(msgspec.structs.replace(server.pool, **fields))
    deployment = msgspec.structs.replace(
        scenario.deployment, pools=tuple(pools), transfer=transfer_of(scenario, servers)
    )
    return msgspec.structs.replace(scenario, precision=servers[0].setup.precision, deployment=deployment)
