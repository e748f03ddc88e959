"""How fast the loop is with prefix caches: multi-turn chats, a shared system prompt, a trace with block hashes.

Every run is checked against the work it stands for: all requests finished, and cached and computed prompt tokens add
up. The last column is the same requests without a cache. Seconds are of CPU time: other work on the machine does not
count.
"""

import time
from typing import Any

import numpy as np

import windtunnel as wt
from windtunnel.serving.run import prepare_loop
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.serving.setup.kernel_settings import kernel_settings
from windtunnel.serving.setup.memory import plan_memory
from windtunnel.serving.setup.prefix_cache import prefix_cache
from windtunnel.serving.setup.step_prices import DeployedModel, lower_steps
from windtunnel.serving.state.pools import PoolPlan
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

MODEL: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "device": "h100_sxm", "quant": "fp8"}
REPEATS = 3
MAX_MODEL_LEN = 131_072


def chats(num_sessions: int, num_turns: int, clients: int) -> RequestArrays:
    """Sessions of `num_turns` turns behind one of 16 system prompts, `clients` under way; lengths as in chats."""
    n, rng = num_sessions * num_turns, np.random.default_rng(0)
    turn, session = np.arange(n) % num_turns, np.arange(n) // num_turns
    texts, outputs = rng.integers(20, 400, n), rng.integers(50, 400, n)
    roots = 16
    own = roots + 2 * np.arange(n)
    parents = np.concatenate(
        [np.full(roots, -1), np.stack([np.where(turn > 0, own - 1, session % roots), own], 1).ravel()]
    )
    before = np.cumsum(texts + outputs) - texts - outputs
    before -= np.repeat(before[::num_turns], num_turns)
    return RequestArrays(
        arrival_s=np.zeros(n),
        input_tokens=500 + before + texts,
        output_tokens=outputs,
        priority=np.zeros(n, np.int64),
        concurrency=clients,
        previous=np.where(turn > 0, np.arange(n) - 1, -1),
        prefixes=PrefixArrays(
            parents, np.concatenate([np.full(roots, 500), np.stack([texts, outputs], 1).ravel()]), own, own + 1
        ),
    )


def system_prompt(num_requests: int, clients: int) -> RequestArrays:
    """Short questions behind one long prompt."""
    rng = np.random.default_rng(0)
    return RequestArrays(
        arrival_s=np.zeros(num_requests),
        input_tokens=4096 + rng.integers(20, 200, num_requests),
        output_tokens=rng.integers(50, 400, num_requests),
        priority=np.zeros(num_requests, np.int64),
        concurrency=clients,
        prefixes=PrefixArrays(
            np.array([-1]), np.array([4096]), np.zeros(num_requests, np.int64), np.full(num_requests, -1)
        ),
    )


def deep_paths(num_requests: int, clients: int) -> RequestArrays:
    """Prompts of 24 hashed blocks of 512 tokens, as long as those of Mooncake's trace; half of each is shared."""
    rng = np.random.default_rng(0)
    shared, depth = 1000, 12
    trunk = np.where(np.arange(shared * depth) % depth, np.arange(shared * depth) - 1, -1)
    own = shared * depth + np.arange(num_requests * depth)
    first = rng.integers(0, shared, num_requests) * depth + depth - 1
    branch = np.where(np.arange(own.size) % depth, own - 1, np.repeat(first, depth))
    parents = np.concatenate([trunk, branch])
    return RequestArrays(
        arrival_s=np.zeros(num_requests),
        input_tokens=np.full(num_requests, 2 * depth * 512 + 100),
        output_tokens=rng.integers(50, 400, num_requests),
        priority=np.zeros(num_requests, np.int64),
        concurrency=clients,
        prefixes=PrefixArrays(parents, np.full(parents.size, 512), own[depth - 1 :: depth], np.full(num_requests, -1)),
    )


def timed(name: str, requests: RequestArrays, replicas: int = 1) -> None:
    scenario = wt.scenario(
        **MODEL,
        concurrency=requests.concurrency,
        num_requests=1,
        input_tokens=1,
        output_tokens=1,
        replicas=replicas,
        router="prefix_affinity",
        settings={"deployment.engine.max_model_len": MAX_MODEL_LEN},
    )
    setup = wt.resolve(scenario)
    shard = shard_of(setup)
    memory = plan_memory(shard, setup.device, setup.engine, MAX_MODEL_LEN)
    settings = kernel_settings(setup, memory, replicas, requests, scenario.deployment.router)
    cost = lower_steps(estimator_for(setup), DeployedModel(setup.device, shard, setup.engine, MAX_MODEL_LEN)).cost
    best_s, plain_s, hits = np.inf, np.inf, 0.0
    for _ in range(REPEATS):
        cache = prefix_cache(settings, requests)
        started_s = time.process_time()
        run = prepare_loop([PoolPlan(settings, cost)], requests, [cache]).run()
        records, steps = run.requests, run.steps
        best_s = min(best_s, time.process_time() - started_s)
        assert np.isfinite(records["finish_s"]).all()
        found = cache.requests["cached_tokens"].sum()
        assert (
            records["num_preemptions"].any() or found + steps["prefill_tokens"].sum() == records["input_tokens"].sum()
        )
        hits = found / records["input_tokens"].sum()
        started_s = time.process_time()
        prepare_loop([PoolPlan(settings, cost)], requests).run()
        plain_s = min(plain_s, time.process_time() - started_s)
    n = requests.num_requests
    print(f"| {name} | {n:,} | {hits:.0%} | {best_s:.2f} | {n / best_s:,.0f} | {n / plain_s:,.0f} |")


if __name__ == "__main__":
    print("| loop alone, one core | requests | hits | CPU s | requests/s | without cache |\n|---|---|---|---|---|---|")
    timed("chats of 6 turns, 128 clients", chats(50_000, 6, 128))
    timed("chats of 6 turns, 2,000 clients, 16 replicas by prefix", chats(50_000, 6, 2000), 16)
    timed("one prompt of 4,096 tokens for all, 128 clients", system_prompt(300_000, 128))
    timed("prompts of 24 hashed blocks, 128 clients", deep_paths(100_000, 128))
