"""Run a collective on a fabric: choose its algorithm, and time it with a network backend."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, check_known, check_number
from windtunnel.files import read_text
from windtunnel.limits import check_size
from windtunnel.network.collectives.algorithms import torus
from windtunnel.network.collectives.call import (
    ALGORITHMS,
    CollectiveCall,
    CollectiveChoices,
    CollectiveRun,
    check_operation,
)
from windtunnel.network.collectives.closed_forms import (
    PROTOCOL_SHARE,
    ClosedForm,
    chosen_gpus,
    closed_form,
    network_share,
    path_latencies_s,
    place_of,
    protocol_share,
    ring_bytes_per_s,
)
from windtunnel.network.fabric import NETWORK_SHARES, Fabric, with_joined_switches, with_shares
from windtunnel.network.flows import Flows, together
from windtunnel.network.paths import run_flows
from windtunnel.network.settings import BACKENDS, NetworkSettings
from windtunnel.units import US

USUAL_ALGORITHMS = {
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), "ring"),
    **dict.fromkeys(("all_to_all", "send_recv"), "direct"),
    "broadcast": "pipeline",
}
"""Operation -> algorithm whose flows are simulated where NCCL's model chooses none that has flows."""
MOST_BYTES = 2**50
"""Largest size of a collective; sums over ranks and steps of it fit in 64 bits."""


def run_collective(
    fabric: Fabric,
    op: str,
    size_bytes: int,
    ranks: int | Sequence[int],
    backend: str = "analytic",
    settings: NetworkSettings | None = None,
    choices: CollectiveChoices | None = None,
    traffic_bytes: NDArray[np.int64] | None = None,
) -> CollectiveRun:
    """Return one collective with its algorithm and time. InputError for no such operation, backend or ranks, or where
    the fabric does not connect them or the choices do not fit.

    Args:
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast` or `send_recv`.
        size_bytes: as nccl-tests counts: the whole buffer; for an all-to-all, the buffer of one rank.
        ranks: the number of GPUs, from the first on, or their ids.
        backend: name of the network backend.
        traffic_bytes: (n, n) from each rank to each other, where an all-to-all moves its own number between every pair,
            as tokens for experts do; the diagonal moves nothing, and `size_bytes` is the most that a rank sends.
    """
    settings, choices = settings or NetworkSettings(), choices or CollectiveChoices()
    check_operation(op)
    if choices.algorithm != "auto" or "auto" in ALGORITHMS:
        operations = ALGORITHMS.get(choices.algorithm).OPERATIONS
        if not isinstance(operations, tuple | list):
            raise InputError(f"OPERATIONS of the algorithm {choices.algorithm!r} is {operations!r:.60}, not a tuple")
    check_known(choices.protocol, ("auto", *PROTOCOL_SHARE), f"there is no protocol {choices.protocol!r}")
    gpus = chosen_gpus(fabric, ranks)
    if size_bytes < 1:
        raise InputError(f"{op} of {size_bytes} bytes moves nothing", "give a size of at least 1 byte")
    if size_bytes > MOST_BYTES:
        raise InputError(f"{op} of {size_bytes:.3g} bytes is not plausible; at most {MOST_BYTES:.3g} are")
    timer = BACKENDS.get(backend)
    if choices.pxn and (hasattr(timer, "run_collective") or settings.compat != "simai"):
        raise InputError("pxn is for SimAI's rings", "give --compat simai and --backend flow or packet")
    if traffic_bytes is not None:
        _check_traffic(traffic_bytes, len(gpus), hasattr(timer, "run_collective"))
    call = CollectiveCall(fabric, op, size_bytes, gpus, place_of(fabric, gpus), settings, choices, traffic_bytes)
    if hasattr(timer, "run_collective"):
        run: CollectiveRun = BACKENDS.call(backend, "run_collective", CollectiveRun, call)
        return run
    algorithm = _algorithm(call)
    protocol = _protocol(call, algorithm)
    call, kernel_s = _carried(call, algorithm, protocol)
    sent = _sent(call, protocol)
    seconds, work = _time_calls([sent], algorithm, backend)
    seconds += kernel_s + choices.launch_s
    return CollectiveRun(call, seconds, algorithm, protocol, backend, f"{backend} level, {work}")


def _check_traffic(traffic_bytes: NDArray[np.int64], num_ranks: int, has_closed_forms: bool) -> None:
    """Refuse traffic for a backend that takes none, of another shape, or below 0."""
    if has_closed_forms:
        raise InputError("closed forms know only balanced traffic", "give --backend flow or packet")
    if traffic_bytes.shape != (num_ranks, num_ranks) or (traffic_bytes < 0).any():
        needed = f"{num_ranks} x {num_ranks} numbers of bytes, none negative, are needed"
        raise InputError(f"the traffic matrix is {traffic_bytes.shape}; {needed}")


def _algorithm(call: CollectiveCall) -> str:
    """Return the algorithm whose flows a call means: that of NCCL's model for `auto`, if it has flows."""
    op, choice, usual = call.op, call.choices.algorithm, USUAL_ALGORITHMS[call.op]
    if choice != "auto":
        if op not in ALGORITHMS.get(choice).OPERATIONS:
            names = [name for name, algorithm in ALGORITHMS.every(str).items() if op in algorithm.OPERATIONS]
            raise InputError(f"the algorithm {choice!r} has no flows of {op}", f"these have: {', '.join(names)}")
        return choice
    best = _best(call)
    if not best or op in ALGORITHMS.get(best).OPERATIONS:
        return best or usual
    if other := getattr(ALGORITHMS.get(best), "FLOWS_LIKE", ""):
        return str(other)
    with_flows = [
        name for name, each in ALGORITHMS.every(str).items() if op in each.OPERATIONS and _applies(each, call)
    ]
    return min(with_flows, key=lambda name: closed_form(op, call.size_bytes, call.ranks, name)[0])


def _applies(algorithm: Any, call: CollectiveCall) -> bool:
    form: ClosedForm | None = getattr(algorithm, "CLOSED_FORM", None)
    return form is not None and form.applies(call.op, call.ranks)


def _best(call: CollectiveCall) -> str:
    """Return the algorithm of NCCL's model, or of XLA on a torus; nothing where only the usual one is there."""
    if USUAL_ALGORITHMS[call.op] != "ring" or call.settings.compat == "simai" or not call.ranks.switched:
        return ""  # trees leave most links between the ranks of a server idle
    if call.fabric.gpus_forward:
        return "" if torus.rings_of(call.fabric, call.gpus) is None else "torus"
    return closed_form(call.op, call.size_bytes, call.ranks)[1]


def _protocol(call: CollectiveCall, algorithm: str) -> str:
    """Return the protocol of a call's flows: for `auto` that of NCCL's model for the algorithm, if it has a form."""
    if call.choices.protocol != "auto":
        return call.choices.protocol
    if call.settings.compat == "simai" or getattr(ALGORITHMS.get(algorithm), "CLOSED_FORM", None) is None:
        return "simple"
    try:
        return closed_form(call.op, call.size_bytes, call.ranks, algorithm)[2]
    except InputError:  # NCCL has no such algorithm there
        return "simple"


def _sent(call: CollectiveCall, protocol: str) -> CollectiveCall:
    """Return the call of a protocol's data and flags."""
    size_bytes = int(np.ceil(call.size_bytes / PROTOCOL_SHARE[protocol]))
    return replace(call, size_bytes=size_bytes, choices=replace(call.choices, protocol=protocol))


def _carried(call: CollectiveCall, algorithm: str, protocol: str) -> tuple[CollectiveCall, float]:
    """Return the call on links as collectives use them, and the seconds of its kernel beside its flows.

    Switches of a server are joined, at the rate that kernels reach. A step takes as long as in NCCL's model, the path
    through one switch included; `send_latency_s` adds what it is above its default. SimAI hashes each flow to one
    switch, at the rate of the topology file, and has one protocol.
    """
    if call.settings.compat == "simai":
        return call, 0.0
    fabric, settings, layout = with_joined_switches(call.fabric), call.settings, ALGORITHMS.get(algorithm)
    at_link_rate = getattr(layout, "AT_LINK_RATE", False)
    form: ClosedForm | None = getattr(layout, "CLOSED_FORM", None)
    if not at_link_rate:
        share = call.ranks.scale_up_share * protocol_share(call.op, protocol, call.ranks)
        if form is not None and call.ranks.scale_up_bytes_per_s:
            share *= form.scale_up_bytes_per_s(call.ranks) / ring_bytes_per_s(call.ranks)
        # Packets' headers are all that flows over InfiniBand lose.
        slower = network_share(form, protocol, call.ranks) / NETWORK_SHARES["infiniband"]
        fabric = with_shares(fabric, share, min(slower, 1.0))
    if form is None or protocol not in form.latencies:
        return replace(call, fabric=fabric), 0.0
    latency, later_s = form.latencies[protocol], settings.send_latency_s - NetworkSettings().send_latency_s
    near_s = far_s = later_s
    if not at_link_rate:  # else its flows have the latency
        near_path_s, far_path_s = path_latencies_s(call.fabric, call.gpus)
        near_s += latency.scale_up * US - near_path_s
        far_s += (latency.network + call.ranks.network_latency_us) * US - far_path_s
    waits = {"send_latency_s": max(near_s, 0.0), "network_send_latency_s": max(far_s, 0.0)}
    return replace(call, fabric=fabric, settings=msgspec.structs.replace(settings, **waits)), latency.base * US


def _time_calls(calls: Sequence[CollectiveCall], algorithm: str, backend: str) -> tuple[float, str]:
    """Return when calls of one kind at once are complete, and what was simulated: classes of connections, or flows."""
    layout, call = ALGORITHMS.get(algorithm), calls[0]
    seconds = layout.seconds(calls, BACKENDS.get(backend)) if hasattr(layout, "seconds") else None
    if seconds is not None:
        check_number(seconds, f"the time of {algorithm} by the network backend {backend!r}")
        return seconds, "equivalent connections once"
    first = _flows(call, algorithm)
    num_flows = len(first) * len(calls)
    check_size(flows=num_flows)
    flows = together([first, *(_flows(each, algorithm) for each in calls[1:])]) if len(calls) > 1 else first
    return flows_seconds(call.fabric, flows, call.settings, backend), f"{num_flows:,} flows"


def _flows(call: CollectiveCall, algorithm: str) -> Flows:
    flows: Flows = ALGORITHMS.call(algorithm, "flows", Flows, call)
    return flows


@dataclass(frozen=True)
class GroupsRun:
    """Groups that ran a collective at the same time."""

    seconds: float
    algorithm: str = ""
    protocol: str = ""
    without_flows: str = ""
    """The algorithm that NCCL's model finds faster, but that has no flows."""

    def __str__(self) -> str:
        """Return the choice in words: `ring, simple (NCCL's nvls_tree has no flows)`."""
        instead = f" (NCCL's {self.without_flows} has no flows)" if self.without_flows else ""
        return f"{self.algorithm}, {self.protocol}{instead}"


def run_groups(
    fabric: Fabric,
    op: str,
    size_bytes: int,
    groups: NDArray[np.int32],
    settings: NetworkSettings,
    choices: CollectiveChoices | None = None,
) -> GroupsRun:
    """Return when a collective has completed in several groups that run it at the same time; 0 where nothing moves.

    Groups inside servers of their own do not meet, so one stands for all. In closed form one always does. Algorithm and
    protocol are those of `run_collective`; with `compat: simai` those of SimAI. InputError where a group does not
    spread evenly over servers, is not connected, or all make too many flows.

    Args:
        groups: (num_groups, num_ranks) GPU ids; for send_recv, sender and receiver.
    """
    if groups.shape[1] == 1 or size_bytes == 0:
        return GroupsRun(0.0)
    place = place_of(fabric, groups[0])
    if hasattr(BACKENDS.get(settings.backend), "run_collective"):
        run = run_collective(fabric, op, size_bytes, groups[0].tolist(), settings.backend, settings, choices)
        return GroupsRun(run.seconds, run.algorithm, run.protocol)
    check_operation(op)
    if place.num_servers == 1:
        groups = groups[:1]
    choices, num_together = choices or CollectiveChoices(), len(groups)
    calls = [
        CollectiveCall(fabric, op, size_bytes, group, place, settings, choices, num_together=num_together)
        for group in groups
    ]
    algorithm, best = _algorithm(calls[0]), _best(calls[0])
    protocol = _protocol(calls[0], algorithm)
    carried = [_carried(call, algorithm, protocol) for call in calls]
    seconds, _ = _time_calls([_sent(call, protocol) for call, _ in carried], algorithm, settings.backend)
    without_flows = best if best and best != algorithm else ""
    return GroupsRun(seconds + carried[0][1], algorithm, protocol, without_flows)


def groups_seconds(
    fabric: Fabric, op: str, size_bytes: int, groups: NDArray[np.int32], settings: NetworkSettings
) -> float:
    """Return the seconds of `run_groups`, whose arguments and errors these are."""
    return run_groups(fabric, op, size_bytes, groups, settings).seconds


def flows_seconds(fabric: Fabric, flows: Flows, settings: NetworkSettings, backend: str) -> float:
    """Return when all flows are complete. InputError where ends are not connected, or the packet level's settings do
    not fit the fabric."""
    total_seconds = getattr(BACKENDS.get(backend), "total_seconds", None)
    if total_seconds is None:
        return run_flows(fabric, flows, settings, backend).total_s
    seconds: float = total_seconds(fabric, flows, settings)
    check_number(seconds, f"the time of all flows by the network backend {backend!r}")
    return seconds


def flows_like(run: CollectiveRun) -> tuple[Flows, str]:
    """Return the flows of a run's algorithm and its name, or those of the usual algorithm where that one has none.
    InputError where there are too many, or none."""
    op, algorithm = run.call.op, run.algorithm
    if op not in ALGORITHMS.get(algorithm).OPERATIONS:
        algorithm = USUAL_ALGORITHMS[op]
    flows = _flows(run.call, algorithm)
    return flows, algorithm


def read_traffic(path: Path, num_ranks: int) -> NDArray[np.int64]:
    """Read (num_ranks, num_ranks) bytes from each rank to each other. InputError where the file cannot be read, has
    another shape, or a field is no number of bytes; names file and line."""
    rows = []
    for number, row in enumerate(csv.reader(read_text(path).splitlines()), start=1):
        if not row:
            continue
        if len(row) != num_ranks:
            raise InputError(f"{path}, line {number}: {len(row)} columns; {num_ranks} ranks need {num_ranks}")
        bad = next((field for field in row if not field.strip().isdecimal()), None)
        if bad is not None:
            raise InputError(f"{path}, line {number}: {bad!r} is not a whole number of bytes")
        rows.append([int(field) for field in row])
    if len(rows) != num_ranks:
        raise InputError(f"{path}: {len(rows)} rows; {num_ranks} ranks need {num_ranks}")
    return np.array(rows, np.int64)
