"""Prepare equal replicas: plan memory, price steps, check requests; then serve any load."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.metrics.records import Table
from windtunnel.model.forward import Shard
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.custom.policy import Policy, load_policy
from windtunnel.serving.custom.router import Router
from windtunnel.serving.deployment import Deployment, EngineSettings
from windtunnel.serving.engines.defaults import ENGINE_SCHEDULERS, is_users_own
from windtunnel.serving.runners.batched import GiveUp, Progress, Watch, new_records, run_loop
from windtunnel.serving.runners.per_request import (
    check_per_request,
    most_batch_tokens,
    per_request_settings,
    refuse_unknown,
    schedule_per_request,
)
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.serving.setup.fleet_plan import FleetRun
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.memory import MemoryPlan, plan_memory
from windtunnel.serving.setup.prefix_cache import own_blocks, session_state
from windtunnel.serving.setup.speculation import drafter_of, speculation_of, with_drafter
from windtunnel.serving.setup.step_prices import LoweredSteps, lower_steps
from windtunnel.serving.state import records as state
from windtunnel.serving.state.per_request import PerRequestSettings
from windtunnel.workload.generate.requests import RequestArrays


@dataclass(frozen=True, eq=False)
class Server:
    """Equal replicas of an engine, ready to serve requests of known lengths at any load."""

    setup: Setup
    shard: Shard
    memory: MemoryPlan
    settings: state.KernelSettings | PerRequestSettings
    estimator: Estimator
    lowered: LoweredSteps
    speculation: state.Speculation | None
    policy: Policy | None


Lower = Callable[[Estimator, Device, Shard, EngineSettings, int, Shard | None], LoweredSteps]
"""`serving.setup.step_prices.lower_steps`, or a function that shares its work."""


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
        scenario: gives replicas, router and seed.
        setup: the scenario resolved.
        requests: give lengths, and in a closed loop the client's concurrency.
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
    settings_of = kernel_settings if setup.engine.scheduler in ENGINE_SCHEDULERS else per_request_settings
    settings = settings_of(setup, memory, deployment.most_replicas, requests, deployment.router, scenario.seed)
    check_requests(requests, setup, memory)
    estimator = estimator or estimator_for(setup)
    reach = setup.engine
    if isinstance(settings, PerRequestSettings):
        refuse_unknown(deployment, setup, requests)
        check_per_request(settings, requests)
        policy = policy or users_policy(setup.engine)
        reach = msgspec.structs.replace(setup.engine, max_num_batched_tokens=most_batch_tokens(settings, requests))
    lowered = lower(estimator, setup.device, shard, reach, setup.max_model_len, drafter)
    return Server(setup, shard, memory, settings, estimator, lowered, speculation, policy)


def for_clients(settings: Any, setup: Setup, memory: MemoryPlan, requests: RequestArrays) -> Any:
    """Return `settings` for requests of the same lengths from another number of clients."""
    if requests.concurrency == settings.concurrency:
        return settings
    fresh: Any
    if isinstance(settings, PerRequestSettings):
        fresh = per_request_settings(setup, memory, settings.num_replicas, requests, "round_robin", settings.seed)
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
        give_up: called now and then; True stops the run, and requests under way then have no end.
        fleet, router: see `serving.runners.batched.run_loop`.

    Returns:
        As `serving.runners.batched.run_loop`.
    """
    if isinstance(server.settings, PerRequestSettings):
        run = schedule_per_request(
            server.settings,
            new_records(requests),
            server.lowered.cost,
            sessions=session_state(requests),
            policy=server.policy,
            progress=progress,
        )
        return run.requests, run.steps, run.engine_time_s

    settings, cost, speculation = server.settings, server.lowered.cost, server.speculation

    def run_with(cache: state.Cache | None) -> tuple[NDArray[np.void], Table, float]:
        return run_loop(settings, cost, requests, cache, speculation, fleet, router, Watch(progress, give_up))

    records, steps, engine_time_s = run_with(cache)
    if cache is None and router is None and records["num_preemptions"].any():
        # Where prompts share nothing a cache changes nothing until a preempted request finds its own blocks in it. A
        # user's router may remember its calls, so it does not run twice.
        cache = own_blocks(server.setup, server.memory, settings, requests)
        if cache is not None:
            if fleet is not None:
                fleet.begin_again()
            records, steps, again_s = run_with(cache)
            engine_time_s += again_s
    return records, steps, engine_time_s


def users_router(deployment: Deployment) -> Router | None:
    """Import the router that `deployment.router` names as `module:function`; None for a built-in one."""
    return load_policy(deployment.router, "router") if is_users_own(deployment.router) else None


def users_policy(engine: EngineSettings) -> Policy | None:
    """Import the policy that `engine.scheduler` names as `module:function`; None for a built-in one."""
    return load_policy(str(engine.scheduler)) if is_users_own(str(engine.scheduler)) else None


def check_requests(requests: RequestArrays, setup: Setup, memory: MemoryPlan, computes_prompts: bool = True) -> None:
    """Raise InputError for the first request that the engine would refuse or could never hold."""
    lengths = requests.input_tokens + requests.output_tokens
    longest = int(np.argmax(lengths))
    length = int(lengths[longest])
    if length > setup.max_model_len:
        raise InputError(
            f"request {longest} has {requests.input_tokens[longest]:,} input and "
            f"{requests.output_tokens[longest]:,} output tokens; "
            f"{setup.model.name} accepts {setup.max_model_len:,} in all",
            "shorten the workload, or raise engine.max_model_len as far as the model goes",
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
    never_preempts = setup.engine.scheduler == "trtllm"
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
