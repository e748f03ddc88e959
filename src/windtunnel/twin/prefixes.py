"""Which beginnings of prompts are the same: a forest whose nodes are chunks of token ids, for the loop's prefix caches.

A path from a root spells a prompt and its output, chunk by chunk; two requests share the chunks of which all ids, and
all before them, are the same. A chunk that no rank has cached and no request under way passes is forgotten, and its
number used again.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from windtunnel.compiled.arrays import Bools
from windtunnel.serving.state import records as state
from windtunnel.workload.generate.prefixes import PrefixArrays

LEAST_CHUNK = 16
"""Fewest tokens of a chunk: pages of one token, as SGLang has them, would make forests too large to look through."""
WAITING_CHUNKS = 16
"""Chunks beyond those that the KV caches of all ranks hold, for each request that may wait."""
MOST_ENTRIES = 1 << 24
"""Chunks times ranks, of 16 bytes each. Where many large replicas would need more, prompts that no number is left for
share nothing."""


@dataclass(eq=False)
class PrefixForest:
    """The chunks that are known, at most `size`; `chunk_tokens` is a multiple of every pool's block size."""

    chunk_tokens: int
    block_sizes: Sequence[int]
    num_ranks: Sequence[int]
    size: int
    known: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """(Parent, ids) -> chunk."""
    paths: dict[int, list[int]] = field(default_factory=dict)
    """Row of a request under way -> the chunks of its prompt and output."""
    before_forgetting: Callable[[], None] = lambda: None
    """Called before numbers of chunks are used again."""

    def __post_init__(self) -> None:
        self._key: list[tuple[int, bytes] | None] = [None] * self.size
        self._free = list(range(self.size - 1, -1, -1))
        self._parent = np.full(self.size, state.NONE)

    def attach(self, cache: state.Cache, keeps: Sequence[bool]) -> None:
        """Write chunks into the prefix caches of a run from now on, of the pools that keep blocks."""
        self.cache, self.keeps = cache, keeps
        self.num_nodes = cache.nodes.size // len(self.block_sizes)
        self.num_requests = cache.requests.size // len(self.block_sizes)

    def place(self, row: int, tokens: Sequence[int]) -> None:
        """Give the request in `row` the path that its ids spell, as far as there is room for its chunks."""
        ids = array("q", tokens).tobytes()
        width, node = 8 * self.chunk_tokens, state.NONE
        path: list[int] = []
        for begin in range(0, len(ids) - width + 1, width):
            key = node, ids[begin : begin + width]
            child = self.known.get(key)
            if child is None:
                child = self._new_chunk(key, len(path), path)
                if child == state.NONE:
                    break
            node = child
            path.append(node)
        self.paths[row] = path
        self._write_request(row, node, len(path))

    def leave(self, row: int) -> None:
        """Forget the path of a request that has ended; what is cached of it stays known."""
        del self.paths[row]

    def _new_chunk(self, key: tuple[int, bytes], depth: int, path: list[int]) -> int:
        """Return the number of a chunk at `depth` that was not known; NONE where there is no room."""
        if not self._free:
            self._forget_unused(path)
            if not self._free:
                return state.NONE
        node = self._free.pop()
        self.known[key], self._key[node], self._parent[node] = node, key, key[0]
        for pool, block_size in enumerate(self.block_sizes):
            if self.keeps[pool]:
                blocks = self.chunk_tokens // block_size
                self._write(pool * self.num_nodes + node, key[0], depth * blocks, (depth + 1) * blocks)
        return node

    def _write(self, index: int, parent: int, first_block: int, end_block: int) -> None:
        self.cache.nodes.view(np.ndarray)[index] = (parent, first_block, end_block)

    def _write_request(self, row: int, node: int, depth: int) -> None:
        """Write where the path of a request ends; what is behind its last whole chunk is not cached."""
        leaf = self.size + row
        for pool, block_size in enumerate(self.block_sizes):
            blocks = depth * self.chunk_tokens // block_size if self.keeps[pool] else 0
            self._write(pool * self.num_nodes + leaf, node, blocks, blocks)
            index = pool * self.num_requests + row
            self.cache.requests.view(np.ndarray)[index] = (node, leaf, state.NONE, 0, 0, 0.0, state.NONE)
        self.cache.loaded[:, row] = 0

    def key_of(self, node: int) -> tuple[int, bytes] | None:
        """Return (parent, ids) of a chunk; None where its number is free."""
        return self._key[node]

    def whole_chunks(self, number: int) -> Bools:
        """[size, ranks] which chunks each rank of a pool has cached to the end."""
        first = sum(self.num_ranks[pool] * self.size + self.num_requests for pool in range(number))
        num_blocks = self.cache.entries[first : first + self.num_ranks[number] * self.size]["num_blocks"]
        whole = self.chunk_tokens // self.block_sizes[number]
        return np.asarray(num_blocks.reshape(self.size, -1) >= whole)

    def _forget_unused(self, path: list[int]) -> None:
        """Free the numbers of chunks that nobody has cached and no request under way passes."""
        self.before_forgetting()
        used = self._cached()
        used[path] = True
        for passed in self.paths.values():
            used[passed] = True
        above = self._parent[used]
        while (above := above[above >= 0]).size:
            above = above[~used[above]]
            used[above] = True
            above = self._parent[above]
        for node in np.flatnonzero(~used).tolist():
            key = self._key[node]
            if key is not None:
                if self.known.get(key) == node:
                    del self.known[key]
                self._key[node] = None
                self._free.append(node)

    def _cached(self) -> Bools:
        """[size] whether any rank, or a tier below one, has blocks of each chunk."""
        cache, used, first = self.cache, np.zeros(self.size, bool), 0
        kept: Any = cache.kept
        num_entries = cache.entries.size
        for number in range(len(self.block_sizes)):
            num_ranks = self.num_ranks[number]
            end = first + num_ranks * self.size
            rows: list[Any] = [cache.entries[first:end]["num_blocks"], cache.entries[first:end]["references"]]
            if kept.size:
                rows += [row[: end - first]["num_blocks"] for row in kept]
            for row in rows:
                used |= (row.reshape(self.size, num_ranks) > 0).any(axis=1)
            first = end + self.num_requests
        assert first == num_entries
        return used


def forest_for(settings: Sequence[state.KernelSettings], max_requests: int) -> PrefixForest:
    """Return a forest with room for what the KV caches of pools hold."""
    block_sizes = [pool.block_size for pool in settings]
    common = math.lcm(*block_sizes)
    chunk_tokens = common * -(-LEAST_CHUNK // common)
    ranks = [pool.num_replicas * pool.ranks_per_replica for pool in settings]
    tokens = sum(pool.num_blocks * pool.block_size * count for pool, count in zip(settings, ranks, strict=True))
    size = min(tokens // chunk_tokens + WAITING_CHUNKS * max_requests, MOST_ENTRIES // sum(ranks))
    return PrefixForest(chunk_tokens, block_sizes, ranks, size)


def nothing_shared(forest: PrefixForest, max_requests: int) -> PrefixArrays:
    """Return the arrays of a forest of which nothing is known yet."""
    nobody = np.full(max_requests, state.NONE)
    return PrefixArrays(np.full(forest.size, state.NONE), np.ones(forest.size, np.int64), nobody, nobody.copy())
