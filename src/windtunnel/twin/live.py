"""A run of the serving loop that is told of its requests while it runs.

The tables are those of `serving.run.prepare_loop`, with rows for the requests to come; rows are used again once their
requests have ended. A call of the loop runs up to a time before which all requests are known, so that its times are
those of a simulation of the same requests.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Bools, Ints
from windtunnel.compiled.jit import repeated
from windtunnel.compiled.records import new_table
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.serving import codes
from windtunnel.serving.custom.policy import policy_name
from windtunnel.serving.custom.queue_order import Queued, seconds_of
from windtunnel.serving.custom.router import Arrival, Replicas, Router
from windtunnel.serving.deployment import is_own_router
from windtunnel.serving.loop.live import cancel, given_tokens
from windtunnel.serving.loop.serve import serve
from windtunnel.serving.prepared import PreparedDeployment, PreparedPool, check_served, prepare, users_router
from windtunnel.serving.run import UNSENT, Callers, Custom, Loop, prepare_loop, run_on
from windtunnel.serving.scenario import Scenario, pool_scenario, resolve
from windtunnel.serving.setup.fleet_plan import FAULT_COLUMNS, has_fleet
from windtunnel.serving.setup.per_request import check_per_request, schedules_per_request
from windtunnel.serving.setup.prefix_cache import caches_of
from windtunnel.serving.state import records as state
from windtunnel.serving.state.pools import KvTransfer
from windtunnel.twin.prefixes import PrefixForest, forest_for, nothing_shared
from windtunnel.workload.generate.requests import RequestArrays

MAX_REQUESTS = 16_384
"""Requests that may be under way at once."""
LIVE_CALL_S = 20.0
"""Longest call of a scheduler or router in Python: nobody is answered meanwhile. A choice, not a measurement."""
STEP_ROWS = 4_096
"""Rows of the buffer of steps, which is used again and again."""


class BusyError(WindtunnelError):
    """There is no room for another request now."""


class FailedError(WindtunnelError):
    """A scheduler or router in Python has failed; the run cannot go on."""


@dataclass(frozen=True, eq=False)
class LiveDeployment:
    """A deployment ready to serve requests that are not known yet."""

    scenario: Scenario
    prepared: PreparedDeployment

    @property
    def first(self) -> PreparedPool:
        """The pool whose engine, host and client times a user sees."""
        return self.prepared.pools[0]

    @property
    def max_model_len(self) -> int:
        return min(pool.setup.max_model_len for pool in self.prepared.pools)

    def check(self, input_tokens: int, output_tokens: int) -> None:
        """Raise InputError for a request that the deployment refuses or could never hold."""
        arrays = (np.array([0.0]), np.array([input_tokens]), np.array([output_tokens]), np.zeros(1, np.int64))
        request = RequestArrays(*arrays)
        for pool in self.prepared.pools:
            check_served(self.scenario, pool.pool, pool.setup, pool.memory, request)
            if schedules_per_request(pool.setup):
                check_per_request(pool.settings, request)


def prepare_live(scenario: Scenario, allow_download: bool = False, max_requests: int = MAX_REQUESTS) -> LiveDeployment:
    """Prepare a scenario's deployment; arguments and errors are those of `serving.simulate.simulate`.

    As a server does that is not told the longest request, it accepts what the model goes up to, and the KV cache holds.
    """
    if scenario.deployment.encoder is not None:
        raise InputError(
            "a live run has no pool of encoders: their queue is simulated before that of the other pools",
            "leave the pool with role encode out",
        )
    setups = []
    for pool in scenario.deployment.groups:
        setup = resolve(pool_scenario(scenario, pool), allow_download)
        if setup.model.is_encoder and not scenario.workload.is_pooling:
            scenario = _of_vectors(scenario)
        setups.append(replace(setup, engine=msgspec.structs.replace(setup.engine, max_model_len=setup.max_model_len)))
    waiting = _placeholders(max_requests)
    prepared = prepare(scenario, waiting, setups, allow_download)
    return LiveDeployment(scenario, prepared)


def _of_vectors(scenario: Scenario) -> Scenario:
    """Return a scenario whose requests end with their prompts; a live run reads nothing else of its workload."""
    outputs = dict.fromkeys(("output_tokens", "total_tokens", "sessions", "clients", "lengths_seed"))
    workload = msgspec.structs.replace(scenario.workload, task="embed", tenants=(), **outputs)
    return msgspec.structs.replace(scenario, workload=workload)


def _placeholders(num_requests: int) -> RequestArrays:
    """Return requests that never arrive."""
    ones = np.ones(num_requests, np.int64)
    return RequestArrays(np.full(num_requests, np.inf), ones, ones.copy(), np.zeros(num_requests, np.int64))


class LiveLoop:
    """The loop of a live run, with rows for `max_requests` under way, and what has become of its requests.

    Requests that `are_assigned` name their replicas, past the router; InputError where these come and go or form pools.
    """

    def __init__(
        self, deployment: LiveDeployment, max_requests: int = MAX_REQUESTS, are_assigned: bool = False
    ) -> None:
        self.deployment, self.size, self.are_assigned = deployment, max_requests, are_assigned
        described = deployment.scenario.deployment
        if are_assigned and (described.pools or has_fleet(described)):
            raise InputError(
                "requests cannot choose among replicas that come and go, form pools or hold requests back",
                "leave out autoscaling, faults, pools and the router, or serve all replicas at one port",
            )
        self.fleet = deployment.prepared.start_fleet(max_requests)
        self.forest: PrefixForest | None = None
        self.loop = self._new_loop()
        self.steps = new_table(state.Step, STEP_ROWS)
        self._until_s = np.full(1, -np.inf)
        run = self.loop.run_tables = self.loop.run_tables._replace(steps=self.steps, until_s=self._until_s)
        fleet = None if self.fleet is None else self.fleet.fleet
        # A fault changes prices in place, which other runs may share.
        prices: dict[str, Any] = self.loop.cost._asdict()
        own = {name: price.copy() for name, price in prices.items() if isinstance(price, np.ndarray)}
        self.cost: Any = self.loop.cost._replace(**own)
        self._arguments = (self.loop.pool, self.cost, run, self.loop.pools, fleet)
        self.requests: NDArray[np.void] = run.requests.view(np.ndarray)
        self._finish_s = self.requests["finish_s"]
        self._fresh = new_table(state.Request, 1, **UNSENT).view(np.ndarray)[0]
        self._clock = run.clock.view(np.ndarray)
        self._clock["next"] = max_requests
        self._num_queued, self._event_s = self._clock["queued"], run.events.view(np.ndarray)["time_s"]
        self._num_live, self._num_added = np.zeros(1, np.int64), 0
        self._live, self._given, self._changed, self._place, self._numbers = (
            np.zeros(max_requests, np.int64) for _ in range(5)
        )
        self._free = deque(range(max_requests))
        self._call, self._look, self._cancel = repeated(serve), repeated(given_tokens), repeated(cancel)
        self._to_cancel: set[int] = set()
        self._sessions: dict[Hashable, int] = {}
        self._callers = self._new_callers()
        self._which = np.full(1, state.NONE)
        self.on_steps: Callable[[NDArray[np.void]], None] = lambda _: None
        """Called with the `Step` records of every call."""
        self.tables: Any = self.loop.pool if self.loop.pools is None else self.loop.pools
        replicas = [pool.settings for pool in deployment.prepared.pools for _ in range(pool.settings.num_replicas)]
        ranks = [(number, each) for number, each in enumerate(replicas) for _ in range(each.ranks_per_replica)]
        self.replica_of_rank = [number for number, _ in ranks]
        self._replica_of_rank = np.array(self.replica_of_rank)
        self.num_blocks = np.array([each.num_blocks for _, each in ranks])
        self._block_size = np.array([each.block_size for _, each in ranks])

    def start(self) -> None:
        """Begin at 0 s, with everything compiled."""
        self.advance(0.0)
        self.look()
        pool, _, run, pools, fleet = self._arguments
        self._cancel(pool, run, pools, fleet, self._which, self._until_s)

    def _new_loop(self) -> Loop:
        """Return the tables of the run; prompts may share blocks where a pool keeps any and can count them."""
        pools = self.deployment.prepared.pools
        changes = {"fuses_steps": 0} | ({"router": codes.ASSIGNED} if self.are_assigned else {})
        plans = [pool.plan._replace(settings=pool.settings._replace(**changes)) for pool in pools]
        requests, caches = _placeholders(self.size), []
        router = self.deployment.scenario.deployment.router
        if router == "session_affinity" or is_own_router(router):
            nobody = np.full(self.size, state.NONE)
            requests = replace(requests, previous=nobody, session=np.arange(self.size))
        retention = [pool.countable for pool in pools]
        if any(kept.anywhere for kept in retention):
            self.forest = forest_for([plan.settings for plan in plans], self.size)
            requests = replace(requests, prefixes=nothing_shared(self.forest, self.size))
            caches = [caches_of(plan.settings, kept, requests) for plan, kept in zip(plans, retention, strict=True)]
        loop = prepare_loop(plans, requests, caches, self.deployment.prepared.handoff_rules, self.fleet)
        if self.forest is not None:
            assert loop.pool.cache is not None
            self.forest.attach(loop.pool.cache, [kept.anywhere for kept in retention])
        if loop.run_tables.sessions is not None:
            loop.run_tables.sessions.session[:] = state.NONE
        return loop

    def _new_callers(self) -> Callers:
        """Return status of the loop -> what answers its question: the scenario's router and schedulers in Python."""
        router = users_router(self.deployment.scenario.deployment)
        policies = [pool.policy for pool in self.deployment.prepared.pools]
        if router is None and not any(policies):
            return {}
        sessions = self.loop.run_tables.sessions
        columns: dict[str, Any] = {name: self.requests[name] for name in ("input_tokens", "output_tokens", "priority")}
        session = None if sessions is None else sessions.session
        self.loop.arrays = replace(self.loop.arrays, session=session, **columns)
        return self.loop.callers(Custom(router and self._numbered(router), policies, LIVE_CALL_S))

    def _numbered(self, router: Router) -> Router:
        """Return a router that is told the position of a request in the order of sending, and not its row."""

        def numbered(request: Arrival, replicas: Replicas) -> Any:
            return router(request._replace(number=int(self._numbers[request.number])), replicas)

        numbered.__name__ = policy_name(router).rpartition(":")[2]
        return numbered

    @property
    def num_live(self) -> int:
        return int(self._num_live[0])

    @property
    def until_s(self) -> float:
        """Time up to which the run has come."""
        return float(self._until_s[0])

    def next_event_s(self) -> float:
        """Return when something happens next, infinity if nothing does before another request."""
        event_s = float(self._event_s[0]) if self._num_queued[0] > 0 else math.inf
        if self.fleet is not None:
            fleet = self.fleet.fleet
            control = fleet.control[0]
            event_s = min(event_s, float(control.next_s))
            if control.num_at_router > 0 and control.asks:
                event_s = min(event_s, float(control.asked_s))
            if control.num_retries > 0:
                event_s = min(event_s, float(fleet.retry_s[control.first_retry]))
        return event_s

    def add(
        self,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        priority: int = 0,
        tokens: Sequence[int] | None = None,
        session: Hashable = None,
        replica: int = 0,
    ) -> int:
        """Send a request; returns its row. The run goes on to `arrival_s`, which must lie behind `until_s`. BusyError
        where too many requests are under way.

        Args:
            tokens: ids of prompt and output, by which it shares blocks with others; None: with none.
            session: requests of one session may stay on one replica.
            replica: where requests name theirs.
        """
        if not self._free:
            raise BusyError(f"{self.size:,} requests are under way, which is as many as there is room for")
        assert arrival_s > self._until_s[0]
        row = self._free[0]  # which stays free where what is given cannot be written
        self._reset(row)
        records = self.requests
        records["arrival_s"][row], records["priority"][row] = arrival_s, priority
        records["input_tokens"][row], records["output_tokens"][row] = input_tokens, output_tokens
        records["ttft_limit_s"][row], records["rank"][row] = np.inf, replica
        if (order := self.deployment.prepared.queue_order) is not None:
            asked = Queued(*(np.array([value]) for value in (input_tokens, output_tokens, priority, -1, -1)))
            records["ttft_limit_s"][row] = seconds_of(order, asked)[0]
        self._numbers[row], self._num_added = self._num_added, self._num_added + 1
        if self.forest is not None:
            self.forest.place(row, tokens or ())
        if self.loop.run_tables.sessions is not None:
            self.loop.run_tables.sessions.session[row] = self._session_number(session)
        place = self._num_live[0]
        self._live[place], self._place[row], self._given[row] = row, place, 0
        self._num_live[0] = place + 1
        self._free.popleft()
        self._clock["next"][0] = row
        self.advance(arrival_s)
        return row

    def _reset(self, row: int) -> None:
        """Leave a row as it is at the beginning of a run."""
        tag = self.requests["tenant_tag"][row]
        self.requests[row] = self._fresh
        self.requests["tenant_tag"][row] = tag
        if self.loop.pools is not None:
            unknown = dict.fromkeys(("handed_s", "transfer_start_s", "transfer_end_s"), np.nan)
            self.loop.pools.transfers[row] = new_table(KvTransfer, 1, **unknown)[0]
        if self.fleet is not None:
            self.fleet.fleet.num_retries[row] = self.fleet.fleet.discarded_tokens[row] = 0

    def _session_number(self, session: Hashable) -> int:
        """Return the number of a session; the oldest ones are forgotten."""
        if session is None:
            return state.NONE
        number = self._sessions.pop(session, None)
        if number is None:
            number = len(self._sessions)
            if number == self.size:
                number = self._sessions.pop(next(iter(self._sessions)))
            assert self.loop.run_tables.sessions is not None
            self.loop.run_tables.sessions.replica[number] = state.NONE
        self._sessions[session] = number
        return number

    def advance(self, until_s: float) -> None:
        """Run up to `until_s`: its events, and steps that start until then; FailedError where a policy fails."""
        self._until_s[0] = until_s
        while True:
            self._clock["finished"][0] = self._clock["ended"][0] = 0
            try:
                run_on(self._call, self._arguments, self._callers)
            except InputError as error:
                raise FailedError(error.message, error.hint) from error
            num_rows = int(self._clock["rows"][0])
            if num_rows:
                self.on_steps(self.steps.view(np.ndarray)[:num_rows])
            if self.fleet is not None:
                self._keep_fleet_log()
            if self._to_cancel:
                self._cancel_all()
            if self.next_event_s() > until_s:
                return

    def _keep_fleet_log(self) -> None:
        """Draw new faults, and drop the log of the fleet, as it would grow for ever."""
        assert self.fleet is not None
        control, replicas = self.fleet.fleet.control[0], self.fleet.fleet.replicas
        if control.num_phases or control.num_losses or replicas["next_fault"].max() > FAULT_COLUMNS // 2:
            self.fleet.collect()
            self.fleet.phases.clear()
            self.fleet.losses.clear()

    def look(self) -> tuple[Ints, Ints, Bools]:
        """Return rows, output tokens and whether they have ended, of the requests with more tokens since the last look.

        Those that have ended are forgotten; their records stay in their rows until the next call of `add`.
        """
        pool, _, run, pools, _ = self._arguments
        count = self._look(pool, run, pools, self._num_live, self._live, self._given, self._changed)
        rows = self._changed[:count]
        ended = ~np.isnan(self._finish_s[rows])
        if ended.any():
            for row in rows[ended].tolist():
                self._forget(row)
        return rows, self._given[rows], ended

    def _forget(self, row: int) -> None:
        """Let a row be used again."""
        self._num_live[0] -= 1
        place, last = self._place[row], self._live[self._num_live[0]]
        self._live[place], self._place[last] = last, place
        self._free.append(row)
        self._to_cancel.discard(row)
        if self.forest is not None:
            self.forest.leave(row)

    def cancel(self, row: int) -> None:
        """End a request whose client has left, now or as soon as the loop can."""
        self._to_cancel.add(row)
        self._cancel_all()

    def _cancel_all(self) -> None:
        pool, _, run, pools, fleet = self._arguments
        for row in list(self._to_cancel):
            self._which[0] = row
            if not np.isnan(self.requests["finish_s"][row]) or self._cancel(
                pool, run, pools, fleet, self._which, self._until_s
            ):
                self._to_cancel.discard(row)

    def replica(self, row: int) -> int:
        """Return the replica that a request is at, counted through all pools."""
        return self.replica_of_rank[int(self.requests["rank"][row])]

    def replicas(self, rows: Ints) -> Ints:
        """Return the replicas that requests are at, counted through all pools."""
        return np.asarray(self._replica_of_rank[self.requests["rank"][rows]])

    def prefill_rank(self, row: int) -> int:
        """Return the rank that computes or has computed a request's prompt."""
        if self.loop.pools is None or np.isnan(self.loop.pools.transfers[row].handed_s):
            return int(self.requests["rank"][row])
        return int(self.loop.pools.transfers[row].prefill_rank)

    def is_running(self, row: int) -> bool:
        """Whether a request has been scheduled, and not been preempted since."""
        record = self.requests[row]
        is_back = record["num_preemptions"] and not record["is_decoding"] and record["computed_tokens"] == 0
        return not np.isnan(record["scheduled_s"]) and not is_back

    def cached_tokens(self, row: int) -> int:
        """Return the tokens of a prompt that were found cached where it was first admitted."""
        cache, pools = self.loop.pool.cache, self.loop.pools
        if cache is None:
            return 0
        index = row if pools is None else row + self.size * int(pools.pool_of_rank[self.prefill_rank(row)])
        return max(int(cache.requests["cached_tokens"][index]), 0)

    def loaded_tokens(self, row: int) -> int:
        """Return those of the cached tokens of a prompt that came from KV tiers below the device."""
        cache = self.loop.pool.cache
        if cache is None or not cache.loaded.size:
            return 0
        return int(cache.loaded[:, row].sum() * self._block_size[self.prefill_rank(row)])

    def gauges(self) -> dict[str, NDArray[Any]]:
        """Return each replica's running and waiting requests, the used fraction of its KV blocks, and their tokens."""

        def by_replica(of_ranks: Ints) -> NDArray[Any]:
            return np.bincount(self.replica_of_rank, of_ranks)

        ranks = self.tables.ranks
        used = self.num_blocks - ranks["free_blocks"]
        cache = self.loop.pool.cache
        cached = np.zeros_like(used) if cache is None else cache.ranks["evictable_blocks"]
        use, used_tokens = by_replica(used) / np.maximum(by_replica(self.num_blocks), 1), used * self._block_size
        return {
            "running": by_replica(ranks["num_running"]),
            "waiting": by_replica(ranks["num_waiting"]),
            **dict.fromkeys(("kv_use", "full_use"), use),
            **dict.fromkeys(("used_tokens", "kv_used"), by_replica(used_tokens)),
            "kv_evictable": by_replica(cached * self._block_size),
            "kv_available": by_replica((ranks["free_blocks"] - cached) * self._block_size),
        }
