"""Topologies by their parameters, and the fabrics that they build; fabrics by their names: a file, a kind, a node.

The two-tier networks have the parameters, defaults and order of nodes and links of SimAI 1.6's `gen_Topo_Template.py`
(named beside each field), so that the files which both write are equal.
"""

from dataclasses import dataclass, field, replace
from math import ceil, prod
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from windtunnel import catalog
from windtunnel.compiled.arrays import Ints
from windtunnel.errors import InputError, check_known
from windtunnel.hardware import Device, Node, meets_all
from windtunnel.limits import check_size
from windtunnel.network.fabric import NETWORK_SHARES, Fabric, NodeKind, assumed_kind, link_kind, read_topology
from windtunnel.network.settings import GBPS, ClusterNetwork
from windtunnel.schema import AtLeastOne, NonNegative, Positive, Schema, decode, parse_yaml, read_yaml

SCALE_OUT_LATENCY_S = 500e-9
"""Of a link of a cluster's network, as SimAI 1.6 has it."""
NetworkKind = Literal["infiniband", "ethernet", "efa", "slingshot", "ici", "tcpxo", "tcpx"]
"""Of `NETWORK_SHARES`."""
INFINIBAND_STEP_S = 2.7e-6
"""Of one step over InfiniBand, which the closed forms know (NCCL 2.27 src/graph/tuning.cc)."""


def _check_loss(error_fraction: float) -> None:
    if not 0 <= error_fraction < 1:
        raise ValueError(f"error_fraction is {error_fraction:g}; 0 to below 1 is possible")


class _Servers(Schema):
    """GPUs in servers that one scale-up network joins inside."""

    num_gpus: AtLeastOne = 32
    """`-g`"""
    gpus_per_server: AtLeastOne = 8
    """`-gps`"""
    gpu_type: str = "H100"
    """`-gt`"""
    scale_up_switches_per_server: AtLeastOne = 1
    """`-nsps`: NVSwitches."""
    scale_up_bytes_per_s: Positive = 2880 * GBPS
    """`-nvbw`: of one GPU to one scale-up switch, one direction."""
    scale_up_latency_s: NonNegative = 25e-9
    """`-nl`"""
    latency_s: NonNegative = 500e-9
    """`-l`: of every scale-out link."""
    error_fraction: Annotated[float, _check_loss] = 0.0
    """`-er`: packets lost on each link."""
    network: NetworkKind = "infiniband"
    """Kind of the links between servers: infiniband, ethernet (RoCE), efa or slingshot."""

    def check(self) -> None:
        if self.num_gpus % self.gpus_per_server:
            raise ValueError(f"gpus_per_server = {self.gpus_per_server} does not divide num_gpus = {self.num_gpus}")
        check_size(GPUs=self.num_gpus)


class _TwoTier(_Servers):
    """Servers below leaf switches (ASW, ToR), every leaf linked to every spine (PSW) of its plane."""

    nic_bytes_per_s: Positive | None = None
    """`-bw`: of one NIC port. None: 400 Gb/s, or 200 Gb/s where a named network has two ports per GPU."""
    gpus_per_leaf: AtLeastOne | None = None
    """`-npa`: NIC ports down of a leaf. None: 64, or 128 where a named network has two ports per GPU."""
    num_spines: AtLeastOne = 64
    """`-psn`: in all planes together."""
    leaf_spine_bytes_per_s: Positive = 400 * GBPS
    """`-apbw`"""
    leaf_ports_up: AtLeastOne | None = None
    """`-app`: ports to spines, which bounds how many segments there may be. None: 64; 240 in HPN, 120 with two planes;
    8 in DCN+.
    """

    def build(self) -> Fabric:
        """Join servers to leaves, and leaves to the spines of their plane."""
        return _two_tier(self)


class TwoTier(_TwoTier, tag="two_tier"):
    """Leaves and spines without a vendor's name; by default each server's NICs end at one leaf."""

    rail_optimised: bool = False
    """`--ro`: GPU k of every server ends at leaf k of its segment."""
    dual_tor: bool = False
    """`--dt`: two NIC ports per GPU, at two leaves."""
    dual_plane: bool = False
    """`--dp`: the two leaves belong to spine planes that do not meet."""


class SpectrumX(_TwoTier, tag="spectrum_x"):
    """NVIDIA Spectrum-X: rail-optimised, one port per GPU."""

    num_gpus: AtLeastOne = 4096
    network: NetworkKind = "ethernet"


class AlibabaHpn(_TwoTier, tag="alibaba_hpn"):
    """Alibaba HPN 7.0: rail-optimised, two ports per GPU at two leaves, one or two spine planes.

    Source: Qian et al., "Alibaba HPN: A Data Center Network for Large Language Model Training", SIGCOMM 2024.
    """

    num_gpus: AtLeastOne = 15360
    network: NetworkKind = "ethernet"
    num_spines: AtLeastOne = 120
    dual_plane: bool = False


class DcnPlus(_TwoTier, tag="dcn_plus"):
    """Alibaba DCN+: a server's NICs end at one leaf, or with `dual_tor` at two; not rail-optimised."""

    num_gpus: AtLeastOne = 512
    network: NetworkKind = "ethernet"
    num_spines: AtLeastOne = 8
    dual_tor: bool = False


class FatTree(_Servers, tag="fat_tree"):
    """A Clos network of switches with `radix` ports, of two or three tiers, with oversubscription at the leaves.

    Source: Al-Fares et al., "A Scalable, Commodity Data Center Network Architecture", SIGCOMM 2008, section 3 (three
    tiers, oversubscription 1, one GPU a server: its k-ary fat tree with k = radix).
    """

    num_gpus: AtLeastOne = 1024
    nic_bytes_per_s: Positive = 400 * GBPS
    """Of one NIC port."""
    radix: AtLeastOne = 64
    num_tiers: int = 2
    oversubscription: float = 1.0
    """Ports down of a leaf for each port up."""

    def check(self) -> None:
        super().check()
        if self.num_tiers not in (2, 3):
            raise ValueError(f"num_tiers is {self.num_tiers}; 2 or 3 is possible")
        if self.oversubscription <= 0 or self.ports_up < 1 or self.ports_down < 1:
            raise ValueError(
                f"oversubscription = {self.oversubscription:g} leaves a leaf of {self.radix} ports without"
            )

    @property
    def ports_up(self) -> int:
        return round(self.radix / (1 + self.oversubscription))

    @property
    def ports_down(self) -> int:
        return self.radix - self.ports_up

    def build(self) -> Fabric:
        """Join leaves to spines, and with three tiers the spines of pods to cores."""
        up, down, radix = self.ports_up, self.ports_down, self.radix
        leaves = ceil(self.num_gpus / down)
        most_leaves = radix if self.num_tiers == 2 else radix // 2 * radix
        if leaves > most_leaves:
            raise InputError(
                f"{self.num_gpus} GPUs need {leaves} leaves; {most_leaves} of {radix} ports can be joined in "
                f"{self.num_tiers} tiers",
                "raise radix or num_tiers",
            )
        rate, latency = self.nic_bytes_per_s, self.latency_s
        wiring = _wired_servers(self, rate, np.arange(self.num_gpus) // down)
        first, leaf = wiring.first_leaf, np.arange(leaves)
        name = f"FatTree_{self.num_gpus}g_{self.num_tiers}tiers_radix{radix}_{self.gpu_type}"
        if self.num_tiers == 2:
            wiring.link_spines(leaves, up, rate, latency)
            return wiring.fabric(name, [leaves, up])
        pods = ceil(leaves / (radix // 2))
        spine_of_leaf = leaf[:, None] // (radix // 2) * up + np.arange(up)
        wiring.link(first + leaf[:, None], first + leaves + spine_of_leaf, rate, latency)
        spine = np.arange(pods * up)
        core = spine[:, None] % up * (radix // 2) + np.arange(radix // 2)
        wiring.link(first + leaves + spine[:, None], first + leaves + pods * up + core, rate, latency)
        return wiring.fabric(name, [leaves, pods * up, up * (radix // 2)])


class NvLinkDomains(_Servers, tag="nvl"):
    """NVLink domains of 36, 72 or 576 GPUs, joined by scale-out rails.

    GPU k of a domain has its NIC on rail k modulo `num_rails`; each rail is one leaf per `domains_per_leaf` domains.
    Source of the defaults: NVIDIA GB200 NVL72 datasheet (18 NVLinks of 50 GB/s a GPU, one to each of 18 switches).
    """

    num_gpus: AtLeastOne = 144
    gpus_per_server: AtLeastOne = 72
    """GPUs of one NVLink domain."""
    gpu_type: str = "GB200"
    scale_up_switches_per_server: AtLeastOne = 18
    scale_up_bytes_per_s: Positive = 50e9
    scale_up_latency_s: NonNegative = 300e-9
    nic_bytes_per_s: Positive = 400 * GBPS
    """Of one NIC port."""
    num_rails: AtLeastOne = 4
    domains_per_leaf: AtLeastOne = 4
    num_spines: AtLeastOne = 16
    leaf_spine_bytes_per_s: Positive = 800 * GBPS

    def check(self) -> None:
        super().check()
        if self.gpus_per_server % self.num_rails:
            raise ValueError(f"num_rails = {self.num_rails} does not divide gpus_per_server = {self.gpus_per_server}")

    def build(self) -> Fabric:
        """Join the rails of domains to leaves, and every leaf to every spine."""
        gpu, rails = np.arange(self.num_gpus), self.num_rails
        segment = gpu // self.gpus_per_server // self.domains_per_leaf
        leaf = segment * rails + gpu % self.gpus_per_server % rails
        wiring = _wired_servers(self, self.nic_bytes_per_s, leaf)
        leaves = ceil(self.num_gpus // self.gpus_per_server / self.domains_per_leaf) * rails
        wiring.link_spines(leaves, self.num_spines, self.leaf_spine_bytes_per_s, self.latency_s)
        name = f"NVL{self.gpus_per_server}_{self.num_gpus}g_{rails}rails_{self.gpu_type}"
        return wiring.fabric(name, [leaves, self.num_spines])


def _neighbours(node: Node) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the ends of a node's point-to-point links: all pairs, or neighbours in two rows of devices."""
    device = np.arange(node.num_devices)
    near, far = np.triu_indices(node.num_devices, 1)
    if meets_all(node):
        return near, far
    row, column = device // (node.num_devices // 2), device % (node.num_devices // 2)
    joined = np.abs(row[near] - row[far]) + np.abs(column[near] - column[far]) == 1
    return near[joined], far[joined]


class NodeRails(Schema, tag="node"):
    """Servers of one kind of the catalog (`dgx_h100`, `gb200_nvl72`, pair-wise NVLink, ...) on scale-out rails.

    One server has no scale-out network. More have a leaf for each GPU position and spines that carry all of it.
    """

    node: str
    """A name of the catalog's nodes, or a YAML file."""
    num_servers: AtLeastOne = 1
    scale_up_bytes_per_s: Positive | None = None
    """Of a switch that joins the devices in place of the node's own links."""
    latency_s: float | None = None
    """Of every scale-out link; None: 500 ns, and half of what the node's link takes longer than InfiniBand."""
    num_spines: AtLeastOne | None = None
    """None: 8, or one for each server where they are fewer, so that no link is slower than a NIC."""
    network: NetworkKind | None = None
    """Kind of the links between servers; None: as the name of the node's link begins, else InfiniBand."""

    def build(self) -> Fabric:
        """Join the devices of each node, and the nodes by rails."""
        node = catalog.node(self.node)
        if self.scale_up_bytes_per_s is not None:
            node = catalog.behind_switch(node, self.scale_up_bytes_per_s)
        size, num_servers, out = node.num_devices, self.num_servers, node.scale_out
        if num_servers > 1 and out is None:
            lacks = f"{node.name} has no link to other servers"
            raise InputError(lacks, "use num_servers = 1, or a node with scale_out")
        num_gpus = size * num_servers
        wiring = _Wiring(node.device, num_gpus, size, num_servers if node.scale_up_links is None else 0)
        gpu = np.arange(num_gpus)
        group, up = node.scale_up_group_size or size, node.scale_up
        if group < size:
            if node.host is None:
                raise InputError(f"{node.name} joins {group} of {size} devices, and no host link joins the others")
            up = node.host
            for step in range(1, group):
                first_of_pair = gpu[gpu % group + step < group]
                wiring.link(first_of_pair, first_of_pair + step, node.scale_up.bytes_per_s / (group - 1), 0.0)
        if node.scale_up_links is None:
            wiring.link(gpu, num_gpus + gpu // size, up.bytes_per_s, up.latency_s / 2)
        else:
            near, far = _neighbours(node)
            server = size * np.arange(num_servers)[:, None]
            wiring.link(server + near, server + far, up.bytes_per_s / node.scale_up_links, up.latency_s)
        tiers: list[int] = []
        if num_servers > 1 and out is not None:
            wiring.network = self.network or link_kind(out.name) or "infiniband"
            wiring.is_kind_assumed = not (self.network or link_kind(out.name))
            extra_s = max(out.latency_s - INFINIBAND_STEP_S, 0.0) / 2
            latency_s = SCALE_OUT_LATENCY_S + extra_s if self.latency_s is None else self.latency_s
            wiring.link(gpu, wiring.first_leaf + gpu % size, out.bytes_per_s, latency_s)
            num_spines = self.num_spines or min(8, num_servers)
            wiring.link_spines(size, num_spines, out.bytes_per_s * num_servers / num_spines, SCALE_OUT_LATENCY_S)
            tiers = [size, num_spines]
        # Chips of a torus pass on what is for others.
        servers = "" if num_servers == 1 else f"_{num_servers}servers"
        return wiring.fabric(f"{node.name}{servers}", tiers, gpus_forward=node.scale_up.name == "ici")


class Torus(Schema, tag="torus"):
    """GPUs in a ring along each dimension, as TPU v4 pods are wired; a dimension of 2 has one link, not two."""

    dimensions: tuple[int, ...] = (4, 4, 4)
    gpu_type: str = "TPU"
    link_bytes_per_s: Positive = 50e9
    """Of one link, one direction. TPU v4: 50 GB/s (Jouppi et al., ISCA 2023, table 4)."""
    latency_s: NonNegative = 500e-9

    def __post_init__(self) -> None:
        if not self.dimensions or min(self.dimensions) < 1 or prod(self.dimensions) < 2:
            raise ValueError(f"dimensions are {list(self.dimensions)}; at least two devices are needed")
        check_size(GPUs=prod(self.dimensions))
        super().__post_init__()

    def build(self) -> Fabric:
        """Join neighbours along every dimension."""
        ids = np.arange(prod(self.dimensions)).reshape(self.dimensions)
        wiring = _Wiring(self.gpu_type, ids.size, 1, 0)
        for axis, length in enumerate(self.dimensions):
            if length == 1:
                continue
            near, far = ids, np.roll(ids, -1, axis)
            if length == 2:
                near, far = np.take(ids, [0], axis), np.take(ids, [1], axis)
            wiring.link(near, far, self.link_bytes_per_s, self.latency_s)
        name = f"Torus_{'x'.join(map(str, self.dimensions))}_{self.gpu_type}"
        return wiring.fabric(name, [], gpus_forward=True)


class Dragonfly(_Servers, tag="dragonfly"):
    """Groups of fully meshed switches, with one link between any two groups.

    Source: Kim et al., "Technology-Driven, Highly-Scalable Dragonfly Topology", ISCA 2008, section 3, with
    p = `nics_per_switch`, a = `switches_per_group`, h = `global_links_per_switch` and at most a h + 1 groups.
    """

    num_gpus: AtLeastOne = 72
    gpus_per_server: AtLeastOne = 1
    nic_bytes_per_s: Positive = 400 * GBPS
    """Of one NIC port."""
    nics_per_switch: AtLeastOne = 2
    switches_per_group: AtLeastOne = 4
    global_links_per_switch: AtLeastOne = 2
    switch_bytes_per_s: Positive = 400 * GBPS

    def check(self) -> None:
        super().check()
        num_joined = self.switches_per_group * self.global_links_per_switch + 1
        if self.num_groups > num_joined:
            raise ValueError(f"num_gpus = {self.num_gpus} needs {self.num_groups} groups; {num_joined} can be joined")

    @property
    def num_groups(self) -> int:
        return ceil(self.num_gpus / (self.nics_per_switch * self.switches_per_group))

    def build(self) -> Fabric:
        """Deal each group's links to its switches in turn; link l of group i goes to group l, or l + 1 from i on."""
        leaf = np.arange(self.num_gpus) // self.nics_per_switch
        wiring = _wired_servers(self, self.nic_bytes_per_s, leaf)
        per_group, groups = self.switches_per_group, self.num_groups
        switch = wiring.first_leaf + np.arange(groups * per_group).reshape(groups, per_group)
        rate, latency = self.switch_bytes_per_s, self.latency_s
        for step in range(1, per_group):
            wiring.link(switch[:, :-step], switch[:, step:], rate, latency)
        low, high = np.triu_indices(groups, 1)
        if groups > 1:
            per_switch = ceil((groups - 1) / per_group)
            wiring.link(switch[low, (high - 1) // per_switch], switch[high, low // per_switch], rate, latency)
        name = f"Dragonfly_{self.num_gpus}g_{groups}groups_{self.gpu_type}"
        return wiring.fabric(name, [groups * per_group])


Topology: TypeAlias = (
    SpectrumX | AlibabaHpn | DcnPlus | TwoTier | FatTree | NvLinkDomains | NodeRails | Torus | Dragonfly
)
"""Topologies that a scenario or the command line can name."""


@dataclass
class _Wiring:
    """A fabric in the making: its nodes, and groups of links in the order in which they are added."""

    gpu_type: str
    num_gpus: int
    gpus_per_server: int
    num_scale_up_switches: int
    error_fraction: float = 0.0
    network: str = "infiniband"
    is_kind_assumed: bool = False
    links: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    """(ends, other ends, bytes per second, seconds) of each group."""

    def __post_init__(self) -> None:
        check_size(GPUs=self.num_gpus)

    @property
    def first_leaf(self) -> int:
        return self.num_gpus + self.num_scale_up_switches

    def link(self, a: ArrayLike, b: ArrayLike, bytes_per_s: ArrayLike, latency_s: ArrayLike) -> None:
        """Add links between `a` and `b`, scalars or arrays that broadcast."""
        self.links.append(tuple(np.ravel(column) for column in np.broadcast_arrays(a, b, bytes_per_s, latency_s)))

    def link_spines(
        self, num_leaves: int, num_spines: int, bytes_per_s: float, latency_s: float, num_planes: int = 1
    ) -> None:
        """Link every leaf to every spine of its plane; planes divide leaves and spines evenly, in order."""
        leaf = np.arange(num_leaves).reshape(num_planes, -1, 1)
        spine = num_leaves + np.arange(num_spines).reshape(num_planes, 1, -1)
        self.link(self.first_leaf + leaf, self.first_leaf + spine, bytes_per_s, latency_s)

    def fabric(self, name: str, tiers: list[int], gpus_forward: bool = False) -> Fabric:
        """Return the fabric, with `tiers[i]` switches in tier i + 1."""
        num_gpus, num_scale_up, num_switches = self.num_gpus, self.num_scale_up_switches, sum(tiers)
        kinds = np.array([NodeKind.GPU, NodeKind.SCALE_UP_SWITCH, NodeKind.SWITCH], np.int8)
        per_server = num_scale_up // (num_gpus // self.gpus_per_server)
        of_gpu, of_switch = np.arange(num_gpus) // self.gpus_per_server, np.arange(num_scale_up) // max(per_server, 1)
        a, b, rate, latency = (np.concatenate(column) for column in zip(*self.links, strict=True))
        return Fabric(
            name=name,
            gpu_type=self.gpu_type,
            gpus_per_server=self.gpus_per_server,
            kind=np.repeat(kinds, [num_gpus, num_scale_up, num_switches]),
            tier=np.repeat(np.arange(len(tiers) + 1), [num_gpus + num_scale_up, *tiers]).astype(np.int8),
            server=np.concatenate([of_gpu, of_switch, np.full(num_switches, -1)]).astype(np.int32),
            link_a=a.astype(np.int32),
            link_b=b.astype(np.int32),
            bandwidth_bytes_per_s=rate.astype(np.float64),
            latency_s=latency.astype(np.float64),
            error_fraction=np.full(len(a), self.error_fraction),
            gpus_forward=gpus_forward,
            network=self.network,
            is_kind_assumed=self.is_kind_assumed,
        )


def _wired_servers(servers: _Servers, nic_bytes_per_s: float, *leaf_of_port: Ints) -> _Wiring:
    """Link servers: each GPU's scale-up links, then its NIC ports to leaves numbered from 0, GPU after GPU."""
    switches, ports = servers.scale_up_switches_per_server, len(leaf_of_port)
    num_switches = servers.num_gpus // servers.gpus_per_server * switches
    size, of_links = servers.gpus_per_server, (servers.error_fraction, servers.network)
    wiring = _Wiring(servers.gpu_type, servers.num_gpus, size, num_switches, *of_links)
    gpu = np.arange(servers.num_gpus)
    up = servers.num_gpus + gpu[:, None] // servers.gpus_per_server * switches + np.arange(switches)
    ends = np.concatenate([up, wiring.first_leaf + np.stack(leaf_of_port, axis=1)], axis=1)
    rates = [servers.scale_up_bytes_per_s] * switches + [nic_bytes_per_s] * ports
    latencies = [servers.scale_up_latency_s] * switches + [servers.latency_s] * ports
    wiring.link(gpu[:, None], ends, np.array(rates), np.array(latencies))
    return wiring


def _two_tier(topology: _TwoTier) -> Fabric:
    """Lay out rails, planes and doubled leaves, and name the network, as `gen_Topo_Template.py` of SimAI 1.6 does."""
    size = f"{topology.num_gpus}g_{topology.gpus_per_server}gps"
    rails, dual_tor, dual_plane, ports_up = False, False, False, 64
    match topology:
        case SpectrumX():
            rails, name = True, f"Spectrum-X_{size}"
        case AlibabaHpn(dual_plane=dual_plane):
            rails, dual_tor, ports_up = True, True, 120 if dual_plane else 240
            name = f"AlibabaHPN_{size}_DualToR_{'Dual' if dual_plane else 'Single'}Plane"
        case DcnPlus(dual_tor=dual_tor):
            ports_up, name = 8, f"DCN+{'Dual' if dual_tor else 'Single'}ToR_{size}"
        case TwoTier(rail_optimised=rails, dual_tor=dual_tor, dual_plane=dual_plane):
            tor, plane = ("DualToR", f"_{'Dual' if dual_plane else 'Single'}Plane") if dual_tor else ("SingleToR", "")
            name = f"Rail_Opti_{tor}_{size}{plane}" if rails else f"No_Rail_Opti_{size}_{tor}"
    two_ports = dual_tor and not isinstance(topology, TwoTier)
    nic_bytes_per_s = topology.nic_bytes_per_s or (200 if two_ports else 400) * GBPS
    gpus_per_leaf = topology.gpus_per_leaf or (128 if two_ports else 64)
    gpu, num_rails = np.arange(topology.num_gpus), topology.gpus_per_server if rails else 1
    num_segments = ceil(topology.num_gpus / (gpus_per_leaf * num_rails))
    if dual_plane and not (rails and dual_tor):
        raise InputError("dual_plane needs rail_optimised and dual_tor", "two planes need two ports per GPU, by rail")
    if dual_plane and topology.num_spines % 2:
        raise InputError(f"num_spines = {topology.num_spines} cannot be split over two planes")
    ports_up = topology.leaf_ports_up or ports_up
    if num_segments > (allowed := ports_up // (num_rails if rails else 1 + dual_tor)):
        raise InputError(
            f"{topology.num_gpus} GPUs need {num_segments} segments; leaf_ports_up = {ports_up} allows {allowed}",
            "raise leaf_ports_up or gpus_per_leaf, or use fewer GPUs",
        )
    leaves = num_segments * num_rails * (2 if dual_tor else 1)
    leaf = gpu // (num_rails * gpus_per_leaf) * num_rails + gpu % num_rails
    wiring = _wired_servers(topology, nic_bytes_per_s, *([leaf, leaf + leaves // 2] if dual_tor else [leaf]))
    rate, num_planes = topology.leaf_spine_bytes_per_s, 2 if dual_plane else 1
    wiring.link_spines(leaves, topology.num_spines, rate, topology.latency_s, num_planes)
    name = f"{name}_{nic_bytes_per_s / GBPS:g}Gbps_{topology.gpu_type}"
    return wiring.fabric(name, [leaves, topology.num_spines])


KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(Topology))
"""Kinds of topologies that can be built."""

_OTHER_NAMES = {"spectrumx": "spectrum_x", "alibabahpn": "alibaba_hpn", "hpn": "alibaba_hpn", "dcn": "dcn_plus"}
"""SimAI's name, in lower case and without signs -> kind."""


def fabric_of(text: str) -> Fabric:
    """Return the fabric that `text` means. InputError where nothing is called that, or its parameters are wrong.

    Args:
        text: the path of a topology file in SimAI's format or of a YAML file; a kind with parameters
            (`spectrum_x:num_gpus=128,num_spines=8`); or a node of the catalog (`dgx_h100`, `dgx_h100:num_servers=4`).
            Parameters behind a YAML file replace its own; `network` behind SimAI's says the kind of its links.
    """
    name, _, parameters = (text, "", "") if Path(text).is_file() else text.rpartition(":")
    if (path := Path(name)).is_file():
        given = _parameters(parameters, text)
        if path.suffix in (".yaml", ".yml"):
            raw = read_yaml(path)
            return fabric_from({**raw, **given} if isinstance(raw, dict) else raw, str(path))
        kind = str(given.pop("network", ""))
        if given or kind:
            takes = f"{name}: a topology file takes no {next(iter(given), f'network={kind}')}"
            check_known("" if given else kind, NETWORK_SHARES, takes, f"known: network={', '.join(NETWORK_SHARES)}")
        return replace(read_topology(path), network=kind or "infiniband", is_kind_assumed=not kind)
    name, _, parameters = text.partition(":")
    if "/" in name:
        raise InputError(f"there is no file {text}")
    return fabric_from({"type": name, **_parameters(parameters, text)}, "")


def assumed_kinds(network: ClusterNetwork | None, node: Node, num_devices: int) -> list[str]:
    """Return the note on links between nodes whose kind is not known, if so many devices span several nodes."""
    if num_devices <= node.num_devices:
        return []
    if network is not None and network.topology is not None:
        fabric = fabric_of(network.topology)
        return [assumed_kind(fabric.name)] if fabric.is_kind_assumed else []
    is_known = node.scale_out is None or link_kind(node.scale_out.name)
    return [] if is_known else [assumed_kind(node.name)]


def nodes_of(device: Device, num_devices: int | None) -> tuple[str, int]:
    """Return the text of the usual nodes of so many devices, for `fabric_of`, and the number of devices.

    Hosts that ICI joins are a torus of lengths as equal as can be. `num_devices` None takes one node. InputError for
    fewer than one device.
    """
    if num_devices is not None and num_devices < 1:
        raise InputError(f"num_devices is {num_devices}; at least 1 is needed")
    node = catalog.default_node(device)
    num_devices = num_devices or node.num_devices
    num_servers = ceil(num_devices / node.num_devices)
    if num_servers > 1 and node.scale_up_links and node.scale_out == node.scale_up:
        lengths = _equal_lengths(num_devices, node.scale_up_links // 2)
        link_bytes_per_s = node.scale_up.bytes_per_s / node.scale_up_links
        return f"torus:dimensions={lengths},{link_bytes_per_s=},gpu_type={device.name}", num_devices
    if node.name == catalog.SWITCHED_NODE:
        rate = f"scale_up_bytes_per_s={node.scale_up.bytes_per_s}"
        return f"{catalog.GENERIC_NODE}:{rate},num_servers={num_servers}", num_devices
    return f"{node.name}:num_servers={num_servers}", num_devices


def _equal_lengths(num_devices: int, num_dimensions: int) -> list[int]:
    """Return so many lengths of this product, ascending, the first as near to the root as divides it."""
    if num_dimensions == 1:
        return [num_devices]
    root = num_devices ** (1 / num_dimensions) * (1 + 1e-9)
    first = next(length for length in range(int(root), 0, -1) if num_devices % length == 0)
    return [first, *_equal_lengths(num_devices // first, num_dimensions - 1)]


def fabric_from(raw: Any, source: str) -> Fabric:
    """Return the fabric of a topology's fields; `type` may also be SimAI's name of it, or a node's. InputError where a
    field is wrong; names `source`."""
    if not isinstance(raw, dict) or "type" not in raw:
        raise InputError(f"{source or 'the topology'} has no type", f"one of: {', '.join(KINDS)}")
    raw_type = str(raw["type"])
    plain = raw_type.lower().replace("-", "_").replace("+", "")
    kind = _OTHER_NAMES.get(plain.replace("_", ""), plain)
    raw = {**raw, "type": kind}
    if kind not in KINDS:
        otherwise = f"a file, a node of `windtunnel catalog nodes`, or one of: {', '.join(KINDS)}"
        devices, nodes = catalog.names("devices"), [*catalog.names("nodes"), *catalog.other_names("nodes")]
        if device := next((name for name in (kind, f"{kind}_sxm") if name in devices and name not in nodes), None):
            node = catalog.default_node(catalog.device(device)).name
            raise InputError(f"{kind!r} is a device, and no topology", f"its usual node is {node}")
        check_known(kind, [*KINDS, *nodes], f"there is no topology {raw_type!r}", otherwise)
        raw |= {"type": "node", "node": kind}
    schema: Any = Topology
    fabric: Fabric = decode(raw, schema, source).build()
    return fabric


def _parameters(text: str, name: str) -> dict[str, Any]:
    """Read `a=1,b=[2,3]` as fields."""
    if not text:
        return {}
    import yaml

    try:
        values = parse_yaml("{" + text.replace("=", ": ") + "}")
    except yaml.YAMLError:
        values = None
    if not isinstance(values, dict) or None in values.values():
        raise InputError(f"{text!r} in {name!r} is not of the form name=value,...", "spectrum_x:num_gpus=128")
    return values
