"""Events in order of time, at a cost that does not grow with how many are waiting.

A wheel of buckets, each as wide as a power of two of picoseconds, holds what is due within one turn, unsorted. Only the
bucket under the cursor is sorted: into a run as far as it comes in order, the rest into a binary heap; what lies beyond
a turn waits in another heap. Equal times leave in the order in which they were scheduled, so the thousands of events of
one picosecond that equal parts of a large fabric have are one run. (Brown, "Calendar Queues", CACM 31(10), 1988, with
the sorting put off until a bucket is opened, as in Tang, Goh and Thng, "Ladder Queue", TOMACS 15(3), 2005.)
"""

from typing import Any, NamedTuple

import numpy as np

from windtunnel.compiled.heap import pop, push
from windtunnel.compiled.jit import inner

EVENT = np.dtype([("due_ps", "i8"), ("tag", "i8"), ("what", "i8"), ("next", "i8")])
"""`tag` orders equal times: the number of the scheduling call, and in its low bits the event's own index; messages come
before all that, by their sender.
"""

INDEX_BITS = 24
INDEX_MASK = 2**INDEX_BITS - 1
SENDER_SHIFT = 48
NO_MESSAGE = 1 << 62
MOST_SENDERS = 1 << (62 - SENDER_SHIFT)

HEAPS = np.dtype(
    [("run_ps", "i8"), ("run_tag", "i8"), ("near_ps", "i8"), ("near_tag", "i8"), ("far_ps", "i8"), ("far_tag", "i8")]
)
"""The open bucket as a sorted run and a binary heap, and the heap of what is due after the wheel's turn."""

CALENDAR = np.dtype(
    [
        ("now_ps", "i8"),
        ("num_scheduled", "i8"),
        ("free", "i8"),  # head of the list of free events
        ("num_free", "i8"),
        ("cursor", "i8"),  # the open bucket, counted from time 0
        ("shift", "i8"),  # a bucket is 2 ** shift picoseconds wide
        ("num_in_wheel", "i8"),
        ("run_first", "i8"),
        ("run_end", "i8"),
        ("num_near", "i8"),
        ("num_far", "i8"),
    ]
)

NO_EVENT = -1


class Clock(NamedTuple):
    """A calendar: its events, the open bucket and what is far off, the wheel's lists, and one record of the rest."""

    events: Any
    heaps: Any
    buckets: Any
    calendar: Any


def new_clock(num_events: int, num_buckets: int, shift: int) -> Clock:
    """An empty calendar; `num_buckets` is a power of two."""
    events = np.zeros(num_events, EVENT).view(np.recarray)
    events.next = np.arange(1, num_events + 1)
    events.next[-1] = NO_EVENT
    calendar = np.zeros(1, CALENDAR).view(np.recarray)
    calendar.num_free = num_events
    calendar.shift = shift
    heaps = np.zeros(num_events, HEAPS).view(np.recarray)
    return Clock(events, heaps, np.full(num_buckets, NO_EVENT, np.int32), calendar)


@inner
def put_near(heaps, calendar, due_ps, tag):
    """Put an event into the open bucket: at the end of the run if it comes after all of it."""
    end = calendar[0].run_end
    if calendar[0].run_first == end:
        calendar[0].run_first = 0
        end = 0
    elif due_ps < heaps[end - 1].run_ps or (due_ps == heaps[end - 1].run_ps and tag < heaps[end - 1].run_tag):
        end = heaps.size
    if end == heaps.size:
        calendar[0].num_near = push(heaps.near_ps, heaps.near_tag, calendar[0].num_near, due_ps, tag)
    else:
        heaps[end].run_ps = due_ps
        heaps[end].run_tag = tag
        calendar[0].run_end = end + 1


@inner
def schedule(clock, due_ps, what):
    """Let `what` happen at `due_ps`, which is not before now; there must be a free event."""
    tag = NO_MESSAGE | (clock.calendar[0].num_scheduled << INDEX_BITS) | clock.calendar[0].free
    put(clock, due_ps, what, tag)


@inner
def schedule_message(clock, due_ps, what, sender):
    """As `schedule`, but before other events of that time, and in the order of the senders."""
    number = clock.calendar[0].num_scheduled & INDEX_MASK
    tag = (np.int64(sender) << SENDER_SHIFT) | (number << INDEX_BITS) | clock.calendar[0].free
    put(clock, due_ps, what, tag)


@inner
def put(clock, due_ps, what, tag):
    """Fill the next free event and lay it on the wheel, into the open bucket or with those that are far off."""
    events, heaps, buckets, calendar = clock
    event = calendar[0].free
    calendar[0].free = events[event].next
    calendar[0].num_free -= 1
    calendar[0].num_scheduled += 1
    events[event].due_ps = due_ps
    events[event].tag = tag
    events[event].what = what
    ahead = (due_ps >> calendar[0].shift) - calendar[0].cursor
    if ahead <= 0:
        put_near(heaps, calendar, due_ps, tag)
    elif ahead < buckets.size:
        bucket = (due_ps >> calendar[0].shift) & (buckets.size - 1)
        events[event].next = buckets[bucket]
        buckets[bucket] = event
        calendar[0].num_in_wheel += 1
    else:
        calendar[0].num_far = push(heaps.far_ps, heaps.far_tag, calendar[0].num_far, due_ps, tag)


@inner
def open_next_bucket(events, heaps, buckets, calendar):
    """Move the cursor to the next bucket that has events, and sort them."""
    far = np.int64(2**62)
    if calendar[0].num_far > 0:
        far = heaps[0].far_ps >> calendar[0].shift
    cursor = far
    if calendar[0].num_in_wheel > 0:
        cursor = calendar[0].cursor + 1
        while cursor < far and buckets[cursor & (buckets.size - 1)] < 0:
            cursor += 1
    calendar[0].cursor = cursor
    # The bucket's list has the latest first.
    event = np.int64(buckets[cursor & (buckets.size - 1)])
    buckets[cursor & (buckets.size - 1)] = NO_EVENT
    first = np.int64(NO_EVENT)
    while event >= 0:
        onward = events[event].next
        events[event].next = first
        first = event
        event = onward
    while first >= 0:
        put_near(heaps, calendar, events[first].due_ps, events[first].tag)
        calendar[0].num_in_wheel -= 1
        first = events[first].next
    while calendar[0].num_far > 0 and heaps[0].far_ps >> calendar[0].shift == cursor:
        put_near(heaps, calendar, heaps[0].far_ps, heaps[0].far_tag)
        calendar[0].num_far = pop(heaps.far_ps, heaps.far_tag, calendar[0].num_far)


@inner
def take_next(clock):
    """Remove the next event and set the clock to it; returns its `what`, or NO_EVENT if there is none."""
    events, heaps, buckets, calendar = clock
    first = calendar[0].run_first
    if first == calendar[0].run_end and calendar[0].num_near == 0:
        if calendar[0].num_in_wheel == 0 and calendar[0].num_far == 0:
            return np.int64(NO_EVENT)
        open_next_bucket(events, heaps, buckets, calendar)
        first = calendar[0].run_first
    is_in_heap = first == calendar[0].run_end
    if not is_in_heap and calendar[0].num_near > 0:
        is_in_heap = heaps[0].near_ps < heaps[first].run_ps or (
            heaps[0].near_ps == heaps[first].run_ps and heaps[0].near_tag < heaps[first].run_tag
        )
    if is_in_heap:
        calendar[0].now_ps = heaps[0].near_ps
        event = heaps[0].near_tag & INDEX_MASK
        calendar[0].num_near = pop(heaps.near_ps, heaps.near_tag, calendar[0].num_near)
    else:
        calendar[0].now_ps = heaps[first].run_ps
        event = heaps[first].run_tag & INDEX_MASK
        calendar[0].run_first = first + 1
    events[event].next = calendar[0].free
    calendar[0].free = event
    calendar[0].num_free += 1
    return events[event].what
