"""A fabric: GPUs, switches and the links between them, as arrays. Topologies and files become one.

SimAI's topology files are read and written here. Format (`gen_Topo_Template.py`, SimAI 1.6): a line `nodes
gpus_per_server nvswitches switches links gpu_type`, a line with the ids of all switches, and a line `source
destination rate latency error_rate` for each link.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import IntEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.errors import InputError, did_you_mean
from windtunnel.files import read_text
from windtunnel.schema import read_yaml
from windtunnel.units import format_count, parse_quantity

MEASURED: dict[str, Any] = read_yaml(Path(__file__).with_name("nccl.yaml"))
"""Facts and measurements about collectives, with their sources."""
NETWORK_SHARES: dict[str, float] = {kind: known["share"] for kind, known in MEASURED["networks"].items()}
"""Kind of links between servers -> share of their rate that large collectives reach."""


def link_kind(name: str) -> str:
    """Return the kind of a link by the beginning of its name (`ethernet_400g`, `roce`), nothing for any other name."""
    kinds = {**{kind: kind for kind in NETWORK_SHARES}, "roce": "ethernet"}
    return next((kind for word, kind in kinds.items() if name.startswith(word)), "")


def assumed_kind(of: str) -> str:
    """Return the note that the kind of the links between the servers of a fabric or node is not known."""
    how = "name it behind the topology (FILE:network=ethernet) or in the name of the node's scale_out link"
    return f"the links between servers of {of} are taken for InfiniBand, as nothing says their kind: {how}"


class NodeKind(IntEnum):
    """What a node of a fabric is."""

    GPU = 0
    SCALE_UP_SWITCH = 1
    """NVSwitch, or the PCIe switch of a server: reached by the GPUs of one server (or NVLink domain) only."""
    SWITCH = 2
    """A switch of the scale-out network."""


@dataclass(frozen=True, eq=False)
class Fabric:
    """Nodes and bidirectional links; a link carries its bandwidth in each direction at the same time.

    Node ids are positions: GPUs first, then the scale-up switches, then the other switches tier by tier.
    """

    name: str
    gpu_type: str
    """`H100`, as topology files name it."""
    gpus_per_server: int
    kind: NDArray[np.int8]
    """(num_nodes,) `NodeKind`."""
    tier: NDArray[np.int8]
    """(num_nodes,) 0 for GPUs and scale-up switches; 1 leaf (ToR, ASW), 2 spine (PSW, aggregation), 3 core."""
    server: NDArray[np.int32]
    """(num_nodes,) the server of a GPU or scale-up switch; -1 elsewhere."""
    link_a: NDArray[np.int32]
    link_b: NDArray[np.int32]
    """(num_links,) the two ends."""
    bandwidth_bytes_per_s: Floats
    """(num_links,) in each direction."""
    latency_s: Floats
    """(num_links,) propagation, one way."""
    error_fraction: Floats
    """(num_links,) packets that are lost."""
    gpus_forward: bool = False
    """Whether GPUs pass on traffic of others, as in a torus."""
    network: str = "infiniband"
    """Kind of the links between servers: a key of `NETWORK_SHARES`."""
    is_kind_assumed: bool = False
    """Whether nothing says that kind, so that InfiniBand is taken."""

    @property
    def num_nodes(self) -> int:
        return len(self.kind)

    @property
    def num_gpus(self) -> int:
        return int(np.count_nonzero(self.kind == NodeKind.GPU))

    @property
    def num_links(self) -> int:
        return len(self.link_a)

    @cached_property
    def directions(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Sources and targets of directed links, (2 x num_links,) each: link l is 2 l one way and 2 l + 1 back."""
        ends = np.column_stack([self.link_a, self.link_b])
        return ends.ravel(), ends[:, ::-1].ravel()

    @property
    def num_servers(self) -> int:
        return int(self.server.max()) + 1

    def nodes_of(self, kind: NodeKind, tier: int | None = None) -> Ints:
        return np.flatnonzero((self.kind == kind) & ((tier is None) | (self.tier == tier)))


def between_switches(fabric: Fabric) -> Bools:
    """Return (2 x num_links,) whether a directed link goes from switch to switch, where hashes choose."""
    is_switch = fabric.kind == NodeKind.SWITCH
    return np.repeat(is_switch[fabric.link_a] & is_switch[fabric.link_b], 2)


def check(fabric: Fabric, source: str = "", what: str = "link", first: int = 1) -> None:
    """Raise InputError where a fabric is wrong: bad ends, loops, duplicates, rates, GPUs that cannot reach the others.

    Args:
        source: named in the error; the fabric's own name where left out.
        what: what a link is called there; so `first`, the number of the first.
    """
    source = source or fabric.name
    for link, message in _link_problems(fabric):
        raise InputError(f"{source}, {what} {link + first}: {message}")
    if fabric.num_gpus == 0:
        raise InputError(f"{source}: it has no GPUs")
    group, gpus = connected_groups(fabric), fabric.nodes_of(NodeKind.GPU)
    apart = gpus[group[gpus] != group[gpus[0]]]
    if len(apart):
        others = f", nor can {len(apart) - 1} more" if len(apart) > 1 else ""
        raise InputError(f"{source}: GPU {apart[0]} cannot reach GPU 0{others}", "add links, or let fewer fail")


def _link_problems(fabric: Fabric) -> Iterator[tuple[int, str]]:
    """Yield (link, what is wrong with it), kind by kind."""
    a, b = fabric.link_a.astype(np.int64), fabric.link_b.astype(np.int64)
    low, high = np.minimum(a, b), np.maximum(a, b)
    outside = (low < 0) | (high >= fabric.num_nodes)
    pair = low * fabric.num_nodes + high
    _, first = np.unique(pair, return_index=True)
    repeated = np.ones(len(pair), bool)
    repeated[first] = False
    rate, latency, error = fabric.bandwidth_bytes_per_s, fabric.latency_s, fabric.error_fraction
    checks: tuple[tuple[Bools, Callable[[int], str]], ...] = (
        (outside, lambda i: f"it joins {a[i]} and {b[i]}; nodes are 0 to {fabric.num_nodes - 1}"),
        (a == b, lambda i: f"it joins node {a[i]} to itself"),
        (~(rate > 0) | ~np.isfinite(rate), lambda i: f"its bandwidth is {rate[i]:g} B/s; more than 0 is needed"),
        (~(latency >= 0) | ~np.isfinite(latency), lambda i: f"its latency is {latency[i]:g} s; at least 0 is needed"),
        (~((error >= 0) & (error < 1)), lambda i: f"its error rate is {error[i]:g}; 0 to below 1 is possible"),
        (repeated & ~outside, lambda i: f"nodes {a[i]} and {b[i]} are joined twice"),
    )
    for wrong, words in checks:
        yield from ((int(i), words(int(i))) for i in np.flatnonzero(wrong))


def connected_groups(fabric: Fabric) -> Ints:
    """Return (num_nodes,) the smallest node id that each node is connected to."""
    label = np.arange(fabric.num_nodes, dtype=np.int64)
    while True:
        before = label.copy()
        low = np.minimum(label[fabric.link_a], label[fabric.link_b])
        np.minimum.at(label, fabric.link_a, low)
        np.minimum.at(label, fabric.link_b, low)
        label = label[label]
        if np.array_equal(before, label):
            return label


def without(fabric: Fabric, links: tuple[tuple[int, int], ...] = (), nodes: tuple[int, ...] = ()) -> Fabric:
    """Return the fabric after failures: `links` (pairs of node ids) are gone, and every link of `nodes`. InputError
    where there is no such link or node."""
    gone = np.isin(fabric.link_a, nodes) | np.isin(fabric.link_b, nodes)
    for node in nodes:
        if not 0 <= node < fabric.num_nodes:
            raise InputError(f"there is no node {node} to fail", f"nodes are 0 to {fabric.num_nodes - 1}")
    for a, b in links:
        hit = ((fabric.link_a == a) & (fabric.link_b == b)) | ((fabric.link_a == b) & (fabric.link_b == a))
        if not hit.any():
            raise InputError(f"there is no link between {a} and {b} to fail")
        gone |= hit
    return with_links(fabric, ~gone)


@lru_cache(maxsize=8)
def with_joined_switches(fabric: Fabric) -> Fabric:
    """Return the fabric with one link from a GPU to all scale-up switches of its server, at the sum of their rates.

    A GPU spreads its traffic to each peer over all NVSwitches of the server, by address, so that its links fill evenly
    (Ishii et al., "NVSwitch and DGX-2", Hot Chips 30, 2018): equal links carry what one of their sum does. Nodes keep
    their ids; the first switch of a server has the links. The fabric itself where each server has one switch.
    """
    is_up, node = fabric.kind == NodeKind.SCALE_UP_SWITCH, np.arange(fabric.num_nodes)
    linked = is_up & (np.bincount(np.concatenate([fabric.link_a, fabric.link_b]), minlength=fabric.num_nodes) > 0)
    first = np.full(fabric.num_servers, fabric.num_nodes)
    np.minimum.at(first, fabric.server[linked], node[linked])
    switch = np.where(linked, np.minimum(first[fabric.server], fabric.num_nodes - 1), node)
    a, b = switch[fabric.link_a], switch[fabric.link_b]
    if np.array_equal(a, fabric.link_a) and np.array_equal(b, fabric.link_b):
        return fabric
    pair = np.minimum(a, b) * fabric.num_nodes + np.maximum(a, b)
    _, first, link = np.unique(pair, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place, first = np.argsort(order)[link], first[order]
    rate, latency_s, lost = np.zeros(len(first)), np.zeros(len(first)), np.zeros(len(first))
    np.add.at(rate, place, fabric.bandwidth_bytes_per_s)
    np.maximum.at(latency_s, place, fabric.latency_s)
    np.maximum.at(lost, place, fabric.error_fraction)
    ends = a[first].astype(np.int32), b[first].astype(np.int32)
    return replace(
        fabric, link_a=ends[0], link_b=ends[1], bandwidth_bytes_per_s=rate, latency_s=latency_s, error_fraction=lost
    )


@lru_cache(maxsize=8)
def with_shares(fabric: Fabric, inside_share: float, outside_share: float) -> Fabric:
    """Return the fabric whose links inside servers, and between them, carry these shares of their rate."""
    server, is_up = fabric.server, fabric.kind == NodeKind.SCALE_UP_SWITCH
    inside = is_up[fabric.link_a] | is_up[fabric.link_b]
    inside |= (server[fabric.link_a] == server[fabric.link_b]) & (server[fabric.link_a] >= 0)
    return replace(
        fabric, bandwidth_bytes_per_s=fabric.bandwidth_bytes_per_s * np.where(inside, inside_share, outside_share)
    )


def with_links(fabric: Fabric, keep: Bools) -> Fabric:
    """Return the fabric with only the links of which `keep`, (num_links,), says so."""
    return replace(
        fabric,
        link_a=fabric.link_a[keep],
        link_b=fabric.link_b[keep],
        bandwidth_bytes_per_s=fabric.bandwidth_bytes_per_s[keep],
        latency_s=fabric.latency_s[keep],
        error_fraction=fabric.error_fraction[keep],
    )


GPU_TYPES = ("A100", "A800", "H100", "H800", "H20")
"""What SimAI knows; devices of the catalog are known too."""

_HEADER = ("nodes", "GPUs per server", "NVSwitches", "switches", "links")


def read_topology(path: Path) -> Fabric:
    """Return the fabric in a topology file, plain or gzipped. InputError where the file is missing or wrong; names the
    file and the line."""
    lines = read_text(path).rstrip().splitlines()
    if len(lines) < 2:
        raise InputError(
            f"{path} has {format_count(len(lines), 'line')}; a topology has a header, a line of switches, and its links"
        )
    counts, gpu_type = _header(lines, path)
    num_nodes, gpus_per_server, num_scale_up, num_switches, num_links = counts
    num_gpus = num_nodes - num_scale_up - num_switches
    if num_gpus < 1 or gpus_per_server < 1 or num_gpus % gpus_per_server:
        raise InputError(f"{path}, line 1: {num_gpus} GPUs do not fill servers of {gpus_per_server}")
    _check_switch_ids(lines, path, num_gpus, num_nodes)
    if len(lines) - 2 < num_links:
        raise InputError(f"{path}, line 1: it announces {format_count(num_links, 'link')}; {len(lines) - 2} follow")
    if len(lines) - 2 > num_links:
        raise InputError(
            f"{path}, line {num_links + 3}: line 1 announces {format_count(num_links, 'link')}; here is one more"
        )
    ends, rate, latency, error = _links(lines[2:], path)
    kind = np.repeat(
        np.array([NodeKind.GPU, NodeKind.SCALE_UP_SWITCH, NodeKind.SWITCH], np.int8),
        [num_gpus, num_scale_up, num_switches],
    )
    fabric = Fabric(
        name=path.name,
        gpu_type=gpu_type,
        gpus_per_server=gpus_per_server,
        kind=kind,
        tier=np.zeros(num_nodes, np.int8),
        server=np.full(num_nodes, -1, np.int32),
        link_a=ends[:, 0],
        link_b=ends[:, 1],
        bandwidth_bytes_per_s=rate,
        latency_s=latency,
        error_fraction=error,
        gpus_forward=num_switches + num_scale_up == 0,
        is_kind_assumed=True,
    )
    check(fabric, str(path), "line", 3)
    fabric.tier[:] = _tiers(fabric)
    fabric.server[:] = _servers(fabric)
    return fabric


def topology_text(fabric: Fabric) -> str:
    """Return the text of a topology file, byte for byte as SimAI's generator writes it."""
    num_scale_up, num_switches = (len(fabric.nodes_of(kind)) for kind in (NodeKind.SCALE_UP_SWITCH, NodeKind.SWITCH))
    counts = (fabric.num_nodes, fabric.gpus_per_server, num_scale_up, num_switches, fabric.num_links)
    switches = range(fabric.num_gpus, fabric.num_nodes)
    head = f"{' '.join(map(str, counts))} {fabric.gpu_type}\n{''.join(f'{node} ' for node in switches)}\n"
    words = (
        _words(fabric.bandwidth_bytes_per_s / 125e6, "Gbps"),
        _words(fabric.latency_s * 1e3, "ms"),
        _words(fabric.error_fraction, ""),
    )
    links = zip(fabric.link_a.tolist(), fabric.link_b.tolist(), *words, strict=True)
    return head + "".join(f"{a} {b} {rate} {latency} {error}\n" for a, b, rate, latency, error in links)


def _words(values: Floats, unit: str) -> list[str]:
    """Return numbers without exponent and without digits that only rounding brought: 0.000025ms, 2880Gbps."""
    known, which = np.unique(values, return_inverse=True)
    words = [format(Decimal(f"{value:.12g}").normalize(), "f") + unit for value in known]
    return [words[k] for k in which.tolist()]


def _header(lines: list[str], path: Path) -> tuple[list[int], str]:
    words = lines[0].split()
    if len(words) != 6:
        raise InputError(
            f"{path}, line 1: it has {format_count(len(words), 'field')}; 6 are needed",
            "nodes, GPUs per server, NVSwitches, switches, links, GPU type",
        )
    wrong = next((pair for pair in zip(words, _HEADER, strict=False) if not pair[0].isdecimal()), None)
    if wrong:
        raise InputError(f"{path}, line 1: {wrong[0]!r} is not a number of {wrong[1]}")
    known = [*GPU_TYPES, *(name.partition("_")[0].upper() for name in catalog.names("devices"))]
    if words[5].partition("_")[0].upper() not in known:
        raise InputError(
            f"{path}, line 1: the GPU type {words[5]!r} is not known",
            did_you_mean(words[5], known, f"known: {', '.join(GPU_TYPES)} and the catalog's devices"),
        )
    return list(map(int, words[:5])), words[5]


def _check_switch_ids(lines: list[str], path: Path, num_gpus: int, num_nodes: int) -> None:
    words = lines[1].split()
    expected = list(map(str, range(num_gpus, num_nodes)))
    if words == expected:
        return
    if len(words) != len(expected):
        raise InputError(f"{path}, line 2: it lists {len(words)} switches; line 1 announces {len(expected)}")
    odd = next(word for word, switch in zip(words, expected, strict=True) if word != switch)
    raise InputError(
        f"{path}, line 2: the switch {odd!r} is out of place; switches are {num_gpus} to {num_nodes - 1} in order"
    )


def _links(lines: list[str], path: Path) -> tuple[NDArray[np.int32], Floats, Floats, Floats]:
    ends = np.empty((len(lines), 2), np.int32)
    numbers = np.empty((3, len(lines)))
    read: dict[tuple[str, str, str], tuple[float, float, float]] = {}
    for i, line in enumerate(lines):
        words = line.split()
        if len(words) != 5:
            raise InputError(
                f"{path}, line {i + 3}: it has {format_count(len(words), 'field')}; 5 are needed",
                "source, destination, rate, latency, error rate",
            )
        a, b, *rest = words
        if not (a.isdecimal() and b.isdecimal()):
            raise InputError(f"{path}, line {i + 3}: {a if not a.isdecimal() else b!r} is not a node id")
        triple = (rest[0], rest[1], rest[2])
        if triple not in read:
            read[triple] = _link_numbers(*triple, f"{path}, line {i + 3}")
        ends[i] = min(int(a), 2**31 - 1), min(int(b), 2**31 - 1)
        numbers[:, i] = read[triple]
    return ends, numbers[0], numbers[1], numbers[2]


def _link_numbers(rate: str, latency: str, error_rate: str, where: str) -> tuple[float, float, float]:
    try:
        return parse_quantity("rate_bytes_per_s", rate), parse_quantity("latency_s", latency), float(error_rate)
    except InputError as error:
        raise InputError(f"{where}: {error.message}", error.hint) from None
    except ValueError:
        raise InputError(f"{where}: {error_rate!r} is not an error rate") from None


def _tiers(fabric: Fabric) -> NDArray[np.int8]:
    """Return 0 for GPUs and scale-up switches; for another switch its distance from the nearest GPU."""
    far = np.int8(100)
    tier = np.where(fabric.kind == NodeKind.SWITCH, far, 0).astype(np.int8)
    source, target = fabric.directions
    frontier, distance = fabric.kind == NodeKind.GPU, 0
    while frontier.any():
        distance += 1
        is_next = np.zeros(fabric.num_nodes, bool)
        is_next[target[frontier[source]]] = True
        frontier = is_next & (tier == far)
        tier[frontier] = distance
    return tier


def _servers(fabric: Fabric) -> NDArray[np.int32]:
    server = np.full(fabric.num_nodes, -1, np.int32)
    server[: fabric.num_gpus] = np.arange(fabric.num_gpus) // fabric.gpus_per_server
    source, target = fabric.directions
    up = (fabric.kind[source] == NodeKind.GPU) & (fabric.kind[target] == NodeKind.SCALE_UP_SWITCH)
    server[target[up]] = server[source[up]]
    return server
