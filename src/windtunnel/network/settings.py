"""How a network is simulated: at which depth, and what every transfer costs besides its bytes."""

import sys
from typing import Any, Literal

from msgspec.structs import force_setattr

from windtunnel.network.packet_settings import PacketSettings
from windtunnel.plugins import Registry
from windtunnel.schema import Schema, check_at_least, check_non_negative, check_seed, decode, encode

BACKENDS = Registry("windtunnel.network_backends", "windtunnel.network.backends", "network backend")


class NetworkSettings(Schema):
    """What a run of flows over a fabric needs besides the two."""

    backend: str = "analytic"
    """A name in `BACKENDS`: analytic, flow, packet or an installed one."""
    compat: Literal["simai"] | None = None
    """Follow SimAI where it differs from hardware: its rings, packet sizes, acknowledgements and ports."""
    routing: Literal["ecmp", "spray"] = "ecmp"
    """One of the shortest paths by hash, or all of them evenly (packet spraying, adaptive routing)."""
    send_latency_s: float = 3e-6
    """From the moment that data is there to the first byte on the wire; SimAI's `AS_SEND_LAT`."""
    payload_bytes: int = 4096
    """Of a full packet. SimAI's `PACKET_PAYLOAD_SIZE` is 9000."""
    header_bytes: int = 66
    """Of a packet: Ethernet, IPv4, UDP, InfiniBand transport and check sums (RoCE v2). SimAI: 50."""
    seed: int = 0
    """Of the switches' hashes."""
    packet: PacketSettings | None = None
    """Transport, congestion control and buffers of the packet level. None: `SimAI.conf`'s with `compat: simai`, and
    their defaults else.
    """

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"unknown network backend {self.backend!r}; known: {', '.join(BACKENDS.names())}")
        # Encoding leaves out a default that is the same object, which a decoded string is not.
        force_setattr(self, "backend", sys.intern(self.backend))
        check_at_least(1, payload_bytes=self.payload_bytes)
        check_non_negative(send_latency_s=self.send_latency_s, header_bytes=self.header_bytes)
        check_seed(self.seed)


class ClusterNetwork(NetworkSettings):
    """The network between the servers of a training job or of a replica: collectives that leave a server are simulated
    on it. Without one they take closed forms over the published links.
    """

    topology: str | None = None
    """A topology file, a type with parameters (`dcn_plus:num_gpus=512,num_spines=4`) or a node of the catalog. None:
    as many of the deployment's nodes as it needs, on rails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat is not None:
            raise ValueError("compat is for `windtunnel network run` and `windtunnel collective`; leave it out here")


SIMAI_SETTINGS = NetworkSettings(backend="flow", compat="simai", payload_bytes=9000, header_bytes=50)
"""What SimAI 1.6 simulates with (`SimAI.conf`), with a send latency of 3 us."""


def settings_from(given: dict[str, Any]) -> NetworkSettings:
    """Settings from the fields that were given; `compat: simai` changes what the others default to.

    Raises:
        InputError: a field is wrong.
    """
    defaults = encode(SIMAI_SETTINGS) if given.get("compat") == "simai" else {}
    defaults.pop("backend", None)
    return decode(defaults | given, NetworkSettings)
