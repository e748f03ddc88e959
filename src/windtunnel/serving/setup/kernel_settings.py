"""Turn a setup, its memory and its requests into the settings of the compiled loop."""

from windtunnel.schema import fields_of
from windtunnel.serving import codes
from windtunnel.serving.deployment import is_own_order, is_own_router
from windtunnel.serving.engines.defaults import is_own_scheduler
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.frontend import usual_frontend_s
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.serving.state import records as state
from windtunnel.workload.generate.requests import RequestArrays


def kernel_settings(
    setup: Setup,
    memory: MemoryPlan,
    num_replicas: int,
    requests: RequestArrays,
    router: str = "round_robin",
    seed: int = 0,
) -> state.KernelSettings:
    """Return the engine's settings, and the router's, as the loop takes them."""
    engine = setup.engine
    assert engine.max_num_seqs is not None
    assert engine.max_num_batched_tokens is not None
    is_lpm = engine.scheduling_policy == codes.LONGEST_PREFIX_MATCH
    return state.KernelSettings(
        scheduler=scheduler_code(str(engine.scheduler)),
        num_replicas=num_replicas,
        ranks_per_replica=setup.parallelism.attention_dp,
        max_num_seqs=max(min(engine.max_num_seqs, requests.arrival_s.size), 1),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        long_prefill_token_threshold=engine.long_prefill_token_threshold or 0,
        chunked_prefill=int(bool(engine.enable_chunked_prefill)),
        reserves_prompt=int(bool(engine.scheduler_reserve_full_isl)),
        max_prefill_tokens=engine.max_prefill_tokens or engine.max_num_batched_tokens,
        queue_order=order_code("fcfs" if is_lpm else engine.scheduling_policy or "fcfs"),
        # Without a radix cache SGLang falls back to fcfs (0.5 `SchedulePolicy._validate_and_adjust_policy`).
        longest_prefix_first=int(is_lpm and bool(engine.enable_prefix_caching)),
        schedule_conservativeness=1.0 if engine.schedule_conservativeness is None else engine.schedule_conservativeness,
        receive_interval_steps=engine.receive_interval_steps or 1,
        concurrency=requests.concurrency,
        num_warmup=requests.num_warmup,
        frontend_s=usual_frontend_s(setup, num_replicas, requests),
        num_stages=setup.parallelism.pp,
        batch_wait_steps=engine.batch_wait_timeout_iters or 0,
        batch_wait_tokens=round((engine.batch_wait_max_tokens_ratio or 0.0) * engine.max_num_batched_tokens),
        balance_steps=_balance(setup, engine.attention_dp_timeout_iters),
        balance_wait_steps=_balance(setup, engine.attention_dp_batching_wait_iters),
        router=router_code(router),
        seed=seed,
        window_pool=int(memory.num_window_blocks > 0),
        **fields_of(memory, "block_size", "num_blocks", "blocks_per_request", "window_tokens"),
        **fields_of(memory, "num_groups", "num_window_groups", "num_window_blocks"),
    )


def _balance(setup: Setup, num_steps: int | None) -> int:
    """Return `num_steps`; 0 for one rank, which needs no balance, and with pipeline stages, which have none."""
    shape = setup.parallelism
    return (num_steps or 0) if shape.attention_dp > 1 and shape.pp == 1 else 0


def scheduler_code(scheduler: str) -> int:
    """Return the loop's code of a scheduler."""
    name = "user" if is_own_scheduler(scheduler) else scheduler
    return (*codes.SCHEDULERS, *codes.PER_REQUEST_SCHEDULERS).index(name)


def order_code(order: str) -> int:
    """Return the loop's code of a queue order; one in Python gives each request a deadline."""
    return codes.DEADLINE if is_own_order(order) else codes.QUEUE_ORDERS.index(order)


def router_code(router: str) -> int:
    """Return the loop's code of a router."""
    name = "user" if is_own_router(router) else router
    return (*codes.ROUTERS, *codes.HOLDING_ROUTERS).index(name)
