"""A twin of a deployment: requests that come while it runs, and their tokens when the deployment would give them."""

import asyncio
import heapq
import logging
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from windtunnel.compiled.arrays import Ints
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.faults import FaultPlan, TwinFault
from windtunnel.twin.live import FailedError, LiveDeployment, LiveLoop
from windtunnel.units import format_count
from windtunnel.workload.client import Client

EARLY_S = 0.001
"""How much before an event the event loop's timer ends, for it counts whole milliseconds; the rest is slept."""
NAP_S = 0.00025
"""Longest sleep between two looks at the network. Looking at the clock all the time would keep a processor busy."""
LATE_S = 0.005
"""Wall time behind which a stream's tokens that are due leave in one event, as in vLLM's server when it is late."""
TOGETHER_S = 0.00025
"""What is due within so many seconds of the wall's clock leaves together."""
MOST_EVENTS = 32
"""Events between two looks at the network."""
_LOG = logging.getLogger("windtunnel.twin")
OnTokens = Callable[["Answer", int, bool], None]
"""Called with an answer, how many of its `sent` tokens had left before, and whether it has ended."""


class Observer(Protocol):
    """Who counts what a twin does."""

    def began(self, answer: "Answer", time_s: float) -> None: ...
    def gave(self, replica: int, tokens: int) -> None: ...
    def waited(self, replica: int, gap_s: float, times: int) -> None: ...
    def ended(self, answer: "Answer", time_s: float) -> None: ...
    def sent(self, late_s: float, tokens: int) -> None: ...


@dataclass(eq=False, slots=True)
class Answer:
    """One request under way, or ended; times are simulated ones, and NaN until they are known."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    on_tokens: OnTokens
    """Called when tokens leave the server."""
    row: int = -1
    replica: int = 0
    prefill_replica: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    """Of these, from KV tiers below the device."""
    num_preemptions: int = 0
    scheduled_s: float = math.nan
    first_token_s: float = math.nan
    finish_s: float = math.nan
    sent: int = 0
    """Tokens that have left."""
    has_ended: bool = False
    is_cancelled: bool = False
    finish_reason: str = "length"
    adapter: str = ""
    """Name of the LoRA adapter that it asks for; empty: none."""
    most_tokens: int = 0
    """Output tokens beyond which the request asks for no more; 0: it asks for a vector."""
    siblings: Sequence["Answer"] = ()
    """All answers to its prompt, itself among them, where a request asks for several."""


@dataclass(slots=True)
class Leaving:
    """Tokens that a step has computed, in the order in which they leave; those before `begin` have left."""

    step_s: float
    """End of the step."""
    delays_s: list[float]
    """What the server itself takes from then on, until the tokens of each answer leave."""
    answers: list[Answer]
    tokens: list[int]
    """Output tokens of each answer up to these."""
    ended: list[bool]
    begin: int = 0

    @property
    def due_s(self) -> float:
        """When the next of them are due."""
        return self.step_s + self.delays_s[self.begin]

    @property
    def last_s(self) -> float:
        """When the last of them are due."""
        return self.step_s + self.delays_s[-1]

    def part(self, begin: int, end: int) -> Iterator[tuple[Answer, int, bool, float]]:
        """Return answer, output tokens, whether it has ended, and the delay of some of them."""
        some = slice(begin, end)
        return zip(self.answers[some], self.tokens[some], self.ended[some], self.delays_s[some], strict=True)


class Twin:
    """A deployment that answers.

    Args:
        max_requests: requests that may be under way.
        are_assigned: requests name their replicas.
    """

    def __init__(
        self,
        deployment: LiveDeployment,
        clock: TwinClock,
        max_requests: int,
        observer: Observer | None = None,
        faults: Sequence[TwinFault] = (),
        are_assigned: bool = False,
    ) -> None:
        self.deployment, self.clock, self.observer = deployment, clock, observer
        self.live = LiveLoop(deployment, max_requests, are_assigned)
        self.live.start()
        # Whoever connects adds a client's own seconds.
        self._server = Client().behind(deployment.first.setup.engine.host)
        self._answers: dict[int, Answer] = {}
        self._streams = [0] * (max(self.live.replica_of_rank) + 1)
        self._due: list[tuple[float, int, Leaving]] = []
        """Heap of steps by when their next tokens are due."""
        self._given = np.zeros(max_requests, np.int64)
        self._given_s, self._delay_s = np.full(max_requests, np.nan), np.zeros(max_requests)
        """Of the request in each row: tokens that the scheduler has given, when, and what the server takes for each."""
        self._num_looks, self._is_stuck = 0, False
        self._timer: asyncio.Handle | None = None
        self._faults = FaultPlan(self.live, faults)
        self.failure: FailedError | None = None
        """Why nothing is answered any more."""
        self.on_look: Callable[[bool], None] | None = None
        """Called after every look at the clock, with whether no request is under way."""

    def submit(
        self,
        lengths: tuple[int, int],
        on_tokens: OnTokens,
        tokens: Sequence[int] | None = None,
        priority: int = 0,
        session: Hashable = None,
        replica: int = 0,
    ) -> Answer:
        """Send a request now.

        Args:
            lengths: input and output tokens.
            tokens: ids of prompt and output, by which it shares KV blocks with others.
            priority: the smaller is served first.
            session: requests of one session may stay on one replica.
            replica: where requests name theirs.

        Raises:
            InputError: the deployment never serves such a request.
            BusyError: too many are under way.
            FailedError: a scheduler or router in Python has failed, now or before.
        """
        self.deployment.check(*lengths)
        now_s = self.clock.now_s()
        self.run_to(now_s)
        self._faults.apply(now_s)
        arrival_s = max(now_s, math.nextafter(self.live.until_s, math.inf))
        answer = Answer(arrival_s, *lengths, on_tokens)
        try:
            if self.failure is None:
                answer.row = self.live.add(arrival_s, *lengths, priority, tokens, session, replica)
        except FailedError as error:
            self._fail(error)
        if self.failure is not None:
            raise self.failure
        self._answers[answer.row] = answer
        self._given[answer.row], self._given_s[answer.row] = 0, math.nan
        self._look(arrival_s)
        self.wake()
        return answer

    def adapters(self, replica: int | None = None) -> tuple[list[str], list[str]]:
        """Return the LoRA adapters of the requests that wait, and of those that run, at one replica or at all."""
        names: tuple[dict[str, None], dict[str, None]] = {}, {}
        for answer in self._answers.values():
            if answer.adapter and replica in (None, self.live.replica(answer.row)):
                names[self.live.is_running(answer.row)][answer.adapter] = None
        return list(names[0]), list(names[1])

    def cancel(self, answer: Answer) -> None:
        """End a request whose client has left; it is told nothing more."""
        if not answer.is_cancelled:
            answer.is_cancelled, answer.finish_reason = True, "abort"
            if self._answers.get(answer.row) is answer:
                self.live.cancel(answer.row)
                self._look(self.live.until_s)
                self.wake()

    def next_s(self) -> float:
        """Return the simulated time at which something happens next."""
        if self.failure is not None:
            return math.inf
        event_s = min(self.live.next_event_s(), self._faults.next_s())
        return min(event_s, self._due[0][0]) if self._due else event_s

    def run_to(self, now_s: float, most_events: int | None = None) -> None:
        """Apply what happens up to a simulated time, or so many events: tokens that are due leave."""
        try:
            if self.failure is None:
                self._apply_events(now_s, most_events)
        except FailedError as error:
            self._fail(error)

    def _fail(self, error: FailedError) -> None:
        """End all requests: the run cannot go on, and nothing is answered any more."""
        self.failure = error
        _LOG.error("error: %s%s", error.message, f"\nhint: {error.hint}" if error.hint else "")
        if self._due:
            self._send_due(math.inf)
        for answer in self._answers.values():
            if not answer.is_cancelled:
                answer.is_cancelled = answer.has_ended = True
                answer.finish_reason = "abort"
                if self.observer is not None:
                    self.observer.ended(answer, self.clock.now_s())
                answer.on_tokens(answer, answer.sent, True)
        self._answers.clear()

    def _apply_events(self, now_s: float, most_events: int | None) -> None:
        """Apply events as `run_to` does."""
        num_events, speed = 0, self.clock.speed
        late_s = -math.inf if speed is None else now_s - LATE_S * speed
        while most_events is None or num_events < most_events:
            event_s = min(self.live.next_event_s(), self._faults.next_s())
            due_s = self._due[0][0] if self._due else math.inf
            time_s = min(event_s, due_s)
            if time_s > now_s or (speed is None and not self._answers and not self._due):
                return
            self.clock.reached_s = max(self.clock.reached_s, time_s)
            if event_s <= max(due_s, late_s):
                if self._faults.next_s() <= event_s or self._faults.takes_blocks:
                    self._faults.apply(event_s)
                self.live.advance(event_s)
                self._look(event_s)
            else:
                self._send_due(now_s if speed is not None else self._before_next(event_s))
            num_events += 1
        if speed is not None and self._due and self._due[0][0] <= now_s:
            self._send_due(now_s)

    def _look(self, time_s: float) -> None:
        """Note the tokens that the loop has given by `time_s`; they leave the server later."""
        rows, tokens, ended = self.live.look()
        if rows.size == 0:
            return
        answers, given = list(map(self._answers.__getitem__, rows.tolist())), self._given[rows]
        is_first = given == 0
        first_tokens = []
        for index in np.flatnonzero(is_first | ended).tolist():
            answer = answers[index]
            self._note(answer)
            self._streams[answer.replica] += int(is_first[index]) - int(ended[index])
            if ended[index]:
                del self._answers[answer.row]
            if is_first[index]:
                first_tokens.append(answer)
        for answer in first_tokens:
            others = max(self._streams[answer.replica] - 1, 0)
            self._delay_s[answer.row] = self._server.ttft_s(answer.input_tokens, others)
        if self.observer is not None:
            self._count(self.observer, time_s, rows, tokens - given)
        self._given[rows], self._given_s[rows] = tokens, time_s
        delays_s = self._delay_s[rows]
        order = np.argsort(delays_s, kind="stable")
        answers = [answers[index] for index in order.tolist()]
        leaving = Leaving(time_s, delays_s[order].tolist(), answers, tokens[order].tolist(), ended[order].tolist())
        self._num_looks += 1
        heapq.heappush(self._due, (leaving.due_s, self._num_looks, leaving))

    def _count(self, observer: Observer, time_s: float, rows: Ints, more: Ints) -> None:
        """Count the tokens of a step, and the gaps since the last ones: one for a request's tokens, as engines do."""
        replicas = self.live.replicas(rows)
        for replica in {*replicas.tolist()}:
            own = replicas == replica
            observer.gave(replica, int(more[own].sum()))
            gaps_s = time_s - self._given_s[rows[own & (more > 0)]]
            for gap_s, count in Counter(gaps_s[~np.isnan(gaps_s)].tolist()).items():
                observer.waited(replica, gap_s, count)

    def _note(self, answer: Answer) -> None:
        """Copy what the loop knows of a request that has its first or last token."""
        record = self.live.requests[answer.row]
        if math.isnan(answer.first_token_s):
            answer.replica = self.live.replica(answer.row)
            answer.prefill_replica = self.live.replica_of_rank[self.live.prefill_rank(answer.row)]
        answer.cached_tokens = self.live.cached_tokens(answer.row)
        answer.loaded_tokens = self.live.loaded_tokens(answer.row)
        answer.scheduled_s, answer.first_token_s = float(record["scheduled_s"]), float(record["first_token_s"])
        answer.finish_s, answer.num_preemptions = float(record["finish_s"]), int(record["num_preemptions"])

    def _before_next(self, event_s: float) -> float:
        """Return a time by which tokens of the next step that are due leave before any others, and before an event."""
        first = self._due[0]
        others_s = min(self._due[1:3])[0] if len(self._due) > 1 else math.inf
        until_s = max(first[0], min(first[2].last_s, event_s, math.nextafter(others_s, 0.0)))
        self.clock.reached_s = max(self.clock.reached_s, until_s)
        return until_s

    def _send_due(self, due_s: float) -> None:
        """Let all tokens that are due by `due_s` leave: those of one answer together where they are late."""
        due, first_s, num_tokens = self._due, self._due[0][0], 0
        late: dict[Answer, int] | None = {} if due_s - first_s > LATE_S * (self.clock.speed or math.inf) else None
        while due and due[0][0] <= due_s:
            _, number, leaving = heapq.heappop(due)
            begin = leaving.begin
            leaving.begin = end = bisect_right(leaving.delays_s, due_s - leaving.step_s, begin + 1)
            num_tokens += end - begin
            for answer, tokens, is_finished, delay_s in leaving.part(begin, end):
                sent = answer.sent
                answer.sent = tokens
                if is_finished or sent == 0:
                    self._tell(answer, is_finished, sent == 0, leaving.step_s + delay_s)
                if answer.is_cancelled:
                    continue
                if late is None:
                    answer.on_tokens(answer, sent, is_finished)
                else:
                    late.setdefault(answer, sent)
            if end < len(leaving.answers):
                heapq.heappush(due, (leaving.due_s, number, leaving))
        for answer, sent in (late or {}).items():
            answer.on_tokens(answer, sent, answer.has_ended)
        if self.observer is not None and self.clock.speed is not None:
            self.observer.sent(max(self.clock.now_s() - first_s, 0.0) / self.clock.speed, num_tokens)

    def _tell(self, answer: Answer, is_finished: bool, is_first: bool, time_s: float) -> None:
        """Tell the observer of the first or the last token of a request."""
        answer.has_ended = is_finished
        if self.observer is not None:
            if is_first and not answer.is_cancelled:
                self.observer.began(answer, time_s)
            if is_finished:
                self.observer.ended(answer, time_s)

    def wake(self) -> None:
        """Plan the next look at the clock, in the running event loop."""
        if self._timer is not None:
            self._timer.cancel()
        next_s = self.next_s()
        if math.isinf(next_s) and self._answers and not self._is_stuck:
            self._is_stuck = True
            count = format_count(len(self._answers), "request")
            _LOG.warning("warning: the scheduler or the router lets %s wait, and nothing else is under way", count)
        if math.isinf(next_s) or (self.clock.speed is None and not self._answers and not self._due):
            self._timer = None
            return
        loop, wait_s = asyncio.get_running_loop(), self.clock.wait_s(next_s) - EARLY_S
        self._timer = loop.call_later(wait_s, self._on_time) if wait_s > 0 else loop.call_soon(self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        speed = self.clock.speed
        if speed is None:
            self.run_to(math.inf, MOST_EVENTS)
        else:
            early_s = self.clock.wait_s(self.next_s()) - TOGETHER_S
            if early_s > 0:
                time.sleep(min(early_s, NAP_S))
            self.run_to(self.clock.now_s() + TOGETHER_S * speed, MOST_EVENTS)
        if self.on_look is not None:
            self.on_look(not self._answers)
        self.wake()

    def close(self) -> None:
        """Stop looking at the clock."""
        if self._timer is not None:
            self._timer.cancel()
