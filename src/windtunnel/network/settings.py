"""Settings of a network simulation: its backend, routing, packet sizes and latencies; its NICs and switches.

Beside each field of the packet level stands its name in SimAI's configuration file, whose values are the defaults,
except for DCQCN: its values are from the table of parameters in Zhu et al., "Congestion Control for Large-Scale RDMA
Deployments", SIGCOMM 2015 (SimAI's recover 16 times more slowly), with ten times the additive step as the hyper-active
one.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec.structs import force_setattr, replace

from windtunnel import schema
from windtunnel.plugins import Registry

BACKENDS = Registry("windtunnel.network_backends", "windtunnel.network.backends", "network backend", "run_flows")


GBPS = 125e6


class EcnThreshold(schema.Schema):
    """When switch ports of one rate mark packets: never below `min_bytes` queued, always above `max_bytes`."""

    bytes_per_s: float
    min_bytes: int
    """`KMIN_MAP`"""
    max_bytes: int
    """`KMAX_MAP`"""
    max_probability: Annotated[float, schema.check_fraction]
    """`PMAX_MAP`: just below `max_bytes`."""

    def check(self) -> None:
        if not 0 <= self.min_bytes < self.max_bytes:
            raise ValueError(f"min_bytes = {self.min_bytes} is not below max_bytes = {self.max_bytes}")


class PacketSettings(schema.Schema):
    """Transport, congestion control and switch buffers."""

    congestion: Literal["none", "dcqcn", "hpcc", "timely", "dctcp"] = "dcqcn"
    """`CC_MODE`: 1, 3, 7, 8."""
    window: Literal["fabric", "pair", "none"] = "pair"
    """Limit of a connection's bytes in flight: the largest bandwidth-delay product of the fabric, its own, or none
    (`HAS_WIN`, `GLOBAL_T`).
    """
    window_follows_rate: bool = True
    """`VAR_WIN`"""
    recovery: Literal["go_back_n", "selective_repeat"] = "go_back_n"
    """What a sender repeats after a loss: everything from the gap on, or the gap alone."""
    reordering_packets: schema.AtLeastOne = 3
    """Selective repeat: a gap counts as a loss once a packet that many positions later has arrived."""
    timeout_s: schema.Positive = 320e-6
    """A connection without progress for this long sends again, where packets can be lost. Source: RTO_high of Mittal
    et al., "Revisiting Network Support for RDMA", SIGCOMM 2018.
    """
    spray: Literal["random", "shortest_queue"] = "random"
    """Next hop of each packet with `routing: spray`: any of them, or the one with the shortest queue."""
    cut_through: bool = False
    """Whether switches forward a packet once they have its header."""
    ack_interval_bytes: schema.AtLeastOne = 1
    """`L2_ACK_INTERVAL`: bytes of data for each acknowledgement; 1 acknowledges every packet."""
    ack_bytes: schema.AtLeastOne = 60
    """Bytes of an acknowledgement on the wire."""
    acks_first: bool = False
    """`ACK_HIGH_PRIO`"""
    pfc: bool = True
    """Whether a sender whose packets would overflow the buffer is paused; otherwise they are dropped."""
    dynamic_pfc: bool = True
    """`USE_DYNAMIC_PFC_THRESHOLD`: whether a port's share is a fraction of the free buffer, or of all of it."""
    buffer_bytes: schema.AtLeastOne = 32 * 2**20
    """`BUFFER_SIZE`: buffer of a switch."""
    pfc_shift: Annotated[int, schema.check_non_negative] = 3
    """A port may take 1 / 2 ** shift of the shared buffer."""
    reserve_bytes: Annotated[int, schema.check_non_negative] = 4096
    """Buffer reserved for each port, before it takes from the shared part."""
    resume_offset_bytes: Annotated[int, schema.check_non_negative] = 3072
    """A paused sender resumes when its port is this far below its share."""
    ecn: bool = True
    """`ENABLE_QCN`"""
    ecn_thresholds: tuple[EcnThreshold, ...] = ()
    """By port rate. Empty: 100 kB to 400 kB for each 25 Gb/s, probability 0.2, as in Li et al., "HPCC", SIGCOMM 2019,
    section 5.1.
    """
    min_rate_bytes_per_s: schema.Positive = 0.1 * GBPS
    """`MIN_RATE`"""
    rate_ai_bytes_per_s: float = 0.04 * GBPS
    """`RATE_AI`: additive increase of DCQCN, HPCC and TIMELY."""
    rate_hai_bytes_per_s: float = 0.4 * GBPS
    """`RATE_HAI`: hyper-active increase."""
    ewma_gain: float = 1 / 256
    """`EWMA_GAIN`: g of DCQCN and DCTCP."""
    alpha_interval_s: schema.Positive = 55e-6
    """`ALPHA_RESUME_INTERVAL`"""
    decrease_interval_s: schema.Positive = 50e-6
    """`RATE_DECREASE_INTERVAL`"""
    increase_interval_s: schema.NonNegative = 55e-6
    """`RP_TIMER`"""
    fast_recovery_times: int = 5
    """`FAST_RECOVERY_TIMES`"""
    clamp_target_rate: bool = False
    """`CLAMP_TARGET_RATE`"""
    dctcp_rate_ai_bytes_per_s: float = 1 * GBPS
    """`DCTCP_RATE_AI`"""
    target_utilisation: float = 0.95
    """`U_TARGET`: HPCC's target utilisation."""
    most_increases: int = 0
    """`MI_THRESH`: HPCC's additive increases in a row."""
    fast_react: bool = True
    """`FAST_REACT`: HPCC reacts to every acknowledgement, not to one per round trip."""
    every_flow: bool = False
    """Whether every flow is simulated, also where one group of flows or stretch of a ring could stand for equal ones.
    """
    timely_alpha: float = 0.875
    timely_beta: float = 0.8
    timely_low_s: float = 50e-6
    timely_high_s: float = 500e-6
    timely_min_rtt_s: float = 20e-6


SIMAI_PACKETS = schema.decode(schema.read_yaml(Path(__file__).with_name("simai_packets.yaml")), PacketSettings)
"""Settings of SimAI 1.6."""


class NetworkSettings(schema.Schema):
    """Settings of a run of flows over a fabric."""

    backend: str = "analytic"
    """A name in `BACKENDS`: analytic, flow, packet or an installed one."""
    compat: Literal["simai"] | None = None
    """Follow SimAI where it differs from hardware: its rings, packet sizes, acknowledgements and ports."""
    routing: Literal["ecmp", "spray"] = "ecmp"
    """`ecmp`: one of the shortest paths, by hash; `spray`: all of them evenly (packet spraying, adaptive routing)."""
    send_latency_s: schema.NonNegative = 3e-6
    """Time from the data being there to its first byte on the wire; SimAI's `AS_SEND_LAT`. Steps of NCCL's algorithms
    take as long as NCCL's model says, and what this is above 3 us."""
    network_send_latency_s: schema.NonNegative | None = None
    """The same of a flow to another server; None: `send_latency_s`."""
    payload_bytes: schema.AtLeastOne = 4096
    """Payload of a full packet. SimAI's `PACKET_PAYLOAD_SIZE` is 9000."""
    header_bytes: Annotated[int, schema.check_non_negative] = 66
    """Header of a packet: Ethernet, IPv4, UDP, InfiniBand transport and check sums (RoCE v2). SimAI: 50."""
    seed: Annotated[int, schema.check_seed] = 0
    """Seed of the switches' hashes."""
    packet: PacketSettings | None = None
    """Transport, congestion control and buffers of the packet level. None: those of `SimAI.conf` with `compat: simai`,
    else the defaults.
    """

    def check(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; known: {', '.join(BACKENDS.names())}")
        # Encoding leaves out a default that is the same object, which a decoded string is not.
        force_setattr(self, "backend", sys.intern(self.backend))


class ClusterNetwork(NetworkSettings):
    """The network between the servers of a training job or a replica, on which their collectives are simulated.

    Without one, closed forms over the published links time them.
    """

    topology: str | None = None
    """A topology file, a type with parameters (`dcn_plus:num_gpus=512,num_spines=4`) or a node of the catalog. None:
    as many of the deployment's nodes as it needs, on rails."""

    def check(self) -> None:
        super().check()
        if self.compat is not None:
            raise ValueError("compat is for `windtunnel network run` and `windtunnel collective`; leave it out here")


SIMAI_SETTINGS = NetworkSettings(backend="flow", compat="simai", payload_bytes=9000, header_bytes=50)
"""Settings of SimAI 1.6 (`SimAI.conf`), with a send latency of 3 us."""


def settings_from(given: dict[str, Any]) -> NetworkSettings:
    """Return settings from the given fields; `compat: simai` changes the defaults of the others. InputError where a
    field is wrong."""
    defaults = schema.encode(SIMAI_SETTINGS) if given.get("compat") == "simai" else {}
    defaults.pop("backend", None)
    return schema.decode(defaults | given, NetworkSettings)


def packets_of(settings: NetworkSettings) -> PacketSettings:
    """Return the packet settings of a network, those of its compatibility where it gives none.

    Sprayed packets overtake each other, and need a transport that does not take that for a loss.
    """
    packet = settings.packet or (SIMAI_PACKETS if settings.compat == "simai" else PacketSettings())
    if settings.packet is None and settings.routing == "spray":
        return replace(packet, recovery="selective_repeat", reordering_packets=1000)
    return packet
