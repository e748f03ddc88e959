"""Run a deployment through the oracle, and compare it with the loop's run, as many tests do."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles.serving.deployment import ReferenceDeployment
from oracles.serving.encoder import Item
from oracles.serving.state import Request, Step
from windtunnel.metrics.records import Table
from windtunnel.serving import codes
from windtunnel.serving.run import LoopRun
from windtunnel.serving.setup.fleet_plan import FleetRun
from windtunnel.serving.state.pools import PoolPlan
from windtunnel.workload.generate.requests import RequestArrays

COMPARED = ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "num_preemptions", "output_tokens", "sequence")
"""Columns of `Request` records and attributes of the oracle's requests."""


def oracle_requests(arrays: RequestArrays) -> list[Request]:
    """Return the oracle's requests."""
    columns = (arrays.arrival_s, arrays.input_tokens, arrays.output_tokens, arrays.priority)
    requests = [
        Request(i, float(arrival_s), int(inputs), int(outputs), int(priority))
        for i, (arrival_s, inputs, outputs, priority) in enumerate(zip(*columns, strict=True))
    ]
    if arrays.tenant is not None and arrays.ttft_limit_s is not None:
        tenants = np.unique(arrays.tenant, return_inverse=True)[1]
        for request, tenant, limit_s in zip(requests, tenants, arrays.ttft_limit_s, strict=True):
            request.tenant, request.ttft_limit_s = int(tenant), float(limit_s)
    if arrays.media is not None:
        for request, items in zip(requests, arrays.media.tolist(), strict=True):
            request.media = tuple(
                Item(kind, number, begin, arrays.media_tokens[kind]) for kind, number, begin in items if kind >= 0
            )
    if arrays.adapter is not None:
        for request, adapter in zip(requests, arrays.adapter, strict=True):
            request.adapter = int(adapter)
    if arrays.previous is not None and arrays.think_s is not None and arrays.session is not None:
        turns = zip(arrays.previous, arrays.think_s, arrays.session, strict=True)
        for request, (previous, think_s, session) in zip(requests, turns, strict=True):
            request.previous, request.think_s, request.session = int(previous), float(think_s), int(session)
    return requests


def assert_equal_requests(records: NDArray[np.void], requests: Sequence[Request]) -> None:
    """Compare the times and counters of every request, to the bit."""
    for name in COMPARED:
        np.testing.assert_array_equal(records[name], [getattr(request, name) for request in requests], err_msg=name)


def assert_equal_transfers(run: LoopRun, oracle: ReferenceDeployment) -> None:
    """Compare when the KV of every request went from pool to pool."""
    assert run.pools is not None
    columns = {"handed_s": "handed_s", "transfer_start_s": "start_s", "transfer_end_s": "end_s"}
    for name, attribute in columns.items():
        transfers = [oracle.transfers.get(request.index) for request in oracle.requests]
        expected = [math.nan if transfer is None else getattr(transfer, attribute) for transfer in transfers]
        np.testing.assert_array_equal(run.pools.transfers[name], expected, err_msg=name)


def assert_equal_adapters(run: LoopRun, oracle: ReferenceDeployment) -> None:
    """Compare what every rank loaded, and how many adapters its steps had."""
    adapters = run.adapters
    assert adapters is not None
    ranks = [rank.adapters for pool in oracle.pools for rank in pool.ranks]
    assert not any(count for rank in ranks for count in rank.users.values())
    for name in ("num_loads", "num_disk_loads"):
        np.testing.assert_array_equal(adapters.ranks[name], [getattr(rank, name) for rank in ranks], err_msg=name)
    steps = [[rank.num_steps[n] for n in range(1, adapters.num_steps.shape[1])] for rank in ranks]
    np.testing.assert_array_equal(adapters.num_steps[:, 1:], steps)


def assert_equal_fleets(run: FleetRun, oracle: ReferenceDeployment) -> None:
    """Compare the phases of all replicas, and what became of the requests of those that failed."""
    theirs = oracle.fleet
    assert theirs is not None
    assert np.concatenate(run.phases).tolist() == theirs.phases
    losses = np.concatenate(run.losses).tolist()
    assert losses == [(stay.request, stay.replica, stay.begin_s, stay.end_s) for stay in theirs.stays]
    indices = range(len(oracle.requests))
    np.testing.assert_array_equal(run.fleet.num_retries, [theirs.num_retries.get(i, 0) for i in indices])
    np.testing.assert_array_equal(run.fleet.discarded_tokens, [theirs.discarded.get(i, 0) for i in indices])
    np.testing.assert_array_equal(run.fleet.sent_s, [request.sent_s for request in oracle.requests])


def assert_equal_steps(steps: Table, reference: ReferenceDeployment, reference_steps: Sequence[Step]) -> None:
    """Compare the rows of every replica, each with the steps that it stands for."""
    for number, (pool, _) in enumerate(reference.replicas):
        theirs = iter([step for step in reference_steps if step.replica == number])
        num_queries = getattr(pool, "speculation", None).num_queries if getattr(pool, "speculation", None) else 1
        for row in np.flatnonzero(steps["replica"] == number):
            values = {name: steps[name][row] for name in steps.columns}
            assert_equal_row(values, [next(theirs) for _ in range(values["num_steps"])], int(num_queries))
        assert next(theirs, None) is None, "the loop has fewer steps"


def assert_equal_row(row: dict[str, Any], steps: Sequence[Step], num_queries: int) -> None:
    """Compare a row with its steps: counts exactly, sums of times in another order nearly."""
    first, last = steps[0], steps[-1]
    assert row["start_s"] == first.start_s
    np.testing.assert_allclose(row["start_s"] + row["duration_s"], last.start_s + last.duration_s, rtol=1e-12)
    prefills = [chunk for chunk in first.chunks.values() if not chunk.decodes]
    decodes = [chunk for chunk in first.chunks.values() if chunk.decodes]
    found = {
        "decode_tokens": len(decodes),
        "prefill_tokens": sum(chunk.tokens for chunk in prefills),
        "num_prefills": len(prefills),
        "num_sampled": num_queries * len(decodes) + sum(chunk.emits_token for chunk in prefills),
        "context_tokens": sum(chunk.computed_before for chunk in decodes),
        "num_running": first.num_running,
        "num_waiting": first.num_waiting,
    }
    assert {name: row[name] for name in found} == found
    pairs = sum(chunk.tokens * (chunk.computed_before + 0.5 * chunk.tokens) for chunk in prefills)
    np.testing.assert_allclose(row["prefill_pairs"], pairs, rtol=1e-12)
    assert row["used_blocks"] == max(step.used_blocks for step in steps)
    for step in steps[1:]:
        assert [chunk.decodes for chunk in step.chunks.values()] == [True] * len(decodes)
        assert (step.num_running, step.num_waiting) == (first.num_running, first.num_waiting)


def engine_plan(settings: Any, cost: Any, speculation: Any = None) -> PoolPlan:
    """Return the plan of the only pool."""
    return PoolPlan(settings, cost, speculation=speculation, role=codes.BOTH)
