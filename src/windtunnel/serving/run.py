"""Run the compiled loop: fresh tables, buffers of steps, questions to a user's router and policies, and the end."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.compiled.jit import repeated
from windtunnel.compiled.records import new_table
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.limits import check_size
from windtunnel.metrics.records import STEP_COLUMNS, Table
from windtunnel.serving import codes
from windtunnel.serving.custom.policy import Policy, PolicyCaller, policy_name
from windtunnel.serving.custom.router import Router, RouterCaller
from windtunnel.serving.loop.serve import serve
from windtunnel.serving.setup.encoder import EncodeRun
from windtunnel.serving.setup.fleet_plan import FleetRun
from windtunnel.serving.setup.prefix_cache import session_state
from windtunnel.serving.state import per_request, status
from windtunnel.serving.state import records as state
from windtunnel.serving.state.adapters import Adapters, new_adapters
from windtunnel.serving.state.per_request import Trail
from windtunnel.serving.state.pools import (
    HandoffRules,
    PoolPlan,
    Pools,
    joined_caches,
    joined_lists,
    new_pool_events,
    new_pool_records,
    new_pools,
)
from windtunnel.serving.state.tables import PoolTables, RunTables
from windtunnel.workload.generate.requests import RequestArrays

STEP_BUFFER_ROWS = 100_000
"""Rows between two looks at progress and Ctrl-C: 30 to 100 ms."""
ROWS_PER_REQUEST = 4
"""Rows of the first buffer; few runs need more, and a short run takes as long to get its memory as to run."""
LEAST_IMPATIENT_ROWS = 1_000
"""Fewest rows between two calls of `GiveUp`; more for more requests, as each call then takes longer."""
FIRST_TRAIL_ROWS = 4_096
MAX_CACHED_IMAGES = 2**27
"""Images times ranks that the encoder caches can tell apart."""
MOST_PREEMPTIONS = 10_000
"""Of one request while none ends for `STEP_BUFFER_ROWS` steps: more, and requests take each other's blocks for ever."""
TRAIL_MEMBERS = 2_000_000
"""Parts of batches that one buffer of a trail holds."""

Progress = Callable[[int, int], None]
"""Called with (requests finished, requests in all)."""
GiveUp = Callable[[state.Table, float], bool]
"""Called with (`Request` records so far, simulated time); True stops the run."""

Callers = dict[int, Callable[[], Ints | None]]
"""Status of the loop -> the function that answers its question; a policy's answer is the batch."""


class Watch(NamedTuple):
    """Who follows a run: called between two buffers of steps."""

    progress: Progress | None = None
    give_up: GiveUp | None = None
    """Requests under way when the run is given up have no end."""


class Custom(NamedTuple):
    """Functions of the user that the loop calls."""

    router: Router | None = None
    policies: Sequence[Policy | None] = ()
    """The policy of each pool; empty where no pool has one."""
    most_call_s: float | None = None
    """Time limit of a call; None: that of `time_limit`."""


UNWATCHED, BUILT_IN = Watch(), Custom()


@dataclass(frozen=True, eq=False)
class LoopRun:
    """A finished run of the loop."""

    plans: Sequence[PoolPlan]
    requests: NDArray[np.void]
    """`serving.state.records.Request` records in order of sending."""
    steps: Table
    engine_time_s: float
    """Wall time of the loop."""
    pools: Pools | None
    """All pools after the run, with every request's KV transfer; None where there is one."""
    cache: state.Cache | None
    """Prefix caches after the run, of all pools end to end."""
    encode: EncodeRun | None = None
    """Of the pool of encoders; None without one."""
    encoded_s: Floats | None = None
    """[replica] Time of its vision towers; None where all requests are text."""
    adapters: Adapters | None = None
    """LoRA adapters after the run; None where no request has one."""
    sequences: NDArray[np.void] | None = None
    """`serving.state.per_request.SequenceState` records; None where no pool schedules per request."""
    trail: Trail | None = None

    @property
    def execution_s(self) -> Floats:
        """[requests] seconds in pipeline stages, of per-request scheduling; NaN for those that did not finish."""
        assert self.sequences is not None
        started_s = self.sequences["started_s"]
        started_s = np.where(np.isnan(started_s), self.requests["scheduled_s"], started_s)
        return np.asarray(self.requests["finish_s"] - started_s - self.sequences["paused_s"])


@dataclass(eq=False)
class Loop:
    """The tables of one run at its beginning."""

    plans: Sequence[PoolPlan]
    arrays: RequestArrays
    pool: PoolTables
    run_tables: RunTables
    cost: Any
    pools: Pools | None
    fleet: FleetRun | None

    def run(self, custom: Custom = BUILT_IN, watch: Watch = UNWATCHED, keeps_trail: bool = False) -> LoopRun:
        """Run the loop buffer by buffer until it ends; `keeps_trail` records the requests of every batch.
        WindtunnelError where recorded step durations ran out before the requests did; InputError where a request can
        never be scheduled, or a function of the user fails."""
        requests, num_requests = self.run_tables.requests, self.run_tables.requests.size
        callers = self.callers(custom)
        replicas = None if self.fleet is None else self.fleet.fleet
        registers = self.run_tables.clock.view(np.ndarray)
        buffers, members, stage_s = [], [], []
        num_finished, num_since = 0, 0
        started_s, call = time.perf_counter(), repeated(serve)
        for num_rows in _buffer_rows(num_requests, watch.give_up is not None, keeps_trail):
            buffer = new_table(state.Step, num_rows)
            trail = None
            if keeps_trail:
                parts = np.zeros((TRAIL_MEMBERS, 3), np.int64)
                trail = Trail(parts, np.zeros((num_rows, self.plans[0].settings.num_stages, 2)))
            run = self.run_tables._replace(steps=buffer, trail=trail)
            reason = run_on(call, (self.pool, self.cost, run, self.pools, replicas), callers)
            num_written = int(registers["rows"][0])
            buffers.append(buffer[:num_written])
            if trail is not None:
                members.append(trail.members[: registers["members"][0]])
                stage_s.append(trail.stage_s[:num_written])
            num_since = num_since + num_written if registers["finished"][0] == num_finished else 0
            num_finished = int(registers["finished"][0])
            if reason == status.MORE and num_since >= STEP_BUFFER_ROWS:
                self._check_preemptions()
            if self.fleet is not None:
                self.fleet.collect()
            if watch.progress is not None:
                watch.progress(int(registers["finished"][0]), num_requests)
            if reason != status.MORE or (watch.give_up and watch.give_up(requests, float(buffer["start_s"][-1]))):
                break
        engine_time_s = time.perf_counter() - started_s
        self._check_end(reason, custom.policies)
        sequences: Any = self.pool.sequences
        return LoopRun(
            self.plans,
            requests.view(np.ndarray),
            step_table(buffers),
            engine_time_s,
            self.pools,
            self.pool.cache,
            None,
            None if self.run_tables.media is None else self.run_tables.media.encoded_s,
            self.pool.adapters,
            None if sequences is None else sequences.view(np.ndarray),
            Trail(np.concatenate(members), np.concatenate(stage_s)) if keeps_trail else None,
        )

    def callers(self, custom: Custom) -> Callers:
        """Return status -> the function that answers the question behind it."""
        callers: Callers = {}
        if custom.router is not None:
            assert self.fleet is not None
            ranks = self.pool.ranks if self.pools is None else self.pools.ranks
            router = RouterCaller(custom.router, self.plans, self.arrays, ranks, self.fleet.fleet, custom.most_call_s)
            callers[status.ASK_ROUTER] = router.route
        if any(policy is not None for policy in custom.policies):
            policies = self._policy_callers(custom)
            callers[status.ASK_POLICY] = lambda: self._policy_that_asks(policies).form_batch()
            callers[status.REFUSED] = lambda: self._policy_that_asks(policies).refuse()
        return callers

    def _policy_callers(self, custom: Custom) -> list[PolicyCaller | None]:
        """Return the callers of the policies of all pools, whose ranks and batches lie end to end."""
        callers, first_rank, first_row = [], 0, 0
        for policy, plan in zip(custom.policies, self.plans, strict=True):
            ranks, batches = self.pool.ranks[first_rank:], self.pool.batches[first_row:]
            pool = self.pool._replace(settings=plan.settings, ranks=ranks, batches=batches)
            callers.append(policy and PolicyCaller(policy, pool, plan.speculation, self.run_tables, custom.most_call_s))
            first_rank += plan.settings.num_replicas * plan.settings.ranks_per_replica
            first_row += plan.settings.num_replicas * (plan.settings.num_stages + 1)
        return callers

    def _policy_that_asks(self, policies: Sequence[PolicyCaller | None]) -> PolicyCaller:
        """Return the caller of the pool that the loop stopped at."""
        event = int(self.run_tables.clock[0].event)
        caller = policies[0 if self.pools is None else int(self.pools.pool_of_event[event])]
        assert caller is not None
        return caller

    def _check_preemptions(self) -> None:
        """Raise an error if a request is preempted for ever: no request has ended for long."""
        num_preemptions = self.run_tables.requests.view(np.ndarray)["num_preemptions"]
        most = int(num_preemptions.argmax())
        if num_preemptions[most] >= MOST_PREEMPTIONS:
            raise InputError(
                f"request {most} was preempted {num_preemptions[most]:,} times, and no request ends any more",
                "the KV cache is too small for what runs at once: give it more memory, or lower max_num_seqs",
            )

    def _check_end(self, reason: int, policies: Sequence[Policy | None]) -> None:
        """Raise an error where the loop ended before all requests did."""
        clock = self.run_tables.clock[0]
        if reason == status.OUT_OF_STEPS:
            raise WindtunnelError(f"the {self.cost.recorded_step_s.size} recorded steps end before the requests do")
        if reason == status.OUT_OF_TABLES:
            raise InputError(
                f"a batch of {clock.culprit} requests lies outside the look-up tables",
                "use tables that reach further, or a smaller batch",
            )
        if reason == status.STUCK and self.fleet is not None and self.fleet.fleet.control[0].num_at_router:
            raise InputError(
                f"{self.fleet.fleet.control[0].num_at_router} requests wait at the router and no replica will ever "
                "take them",
                "a router that holds a request back is asked again when another one ends",
            )
        if reason == status.STUCK:
            num_requests = self.run_tables.requests.size
            names = [f"the scheduler {policy_name(policy)}" for policy in policies if policy is not None]
            raise InputError(
                f"{num_requests - clock.finished} of {num_requests} requests can never be scheduled",
                f"{' or '.join(names)} chose none of them, and nothing else is under way"
                if names
                else "a prompt does not fit the KV cache, or the tokens that a batch may have",
            )
        assert reason in (status.DONE, status.MORE)


def prepare_loop(
    plans: Sequence[PoolPlan],
    requests: RequestArrays,
    caches: Sequence[state.Cache] = (),
    handoff_rules: HandoffRules | None = None,
    fleet: FleetRun | None = None,
    stage_tables: per_request.StageTables | None = None,
    replicas: Ints | None = None,
) -> Loop:
    """Make the tables of a run. InputError where the run exceeds a limit of memory or time.

    Args:
        caches: prefix caches of every pool, changed in place; empty without prefix caching.
        handoff_rules: how requests go from pool to pool; None where there is one.
        fleet: None where all replicas are there all the time; it keeps the log.
        stage_tables: price the steps of a per-request scheduler, in place of its plan's costs.
        replicas: of every request, where the router is `codes.ASSIGNED`.
    """
    check_size(requests=requests.arrival_s.size, tokens=float(requests.output_tokens.sum(dtype=np.float64)))
    settings, records, cost = plans[0].settings, new_records(requests), plans[0].cost
    if replicas is not None:
        records.rank = replicas
    pools, cache = None, caches[0] if caches else None
    asks_policy = any(plan.settings.scheduler == codes.USER for plan in plans)
    if len(plans) == 1:
        events = new_table(state.Event, settings.num_replicas * (settings.num_stages + 1) + 1)
        shares: list[Any] = [state.new_ranks(settings), state.new_slots(settings), state.new_lists(settings)]
        shares.append(np.zeros((settings.num_replicas, settings.num_stages)))
        pool_records = new_pool_records(plans) if asks_policy else None
    else:
        pools = new_pools(plans, handoff_rules or HandoffRules(), records.size)
        if caches:
            cache = joined_caches(pools, caches)
        events, pool_records = new_pool_events(plans), pools.pools
        cost = state.StepCost(*(np.asarray(field)[0] for field in pools.cost))
        shares = [pools.ranks, pools.slots, pools.lists, pools.stages]
    media = media_of(requests, sum(plan.settings.num_replicas for plan in plans))
    pool = _pool_tables(settings, plans, cache, shares, requests.adapter)
    pool = pool._replace(encoder=encoder_caches(plans, media, requests.media_tokens))
    if any(plan.settings.scheduler >= codes.VLLM_V0 for plan in plans):
        pool = _with_sequences(pool, plans, records)._replace(stage_tables=stage_tables)
    if pool_records is not None:
        nothing: Any = None
        pool = pool._replace(settings=nothing, records=pool_records)
    run = RunTables(
        records,
        session_state(requests),
        events,
        _new_clock(requests, settings.seed),
        new_table(state.Step, 0),
        waiting=np.zeros(records.size, np.int64) if asks_policy else None,
        pairs=np.zeros((0, 2), np.int64) if asks_policy else None,  # type: ignore[arg-type]
        media=media,
    )
    return Loop(plans, requests, pool, run, cost, pools, fleet)


def media_of(requests: RequestArrays, num_replicas: int) -> state.Media | None:
    """Return the images and videos of all prompts; None where there are none."""
    if requests.media is None:
        return None
    kinds, numbers, begins = np.moveaxis(requests.media, 2, 0)
    same = np.argmax(numbers[:, :, None] == numbers[:, None, :], axis=2) if kinds.size else kinds
    items = np.stack([kinds, numbers, begins, same], axis=2)
    num_kinds = len(requests.media_tokens)
    return state.Media(np.ascontiguousarray(items), np.zeros(num_replicas), np.zeros(num_kinds, np.int64))


def encoder_caches(plans: Sequence[PoolPlan], media: state.Media | None, media_tokens: Sequence[int]) -> Any:
    """Return empty encoder caches of all ranks, None where no pool has one; InputError for too many images."""
    every = [plan.settings for plan in plans]
    if media is None or not any(one.encoder_cache_tokens or one.embedding_cache_tokens >= 0 for one in every):
        return None
    num_ranks = [settings.num_replicas * settings.ranks_per_replica for settings in every]
    rooms = [max(settings.encoder_cache_tokens, settings.embedding_cache_tokens) for settings in every]
    free, numbers = np.repeat(rooms, num_ranks), media.items[..., 1]
    num_images, together = int(numbers.max(initial=0)) + 1, np.zeros(len(numbers), np.int64)
    if any(settings.embeddings_by_request for settings in every):
        together = num_images + np.unique(numbers, axis=0, return_inverse=True)[1].ravel()
        num_images = int(together.max(initial=0)) + 1
    if free.size * num_images > MAX_CACHED_IMAGES:
        raise InputError(
            f"{num_images:,} images on {free.size:,} ranks are too many for the encoder caches",
            "use fewer replicas, requests or distinct images",
        )
    room = {"free_tokens": free, "freeable_tokens": free}
    return state.EncoderCache(
        media.items,
        np.array(media_tokens, np.int64),
        new_table(state.EncoderEntry, free.size * num_images),
        new_table(state.EncoderRank, free.size, first=state.NONE, last=state.NONE, **room),
        counts=np.zeros((free.size, len(media_tokens)), np.int64),
        together=together,
        used=np.zeros(media.items.shape[:2], np.int64),
    )


def _with_sequences(pool: PoolTables, plans: Sequence[PoolPlan], records: Any) -> PoolTables:
    """Return the tables with what schedulers of single requests keep: a row a request, and the pools' batches."""
    lists = [per_request.new_batches(plan.settings) for plan in plans]
    unknown = dict.fromkeys(("last_token_s", "left_stage_s", "started_s"), np.nan)
    prompts = {"prompt_tokens": records.input_tokens, "next": state.NONE}
    sequences = new_table(per_request.SequenceState, records.size, **prompts, **unknown)
    return pool._replace(sequences=sequences, batches=joined_lists(lists))


def _pool_tables(
    settings: Any, plans: Sequence[PoolPlan], cache: state.Cache | None, shares: Sequence[Any], adapter: Any
) -> PoolTables:
    """Return the tables of the only pool, or of the first one.

    A run compiles only the features that one of its pools uses: SGLang's scheduler is a seventh of the loop.
    """
    ranks, slots, lists, stages = shares
    every = [plan.settings for plan in plans]
    batched = [plan for plan in every if plan.scheduler < codes.VLLM_V0]
    adapters = [plan.adapters for plan in plans if plan.adapters is not None]
    num_ranks = [plan.num_replicas * plan.ranks_per_replica for plan in every]
    return PoolTables(
        settings=settings,
        cache=cache,
        speculation=next((plan.speculation for plan in plans if plan.speculation is not None), None),
        windows=1 if any(plan.window_tokens > 0 for plan in every) else None,
        batched=1 if batched else None,
        vllm_v1=1 if any(plan.scheduler != codes.SGLANG for plan in batched) else None,
        sglang=1 if any(plan.scheduler == codes.SGLANG for plan in batched) else None,
        balance=1 if any(plan.balance_steps > 0 for plan in batched) else None,
        ranks=ranks,
        slots=slots,
        lists=lists,
        stages=stages,
        adapters=new_adapters(adapters, num_ranks, adapter) if adapters else None,
    )


def first_pool(run: LoopRun) -> Ints:
    """Return the pool that computed each prompt."""
    if run.pools is None:
        return np.zeros(run.requests.size, np.int64)
    return np.asarray(run.pools.pool_of_rank[_ranks_of(run, "prefill_rank")])


def replicas_of(run: LoopRun) -> tuple[Ints, Ints, int]:
    """Return where every request began and where it ended, and how many replicas all pools have."""
    settings = [plan.settings for plan in run.plans]
    per_replica = np.repeat([each.ranks_per_replica for each in settings], [each.num_replicas for each in settings])
    of_rank = np.repeat(np.arange(per_replica.size), per_replica)
    return of_rank[_ranks_of(run, "prefill_rank")], of_rank[_ranks_of(run, "decode_rank")], per_replica.size


def _ranks_of(run: LoopRun, side: str) -> Ints:
    """Return the rank of every request on a `side` of its handoff, if it had one."""
    if run.pools is None:
        return np.asarray(run.requests["rank"])
    moved = ~np.isnan(run.pools.transfers["handed_s"])
    return np.where(moved, run.pools.transfers[side], run.requests["rank"])


UNSENT = {
    **dict.fromkeys(("scheduled_s", "first_token_s", "finish_s", "last_token_s"), np.nan),
    **dict.fromkeys(("before", "after", "left", "right", "skipped_at"), state.NONE),
}
"""Column of `Request` records -> its value before the request is sent, where that is not 0."""


def _new_clock(requests: RequestArrays, seed: int) -> state.Table:
    """Return the loop's registers at the beginning; requests that reach the router late are under way already."""
    clock = new_table(state.Clock, 1, random=seed % (state.MODULUS - 1) + 1, event=state.NONE)
    if requests.ready_s is not None:
        is_late = np.append(requests.ready_s > requests.arrival_s, False)
        clock.next, clock.thinking = int(np.argmin(is_late)), int(is_late.sum())
    return clock


def new_records(requests: RequestArrays) -> state.Table:
    """Return fresh `Request` records."""
    names = ("arrival_s", "input_tokens", "output_tokens", "priority")
    columns: dict[str, Any] = UNSENT | {name: getattr(requests, name) for name in names}
    columns["ttft_limit_s"] = np.inf if requests.ttft_limit_s is None else requests.ttft_limit_s
    if requests.tenant is not None:
        columns["tenant"] = np.unique(requests.tenant, return_inverse=True)[1]
    return new_table(state.Request, requests.arrival_s.size, **columns)


def _buffer_rows(num_requests: int, is_impatient: bool, keeps_trail: bool) -> Iterator[int]:
    """Yield the rows of each buffer. Those of a trail, which are wide, begin small and double."""
    num_rows = min(STEP_BUFFER_ROWS, ROWS_PER_REQUEST * (num_requests + 100))
    if is_impatient:
        num_rows = min(num_rows, max(LEAST_IMPATIENT_ROWS, num_requests // 4))
    if keeps_trail:
        num_rows = FIRST_TRAIL_ROWS
    while True:
        yield num_rows
        if keeps_trail:
            num_rows = min(2 * num_rows, STEP_BUFFER_ROWS)


def run_on(call: Any, tables: Sequence[Any], callers: Callers) -> int:
    """Run the loop until it stops for another reason than a question to a function of the user; answer those."""
    pool, cost, run, pools, replicas = tables
    while (reason := call(pool, cost, run, pools, replicas)) in callers:
        answer = callers[reason]()
        if answer is not None:
            run = run._replace(pairs=answer)
    return int(reason)


def step_table(buffers: Sequence[state.Table]) -> Table:
    """Return the rows of all buffers as one table; one buffer is not copied, several as bytes, ten times as fast."""
    parts = [np.asarray(rows) for rows in buffers]
    rows = parts[0] if len(parts) == 1 else np.concatenate([part.view(np.uint8) for part in parts]).view(parts[0].dtype)
    return Table({name: rows[name] for name in STEP_COLUMNS}, STEP_COLUMNS)
