"""The kernels' queues against Python's own, through compiled wrappers: Python cannot call inner functions."""

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from windtunnel.compiled.heap import meld, pop, push


@njit  # type: ignore[untyped-decorator]
def compiled_push(keys: Any, values: Any, size: Any, key: Any, value: Any) -> Any:
    return push(keys, values, size, key, value)


@njit  # type: ignore[untyped-decorator]
def compiled_pop(keys: Any, values: Any, size: Any) -> Any:
    return pop(keys, values, size)


@njit  # type: ignore[untyped-decorator]
def compiled_meld(key: Any, left: Any, right: Any, a: Any, b: Any) -> Any:
    return meld(key, left, right, a, b)


# None takes the least out, a number goes in: few distinct keys, so that ties are common.
actions = st.lists(st.none() | st.integers(0, 5), max_size=60)


@pytest.mark.full
@given(actions)
def test_a_binary_heap_leaves_in_order_of_key_then_value(todo: list[int | None]) -> None:
    keys, values, size = np.zeros(64), np.zeros(64, np.int64), 0
    oracle: list[tuple[float, int]] = []
    for value, key in enumerate(todo):
        if key is not None:
            size = compiled_push(keys, values, size, float(key), value)
            heapq.heappush(oracle, (float(key), value))
        elif oracle:
            assert (keys[0], values[0]) == heapq.heappop(oracle)
            size = compiled_pop(keys, values, size)
        assert size == len(oracle)
    while oracle:
        assert (keys[0], values[0]) == heapq.heappop(oracle)
        size = compiled_pop(keys, values, size)


@pytest.mark.full
@given(st.lists(st.tuples(st.integers(0, 1), st.none() | st.integers(0, 5)), max_size=60))
def test_queues_share_arrays_without_meeting(todo: list[tuple[int, int | None]]) -> None:
    key, left, right = np.zeros(64, np.int64), np.full(64, -1), np.full(64, -1)
    roots = [-1, -1]
    oracles: list[list[tuple[int, int]]] = [[], []]
    for item, (queue, wanted) in enumerate(todo):
        if wanted is not None:
            key[item] = wanted
            roots[queue] = compiled_meld(key, left, right, roots[queue], item)
            heapq.heappush(oracles[queue], (wanted, item))
        elif oracles[queue]:
            first = roots[queue]
            assert (key[first], first) == heapq.heappop(oracles[queue])
            roots[queue] = compiled_meld(key, left, right, left[first], right[first])
    for queue in (0, 1):
        while oracles[queue]:
            first = roots[queue]
            assert (key[first], first) == heapq.heappop(oracles[queue])
            roots[queue] = compiled_meld(key, left, right, left[first], right[first])
        assert roots[queue] == -1


@pytest.mark.full
def test_joining_two_queues_keeps_all() -> None:
    rng = np.random.default_rng(0)
    key, left, right = rng.integers(0, 9, 200), np.full(200, -1), np.full(200, -1)
    roots = [-1, -1]
    for item in range(200):
        roots[item % 2] = compiled_meld(key, left, right, roots[item % 2], item)
    root = compiled_meld(key, left, right, roots[0], roots[1])
    found = []
    while root != -1:
        found.append((int(key[root]), int(root)))
        root = compiled_meld(key, left, right, left[root], right[root])
    assert found == sorted((int(key[item]), item) for item in range(200))
