"""Closed form of the exchange of tokens between ranks with different experts, where no table has the device."""

import numpy as np

from windtunnel.errors import InputError
from windtunnel.hardware import Device, Node
from windtunnel.model.exchange import TokenExchange
from windtunnel.model.feed_forward.experts import MegaMoe
from windtunnel.model.operators import Size

PCIE_BYTES_PER_S = 32e9
"""Assumed rate of PCIe 4.0 x16 between devices without a scale-up network, when no node is given."""
NVLINK_SHARE = 0.8
"""DeepEP's README takes 160 of the H800's 200 GB/s as usable."""
NIC_SHARE = 0.93
LOW_LATENCY_S = 30e-6
"""This and `NIC_SHARE` are fitted together on DeepEP's published low-latency times (24 rows, 8 to 256 GPUs)."""
EXCHANGE_ERROR = 0.4
"""Relative error of the form: on the tables of four devices its median is 0.47 of low-latency kernels, 0.28 of normal
ones and 0.33 of those over NVLink."""

MEGA_MOE_ARITHMETIC, MEGA_MOE_READING = 0.51, 0.58
"""Shares of the peak rates: 2,304 of 4,500 TFLOP/s with 8,192 tokens on each of eight ranks, and 4.6 of 8 TB/s with 512
(DeepSeek-V4-Pro; deepseek-ai/DeepGEMM, pull request 316)."""
MEGA_MOE_ERROR = 0.17
"""Relative error of that form: its median on the 194 rows of GB200's, GB300's and B200's tables (-0.15 on average)."""


def exchange_seconds(op: TokenExchange, device: Device, node: Node | None) -> Size:
    """Return the longer of what crosses the network and what crosses links inside a node, and a start. InputError where
    the ranks span nodes without a link between them."""
    between, inside = op.copies
    scale_up = device.scale_up_bytes_per_s or (node.scale_up.bytes_per_s if node else None)
    inside_s = inside * op.row_bytes / ((scale_up or PCIE_BYTES_PER_S) * NVLINK_SHARE)
    if op.num_ranks == op.ranks_per_node:
        return LOW_LATENCY_S + inside_s
    out = node.scale_out if node else None
    if out is None:
        name = node.name if node else device.name
        raise InputError(f"{op.name} over several nodes needs a link between nodes, which {name} lacks")
    return LOW_LATENCY_S + np.maximum(inside_s, between * op.row_bytes / (out.bytes_per_s * NIC_SHARE))


def fused_seconds(op: MegaMoe, flops_per_s: float, bytes_per_s: float, device: Device, node: Node | None) -> Size:
    """Return the longest of arithmetic, reading weights and sending tokens, and a start: one kernel does all at once.
    InputError where the ranks span nodes without a link between them."""
    sending_s = sum(exchange_seconds(part, device, node) - LOW_LATENCY_S for part in op.exchanges)
    computing_s = op.flops / (flops_per_s * MEGA_MOE_ARITHMETIC)
    reading_s = op.num_bytes / (bytes_per_s * MEGA_MOE_READING)
    return LOW_LATENCY_S + np.maximum(np.maximum(computing_s, reading_s), sending_s)
