"""Write SimAI's report of an iteration, `EndToEnd.csv`, and SimCCL's table of flows."""

from collections.abc import Iterator

import numpy as np

from windtunnel.errors import InputError
from windtunnel.network.collectives.call import ALGORITHMS, bus_factor
from windtunnel.network.flows import Flows, Hop
from windtunnel.training.iteration.layers import Iteration, LayerPhase, LayerTimes, LayerWorkload, PhaseTimes, RankGroup
from windtunnel.units import GIB

_LEAST_BYTES = 4096
"""ASTRA-sim sends no less."""
_TOTALS = (
    "File name, Expose DP comm, Expose DP_EP comm, Expose TP comm, Expose_EP_comm, Expose_PP_comm, bubble time, "
    "total comp, total exposed comm, Total time"
)
_RUN = "Analytical_test"
_LAYERS = (
    f"layer_name,{_RUN},fwd compute,wg compute,ig compute,fwd exposed comm,wg exposed comm,ig exposed comm,"
    "fwd total comm,algbw,busbw,wg total comm,algbw,busbw,ig total comm,algbw,busbw"
)


def end_to_end_csv(iteration: Iteration, prefix: str) -> str:
    """Return the text of `EndToEnd.csv`: totals, then a row per layer; microseconds, shares of the total, GiB/s.

    `prefix` is the first column, SimAI's `-r`, up to which the file has the same name.
    """
    total = iteration.total_ns
    by_group = iteration.exposed_ns
    parts = [by_group[group] for group in (RankGroup.DP, RankGroup.DP_EP, RankGroup.TP, RankGroup.EP)]
    parts += [iteration.pp_ns, iteration.bubble_ns, iteration.compute_ns, iteration.communication_ns]
    shares = ", ".join(f"{part / 1000:.0f} ({100 * part / total if total else 0:.2f}%)" for part in parts)
    rows = "".join(f"{_row(row, iteration.workload)}\n" for row in iteration.layers)
    return f"{_TOTALS}\n{prefix}, {shares}, {total / 1000:.0f}\n{_LAYERS}\n{rows}"


def _row(row: LayerTimes, workload: LayerWorkload) -> str:
    compute = [f"{times.compute_ns / 1000:.0f}" for _, times in row.phases]
    exposed = [f"{times.exposed_ns / 1000:.0f}" for _, times in row.phases]
    totals = [_bandwidths(times, phase, workload) for phase, times in row.phases]
    return ",".join([row.layer.name, _RUN, *compute, *exposed, *totals])


def _bandwidths(times: PhaseTimes, phase: LayerPhase, workload: LayerWorkload) -> str:
    """Return time, algorithm and bus bandwidth of one collective; without a collective nan, as SimAI prints it."""
    call = phase.communication
    if call is None:
        return f"{times.total_ns / 1000:.0f},-nan,0.00"
    if times.total_ns == 0:
        return "0,-nan,-nan"
    algorithm = max(call.size_bytes, _LEAST_BYTES) / GIB / (times.total_ns * 1e-9)
    bus = algorithm * bus_factor(call.op, workload.group_size(call.group))
    return f"{times.total_ns / 1000:.0f},{algorithm:.2f},{bus:.2f}"


FLOW_COLUMNS = (
    "collective,op,data_size,algorithm,protocol,channel_id,flow_id,src,dest,flow_size,chunk_id,chunk_count,conn_type,"
    "parent_flow_ids,prev_flow_ids,child_flow_ids"
)
_OP_CODES = {"all_reduce": 3, "all_gather": 2, "reduce_scatter": 1, "all_to_all": 4}
"""Operation -> MockNccl's `ComType`; -1 for other operations."""


def flow_table_csv(flows: Flows, op: str, size_bytes: int, algorithm: str) -> Iterator[str]:
    """Yield SimCCL's CSV line by line: every flow with its parents, the ranks that it hears from, and its children.
    InputError where NCCL has no such algorithm."""
    code = getattr(ALGORITHMS.get(algorithm), "NCCL_CODE", None)
    if code is None:
        raise InputError(
            f"SimCCL's flow table has no number for the algorithm {algorithm!r}, which NCCL does not have",
            "give another --algorithm, or leave out --flows",
        )
    yield FLOW_COLUMNS
    op_code = _OP_CODES.get(op, -1)
    head = f"TP_0_0_0_{op_code}_{size_bytes},{op_code},{size_bytes},{code},-1"
    n, num_steps = len(flows), int(flows.step.max()) + 1
    pairs = [*zip(flows.source.tolist(), flows.destination.tolist(), strict=True)]
    # Not the previous chunk of the same pair, which only waits in the same queue.
    shown = [[p for p in flows.parents_of(flow).tolist() if pairs[p] != pairs[flow]] for flow in range(n)]
    children: list[list[int]] = [[] for _ in range(n)]
    for flow, parents in enumerate(shown):
        for parent in parents:
            children[parent].append(flow)
    hears = _hears_from(flows, shown)
    for flow in np.lexsort((np.arange(n), flows.channel, flows.source)).tolist():
        source, channel = int(flows.source[flow]), int(flows.channel[flow])
        lists = (shown[flow], hears[channel, source, int(flows.destination[flow])], children[flow])
        yield (
            f"{head},{channel},{flow},{source},{flows.destination[flow]},{flows.size_bytes[flow]},{flows.step[flow]},"
            f"{num_steps},{Hop(flows.hop[flow]).name},{','.join(';'.join(map(str, ids)) for ids in lists)}"
        )


def _hears_from(flows: Flows, parents: list[list[int]]) -> dict[tuple[int, int, int], list[int]]:
    """Return (channel, rank, receiver) -> the ranks whose data that rank passes on to the receiver.

    On a ring's hop, these are the senders of the data that its last chunk waited for; elsewhere all senders to the
    rank.
    """
    triples = np.unique(np.column_stack([flows.channel, flows.destination, flows.source]), axis=0)
    senders: dict[tuple[int, int], list[int]] = {}
    for channel, rank, sender in triples.tolist():
        senders.setdefault((channel, rank), []).append(sender)
    hears = {}
    for flow in np.argsort(flows.step, kind="stable").tolist():
        channel, source = int(flows.channel[flow]), int(flows.source[flow])
        in_ring = flows.hop[flow] in (Hop.RING, Hop.PXN_INIT) and parents[flow]
        heard = sorted({int(flows.source[p]) for p in parents[flow]}) if in_ring else senders.get((channel, source), [])
        hears[channel, source, int(flows.destination[flow])] = heard
    return hears
