"""Routers in plain Python: which of some replicas a request goes to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from oracles.serving.state import Request
from windtunnel.serving.codes import HOLDING_ROUTERS, ROUTERS

ALL_ROUTERS = (*ROUTERS, *HOLDING_ROUTERS)
MULTIPLIER, MODULUS = 48271, 2**31 - 1


class Replicas(Protocol):
    """All replicas as a router sees them, by number."""

    def num_outstanding(self, number: int) -> int: ...
    def num_waiting(self, number: int) -> int: ...
    def used_blocks(self, number: int) -> int: ...
    def cached_tokens(self, number: int, request: Request) -> int: ...
    def has_adapter(self, number: int, adapter: int) -> bool: ...
    def is_up(self, number: int) -> bool: ...


@dataclass
class Router:
    """The routers of a deployment, which share their draws."""

    replicas: Replicas
    seed: int
    stays: bool
    """All replicas are there all the time."""
    caches: bool
    most_outstanding: int = 0
    """`deferred`: a replica with so many requests gets no more."""
    turns: list[int] = field(default_factory=lambda: [0, 0])
    """Position of the next candidate, of replicas that requests start at and of those that decode."""
    replica_of_session: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = int(self.seed) % (MODULUS - 1) + 1

    def draw(self, count: int) -> int:
        self.random = self.random * MULTIPLIER % MODULUS
        return self.random % count

    def route(self, request: Request, code: int, candidates: list[int], decodes: bool) -> int:
        """Returns one of `candidates`, or -1; looks at the request."""
        up = [number for number in candidates if self.replicas.is_up(number)]
        if ALL_ROUTERS[code] == "session_affinity" and request.session >= 0:
            former = self.replica_of_session.get(request.session, -1)
            if former in up:
                return former
        if ALL_ROUTERS[code] == "prefix_affinity" and self.caches and up:
            loads = {number: self.replicas.num_outstanding(number) for number in up}
            cached = {number: self.replicas.cached_tokens(number, request) for number in up}
            longest = max(up, key=lambda number: (cached[number], -loads[number], -number))
            least, most = min(loads.values()), max(loads.values())
            if cached[longest] > 0 and not (most - least > 64 and most > 1.5 * least):
                return longest
        return self.choose(request, code, candidates, decodes)

    def choose(self, request: Request, code: int, candidates: list[int], decodes: bool) -> int:
        """Returns one of `candidates`, or -1; looks at the replicas, and at the request's adapter."""
        router = ALL_ROUTERS[code]
        if router == "adapter_affinity" and request.adapter >= 0:
            resident = [
                number
                for number in candidates
                if self.replicas.is_up(number) and self.replicas.has_adapter(number, request.adapter)
            ]
            candidates = resident or candidates
        if len(candidates) == 1 and self.stays:
            return candidates[0]
        up = [number for number in candidates if self.replicas.is_up(number)]
        if not up:
            return -1
        if router == "round_robin":
            in_turn = candidates[self.turns[decodes] :] + candidates[: self.turns[decodes]]
            chosen = next(number for number in in_turn if number in up)
            self.turns[decodes] = (candidates.index(chosen) + 1) % len(candidates)
            return chosen
        if router == "random":
            return up[self.draw(len(up))] if len(candidates) > 1 else up[0]
        if router == "power_of_two" and len(candidates) > 1:
            up = sorted(up[self.draw(len(up))] for _ in range(2))
        load_of: Callable[[int], int] = {
            "least_kv": self.replicas.used_blocks,
            "least_waiting": self.replicas.num_waiting,
        }.get(router, self.replicas.num_outstanding)
        best = min(up, key=load_of)
        if router == "deferred" and load_of(best) >= self.most_outstanding:
            return -1
        return best
