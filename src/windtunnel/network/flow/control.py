"""Time flows under congestion control at flow level, where a control would act."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.compiled.records import new_table
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flow import rounds
from windtunnel.network.flow.kernel import FluidState
from windtunnel.network.flows import Flows
from windtunnel.network.packet.kernel.state import Connection, Stamp
from windtunnel.network.packet.tables import kernel_settings, links_of, windows_of
from windtunnel.network.paths import Pairs, Paths, trace
from windtunnel.network.settings import NetworkSettings, PacketSettings

Table = Any
"""A record array of one of the layouts in `network.flow.rounds`."""


@dataclass(frozen=True, eq=False)
class Lowered:
    """Flows before they have paths: the same for every seed of the hashes and every draw."""

    fabric: Fabric
    settings: NetworkSettings
    packet: PacketSettings
    flows: Flows
    pairs: Pairs | None
    """Ends and ports of the flows; None where flows represent their equivalence classes."""
    table: Table
    """Records of all flows, which every run writes into."""
    child_ptr: Ints
    child: NDArray[np.int32]
    ready_s: Floats
    waiting: NDArray[np.int32]
    """What the columns of these names are before a run."""

    def reset(self) -> None:
        """Make the records of the flows what they are before a run."""
        self.table.ready_s, self.table.waiting = self.ready_s, self.waiting


@dataclass(frozen=True, eq=False)
class Course(Lowered):
    """Flows with paths, and their loads on links."""

    paths: Paths
    loads: Paths


def in_flight_at_once(course: Course, state: FluidState) -> Floats:
    """Return (links,) the bytes that windows let be under way on each link that all flows together fill; else 0."""
    flows, (flow, link, share) = course.table, course.loads.crossings()
    windows = state.paths["window_bytes"]
    limit = np.where(windows > 0, windows, np.inf)[flows.path]
    rates: Floats = state.links["rate"]
    demand = np.bincount(link, state.paths["rate"][flows.path[flow]] * share, len(rates))
    flight = np.bincount(link, np.minimum(flows.size_bytes, limit)[flow] * share, len(rates))
    return np.where(demand > rates, flight, 0.0)


def may_act(course: Course, state: FluidState, in_flight_bytes: Floats) -> bool:
    """Whether a control could change a rate, given (links,) what windows let be under way on links that are full.

    HPCC holds every flow below its target. ECN marks what queues above a threshold, TIMELY sees a round trip above its
    lower limit. Without that all keep the rate of the link, and share it as windows do.
    """
    fabric, packet = course.fabric, course.packet
    from_switch = fabric.kind[fabric.directions[0]] == NodeKind.SWITCH
    if packet.congestion == "none" or not from_switch[course.loads.link].any():
        return False
    if packet.congestion == "hpcc":
        return True
    if packet.congestion == "timely":
        least_s = packet.timely_low_s - float(state.paths["round_trip_s"].min())
        least_s /= 1 if packet.acks_first else 2  # what a packet waits, its acknowledgement may wait again
        rate = np.repeat(fabric.bandwidth_bytes_per_s, 2)
        return bool((in_flight_bytes > rate * least_s)[from_switch].any())
    marking = links_of(fabric, packet, course.paths).ecn_min_bytes
    return packet.ecn and bool((in_flight_bytes > marking)[from_switch].any())


def run_controlled(course: Course, state: FluidState, draw: int = 0) -> tuple[Table, Table, int] | None:
    """Run flows round by round; return their records, those of links, and the number of events.

    None where the control never held a flow below its link's rate: all controls then share as max-min fairness does.
    """
    settings, packet, flows = course.settings, course.packet, course.table
    paths = state.paths.copy()
    paths["base_rtt_s"], paths["window_bytes"] = windows_of(course.fabric, settings, packet, course.paths)
    links, feeds, path_feed = _links(course, state)
    reply, reply_ptr, reply_link = _reply_links(course)
    num_slots, hops = min(len(flows), 4096), int(paths["count"].max(initial=1))
    while True:
        course.reset()
        run = rounds.RoundState(
            settings=kernel_settings(settings, packet)._replace(seed=settings.seed + (draw << 16)),
            flows=flows,
            child_ptr=state.child_ptr,
            child=state.child,
            paths=paths,
            path_ptr=course.loads.pointer,
            path_link=state.path_link,
            path_share=state.path_share,
            path_feed=path_feed,
            reply=reply,
            reply_ptr=reply_ptr,
            reply_link=reply_link,
            feeds=feeds.copy(),
            links=links.copy(),
            slots=new_table(rounds.Sender, num_slots),
            connections=new_table(Connection, num_slots),
            fresh_connection=new_table(Connection, 1, alpha=1.0, utilisation=1.0, first_mark_ps=-1),
            hop_rate=np.zeros((num_slots, hops)),
            stamps=new_table(Stamp, hops),
            seen=new_table(Stamp, (num_slots if packet.congestion == "hpcc" else 1, hops)),
            ends=np.empty(num_slots, np.int32),
            ends_s=np.empty(num_slots),
            ready_s=state.ready_s,
            ready=state.ready,
            free=np.empty(num_slots, np.int32),
            one_after_the_other=state.one_after_the_other,
        )
        done, num_events = rounds.run_rounds(run)
        if done >= 0:
            return (flows, run.links, num_events) if run.slots["num_cuts"].any() else None
        num_slots = min(len(flows), 4 * num_slots)


def _reply_links(course: Course) -> tuple[NDArray[np.int32], Ints, NDArray[np.int32]]:
    """Return each flow's way back, and the links on these where acknowledgements queue behind data.

    Those are links of switches, unless acknowledgements go first.

    A GPU sends acknowledgements first. Flows that represent their classes have none, for the ways back may differ.
    """
    if course.pairs is None or course.packet.acks_first:
        return np.zeros(len(course.table), np.int32), np.zeros(2, np.int64), np.zeros(0, np.int32)
    replies = trace(course.fabric, course.pairs, course.settings, answers=True)
    queues = course.fabric.kind[course.fabric.directions[0]][replies.link] == NodeKind.SWITCH
    return replies.of_flow, np.concatenate([[0], np.cumsum(queues)])[replies.pointer], replies.link[queues]


def _links(course: Course, state: FluidState) -> tuple[Table, Table, Ints]:
    """Return the links, the feeds between them, and the feed of each link of a path."""
    fabric, packet, paths = course.fabric, course.packet, course.loads
    marking = links_of(fabric, packet, course.paths)
    source = fabric.kind[fabric.directions[0]]
    rates: Floats = state.links["rate"]
    links = new_table(
        rounds.RoundLink,
        len(rates),
        rate=rates,
        is_own=source == NodeKind.GPU,
        is_switch=source == NodeKind.SWITCH,
        **{name: marking[name] for name in ("ecn_min_bytes", "ecn_max_bytes", "ecn_max_probability")},
        **dict.fromkeys(("first", "last", "first_feed"), -1),
    )
    path_feed = np.full(len(paths.link), -1)
    follows = np.ones(len(paths.link), bool)
    follows[paths.pointer[:-1]] = False
    if len(paths.share) or not follows.any():
        return links, new_table(rounds.Feed, 1), path_feed
    pair = paths.link[1:].astype(np.int64) * len(rates) + paths.link[:-1]
    pairs, path_feed[follows] = np.unique(pair[follows[1:]], return_inverse=True)
    target, first = np.unique(pairs // len(rates), return_index=True)
    links.first_feed[target] = first
    following = np.arange(1, len(pairs) + 1)
    following[np.append(first[1:], len(pairs)) - 1] = -1
    return links, new_table(rounds.Feed, len(pairs), link=pairs % len(rates), next=following), path_feed
