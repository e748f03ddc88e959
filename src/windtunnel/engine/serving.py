"""Run a serving scenario: names -> setup -> arrays -> compiled loop -> records and summary."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.engine.fleet import (
    FleetRecord,
    FleetRun,
    comes_and_goes,
    fleet_plan,
    has_fleet,
    phase_table,
    start_fleet,
    stay_table,
    with_retries,
)
from windtunnel.engine.frontend import streams, usual_streams
from windtunnel.engine.intervals import intervals, remarks
from windtunnel.engine.policy import Policy, load_policy, policy_name
from windtunnel.engine.prefix_cache import cache_for, own_blocks, session_state, tier_tokens
from windtunnel.engine.router import Router, RouterAsker
from windtunnel.engine.speculation import drafter_of, speculation_of, with_drafter
from windtunnel.engine.walked import check_walked, most_batch_tokens, refuse_unknown, walk, walked_settings
from windtunnel.engine.work import stage_uses, total_work
from windtunnel.engine.workload import RequestArrays, generate
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.estimate.calibrated import CalibratedEstimator
from windtunnel.estimate.estimator import COVERAGES, Coverage, Estimator
from windtunnel.estimate.profile import profile_estimator
from windtunnel.estimate.regress import regression
from windtunnel.estimate.steps import LoweredSteps, lower_steps, price_step
from windtunnel.interop.aiconfigurator import measured_estimator
from windtunnel.kernels import state
from windtunnel.kernels.policies import in_use
from windtunnel.kernels.pools import Pools
from windtunnel.kernels.serve import ASK_ROUTER, DONE, MORE, OUT_OF_STEPS, STUCK, run
from windtunnel.kernels.walked_state import WalkedSettings
from windtunnel.metrics.checks import check_run
from windtunnel.metrics.fleet import fleet_summary, lost_steps
from windtunnel.metrics.power import PowerModel
from windtunnel.metrics.records import STEP_COLUMNS, Table, request_table
from windtunnel.metrics.summary import Summary, summarise
from windtunnel.metrics.tokens import rows_by_replica, with_token_times
from windtunnel.metrics.uncertainty import Interval
from windtunnel.ops.forward import Shard, StepBatch
from windtunnel.ops.memory import MemoryPlan, plan_memory
from windtunnel.spec.deployment import Deployment, EngineSettings
from windtunnel.spec.engine_defaults import ENGINE_SCHEDULERS, is_users_own
from windtunnel.spec.hardware import Device
from windtunnel.spec.scenario import Scenario, Setup, resolve
from windtunnel.spec.slo import Slo
from windtunnel.units import format_seconds

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
            f"{found.num_requests:,} requests, mean TTFT {format_seconds(found.ttft_s.mean)}{tpot}, "
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
        policy: a scheduler of one's own, instead of the engine's: see `engine.policy.Policy`.
        router: a router of one's own, instead of the deployment's: see `engine.router.Router`.

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
    if not isinstance(settings, WalkedSettings):
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
        num_replicas=num_replicas,
        num_stages=setup.parallelism.pp,
        num_devices=scenario.deployment.num_devices,
        num_blocks=memory.num_blocks * settings.ranks_per_replica,
        time_fractions=time_fractions(lowered, ended, settings),
        slo=scenario.slo,
        price_usd_per_hour=setup.device.price_usd_per_hour if price is None else price,
        tenants=limits_by_tenant(scenario, requests),
        # A verified step gives more tokens than it samples for.
        checks=check_run(table, steps, rows, setup.parallelism.pp, stays) if speculation is None else None,
        stages=stage_uses(
            total_work(setup.device, shard, ended),
            ended,
            setup.parallelism.pp,
            num_replicas if fleet_use is None else fleet_use.mean_replicas,
            span_of(table),
        ),
        power_w=power_model(scenario, setup),
        tier_tokens=None if cache is None else tier_tokens(setup, memory, cache),
        fleet=fleet_use,
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


@dataclass(frozen=True, eq=False)
class Server:
    """Equal replicas of an engine, ready to serve requests of known lengths at any load."""

    setup: Setup
    shard: Shard
    memory: MemoryPlan
    settings: state.Settings | WalkedSettings
    estimator: Estimator
    lowered: LoweredSteps
    speculation: state.Speculation | None
    policy: Policy | None


Lower = Callable[[Estimator, Device, Shard, EngineSettings, int, Shard | None], LoweredSteps]
"""`estimate.steps.lower_steps`, or what shares its work."""


def prepare(
    scenario: Scenario,
    setup: Setup,
    requests: RequestArrays,
    estimator: Estimator | None = None,
    lower: Lower = lower_steps,
    policy: Policy | None = None,
) -> Server:
    """Plan memory, price steps and check that every request can be served.

    Args:
        scenario: its replicas, router and seed count here.
        setup: what it resolves to.
        requests: their lengths count here, and in a closed loop the client's concurrency.
        estimator: as in `simulate`.
        lower: prices the steps.
        policy: as in `simulate`.

    Raises:
        InputError: the model does not fit, or a request can never be served.
    """
    setup = with_model_len(setup, requests)
    shard, deployment = shard_of(setup), scenario.deployment
    speculation, drafter = speculation_of(setup), drafter_of(setup, shard)
    memory = plan_memory(shard, setup.device, with_drafter(setup, drafter).engine, setup.max_model_len)
    settings_of = kernel_settings if setup.engine.scheduler in ENGINE_SCHEDULERS else walked_settings
    settings = settings_of(setup, memory, deployment.most_replicas, requests, deployment.router, scenario.seed)
    check_requests(requests, setup, memory)
    estimator = estimator or estimator_for(setup)
    reach = setup.engine
    if isinstance(settings, WalkedSettings):
        refuse_unknown(deployment, setup, requests)
        check_walked(settings, requests)
        policy = policy or users_policy(setup.engine)
        reach = msgspec.structs.replace(setup.engine, max_num_batched_tokens=most_batch_tokens(settings, requests))
    lowered = lower(estimator, setup.device, shard, reach, setup.max_model_len, drafter)
    return Server(setup, shard, memory, settings, estimator, lowered, speculation, policy)


def for_clients(settings: Any, setup: Setup, memory: MemoryPlan, requests: RequestArrays) -> Any:
    """`settings` for requests of the same lengths from another number of clients."""
    if requests.concurrency == settings.concurrency:
        return settings
    fresh: Any
    if isinstance(settings, WalkedSettings):
        fresh = walked_settings(setup, memory, settings.num_replicas, requests, "round_robin", settings.seed)
    else:
        fresh = kernel_settings(setup, memory, settings.num_replicas, requests)
    return settings._replace(concurrency=fresh.concurrency, frontend_s=fresh.frontend_s)


def serve(
    server: Server,
    requests: RequestArrays,
    cache: state.Cache | None = None,
    progress: Progress | None = None,
    give_up: GiveUp | None = None,
    fleet: FleetRun | None = None,
    router: Router | None = None,
) -> tuple[NDArray[np.void], Table, float]:
    """Serve requests of the lengths that `server` was prepared for.

    Args:
        server: its arrays stay as they are.
        requests: in order of sending.
        cache: of `cache_for`, changed in place.
        progress: called now and then.
        give_up: asked now and then whether to stop; the requests under way then have no end.
        fleet, router: see `run_loop`.

    Returns:
        What `run_loop` does.
    """
    if isinstance(server.settings, WalkedSettings):
        return run_walking(server.settings, server.lowered.cost, requests, server.policy, progress)

    settings, cost, speculation = server.settings, server.lowered.cost, server.speculation

    def run_with(cache: state.Cache | None) -> tuple[NDArray[np.void], Table, float]:
        return run_loop(settings, cost, requests, progress, cache, speculation, fleet, router, give_up=give_up)

    records, steps, engine_time_s = run_with(cache)
    if cache is None and fleet is None and records["num_preemptions"].any():
        # Where prompts share nothing a cache changes nothing until a preempted request finds its own blocks in it.
        own = own_blocks(server.setup, server.memory, settings, requests)
        if own is not None:
            records, steps, again_s = run_with(own)
            engine_time_s += again_s
    return records, steps, engine_time_s


def with_router(scenario: Scenario, router: Router) -> Scenario:
    """`scenario` with the name of a router that was given as a function."""
    deployment = msgspec.structs.replace(scenario.deployment, router=policy_name(router), router_limit=None)
    return msgspec.structs.replace(scenario, deployment=deployment)


def users_router(deployment: Deployment) -> Router | None:
    """The router that `deployment.router` names as `module:function`, or None."""
    return load_policy(deployment.router, "router") if is_users_own(deployment.router) else None


def span_of(requests: Table) -> float:
    """Seconds from the first sending to the last token, warm-up included."""
    return float(requests["finish_s"].max() - requests["arrival_s"].min())


def power_model(scenario: Scenario, setup: Setup) -> PowerModel | None:
    """What one device draws; None where nobody says."""
    busy_w = scenario.deployment.busy_w or setup.device.tdp_w
    return None if busy_w is None else PowerModel(scenario.deployment.idle_fraction * busy_w, busy_w)


def limits_by_tenant(scenario: Scenario, requests: RequestArrays) -> dict[str, Slo | None]:
    """Tenants' names in the order of their numbers, and their own limits."""
    own = {tenant.name: tenant.slo for tenant in scenario.workload.tenants}
    return {name: own.get(name) for name in requests.tenant_names}


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


def shard_of(setup: Setup) -> Shard:
    """The model as the setup deploys it."""
    return Shard(setup.model, setup.precision, setup.parallelism, setup.node.num_devices)


def estimator_for(setup: Setup) -> Estimator:
    """The estimator that knows most about the setup's device and engine: that of its own profile, where it has one."""
    if setup.profile is not None:
        fit = regression(setup.profile.estimator)
        return calibrated(profile_estimator(Path(setup.profile.folder), setup.device, setup.node, fit), setup)
    engine = setup.engine
    assert engine.version is not None
    graphs = bool(engine.max_cudagraph_capture_size)
    measured = measured_estimator(
        setup.device,
        setup.node,
        engine.name,
        engine.version,
        cuda_graphs=graphs,
        moe_backend=engine.moe_backend,
        fused_all_reduce=bool(engine.fused_all_reduce),
        attention_backend=engine.attention_backend,
    )
    return on_network(calibrated(measured, setup), setup)


def on_network(estimator: Estimator, setup: Setup) -> Estimator:
    """`estimator` with the replica's collectives between nodes on the setup's network, if it has one."""
    num_devices = setup.parallelism.num_devices
    if setup.network is None or num_devices <= setup.node.num_devices:
        return estimator
    # Imported late: few deployments have a network of their own, and its loops take a tenth of a second to import.
    from windtunnel.engine.cluster_network import OnNetwork, network_of

    network = network_of(setup.network, setup.node, num_devices)
    return OnNetwork(estimator, network, num_devices // setup.parallelism.pp)


def estimator_key(setup: Setup) -> tuple[Hashable, ...]:
    """Setups of equal keys have equal estimators, calibrations aside."""
    engine = setup.engine
    graphs = bool(engine.max_cudagraph_capture_size)
    backends = (engine.attention_backend, engine.moe_backend, bool(engine.fused_all_reduce))
    return (setup.device.name, setup.node.name, engine.name, engine.version, graphs, *backends)


def calibrated(estimator: Estimator, setup: Setup) -> Estimator:
    """`estimator` with the factors of the setup's calibration, if it has one."""
    if setup.calibration is None or not setup.calibration.factors:
        return estimator
    return CalibratedEstimator(estimator, setup.device, setup.calibration.factors)


def kernel_settings(
    setup: Setup,
    memory: MemoryPlan,
    num_replicas: int,
    requests: RequestArrays,
    router: str = "round_robin",
    seed: int = 0,
) -> state.Settings:
    """The engine's settings, and the router's, as the loop takes them."""
    engine = setup.engine
    assert engine.max_num_seqs is not None
    assert engine.max_num_batched_tokens is not None
    most = max(requests.arrival_s.size, 1)
    busy = usual_streams(engine.max_num_seqs, setup, num_replicas, requests.concurrency)
    return state.Settings(
        scheduler=state.SCHEDULERS.index(str(engine.scheduler)),
        num_replicas=num_replicas,
        ranks_per_replica=setup.parallelism.attention_dp,
        max_num_seqs=min(engine.max_num_seqs, most),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        long_prefill_token_threshold=engine.long_prefill_token_threshold or 0,
        chunked_prefill=int(bool(engine.enable_chunked_prefill)),
        max_prefill_tokens=engine.max_prefill_tokens or engine.max_num_batched_tokens,
        queue_order=0
        if engine.scheduling_policy == "lpm"
        else state.QUEUE_ORDERS.index(engine.scheduling_policy or "fcfs"),
        longest_prefix_first=int(engine.scheduling_policy == "lpm"),
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        blocks_per_request=memory.blocks_per_request,
        schedule_conservativeness=1.0 if engine.schedule_conservativeness is None else engine.schedule_conservativeness,
        receive_interval_steps=engine.receive_interval_steps or 1,
        concurrency=requests.concurrency,
        num_warmup=requests.num_warmup,
        frontend_s=float(engine.host.frontend_s(requests.input_tokens.mean(), busy)),
        num_stages=setup.parallelism.pp,
        batch_wait_steps=engine.batch_wait_timeout_iters or 0,
        batch_wait_tokens=round((engine.batch_wait_max_tokens_ratio or 0.0) * engine.max_num_batched_tokens),
        balance_steps=_balance(setup, engine.attention_dp_timeout_iters),
        balance_wait_steps=_balance(setup, engine.attention_dp_batching_wait_iters),
        router=router_code(router),
        seed=seed,
        window_tokens=memory.window_tokens,
        num_groups=memory.num_groups,
        num_window_groups=memory.num_window_groups,
        window_pool=int(memory.num_window_blocks > 0),
        num_window_blocks=memory.num_window_blocks,
    )


def _balance(setup: Setup, num_steps: int | None) -> int:
    """Only several ranks can be balanced; with pipeline stages they are not, which keep other counts for each batch."""
    shape = setup.parallelism
    return (num_steps or 0) if shape.attention_dp > 1 and shape.pp == 1 else 0


def router_code(router: str) -> int:
    """How the loop knows it."""
    name = "user" if is_users_own(router) else router
    return (*state.ROUTERS, *state.HOLDING_ROUTERS).index(name)


def run_loop(
    settings: state.Settings,
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
        give_up: see `serve`.

    Returns:
        `REQUEST` records in order of sending, the step table, and the loop's wall time in seconds.

    Raises:
        WindtunnelError: recorded step durations ran out before the requests did.
    """
    arrays = (
        state.new_ranks(settings),
        state.new_lanes(settings),
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
    asker = None
    if router is not None:
        assert replicas is not None
        asker = RouterAsker(router, settings, requests, records, arrays[0], replicas)
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
                assert asker is not None
                asker.route()
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
            f"{fleet.fleet.control[0].num_held} requests are held at the router and no replica will ever take them",
            "a router that holds a request back is asked again when another one ends",
        )
    assert status in (DONE, MORE), "a request can never be scheduled"
    if len(buffers) == 1:
        whole = np.asarray(buffers[0])
        return Table({name: whole[name] for name in STEP_COLUMNS}, STEP_COLUMNS), engine_time_s
    steps = Table({name: np.concatenate([b[name] for b in buffers]) for name in STEP_COLUMNS}, STEP_COLUMNS)
    return steps, engine_time_s


def users_policy(engine: EngineSettings) -> Policy | None:
    """The policy that `engine.scheduler` names as `module:function`, or None."""
    return load_policy(str(engine.scheduler)) if is_users_own(str(engine.scheduler)) else None


def run_walking(
    settings: WalkedSettings,
    cost: state.StepCost,
    requests: RequestArrays,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> tuple[NDArray[np.void], Table, float]:
    """Run the walking loop to its end; returns what `run_loop` does."""
    records = new_records(requests)
    walked = walk(settings, records, cost, sessions=session_state(requests), policy=policy, progress=progress)
    return walked.requests, walked.steps, walked.engine_time_s


def check_requests(requests: RequestArrays, setup: Setup, memory: MemoryPlan) -> None:
    """Raise InputError for the first request that the engine would refuse or could never hold."""
    whole = requests.input_tokens + requests.output_tokens
    longest = int(np.argmax(whole))
    if whole[longest] > setup.max_model_len:
        raise InputError(
            f"request {longest} has {requests.input_tokens[longest]:,} input and "
            f"{requests.output_tokens[longest]:,} output tokens; "
            f"{setup.model.name} accepts {setup.max_model_len:,} in all",
            "shorten the workload, or raise engine.max_model_len as far as the model goes",
        )
    drafted = 0 if setup.engine.speculative is None else setup.engine.speculative.num_draft_tokens
    blocks, window_blocks = memory.most_blocks(
        int(whole[longest] + drafted), setup.engine.max_num_batched_tokens or int(whole[longest])
    )
    if blocks > memory.num_blocks:
        raise InputError(
            f"request {longest} of {whole[longest]:,} tokens needs {blocks:,} blocks of KV cache; "
            f"{memory.num_blocks:,} of {memory.block_size} tokens fit beside the weights",
            "use more devices, a smaller KV format (kv_cache: fp8), or shorter requests",
        )
    if window_blocks > memory.num_window_blocks:
        raise InputError(
            f"request {longest} of {whole[longest]:,} tokens needs {window_blocks:,} blocks of the pool for windows of "
            f"{memory.window_tokens:,} tokens; it has {memory.num_window_blocks:,} of {memory.block_size}",
            "raise engine.window_pool_ratio, lower engine.max_num_batched_tokens, or set engine.window_kv to full",
        )
    if setup.engine.scheduler not in ENGINE_SCHEDULERS:
        return  # `check_walked` knows what each of these runs whole
    most = setup.engine.max_num_batched_tokens or 0
    # A preempted request computes its outputs again too, all but the last; TensorRT-LLM's policy never preempts.
    never_preempts = setup.engine.scheduler == "trtllm"
    prefilled = requests.input_tokens if never_preempts else whole - 1
    widest = int(np.argmax(prefilled))
    if not setup.engine.enable_chunked_prefill and prefilled[widest] > most:
        raise InputError(
            f"request {widest} has {requests.input_tokens[widest]:,} input tokens"
            f"{'' if never_preempts else f' ({prefilled[widest]:,} if it is preempted at its end)'}; "
            f"without chunked prefill a step takes {most:,}",
            "raise engine.max_num_batched_tokens, or set engine.enable_chunked_prefill",
        )


def time_fractions(lowered: LoweredSteps, steps: Table, settings: state.Settings | WalkedSettings) -> dict[str, float]:
    """Share of busy time by what bounds it; with several ranks per replica from their mean batch.

    Look-ups of the operators' shares are scaled so that a step's parts add up to its duration; attention counts as
    memory in decode and as compute in prefill.
    """
    cost = lowered.cost
    ranks = settings.ranks_per_replica
    decodes = -(-steps["decode_tokens"] // ranks)
    tokens = -(-(steps["decode_tokens"] + steps["prefill_tokens"]) // ranks)
    prefills = steps["prefill_tokens"] > 0
    step_s = steps["duration_s"] / steps["num_steps"]

    def by_kind(decode: NDArray[np.float64], mixed: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.where(prefills, mixed[tokens], decode[decodes]))

    unhidden_s = lowered.unhidden_s[np.minimum(-(-steps["num_sampled"] // ranks), lowered.unhidden_s.size - 1)]
    host_s = cost.host_step_s + cost.host_request_s * steps["num_running"] / ranks
    whole_s = by_kind(cost.decode_token_s, lowered.mixed_token_s)
    communication_s = by_kind(lowered.decode_communication_s, lowered.mixed_communication_s)
    compute_s = by_kind(lowered.decode_compute_s, lowered.mixed_compute_s)
    device_s = np.maximum(step_s - unhidden_s - (0.0 if cost.host_overlaps else host_s), 0.0)
    waits_for_host = host_s >= step_s if cost.host_overlaps else np.zeros(step_s.size, bool)
    launch_s = cost.launch_s[np.minimum(tokens, cost.launch_s.size - 1)]
    waits_for_host = waits_for_host | (prefills & (launch_s >= device_s))
    load_s = steps["load_s"]
    device_s = device_s - load_s
    attention_s = np.maximum(device_s - whole_s, 0.0)
    compute_s = compute_s + np.where(prefills, attention_s * _prefill_share(steps), 0.0)
    parts = {
        "compute": np.minimum(compute_s, device_s - communication_s),
        "communication": communication_s,
        "host": np.where(waits_for_host, step_s, step_s - device_s - load_s),
        "kv_loading": load_s,
    }
    parts = {name: np.where(waits_for_host & (name != "host"), 0.0, part) for name, part in parts.items()}
    total_s = float(steps["duration_s"].sum())
    sums = {name: float((part * steps["num_steps"]).sum() / total_s) for name, part in parts.items()}
    memory = max(1.0 - sum(sums.values()), 0.0)
    fractions = {
        "compute": sums["compute"],
        "memory": memory,
        "communication": sums["communication"],
        "host": sums["host"],
    }
    return fractions | ({"kv_loading": sums["kv_loading"]} if sums["kv_loading"] else {})


NUM_SAMPLED_STEPS = 16


def provenance(
    estimator: Estimator, shard: Shard, steps: Table, num_ranks: int
) -> tuple[dict[Coverage, float], dict[str, float], dict[str, float]]:
    """Where the operator times of a run come from: shares of device time by coverage, by table and by operator.

    Read off `NUM_SAMPLED_STEPS` steps of the run, spread evenly over its busy time, priced operator by operator. Each
    stands for an equal part of that time.
    """
    ends = np.cumsum(steps["duration_s"])
    moments = (np.arange(NUM_SAMPLED_STEPS) + 0.5) / NUM_SAMPLED_STEPS * ends[-1]
    rows, counts = np.unique(np.searchsorted(ends, moments), return_counts=True)
    by_coverage: dict[Coverage, float] = {}
    by_source: dict[str, float] = {}
    by_operator: dict[str, float] = {}
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        launches = price_step(estimator, shard, batch_of(steps, row, num_ranks))
        step_s = sum(priced.device_s for priced in launches)
        for priced in launches:
            estimate, share = priced.estimate, priced.device_s / step_s * count / NUM_SAMPLED_STEPS
            by_coverage[estimate.coverage] = by_coverage.get(estimate.coverage, 0.0) + share
            by_source[estimate.source] = by_source.get(estimate.source, 0.0) + share
            name = priced.launch.name
            by_operator[name] = by_operator.get(name, 0.0) + share
    sources, operators = (sorted(shares.items(), key=lambda item: -item[1]) for shares in (by_source, by_operator))
    return (
        {coverage: by_coverage[coverage] for coverage in COVERAGES if coverage in by_coverage},
        dict(sources),
        dict(operators),
    )


def batch_of(steps: Table, row: int, num_ranks: int = 1) -> StepBatch:
    """The first step of a row as a batch of one rank (their mean where several step together)."""
    decodes = -(-int(steps["decode_tokens"][row]) // num_ranks)
    context = float(steps["context_tokens"][row]) / num_ranks
    return StepBatch(
        decode_requests=decodes,
        decode_context_tokens=context / decodes + 1 if decodes else 0.0,
        prefill_tokens=-(-int(steps["prefill_tokens"][row]) // num_ranks),
        prefill_pairs=float(steps["prefill_pairs"][row]) / num_ranks,
        sampled=max(-(-int(steps["num_sampled"][row]) // num_ranks), 1),
    )


def _prefill_share(steps: Table) -> NDArray[np.float64]:
    """Of the attention in steps with prefill, the share that the prompts' query-key pairs are of all pairs."""
    pairs = steps["prefill_pairs"]
    seen = pairs + steps["context_tokens"]
    return np.asarray(np.divide(pairs, seen, out=np.zeros_like(pairs), where=seen > 0))


def resolved_scenario(scenario: Scenario, setup: Setup, memory: MemoryPlan) -> Scenario:
    """`scenario` with the defaults that decided the result written out; names of files stay as they were given."""
    engine = msgspec.structs.replace(setup.engine, max_model_len=setup.max_model_len, num_gpu_blocks=memory.num_blocks)
    node = scenario.deployment.node or setup.node.name
    deployment = msgspec.structs.replace(scenario.deployment, node=node, engine=engine)
    return msgspec.structs.replace(scenario, precision=setup.precision, deployment=deployment)


def with_model_len(setup: Setup, requests: RequestArrays) -> Setup:
    """The longest request decides how far the cost grids reach, unless the engine was told a limit."""
    if setup.engine.max_model_len is not None:
        return setup
    longest = int((requests.input_tokens + requests.output_tokens).max())
    return setup if longest > setup.max_model_len else replace(setup, max_model_len=longest)
