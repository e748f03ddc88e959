"""Groups of flows that do not meet are simulated apart, and equivalent ones once: with the same result."""

import msgspec
import numpy as np
import pytest

from windtunnel.network.collectives.algorithms.direct import all_to_all
from windtunnel.network.collectives.algorithms.ring import ring
from windtunnel.network.collectives.rings import simai_rings
from windtunnel.network.flows import Flows, flows_of, together, with_columns
from windtunnel.network.packet.runner import PacketOutcome, run_in_parts, run_tables, split
from windtunnel.network.packet.tables import PacketTables, tables_of
from windtunnel.network.settings import SIMAI_PACKETS, SIMAI_SETTINGS, PacketSettings
from windtunnel.network.topology import DcnPlus, SpectrumX

pytestmark = pytest.mark.compiled  # thousands of packets

MIB = 2**20


def tensor_parallel(num_gpus: int, size_bytes: int) -> Flows:
    """An all-reduce inside each server."""
    ranks = np.arange(num_gpus, dtype=np.int32)
    groups = [ring(simai_rings(ranks[first : first + 8], 1), size_bytes // 64, 14) for first in range(0, num_gpus, 8)]
    return together(groups)


def data_parallel(num_gpus: int, size_bytes: int) -> Flows:
    """An all-reduce on each rail."""
    servers = num_gpus // 8
    ranks = np.arange(num_gpus, dtype=np.int32)
    chunk, steps = size_bytes // servers, 2 * (servers - 1)
    return together([ring(simai_rings(ranks[rail::8], servers), chunk, steps) for rail in range(8)])


def tables(flows: Flows, num_gpus: int = 32, **packet: object) -> PacketTables:
    fabric = SpectrumX(num_gpus=num_gpus, num_spines=8).build()
    settings: PacketSettings = msgspec.structs.replace(SIMAI_PACKETS, **packet)
    return tables_of(fabric, flows, SIMAI_SETTINGS, settings)


def assert_same(apart: PacketOutcome, whole: PacketOutcome) -> None:
    for name in ("start_ps", "sent_ps", "finish_ps"):
        np.testing.assert_array_equal(apart.flows[name], whole.flows[name], err_msg=name)
    for name in ("sent_bytes", "most_queued_bytes", "num_pauses", "num_marks", "num_drops", "paused_ps"):
        np.testing.assert_array_equal(apart.links[name], whole.links[name], err_msg=name)
    assert apart.counters.num_data_packets == whole.counters.num_data_packets


@pytest.mark.parametrize("flows", [tensor_parallel(32, MIB), data_parallel(32, MIB)], ids=["servers", "rails"])
def test_equivalent_groups_are_simulated_once_with_the_same_result(flows: Flows) -> None:
    """Invariant 22."""
    whole, apart = run_tables(tables(flows)), run_in_parts(tables(flows))
    assert_same(apart, whole)
    assert apart.counters.num_events * 4 <= whole.counters.num_events


def test_groups_that_differ_are_simulated_each() -> None:
    flows = together([tensor_parallel(16, MIB), flows_of(np.array([20]), np.array([21]), 10_000)])
    whole, apart = run_tables(tables(flows)), run_in_parts(tables(flows))
    assert_same(apart, whole)
    assert len(split(tables(flows))) == 3


def test_an_all_to_all_is_apart_in_each_server_and_one_part_between_them() -> None:
    flows = all_to_all(np.arange(16, dtype=np.int32), MIB)
    assert [len(part.flows) for part in split(tables(flows))] == [7 * 8, 2 * 8 * 8, 7 * 8]
    assert_same(run_in_parts(tables(flows)), run_tables(tables(flows)))


def test_a_ring_through_all_servers_is_one_part() -> None:
    ranks = np.arange(32, dtype=np.int32)
    assert len(split(tables(ring(simai_rings(ranks, 4), 4096, 62)))) == 1


def incast(group: int) -> Flows:
    """Seven GPUs of a leaf send to the eighth."""
    sources = np.arange(8 * group, 8 * group + 7)
    flows = flows_of(sources, np.full(7, 8 * group + 7), 300_000, connection=np.arange(7))
    return with_columns(flows, group=group)


@pytest.mark.parametrize(("buffer_bytes", "events_fraction"), [(64 * MIB, 0.51), (3 * MIB, 1.0)])
def test_a_buffer_that_parts_share_makes_them_one_when_it_is_tight(buffer_bytes: int, events_fraction: float) -> None:
    """Two incasts cross one switch; with a small buffer the one's packets decide when the other's sender is paused."""
    fabric = DcnPlus(num_gpus=16, gpus_per_server=1, gpus_per_leaf=16, num_spines=2).build()
    packet = msgspec.structs.replace(SIMAI_PACKETS, buffer_bytes=buffer_bytes, pfc_shift=6, ecn=False)
    both = tables_of(fabric, together([incast(0), incast(1)]), SIMAI_SETTINGS, packet)
    assert len(split(both)) == 2
    whole, apart = run_tables(both), run_in_parts(both)
    assert_same(apart, whole)
    assert apart.counters.num_events == pytest.approx(events_fraction * whole.counters.num_events, rel=0.02)
    assert bool(whole.links.num_pauses.any()) == (events_fraction == 1.0)


def test_parts_that_draw_random_numbers_stand_for_themselves() -> None:
    fabric = DcnPlus(num_gpus=16, gpus_per_server=1, gpus_per_leaf=16, num_spines=2).build()
    thresholds = tuple(
        msgspec.structs.replace(threshold, min_bytes=10_000) for threshold in SIMAI_PACKETS.ecn_thresholds
    )
    packet = msgspec.structs.replace(SIMAI_PACKETS, buffer_bytes=64 * MIB, ecn_thresholds=thresholds)
    both = tables_of(fabric, together([incast(0), incast(1)]), SIMAI_SETTINGS, packet)
    whole, apart = run_tables(both), run_in_parts(both)
    assert whole.counters.num_draws > 0
    assert_same(apart, whole)
    assert not np.array_equal(whole.flows.finish_ps[:7], whole.flows.finish_ps[7:])
