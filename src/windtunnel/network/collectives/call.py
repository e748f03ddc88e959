"""One collective on a fabric: the operation, the choices of NCCL or its user, and the result."""

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, check_known
from windtunnel.network.fabric import Fabric, assumed_kind
from windtunnel.network.settings import NetworkSettings
from windtunnel.notebook import Shown
from windtunnel.plugins import Registry
from windtunnel.units import parse_quantity

ALGORITHMS = Registry(
    "windtunnel.collectives",
    "windtunnel.network.collectives.algorithms",
    "collective algorithm",
    "OPERATIONS",
    taken=("auto",),
)

_BUS_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 0, "send_recv": 0}
"""Operation -> how often the buffer less one rank's share crosses the slowest link; 0: the whole buffer does, once."""
OPERATIONS = tuple(_BUS_ROUNDS)


def operation_named(text: str) -> str:
    """Return the collective that NCCL, nccl-tests or a person writes otherwise: `ncclAllReduce`, `all_reduce_perf`."""
    letters = re.sub(r"_perf$|^nccl|[^a-z]", "", text.lower())
    return next((op for op in OPERATIONS if op.replace("_", "") == letters), text)


def size_of(text: str) -> int:
    """Return the bytes that a text such as `64MiB` says; raise InputError where they are no whole number."""
    size_bytes = parse_quantity("size_bytes", text)
    if size_bytes != int(size_bytes):
        raise InputError(f"size_bytes: {text!r} is not a whole number of bytes")
    return int(size_bytes)


def check_operation(op: str) -> None:
    """Raise InputError where there is no such collective."""
    check_known(op, OPERATIONS, f"there is no collective {op!r}")


def bus_factor(op: str, num_ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines them (doc/PERFORMANCE.md). InputError where
    there is no such collective."""
    check_operation(op)
    rounds = _BUS_ROUNDS[op]
    return rounds * ((num_ranks - 1) / num_ranks) if rounds else 1.0


@dataclass(frozen=True)
class Ranks:
    """Where the ranks of a collective are, and the links that each has."""

    num_ranks: int
    num_servers: int
    scale_up_bytes_per_s: float
    """Of one rank inside its server or NVLink domain; 0 where a server holds one rank."""
    network_bytes_per_s: float
    """Of one rank to other servers, all its NIC ports together; 0 where there are none."""
    network_latency_us: float = 0.0
    """Of a step between servers, beyond that of InfiniBand."""
    switched: bool = True
    """Whether a switch joins the ranks of a server, not links between them."""
    nvls: bool = True
    """Whether switches inside the server can add (NVSwitch since Hopper)."""
    nvls_channels: int = 16
    """Channels by which switches add."""
    nvls_share: float = 0.95
    """Bus bandwidth of long buffers that switches add, over the rate of the links."""
    ll_bytes_per_s: float = 141e9
    """Most bus bandwidth of the protocol LL: here of Hopper, in one server."""
    network: str = "infiniband"
    """Kind of the links between servers (`network.fabric.NETWORK_SHARES`)."""
    device: str = ""
    """Name in the catalog, where it has the device."""
    scale_up_share: float = 1.0
    """Of the rate of the links inside its server, what a ring's flows reach."""

    @property
    def per_server(self) -> int:
        return self.num_ranks // self.num_servers


@dataclass(frozen=True)
class CollectiveChoices:
    """Choices that NCCL or its user makes for one collective."""

    algorithm: str = "auto"
    """A name in `ALGORITHMS`; `auto` takes the choice of NCCL."""
    protocol: str = "auto"
    """`simple`, `ll` or `ll128`; `auto` takes the choice of NCCL. Flows carry its flags and have its latency."""
    pxn: bool = False
    """Whether SimAI's rings hand off to the GPU on the right rail before they leave a server."""
    launch_s: float = 0.0
    """Added to a time in closed form: the host's launch (`network.collectives.closed_forms.LAUNCH_S`)."""


@dataclass(frozen=True, eq=False)
class CollectiveCall:
    """One collective to time."""

    fabric: Fabric
    op: str
    size_bytes: int
    """As nccl-tests counts: the whole buffer; for an all-to-all, the buffer of one rank."""
    gpus: NDArray[np.int32]
    """(num_ranks,) node ids; for send_recv, sender and receiver."""
    ranks: Ranks
    settings: NetworkSettings
    choices: CollectiveChoices = field(default_factory=CollectiveChoices)
    traffic_bytes: NDArray[np.int64] | None = None
    """(num_ranks, num_ranks) from each rank to each other, where an all-to-all is not balanced."""
    num_together: int = 1
    """Calls of its kind at once."""


@dataclass(frozen=True, eq=False, repr=False)
class CollectiveRun(Shown):
    """One collective's time and how it was found."""

    REPORT = "network.network:collective_report"

    call: CollectiveCall
    seconds: float
    algorithm: str
    protocol: str
    backend: str
    source: str
    """Measured tables, closed form, or the number of flows."""

    @property
    def notes(self) -> list[str]:
        """Remarks on what was assumed."""
        fabric, is_simai = self.call.fabric, self.call.settings.compat == "simai"
        matters = fabric.is_kind_assumed and self.call.ranks.num_servers > 1 and not is_simai
        return [assumed_kind(fabric.name)] if matters else []

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size by time, as nccl-tests prints it."""
        return self.call.size_bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """Rate of the slowest link, as nccl-tests defines it."""
        return self.algorithm_bytes_per_s * bus_factor(self.call.op, self.call.ranks.num_ranks)
