"""A twin of a deployment: requests that come while it runs, and their tokens when the deployment would give them."""

import asyncio
import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from windtunnel.twin.clock import TwinClock
from windtunnel.twin.faults import FaultPlan, TwinFault
from windtunnel.twin.live import LiveDeployment, LiveLoop
from windtunnel.workload.client import Client

EARLY_S = 0.0005
"""How much before an event the clock is looked at again and again: event loops wait for whole milliseconds."""
TOGETHER_S = 0.00025
"""What is due within so many seconds of the wall's clock leaves together."""
MOST_EVENTS = 16
"""Events between two looks at the network."""
OnTokens = Callable[["Answer", int, bool], None]
"""Called with an answer, its output tokens so far, and whether it has ended."""


class Observer(Protocol):
    """Who counts what a twin does."""

    def gave(self, answer: "Answer", tokens: int, time_s: float) -> None: ...
    def ended(self, answer: "Answer", time_s: float) -> None: ...
    def sent(self, late_s: float) -> None: ...


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
    cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_s: float = math.nan
    first_token_s: float = math.nan
    finish_s: float = math.nan
    delay_s: float = 0.0
    """What the server itself takes until the first token leaves."""
    given: int = 0
    """Tokens that the scheduler has given."""
    sent: int = 0
    given_s: float = math.nan
    """When the latest of `sent` tokens left."""
    is_cancelled: bool = False
    finish_reason: str = "length"


class Twin:
    """A deployment that answers.

    Args:
        deployment: what it does as.
        clock: simulated time.
        max_requests: requests that may be under way.
        observer: counts what happens.
        faults: what goes wrong, and when.
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
        self._due: list[tuple[float, int, Answer, int, bool]] = []
        self._num_due = 0
        self._timer: asyncio.Handle | None = None
        self._faults = FaultPlan(self.live, faults)
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
            on_tokens: called when its tokens leave the server.
            tokens: ids of prompt and output, by which it shares KV blocks with others.
            priority: the smaller is served first.
            session: requests of one session may stay on one replica.
            replica: where requests name theirs.

        Raises:
            InputError: the deployment never serves such a request.
            BusyError: too many are under way.
        """
        self.deployment.check(*lengths)
        now_s = self.clock.now_s()
        self.run_to(now_s)
        self._faults.apply(now_s)
        arrival_s = max(now_s, math.nextafter(self.live.until_s, math.inf))
        answer = Answer(arrival_s, *lengths, on_tokens)
        answer.row = self.live.add(arrival_s, *lengths, priority, tokens, session, replica)
        self._answers[answer.row] = answer
        self._look(arrival_s)
        self.wake()
        return answer

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
        event_s = min(self.live.next_event_s(), self._faults.next_s())
        return min(event_s, self._due[0][0]) if self._due else event_s

    def run_to(self, now_s: float, most_events: int | None = None) -> None:
        """Apply what happens up to a simulated time, or so many events: tokens that are due leave."""
        num_events = 0
        while most_events is None or num_events < most_events:
            event_s = min(self.live.next_event_s(), self._faults.next_s())
            due_s = self._due[0][0] if self._due else math.inf
            time_s = min(event_s, due_s)
            if time_s > now_s or (self.clock.speed is None and not self._answers and not self._due):
                return
            self.clock.reached_s = max(self.clock.reached_s, time_s)
            if event_s <= due_s:
                if self._faults.next_s() <= event_s or self._faults.takes_blocks:
                    self._faults.apply(event_s)
                self.live.advance(event_s)
                self._look(event_s)
            else:
                self._send_due(now_s if self.clock.speed is not None else due_s)
            num_events += 1

    def _look(self, time_s: float) -> None:
        """Note the tokens that the loop has given by `time_s`; they leave the server later."""
        live, first_tokens = self.live, []
        for row, tokens, is_finished in live.look():
            answer = self._answers[row]
            is_first = answer.given == 0
            answer.given = tokens
            if is_first or is_finished:
                self._note(answer)
            if is_finished:
                del self._answers[row]
                if not is_first:
                    self._streams[answer.replica] -= 1
            elif is_first:
                self._streams[answer.replica] += 1
            if is_first:
                first_tokens.append((answer, tokens, is_finished))
            else:
                self._plan(answer, time_s, tokens, is_finished)
        for answer, tokens, is_finished in first_tokens:
            others = max(self._streams[answer.replica] - 1, 0)
            answer.delay_s = float(self._server.ttft_s(answer.input_tokens, others))
            self._plan(answer, time_s, tokens, is_finished)

    def _note(self, answer: Answer) -> None:
        """Copy what the loop knows of a request that has its first or last token."""
        record = self.live.requests[answer.row]
        if math.isnan(answer.first_token_s):
            answer.replica = self.live.replica(answer.row)
        answer.cached_tokens = self.live.cached_tokens(answer.row)
        answer.scheduled_s, answer.first_token_s = float(record["scheduled_s"]), float(record["first_token_s"])
        answer.finish_s, answer.num_preemptions = float(record["finish_s"]), int(record["num_preemptions"])

    def _plan(self, answer: Answer, time_s: float, tokens: int, is_finished: bool) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (time_s + answer.delay_s, self._num_due, answer, tokens, is_finished))

    def _send_due(self, due_s: float) -> None:
        """Let all tokens that are due by `due_s` leave."""
        due, observer = self._due, self.observer
        first_s = due[0][0]
        while due and due[0][0] <= due_s:
            time_s, _, answer, tokens, is_finished = heapq.heappop(due)
            if observer is not None:
                if not answer.is_cancelled:
                    observer.gave(answer, tokens, time_s)
                if is_finished:
                    observer.ended(answer, time_s)
            if not answer.is_cancelled:
                answer.on_tokens(answer, tokens, is_finished)
            answer.given_s, answer.sent = time_s, tokens
        if observer is not None and self.clock.speed is not None:
            observer.sent(max(self.clock.now_s() - first_s, 0.0) / self.clock.speed)

    def wake(self) -> None:
        """Plan the next look at the clock, in the running event loop."""
        if self._timer is not None:
            self._timer.cancel()
        next_s = self.next_s()
        if math.isinf(next_s) or (self.clock.speed is None and not self._answers and not self._due):
            self._timer = None
            return
        loop, wait_s = asyncio.get_running_loop(), self.clock.wait_s(next_s) - EARLY_S
        self._timer = loop.call_later(wait_s, self._on_time) if wait_s > 0 else loop.call_soon(self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        speed = self.clock.speed
        self.run_to(math.inf if speed is None else self.clock.now_s() + TOGETHER_S * speed, MOST_EVENTS)
        if self.on_look is not None:
            self.on_look(not self._answers)
        self.wake()

    def close(self) -> None:
        """Stop looking at the clock."""
        if self._timer is not None:
            self._timer.cancel()
