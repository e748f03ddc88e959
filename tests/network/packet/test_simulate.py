"""The packet level against closed forms, textbook cases and recorded ns-3 runs."""

import csv
from pathlib import Path

import msgspec
import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.network.backends.packet import PacketTimes, simulate_packets
from windtunnel.network.collectives.algorithms.direct import all_to_all
from windtunnel.network.collectives.algorithms.nvls import nvls
from windtunnel.network.collectives.algorithms.ring import ring
from windtunnel.network.collectives.rings import simai_rings
from windtunnel.network.collectives.run import groups_seconds
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flows import Flows, flows_of, together, with_columns
from windtunnel.network.paths import find_paths, run_flows
from windtunnel.network.settings import (
    GBPS,
    SIMAI_PACKETS,
    SIMAI_SETTINGS,
    EcnThreshold,
    NetworkSettings,
    PacketSettings,
)
from windtunnel.network.topology import DcnPlus, SpectrumX

pytestmark = pytest.mark.compiled  # thousands of packets

MIB = 2**20
LINE = 12.5e9
"""100 Gb/s in bytes."""
PLAIN = NetworkSettings(backend="packet", send_latency_s=0.0, payload_bytes=1000, header_bytes=0)
FREE = PacketSettings(congestion="none", window="none", ack_bytes=1)


def star(num_gpus: int, *, latency_s: float = 1e-6, error_fraction: float = 0.0) -> Fabric:
    """GPUs around one switch, 100 Gb/s each."""
    gpus = np.arange(num_gpus, dtype=np.int32)
    return Fabric(
        name="star",
        gpu_type="H100",
        gpus_per_server=1,
        kind=np.array([NodeKind.GPU] * num_gpus + [NodeKind.SWITCH], np.int8),
        tier=np.array([0] * num_gpus + [1], np.int8),
        server=np.array([*range(num_gpus), -1], np.int32),
        link_a=gpus,
        link_b=np.full(num_gpus, num_gpus, np.int32),
        bandwidth_bytes_per_s=np.full(num_gpus, LINE),
        latency_s=np.full(num_gpus, latency_s),
        error_fraction=np.full(num_gpus, error_fraction),
    )


def sends(pairs: list[tuple[int, int]], size_bytes: int, start_s: list[float] | float = 0.0) -> Flows:
    source, destination = np.array(pairs).T
    starts = np.broadcast_to(np.asarray(start_s, np.float64), len(pairs))
    return flows_of(source, destination, size_bytes, connection=np.arange(len(pairs)), start_s=starts)


def run(fabric: Fabric, flows: Flows, packet: PacketSettings = FREE, settings: NetworkSettings = PLAIN) -> PacketTimes:
    return simulate_packets(fabric, flows, settings, packet)


def changed(packet: PacketSettings, **fields: object) -> PacketSettings:
    return msgspec.structs.replace(packet, **fields)


# ------------------------------------------------------------------------------------------------------- closed forms


def test_a_flow_alone_takes_its_bytes_once_and_its_last_packet_again_at_each_further_hop() -> None:
    times = run(star(2), sends([(0, 1)], 100_000))
    assert times.finish_s[0] == pytest.approx(101_000 / LINE + 2e-6, rel=1e-9)
    assert times.sent_s[0] == pytest.approx(100_000 / LINE, rel=1e-9)
    assert times.num_packets == 100


def test_cutting_through_saves_all_but_the_header_at_each_switch() -> None:
    times = run(star(2), sends([(0, 1)], 100_000), changed(FREE, cut_through=True))
    assert times.finish_s[0] == pytest.approx(100_064 / LINE + 2e-6, rel=1e-9)


def test_a_window_of_the_bandwidth_delay_product_is_enough_for_line_rate() -> None:
    times = run(star(2), sends([(0, 1)], 10**6), changed(FREE, window="pair"))
    assert times.finish_s[0] == pytest.approx(1_001_000 / LINE + 2e-6, rel=1e-3)


def test_children_start_when_their_parents_have_arrived() -> None:
    chain = flows_of(
        np.array([0, 1]),
        np.array([1, 2]),
        10_000,
        parents=(np.array([0, 0, 1]), np.array([0])),
        connection=np.arange(2),
    )
    times = run(star(3), with_columns(chain, delay_s=5e-6))
    assert times.begin_s[1] == pytest.approx(times.finish_s[0] + 5e-6, abs=1e-12)


def test_one_connection_sends_one_flow_after_the_other() -> None:
    flows = flows_of(np.array([0, 0]), np.array([1, 1]), 50_000, connection=np.zeros(2))
    times = run(star(2), flows)
    assert times.begin_s[1] == pytest.approx(times.sent_s[0], abs=1e-12)
    assert times.finish_s[1] == pytest.approx(101_000 / LINE + 2e-6, rel=1e-9)


# ----------------------------------------------------------------------------------------------------- textbook cases


def test_two_flows_share_a_bottleneck_evenly() -> None:
    times = run(star(3), sends([(0, 2), (1, 2)], MIB))
    np.testing.assert_allclose(times.finish_s, 2 * MIB / LINE + 2e-6, rtol=0.001)


def test_incast_takes_as_long_as_the_receiver_needs_and_pauses_before_it_loses() -> None:
    num_senders, size = 16, 4 * MIB
    flows = sends([(i, 16) for i in range(num_senders)], size)
    small = changed(FREE, buffer_bytes=2 * MIB)
    times = run(star(17), flows, small)
    assert times.total_s == pytest.approx(num_senders * size / LINE, rel=0.01)
    assert times.links.num_pauses.sum() > 0
    assert times.links.num_drops.sum() == 0
    assert times.num_repeated_packets == 0
    assert times.links.paused_ps.max() * 1e-12 > 0.5 * times.total_s
    assert times.link_bytes[2 * 16 + 1] / LINE == pytest.approx(times.total_s, rel=0.01)


@pytest.mark.parametrize("recovery", ["go_back_n", "selective_repeat"])
def test_without_pauses_incast_loses_packets_and_recovers(recovery: str) -> None:
    flows = sends([(i, 16) for i in range(16)], MIB)
    lossy = changed(FREE, buffer_bytes=MIB, pfc=False, recovery=recovery, window="pair", congestion="dcqcn")
    times = run(star(17), flows, lossy)
    assert times.links.num_drops.sum() > 0
    assert times.num_repeated_packets > 0
    assert times.links.num_pauses.sum() == 0


def test_selective_repeat_sends_less_again_than_go_back_n() -> None:
    flows = sends([(0, 1)], 4 * MIB)
    lossy = star(2, error_fraction=0.003)
    repeated = {
        recovery: run(lossy, flows, changed(FREE, recovery=recovery, window="pair"))
        for recovery in ("go_back_n", "selective_repeat")
    }
    assert repeated["selective_repeat"].num_repeated_packets < 0.5 * repeated["go_back_n"].num_repeated_packets
    assert repeated["selective_repeat"].total_s <= repeated["go_back_n"].total_s
    assert repeated["selective_repeat"].links.num_drops.sum() > 0


@pytest.mark.parametrize("congestion", ["dcqcn", "dctcp", "hpcc", "timely"])
def test_congestion_control_keeps_two_long_flows_fair_and_their_bottleneck_busy(congestion: str) -> None:
    """The second flow starts late; the two then take their turns at about the same rate."""
    control = PacketSettings(congestion=congestion, window="fabric", ack_bytes=1, increase_interval_s=50e-6)
    size = 32 * MIB
    times = run(star(3), sends([(0, 2), (1, 2)], size, [0.0, 200e-6]), control)
    first, second = times.finish_s - times.begin_s
    assert times.total_s < 1.25 * 2 * size / LINE
    assert second / first == pytest.approx(1.0, abs=0.2)


def test_dcqcn_gives_incast_flows_their_fair_share_without_pauses() -> None:
    """Eight senders, ECN far below the pause threshold: an eighth of the line each, and Jain's index near 1."""
    mark_early = (EcnThreshold(bytes_per_s=LINE, min_bytes=20_000, max_bytes=200_000, max_probability=0.1),)
    control = PacketSettings(
        window="none",
        ecn_thresholds=mark_early,
        increase_interval_s=55e-6,
        rate_ai_bytes_per_s=0.4 * GBPS,
        rate_hai_bytes_per_s=1.0 * GBPS,
        ack_bytes=1,
    )
    size = 8 * MIB
    times = run(star(9), sends([(i, 8) for i in range(8)], size), control)
    rate = size / (times.finish_s - times.begin_s)
    assert times.links.num_marks.sum() > 0
    assert times.links.num_pauses.sum() == 0
    assert rate.sum() ** 2 / (8 * (rate**2).sum()) > 0.98
    assert times.total_s < 1.2 * 8 * size / LINE


def test_spraying_uses_every_spine_where_one_path_uses_one() -> None:
    fabric = DcnPlus(num_gpus=16, num_spines=4, gpus_per_leaf=8).build()
    flows = sends([(0, 8)], 4 * MIB)
    spines = fabric.nodes_of(NodeKind.SWITCH, 2)
    up = np.isin(fabric.link_b, spines) & (fabric.link_a == fabric.nodes_of(NodeKind.SWITCH, 1)[0])

    def loads(routing: str, spray: str) -> np.ndarray:
        settings = msgspec.structs.replace(PLAIN, routing=routing)
        packet = changed(FREE, recovery="selective_repeat", reordering_packets=64, spray=spray)
        return run(fabric, flows, packet, settings).link_bytes[::2][up] / (4 * MIB)

    np.testing.assert_allclose(np.sort(loads("ecmp", "random")), [0, 0, 0, 1], atol=0.01)
    np.testing.assert_allclose(loads("spray", "random"), 0.25, atol=0.03)
    np.testing.assert_allclose(loads("spray", "shortest_queue"), 0.25, atol=0.03)


def test_the_same_run_gives_the_same_bytes() -> None:
    flows = together([all_to_all(np.arange(16, dtype=np.int32), 4 * MIB)])
    fabric = SpectrumX(num_gpus=16, num_spines=2).build()
    first, second = (simulate_packets(fabric, flows, SIMAI_SETTINGS, SIMAI_PACKETS) for _ in range(2))
    assert first.finish_s.tobytes() == second.finish_s.tobytes()
    assert first.num_events == second.num_events


def test_bytes_are_conserved_on_every_link() -> None:
    """Invariant 20."""
    fabric = SpectrumX(num_gpus=16, num_spines=2).build()
    flows = all_to_all(np.arange(16, dtype=np.int32), MIB)
    times = run(fabric, flows, changed(FREE, ack_bytes=1))
    paths = find_paths(fabric, flows, PLAIN)
    data = np.zeros(2 * fabric.num_links)
    for flow in range(len(flows)):
        path = paths.of_flow[flow]
        data[paths.link[paths.pointer[path] : paths.pointer[path + 1]]] += flows.size_bytes[flow]
    acknowledgements = times.link_bytes - data
    assert acknowledgements.min() >= 0
    assert acknowledgements.sum() < 0.005 * data.sum()


# -------------------------------------------------------------------------------------------------------- wrong input


def test_a_port_rate_without_a_threshold_is_an_error_that_names_both() -> None:
    fabric = SpectrumX(num_gpus=16, num_spines=2, nic_bytes_per_s=300 * GBPS).build()
    with pytest.raises(InputError, match=r"ports of 300 Gb/s, for which no ECN threshold is given"):
        simulate_packets(fabric, sends([(0, 8)], 1000), SIMAI_SETTINGS, SIMAI_PACKETS)


def test_a_buffer_too_small_for_its_ports_is_an_error() -> None:
    with pytest.raises(InputError, match=r"buffer_bytes = 4096 is less than switch 2 needs"):
        run(star(2), sends([(0, 1)], 1000), changed(FREE, buffer_bytes=4096))


# ------------------------------------------------------------------------------------------------------ recorded runs


def ring_all_reduce(num_gpus: int, size_bytes: int) -> Flows:
    rings = simai_rings(np.arange(num_gpus, dtype=np.int32), num_gpus // 8)
    return ring(rings, size_bytes // num_gpus // rings.num_channels, 2 * (num_gpus - 1))


def data_parallel(num_gpus: int, size_bytes: int) -> Flows:
    servers = num_gpus // 8
    ranks = np.arange(num_gpus, dtype=np.int32)
    chunk, steps = size_bytes // servers, 2 * (servers - 1)
    return together([ring(simai_rings(ranks[rail::8], servers), chunk, steps) for rail in range(8)])


A100 = {"gpu_type": "A100", "nic_bytes_per_s": 100 * GBPS, "scale_up_bytes_per_s": 2400 * GBPS}
RECORDED = {
    "O_ar_tp8_16M_8g_100G": (SpectrumX(num_gpus=8, **A100), ring_all_reduce(8, 16 * MIB), 1e-5),
    "A_ar_tp8_4M_8g_100G": (SpectrumX(num_gpus=8, **A100), ring_all_reduce(8, 4 * MIB), 2e-5),
    "O_ar_tp8_1M_400G": (SpectrumX(num_gpus=8), ring_all_reduce(8, MIB), 3e-5),
    "O_ar_tp8_64M_400G": (SpectrumX(num_gpus=8), ring_all_reduce(8, 64 * MIB), 1e-5),
    "O_nvls_tp8_64M_16g": (SpectrumX(num_gpus=8), nvls(np.arange(8, dtype=np.int32), 8, 64 * MIB), 0.005),
    "O_dp_ar_g16_16M": (SpectrumX(num_gpus=16, num_spines=8), data_parallel(16, 16 * MIB), 0.001),
    "O_dp_ar_g32_64M": (SpectrumX(num_gpus=32, num_spines=8), data_parallel(32, 64 * MIB), 0.001),
    "A_ar_tp16_4M_16g_100G": (SpectrumX(num_gpus=16, **A100), ring_all_reduce(16, 4 * MIB), 0.02),
    "O_ar_tp32_4M_400G": (SpectrumX(num_gpus=32, num_spines=8), ring_all_reduce(32, 4 * MIB), 0.02),
    "O_det2_ar_tp32": (SpectrumX(num_gpus=32, num_spines=8), ring_all_reduce(32, 16 * MIB), 0.05),
    "O_thr1_ar_tp64": (SpectrumX(num_gpus=64, num_spines=8), ring_all_reduce(64, 16 * MIB), 0.05),
    "B_cc1_a2a_tp16": (SpectrumX(num_gpus=16, num_spines=8), all_to_all(np.arange(16, dtype=np.int32), 16 * MIB), 0.02),
}


@pytest.mark.parametrize("name", RECORDED)
def test_it_agrees_with_ns3(name: str, reference: Path) -> None:
    topology, flows, budget = RECORDED[name]
    with (reference / "simai/ns3/results.csv").open() as file:
        row = next(row for row in csv.DictReader(file) if row["dir"] == name)
    layer = row["layers_us"].split(" / ")[0]
    recorded_us = max(float(part.split("=")[1]) for part in layer.split(":")[1].split(","))
    times = simulate_packets(topology.build(), flows, SIMAI_SETTINGS, SIMAI_PACKETS)
    assert times.total_s * 1e6 == pytest.approx(recorded_us, rel=budget)


def test_sprayed_packets_that_overtake_are_not_sent_again() -> None:
    fabric = DcnPlus(num_gpus=16, num_spines=4, gpus_per_leaf=8).build()
    flows = all_to_all(np.arange(16, dtype=np.int32), MIB)
    spray = msgspec.structs.replace(PLAIN, routing="spray")
    times = simulate_packets(fabric, flows, spray)
    assert times.num_repeated_packets == 0
    assert times.total_s < 1.1 * simulate_packets(fabric, flows, PLAIN).total_s


def test_it_is_the_packet_backend_of_flows() -> None:
    flows = sends([(0, 2), (1, 2)], MIB)
    direct = simulate_packets(star(3), flows, PLAIN)
    assert run_flows(star(3), flows, PLAIN).finish_s.tobytes() == direct.finish_s.tobytes()


@pytest.mark.parametrize(
    ("op", "num_gpus", "group_size", "recorded_us"),
    [("all_reduce", 64, 8, 666.585), ("all_reduce", 32, 4, 540.121), ("reduce_scatter", 8, 8, 70.923)],
)
def test_rings_whose_nics_carry_one_flow_take_ns3_s_time_to_the_nanosecond(
    op: str, num_gpus: int, group_size: int, recorded_us: float
) -> None:
    """Recorded `O_dp_ar_g64_16M`, `O_dp_ar_g32_16M` and a reduce-scatter inside a server of A100.

    One nanosecond is of the state machine around the network.
    """
    hardware = A100 if op == "reduce_scatter" else {}
    fabric = SpectrumX(num_gpus=num_gpus, num_spines=8, **hardware).build()
    groups = np.arange(num_gpus, dtype=np.int32).reshape(group_size, -1).T
    settings = msgspec.structs.replace(SIMAI_SETTINGS, backend="packet")
    seconds = groups_seconds(fabric, op, 16 * MIB, np.ascontiguousarray(groups), settings)
    assert seconds * 1e6 == pytest.approx(recorded_us - 0.001, abs=0.0006)


def test_as_simai_the_time_is_that_of_rank_0() -> None:
    """Rank 0 is done long before the others, whose transfer is a hundred times as large."""
    flows = flows_of(np.array([0, 2]), np.array([1, 3]), np.array([MIB, 100 * MIB]), connection=np.arange(2))
    packet = msgspec.structs.replace(SIMAI_PACKETS, ecn_thresholds=())
    as_simai = simulate_packets(star(4), flows, SIMAI_SETTINGS, packet)
    assert as_simai.total_s == as_simai.sent_s[0] < 0.05 * as_simai.finish_s[1]
    plain = simulate_packets(star(4), flows, PLAIN)
    assert plain.total_s == plain.finish_s.max()
