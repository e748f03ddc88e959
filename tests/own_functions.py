"""Schedulers, routers and a queue order in Python for deployments of twins; some fail once a request decodes."""

import time
from typing import Any

from windtunnel.compiled.arrays import Floats
from windtunnel.serving.custom.policy import PolicyEngine, PolicyRequests
from windtunnel.serving.custom.queue_order import Queued
from windtunnel.serving.custom.router import Arrival, Replicas


def longest_sooner(requests: Queued) -> Floats:
    """A prompt of 1,000 tokens waits as if it had been sent a second sooner."""
    return -requests.input_tokens / 1000


def shortest_first(requests: PolicyRequests, waiting: Any, ready: Any, engine: PolicyEngine) -> list[tuple[int, int]]:
    """Decode everything, restarting the last ones where blocks are short; then the shortest prompts, whole."""
    decodes = [int(i) for i in ready if requests.is_prefilled[i]]
    free_blocks, restarted = engine.free_blocks, []
    while len(decodes) > max(free_blocks, 1):
        restarted.append(decodes.pop())
        free_blocks += int(requests.num_blocks[restarted[-1]])
    batch = [(i, 0) for i in restarted] + [(i, 1) for i in decodes]
    free_blocks -= len(decodes)
    room, budget = engine.max_num_seqs - engine.num_running, engine.max_num_batched_tokens - len(decodes)
    if restarted:
        return batch
    for i in sorted(waiting.tolist(), key=lambda i: (requests.prompt_tokens[i], requests.arrival_s[i]))[:room]:
        tokens = int(requests.prompt_tokens[i] - requests.processed_tokens[i])
        blocks = -(-int(requests.prompt_tokens[i]) // engine.block_size)
        if tokens > budget or blocks > free_blocks:
            break
        batch.append((i, tokens))
        budget, free_blocks = budget - tokens, free_blocks - blocks
    return batch


def by_number(request: Arrival, replicas: Replicas) -> int | None:
    """Choose replicas in turn, and hold a request back where eight run at its replica."""
    replica = request.number * 7 % len(replicas.is_up)
    return None if replicas.num_running[replica] + replicas.num_waiting[replica] >= 8 else replica


def by_session(request: Arrival, replicas: Replicas) -> int:
    """Send sessions in turn, and requests without one by their lengths."""
    number = request.session if request.session >= 0 else request.input_tokens + request.output_tokens
    return number % len(replicas.is_up)


def _decodes(requests: PolicyRequests, ready: Any) -> bool:
    return bool(len(ready) and requests.is_prefilled[ready].any())


def failing(requests: PolicyRequests, waiting: Any, ready: Any, engine: PolicyEngine) -> list[tuple[int, int]]:
    """Divide by zero."""
    return [(0, 1 // 0)] if _decodes(requests, ready) else shortest_first(requests, waiting, ready, engine)


def babbling(requests: PolicyRequests, waiting: Any, ready: Any, engine: PolicyEngine) -> Any:
    """Return a word."""
    return shortest_first(requests, waiting, ready, engine) if not _decodes(requests, ready) else "everything"


def greedy(_requests: PolicyRequests, waiting: Any, ready: Any, _engine: PolicyEngine) -> list[tuple[int, int]]:
    """Give every request more tokens than it has left."""
    return [(int(i), 100_000) for i in (*waiting, *ready)]


def endless(requests: PolicyRequests, waiting: Any, ready: Any, engine: PolicyEngine) -> Any:
    """Loop without an end."""
    while _decodes(requests, ready):
        pass
    return shortest_first(requests, waiting, ready, engine)


def sleeping(requests: PolicyRequests, waiting: Any, ready: Any, engine: PolicyEngine) -> Any:
    """Sleep for a day."""
    if _decodes(requests, ready):
        time.sleep(86_400)
    return shortest_first(requests, waiting, ready, engine)


def idle(*_: Any) -> None:
    """Choose nothing."""


def astray(request: Arrival, _replicas: Replicas) -> int:
    """Send all but the first request to a replica that is not there."""
    return 0 if request.number == 0 else 9
