"""The compiled packet loop against the plain-Python one, picosecond for picosecond, on random small cases."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import cases_to_try
from oracles.packet import PacketReference
from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Reduction, flows_of, with_columns
from windtunnel.network.packet.runner import run_tables
from windtunnel.network.packet.tables import PacketTables, tables_of
from windtunnel.network.settings import GBPS, EcnThreshold, NetworkSettings, PacketSettings
from windtunnel.network.topology import DcnPlus, SpectrumX

FABRICS = (
    SpectrumX(num_gpus=4, gpus_per_server=2, num_spines=2, nic_bytes_per_s=100 * GBPS),
    DcnPlus(num_gpus=6, gpus_per_server=2, gpus_per_leaf=2, num_spines=2, leaf_spine_bytes_per_s=100 * GBPS),
    DcnPlus(num_gpus=5, gpus_per_server=1, gpus_per_leaf=5, num_spines=1, latency_s=2e-6),
)


@st.composite
def cases(draw: st.DrawFn) -> PacketTables:
    topology = draw(st.sampled_from(FABRICS))
    fabric: Fabric = topology.build()
    n = draw(st.integers(1, 25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    source = rng.integers(0, topology.num_gpus, n)
    destination = (source + rng.integers(1, topology.num_gpus, n)) % topology.num_gpus
    parents = [sorted(rng.choice(i, min(i, rng.integers(0, 3)), replace=False)) for i in range(n)]
    if draw(st.booleans()):
        parents = [[] for _ in range(n)]
    flows = flows_of(
        source,
        destination,
        rng.integers(0, 60_000, n),
        parents=(np.cumsum([0, *map(len, parents)]), np.array([p for ps in parents for p in ps], np.int32)),
        connection=rng.integers(0, 3, n),
        start_s=rng.integers(0, 5, n) * 1e-6,
    )
    delay_s, channel = rng.integers(0, 3, n) * 1e-6, rng.integers(0, 2, n)
    flows = with_columns(flows, delay_s=delay_s, channel=channel, reduction=draw(st.sampled_from(Reduction)))
    thresholds = tuple(
        EcnThreshold(bytes_per_s=rate * GBPS, min_bytes=2_000, max_bytes=12_000, max_probability=0.5)
        for rate in (100, 400)
    )
    packet = PacketSettings(
        congestion=draw(st.sampled_from(["none", "dcqcn", "dctcp"])),
        window=draw(st.sampled_from(["pair", "fabric", "none"])),
        window_follows_rate=draw(st.booleans()),
        acks_first=draw(st.booleans()),
        dynamic_pfc=draw(st.booleans()),
        buffer_bytes=draw(st.sampled_from([2_500_000, 4_000_000, 2**25])),
        pfc_shift=draw(st.sampled_from([3, 9])),
        reserve_bytes=1_000,
        resume_offset_bytes=1_500,
        ecn_thresholds=draw(st.sampled_from([(), thresholds])),
        alpha_interval_s=1e-6,
        increase_interval_s=7e-6,
    )
    network = NetworkSettings(
        backend="packet",
        compat=draw(st.sampled_from([None, "simai"])),
        send_latency_s=draw(st.sampled_from([0.0, 1e-6])),
        payload_bytes=draw(st.sampled_from([1000, 4096])),
        seed=draw(st.integers(0, 99)),
    )
    return tables_of(fabric, flows, network, packet)


@pytest.mark.full
@given(cases())
@settings(max_examples=cases_to_try(15))
def test_the_compiled_loop_is_the_plain_one(tables: PacketTables) -> None:
    """Invariant 21."""
    fast, slow = run_tables(tables), PacketReference(tables)
    np.testing.assert_array_equal(fast.flows.finish_ps, slow.finish_ps)
    np.testing.assert_array_equal(fast.flows.start_ps, slow.start_ps)
    for name in ("num_pauses", "num_marks", "num_drops", "num_draws"):
        np.testing.assert_array_equal(fast.links[name], [getattr(link, name) for link in slow.links], err_msg=name)
    assert not fast.links.queue_bytes.any()
    assert not fast.links.ingress_bytes.any()
    assert not fast.nodes.shared_bytes.any()


def test_the_cases_meet_marks_and_pauses() -> None:
    """The comparison above would say little if nothing but empty queues met in it."""
    topology = DcnPlus(num_gpus=5, gpus_per_server=1, gpus_per_leaf=5, num_spines=1, latency_s=2e-6)
    flows = flows_of(np.arange(4), np.full(4, 4), 200_000, connection=np.arange(4))
    packet = PacketSettings(
        window="none",
        buffer_bytes=2_500_000,
        pfc_shift=6,
        ecn_thresholds=(EcnThreshold(bytes_per_s=400 * GBPS, min_bytes=2_000, max_bytes=300_000, max_probability=0.5),),
    )
    tables = tables_of(topology.build(), flows, NetworkSettings(backend="packet"), packet)
    fast, slow = run_tables(tables), PacketReference(tables)
    np.testing.assert_array_equal(fast.flows.finish_ps, slow.finish_ps)
    assert fast.links.num_pauses.sum() > 2
    assert 2 < fast.links.num_marks.sum() < fast.counters.num_data_packets


def test_lost_packets_are_sent_again_as_the_oracle_does() -> None:
    topology = SpectrumX(num_gpus=4, gpus_per_server=2, num_spines=2, error_fraction=0.002)
    flows = flows_of(np.array([0, 1, 2]), np.array([2, 3, 1]), 300_000, connection=np.arange(3))
    tables = tables_of(topology.build(), flows, NetworkSettings(backend="packet", seed=3), PacketSettings())
    without_timer = replace(tables, settings=tables.settings._replace(timeout_ps=0))
    fast, slow = run_tables(without_timer), PacketReference(without_timer)
    np.testing.assert_array_equal(fast.flows.finish_ps, slow.finish_ps)
    assert fast.counters.num_repeated_packets > 0
    assert msgspec.structs.asdict(topology)["error_fraction"] == 0.002
