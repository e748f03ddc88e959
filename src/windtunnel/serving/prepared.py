"""A deployment ready to run: memory planned, steps priced, and every request checked.

A deployment is pools of replicas; one without pools is a pool of one kind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from windtunnel.errors import InputError
from windtunnel.model.shape import Shard
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.codes import BOTH, DECODE, PREFILL
from windtunnel.serving.custom.policy import Policy, load_function, policy_name
from windtunnel.serving.custom.queue_order import QueueOrder, queued, seconds_of, users_order
from windtunnel.serving.custom.router import Router
from windtunnel.serving.deployment import OWN_ROUTERS, Deployment, EngineSettings, KvTier, Pool, is_own_router
from windtunnel.serving.engines.contract import scheduler_of
from windtunnel.serving.engines.defaults import ENGINE_SCHEDULERS, OWN_SCHEDULERS, is_own_scheduler
from windtunnel.serving.run import BUILT_IN, UNWATCHED, Custom, LoopRun, Watch, prepare_loop
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.serving.setup import per_request, prefix_cache
from windtunnel.serving.setup.adapters import adapter_plan, refuse_with_adapters
from windtunnel.serving.setup.encoder import EncodePool, encode_pool_of, encoder_cache, encoder_prices
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.serving.setup.fleet_plan import FleetRun, fleet_plan, has_fleet, start_fleet
from windtunnel.serving.setup.frontend import template_wait_s
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.memory import MemoryPlan, plan_memory
from windtunnel.serving.setup.overlap import plan_two_sides
from windtunnel.serving.setup.speculation import drafter_of, speculation_of, with_drafter
from windtunnel.serving.setup.step_prices import DeployedModel, LoweredSteps, lower_steps
from windtunnel.serving.setup.transfers import embedding_link, handoff_rules_of, kv_copies, with_links
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import HandoffRules, PoolPlan
from windtunnel.serving.state.records import StepCost
from windtunnel.workload.generate.requests import RequestArrays

ROLES = {"both": BOTH, "prefill": PREFILL, "decode": DECODE}

Lower = Callable[[Estimator, DeployedModel], LoweredSteps]
"""`serving.setup.step_prices.lower_steps`, or a function that shares its work."""


@dataclass(frozen=True, eq=False)
class PreparedPool:
    """Equal replicas of an engine, ready to serve requests of known lengths at any load."""

    pool: Pool
    setup: Setup
    shard: Shard
    memory: MemoryPlan
    estimator: Estimator
    lowered: LoweredSteps
    plan: PoolPlan
    retention: prefix_cache.KvRetention
    policy: Policy | None
    """The user's scheduler; None for a built-in one."""

    @property
    def settings(self) -> state.KernelSettings:
        """How the pool forms batches, as the loop takes it."""
        return self.plan.settings

    @property
    def countable(self) -> prefix_cache.KvRetention:
        """`retention`, without prefix caches where these cannot count the groups of layers."""
        return replace(self.retention, on_device=self.retention.on_device and self.memory.num_full_groups == 1)


@dataclass(frozen=True, eq=False)
class PreparedDeployment:
    """All pools of a deployment, ready to serve requests of known lengths at any load."""

    scenario: Scenario
    pools: list[PreparedPool]
    handoff_rules: HandoffRules | None = None
    """None where no KV goes from pool to pool."""
    encoder: EncodePool | None = None
    """The pool that encodes images for the others; None where they do it themselves."""
    queue_order: QueueOrder | None = None
    """The user's order of waiting requests; None: a built-in one."""

    def for_clients(self, requests: RequestArrays) -> "PreparedDeployment":
        """Return the deployment for requests of the same lengths from another number of clients."""
        if requests.concurrency == self.pools[0].settings.concurrency:
            return self

        def adapted(pool: PreparedPool) -> PreparedPool:
            fresh = kernel_settings(pool.setup, pool.memory, pool.settings.num_replicas, requests)
            settings = pool.settings._replace(concurrency=fresh.concurrency, frontend_s=fresh.frontend_s)
            return replace(pool, plan=pool.plan._replace(settings=settings))

        return replace(self, pools=[adapted(pool) for pool in self.pools])

    def with_transfers(self, latency_s: float, efficiency: float) -> "PreparedDeployment":
        """Return the deployment with another latency of KV transfers, and a share `efficiency` of its links."""
        assert self.handoff_rules is not None
        pools = [
            replace(pool, plan=pool.plan._replace(link_bytes_per_s=pool.plan.link_bytes_per_s * efficiency))
            for pool in self.pools
        ]
        return replace(self, pools=pools, handoff_rules=self.handoff_rules._replace(latency_s=latency_s))

    def without_shared_reads(self) -> "PreparedDeployment":
        """Return the deployment whose steps read KV that requests share once for each of them."""
        plans = [pool.plan._replace(cost=_without_shared_reads(pool.plan.cost)) for pool in self.pools]
        return replace(self, pools=[replace(pool, plan=plan) for pool, plan in zip(self.pools, plans, strict=True)])

    def start_fleet(self, num_requests: int, seed: int | None = None) -> FleetRun | None:
        """Return the replicas that come and go, or the router that holds requests back, at the beginning of a run.

        None where all replicas are there all the time and take every request at once. `seed` draws faults in place of
        the scenario's.
        """
        if not has_fleet(self.scenario.deployment):
            return None
        takers = [pool.settings for pool in self.pools if pool.plan.role != DECODE]
        most_outstanding = min(settings.max_num_seqs * settings.ranks_per_replica for settings in takers)
        seed = self.scenario.seed if seed is None else seed
        plan = fleet_plan(self.scenario.deployment, most_outstanding, seed)
        return start_fleet(plan, [pool.settings.num_replicas for pool in self.pools], num_requests)

    def serve(
        self,
        requests: RequestArrays,
        fleet: FleetRun | None = None,
        router: Router | None = None,
        watch: Watch = UNWATCHED,
    ) -> LoopRun:
        """Serve requests of the lengths that the deployment was prepared for; `fleet` is of `start_fleet`."""
        if self.encoder is not None:
            encoded = self.encoder.run(requests)
            run = replace(self, encoder=None).serve(
                replace(requests, media=None, ready_s=encoded.ready_s), fleet, router, watch
            )
            sent_s = run.requests["arrival_s"] if fleet is None else fleet.fleet.sent_s
            sent_s[:] = requests.arrival_s
            return replace(run, encode=encoded)
        if self.queue_order is not None:
            requests = replace(requests, ttft_limit_s=seconds_of(self.queue_order, queued(requests)))
        takers = sum(pool.settings.num_replicas for pool in self.pools if pool.plan.role != DECODE)
        wait_s = template_wait_s(self.pools[0].setup, requests, takers)
        if wait_s is not None:
            requests = replace(requests, arrival_s=requests.arrival_s + wait_s)
        plans, policies = [pool.plan for pool in self.pools], [pool.policy for pool in self.pools]
        custom = BUILT_IN if router is None and not any(policies) else Custom(router, policies)

        def run_with(kept: Sequence[prefix_cache.KvRetention]) -> LoopRun:
            caches = [
                prefix_cache.caches_of(plan.settings, own, requests) for plan, own in zip(plans, kept, strict=False)
            ]
            run = prepare_loop(plans, requests, caches, self.handoff_rules, fleet).run(custom, watch)
            if wait_s is not None:
                sent_s = run.requests["arrival_s"] if fleet is None else fleet.fleet.sent_s
                sent_s -= wait_s
            return run

        retention = [pool.retention for pool in self.pools]
        if prefix_cache.shares_prefixes(retention, requests):
            return run_with(retention)
        # Lower tiers still take the KV blocks of preempted requests: preemption by swap.
        requests = replace(requests, prefixes=None)
        countable = [pool.countable for pool in self.pools]
        if any(kept.tiers.size for kept in countable):
            return run_with(countable)
        first = run_with(())
        if custom is BUILT_IN and any(kept.on_device for kept in countable) and first.requests["num_preemptions"].any():
            # A cache changes nothing until a preempted request finds its own blocks in it. A user's function may
            # remember its calls, so it does not run twice.
            if fleet is not None:
                fleet.begin_again()
            again = run_with(countable)
            return replace(again, cache=None, engine_time_s=first.engine_time_s + again.engine_time_s)
        return first


def prepare(
    scenario: Scenario,
    requests: RequestArrays,
    setups: Sequence[Setup] | None = None,
    allow_download: bool = False,
    estimator_of: Callable[[Setup], Estimator] = estimator_for,
    lower: Lower = lower_steps,
    policy: Policy | None = None,
) -> PreparedDeployment:
    """Plan memory, price steps and check that every request can be served, in every pool of a deployment. InputError
    where a model does not fit, a pool cannot serve the requests, or the pools do not go together.

    Args:
        requests: give lengths, and in a closed loop the client's concurrency.
        setups: what the pools resolve to, where that is known already; None resolves them.
        allow_download: look models up on the Hugging Face hub too.
        policy: the user's scheduler, in place of that of every pool.
    """
    groups = scenario.deployment.groups
    if setups is None:
        setups = [resolve(pool_scenario(scenario, pool), allow_download) for pool in groups]
    pools = []
    for pool, setup in zip(groups, setups, strict=True):
        if policy is not None:
            setup = replace(setup, engine=msgspec.structs.replace(setup.engine, scheduler=policy_name(policy)))
        setup = with_model_len(setup, requests)
        pools.append(_prepared(scenario, pool, setup, requests, estimator_of, lower, policy))
    _check_retention(pools, requests)
    order = users_order(pool.setup.engine for pool in pools)
    if not scenario.deployment.pools:
        return PreparedDeployment(scenario, pools, queue_order=order)
    _check_first_tokens(scenario, pools)
    pools = _with_stores(pools)
    if scenario.deployment.transfer.router == "prefix_affinity":
        raise InputError(
            "transfer.router is prefix_affinity, which chooses where a prompt is computed, not where it decodes",
            "set deployment.router to prefix_affinity, and transfer.router to another one, such as least_kv",
        )
    setups = [pool.setup for pool in pools]
    plans = with_links(scenario, setups, [pool.plan for pool in pools])
    pools = [replace(pool, plan=plan) for pool, plan in zip(pools, plans, strict=True)]
    rules = handoff_rules_of(scenario, setups, pools[0].shard)
    encoder = _encoder_of(scenario, requests, setups, allow_download, estimator_of)
    return PreparedDeployment(scenario, pools, rules, encoder, order)


def _encoder_of(
    scenario: Scenario,
    requests: RequestArrays,
    setups: Sequence[Setup],
    allow_download: bool,
    estimator_of: Callable[[Setup], Estimator],
) -> EncodePool | None:
    """Prepare the pool that encodes images for those of `setups`; None where there is none."""
    pool = scenario.deployment.encoder
    if pool is None:
        return None
    setup = resolve(pool_scenario(scenario, pool), allow_download)
    shard, link = shard_of(setup), embedding_link(scenario, setup, setups)
    prices = encoder_prices(estimator_of(setup), shard, setup.engine, scenario.workload, requests)
    return encode_pool_of(scenario, pool, (setup, shard), requests, prices, link)


def _prepared(
    scenario: Scenario,
    pool: Pool,
    setup: Setup,
    requests: RequestArrays,
    estimator_of: Callable[[Setup], Estimator],
    lower: Lower,
    policy: Policy | None,
) -> PreparedPool:
    """Prepare one pool; errors name it."""
    shard = shard_of(setup)
    drafter = drafter_of(setup, shard)
    try:
        speculation = speculation_of(setup)
        planned = plan_memory if setup.parallelism.ffn is None else plan_two_sides
        memory = planned(shard, setup.device, with_drafter(setup, drafter).engine, setup.max_model_len)
        settings = kernel_settings(
            setup, memory, pool.most_replicas, requests, scenario.deployment.router, scenario.seed
        )
        if scenario.deployment.encoder is None:
            given = pool_scenario(scenario, pool).deployment.engine
            settings = settings._replace(**encoder_cache(scenario, setup, given, requests))
        check_served(scenario, pool, setup, memory, requests)
        refuse_with_adapters(scenario.deployment, pool, setup, requests)
        retention = prefix_cache.KvRetention(
            bool(setup.engine.enable_prefix_caching),
            prefix_cache.kv_tiers(setup, memory, settings),
            bool(setup.engine.kv_load_overlaps),
        )
        reach = setup.engine
        if per_request.schedules_per_request(setup):
            given = pool_scenario(scenario, pool).deployment.engine
            per_request.refuse_features(given, setup, memory, requests, _transfers_kv(scenario.deployment, pool))
            settings = per_request.per_request_settings(setup, memory, settings, requests)
            per_request.check_per_request(settings, requests)
            policy = policy or users_policy(setup.engine)
            most_tokens = per_request.most_batch_tokens(settings, requests)
            reach = msgspec.structs.replace(setup.engine, max_num_batched_tokens=most_tokens)
            if policy is None:
                retention = prefix_cache.KvRetention(False)
    except InputError as error:
        if not pool.name:
            raise
        raise InputError(f"pool {pool.name}: {error.message}", error.hint) from None
    estimator = estimator_of(setup)
    lowered = lower(estimator, DeployedModel(setup.device, shard, reach, setup.max_model_len, drafter))
    cost = lowered.cost
    if requests.media is not None and scenario.deployment.encoder is None:
        prices = encoder_prices(estimator, shard, setup.engine, scenario.workload, requests)
        cost = cost._replace(encode_s=prices)
    plan = PoolPlan(
        settings,
        _without_shared_reads(cost) if _transfers_kv(scenario.deployment, pool) else cost,
        # A pool that only prefills has no decode steps.
        None if pool.role == "prefill" else speculation,
        ROLES[pool.role],
        kv_copies=kv_copies(setup, shard),
        adapters=adapter_plan(estimator, shard, setup, settings, requests),
    )
    return PreparedPool(pool, setup, shard, memory, estimator, lowered, plan, retention, policy)


def _without_shared_reads(cost: StepCost) -> StepCost:
    """Return costs of steps that read KV once for each request: in pools, it may still be on its way for some."""
    return cost._replace(repeated_share=1.0)


def _transfers_kv(deployment: Deployment, pool: Pool) -> bool:
    """Whether a pool sends KV caches to others or receives them: pools of both roles do where none only decodes."""
    roles = {other.role for other in deployment.groups}
    return pool.role != "both" or ("prefill" in roles and "decode" not in roles)


def check_served(scenario: Scenario, pool: Pool, setup: Setup, memory: MemoryPlan, requests: RequestArrays) -> None:
    """Raise InputError for the first request that a pool could never hold or compute; an encoder makes no text."""
    if setup.model.is_encoder and not scenario.workload.is_pooling:
        raise InputError(
            f"{setup.model.name} is an encoder, which makes vectors and scores and no text",
            "set workload.task to embed or rerank, and leave output_tokens out",
        )
    if scenario.workload.is_pooling and pool.role in ("prefill", "decode"):
        raise InputError(
            f"role is {pool.role}, but embeddings and scores end with their prefill: nothing is handed off",
            "give every pool the role both, or set workload.task to generate",
        )
    served, computes_prompts = requests, True
    if pool.role == "prefill":
        served = replace(requests, output_tokens=np.ones_like(requests.output_tokens))
    elif pool.role == "decode" and scenario.deployment.transfer.local_prefill_tokens == 0:
        # Preempted ones are computed again; TensorRT-LLM's policy never preempts.
        computes_prompts = not scheduler_of(setup.engine).never_preempts
    check_requests(served, setup, memory, computes_prompts)


def _with_stores(pools: Sequence[PreparedPool]) -> list[PreparedPool]:
    """Give pools that name the same tier of the whole deployment one store for it."""
    first: dict[str, tuple[PreparedPool, KvTier]] = {}
    with_stores = []
    for pool in pools:
        tiers = pool.retention.tiers.copy()
        for row, tier in zip(tiers, pool.setup.engine.kv_tiers or (), strict=True):
            if tier.shared_by != "deployment":
                continue
            other, same = first.setdefault(tier.name, (pool, tier))
            if other.memory.block_size != pool.memory.block_size or same.capacity_bytes != tier.capacity_bytes:
                raise InputError(
                    f"pools {other.pool.name} and {pool.pool.name} share the KV tier {tier.name!r}, but its size or "
                    "that of their blocks differs",
                    "give both one capacity_bytes and one block_size, or tiers of different names",
                )
            row.store = 1 + list(first).index(tier.name)
            row.ranks_per_pool = prefix_cache.MAX_ENTRIES
        with_stores.append(replace(pool, retention=replace(pool.retention, tiers=tiers)))
    return with_stores


def _check_retention(pools: Sequence[PreparedPool], requests: RequestArrays) -> None:
    """Raise InputError where what a pool would keep cannot be counted."""
    shares = prefix_cache.shares_prefixes([pool.retention for pool in pools], requests)
    for pool in pools:
        if pool.retention.tiers.size or (shares and pool.retention.on_device):
            prefix_cache.check_windows(pool.setup, pool.memory)
        if shares and pool.retention.tiers.size and not pool.retention.on_device:
            raise InputError(
                f"pool {pool.pool.name} has kv_tiers and no prefix caching, which other pools have",
                "set enable_prefix_caching for all pools or for none, or leave out this pool's kv_tiers",
            )


def _check_first_tokens(scenario: Scenario, pools: Sequence[PreparedPool]) -> None:
    """Raise InputError where the decode side would compute the first output, and its engine does not."""
    if scenario.deployment.transfer.first_token == "decode":
        for pool in pools:
            if not scheduler_of(pool.setup.engine).decode_computes_first_token:
                raise InputError(
                    f"pool {pool.pool.name}: SGLang's decode side takes the first output from the prefill side",
                    "leave transfer.first_token out, or set it to prefill",
                )


def users_router(deployment: Deployment) -> Router | None:
    """Import the router in Python that `deployment.router` names; None for a built-in one."""
    return load_function(deployment.router, OWN_ROUTERS) if is_own_router(deployment.router) else None


def users_policy(engine: EngineSettings) -> Policy | None:
    """Import the policy in Python that `engine.scheduler` names; None for a built-in one."""
    scheduler = str(engine.scheduler)
    return load_function(scheduler, OWN_SCHEDULERS) if is_own_scheduler(scheduler) else None


def check_requests(requests: RequestArrays, setup: Setup, memory: MemoryPlan, computes_prompts: bool = True) -> None:
    """Raise InputError for the first request that the engine would refuse or could never hold."""
    lengths = requests.input_tokens + requests.output_tokens
    longest = int(np.argmax(lengths))
    length = int(lengths[longest])
    if setup.model.is_pooled and length - 1 > setup.max_model_len:
        raise InputError(
            f"request {longest} has {requests.input_tokens[longest]:,} tokens; {setup.model.name} accepts "
            f"{setup.max_model_len:,}",
            "shorten the workload; a server refuses such a prompt unless it is asked to truncate it",
        )
    if length - setup.model.is_pooled > setup.max_model_len:
        raise InputError(
            f"request {longest} has {requests.input_tokens[longest]:,} input and "
            f"{requests.output_tokens[longest]:,} output tokens; "
            f"{setup.model.name} accepts {setup.max_model_len:,} in all",
            f"shorten the workload (a trace: workload.trace.max_tokens={setup.max_model_len}), or set "
            f"deployment.engine.max_model_len={length}; the result says where the engine needs a switch for that",
        )
    drafted = 0 if setup.engine.speculative is None else setup.engine.speculative.num_draft_tokens
    blocks, window_blocks = memory.most_blocks(length + drafted, setup.engine.max_num_batched_tokens or length)
    if blocks > memory.num_blocks:
        raise InputError(
            f"request {longest} of {length:,} tokens needs {blocks:,} blocks of KV cache; "
            f"{memory.num_blocks:,} of {memory.block_size} tokens fit beside the weights",
            "use more devices, a smaller KV format (kv_cache: fp8), or shorter requests",
        )
    if window_blocks > memory.num_window_blocks:
        raise InputError(
            f"request {longest} of {length:,} tokens needs {window_blocks:,} blocks of the pool for windows of "
            f"{memory.window_tokens:,} tokens; it has {memory.num_window_blocks:,} of {memory.block_size}",
            "raise engine.window_pool_ratio, lower engine.max_num_batched_tokens, or set engine.window_kv to full",
        )
    # `check_per_request` checks the prompts of schedulers that are not an engine's own.
    if computes_prompts and setup.engine.scheduler in ENGINE_SCHEDULERS:
        _check_prompts(requests, setup)


def _check_prompts(requests: RequestArrays, setup: Setup) -> None:
    """Raise InputError for the longest prompt if a step without chunked prefill cannot compute it."""
    budget = setup.engine.max_num_batched_tokens or 0
    # A preempted request computes its outputs again too, all but the last; TensorRT-LLM's policy never preempts.
    never_preempts = scheduler_of(setup.engine).never_preempts
    prefilled = requests.input_tokens if never_preempts else requests.input_tokens + requests.output_tokens - 1
    widest = int(np.argmax(prefilled))
    if not setup.engine.enable_chunked_prefill and prefilled[widest] > budget:
        raise InputError(
            f"request {widest} has {requests.input_tokens[widest]:,} input tokens"
            f"{'' if never_preempts else f' ({prefilled[widest]:,} if it is preempted at its end)'}; "
            f"without chunked prefill a step takes {budget:,}",
            "raise engine.max_num_batched_tokens, or set engine.enable_chunked_prefill",
        )


def with_model_len(setup: Setup, requests: RequestArrays) -> Setup:
    """Let the longest request decide how far the cost grids reach, unless the engine has a limit."""
    if setup.engine.max_model_len is not None:
        return setup
    longest = int((requests.input_tokens + requests.output_tokens).max())
    return setup if longest > setup.max_model_len else replace(setup, max_model_len=longest)
