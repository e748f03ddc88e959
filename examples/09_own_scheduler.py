"""Write a shortest-prompt-first scheduler, plain and compiled, and compare it with first come, first served."""

import numpy as np
from numba import njit

import windtunnel as wt


def shortest_first(requests, waiting, ready, engine):
    """Decode prefilled requests; fill the step with begun prompts, then with the shortest waiting prompts that fit."""
    decodes = [i for i in ready if requests.is_prefilled[i]]
    begun = [i for i in ready if not requests.is_prefilled[i]]
    room = engine.max_num_seqs - engine.num_running
    shortest = sorted(waiting, key=lambda i: requests.prompt_tokens[i])[:room]
    batch = [(i, 1) for i in decodes]
    budget = engine.max_num_batched_tokens - len(batch)
    free_blocks = engine.free_blocks - len(batch)
    for i in begun + shortest:
        tokens = min(requests.prompt_tokens[i] - requests.processed_tokens[i], budget)
        blocks = -(-tokens // engine.block_size)
        if tokens <= 0 or blocks > free_blocks:
            break
        batch.append((i, tokens))
        budget, free_blocks = budget - tokens, free_blocks - blocks
    return batch


@njit
def shortest_first_compiled(requests, waiting, ready, engine):
    """Schedule like `shortest_first`, with arrays in place of lists."""
    batch = np.empty((ready.size + waiting.size, 2), np.int64)
    size = 0
    for i in ready:
        if requests.is_prefilled[i]:
            batch[size] = i, 1
            size += 1
    budget = engine.max_num_batched_tokens - size
    free_blocks = engine.free_blocks - size
    begun = np.array([i for i in ready if not requests.is_prefilled[i]], np.int64)
    room = engine.max_num_seqs - engine.num_running
    shortest = waiting[np.argsort(requests.prompt_tokens[waiting], kind="mergesort")][:room]
    for i in np.concatenate((begun, shortest)):
        tokens = min(requests.prompt_tokens[i] - requests.processed_tokens[i], budget)
        blocks = -(-tokens // engine.block_size)
        if tokens <= 0 or blocks > free_blocks:
            break
        batch[size] = i, tokens
        size += 1
        budget, free_blocks = budget - tokens, free_blocks - blocks
    return batch[:size]


scenario = wt.scenario(
    model="meta-llama/Llama-3.1-8B",
    device="h100_sxm",
    rate_per_s=12,
    input_tokens={"type": "lognormal", "median_tokens": 1500, "sigma": 1.0, "max_tokens": 30000},
    output_tokens={"type": "uniform", "min_tokens": 50, "max_tokens": 250},
    num_requests=1000,
    settings={"deployment.engine.max_num_batched_tokens": 2048},
)
print("scheduler                mean TTFT ms  p99 TTFT ms  mean TPOT ms")
for name, policy in (
    ("first come (vLLM V1)", None),
    ("shortest first", shortest_first),
    ("shortest first, compiled", shortest_first_compiled),
):
    summary = wt.simulate(scenario, policy=policy).summary
    ttft, tpot = summary.ttft_s, summary.tpot_s
    print(f"{name:24} {ttft.mean * 1e3:12.1f}  {ttft.p99 * 1e3:11.1f}  {tpot.mean * 1e3:12.2f}")
