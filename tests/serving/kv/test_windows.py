"""The prefix cache of models with sliding windows, against vLLM's pool of single blocks that several groups share."""

from collections import OrderedDict

import numpy as np
import pytest

from serving.kv.test_prefix_cache import VLLM, cached_tokens
from serving.loop.test_oracle import Case, assert_equal_to_the_oracle, random_cost
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

BLOCK, CHUNK = VLLM.block_size, VLLM.max_num_batched_tokens
SYSTEM_TOKENS = 1440

Key = tuple[int, int]


class GroupedBlocks:
    """vLLM's block pool for one request at a time: each group of layers has a block of its own for the same tokens.

    The first group keeps every token; the others give blocks back that their window has passed. A prefix is found where
    the first group has all of it and the others the window before its end (`HybridKVCacheCoordinator
    .find_longest_cache_hit`, `SlidingWindowManager`; vllm/v1/core, 0.11 to 0.24). Free blocks wait in one queue.
    """

    def __init__(self, num_blocks: int, num_groups: int, window_tokens: int) -> None:
        self.num_groups, self.window_tokens = num_groups, window_tokens
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self.key_of: dict[int, tuple[int, Key]] = {}
        self.block_of: dict[tuple[int, Key], int] = {}

    def serve(self, keys: list[Key], prompt_tokens: int, output_tokens: int) -> int:
        """Returns the tokens of the prompt that were found; `keys` are those of its whole blocks and the output's."""
        found = next((n for n, key in enumerate(keys) if (0, key) not in self.block_of), len(keys))
        found = min(found, (prompt_tokens - 1) // BLOCK)
        while found and not self.has_windows(keys, found):
            found -= 1
        held: list[dict[int, int]] = []
        for group in range(self.num_groups):
            first = 0 if group == 0 else self.first_seen(found * BLOCK)
            held.append({at: self.block_of[group, keys[at]] for at in range(first, found)})
            for block in held[group].values():
                del self.free[block]
        done, whole = found * BLOCK, prompt_tokens + output_tokens - 1
        while done < whole:
            for group in range(1, self.num_groups):
                self.give_back(held[group], [at for at in held[group] if at < self.first_seen(done)])
            end = (
                min(done + CHUNK, prompt_tokens) if done < prompt_tokens else min(done // BLOCK * BLOCK + BLOCK, whole)
            )
            for at in range(-(-done // BLOCK), -(-end // BLOCK)):
                for group in range(self.num_groups):
                    held[group][at] = self.take()
            for at in range(done // BLOCK, min(end // BLOCK, len(keys))):
                for group in range(self.num_groups):
                    if at in held[group] and (group, keys[at]) not in self.block_of:
                        self.block_of[group, keys[at]] = held[group][at]
                        self.key_of[held[group][at]] = (group, keys[at])
            done = end
        for blocks in held:
            self.give_back(blocks, list(blocks))
        return found * BLOCK

    def first_seen(self, tokens: int) -> int:
        """The first block that the next token's window reaches."""
        return max(tokens - self.window_tokens + 1, 0) // BLOCK

    def has_windows(self, keys: list[Key], num_blocks: int) -> bool:
        seen = range(self.first_seen(num_blocks * BLOCK), num_blocks)
        return all((group, keys[at]) in self.block_of for group in range(1, self.num_groups) for at in seen)

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        if block in self.key_of:
            del self.block_of[self.key_of.pop(block)]
        return block

    def give_back(self, held: dict[int, int], positions: list[int]) -> None:
        for at in sorted(positions, reverse=True):
            self.free[held.pop(at)] = None


def interleaved_chats(num_requests: int, num_sessions: int) -> tuple[RequestArrays, list[list[Key]]]:
    """Turns of several users in random order, one request at a time, behind one system prompt; and their blocks."""
    rng = np.random.default_rng(0)
    parent, tokens = [-1], [SYSTEM_TOKENS]
    last, turns, path = [0] * num_sessions, [0] * num_sessions, [[0] for _ in range(num_sessions)]
    request_node, inputs, outputs, keys = [], [], [], []
    for _ in range(num_requests):
        user = int(rng.integers(num_sessions))
        if turns[user] == 6:
            last[user], turns[user], path[user] = 0, 0, [0]
        said, answered = (int(rng.integers(half, 3 * half)) * BLOCK for half in (12, 6))
        text = len(parent)
        parent += [last[user], text]
        tokens += [said, answered]
        path[user] += [text]
        request_node.append(text)
        inputs.append(sum(tokens[node] for node in path[user]))
        outputs.append(answered)
        path[user] += [text + 1]
        keys.append(
            [(node, at) for node in path[user] for at in range(tokens[node] // BLOCK)][
                : (inputs[-1] + answered - 1) // BLOCK
            ]
        )
        last[user], turns[user] = text + 1, turns[user] + 1
    n = num_requests
    forest = PrefixArrays(np.array(parent), np.array(tokens), np.array(request_node), np.array(request_node) + 1)
    requests = RequestArrays(
        np.zeros(n), np.array(inputs), np.array(outputs), np.zeros(n, np.int64), concurrency=1, prefixes=forest
    )
    return requests, keys


@pytest.mark.full
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("num_groups", "window_tokens", "num_blocks"),
    [(2, 128, 4000), (7, 1024, 4000), (7, 1024, 12_000), (6, 512, 12_000)],
    ids=["gpt-oss", "gemma-3-27b, small pool", "gemma-3-27b", "gemma-3-12b"],
)
def test_groups_that_share_a_pool_leave_less_of_it_to_the_cache(
    num_groups: int, window_tokens: int, num_blocks: int
) -> None:
    requests, keys = interleaved_chats(250, 40)
    pool = GroupedBlocks(num_blocks, num_groups, window_tokens)
    exact = [pool.serve(*row) for row in zip(keys, requests.input_tokens, requests.output_tokens, strict=True)]
    shared = VLLM._replace(
        num_blocks=num_blocks,
        num_groups=num_groups,
        num_window_groups=num_groups - 1,
        window_tokens=window_tokens,
        concurrency=1,
    )
    one_group = VLLM._replace(num_blocks=num_blocks, concurrency=1)
    found = [int(cached_tokens(settings, requests).sum()) for settings in (shared, one_group)]
    whole = int(requests.input_tokens.sum())
    assert found[0] / whole == pytest.approx(sum(exact) / whole, abs=0.03)
    assert found[1] - sum(exact) > 0.04 * whole


def test_all_windows_move_on_before_cached_blocks_are_given_up() -> None:
    """Two prompts are computed side by side: the blocks that the second one's window gives back are there for the
    first, and the last request finds the more of its prompt.
    """
    windowed = VLLM._replace(
        max_num_seqs=4,
        max_num_batched_tokens=100,
        long_prefill_token_threshold=10,
        block_size=1,
        num_blocks=100,
        window_tokens=1,
        num_groups=2,
        num_window_groups=1,
    )
    requests = RequestArrays(
        arrival_s=np.array([0.0, 1.0, 1.0, 1.005]),
        input_tokens=np.array([20, 30, 30, 21]),
        output_tokens=np.ones(4, np.int64),
        priority=np.zeros(4, np.int64),
        prefixes=PrefixArrays(np.array([-1]), np.array([20]), np.array([0, -1, -1, 0]), np.full(4, -1)),
    )
    cost = random_cost(np.random.default_rng(0), 4, 100, overlaps=False)
    assert_equal_to_the_oracle(Case(windowed, cost, requests, caches=True))
