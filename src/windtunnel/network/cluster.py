"""Collectives of a training job or a replica, timed on the network that its servers share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Node
from windtunnel.model import operators as ops
from windtunnel.network.collectives.call import Ranks
from windtunnel.network.collectives.closed_forms import closed_form, direct_rate, switch_sums
from windtunnel.network.collectives.run import GroupsRun, run_groups
from windtunnel.network.fabric import Fabric, link_kind, with_joined_switches
from windtunnel.network.flows import flows_of
from windtunnel.network.paths import run_flows
from windtunnel.network.settings import ClusterNetwork
from windtunnel.network.topology import INFINIBAND_STEP_S, fabric_from, fabric_of
from windtunnel.pricing.estimator import Coverage, Estimate, Estimator
from windtunnel.units import US

FABRIC_ERROR = 0.15
"""Assumed relative error of a collective on a fabric: closed forms' own. Against packet-level runs the flow level is
within 1% where flows do not meet and within 33% where many collide (`docs/guides/network.md`)."""

RINGS = ("all_reduce", "all_gather", "reduce_scatter")
"""Collectives for which NCCL takes a ring or a tree."""
HANDOFF_BYTES = 256 * 2**20
"""Bytes that a device sends to measure the rate of handoffs: the KV cache of 2,048 tokens of a 70B model."""


@dataclass(frozen=True)
class Network:
    """A fabric whose GPUs hold the devices in order, and the times of the collectives already run on it."""

    fabric: Fabric
    settings: ClusterNetwork
    num_devices: int
    _known: dict[tuple[str, int, int, int], GroupsRun] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Source of an estimate."""
        return f"{self.fabric.name}, {self.settings.backend} level"

    def run(self, op: ops.Collective, message_bytes: float, stride: int = 1) -> GroupsRun:
        """Run a collective in all groups of ranks that lie `stride` apart, at work at the same time. InputError where a
        group does not spread evenly over servers, or is not connected."""
        key = (op.op, round(message_bytes), op.num_ranks, stride)
        if key not in self._known:
            groups = groups_of(op, self.num_devices, stride)
            self._known[key] = run_groups(self.fabric, op.op, key[1], groups, self.settings)
        return self._known[key]

    def seconds(self, op: ops.Collective, message_bytes: float, stride: int = 1) -> float:
        """Return the seconds of `run`, whose errors this has."""
        return self.run(op, message_bytes, stride).seconds


def groups_of(op: ops.Collective, num_devices: int, stride: int) -> NDArray[np.int32]:
    """Return (num_groups, num_ranks) the ranks of every group; for send_recv, every sender and receiver.

    Pairs more than half of the ranks apart are those of a pipeline's first and last stage.
    """
    ranks = np.arange(num_devices, dtype=np.int32)
    if op.op == "send_recv" or op.num_ranks * stride > num_devices:
        return np.column_stack([ranks[:-stride], ranks[stride:]])
    num_grouped = num_devices // (op.num_ranks * stride) * op.num_ranks * stride
    return ranks[:num_grouped].reshape(-1, op.num_ranks, stride).swapaxes(1, 2).reshape(-1, op.num_ranks)


def network_of(settings: ClusterNetwork, node: Node, num_devices: int) -> Network:
    """Return the network of `settings` for `num_devices` devices in nodes of one kind. InputError where the topology is
    unknown, too small, or made of other servers."""
    if settings.topology is None:
        num_servers = -(-num_devices // node.num_devices)
        fabric = fabric_from({"type": "node", "node": node.name, "num_servers": num_servers}, "network")
    else:
        fabric = fabric_of(settings.topology)
    if fabric.num_gpus < num_devices:
        raise InputError(
            f"network: {fabric.name} has {fabric.num_gpus} GPUs, and {num_devices} are needed", "take a larger topology"
        )
    per_server = np.bincount(fabric.server[:num_devices])
    expected = min(node.num_devices, num_devices)
    if per_server.max() != expected:
        raise InputError(
            f"network: a server of {fabric.name} has {per_server.max()} of the devices; one {node.name} has {expected}",
            "give a node and a topology that agree",
        )
    return Network(with_joined_switches(fabric), settings, num_devices)


def handoff_bytes_per_s(network: Network, senders: NDArray[np.integer], receivers: NDArray[np.integer]) -> float:
    """Return the mean bytes per second from rank to rank while as many pairs as possible send at once. InputError where
    two are not connected.

    Args:
        senders: (num_ranks, devices_per_rank) device numbers; so are `receivers`, of other sizes.
        receivers: each rank receives from one; its devices take turns where they are fewer.
    """
    num_pairs, width = min(len(senders), len(receivers)), max(senders.shape[1], receivers.shape[1])
    source = np.resize(senders[:num_pairs, np.arange(width) % senders.shape[1]], (num_pairs, width))
    destination = np.resize(receivers[:num_pairs, np.arange(width) % receivers.shape[1]], (num_pairs, width))
    flows = flows_of(source.ravel(), destination.ravel(), HANDOFF_BYTES, connection=np.arange(source.size))
    times = run_flows(network.fabric, flows, network.settings)
    return float((width * HANDOFF_BYTES / times.finish_s.reshape(num_pairs, width).max(axis=1)).mean())


@dataclass(frozen=True)
class OnNetwork:
    """An estimator that times a replica's collectives between nodes on its network, and asks another for the rest.

    Groups are neighbouring ranks; stages follow each other. A family of sizes is timed at powers of two, and between
    them along a straight line of log seconds over log bytes.
    """

    estimator: Estimator
    network: Network
    ranks_per_stage: int

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds of `op`, from the network for a collective that leaves a node."""
        if not isinstance(op, ops.Collective) or op.span_nodes == 1:
            return self.estimator.estimate(op)
        stride = self.ranks_per_stage if op.op == "send_recv" else 1
        seconds = _between_powers(op.message_bytes, lambda size: self.network.seconds(op, size, stride))
        return Estimate(seconds, Coverage.ROOFLINE, self.network.source, FABRIC_ERROR)


@dataclass(frozen=True)
class OverNodes:
    """An estimator that times rings and trees over nodes as NCCL's model does, and asks another for the rest."""

    estimator: Estimator
    node: Node

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds of `op`, in closed form for a collective of as many ranks in each of several nodes."""
        if not isinstance(op, ops.Collective) or op.op not in RINGS or op.span_nodes == 1:
            return self.estimator.estimate(op)
        if op.num_ranks % op.span_nodes or self.node.scale_out is None:
            return self.estimator.estimate(op)
        return between_nodes(op, self.node)


def between_nodes(op: ops.Collective, node: Node, network_share: float = 1.0) -> Estimate:
    """Return the seconds of a collective over several nodes, each with as many ranks, by NCCL's model. InputError where
    the node has no link to others.

    Args:
        network_share: rate of the network cards against that of a collective that runs alone.
    """
    out = node.scale_out
    if out is None:
        raise InputError(f"{op.op} over {op.span_nodes} nodes needs a link between nodes, which {node.name} lacks")
    later_us = max(out.latency_s - INFINIBAND_STEP_S, 0.0) / US
    card = out.bytes_per_s * network_share
    device = catalog.device(node.device) if node.device in catalog.names("devices") else None
    is_direct = node.scale_up_links is not None
    per_node = op.num_ranks // op.span_nodes
    up = node.link_among(per_node).bytes_per_s
    sums = switch_sums(device, up, is_direct=is_direct)
    if node.scale_up_links and device and per_node > 1:
        links = min(per_node - 1, node.scale_up_links) / node.scale_up_links
        up = direct_rate(up * links, device.architecture, per_node, op.span_nodes)
    sums |= {"network": link_kind(out.name) or "infiniband", "switched": not is_direct, "device": node.device}
    ranks = Ranks(op.num_ranks, op.span_nodes, up, card, later_us, **sums)
    seconds = _between_powers(op.message_bytes, lambda size: closed_form(op.op, size, ranks)[0])
    return Estimate(seconds, Coverage.ROOFLINE, "NCCL's model over published links", FABRIC_ERROR)


def _between_powers(message_bytes: ops.Size, seconds_of: Callable[[float], float]) -> ops.Size:
    """Return the seconds of one size, or of many: a straight line of log seconds over log bytes between powers of 2."""
    sizes = np.maximum(np.asarray(message_bytes, np.float64), 1.0)
    if sizes.ndim == 0:
        return seconds_of(float(sizes))
    exponents = np.arange(np.floor(np.log2(sizes.min())), np.ceil(np.log2(sizes.max())) + 1)
    known = [seconds_of(2.0**exponent) for exponent in exponents]
    return np.exp2(np.interp(np.log2(sizes), exponents, np.log2(known)))
