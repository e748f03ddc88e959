"""Route requests by the user's function in Python, plain or compiled, which chooses a replica for each."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from windtunnel.compiled.arrays import Bools, Ints
from windtunnel.errors import InputError
from windtunnel.serving import codes
from windtunnel.serving.custom.policy import read_only
from windtunnel.serving.custom.time_limit import InTime
from windtunnel.serving.state import records as state
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.pools import PoolPlan
from windtunnel.workload.generate.requests import RequestArrays


class Arrival(NamedTuple):
    """The request that is to be sent to a replica."""

    number: int
    """Position in the order of sending."""
    arrival_s: float
    """When the client sent it."""
    input_tokens: int
    output_tokens: int
    """Tokens that the request will produce. A real router does not know them."""
    priority: int
    tenant: int
    """-1: none."""
    session: int
    """-1: none."""
    num_retries: int
    """Replicas that have failed under it."""


class Replicas(NamedTuple):
    """All replicas, by index; arrays that a router may read and must not change."""

    now_s: float
    is_up: Bools
    """Only these may be chosen: they are up, and compute prompts."""
    num_waiting: Ints
    num_running: Ints
    waiting_tokens: Ints
    """Tokens still to be computed of the waiting prompts."""
    free_blocks: Ints
    num_blocks: Ints
    """KV blocks of each replica."""
    pool: Ints
    """Position of each replica's pool in the deployment; 0 where there is one."""


Router = Callable[[Arrival, Replicas], Any]
"""`router(request, replicas)` -> the index of a replica that is up; or None: the request and those behind it wait at
the router until another one ends or a replica comes up; then the router is called again."""


class RouterCaller:
    """Calls a router; holds the arrays of one run, which the loop changes between two calls."""

    def __init__(
        self,
        router: Router,
        plans: Sequence[PoolPlan],
        requests: RequestArrays,
        ranks: state.Table,
        fleet: ReplicaFleet,
        most_call_s: float | None = None,
    ) -> None:
        self.call = InTime(f"the router {getattr(router, '__name__', type(router).__name__)}", router, most_call_s)
        nobody = np.full(requests.arrival_s.size, -1)
        columns, replicas = ranks.view(np.ndarray), fleet.replicas.view(np.ndarray)
        # A field of a record array costs 4 us a look; of its columns, seen as plain arrays, 0.1 us.
        self.ranks = [
            read_only(columns[name]) for name in ("num_waiting", "num_running", "waiting_tokens", "free_blocks")
        ]
        num_replicas = [plan.settings.num_replicas for plan in plans]
        self.pool = read_only(np.repeat(np.arange(len(plans)), num_replicas))
        widths = np.array([plan.settings.ranks_per_replica for plan in plans])[self.pool]
        self.first_ranks = np.concatenate([[0], np.cumsum(widths)[:-1]])
        self.num_blocks = read_only(np.array([plan.settings.num_blocks for plan in plans])[self.pool] * widths)
        self.computes_prompts = np.array([plan.role != codes.DECODE for plan in plans])[self.pool]
        self.has_one_rank = bool((widths == 1).all())
        self.phase, self.control = replicas["phase"], fleet.control.view(np.ndarray)
        self.sent_s = fleet.sent_s
        tenant, session = (nobody if column is None else column for column in (requests.tenant, requests.session))
        known = requests.input_tokens, requests.output_tokens, requests.priority
        self.columns = (*known, tenant, session, fleet.num_retries)

    def route(self) -> None:
        """Choose a replica for the request at the router; InputError where it raises, or returns none that is up."""
        control = self.control[0]
        i, now_s = int(control["pending"]), float(control["pending_s"])
        request = Arrival(i, float(self.sent_s[i]), *(int(column[i]) for column in self.columns))
        columns: list[Ints] = self.ranks
        if not self.has_one_rank:
            columns = [np.add.reduceat(column, self.first_ranks) for column in self.ranks]
        is_up = (self.phase == codes.UP) & self.computes_prompts
        waiting, running, waiting_tokens, free_blocks = columns
        replicas = Replicas(now_s, is_up, waiting, running, waiting_tokens, free_blocks, self.num_blocks, self.pool)
        control["answer"] = self._checked(self.call(now_s, request, replicas), is_up, i, now_s)

    def _checked(self, answer: Any, is_up: Bools, i: int, now_s: float) -> int:
        """Return the router's answer as a replica that is up, or `NONE`."""
        if answer is None:
            return state.NONE
        try:
            replica = operator.index(answer)
        except TypeError:
            replica = state.NONE
        if replica < 0 or isinstance(answer, bool | np.bool):
            raise InputError(
                f"{self.call.what} returned {answer!r:.80} for request {i}",
                "return the index of a replica, 0 or above, or None to hold the request back",
            )
        if replica >= is_up.size or not is_up[replica]:
            up = ", ".join(map(str, np.flatnonzero(is_up)[:20])) or "none"
            raise InputError(
                f"{self.call.what} sent request {i} to replica {replica} at {now_s:g} s", f"replicas that are up: {up}"
            )
        return replica
