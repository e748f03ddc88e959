"""Collectives by equivalence classes: one connection of each class is simulated.

Two connections are equivalent if they cross equal links, share them with as many connections of each class, and (in a
ring) follow equivalent connections. Such a partition is equitable, so rates and times are equal inside a class (colour
refinement: Grohe, Kersting, Mladenov and Selman, "Dimension reduction via colour refinement", 2014). A ring's steps
repeat too: once a round of steps takes as long as the round before, all later rounds take that long.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.collectives.rings import Rings
from windtunnel.network.fabric import Fabric
from windtunnel.network.flow.run import run_flow_level
from windtunnel.network.flows import Flows, flows_of, gathered
from windtunnel.network.paths import FlowTimes, Paths, find_paths
from windtunnel.network.settings import NetworkSettings

Labels = NDArray[np.int64]

MOST_FLOWS = 20_000_000
"""Most flows that classes make; they take 3 GB."""
ALL_FLOWS = 2_000_000
"""Up to this many, every step is simulated."""
STEADY_FRACTION = 0.002
"""Beyond, rounds that differ by less count as equal. 16,384 ranks: 0.2 % from the time of all steps."""
_HASH = np.uint64(0x9E3779B97F4A7C15)
"""The golden ratio's odd 64 bits, as in SplitMix64 (Steele, Lea and Flood, 2014)."""


@dataclass(frozen=True, eq=False)
class Classes:
    """One connection of each class."""

    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    before: Labels
    """The class before each; the class itself where connections follow nothing."""
    of_connection: Labels
    """The class of every connection."""
    paths: Paths
    """Links that one connection of each class crosses."""
    loads: Paths
    """Links by class, with the number of the class's connections on each such link."""


def ring_seconds(fabric: Fabric, rings: Rings, chunk_bytes: int, num_steps: int, settings: NetworkSettings) -> float:
    """Return when the last step of a ring collective is complete, at flow level. InputError where so few connections
    are equivalent that too many flows would be simulated."""
    classes = ring_classes(fabric, rings, settings)
    num_classes, period = len(classes.before), _longest_cycle(classes.before)

    def ends_s(steps: int) -> NDArray[np.float64]:
        if steps * num_classes > MOST_FLOWS:
            raise InputError(
                f"{num_classes} connections of the ring differ, which makes {steps * num_classes} flows",
                "routing: spray makes them equivalent; the analytic backend needs no flows",
            )
        finish_s = run_classes(fabric, classes, chunk_bytes, steps, settings).finish_s
        return np.asarray(finish_s.reshape(steps, -1).max(axis=1))

    end_s = last_end(ends_s, num_steps, period, ALL_FLOWS // num_classes)
    assert end_s is not None
    return end_s


def last_end(
    ends_s: Callable[[int], NDArray[np.float64] | None], num_steps: int, period: int, most_steps: int
) -> float | None:
    """Return when the last of `num_steps` is complete: once rounds take equally long, all later rounds do.

    Args:
        ends_s: simulates a number of steps and returns when each is complete; None if it cannot, which is passed on.
        period: steps of a round.
        most_steps: so many are simulated without looking at rounds.
    """
    simulated = min(num_steps, max(3 * period, most_steps))
    while True:
        ends = ends_s(simulated)
        if ends is None:
            return None
        if simulated == num_steps:
            return float(ends[-1])
        round_s, former_s = ends[-1] - ends[-1 - period], ends[-1 - period] - ends[-1 - 2 * period]
        if abs(round_s - former_s) <= STEADY_FRACTION * round_s:
            rounds = -(-(num_steps - simulated) // period)
            last = simulated - 1 - (rounds * period - (num_steps - simulated))
            return float(ends[last] + rounds * round_s)
        simulated = min(num_steps, 2 * simulated)


def run_classes(
    fabric: Fabric, classes: Classes, chunk_bytes: int, num_steps: int, settings: NetworkSettings
) -> FlowTimes:
    """Time `num_steps` flows of one connection of each class, each after the flow before it in the ring."""
    flows = class_flows(classes, chunk_bytes, num_steps)
    path_of_flow = np.tile(classes.paths.of_flow, num_steps)
    paths, loads = (replace(each, of_flow=path_of_flow) for each in (classes.paths, classes.loads))
    return run_flow_level(fabric, flows, settings, paths, loads)


def class_flows(classes: Classes, chunk_bytes: int, num_steps: int) -> Flows:
    """Return the flows of one connection of each class, step by step."""
    num = len(classes.before)
    return flows_of(
        np.tile(classes.source, num_steps),
        np.tile(classes.destination, num_steps),
        chunk_bytes,
        parents=(
            np.maximum(np.arange(num_steps * num + 1) - num, 0),
            (np.arange(num_steps - 1)[:, None] * num + classes.before).ravel(),
        ),
        step=np.repeat(np.arange(num_steps), num),
        connection=np.tile(np.arange(num), num_steps),
    )


def together_seconds(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> float:
    """Return when the last of flows that wait for nothing is complete, at flow level. InputError where ends are not
    connected."""
    crossing = _crossing(fabric, flows, settings)
    label = np.unique(np.column_stack([flows.size_bytes, flows.start_s]), axis=0, return_inverse=True)[1].ravel()
    label, link_label = _stable(crossing, label.astype(np.int64), lambda labels: labels)
    chosen = np.unique(label, return_index=True)[1]
    classes = _representatives(flows, label, chosen, np.arange(len(chosen)), crossing, link_label)
    representatives = flows_of(
        flows.source[chosen],
        flows.destination[chosen],
        flows.size_bytes[chosen],
        connection=np.arange(len(chosen)),
        start_s=flows.start_s[chosen],
        delay_s=flows.delay_s[chosen],
    )
    return run_flow_level(fabric, representatives, settings, classes.paths, classes.loads).total_s


def ring_classes(
    fabric: Fabric, rings: Rings, settings: NetworkSettings, never_full: NDArray[np.bool_] | None = None
) -> Classes:
    """Return the equivalence classes of a ring's connections. InputError where ranks are not connected.

    Args:
        never_full: (2 x num_links,) links that make no difference between connections.
    """
    shape = rings.order.shape
    flows = ring_connections(rings)
    crossing = _crossing(fabric, flows, settings)
    if never_full is not None:
        crossing = crossing.without(never_full)
    label = np.zeros(len(flows), np.int64)
    label, link_label = _stable(crossing, label, lambda labels: _along(labels.reshape(shape)).ravel())
    chosen = np.unique(label, return_index=True)[1]
    before = np.roll(label.reshape(shape), 1, axis=1).ravel()[chosen]
    return _representatives(flows, label, chosen, before, crossing, link_label)


def ring_connections(rings: Rings) -> Flows:
    """Return one flow for each connection of the rings, channel after channel."""
    channel = np.repeat(np.arange(rings.num_channels, dtype=np.int32), rings.num_ranks)
    following = np.roll(rings.order, -1, axis=1)
    return flows_of(rings.order.ravel(), following.ravel(), 1, connection=channel, channel=channel)


@dataclass(frozen=True, eq=False)
class _Crossing:
    """Crossings: a row for each connection and each directed link that it crosses."""

    paths: Paths
    connection: Labels
    link: NDArray[np.int32]
    share: NDArray[np.float64]
    amount: Labels
    """A number for each distinct share."""
    link_label: Labels
    """(2 x num_links,) equal for links of the same rate and latency."""

    def without(self, links: NDArray[np.bool_]) -> "_Crossing":
        """Return the crossings of all other links."""
        kept = ~links[self.link]
        columns = {name: getattr(self, name)[kept] for name in ("connection", "link", "share", "amount")}
        return replace(self, **columns)


def _crossing(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> _Crossing:
    paths = find_paths(fabric, flows, settings)
    connection, link, share = paths.crossings()
    kind = np.unique(np.column_stack([fabric.bandwidth_bytes_per_s, fabric.latency_s]), axis=0, return_inverse=True)[1]
    amount = np.unique(np.round(share * 2**40), return_inverse=True)[1]
    return _Crossing(paths, connection, link, share, amount, np.repeat(kind.ravel(), 2).astype(np.int64))


def _stable(crossing: _Crossing, label: Labels, split: Callable[[Labels], Labels]) -> tuple[Labels, Labels]:
    """Refine the labels of connections and links by each other and by `split` until nothing splits; return both."""
    link_label = crossing.link_label
    while True:
        known = label.max()
        link_label = _refine(link_label, crossing.link.astype(np.int64), label[crossing.connection], crossing.amount)
        label = split(_refine(label, crossing.connection, link_label[crossing.link], crossing.amount))
        if label.max() == known:
            return label, link_label


def _refine(label: Labels, owner: Labels, neighbour: Labels, amount: Labels) -> Labels:
    """Return new labels: equal where the old ones and the bags of neighbours' labels are equal."""
    with np.errstate(over="ignore"):
        item = _scramble(_scramble(neighbour.astype(np.uint64)) + amount.astype(np.uint64))
        bags = np.zeros(len(label), np.uint64)
        order = np.argsort(owner, kind="stable")
        first = np.flatnonzero(np.diff(owner[order], prepend=-1))
        bags[owner[order][first]] = np.add.reduceat(item[order], first)
        return _compact(_scramble(label.astype(np.uint64)) + bags)


def _scramble(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words + np.uint64(1)) * _HASH
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return words ^ (words >> np.uint64(27))


def _compact(words: NDArray[np.uint64]) -> Labels:
    return np.unique(words, return_inverse=True)[1].astype(np.int64)


def _along(label: Labels) -> Labels:
    """Split (channels, ranks) labels by the connections before: one, then two, four and so on around the ring."""
    back = 1
    while back < label.shape[1]:
        earlier = np.roll(label, back, axis=1)
        split = _compact((label * (earlier.max() + 1) + earlier).astype(np.uint64).ravel()).reshape(label.shape)
        if back > 1 and split.max() == label.max():
            return split
        label = split
        back *= 2
    return label


def _representatives(
    flows: Flows, label: Labels, chosen: Labels, before: Labels, crossing: _Crossing, link_label: Labels
) -> Classes:
    """Return the `chosen` connections, their paths, and the load of each class on each class of links."""
    paths = crossing.paths
    start, places = gathered(paths.pointer, paths.of_flow[chosen])
    of_flow = np.arange(len(chosen), dtype=np.int32)
    share = paths.share[places] if len(paths.share) else paths.share
    chosen_paths = Paths(of_flow, start, paths.link[places], share)
    # The load that the connections of each class put on one link of each class.
    first_link = np.unique(link_label, return_index=True)[1]
    on_first = first_link[link_label[crossing.link]] == crossing.link
    pair = label[crossing.connection[on_first]] * len(first_link) + link_label[crossing.link[on_first]]
    pairs, inverse = np.unique(pair, return_inverse=True)
    load = np.bincount(inverse, crossing.share[on_first]).astype(np.float64)
    pointer = np.searchsorted(pairs // len(first_link), np.arange(len(chosen) + 1))
    loads = Paths(of_flow, pointer, first_link[pairs % len(first_link)].astype(np.int32), load)
    return Classes(flows.source[chosen], flows.destination[chosen], before, label, chosen_paths, loads)


def _longest_cycle(before: Labels) -> int:
    """Return the length of the longest cycle of the permutation from every class to the one before it."""
    longest, seen = 1, np.zeros(len(before), bool)
    for start in range(len(before)):
        length, label = 0, start
        while not seen[label]:
            seen[label] = True
            label = int(before[label])
            length += 1
        longest = max(longest, length)
    return longest
