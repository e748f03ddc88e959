"""All-to-all and send-receive, which NCCL sends without an algorithm: every pair of ranks directly."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.collectives.algorithms import ring
from windtunnel.network.collectives.call import CollectiveCall
from windtunnel.network.collectives.closed_forms import NVLINK_BYTES_PER_S
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flows import Flows, Hop, Ids, flows_of, together, with_columns

OPERATIONS = ("all_to_all", "send_recv")
NCCL_CODE = 1
"""SimCCL writes an all-to-all as a ring."""
CLOSED_FORM = replace(
    ring.CLOSED_FORM,
    # NCCL has no LL128 of messages between two (src/enqueue.cc, `addP2pToPlan`).
    latencies={protocol: ring.CLOSED_FORM.latencies[protocol] for protocol in ("ll", "simple")},
    applies=lambda op, _ranks: op in OPERATIONS,
    steps_us=lambda _op, ranks, near, far: far if ranks.num_servers > 1 else near,
)


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of all pairs, or of the first rank to the last."""
    if call.op == "send_recv":
        return flows_of(call.gpus[:1], call.gpus[-1:], call.size_bytes)
    pairs = all_to_all(call.gpus, call.size_bytes if call.traffic_bytes is None else call.traffic_bytes)
    ranks = call.ranks
    if call.settings.compat == "simai" or ranks.num_servers == 1 or ranks.scale_up_bytes_per_s < NVLINK_BYTES_PER_S:
        return pairs
    return _on_rails(pairs, call.fabric, call.gpus)


def _on_rails(pairs: Flows, fabric: Fabric, gpus: Ids) -> Flows:
    """Return the flows of pairs where those to another rail leave by the rank on that rail, which has them by NVLink.

    NCCL does so by default (PXN, `NCCL_P2P_PXN_LEVEL` 2 in src/graph/search.cc): nothing crosses from rail to rail
    between switches. It passes chunks on as they come, so both parts are on the way at once.
    """
    place = _places(fabric)
    rank_at = np.full((fabric.num_servers, int(place.max()) + 1), -1, np.int32)
    rank_at[fabric.server[gpus], place[gpus]] = gpus
    source, destination = pairs.source, pairs.destination
    relay = rank_at[fabric.server[source], place[destination]]
    hops = (fabric.server[source] != fabric.server[destination]) & (relay >= 0) & (relay != source)
    leaving = with_columns(pairs, connection=place[source])
    leaving = replace(leaving, source=np.where(hops, relay, source).astype(np.int32))
    inside = flows_of(source[hops], relay[hops], pairs.size_bytes[hops], hop=Hop.PXN_INIT, connection=destination[hops])
    return replace(together([leaving, inside]), group=np.zeros(len(leaving) + len(inside), np.int32))


def _places(fabric: Fabric) -> Ids:
    """Return (num_nodes,) the position of each GPU in its server, which says its rail."""
    gpus = fabric.nodes_of(NodeKind.GPU)
    first = np.full(fabric.num_servers, fabric.num_nodes)
    np.minimum.at(first, fabric.server[gpus], gpus)
    place = np.zeros(fabric.num_nodes, np.int32)
    place[gpus] = gpus - first[fabric.server[gpus]]
    return place


def all_to_all(ranks: Ids, size_bytes: int | NDArray[np.integer]) -> Flows:
    """Lay out an exchange of every rank with every other at once. InputError where nothing moves.

    Args:
        ranks: (n,) node ids.
        size_bytes: buffer of one rank, split evenly; or (n, n) bytes from each rank to each other.
    """
    ranks = np.asarray(ranks, np.int32)
    n = len(ranks)
    source, target = np.nonzero(~np.eye(n, dtype=bool))
    if np.ndim(size_bytes) == 2:
        matrix = np.asarray(size_bytes, np.int64)
        keep = matrix[source, target] > 0
        source, target = source[keep], target[keep]
        each: NDArray[np.integer] | int = matrix[source, target]
    else:
        each = int(size_bytes) // n
    if len(source) == 0 or np.min(each) < 1:
        raise InputError(f"an all-to-all of {np.max(size_bytes)} bytes over {n} ranks has nothing to send")
    return flows_of(ranks[source], ranks[target], each)
