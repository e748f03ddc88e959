"""Common beginnings of prompts: shared texts, turns of sessions, and blocks of traces."""

from dataclasses import dataclass

import numpy as np

from windtunnel.compiled.arrays import Bools
from windtunnel.workload.generate.draws import Counts
from windtunnel.workload.traces.requests import BlockIds

REQUEST_NODES = ("request_node", "request_output_node")
"""Columns of `PrefixArrays` with a row per request."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixArrays:
    """Common beginnings of prompts, as a forest of token segments: a path from a root spells a beginning.

    Two prompts share what their paths share, and nothing else: siblings differ from their first token on. A shared
    system prompt is a root; a turn's path is its predecessor's, then the predecessor's output, then the new text; a
    trace with block hashes has a node for each distinct hash.
    """

    node_parent: Counts
    """`[num_nodes]` Parent of each node, which comes before its children; -1: a root."""
    node_tokens: Counts
    """`[num_nodes]` Length of each segment, at least 1."""
    request_node: Counts
    """`[num_requests]` Last node of the part of the prompt that others may share; -1: none. A prompt may be longer than
    its path: no other request has the rest."""
    request_output_node: Counts
    """`[num_requests]` Child of `request_node` (or root) with the unshared end of the prompt and the output, so that
    a later turn can find them; no two requests have the same. -1: no later turn."""


def forest(blocks: BlockIds, input_tokens: Counts | None, rows: slice) -> PrefixArrays:
    """Return the forest that the block ids of prompts spell: a node for each id that follows the same blocks.

    A prompt's last block holds the rest of the prompt; no other prompt shares what is beyond its blocks. A prompt that
    was shortened keeps the blocks that begin within it; where it ends within a block of another one, that block becomes
    two nodes.
    """
    assert input_tokens is not None, "the reader reads the prompts with their blocks"
    depth = np.arange(blocks.ids.size) - np.repeat(blocks.offsets[:-1], np.diff(blocks.offsets))
    begin = np.floor(depth * blocks.block_tokens).astype(np.int64)
    is_kept = begin < np.repeat(input_tokens, np.diff(blocks.offsets))
    offsets, ids = np.append(0, np.cumsum(is_kept))[blocks.offsets], blocks.ids[is_kept]
    begin, depth = begin[is_kept], depth[is_kept]
    if not ids.size:
        none = np.zeros(0, np.int64)
        return PrefixArrays(none, none, *np.full((2, offsets[:-1][rows].size), -1, np.int64))
    is_first = np.zeros(ids.size, bool)
    is_first[offsets[:-1][offsets[:-1] < offsets[1:]]] = True
    before = np.where(is_first, -1, np.concatenate([[-1], ids[:-1]]))
    _, first_seen, of_position = np.unique(np.stack([before, ids]), axis=1, return_index=True, return_inverse=True)
    by_age = np.argsort(first_seen)
    node = inverse(by_age)[of_position.ravel()]
    if np.unique(ids).size < by_age.size:
        node, by_age_seen = _chained(ids, is_first)
    else:
        by_age_seen = first_seen[by_age]
    parent = np.where(is_first[by_age_seen], -1, node[by_age_seen - 1])
    size = np.floor((depth + 1) * blocks.block_tokens).astype(np.int64) - begin
    has_blocks = np.diff(offsets) > 0
    last = offsets[1:][has_blocks] - 1
    rest = np.minimum(input_tokens[has_blocks] - begin[last], size[last])
    return _split(parent, size[by_age_seen], node[last], rest, has_blocks, rows)


def _split(parent: Counts, size: Counts, last: Counts, rest: Counts, has_blocks: Bools, rows: slice) -> PrefixArrays:
    """Return a forest of blocks, `[num_blocks]`, with a node for each part of a block in which a prompt ends.

    Args:
        parent, size: parent and tokens of each block.
        last, rest: the last block of each prompt that has blocks, and the tokens of it in the prompt.
        has_blocks: `[num_requests]` Whether a prompt has blocks.
        rows: requests to return.
    """
    base = int(size.max()) + 1
    above = np.unique(parent[parent >= 0])
    ends = last * base + rest
    parts = np.unique(np.concatenate([ends, above * base + size[above]]))
    block, end = np.divmod(parts, base)
    begins_block = np.diff(block, prepend=-1) > 0
    before = np.arange(parts.size) - 1
    above_end = np.where(parent < 0, -1, np.searchsorted(parts, (parent + 1) * base) - 1)
    request_node = np.full(has_blocks.size, -1, np.int64)
    request_node[has_blocks] = np.searchsorted(parts, ends)
    return PrefixArrays(
        node_parent=np.where(begins_block, above_end[block], before),
        node_tokens=end - np.where(begins_block, 0, end[before]),
        request_node=request_node[rows],
        request_output_node=np.full(has_blocks.size, -1, np.int64)[rows],
    )


def _chained(ids: Counts, is_first: Bools) -> tuple[Counts, Counts]:
    """Return the node of each position and the first position of each node, where one id follows different blocks."""
    known: dict[tuple[int, int], int] = {}
    node, seen = np.empty(ids.size, np.int64), []
    for position, (block, begins_prompt) in enumerate(zip(ids.tolist(), is_first.tolist(), strict=True)):
        key = (-1 if begins_prompt else int(node[position - 1]), block)
        if key not in known:
            known[key] = len(known)
            seen.append(position)
        node[position] = known[key]
    return node, np.array(seen, np.int64)


def inverse(order: Counts) -> Counts:
    """Return the inverse of a permutation: the place of each row in the new order."""
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    return place
