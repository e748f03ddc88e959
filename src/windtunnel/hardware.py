"""Devices, the nodes that hold them and the links between them. Rates are dense peaks as published, per direction."""

from windtunnel.errors import InputError
from windtunnel.schema import Schema
from windtunnel.units import format_count


class Device(Schema):
    """One accelerator (SKU). `None` means that no trustworthy source was found."""

    name: str
    """The slug that users type: `h100_sxm`."""
    title: str
    """The vendor's name."""
    vendor: str
    architecture: str
    """`hopper`, `blackwell`, `ampere`, `ada`, `cdna3`, ..."""
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    """Number format (`bf16`, `fp8`, `fp4`, `int8`, `fp32`) -> dense peak rate."""
    product_flops_per_s: dict[str, float] = {}
    """Number format -> rate of the fastest large matrix product that was published, where no operator was measured."""
    copy_bytes_per_s: float | None = None
    """Published rate of a copy within its memory (STREAM), bytes read and written, likewise."""
    usable_bytes: int | None = None
    """Total memory that the driver grants to programs (`cudaMemGetInfo`), of which engines take their shares; None: all
    of `memory_bytes`."""
    num_sms: int | None = None
    """Streaming multiprocessors or compute units."""
    l2_bytes: int | None = None
    l2_bytes_per_s: float | None = None
    """Rate at which decode attention reads KV from the L2 cache, where another request of the step has read it before;
    None: not known, and taken to be that of memory."""
    clock_per_s: float | None = None
    tdp_w: float | None = None
    price_usd_per_hour: float | None = None
    """List price on demand of one device."""
    scale_up_bytes_per_s: float | None = None
    """NVLink, xGMI or ICI bandwidth of one device, one direction. Where no node of the device is known, a switch with
    this rate is assumed, not PCIe."""
    measured_as: str | None = None
    """The system's name in the measured-operator data, where it was measured; times are scaled where the device has
    other rates."""
    sources: dict[str, str] = {}
    """Field -> where its value comes from."""


class Link(Schema):
    """A connection as one device sees it: bandwidth in one direction, and latency."""

    name: str
    bytes_per_s: float
    latency_s: float


class Node(Schema):
    """A server: `num_devices` devices of one kind, the links among them and the link to other nodes."""

    name: str
    title: str
    device: str
    num_devices: int
    scale_up: Link
    """Link among the devices of the node (or of the NVLink domain)."""
    scale_out: Link | None = None
    """Link of each device to other nodes."""
    host: Link | None = None
    """Link of each device to host memory (PCIe, C2C)."""
    host_memory_bytes: float | None = None
    """Memory of the host, of all its processors; None: not known."""
    host_memory_bytes_per_s: float | None = None
    """Bandwidth of that memory, all channels."""
    scale_up_group_size: int | None = None
    """Devices joined by `scale_up`; None means all. 2 for pair-wise NVLink."""
    scale_up_links: int | None = None
    """Point-to-point links that share a device's `scale_up` rate evenly: one to every other device (xGMI), or to the
    neighbours in a grid of two rows where the links are fewer or more (ICI). None: a switch joins the devices."""
    sources: dict[str, str] = {}

    def link_among(self, num_devices: int) -> Link:
        """Return the link of so many of its devices to one another: the host's where `scale_up` joins fewer."""
        is_joined = self.scale_up_group_size is None or num_devices <= self.scale_up_group_size
        return self.scale_up if is_joined or self.host is None else self.host


def meets_all(node: Node) -> bool:
    """Whether every device of the node has a link of its own to every other one."""
    return node.scale_up_links == node.num_devices - 1


ANY_DEVICE = "any"
"""`Node.device` of a node that takes any card."""


def check_node(node: Node, device: Device) -> None:
    """Raise InputError where `node` holds other devices."""
    if node.device not in (device.name, ANY_DEVICE):
        raise InputError(
            f"{node.title} holds {node.device}, not {device.name}", "leave node out, or take the node's own device"
        )


def check_reach(node: Node, num_devices: int, what: str) -> None:
    """Raise InputError where so many devices, which `what` needs, span nodes that no link joins."""
    if num_devices > node.num_devices and node.scale_out is None:
        raise InputError(
            f"{what} needs {format_count(num_devices, 'device')}; "
            f"{node.name} has {node.num_devices} and no link to others",
            "use fewer, or a node with scale_out",
        )


HOST_BYTES_PER_S = 25e9
"""Rate of copies to a device whose node does not name its link to host memory: PCIe 4.0 x16, measured (assumed)."""


def host_bytes_per_s(node: Node) -> float:
    """Return the rate at which each device copies from its node's host memory."""
    return HOST_BYTES_PER_S if node.host is None else node.host.bytes_per_s
