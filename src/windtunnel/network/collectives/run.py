"""Run a collective on a fabric: choose ranks and algorithm, and time it at any of the three depths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.errors import InputError, did_you_mean
from windtunnel.hardware import Device
from windtunnel.model.operators import COLLECTIVES, Collective
from windtunnel.network.analytic import nccl as forms
from windtunnel.network.collectives.all_to_all import all_to_all, all_to_all_by_rail
from windtunnel.network.collectives.hashed_rings import between_switches, hashed_ring_seconds
from windtunnel.network.collectives.nvls import nvls
from windtunnel.network.collectives.pat import pat
from windtunnel.network.collectives.point_to_point import pipeline, send_recv
from windtunnel.network.collectives.ring_classes import ring_seconds, together_seconds
from windtunnel.network.collectives.rings import Rings, nccl_rings, ring, simai_rings
from windtunnel.network.collectives.trees import double_binary_tree
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flows import Flows, Reduction, flows_of, together
from windtunnel.network.paths import FlowTimes
from windtunnel.network.run import run_flows
from windtunnel.network.settings import Backend, NetworkSettings
from windtunnel.pricing.aiconfigurator.estimator import nccl_estimator

ALGORITHMS = ("auto", "ring", "tree", "nvls", "pat", "direct", "hierarchical")
"""Algorithms with flows; `auto` takes NCCL's choice among them. `hierarchical` is DeepEP's all-to-all: over the
sender's rail to the server of the receiver, then inside it."""
CLOSED_FORMS = ("auto", "ring", "tree", "nvls", "nvls_tree", "collnet", "pat")
PROTOCOLS = ("auto", *forms.PROTOCOL_SHARE)

CHUNK_BYTES = 512 * 1024
"""A pipelined chunk: NCCL's buffer of 4 MiB in 8 steps (NCCL_BUFFSIZE, NCCL_STEPS)."""
MOST_CHUNKS = 64
MOST_RAIL_CHUNKS = 8
TREE_FLOWS = 2_000_000
"""Chunks are made larger where there would be more."""
MOST_FLOWS = 20_000_000
SIMAI_HASHES = 8
"""Where rings meet, single hashes are 25 % below to 45 % above four recorded runs of SimAI, the mean of eight is 4 % to
9 % above (`benchmarks/ns3_runs.py`)."""
REDUCTIONS = {"all_reduce": Reduction.ALTERNATE, "reduce_scatter": Reduction.EVERY}
_NVLS_BYTES_PER_S = 150e9
"""Slower scale-up links are PCIe or bridges, whose switches do not add."""
RING_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Operation -> rounds around the ring."""


@dataclass(frozen=True)
class CollectiveRun:
    """One collective's time and how it was found."""

    op: str
    size_bytes: int
    num_ranks: int
    num_servers: int
    seconds: float
    algorithm: str
    protocol: str
    backend: Backend
    source: str
    """Measured tables, closed form, or the number of flows."""

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size by time, as nccl-tests prints it."""
        return self.size_bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """Rate of the slowest link, as nccl-tests defines it."""
        return self.algorithm_bytes_per_s * forms.bus_factor(self.op, self.num_ranks)


@dataclass(frozen=True)
class CollectiveChoices:
    """Choices that NCCL or its user makes for one collective."""

    algorithm: str = "auto"
    """One of `ALGORITHMS` for flows, of `CLOSED_FORMS` for the analytic backend."""
    protocol: str = "auto"
    """One of `PROTOCOLS`. Flows are of `simple` unless another is given, whose flags they then carry."""
    pxn: bool = False
    """Whether SimAI's rings hand off to the GPU on the right rail before they leave a server."""
    launch_s: float = 0.0
    """Added to the analytic time: the host's launch (`network.analytic.nccl.LAUNCH_S`)."""


def collective_seconds(
    fabric: Fabric,
    op: str,
    size_bytes: int,
    ranks: int | Sequence[int],
    backend: Backend = "analytic",
    settings: NetworkSettings | None = None,
) -> float:
    """Return the seconds of one collective, without the host's launch.

    Args:
        fabric: where it runs.
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast` or `send_recv`.
        size_bytes: as nccl-tests counts: the whole buffer; for an all-to-all, the buffer of one rank.
        ranks: the number of GPUs, from the first on, or their ids.
        backend: depth of the simulation.
        settings: for the flow and packet levels.

    Raises:
        InputError: no such operation or ranks, or the fabric does not connect them.
    """
    return run_collective(fabric, op, size_bytes, ranks, backend, settings).seconds


def run_collective(
    fabric: Fabric,
    op: str,
    size_bytes: int,
    ranks: int | Sequence[int],
    backend: Backend = "analytic",
    settings: NetworkSettings | None = None,
    choices: CollectiveChoices | None = None,
) -> CollectiveRun:
    """Return one collective with its algorithm and time; the arguments are those of `collective_seconds`.

    Raises:
        InputError: as `collective_seconds`, or the choices do not fit the operation, backend or fabric.
    """
    settings, choices = settings or NetworkSettings(), choices or CollectiveChoices()
    forms.check_op(op)
    _check_choice("protocol", choices.protocol, PROTOCOLS)
    gpus = chosen_gpus(fabric, ranks)
    if size_bytes < 1:
        raise InputError(f"{op} of {size_bytes} bytes moves nothing", "give a size of at least 1 byte")
    place = place_of(fabric, gpus)
    if choices.pxn and (backend == "analytic" or settings.compat != "simai"):
        raise InputError("pxn is for SimAI's rings", "give --compat simai and --backend flow or packet")
    if backend == "analytic":
        return _analytic(fabric, op, size_bytes, place, choices)
    algorithm = _algorithm(op, size_bytes, place, choices.algorithm, settings)
    protocol = "simple" if choices.protocol == "auto" else choices.protocol
    sent_bytes = int(np.ceil(size_bytes / forms.PROTOCOL_SHARE[protocol]))
    seconds = None
    if algorithm == "ring" and op in RING_ROUNDS and backend == "flow" and not choices.pxn:
        seconds = _equivalent_rings_seconds(fabric, op, sent_bytes, gpus[None, :], place.num_servers, settings)
    source = "flow level, equivalent connections once"
    if seconds is None:
        flows = collective_flows(fabric, op, sent_bytes, gpus, settings, algorithm, choices.pxn)
        seconds = _seconds_of(fabric, flows, settings, backend)
        source = f"{backend} level, {len(flows)} flows"
    return CollectiveRun(op, size_bytes, len(gpus), place.num_servers, seconds, algorithm, protocol, backend, source)


def _seconds_of(fabric: Fabric, flows: Flows, settings: NetworkSettings, backend: Backend) -> float:
    """Return when all flows are complete; at flow level, flows that wait for nothing run by equivalence classes."""
    if backend == "flow" and settings.compat is None and len(flows.parent) == 0:
        return together_seconds(fabric, flows, settings)
    return flows_seconds(fabric, flows, settings, backend)


def run_traffic(
    fabric: Fabric,
    traffic_bytes: NDArray[np.int64],
    ranks: int | Sequence[int],
    backend: Backend = "flow",
    settings: NetworkSettings | None = None,
    algorithm: str = "auto",
) -> CollectiveRun:
    """Run an all-to-all in which every pair moves its own number of bytes, as tokens for experts do.

    Args:
        fabric: where it runs.
        traffic_bytes: (n, n) from each rank to each other; the diagonal moves nothing.
        ranks: the number of GPUs, from the first on, or their ids.
        backend: `flow` or `packet`.
        settings: for these levels.
        algorithm: `direct` or `hierarchical`; `auto` is direct.

    Raises:
        InputError: the matrix has another shape or moves nothing, or the backend knows no flows.
    """
    settings = settings or NetworkSettings()
    gpus = chosen_gpus(fabric, ranks)
    if backend == "analytic":
        raise InputError("closed forms know only balanced traffic", "give --backend flow or packet")
    place = place_of(fabric, gpus)
    algorithm = _algorithm("all_to_all", 1, place, algorithm, settings)
    flows = _all_to_all_flows(gpus, place.num_servers, traffic_bytes, algorithm)
    seconds = flows_seconds(fabric, flows, settings, backend)
    largest_bytes = int((traffic_bytes.sum(axis=1) - np.diag(traffic_bytes)).max())
    source = f"{backend} level, {len(flows)} flows"
    return CollectiveRun(
        "all_to_all", largest_bytes, len(gpus), place.num_servers, seconds, algorithm, "simple", backend, source
    )


def _all_to_all_flows(
    gpus: NDArray[np.int32], num_servers: int, traffic_bytes: NDArray[np.int64], algorithm: str
) -> Flows:
    if algorithm == "direct":
        return all_to_all(gpus, traffic_bytes)
    n = len(gpus)
    if traffic_bytes.shape != (n, n):
        raise InputError(f"the traffic matrix is {traffic_bytes.shape}; {n} x {n} numbers of bytes are needed")
    to_servers = traffic_bytes.reshape(n, num_servers, -1).sum(axis=2)
    chunks = int(np.clip(to_servers.max() // CHUNK_BYTES, 1, MOST_RAIL_CHUNKS))
    return all_to_all_by_rail(gpus, num_servers, to_servers, traffic_bytes, chunks)


def groups_seconds(
    fabric: Fabric, op: str, size_bytes: int, groups: NDArray[np.int32], settings: NetworkSettings
) -> float:
    """Return when a collective has completed in several groups that run it at the same time; 0 where nothing moves.

    Groups inside servers of their own do not meet, so one stands for all. For the analytic backend one always does.

    Args:
        fabric: where they run.
        op: as for `collective_seconds`.
        size_bytes: the same, for each group.
        groups: (num_groups, num_ranks) GPU ids; for send_recv, sender and receiver.
        settings: backend and its settings.

    Raises:
        InputError: a group does not spread evenly over servers, is not connected, or all make too many flows.
    """
    if groups.shape[1] == 1 or size_bytes == 0:
        return 0.0
    place = place_of(fabric, groups[0])
    if settings.backend == "analytic":
        return run_collective(fabric, op, size_bytes, groups[0].tolist(), "analytic").seconds
    if place.num_servers == 1:
        groups = groups[:1]
    if settings.backend == "flow" and op in RING_ROUNDS:
        seconds = _equivalent_rings_seconds(fabric, op, size_bytes, groups, place.num_servers, settings)
        if seconds is not None:
            return seconds
    algorithm = "ring" if op in RING_ROUNDS else "direct"
    first = collective_flows(fabric, op, size_bytes, groups[0], settings, algorithm)
    num_flows = len(first) * len(groups)
    if num_flows > MOST_FLOWS:
        raise InputError(
            f"{op} in {len(groups)} groups of {groups.shape[1]} is {num_flows} flows; {MOST_FLOWS} are the most",
            "use the analytic backend",
        )
    others = [collective_flows(fabric, op, size_bytes, each, settings, algorithm) for each in groups[1:]]
    flows = together([first, *others])
    return _seconds_of(fabric, flows, settings, settings.backend)


def _equivalent_rings_seconds(
    fabric: Fabric, op: str, size_bytes: int, groups: NDArray[np.int32], num_servers: int, settings: NetworkSettings
) -> float | None:
    """Time the rings of all groups, one connection per equivalence class; None where SimAI's hashes leave no class."""
    is_simai = settings.compat == "simai"
    if is_simai and settings.routing != "ecmp":
        return None
    layout = simai_rings if is_simai else nccl_rings
    rings = [layout(each, num_servers) for each in groups]
    order = np.concatenate([each.order for each in rings])
    joined = Rings(order, np.full_like(order, -1))
    chunk, steps = ring_chunk_bytes(size_bytes, rings[0]), RING_ROUNDS[op] * (groups.shape[1] - 1)
    if is_simai:
        return hashed_ring_seconds(fabric, joined, chunk, steps, settings)
    return ring_seconds(fabric, joined, chunk, steps, settings)


def flows_seconds(fabric: Fabric, flows: Flows, settings: NetworkSettings, backend: Backend) -> float:
    """Return when all flows are complete; as SimAI at flow level, the mean of `SIMAI_HASHES` for rings that meet.

    SimAI hashes every flow anew. Flows of a ring that meet decide which meet later, so that one hash says little; for
    flows that all start at once it says what SimAI's does.

    Raises:
        InputError: ends are not connected, or the packet level's settings do not fit the fabric.
    """
    times = run_flows(fabric, flows, settings, backend)
    is_chain = backend == "flow" and settings.compat == "simai" and len(flows.parent) > 0
    if not is_chain or not full_between_switches(fabric, times):
        return times.total_s
    others = [structs.replace(settings, seed=settings.seed + k) for k in range(1, SIMAI_HASHES)]
    return float(np.mean([times.total_s, *(run_flows(fabric, flows, other, backend).total_s for other in others)]))


def full_between_switches(fabric: Fabric, times: FlowTimes) -> bool:
    """Whether a link from switch to switch, where hashes choose, was full."""
    return bool(times.link_was_full[between_switches(fabric)].any())


def transfer_seconds(
    fabric: Fabric,
    source: int,
    destination: int,
    size_bytes: int,
    backend: Backend = "analytic",
    settings: NetworkSettings | None = None,
) -> float:
    """Return the seconds to move bytes between two GPUs on an idle fabric: a KV cache, activations between stages.

    Raises:
        InputError: the two are not connected.
    """
    return collective_seconds(fabric, "send_recv", size_bytes, (source, destination), backend, settings)


def run_transfers(
    fabric: Fabric,
    source: NDArray[np.integer],
    destination: NDArray[np.integer],
    size_bytes: NDArray[np.integer],
    start_s: NDArray[np.float64] | float,
    backend: Backend = "flow",
    settings: NetworkSettings | None = None,
) -> FlowTimes:
    """Time transfers that share a fabric, each with its own start.

    Raises:
        InputError: ends are not connected.
    """
    flows = flows_of(source, destination, size_bytes, connection=np.arange(len(source)), start_s=start_s)
    return run_flows(fabric, flows, settings or NetworkSettings(), backend)


def chosen_gpus(fabric: Fabric, ranks: int | Sequence[int]) -> NDArray[np.int32]:
    """Return the GPU ids of `ranks`: a number of GPUs, from the first on, or the ids themselves."""
    gpus = np.arange(ranks) if isinstance(ranks, int) else np.asarray(ranks)
    if len(gpus) < 2:
        raise InputError(f"a collective needs two ranks; {len(gpus)} given")
    if len(np.unique(gpus)) < len(gpus):
        raise InputError("a rank is given twice")
    if gpus.min() < 0 or gpus.max() >= fabric.num_gpus:
        raise InputError(f"rank {gpus.max()} is asked for; {fabric.name} has GPUs 0 to {fabric.num_gpus - 1}")
    return gpus.astype(np.int32)


def place_of(fabric: Fabric, gpus: NDArray[np.int32]) -> forms.Ranks:
    """Return how the ranks lie over servers, and the slowest bandwidths among them.

    Raises:
        InputError: servers hold different numbers of them.
    """
    _, per_server = np.unique(fabric.server[gpus], return_counts=True)
    if len(np.unique(per_server)) > 1:
        raise InputError(
            f"servers hold {per_server.min()} to {per_server.max()} of the ranks; equal numbers are needed"
        )
    inside, outside = _bandwidths(fabric)
    device = device_of(fabric)
    hopper_on = device is not None and device.architecture in ("hopper", "blackwell")
    up = float(inside[gpus].min())
    return forms.Ranks(
        num_ranks=len(gpus),
        num_servers=len(per_server),
        scale_up_bytes_per_s=_published_rate(up, device),
        network_bytes_per_s=float(outside[gpus].min()),
        nvls=hopper_on and up >= _NVLS_BYTES_PER_S,
    )


def _bandwidths(fabric: Fabric) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (num_nodes,) bandwidths of each GPU inside its server, and to the network."""
    inside, outside = np.zeros(fabric.num_nodes), np.zeros(fabric.num_nodes)
    for source, target in fabric.directions:
        near = (fabric.kind[target] == NodeKind.SCALE_UP_SWITCH) | (fabric.server[source] == fabric.server[target])
        np.add.at(inside, source[near], fabric.bandwidth_bytes_per_s[near])
        np.add.at(outside, source[~near], fabric.bandwidth_bytes_per_s[~near])
    return inside, outside


def _published_rate(bytes_per_s: float, device: Device | None) -> float:
    """Return a scale-up rate as in data sheets; topology files often give the rate that a ring reaches instead."""
    published = device.scale_up_bytes_per_s if device else None
    return min(published, bytes_per_s / forms.RING_SHARE) if published else bytes_per_s


def device_of(fabric: Fabric) -> Device | None:
    """Return the catalog's device of a fabric's GPU type (`H100`, `h100_sxm`), None where it has none."""
    known, gpu_type = catalog.names("devices"), fabric.gpu_type.lower()
    name = next((name for name in (gpu_type, f"{gpu_type}_sxm") if name in known), None)
    return catalog.device(name) if name else None


def _analytic(
    fabric: Fabric, op: str, size_bytes: int, place: forms.Ranks, choices: CollectiveChoices
) -> CollectiveRun:
    """Time a collective by measured tables inside a server where NCCL may choose, by closed forms elsewhere."""
    if fabric.gpus_forward:
        raise InputError(f"{fabric.name} has no switches, and closed forms assume them", "use the flow backend")
    _check_choice("algorithm of the analytic backend", choices.algorithm, CLOSED_FORMS)
    if choices.algorithm == "collnet":
        place = replace(place, in_network=True)
    best = forms.closed_form(op, size_bytes, place, choices.algorithm, choices.protocol)
    device = device_of(fabric)
    seconds, source = best.seconds, best.source
    may_choose = choices.algorithm == choices.protocol == "auto" and place.num_servers == 1
    if may_choose and device is not None and op in COLLECTIVES and place.num_ranks <= device_ranks(device):
        collective = Collective(op, size_bytes, place.num_ranks)
        estimate = nccl_estimator(device, catalog.default_node(device)).estimate(collective)
        seconds, source = float(estimate.seconds), f"{estimate.coverage.value}: {estimate.source}"
    return CollectiveRun(
        op,
        size_bytes,
        place.num_ranks,
        place.num_servers,
        seconds + choices.launch_s,
        best.algorithm,
        best.protocol,
        "analytic",
        source,
    )


def device_ranks(device: Device) -> int:
    """Return the most ranks with which a device's collectives were measured, 0 where they were not."""
    return 8 if device.measured_as else 0


def _check_choice(what: str, choice: str, known: Sequence[str]) -> None:
    if choice not in known:
        raise InputError(f"there is no {what} {choice!r}", did_you_mean(choice, known, f"known: {', '.join(known)}"))


def _algorithm(op: str, size_bytes: int, place: forms.Ranks, choice: str, settings: NetworkSettings) -> str:
    """Return the algorithm that a choice means: NCCL's for `auto`.

    Raises:
        InputError: the operation or the ranks cannot use it.
    """
    _check_choice("algorithm", choice, ALGORITHMS)
    possible = {
        "all_reduce": ("ring", "tree", "nvls"),
        "all_gather": ("ring", "pat"),
        "reduce_scatter": ("ring", "pat"),
        "all_to_all": ("direct", "hierarchical"),
        "broadcast": ("pipeline",),
        "send_recv": ("direct",),
    }
    if op not in RING_ROUNDS and choice == "auto":
        return possible[op][0]
    if choice == "nvls" and (place.num_servers > 1 or not place.nvls):
        raise InputError("nvls needs one server whose switches add", "use ring or tree")
    if choice != "auto":
        if choice not in possible[op]:
            raise InputError(f"{op} has no algorithm {choice!r}", f"it has {', '.join(possible[op])}")
        return choice
    if settings.compat == "simai":
        return "ring"
    best = forms.closed_form(op, size_bytes, place).algorithm
    return best if best in possible[op] else "ring"


def ring_chunk_bytes(size_bytes: int, rings: Rings) -> int:
    """Return the bytes that one rank sends in one step of one channel; a remainder is dropped, as in SimAI."""
    return max(size_bytes // rings.num_ranks // rings.num_channels, 1)


def collective_flows(
    fabric: Fabric,
    op: str,
    size_bytes: int,
    gpus: NDArray[np.int32],
    settings: NetworkSettings,
    algorithm: str = "ring",
    pxn: bool = False,
) -> Flows:
    """Return the point-to-point flows of a collective.

    Raises:
        InputError: there are too many, or none.
    """
    place = place_of(fabric, gpus)
    match algorithm:
        case "nvls":
            return nvls(gpus, _scale_up_switch(fabric, int(gpus[0])), size_bytes)
        case "tree":
            channels = place.per_server if place.num_servers > 1 else 1
            chunks = int(np.clip(size_bytes // (2 * channels) // CHUNK_BYTES, 1, MOST_CHUNKS))
            chunks = max(1, min(chunks, TREE_FLOWS // (4 * channels * len(gpus))))
            return double_binary_tree(gpus, place.num_servers, size_bytes, chunks)
        case "pat":
            return pat(gpus, max(size_bytes // len(gpus), 1))
        case "pipeline":
            chunks = int(np.clip(size_bytes // CHUNK_BYTES, 1, MOST_CHUNKS))
            return pipeline(gpus, size_bytes, chunks)
        case "direct" if op == "send_recv":
            return send_recv(int(gpus[0]), int(gpus[-1]), size_bytes)
        case "direct":
            return all_to_all(gpus, size_bytes)
        case "hierarchical":
            n = len(gpus)
            balanced = np.full((n, n), size_bytes // n)
            np.fill_diagonal(balanced, 0)
            return _all_to_all_flows(gpus, place.num_servers, balanced, algorithm)
    is_simai = settings.compat == "simai"
    rings = simai_rings(gpus, place.num_servers, pxn) if is_simai else nccl_rings(gpus, place.num_servers)
    return _ring_flows(op, size_bytes, rings)


def _ring_flows(op: str, size_bytes: int, rings: Rings) -> Flows:
    steps = RING_ROUNDS[op] * (rings.num_ranks - 1)
    num_flows = rings.order.size * steps
    if num_flows > MOST_FLOWS:
        raise InputError(
            f"a ring of {rings.num_ranks} ranks in {rings.num_channels} channels is {num_flows} flows; "
            f"{MOST_FLOWS} are the most",
            "use the flow backend without compat, which runs equivalent connections once, or the analytic one",
        )
    return ring(rings, ring_chunk_bytes(size_bytes, rings), steps, REDUCTIONS.get(op, Reduction.NONE))


def flows_like(
    fabric: Fabric, run: CollectiveRun, gpus: NDArray[np.int32], settings: NetworkSettings, pxn: bool = False
) -> tuple[Flows, str]:
    """Return the flows of a run's algorithm and its name; a ring's where it has none (nvls_tree, collnet)."""
    otherwise = {"all_to_all": "direct", "broadcast": "pipeline", "send_recv": "direct"}
    algorithm = run.algorithm if run.backend != "analytic" or run.op in RING_ROUNDS else otherwise[run.op]
    algorithm = algorithm if algorithm in (*ALGORITHMS, "pipeline") else "ring"
    return collective_flows(fabric, run.op, run.size_bytes, gpus, settings, algorithm, pxn), algorithm


def _scale_up_switch(fabric: Fabric, gpu: int) -> int:
    switches = np.flatnonzero((fabric.kind == NodeKind.SCALE_UP_SWITCH) & (fabric.server == fabric.server[gpu]))
    if len(switches) == 0:
        raise InputError(f"GPU {gpu} of {fabric.name} has no scale-up switch, which nvls needs", "use ring")
    return int(switches[0])
