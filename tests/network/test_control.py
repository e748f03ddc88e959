"""Congestion control at flow level, against the packet level."""

import msgspec
import numpy as np
import pytest

from windtunnel.network.collectives.algorithms.direct import all_to_all
from windtunnel.network.fabric import Fabric
from windtunnel.network.flow.run import run_flow_level
from windtunnel.network.flows import Flows, flows_of, together
from windtunnel.network.paths import run_flows
from windtunnel.network.settings import SIMAI_PACKETS, SIMAI_SETTINGS, NetworkSettings, PacketSettings
from windtunnel.network.topology import DcnPlus, SpectrumX

CONTROLS = ("dcqcn", "dctcp", "timely", "hpcc")
MIB = 2**20


def under(control: str, window: str = "none") -> NetworkSettings:
    packet = msgspec.convert({"congestion": control, "window": window}, PacketSettings)
    return NetworkSettings(backend="flow", send_latency_s=0.0, packet=packet)


def incast(num_senders: int, size_bytes: int) -> tuple[Fabric, Flows]:
    fabric = SpectrumX(num_gpus=num_senders + 1, gpus_per_server=1, num_spines=1).build()
    source = np.arange(num_senders)
    return fabric, flows_of(source, np.full(num_senders, num_senders), size_bytes, connection=source)


def over_one_link(num_flows: int, size_bytes: int) -> tuple[Fabric, Flows]:
    fabric = DcnPlus(num_gpus=2 * num_flows, gpus_per_server=1, gpus_per_leaf=num_flows, num_spines=1).build()
    source = np.arange(num_flows)
    return fabric, flows_of(source, source + num_flows, size_bytes, connection=source)


def pairs(seed: int) -> tuple[Fabric, Flows]:
    """Random pairs over two spines, of random sizes, from random moments on."""
    draw = np.random.default_rng(seed)
    fabric = DcnPlus(num_gpus=16, gpus_per_server=1, gpus_per_leaf=8, num_spines=2).build()
    count = int(draw.integers(4, 12))
    sizes = draw.integers(2**18, 2**23, count)
    begins = {"connection": np.arange(count), "start_s": draw.uniform(0.0, 5e-5, count)}
    return fabric, flows_of(draw.integers(0, 8, count), draw.integers(8, 16, count), sizes, **begins)


def error(case: tuple[Fabric, Flows], settings: NetworkSettings) -> float:
    fabric, flows = case
    packets = run_flows(fabric, flows, settings, "packet").finish_s.max()
    return float(run_flow_level(fabric, flows, settings).finish_s.max() / packets - 1.0)


@pytest.mark.full
@pytest.mark.compiled
@pytest.mark.parametrize("control", CONTROLS)
def test_small_networks_take_what_packets_take(control: str) -> None:
    """In the median of cases within 3 %: incasts, flows over one link, random pairs; with windows and without."""
    cases = [incast(4, 8 * MIB), incast(16, 2 * MIB), over_one_link(2, 4 * MIB), over_one_link(8, MIB)]
    cases += [pairs(seed) for seed in range(4)]
    errors = [abs(error(case, under(control, window))) for case in cases for window in ("pair", "none")]
    assert np.median(errors) < 0.03
    assert np.mean(np.array(errors) < 0.15) >= 0.8


@pytest.mark.compiled
def test_controls_reach_different_rates_where_flows_meet() -> None:
    fabric, flows = over_one_link(4, 8 * MIB)
    seconds = {control: run_flow_level(fabric, flows, under(control)).total_s for control in CONTROLS}
    assert len({round(each, 7) for each in seconds.values()}) == 4
    assert seconds["timely"] > 1.5 * seconds["dctcp"]  # its rate falls to the least, and rises by the same small steps


@pytest.mark.compiled
def test_hpcc_keeps_links_below_its_target() -> None:
    """95 % of the link, less a header of 42 bytes in each packet."""
    fabric, flows = over_one_link(2, 64 * MIB)
    plain, hpcc = (run_flow_level(fabric, flows, under(control, "pair")).total_s for control in ("none", "hpcc"))
    assert 1 / 0.95 < hpcc / plain < 1.1


@pytest.mark.compiled
def test_nothing_changes_where_no_queue_reaches_a_threshold() -> None:
    fabric, flows = over_one_link(2, MIB)
    times = {control: run_flow_level(fabric, flows, under(control, "pair")) for control in ("none", "dcqcn", "dctcp")}
    assert not any(each.is_controlled for each in times.values())
    assert len({each.total_s for each in times.values()}) == 1


@pytest.mark.compiled
def test_an_event_costs_the_same_however_many_flows_are_coupled() -> None:
    """The events of a flow under control do not grow with the flows that it meets."""
    counts = []
    for num_senders in (16, 64):
        fabric, flows = incast(num_senders, MIB)
        counts.append(run_flow_level(fabric, flows, under("dcqcn")).num_events / num_senders)
    assert counts[1] < 1.5 * counts[0]


@pytest.mark.compiled
def test_the_recorded_all_to_all_under_each_control() -> None:
    """Runs of SimAI's ns-3 over 32 GPUs on DCN+ (355, 381 and 4,026 us): the flow level knows which control it was."""
    fabric = DcnPlus(num_gpus=32, gpus_per_leaf=8, num_spines=8).build()
    flows = all_to_all(np.arange(32, dtype=np.int32), 16 * MIB)
    for control, recorded_us in (("dcqcn", 355.379), ("dctcp", 381.081), ("timely", 4026.41)):
        packet = msgspec.structs.replace(SIMAI_PACKETS, congestion=control)
        settings = msgspec.structs.replace(SIMAI_SETTINGS, packet=packet)
        times = run_flow_level(fabric, flows, settings)
        assert times.is_controlled
        assert times.total_s * 1e6 == pytest.approx(recorded_us, rel=0.10)


@pytest.mark.compiled
@pytest.mark.parametrize("control", ["dcqcn", "dctcp"])
def test_acknowledgements_wait_behind_data_of_the_other_way(control: str) -> None:
    """One flow against 16 that fill the link back: its window waits for acknowledgements, unless they go first."""
    fabric, back = over_one_link(16, 2 * MIB)
    flows = together([flows_of(np.array([16]), np.array([0]), 2 * MIB), back])
    settings = under(control, "pair")
    for acks_first, expected_us in ((False, 300), (True, 40)):
        packet = msgspec.structs.replace(settings.packet, acks_first=acks_first)
        each = msgspec.structs.replace(settings, packet=packet)
        flow, packets = (run_flows(fabric, flows, each, backend).finish_s[0] for backend in ("flow", "packet"))
        assert flow == pytest.approx(packets, rel=0.1)
        assert flow * 1e6 > expected_us


@pytest.mark.compiled
def test_a_smaller_last_packet_waits_for_the_one_before_it() -> None:
    """One flow alone over links of 100 and 400 Gb/s: the time of its packets, to 0.2 %."""
    fabric = SpectrumX(num_gpus=16, nic_bytes_per_s=12.5e9, num_spines=2).build()
    flows = flows_of(np.array([0]), np.array([9]), 3 * 9000 + 100)
    flow, packets = (run_flows(fabric, flows, SIMAI_SETTINGS, backend).finish_s[0] for backend in ("flow", "packet"))
    assert flow == pytest.approx(packets, rel=0.002)
