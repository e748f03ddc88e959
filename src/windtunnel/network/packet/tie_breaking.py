"""Order events of one time as SimAI's ns-3 does; queues and turns follow from it.

It runs on the UNISON kernel (Bai et al., "Unison: A Parallel-Efficient and User-Transparent Network Simulation Kernel",
EuroSys 2024), with one thread too. That cuts the network into partitions, which send each other messages
(`MtpInterface::AutoPartition`). In an all-to-all, where all ranks begin at once, their order decides who meets whom.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Ints
from windtunnel.network.fabric import Fabric, connected_groups, with_links
from windtunnel.network.flows import Flows

INSERTION_SORTED = 16
"""Up to this many elements, libstdc++'s `std::sort` sorts by insertion, which keeps the order of equal ones
(`_S_threshold`)."""


def partitions(fabric: Fabric) -> Ints:
    """Return (num_nodes,) partitions: nodes joined by links of less than median latency; a server, or a switch."""
    quick = with_links(fabric, fabric.latency_s < np.median(fabric.latency_s))
    return np.unique(connected_groups(quick), return_inverse=True)[1]


def begin_order(partition: Ints, flows: Flows, first: Ints) -> Ints:
    """Return the flows `first`, which wait for no other, in the order in which they begin.

    A partition gets them as messages of one time and sender, written rank by rank and channel by channel. It sorts
    them with `std::sort`, which leaves equal elements in an order of its own, and takes them from the back
    (`LogicalProcess::ReceiveMessages`).
    """
    receiver = partition[flows.source[first]]
    written = np.lexsort((first, flows.channel[first], flows.source[first], receiver))
    starts = np.flatnonzero(np.diff(receiver[written], prepend=-1))
    mailboxes = np.split(first[written], starts[1:])
    return np.concatenate([mailbox[order_of_equals(len(mailbox))[::-1]] for mailbox in mailboxes])


@lru_cache(maxsize=64)
def order_of_equals(count: int) -> Ints:
    """Return the order in which `std::sort` leaves `count` equal elements: introsort halves and reverses stretches."""
    order = np.arange(count)
    stretches = [(0, count)]
    while stretches:
        first, last = stretches.pop()
        if last - first <= INSERTION_SORTED:
            continue
        middle = first + (last - first) // 2
        order[[first, middle]] = order[[middle, first]]
        order[first + 1 : last] = order[first + 1 : last][::-1].copy()
        cut = first + 1 + (last - first - 1) // 2
        stretches += [(first, cut), (cut, last)]
    return order


def senders(partition: Ints, source: NDArray[np.int32], target: NDArray[np.int32]) -> Ints:
    """Return (num_links,) the place of a directed link's sender among those of its target; -1 inside a partition.

    A partition takes its mailboxes in the order of their senders.
    """
    sender = np.full(len(source), -1)
    between = np.flatnonzero(partition[source] != partition[target])
    sender[between] = places(target[between], partition[source[between]])
    return sender


def places(owner: NDArray[np.integer], value: NDArray[np.integer]) -> Ints:
    """Return each value's place among the different values of its owner."""
    num_values = int(value.max(initial=0)) + 1
    different, which = np.unique(owner.astype(np.int64) * num_values + value, return_inverse=True)
    owners = different // num_values
    return (np.arange(len(different)) - np.searchsorted(owners, owners))[which]
