"""Run a deployment of several pools: prefill and decode on replicas of their own, or kinds of replicas side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.metrics.records import POOL_COLUMNS, Table, request_table
from windtunnel.metrics.summary import (
    DeploymentSize,
    DeviceTerms,
    PoolSummary,
    Utilisation,
    span_of,
    summarise,
    utilisation_of,
    with_pools,
)
from windtunnel.model.forward import Shard
from windtunnel.model.memory import kv_bytes_per_token, state_bytes_per_request
from windtunnel.model.parallelism import Parallelism
from windtunnel.network.cluster import handoff_bytes_per_s, network_of
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.analysis.attribution import provenance, time_fractions
from windtunnel.serving.analysis.device_use import stage_uses, step_work
from windtunnel.serving.analysis.intervals import disaggregated_intervals, intervals
from windtunnel.serving.calibration import Calibration
from windtunnel.serving.deployment import (
    DECODE_STREAMS_FIRST,
    LINK_EFFICIENCY,
    TRANSFER_LATENCY_S,
    EngineSettings,
    KvTier,
    Pool,
    Transfer,
    TransferLink,
)
from windtunnel.serving.engines.defaults import ENGINE_SCHEDULERS
from windtunnel.serving.results import ENGINE_COLUMNS, PoolResult, Result, limits_of, power_model, resolved_scenario
from windtunnel.serving.runners.batched import GiveUp, Progress, new_records, run_to_end
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.serving.server import Lower, check_requests, with_model_len
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.serving.setup.frontend import streams
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.kv_retention import KvRetention, caches_of, has_one_group, shares_prefixes
from windtunnel.serving.setup.memory import MemoryPlan, plan_memory
from windtunnel.serving.setup.prefix_cache import MAX_ENTRIES, check_windows, kv_tiers
from windtunnel.serving.setup.speculation import drafter_of, speculation_of, with_drafter
from windtunnel.serving.setup.step_prices import LoweredSteps, lower_steps
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import (
    BOTH,
    DECODE,
    PREFILL,
    HandoffRules,
    PoolPlan,
    Pools,
    joined_caches,
    new_pool_events,
    new_pools,
)
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
        """The pool as the loop takes it, its KV carried by that link."""
        link_bytes_per_s = _link_bytes_per_s(self.setup, link)
        return PoolPlan(self.settings, self.lowered.cost, ROLES[self.pool.role], link_bytes_per_s, self._kv_copies)

    @property
    def _kv_copies(self) -> float:
        """Of a request's KV on one rank's devices: latent attention keeps all of it on each, grouped queries what their
        key and value heads cannot be spread over.
        """
        whole, width = replace(self.shard, parallelism=Parallelism()), self.setup.parallelism
        once = kv_bytes_per_token(whole, self.setup.max_model_len)
        each = kv_bytes_per_token(self.shard, self.setup.max_model_len)
        return max(each * width.tp * width.pp / once, 1.0) if once else 1.0


@dataclass(frozen=True, eq=False)
class PreparedPools:
    """All pools of a deployment, ready to serve requests of known lengths at any load."""

    parts: list[PoolServer]
    plans: list[PoolPlan]
    handoff_rules: HandoffRules
    speculation: state.Speculation | None

    @property
    def retention(self) -> list[KvRetention]:
        """What each pool keeps."""
        return [part.retention for part in self.parts]


def prepare_pools(
    scenario: Scenario,
    requests: RequestArrays,
    estimator: Estimator | None = None,
    allow_download: bool = False,
    estimator_of: Callable[[Setup], Estimator] = estimator_for,
    lower: Lower = lower_steps,
    calibration_of: Callable[[Scenario], Calibration | None] = lambda _: None,
) -> PreparedPools:
    """What `serving.server.prepare` is for equal replicas; `estimator_of` prices a pool's operators without an
    `estimator`, `calibration_of` may give one that is in force for a pool, by its scenario alone, in place of its own.
    """
    parts = []
    for pool in scenario.deployment.pools:
        alone = pool_scenario(scenario, pool)
        setup = with_model_len(resolve(alone, allow_download, calibration_of(alone)), requests)
        parts.append(_prepared(scenario, pool, setup, requests, estimator or estimator_of(setup), lower))
    _check_first_tokens(scenario, parts)
    parts = _with_stores(parts)
    _check_retention(parts, requests)
    if scenario.deployment.transfer.router == "prefix_affinity":
        raise InputError(
            "transfer.router is prefix_affinity, which chooses where a prompt is computed, not where it decodes",
            "set deployment.router to prefix_affinity, and transfer.router to another one, such as least_kv",
        )
    own = [part.plan(scenario.deployment.transfer.link) for part in parts]
    plans = _with_given_link(scenario, parts, _on_network(scenario, parts, own))
    return PreparedPools(parts, plans, handoff_rules_of(scenario, parts), _speculation(parts))


def simulate_pools(
    scenario: Scenario,
    estimator: Estimator | None = None,
    progress: Progress | None = None,
    allow_download: bool = False,
    estimator_of: Callable[[Setup], Estimator] = estimator_for,
) -> Result:
    """Simulate a scenario whose deployment has pools; arguments and errors as `serving.simulate.simulate`,
    `estimator_of` as of `prepare_pools`.
    """
    requests = generate(scenario.workload, scenario.seed)
    fleet = prepare_pools(scenario, requests, estimator, allow_download, estimator_of)
    parts = fleet.parts
    records, pools, steps, engine_time_s, loaded_blocks = run_pools(
        fleet.plans, fleet.handoff_rules, requests, progress, fleet.speculation, retention=fleet.retention
    )
    loaded = _tier_tokens(parts, pools, first_pool(records, pools), loaded_blocks)
    table = _request_table(records, pools, parts[0].setup.engine, requests, loaded)
    summaries = [
        _pool_summary(scenario, part, _steps_of(steps, pools, at), table, int(pools.pools[at].first_replica))
        for at, part in enumerate(parts)
    ]
    deployment = scenario.deployment
    prices = [summary.usd_per_hour for summary in summaries]
    known = [price for price in prices if price is not None]
    summary = summarise(
        table,
        steps,
        DeploymentSize(
            num_replicas=len(pools.pool_of_replica),
            num_devices=deployment.num_devices,
            num_blocks=max(part.memory.num_blocks * part.settings.ranks_per_replica for part in parts),
        ),
        next(part.time_fractions for part in summaries if part.time_fractions),
        limits_of(scenario, requests),
        DeviceTerms(sum(known) / deployment.num_devices if len(known) == len(prices) else None),
        tier_tokens=loaded if loaded or shares_prefixes(fleet.retention, requests) else None,
    )
    coverage, sources, operators = _provenance(parts, [_steps_of(steps, pools, at) for at in range(len(parts))])
    shares = {how.value: share for how, share in coverage.items()}
    is_open_loop = not requests.concurrency and requests.previous is None
    decodes = next(part for part in parts if part.pool.role != "prefill")
    if decodes.pool.role == "decode":
        found = disaggregated_intervals(decodes.setup.engine.name, summary, table, shares, is_open_loop)
    else:
        found = intervals(decodes.setup, summary, table, shares, is_open_loop)
    return Result(
        scenario=_resolved(scenario, parts),
        setup=parts[0].setup,
        memory=parts[0].memory,
        requests=table,
        steps=steps,
        summary=with_pools(summary, table, summaries),
        coverage=coverage,
        sources=sources,
        operators=operators,
        engine_time_s=engine_time_s,
        intervals=found,
        pools=tuple(PoolResult(part.pool.name, part.pool.role, part.setup, part.memory) for part in parts),
    )


class PoolRun(NamedTuple):
    """A finished run over several pools."""

    records: NDArray[np.void]
    """`REQUEST` records in order of sending."""
    pools: Pools
    """As the run left them, with every request's KV transfer."""
    steps: Table
    engine_time_s: float
    """Wall time of the loop."""
    loaded_blocks: NDArray[np.int64]
    """`[tier of all pools, request]` of each prompt that came from each lower tier when it was first admitted."""


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
        plans, travel: of the pools.
        requests: what they serve.
        progress, give_up: see `serving.server.serve`.
        speculation: of the pools that decode.
        keeping: what each pool keeps of requests; none: nothing.
    """

    def run_with(kept: Sequence[KvRetention]) -> PoolRun:
        return _run(plans, handoff_rules, requests, kept, progress, speculation, give_up)

    if shares_prefixes(retention, requests):
        return run_with(retention)
    # Lower tiers still take the KV blocks of preempted requests: preemption by swap.
    requests = replace(requests, prefixes=None)
    own = [
        replace(part, on_device=part.on_device and has_one_group(plan.settings))
        for part, plan in zip(retention, plans, strict=False)
    ]
    if any(part.tiers.size for part in own):
        return run_with(own)
    found = run_with(())
    if any(part.on_device for part in own) and found.records["num_preemptions"].any():
        # A cache changes nothing until a preempted request finds its own blocks in it.
        again = run_with(own)
        again.pools.transfers["cached_tokens"] = 0
        return again._replace(engine_time_s=found.engine_time_s + again.engine_time_s)
    return found


def _run(
    plans: Sequence[PoolPlan],
    handoff_rules: HandoffRules,
    requests: RequestArrays,
    retention: Sequence[KvRetention],
    progress: Progress | None,
    speculation: state.Speculation | None,
    give_up: GiveUp | None,
) -> PoolRun:
    records = new_records(requests)
    pools = new_pools(plans, handoff_rules, records.size)
    arrays = (pools.ranks, pools.slots, pools.lists, pools.stages)
    cache = None
    if retention:
        own = [caches_of(plan.settings, part, requests) for plan, part in zip(plans, retention, strict=True)]
        cache = joined_caches(pools, own)
    cost, events = state.StepCost(*(np.asarray(field)[0] for field in pools.cost)), new_pool_events(plans)
    steps, engine_time_s = run_to_end(
        pools.pools[0],
        cost,
        requests,
        records,
        arrays,
        events,
        progress,
        cache=cache,
        speculation=speculation,
        pools=pools,
        give_up=give_up,
    )
    loaded_blocks = np.zeros((0, records.size), np.int64)
    if cache is not None:
        found = cache.requests["cached_tokens"].reshape(len(plans), -1)
        pools.transfers["cached_tokens"] = found[first_pool(records, pools), np.arange(records.size)]
        loaded_blocks = cache.loaded
    return PoolRun(records.view(np.ndarray), pools, steps, engine_time_s, loaded_blocks)


def first_pool(records: NDArray[np.void], pools: Pools) -> NDArray[np.int64]:
    """The pool that computed each prompt."""
    moved = ~np.isnan(pools.transfers.handed_s)
    return np.asarray(pools.pool_of_rank[np.where(moved, pools.transfers.prefill_rank, records["rank"])])


def _prepared(
    scenario: Scenario,
    pool: Pool,
    setup: Setup,
    requests: RequestArrays,
    estimator: Estimator,
    lower: Lower,
) -> PoolServer:
    if setup.engine.scheduler not in ENGINE_SCHEDULERS:
        raise InputError(
            f"pool {pool.name}: the scheduler {setup.engine.scheduler} does not run in pools",
            f"those that do: {', '.join(ENGINE_SCHEDULERS)}",
        )
    shard = shard_of(setup)
    drafter = drafter_of(setup, shard)
    memory = plan_memory(shard, setup.device, with_drafter(setup, drafter).engine, setup.max_model_len)
    asked, computes_prompts = requests, True
    if pool.role == "prefill":
        asked = replace(requests, output_tokens=np.ones_like(requests.output_tokens))
    elif pool.role == "decode" and scenario.deployment.transfer.local_prefill_tokens == 0:
        # Preempted ones are computed again; TensorRT-LLM's policy never preempts.
        computes_prompts = setup.engine.scheduler != "trtllm"
    try:
        check_requests(asked, setup, memory, computes_prompts)
    except InputError as error:
        raise InputError(f"pool {pool.name}: {error.message}", error.hint) from None
    settings = kernel_settings(setup, memory, pool.replicas, requests, scenario.deployment.router, scenario.seed)
    try:
        tiers = kv_tiers(setup, memory, settings)
    except InputError as error:
        raise InputError(f"pool {pool.name}: {error.message}", error.hint) from None
    retention = KvRetention(bool(setup.engine.enable_prefix_caching), tiers, bool(setup.engine.kv_load_overlaps))
    lowered = lower(estimator, setup.device, shard, setup.engine, setup.max_model_len, drafter)
    return PoolServer(pool, setup, shard, memory, estimator, lowered, settings, retention)


def _with_stores(parts: Sequence[PoolServer]) -> list[PoolServer]:
    """`parts` where tiers that the whole deployment shares are one store for all pools that name them alike.

    Raises:
        InputError: pools that cannot read each other's blocks.
    """
    first: dict[str, tuple[PoolServer, KvTier]] = {}
    found = []
    for part in parts:
        tiers = part.retention.tiers.copy()
        for row, tier in zip(tiers, part.setup.engine.kv_tiers or (), strict=True):
            if tier.shared_by != "deployment":
                continue
            other, same = first.setdefault(tier.name, (part, tier))
            if other.memory.block_size != part.memory.block_size or same.capacity_bytes != tier.capacity_bytes:
                raise InputError(
                    f"pools {other.pool.name} and {part.pool.name} share the KV tier {tier.name!r}, but its size or "
                    "that of their blocks differs",
                    "give both one capacity_bytes and one block_size, or tiers of different names",
                )
            row.store = 1 + list(first).index(tier.name)
            row.ranks_per_pool = MAX_ENTRIES
        found.append(replace(part, retention=replace(part.retention, tiers=tiers)))
    return found


def _check_retention(parts: Sequence[PoolServer], requests: RequestArrays) -> None:
    """Raise InputError where what a pool would keep cannot be counted."""
    shares = shares_prefixes([part.retention for part in parts], requests)
    for part in parts:
        if part.retention.tiers.size or (shares and part.retention.on_device):
            check_windows(part.setup, part.memory)
        if shares and part.retention.tiers.size and not part.retention.on_device:
            raise InputError(
                f"pool {part.pool.name} has kv_tiers and no prefix caching, which other pools have",
                "set enable_prefix_caching for all pools or for none, or leave out this pool's kv_tiers",
            )


def _tier_tokens(
    parts: Sequence[PoolServer], pools: Pools, began: NDArray[np.int64], loaded_blocks: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Tokens of each prompt that came from each lower tier of the pool in which it `began`, by the tier's name."""
    found: dict[str, NDArray[np.int64]] = {}
    for at, part in enumerate(parts):
        rows = loaded_blocks[pools.pools[at].first_tier : pools.pools[at].end_tier]
        for tier, blocks in zip(part.setup.engine.kv_tiers or (), rows, strict=False):
            tokens = np.where(began == at, blocks * part.memory.block_size, 0)
            found[tier.name] = found.get(tier.name, np.zeros_like(tokens)) + tokens
    return found


def _speculation(parts: Sequence[PoolServer]) -> state.Speculation | None:
    """What the pools that decode do; one that only prefills has no decode steps."""
    found = {speculation_of(part.setup) for part in parts if part.pool.role != "prefill"}
    if len(found) > 1:
        raise InputError(
            "the pools that decode speculate differently",
            "give deployment.engine.speculative instead of a pool's own",
        )
    return found.pop()


def _check_first_tokens(scenario: Scenario, parts: Sequence[PoolServer]) -> None:
    if scenario.deployment.transfer.first_token == "decode":
        for part in parts:
            if part.setup.engine.scheduler == "sglang":
                raise InputError(
                    f"pool {part.pool.name}: SGLang's decode side takes the first output from the prefill side",
                    "leave transfer.first_token out, or set it to prefill",
                )


def handoff_rules_of(scenario: Scenario, parts: Sequence[PoolServer]) -> HandoffRules:
    """How requests travel, in the loop's terms; the KV of a request is what one copy of the model caches."""
    transfer, first = transfer_of(scenario, parts), parts[0]
    assert transfer.latency_s is not None
    whole = replace(first.shard, parallelism=Parallelism())
    num_layers = first.setup.model.num_layers
    return HandoffRules(
        decode_router=state.ROUTERS.index(transfer.router),
        local_tokens=transfer.local_prefill_tokens,
        decode_samples_first=int(transfer.first_token == "decode"),
        decode_streams_first=int(transfer.first_token == "prefill" and transfer.streamed_by == "decode"),
        bytes_per_token=kv_bytes_per_token(whole, first.setup.max_model_len),
        bytes_per_request=state_bytes_per_request(whole, first.setup.max_model_len),
        latency_s=transfer.latency_s,
        tail_fraction=1.0 / num_layers if transfer.overlap else 1.0,
    )


def transfer_of(scenario: Scenario, parts: Sequence[PoolServer]) -> Transfer:
    """The deployment's transfer with nothing left open: what it leaves out is as the engine that decodes does, and as
    the calibration in force there says.
    """
    decodes = next((part.setup for part in parts if part.pool.role != "prefill"), parts[-1].setup)
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
    """Published bandwidth of the interfaces of one rank's devices, out of its node or inside it."""
    link = setup.node.scale_out if over == "scale_out" else setup.node.scale_up
    return 0.0 if link is None else link.bytes_per_s * setup.parallelism.tp * setup.parallelism.pp


def _on_network(scenario: Scenario, parts: Sequence[PoolServer], plans: list[PoolPlan]) -> list[PoolPlan]:
    """The plans with what the deployment's network carries from rank to rank, if it is less than their own links'.

    Pools lie on the network one after the other, their replicas too.
    """
    settings = scenario.deployment.network
    if settings is None or not any(plan.role == PREFILL for plan in plans):
        return plans
    if len({part.setup.node.name for part in parts}) > 1:
        raise InputError(
            "the pools stand in different nodes, and a network is made of one kind",
            "leave deployment.network out, or give the pools one device",
        )
    network = network_of(settings, parts[0].setup.node, scenario.deployment.num_devices)
    first, sides = 0, dict[bool, list[NDArray[np.int64]]]({True: [], False: []})
    for part, plan in zip(parts, plans, strict=True):
        width = part.setup.parallelism.tp * part.setup.parallelism.pp
        ranks = first + np.arange(plan.settings.num_replicas * plan.settings.ranks_per_replica * width)
        sides[plan.role == PREFILL].append(ranks.reshape(-1, width))
        first += ranks.size
    rates = [handoff_bytes_per_s(network, senders, receivers) for senders in sides[True] for receivers in sides[False]]
    slowest = min(rates)
    return [plan._replace(link_bytes_per_s=min(plan.link_bytes_per_s, slowest)) for plan in plans]


def _with_given_link(scenario: Scenario, parts: Sequence[PoolServer], plans: Sequence[PoolPlan]) -> list[PoolPlan]:
    """The plans with the bandwidth that transfers reach: what the scenario says, or a share of the links'."""
    transfer = transfer_of(scenario, parts)
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
    """Where every request began and where it ended, of how many replicas in all pools."""
    moved = ~np.isnan(pools.transfers.handed_s)
    per_replica = pools.pools.ranks_per_replica[pools.pool_of_replica]
    of_rank = np.repeat(np.arange(per_replica.size), per_replica)
    began = of_rank[np.where(moved, pools.transfers.prefill_rank, records["rank"])]
    ended = of_rank[np.where(moved, pools.transfers.decode_rank, records["rank"])]
    return began, ended, per_replica.size


def _request_table(
    records: NDArray[np.void],
    pools: Pools,
    engine: EngineSettings,
    requests: RequestArrays,
    loaded: Mapping[str, NDArray[np.int64]],
) -> Table:
    started, ended, num_replicas = replicas_of(records, pools)
    own = {name: records[name].copy() for name in ENGINE_COLUMNS}
    seen_s = engine.host.frontend_s(requests.input_tokens, streams(own, ended, num_replicas))
    found = pools.transfers["cached_tokens"]
    table = request_table(
        own,
        ended,
        seen_s,
        requests.num_warmup,
        tenant=requests.tenant,
        cached_tokens=found,
        loaded_tokens=sum(loaded.values(), np.zeros_like(found)),
    )
    columns = {name: np.array(pools.transfers[name]) for name in list(POOL_COLUMNS)[1:]}
    return table.with_columns({"prefill_replica": started, **columns}, POOL_COLUMNS)


def _steps_of(steps: Table, pools: Pools, position: int) -> Table:
    pool = pools.pools[position]
    return steps.where((steps["replica"] >= pool.first_replica) & (steps["replica"] < pool.end_replica))


def _pool_summary(
    scenario: Scenario, part: PoolServer, steps: Table, requests: Table, first_replica: int
) -> PoolSummary:
    pool, setup, pp = part.pool, part.setup, part.setup.parallelism.pp
    num_devices = pool.replicas * setup.parallelism.num_devices
    price = setup.device.price_usd_per_hour if pool.price_usd_per_hour is None else pool.price_usd_per_hour
    utilisation, fractions, stages = IDLE, {}, []
    own = steps.replaced(replica=steps["replica"] - first_replica)
    if len(own):
        num_blocks = part.memory.num_blocks * part.settings.ranks_per_replica
        utilisation = utilisation_of(requests, own, DeploymentSize(pool.replicas, num_devices, num_blocks, pp))
        fractions = time_fractions(part.lowered, own, part.settings)
        work = step_work(setup.device, part.shard, own)
        stages = stage_uses(work, own, pp, pool.replicas, span_of(requests))
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


def _provenance(parts: Sequence[PoolServer], steps: Sequence[Table]) -> list[dict[Any, float]]:
    """Shares of the device's time as `provenance` gives them, pools weighted by how long they were busy."""
    whole_s = sum(float(table["duration_s"].sum()) for table in steps)
    found: list[dict[Any, float]] = [{}, {}, {}]
    for part, table in zip(parts, steps, strict=True):
        if not len(table):
            continue
        busy_fraction = float(table["duration_s"].sum()) / whole_s
        shares: tuple[dict[Any, float], ...] = provenance(
            part.estimator, part.shard, table, part.settings.ranks_per_replica
        )
        for merged, own in zip(found, shares, strict=True):
            for name, fraction in own.items():
                merged[name] = merged.get(name, 0.0) + busy_fraction * fraction
    return [dict(sorted(merged.items(), key=lambda item: -item[1])) for merged in found]


def _resolved(scenario: Scenario, parts: Sequence[PoolServer]) -> Scenario:
    """`scenario` with what decided the result written out in every pool."""
    pools = []
    for part in parts:
        own = resolved_scenario(pool_scenario(scenario, part.pool), part.setup, part.memory).deployment
        pools.append(
            msgspec.structs.replace(
                part.pool, device=own.device, node=own.node, parallelism=own.parallelism, engine=own.engine
            )
        )
    deployment = msgspec.structs.replace(scenario.deployment, pools=tuple(pools), transfer=transfer_of(scenario, parts))
    return msgspec.structs.replace(scenario, precision=parts[0].setup.precision, deployment=deployment)
