"""From what prompts have in common to the prefix caches that the loop works on."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.engine.workload import RequestArrays
from windtunnel.errors import InputError
from windtunnel.kernels import state

MAX_ENTRIES = 2**31 - 1
"""Segments times ranks that the caches can tell apart."""


def prefix_cache(settings: state.Settings, requests: RequestArrays) -> state.Cache:
    """Empty caches for the prompts of `requests`, on every rank.

    A request whose output nobody asks for gets a segment of its own: its blocks take room in the cache like any other,
    and it finds them again after a preemption.

    Raises:
        InputError: too many segments for the number of ranks.
    """
    prefixes = requests.prefixes
    num_requests = requests.arrival_s.size
    if prefixes is None:
        shared = np.zeros(0, np.int64), np.zeros(0, np.int64)
        request_node, leaf = np.full(num_requests, -1), np.full(num_requests, -1)
    else:
        shared = prefixes.node_parent, prefixes.node_tokens
        request_node, leaf = prefixes.request_node, prefixes.request_output_node.copy()
    num_shared = shared[0].size
    alone = np.flatnonzero(leaf < 0)
    leaf[alone] = num_shared + np.arange(alone.size)
    end_tokens = path_tokens(*shared)
    before = np.where(request_node[alone] >= 0, np.append(end_tokens, 0)[request_node[alone]], 0)
    nodes = np.zeros(num_shared + alone.size, state.NODE).view(np.recarray)
    nodes.parent = np.concatenate([shared[0], request_node[alone]])
    nodes.first_block = np.concatenate([end_tokens - shared[1], before]) // settings.block_size
    whole = requests.input_tokens[alone] + requests.output_tokens[alone]
    nodes.end_block = np.concatenate([end_tokens, whole]) // settings.block_size
    num_ranks = settings.num_replicas * settings.ranks_per_replica
    if num_ranks * num_shared + alone.size > MAX_ENTRIES:
        raise InputError(
            f"{num_shared:,} shared prompt segments on {num_ranks:,} ranks are too many for the prefix caches",
            "use fewer replicas or requests, or set engine.enable_prefix_caching to false",
        )
    return state.new_cache(settings, nodes, num_shared, request_node, leaf)


def path_tokens(node_parent: NDArray[np.int64], node_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of every segment's root path, itself included: `[num_nodes]`, by pointer jumping in O(n log depth)."""
    tokens, above = node_tokens.astype(np.int64), node_parent.copy()
    while (above >= 0).any():
        has = above >= 0
        step = above[has]
        tokens[has] += tokens[step]
        above[has] = above[step]
    return tokens


def session_state(requests: RequestArrays) -> state.Sessions | None:
    """Which request waits for which, as the loop takes it; None where none does and no session is named."""
    if requests.previous is None and requests.session is None:
        return None
    size = requests.arrival_s.size
    nobody = np.full(size, -1)
    return state.new_sessions(
        nobody if requests.previous is None else requests.previous,
        np.zeros(size) if requests.think_s is None else requests.think_s,
        nobody if requests.session is None else requests.session,
    )
