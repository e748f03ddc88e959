"""Run the per-request loop: arrays in, records out, and a user's policy called where one was given."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.jit import passed
from windtunnel.errors import InputError
from windtunnel.metrics.records import Table
from windtunnel.serving import codes
from windtunnel.serving.custom.policy import Policy, PolicyCaller
from windtunnel.serving.deployment import Deployment
from windtunnel.serving.engines.defaults import is_users_own
from windtunnel.serving.per_request.loop import run_per_request
from windtunnel.serving.runners.batched import Progress, step_table
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.frontend import usual_frontend_s
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.serving.state import per_request as per_request_state
from windtunnel.serving.state import records as state
from windtunnel.serving.state.status import ASK_POLICY, DONE, MORE, OUT_OF_STEPS, OUT_OF_TABLES, STUCK
from windtunnel.serving.state.tables import RunTables
from windtunnel.workload.generate.requests import RequestArrays

FIRST_BUFFER_ROWS = 4_096
BUFFER_ROWS = 131_072
"""Each buffer of step rows has twice the rows of the one before, up to this. Clearing the largest takes 0.2 ms, a
quarter of a run of 3,000 batches."""
BUFFER_MEMBERS = 2_000_000


@dataclass(frozen=True, eq=False)
class Trail:
    """Requests of every batch, and its times in each pipeline stage."""

    members: NDArray[np.int64]
    """[m, 3] row of the step table, request, tokens; in the order of the batch."""
    stage_s: NDArray[np.float64]
    """[rows, stages, 2] start and end."""


@dataclass(frozen=True, eq=False)
class PerRequestRun:
    """A finished run of the per-request loop."""

    requests: NDArray[np.void]
    """`serving.state.records.REQUEST` records in order of sending."""
    sequences: NDArray[np.void]
    """`serving.state.per_request.SEQUENCE` records beside them."""
    steps: Table
    engine_time_s: float
    """Wall time of the loop."""
    trail: Trail | None = None

    @property
    def execution_s(self) -> NDArray[np.float64]:
        """[requests] seconds in pipeline stages; NaN for those that did not finish."""
        started_s = self.sequences["started_s"]
        started_s = np.where(np.isnan(started_s), self.requests["scheduled_s"], started_s)
        return np.asarray(self.requests["finish_s"] - started_s - self.sequences["paused_s"])


def schedule_per_request(
    settings: per_request_state.PerRequestSettings,
    records: Any,
    cost: state.StepCost | None = None,
    tables: per_request_state.Tables | None = None,
    sessions: state.Sessions | None = None,
    policy: Policy | None = None,
    keeps_trail: bool = False,
    progress: Progress | None = None,
) -> PerRequestRun:
    """Run the per-request loop to its end.

    Args:
        settings: how batches are formed.
        records: fresh `REQUEST` records in order of arrival; changed in place.
        cost, tables: one of them prices steps.
        sessions: which request waits for which.
        policy: the user's scheduler, if `settings` say so.
        keeps_trail: record the requests of every batch.
        progress: called now and then.

    Raises:
        InputError: a batch lies outside `tables`, a request can never be scheduled, or the policy fails.
    """
    sequences, replicas = per_request_state.new_sequences(records), per_request_state.new_replicas(settings)
    slots, batches = per_request_state.new_slots(settings), per_request_state.new_batches(settings)
    stages = np.zeros((settings.num_replicas, settings.num_stages))
    events = np.zeros(settings.num_replicas * (settings.num_stages + 1) + 1, state.EVENT).view(np.recarray)
    clock = per_request_state.new_per_request_clock(settings)
    buffers, members, stage_s = [], [], []
    caller = None
    if policy is not None:
        caller = PolicyCaller(policy, settings, records, sequences, replicas, batches, clock)
    replica_tables = passed(sequences, replicas, slots, batches, stages, clock)
    state_tables = per_request_state.SequenceTables(settings, *replica_tables)
    prices = per_request_state.Prices(cost, tables)
    shared = passed(records, events, clock)
    started_s = time.perf_counter()
    for num_rows in _buffer_rows():
        buffer = state.new_steps(num_rows)
        run_tables = RunTables(shared[0], sessions, *shared[1:], *passed(buffer))
        trail = per_request_state.new_trail(settings, num_rows, BUFFER_MEMBERS) if keeps_trail else None
        status = _fill_buffer(state_tables, prices, trail, run_tables, caller)
        buffers.append(buffer[: clock[0].rows])
        if trail is not None:
            members.append(trail.members[: clock[0].members])
            stage_s.append(trail.stage_s[: clock[0].rows])
        if progress is not None:
            progress(int(clock[0].finished), records.size)
        if status != MORE:
            break
    engine_time_s = time.perf_counter() - started_s
    _check_end(status, clock[0], records.size)
    return PerRequestRun(
        requests=records.view(np.ndarray),
        sequences=sequences.view(np.ndarray),
        steps=step_table(buffers),
        engine_time_s=engine_time_s,
        trail=Trail(np.concatenate(members), np.concatenate(stage_s)) if keeps_trail else None,
    )


def _fill_buffer(
    state_tables: per_request_state.SequenceTables,
    prices: per_request_state.Prices,
    trail: Any,
    run_tables: RunTables,
    caller: PolicyCaller | None,
) -> int:
    """Run the loop until it ends or its buffer is full; call the policy for each batch that the loop asks for."""
    while (status := run_per_request(state_tables, prices, trail, run_tables)) == ASK_POLICY:
        assert caller is not None
        caller.form_batch()
    return int(status)


def _buffer_rows() -> Iterator[int]:
    """Yield the rows of each buffer: twice those of the one before, up to `BUFFER_ROWS`."""
    num_rows = FIRST_BUFFER_ROWS
    while True:
        yield num_rows
        num_rows = min(2 * num_rows, BUFFER_ROWS)


def _check_end(status: int, clock: Any, num_requests: int) -> None:
    """Raise InputError where the loop ended before all requests did."""
    if status == OUT_OF_TABLES:
        raise InputError(
            f"a batch of {clock.culprit} requests after {clock.now_s:g} s lies outside the look-up tables",
            "use tables that reach further, or a smaller batch",
        )
    if status == OUT_OF_STEPS:
        raise InputError("the recorded steps end before the requests do")
    if status == STUCK:
        raise InputError(
            f"{num_requests - clock.finished} of {num_requests} requests can never be scheduled",
            "a prompt does not fit the KV cache, or the tokens that a batch may have",
        )
    assert status == DONE


def refuse_unknown(deployment: Deployment, setup: Setup, requests: RequestArrays) -> None:
    """Raise InputError where a deployment has features that the per-request schedulers lack."""
    scheduler, given = setup.engine.scheduler, deployment.engine
    refused = [
        (bool(setup.engine.kv_tiers), "keeps no KV blocks in lower tiers", "engine.kv_tiers"),
        (
            bool(given.enable_prefix_caching) and requests.prefixes is not None,
            "has no prefix cache, and these prompts share beginnings",
            "engine.enable_prefix_caching",
        ),
        (
            given.scheduling_policy not in (None, "fcfs"),
            f"knows no {given.scheduling_policy} order",
            "engine.scheduling_policy",
        ),
        (deployment.autoscaling is not None, "runs with all replicas all the time", "autoscaling"),
        (deployment.faults is not None, "runs with all replicas all the time", "faults"),
    ]
    for is_given, reason, name in refused:
        if is_given:
            raise InputError(
                f"the scheduler {scheduler} {reason}",
                f"leave deployment.{name} out, or take vllm_v1, sglang or trtllm",
            )


def per_request_settings(
    setup: Setup, memory: MemoryPlan, num_replicas: int, requests: RequestArrays, router: str, seed: int
) -> per_request_state.PerRequestSettings:
    """Return the settings of a per-request scheduler, and the router's, as the loop takes them.

    Raises:
        InputError: the deployment has features that these schedulers lack.
    """
    engine = setup.engine
    assert engine.max_num_seqs is not None
    assert engine.max_num_batched_tokens is not None
    name = "user" if is_users_own(str(engine.scheduler)) else str(engine.scheduler)
    if router not in codes.ROUTERS:
        raise InputError(
            f"the scheduler {engine.scheduler} does not run behind the router {router}",
            f"use vllm_v1, sglang or trtllm, or one of these routers: {', '.join(codes.ROUTERS)}",
        )
    if setup.parallelism.attention_dp > 1:
        raise InputError(
            f"the scheduler {engine.scheduler} has no attention data parallelism", "leave attention_dp at 1"
        )
    if memory.blocks_per_request:
        raise InputError(
            f"{setup.model.name} keeps a state of fixed size for every request, which {engine.scheduler} cannot count",
            "use vllm_v1, sglang or trtllm",
        )
    max_num_seqs = max(min(engine.max_num_seqs, requests.arrival_s.size), 1)
    longest = int((requests.input_tokens + requests.output_tokens).max())
    reserves = name in ("orca", "faster_transformer")
    return per_request_state.PerRequestSettings(
        scheduler=codes.PER_REQUEST_SCHEDULERS.index(name),
        num_replicas=num_replicas,
        num_stages=setup.parallelism.pp,
        max_num_seqs=max_num_seqs,
        max_batch_seqs=max_num_seqs if reserves or name == "user" else max(max_num_seqs // setup.parallelism.pp, 1),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        watermark_blocks=int((engine.watermark_fraction or 0.0) * memory.num_blocks),
        reserved_blocks=-(-max(longest, setup.max_model_len) // memory.block_size) if reserves else 0,
        max_waiting_steps=engine.max_waiting_steps or 0,
        concurrency=requests.concurrency,
        num_warmup=requests.num_warmup,
        frontend_s=usual_frontend_s(setup, num_replicas, requests),
        router=codes.ROUTERS.index(router),
        seed=seed,
        numbered_by_arrival=int(requests.previous is None),
    )


def most_batch_tokens(settings: per_request_state.PerRequestSettings, requests: RequestArrays) -> int:
    """Return the most tokens of a batch; where prompts run whole and uncapped, all that memory admits."""
    if not settings.reserved_blocks:
        return settings.max_num_batched_tokens
    batch_seqs = min(settings.max_batch_seqs, max(settings.num_blocks // settings.reserved_blocks, 1))
    return batch_seqs * int(requests.input_tokens.max())


def check_per_request(settings: per_request_state.PerRequestSettings, requests: RequestArrays) -> None:
    """Raise InputError for the first request that could never be scheduled."""
    lengths = requests.input_tokens + requests.output_tokens - 1
    longest = int(np.argmax(lengths))
    name = codes.PER_REQUEST_SCHEDULERS[settings.scheduler]
    if settings.reserved_blocks > settings.num_blocks:
        raise InputError(
            f"{name} reserves {settings.reserved_blocks:,} blocks for every request; {settings.num_blocks:,} fit",
            "lower engine.max_model_len, or use more devices",
        )
    blocks = -(-int(lengths[longest]) // settings.block_size) + settings.watermark_blocks
    if blocks > settings.num_blocks:
        raise InputError(
            f"request {longest} of {lengths[longest] + 1:,} tokens needs {blocks:,} blocks with the watermark; "
            f"{settings.num_blocks:,} fit",
            "lower engine.watermark_fraction, or use more devices",
        )
    caps = settings.scheduler in (codes.VLLM_V0, codes.LIGHTLLM)
    restarts = settings.scheduler == codes.VLLM_V0
    prompts = lengths if restarts else requests.input_tokens
    widest = int(np.argmax(prompts))
    if caps and prompts[widest] > settings.max_num_batched_tokens:
        raise InputError(
            f"request {widest} has {requests.input_tokens[widest]:,} input tokens"
            f"{f' ({prompts[widest]:,} if it is restarted at its end)' if restarts else ''}; "
            f"{name} runs a prompt whole, in a batch of {settings.max_num_batched_tokens:,}",
            "raise engine.max_num_batched_tokens, or use sarathi, which cuts prompts",
        )
