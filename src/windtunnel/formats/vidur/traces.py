"""Vidur's two traces of a run: `chrome_trace.json`, a bar for each batch and stage, and `event_trace.json`, its events.

Source: `Simulator._write_chrome_trace`, `_write_event_trace` and the events' `to_dict` (vidur/simulator.py,
vidur/events, vidur/entities/batch_stage.py). There the type of an event is left empty and writing the events fails on a
set; here the type is named and the set is a list.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.formats.timeline.file import Event, write_events


@dataclass(frozen=True, eq=False)
class VidurBatchTimes:
    """Every batch of a run in the order of forming, with its time in every pipeline stage."""

    formed_s: NDArray[np.float64]
    """[b]"""
    replica: NDArray[np.int64]
    """[b]"""
    stage_s: NDArray[np.float64]
    """[b, stages, 2] start and end."""
    members: NDArray[np.int64]
    """[m, 3] batch, request, tokens; batches ascend."""

    def parts(self, batch: int) -> tuple[list[int], list[int]]:
        """Return the requests of a batch, and the tokens of each."""
        first, end = np.searchsorted(self.members[:, 0], (batch, batch + 1))
        return self.members[first:end, 1].tolist(), self.members[first:end, 2].tolist()


def chrome_events(batches: VidurBatchTimes) -> Iterator[Event]:
    """Yield the bars of `chrome_trace.json`, in the order in which stages end; microseconds."""
    ends = batches.stage_s[:, :, 1]
    for position in np.argsort(ends.ravel(), kind="stable").tolist():
        batch, stage = divmod(position, ends.shape[1])
        start_s, end_s = batches.stage_s[batch, stage].tolist()
        requests, tokens = batches.parts(batch)
        args = {"batch_id": batch, "batch_size": len(requests), "request_ids": requests, "num_tokens": tokens}
        yield {
            "name": str(requests),
            "ph": "X",
            "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6,
            "pid": int(batches.replica[batch]),
            "tid": stage,
            "args": args,
        }


class _Replay:
    """Vidur's event loop over known batches: a heap of (time, order of creation)."""

    def __init__(self, arrival_s: NDArray[np.float64], replica: NDArray[np.int64], batches: VidurBatchTimes) -> None:
        self.replica, self.batches = replica, batches
        self.num_stages = batches.stage_s.shape[1]
        self.ids, self.batch_stage_ids = count(), count()
        self.heap: list[tuple[float, int, str, Event]] = []
        self.arrived: list[int] = []
        self.to_form = {
            number: deque(np.flatnonzero(batches.replica == number).tolist()) for number in set(replica.tolist())
        }
        self.in_flight = dict.fromkeys(self.to_form, 0)
        self.queues: dict[tuple[int, int], deque[int]] = {}
        self.busy: set[tuple[int, int]] = set()
        for request, time_s in enumerate(arrival_s.tolist()):
            self.push(time_s, "REQUEST_ARRIVAL", {"request": request})

    def push(self, time_s: float, kind: str, fields: Event) -> None:
        heapq.heappush(self.heap, (time_s, next(self.ids), kind, fields))

    def run(self) -> Iterator[Event]:
        """Yield the events; the method with the name of its type handles each."""
        while self.heap:
            time_s, _, kind, fields = heapq.heappop(self.heap)
            yield {"time": time_s, "event_type": kind, **getattr(self, kind.lower())(time_s, fields)}

    def request_arrival(self, time_s: float, fields: Event) -> Event:
        self.arrived.append(fields["request"])
        self.push(time_s, "GLOBAL_SCHEDULE", {})
        return fields

    def global_schedule(self, time_s: float, _: Event) -> Event:
        mapping = [(int(self.replica[request]), request) for request in self.arrived]
        self.arrived = []
        replicas = sorted({replica for replica, _ in mapping})
        for replica in replicas:
            self.push(time_s, "REPLICA_SCHEDULE", {"replica_id": replica})
        return {"replica_set": replicas, "request_mapping": mapping}

    def replica_schedule(self, time_s: float, fields: Event) -> Event:
        replica = fields["replica_id"]
        waiting, formed = self.to_form[replica], []
        while waiting and self.batches.formed_s[waiting[0]] == time_s and self.in_flight[replica] < self.num_stages:
            formed.append(waiting.popleft())
            self.in_flight[replica] += 1
        for batch in formed:
            self.push(time_s, "BATCH_STAGE_ARRIVAL", {"replica_id": replica, "stage_id": 0, "batch_id": batch})
        return {"replica_id": replica, "batch_ids": formed}

    def batch_stage_arrival(self, time_s: float, fields: Event) -> Event:
        place = fields["replica_id"], fields["stage_id"]
        self.queues.setdefault(place, deque()).append(fields["batch_id"])
        self.push(time_s, "REPLICA_STAGE_SCHEDULE", {"replica_id": place[0], "stage_id": place[1]})
        return fields

    def replica_stage_schedule(self, time_s: float, fields: Event) -> Event:
        place = fields["replica_id"], fields["stage_id"]
        queue = self.queues.get(place)
        if place in self.busy or not queue:
            return {**fields, "batch_id": None, "batch_stage_id": None, "is_last_stage": None}
        self.busy.add(place)
        batch = queue.popleft()
        begun = {
            **fields,
            "batch_id": batch,
            "batch_stage_id": next(self.batch_stage_ids),
            "is_last_stage": place[1] == self.num_stages - 1,
        }
        self.push(max(float(self.batches.stage_s[batch, place[1], 1]), time_s), "BATCH_STAGE_END", begun)
        return begun

    def batch_stage_end(self, time_s: float, fields: Event) -> Event:
        replica, stage = fields["replica_id"], fields["stage_id"]
        self.busy.remove((replica, stage))
        self.push(time_s, "REPLICA_STAGE_SCHEDULE", {"replica_id": replica, "stage_id": stage})
        if fields["is_last_stage"]:
            self.push(time_s, "BATCH_END", {"batch_id": fields["batch_id"], "replica_id": replica})
        else:
            following = {"replica_id": replica, "stage_id": stage + 1, "batch_id": fields["batch_id"]}
            self.push(time_s, "BATCH_STAGE_ARRIVAL", following)
        return fields

    def batch_end(self, time_s: float, fields: Event) -> Event:
        self.in_flight[fields["replica_id"]] -= 1
        self.push(time_s, "REPLICA_SCHEDULE", {"replica_id": fields["replica_id"]})
        return {"batch_id": fields["batch_id"]}


def event_trace(
    arrival_s: NDArray[np.float64], replica: NDArray[np.int64], batches: VidurBatchTimes
) -> Iterator[Event]:
    """Yield the events of `event_trace.json`, in Vidur's order: by time, then by creation. Requests arrive in order."""
    return _Replay(arrival_s, replica, batches).run()


def write_chrome_trace(path: Path, events: Iterable[Event]) -> None:
    """Write `chrome_events` as Vidur's file; a file of that name is replaced."""
    write_events(path, b'{"traceEvents":[', events, b"]}\n")


def write_event_trace(path: Path, events: Iterable[Event]) -> None:
    """Write `event_trace` as Vidur's file; a file of that name is replaced."""
    write_events(path, b"[", events, b"]\n")
