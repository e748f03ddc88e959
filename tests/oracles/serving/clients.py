"""The clients in plain Python: which request they send next and when, in an open loop, a closed loop or sessions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oracles.serving.state import Request


@dataclass
class Clients:
    """What has been sent and what has come back; `settings` are `serving.state.records.KernelSettings` by shape."""

    settings: Any
    requests: Sequence[Request]
    num_sent: int = 0
    num_started: int = 0
    """Requests, or sessions."""
    thinking: list[tuple[float, int]] = field(default_factory=list)
    """(time, request) of the turns that follow."""
    completed_s: list[float] = field(default_factory=list)
    """Of requests, or sessions."""

    def __post_init__(self) -> None:
        self.starts = [request for request in self.requests if request.previous < 0]
        self.following = {request.previous: request for request in self.requests if request.previous >= 0}

    def next_send_s(self) -> float:
        return min([self.next_start_s(), *(send_s for send_s, _ in self.thinking)])

    def next_start_s(self) -> float:
        s, count = self.settings, self.num_started
        if count >= len(self.starts):
            return math.inf
        send_s = self.starts[count].arrival_s
        if s.concurrency == 0:
            return send_s
        if 0 < s.num_warmup <= count:
            if len(self.completed_s) < s.num_warmup:
                return math.inf
            send_s += self.completed_s[s.num_warmup - 1] + s.frontend_s
        if count - len(self.completed_s) >= s.concurrency:
            return math.inf
        if count >= s.concurrency:
            send_s = max(send_s, self.completed_s[count - s.concurrency] + s.frontend_s)
        return send_s

    def send(self, now_s: float) -> Request:
        ready = sorted(turn for turn in self.thinking if turn[0] <= now_s)
        if ready:
            self.thinking.remove(ready[0])
            request = self.requests[ready[0][1]]
        else:
            request = self.starts[self.num_started]
            self.num_started += 1
        request.sent_s = request.arrival_s = now_s
        request.sequence = self.num_sent
        self.num_sent += 1
        return request

    def conclude(self, request: Request, now_s: float) -> None:
        """`request` has its last token."""
        request.finish_s = now_s
        if request.index in self.following:
            turn = self.following[request.index]
            send_s = max(now_s + self.settings.frontend_s + turn.think_s, turn.arrival_s)
            self.thinking.append((send_s, turn.index))
        else:
            self.completed_s.append(now_s)
