"""Settings of a network simulation: its backend, routing, packet sizes and latencies."""

import sys
from typing import Annotated, Any, Literal

from msgspec.structs import force_setattr

from windtunnel.network.packet_settings import PacketSettings
from windtunnel.plugins import Registry
from windtunnel.schema import AtLeastOne, NonNegative, Schema, check_non_negative, check_seed, decode, encode

BACKENDS = Registry("windtunnel.network_backends", "windtunnel.network.backends", "network backend")


class NetworkSettings(Schema):
    """Settings of a run of flows over a fabric."""

    backend: str = "analytic"
    """A name in `BACKENDS`: analytic, flow, packet or an installed one."""
    compat: Literal["simai"] | None = None
    """Follow SimAI where it differs from hardware: its rings, packet sizes, acknowledgements and ports."""
    routing: Literal["ecmp", "spray"] = "ecmp"
    """`ecmp`: one of the shortest paths, by hash; `spray`: all of them evenly (packet spraying, adaptive routing)."""
    send_latency_s: NonNegative = 3e-6
    """Time from the data being there to its first byte on the wire; SimAI's `AS_SEND_LAT`."""
    payload_bytes: AtLeastOne = 4096
    """Payload of a full packet. SimAI's `PACKET_PAYLOAD_SIZE` is 9000."""
    header_bytes: Annotated[int, check_non_negative] = 66
    """Header of a packet: Ethernet, IPv4, UDP, InfiniBand transport and check sums (RoCE v2). SimAI: 50."""
    seed: Annotated[int, check_seed] = 0
    """Seed of the switches' hashes."""
    packet: PacketSettings | None = None
    """Transport, congestion control and buffers of the packet level. None: those of `SimAI.conf` with `compat: simai`,
    else the defaults.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown network backend {self.backend!r}; known: {', '.join(BACKENDS.names())}")
        # Encoding leaves out a default that is the same object, which a decoded string is not.
        force_setattr(self, "backend", sys.intern(self.backend))


class ClusterNetwork(NetworkSettings):
    """The network between the servers of a training job or a replica, on which their collectives are simulated.

    Without one, closed forms over the published links time them.
    """

    topology: str | None = None
    """A topology file, a type with parameters (`dcn_plus:num_gpus=512,num_spines=4`) or a node of the catalog. None:
    as many of the deployment's nodes as it needs, on rails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat is not None:
            raise ValueError("compat is for `windtunnel network run` and `windtunnel collective`; leave it out here")


SIMAI_SETTINGS = NetworkSettings(backend="flow", compat="simai", payload_bytes=9000, header_bytes=50)
"""Settings of SimAI 1.6 (`SimAI.conf`), with a send latency of 3 us."""


def settings_from(given: dict[str, Any]) -> NetworkSettings:
    """Return settings from the given fields; `compat: simai` changes the defaults of the others.

    Raises:
        InputError: a field is wrong.
    """
    defaults = encode(SIMAI_SETTINGS) if given.get("compat") == "simai" else {}
    defaults.pop("backend", None)
    return decode(defaults | given, NetworkSettings)
