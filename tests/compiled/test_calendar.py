"""The event calendar against Python's heap: same order, whatever lies where on the wheel."""

import heapq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from windtunnel.compiled.calendar import NO_EVENT, new_clock, schedule, take_next


@njit  # type: ignore[untyped-decorator]
def compiled_schedule(clock: Any, due_ps: Any, what: Any) -> None:
    schedule(clock, due_ps, what)


@njit  # type: ignore[untyped-decorator]
def compiled_take(clock: Any) -> Any:
    return take_next(clock)


# A number schedules an event so long after the latest one taken, None takes one: ties, the same bucket, a later one,
# beyond a turn of eight buckets of four picoseconds.
actions = st.lists(st.none() | st.sampled_from([0, 0, 0, 1, 2, 3, 5, 9, 20, 31, 32, 33, 100, 1000]), max_size=120)


@pytest.mark.full
@given(actions)
def test_events_leave_in_the_order_of_time_then_scheduling(todo: list[int | None]) -> None:
    clock = new_clock(128, 8, 2)
    oracle: list[tuple[int, int]] = []
    now_ps = 0
    for number, after in enumerate([*todo, *[None] * len(todo)]):
        if after is not None:
            compiled_schedule(clock, now_ps + after, number)
            heapq.heappush(oracle, (now_ps + after, number))
            continue
        what = compiled_take(clock)
        if not oracle:
            assert what == NO_EVENT
            continue
        now_ps, expected = heapq.heappop(oracle)
        assert what == expected
        assert clock.calendar[0].now_ps == now_ps
