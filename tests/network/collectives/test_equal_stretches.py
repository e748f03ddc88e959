"""One stretch of a ring stands for all, and shorter messages for long ones, with the same result to the picosecond."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import cases_to_try
from windtunnel import limits
from windtunnel.errors import InputError
from windtunnel.network.backends import packet as backend
from windtunnel.network.backends.packet import LONG_PACKETS, long_seconds
from windtunnel.network.collectives import equal_stretches as stretches
from windtunnel.network.collectives.call import CollectiveChoices
from windtunnel.network.collectives.run import run_groups
from windtunnel.network.fabric import Fabric
from windtunnel.network.settings import GBPS, SIMAI_PACKETS, SIMAI_SETTINGS, NetworkSettings, PacketSettings
from windtunnel.network.topology import AlibabaHpn, DcnPlus, SpectrumX

pytestmark = pytest.mark.compiled  # thousands of packets

KIB, MIB = 2**10, 2**20
COMPATS = {None: NetworkSettings(backend="packet"), "simai": SIMAI_SETTINGS}


def rails(num_gpus: int, per_server: int = 8) -> np.ndarray:
    """The GPUs of the same place in every server."""
    return np.arange(num_gpus, dtype=np.int32).reshape(-1, per_server).T.copy()


def with_packets(compat: str | None, **packet: object) -> NetworkSettings:
    base = SIMAI_PACKETS if compat else PacketSettings()
    given_packets = msgspec.structs.replace(base, **packet)
    return msgspec.structs.replace(COMPATS[compat], backend="packet", packet=given_packets)


def seconds(fabric: Fabric, op: str, size_bytes: int, groups: np.ndarray, network: NetworkSettings) -> float:
    choices = CollectiveChoices("auto" if op == "all_to_all" else "ring")
    return run_groups(fabric, op, size_bytes, groups, network, choices).seconds


def is_shortened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a stretch stood for the ring, call by call."""
    answers: list[bool] = []

    def spy(*arguments: object) -> float | None:
        answer = stretches.ring_seconds(*arguments)
        answers.append(answer is not None)
        return answer

    monkeypatch.setattr(backend, "equal_stretches_seconds", spy)
    return answers


@pytest.mark.parametrize("compat", COMPATS)
@pytest.mark.parametrize(
    ("topology", "groups"),
    [
        (SpectrumX(num_gpus=64, num_spines=8), rails(64)),
        (DcnPlus(num_gpus=32, gpus_per_leaf=32, num_spines=8), rails(32)),
        (DcnPlus(num_gpus=6, gpus_per_server=1, gpus_per_leaf=6, num_spines=1), rails(6, 1)),
    ],
    ids=["rails", "one leaf", "one GPU a server"],
)
def test_a_stretch_of_a_ring_takes_as_long_as_all_of_it(
    topology: SpectrumX | DcnPlus, groups: np.ndarray, compat: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 22."""
    fabric, shortened = topology.build(), is_shortened(monkeypatch)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        one = seconds(fabric, op, MIB, groups, with_packets(compat))
        assert one == seconds(fabric, op, MIB, groups, with_packets(compat, every_flow=True))
    assert shortened == [True, False] * 3


@pytest.mark.full
def test_a_stretch_of_too_many_packets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = SpectrumX(num_gpus=64, num_spines=8).build()
    monkeypatch.setenv(limits.TIME, "1us")
    with pytest.raises(InputError, match=r"packets take about .* 1\.00 us is the limit"):
        seconds(fabric, "all_reduce", MIB, rails(64), with_packets(None))


@st.composite
def rings_somewhere(draw: st.DrawFn) -> tuple[Fabric, np.ndarray, NetworkSettings]:
    per_server, servers = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 6))
    num_gpus = per_server * servers
    rate = draw(st.sampled_from([100, 200, 400])) * GBPS
    topology = DcnPlus(
        num_gpus=num_gpus,
        gpus_per_server=per_server,
        gpus_per_leaf=draw(st.sampled_from([per_server, 2 * per_server, 64])),
        num_spines=draw(st.sampled_from([1, 8])),
        nic_bytes_per_s=rate,
    )
    ranks = np.arange(num_gpus, dtype=np.int32)
    groups = rails(num_gpus, per_server) if draw(st.booleans()) else ranks[None]
    network = with_packets(
        draw(st.sampled_from([None, "simai"])),
        congestion=draw(st.sampled_from(["none", "dcqcn", "dctcp", "timely", "hpcc"])),
        window=draw(st.sampled_from(["pair", "fabric", "none"])),
        acks_first=draw(st.booleans()),
        cut_through=draw(st.booleans()),
    )
    return topology.build(), groups, network


@pytest.mark.full
@given(rings_somewhere(), st.sampled_from(["all_reduce", "reduce_scatter"]), st.sampled_from([16 * KIB, MIB, 3 * MIB]))
@settings(max_examples=cases_to_try(40))
def test_shortcuts_change_no_picosecond(case: tuple[Fabric, np.ndarray, NetworkSettings], op: str, size: int) -> None:
    """Invariant 22."""
    fabric, groups, network = case
    assert network.packet is not None
    plain = msgspec.structs.replace(network, packet=msgspec.structs.replace(network.packet, every_flow=True))
    assert seconds(fabric, op, size, groups, network) == seconds(fabric, op, size, groups, plain)


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "groups", "compat"),
    [
        (SpectrumX(num_gpus=16, num_spines=8), np.arange(16, dtype=np.int32)[None], "simai"),
        (DcnPlus(num_gpus=32, gpus_per_leaf=32, num_spines=8), np.arange(32, dtype=np.int32)[None], "simai"),
        (DcnPlus(num_gpus=6, gpus_per_server=1, gpus_per_leaf=1, num_spines=1), rails(6, 1), None),
        (AlibabaHpn(num_gpus=64, num_spines=16), rails(64), "simai"),
    ],
    ids=["hashed anew between switches", "SimAI's channels in one server", "data meets at a spine", "two NICs"],
)
def test_rings_that_may_meet_are_simulated_in_full(
    topology: SpectrumX, groups: np.ndarray, compat: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened = is_shortened(monkeypatch)
    seconds(topology.build(), "all_gather", 64 * KIB, groups, with_packets(compat))
    assert shortened == [False]


def test_a_ring_too_long_for_all_of_its_steps_takes_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 64 ranks over two leaves of 32: a stretch is 32 ranks, and three rounds of it stand for 126 steps."""
    fabric = SpectrumX(num_gpus=64, gpus_per_server=1, gpus_per_leaf=32, num_spines=64).build()
    exact = seconds(fabric, "all_reduce", MIB, rails(64, 1), with_packets(None, every_flow=True))
    monkeypatch.setattr(stretches, "ALL_FLOWS", 0)
    monkeypatch.setattr(stretches, "MOST_PACKETS", 0)
    shortened = is_shortened(monkeypatch)
    assert seconds(fabric, "all_reduce", MIB, rails(64, 1), with_packets(None)) == pytest.approx(exact, rel=0.002)
    assert shortened == [True]


@pytest.mark.parametrize("compat", COMPATS)
def test_a_long_message_takes_as_long_as_its_packets(compat: str | None) -> None:
    fabric = SpectrumX(num_gpus=8, num_spines=1).build()
    size = 8 * (LONG_PACKETS + 100) * COMPATS[compat].payload_bytes + 8 * 1234
    groups = np.arange(8, dtype=np.int32)[None]
    exact = seconds(fabric, "all_to_all", size, groups, with_packets(compat, every_flow=True))
    assert seconds(fabric, "all_to_all", size, groups, with_packets(compat)) == exact


def test_a_message_whose_packets_add_unequal_times_is_simulated_in_full() -> None:
    asked: list[int] = []

    def even(size_bytes: int) -> float:
        asked.append(size_bytes)
        return size_bytes * 1e-9

    def slowing(size_bytes: int) -> float:
        asked.append(size_bytes)
        return size_bytes**2 * 1e-15

    size = LONG_PACKETS * 1000 - 1
    assert long_seconds(even, size, 1000) == pytest.approx(size * 1e-9, rel=1e-12)
    assert max(asked) < size / 3
    assert long_seconds(slowing, size, 1000) == slowing(size)
    assert long_seconds(lambda _: None, size, 1000) is None
