"""A collective on a fabric: which ranks, which algorithm, how long, at any of the three depths."""

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
"""What flows can be made of; `auto` takes NCCL's choice among them. `hierarchical` is DeepEP's all-to-all: over the own
rail to the server of the receiver, then inside it."""
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
        """What the slowest link carries, as nccl-tests defines it."""
        return self.algorithm_bytes_per_s * forms.bus_factor(self.op, self.num_ranks)


def collective_seconds(
    fabric: Fabric,
    op: str,
    size_bytes: int,
    ranks: int | Sequence[int],
    backend: Backend = "analytic",
    settings: NetworkSettings | None = None,
) -> float:
    """Seconds of one collective, the host's launch left out.

    Args:
        fabric: where it runs.
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast` or `send_recv`.
        size_bytes: as nccl-tests counts: the whole buffer; of an all-to-all, what one rank holds.
        ranks: how many GPUs from the first on, or their ids.
        backend: how deep.
        settings: of the flow and packet levels.

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
    algorithm: str = "auto",
    pxn: bool = False,
    launch_s: float = 0.0,
    protocol: str = "auto",
) -> CollectiveRun:
    """One collective with its algorithm and time; the arguments of `collective_seconds` and four more.

    Args:
        algorithm: one of `ALGORITHMS` for flows, of `CLOSED_FORMS` for the analytic backend.
        pxn: let SimAI's rings hand off to the GPU on the right rail before they leave a server.
        launch_s: added to the analytic time: what the host needs to launch it (`network.analytic.nccl.LAUNCH_S`).
        protocol: one of `PROTOCOLS`. Flows are of `simple` unless another is asked for, whose flags they then carry.
    """
    forms.check_op(op)
    _check_choice("protocol", protocol, PROTOCOLS)
    settings = settings or NetworkSettings()
    gpus = chosen_gpus(fabric, ranks)
    if size_bytes < 1:
        raise InputError(f"{op} of {size_bytes} bytes moves nothing", "give a size of at least 1 byte")
    place = place_of(fabric, gpus)
    if pxn and (backend == "analytic" or settings.compat != "simai"):
        raise InputError("pxn is for SimAI's rings", "give --compat simai and --backend flow or packet")
    if backend == "analytic":
        return _analytic(fabric, op, size_bytes, place, launch_s, algorithm, protocol)
    algorithm = _algorithm(op, size_bytes, place, algorithm, settings)
    protocol = "simple" if protocol == "auto" else protocol
    asked_bytes, size_bytes = size_bytes, int(np.ceil(size_bytes / forms.PROTOCOL_SHARE[protocol]))
    seconds = None
    if algorithm == "ring" and op in RING_ROUNDS and backend == "flow" and not pxn:
        seconds = _equivalent_rings_seconds(fabric, op, size_bytes, gpus[None, :], place.num_servers, settings)
    if seconds is not None:
        source = "flow level, alike connections once"
    else:
        flows = collective_flows(fabric, op, size_bytes, gpus, settings, algorithm, pxn)
        if backend == "flow" and settings.compat is None and len(flows.parent) == 0:
            seconds = together_seconds(fabric, flows, settings)
        else:
            seconds = flows_seconds(fabric, flows, settings, backend)
        source = f"{backend} level, {len(flows)} flows"
    return CollectiveRun(op, asked_bytes, len(gpus), place.num_servers, seconds, algorithm, protocol, backend, source)


def run_traffic(
    fabric: Fabric,
    traffic_bytes: NDArray[np.int64],
    ranks: int | Sequence[int],
    backend: Backend = "flow",
    settings: NetworkSettings | None = None,
    algorithm: str = "auto",
) -> CollectiveRun:
    """An all-to-all in which every pair has its own share, as tokens on their way to experts have.

    Args:
        fabric: where it runs.
        traffic_bytes: (n, n) from each rank to each other; the diagonal moves nothing.
        ranks: how many GPUs from the first on, or their ids.
        backend: `flow` or `packet`.
        settings: of these levels.
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
    most = int((traffic_bytes.sum(axis=1) - np.diag(traffic_bytes)).max())
    source = f"{backend} level, {len(flows)} flows"
    return CollectiveRun(
        "all_to_all", most, len(gpus), place.num_servers, seconds, algorithm, "simple", backend, source
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
    """Seconds until a collective has completed in several groups that run it at the same time, 0 where nothing moves.

    Groups inside servers of their own do not meet; one stands for all, as it does for the analytic backend, which knows
    no others.

    Args:
        fabric: where they run.
        op: as for `collective_seconds`; so is `size_bytes`.
        size_bytes: of each group.
        groups: (num_groups, num_ranks) GPU ids; of send_recv, who sends and who receives.
        settings: how deep, and how.

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
    if settings.backend == "flow" and settings.compat is None and len(flows.parent) == 0:
        return together_seconds(fabric, flows, settings)
    return flows_seconds(fabric, flows, settings, settings.backend)


def _equivalent_rings_seconds(
    fabric: Fabric, op: str, size_bytes: int, groups: NDArray[np.int32], num_servers: int, settings: NetworkSettings
) -> float | None:
    """Rings of all groups at flow level, alike connections once; None where SimAI's hashes make none alike."""
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
    """When all is done (`total_s`); at flow level as SimAI, the mean of `SIMAI_HASHES` hashes for rings that meet.

    SimAI hashes every flow anew. Which flows of a ring meet decides which meet later, so that one hash says little; of
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
    """Whether flows had to share a link from switch to switch, where hashes choose."""
    return bool(times.link_was_full[between_switches(fabric)].any())


def transfer_seconds(
    fabric: Fabric,
    source: int,
    destination: int,
    size_bytes: int,
    backend: Backend = "analytic",
    settings: NetworkSettings | None = None,
) -> float:
    """Seconds to move bytes from one GPU to another on an idle fabric: a KV cache, activations between stages.

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
    """Times of many transfers that share a fabric, each starting at its own moment.

    Raises:
        InputError: ends are not connected.
    """
    each = np.arange(len(source), dtype=np.int32)
    flows = flows_of(source, destination, size_bytes, connection=each, start_s=start_s)
    return run_flows(fabric, flows, settings or NetworkSettings(), backend)


def chosen_gpus(fabric: Fabric, ranks: int | Sequence[int]) -> NDArray[np.int32]:
    """GPU ids of `ranks`, which is how many from the first on, or the ids themselves."""
    gpus = np.arange(ranks) if isinstance(ranks, int) else np.asarray(ranks)
    if len(gpus) < 2:
        raise InputError(f"a collective needs two ranks; {len(gpus)} given")
    if len(np.unique(gpus)) < len(gpus):
        raise InputError("a rank is given twice")
    if gpus.min() < 0 or gpus.max() >= fabric.num_gpus:
        raise InputError(f"rank {gpus.max()} is asked for; {fabric.name} has GPUs 0 to {fabric.num_gpus - 1}")
    return gpus.astype(np.int32)


def place_of(fabric: Fabric, gpus: NDArray[np.int32]) -> forms.Ranks:
    """How the ranks lie over servers, and the links of the slowest of them.

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
    """(num_nodes,) bandwidth of each GPU to its server's others, and to the network."""
    inside, outside = np.zeros(fabric.num_nodes), np.zeros(fabric.num_nodes)
    for one, other in ((fabric.link_a, fabric.link_b), (fabric.link_b, fabric.link_a)):
        near = (fabric.kind[other] == NodeKind.SCALE_UP_SWITCH) | (fabric.server[one] == fabric.server[other])
        np.add.at(inside, one[near], fabric.bandwidth_bytes_per_s[near])
        np.add.at(outside, one[~near], fabric.bandwidth_bytes_per_s[~near])
    return inside, outside


def _published_rate(bytes_per_s: float, device: Device | None) -> float:
    """A scale-up rate as data sheets give it: topology files often have what a ring reaches of it instead."""
    published = device.scale_up_bytes_per_s if device else None
    return min(published, bytes_per_s / forms.RING_SHARE) if published else bytes_per_s


def device_of(fabric: Fabric) -> Device | None:
    """The catalog's device of a fabric's GPU type (`H100`, `h100_sxm`), None where it has none."""
    known = catalog.names("devices")
    wanted = fabric.gpu_type.lower()
    found = next((name for name in (wanted, f"{wanted}_sxm") if name in known), None)
    return catalog.device(found) if found else None


def _analytic(
    fabric: Fabric, op: str, size_bytes: int, place: forms.Ranks, launch_s: float, algorithm: str, protocol: str
) -> CollectiveRun:
    """Inside a server as measured, where somebody has and NCCL may choose; closed forms elsewhere."""
    if fabric.gpus_forward:
        raise InputError(f"{fabric.name} has no switches, and closed forms assume them", "use the flow backend")
    _check_choice("algorithm of the analytic backend", algorithm, CLOSED_FORMS)
    if algorithm == "collnet":
        place = replace(place, in_network=True)
    best = forms.closed_form(op, size_bytes, place, algorithm, protocol)
    device = device_of(fabric)
    seconds, source = best.seconds, best.source
    may_choose = algorithm == protocol == "auto"
    is_measured = device is not None and op in COLLECTIVES and place.num_ranks <= device_ranks(device)
    if may_choose and place.num_servers == 1 and device is not None and is_measured:
        collective = Collective(op, size_bytes, place.num_ranks)
        estimate = nccl_estimator(device, catalog.default_node(device)).estimate(collective)
        seconds, source = float(estimate.seconds), f"{estimate.coverage.value}: {estimate.source}"
    return CollectiveRun(
        op,
        size_bytes,
        place.num_ranks,
        place.num_servers,
        seconds + launch_s,
        best.algorithm,
        best.protocol,
        "analytic",
        source,
    )


def device_ranks(device: Device) -> int:
    """The most ranks that collectives of a device were measured with, 0 where they were not."""
    return 8 if device.measured_as else 0


RING_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Operation -> rounds around the ring."""


def _check_choice(what: str, asked: str, known: Sequence[str]) -> None:
    if asked not in known:
        raise InputError(f"there is no {what} {asked!r}", did_you_mean(asked, known, f"known: {', '.join(known)}"))


def _algorithm(op: str, size_bytes: int, place: forms.Ranks, asked: str, settings: NetworkSettings) -> str:
    _check_choice("algorithm", asked, ALGORITHMS)
    possible = {
        "all_reduce": ("ring", "tree", "nvls"),
        "all_gather": ("ring", "pat"),
        "reduce_scatter": ("ring", "pat"),
        "all_to_all": ("direct", "hierarchical"),
        "broadcast": ("pipeline",),
        "send_recv": ("direct",),
    }
    if op not in RING_ROUNDS and asked == "auto":
        return possible[op][0]
    if asked == "nvls" and (place.num_servers > 1 or not place.nvls):
        raise InputError("nvls needs one server whose switches add", "use ring or tree")
    if asked != "auto":
        if asked not in possible[op]:
            raise InputError(f"{op} has no algorithm {asked!r}", f"it has {', '.join(possible[op])}")
        return asked
    if settings.compat == "simai":
        return "ring"
    choice = forms.closed_form(op, size_bytes, place).algorithm
    return choice if choice in possible[op] else "ring"


def ring_chunk_bytes(size_bytes: int, rings: Rings) -> int:
    """What one rank sends in one step of one channel; what does not divide is dropped, as in SimAI."""
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
    """The point-to-point flows of a collective.

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
    rings = (
        simai_rings(gpus, place.num_servers, pxn) if settings.compat == "simai" else nccl_rings(gpus, place.num_servers)
    )
    steps = RING_ROUNDS[op] * (len(gpus) - 1)
    if rings.order.size * steps > MOST_FLOWS:
        raise InputError(
            f"a ring of {len(gpus)} ranks in {rings.num_channels} channels is {rings.order.size * steps} flows; "
            f"{MOST_FLOWS} are the most",
            "use the flow backend without compat, which runs alike connections once, or the analytic one",
        )
    return ring(rings, ring_chunk_bytes(size_bytes, rings), steps, REDUCTIONS.get(op, Reduction.NONE))


def flows_like(
    fabric: Fabric, run: CollectiveRun, gpus: NDArray[np.int32], settings: NetworkSettings, pxn: bool = False
) -> tuple[Flows, str]:
    """The flows of a run's algorithm and its name; a ring's where there are none of its own (nvls_tree, collnet)."""
    otherwise = {"all_to_all": "direct", "broadcast": "pipeline", "send_recv": "direct"}
    found = run.algorithm if run.backend != "analytic" or run.op in RING_ROUNDS else otherwise[run.op]
    algorithm = found if found in (*ALGORITHMS, "pipeline") else "ring"
    return collective_flows(fabric, run.op, run.size_bytes, gpus, settings, algorithm, pxn), algorithm


def _scale_up_switch(fabric: Fabric, gpu: int) -> int:
    found = np.flatnonzero((fabric.kind == NodeKind.SCALE_UP_SWITCH) & (fabric.server == fabric.server[gpu]))
    if len(found) == 0:
        raise InputError(f"GPU {gpu} of {fabric.name} has no scale-up switch, which nvls needs", "use ring")
    return int(found[0])
