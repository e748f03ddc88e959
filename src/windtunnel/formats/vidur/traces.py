"""Vidur's two traces of a run: `chrome_trace.json`, a bar for each batch and stage, and `event_trace.json`, its events.

Source: `Simulator._write_chrome_trace`, `_write_event_trace` and the events' `to_dict` (vidur/simulator.py,
vidur/events, vidur/entities/batch_stage.py). There the type of an event is left empty and writing the events fails on a
set; here the type is named and the set is a list.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import numpy as np

from windtunnel.formats.timeline.file import Event, write_events
from windtunnel.serving.run import LoopRun
from windtunnel.serving.state.per_request import Trail


def chrome_events(run: LoopRun) -> Iterator[Event]:
    """Yield the bars of `chrome_trace.json`, in the order in which stages end; microseconds."""
    trail = trail_of(run)
    for position in np.argsort(trail.stage_s[:, :, 1].ravel(), kind="stable").tolist():
        batch, stage = divmod(position, trail.stage_s.shape[1])
        start_s, end_s = trail.stage_s[batch, stage].tolist()
        first, end = np.searchsorted(trail.members[:, 0], (batch, batch + 1))
        requests, tokens = (trail.members[first:end, column].tolist() for column in (1, 2))
        args = {"batch_id": batch, "batch_size": len(requests), "request_ids": requests, "num_tokens": tokens}
        yield {
            "name": str(requests),
            "ph": "X",
            "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6,
            "pid": int(run.steps["replica"][batch]),
            "tid": stage,
            "args": args,
        }


def trail_of(run: LoopRun) -> Trail:
    """Return the batches of a run that kept its trail and fused no steps; the step table has a row for each."""
    assert run.trail is not None
    return run.trail


class _Replay:
    """Vidur's event loop over known batches: a heap of (time, order of creation)."""

    def __init__(self, run: LoopRun) -> None:
        self.replica, self.formed_s, self.stage_s = run.requests["rank"], run.steps["start_s"], trail_of(run).stage_s
        self.num_stages = self.stage_s.shape[1]
        self.ids, self.batch_stage_ids = count(), count()
        self.heap: list[tuple[float, int, str, Event]] = []
        self.arrived: list[int] = []
        self.to_form = {
            number: deque(np.flatnonzero(run.steps["replica"] == number).tolist())
            for number in set(self.replica.tolist())
        }
        self.in_flight = dict.fromkeys(self.to_form, 0)
        self.queues: dict[tuple[int, int], deque[int]] = {}
        self.busy: set[tuple[int, int]] = set()
        for request, time_s in enumerate(run.requests["arrival_s"].tolist()):
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
        while waiting and self.formed_s[waiting[0]] == time_s and self.in_flight[replica] < self.num_stages:
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
        self.push(max(float(self.stage_s[batch, place[1], 1]), time_s), "BATCH_STAGE_END", begun)
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


def event_trace(run: LoopRun) -> Iterator[Event]:
    """Yield the events of `event_trace.json`, in Vidur's order: by time, then by creation. Requests arrive in order."""
    return _Replay(run).run()


def write_chrome_trace(path: Path, events: Iterable[Event]) -> None:
    """Write `chrome_events` as Vidur's file; a file of that name is replaced."""
    write_events(path, b'{"traceEvents":[', events, b"]}\n")


def write_event_trace(path: Path, events: Iterable[Event]) -> None:
    """Write `event_trace` as Vidur's file; a file of that name is replaced."""
    write_events(path, b"[", events, b"]\n")
