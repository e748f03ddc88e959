"""Exchange of tokens between ranks that hold different experts: the kernels that a deployment may choose, and their
operator.
"""

from dataclasses import dataclass
from typing import ClassVar

from windtunnel.model.operators import FP32_BYTES, Op, Size, size_text
from windtunnel.model.precision import ACTIVATION_BITS, Format
from windtunnel.units import MIB

ALL_GATHER = "all_gather"
"""Every rank gathers the tokens of all ranks, and sums are scattered back."""
DEEPEP_NORMAL, DEEPEP_LOW_LATENCY = "deepep_normal", "deepep_low_latency"
DEEPEP_AUTO = "deepep_auto"
"""Low-latency kernels up to `LOW_LATENCY_TOKENS` tokens a rank, normal ones beyond."""
DEEPEP = (DEEPEP_NORMAL, DEEPEP_LOW_LATENCY, DEEPEP_AUTO)
MEGA_MOE = "mega_moe"
"""DeepGEMM's Mega MoE: one kernel dispatches tokens, computes experts and combines their outputs."""
NVLINK_ONE_SIDED = "nvlink_one_sided"
EXCHANGES = (ALL_GATHER, *DEEPEP, MEGA_MOE, NVLINK_ONE_SIDED, "nvlink_two_sided")
"""Known values of `EngineSettings.all2all_backend`."""

LOW_LATENCY_TOKENS = 128
"""Tokens of a rank that the buffers of low-latency kernels hold (SGLang 0.5
`SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK`)."""


SMS_OF_NORMAL_KERNELS = 20
"""Multiprocessors that DeepEP's normal kernels take from what computes beside them (`Buffer.num_sms`, DeepEP 1.2
`deep_ep/buffer.py`; vLLM 0.12 `VLLM_DBO_COMM_SMS`)."""

_MESSAGE_HEAD_BYTES, _CHANNELS_OF_A_SCALE, _ALIGNED_BYTES = 16, 128, 128


def low_latency_buffer_bytes(num_tokens: int, hidden_size: int, num_experts: int) -> float:
    """Return the memory of DeepEP's low-latency buffers on a rank: two for sending and two for receiving, each with
    room for all ranks' `num_tokens` tokens at every expert (`LowLatencyLayout`, csrc/config.hpp, 1.2).

    A dispatched token has a head of 16 bytes and its bf16 hidden state, a combined one a pair of bf16 for every 128
    channels.
    """
    state = 2.0 * hidden_size
    combined = state + 4 * (hidden_size // _CHANNELS_OF_A_SCALE)
    slots, signals = num_experts * num_tokens, -(-4 * num_experts // _ALIGNED_BYTES) * _ALIGNED_BYTES
    whole = 2 * (slots * combined + slots * max(_MESSAGE_HEAD_BYTES + state, combined) + signals)
    return -(-whole // _ALIGNED_BYTES) * _ALIGNED_BYTES


_TOKENS_BY_RANKS = ((8, 256, 0), (16, 288, 140), (32, 288, 128), (64, 288, 140), (128, 560, 128), (160, 720, 132))
"""Ranks up to which a channel has room for so many tokens of each peer in a node, and of each other node."""


def normal_buffer_bytes(hidden_size: int, num_ranks: int) -> float:
    """Return the memory of the buffers of DeepEP's normal kernels on a rank: ten channels, each with room for tokens of
    every peer in the node, and of every node twice (`Config`, csrc/config.hpp; `get_dispatch_config`, 1.2).

    A token has its bf16 hidden state, 128 indices of 8 bytes with weights and scales of 4, and its origin.
    """
    channels, nodes = SMS_OF_NORMAL_KERNELS // 2, max(num_ranks // 8, 1)
    token = 2.0 * hidden_size + 128 * (8 + 4 + 4) + 8
    known = (room for most, *room in _TOKENS_BY_RANKS if num_ranks <= most)
    inside, between = next(known, _TOKENS_BY_RANKS[-1][1:])
    in_node = channels * min(num_ranks, 8) * (inside * token + 4 * (2 * nodes + 3))
    return in_node + (channels * nodes * 2 * (between * (token + 16) + 72) + MIB if nodes > 1 else 0.0)


def mega_moe_buffer_bytes(most_tokens: int, hidden_size: int, num_experts: int, top_k: int, num_ranks: int) -> float:
    """Return the memory of Mega MoE's buffers on a rank for at most so many tokens of each rank: a bf16 output for each
    choice of its tokens, these in fp8 with a scale for each 32 values, and the sources of all tokens that may arrive
    (`MegaMoEBuffer`, deep_gemm/include/deep_gemm/layout/mega_moe.cuh, 2026-09).

    The ring of tokens between the two products is not counted; it is as long as its blocks in flight.
    """
    tokens = -(-most_tokens // _MEGA_MOE_ALIGNED_TOKENS) * _MEGA_MOE_ALIGNED_TOKENS
    own = tokens * (top_k * (2.0 * hidden_size + 8 + 4) + hidden_size * (1 + 1 / 32))
    arriving = num_ranks * tokens * min(top_k, num_experts // num_ranks)
    return own + 4.0 * num_experts * tokens + 12.0 * arriving


_MEGA_MOE_ALIGNED_TOKENS = 1920
"""`kLCMCandidateBlockM` of the same file."""


@dataclass(frozen=True)
class TokenExchange(Op):
    """One dispatch of a rank's tokens to their experts, or one combine of the experts' outputs."""

    kind: ClassVar[str] = "token_exchange"
    axes: ClassVar[tuple[str, ...]] = ("num_tokens",)
    is_communication: ClassVar[bool] = True
    op: str
    """`dispatch` or `combine`."""
    name: str
    """Kernels: one of `EXCHANGES` but the collectives and the automatic choice."""
    num_tokens: Size
    """Tokens of each rank."""
    hidden_size: int
    num_experts: int
    experts_per_token: int
    num_ranks: int
    ranks_per_node: int
    format: Format = Format.BF16
    """Of what is sent."""

    @property
    def variant(self) -> str:
        return f"{self.name} {self.op} {self.format}"

    @property
    def span_nodes(self) -> int:
        """Nodes that hold the ranks."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def copies(self) -> tuple[Size, Size]:
        """Copies of tokens that a rank sends between nodes, and inside its node.

        Low-latency kernels and Mega MoE send one to each chosen expert, normal ones one to each node that needs it and
        from there to each rank, others one to each rank (https://github.com/deepseek-ai/DeepEP; DeepGEMM; TensorRT-LLM
        1.3 `communication/nvlink_one_sided.py`). Experts are chosen at random.
        """
        ranks, inside, top_k = self.num_ranks, self.ranks_per_node, self.experts_per_token
        if self.name in (DEEPEP_LOW_LATENCY, MEGA_MOE):
            return low_latency_copies(self.num_tokens * top_k, ranks, inside)
        nodes, reached = self.span_nodes, ranks * (1.0 - (1.0 - 1.0 / ranks) ** top_k)
        if self.name == DEEPEP_NORMAL:
            between = (nodes - 1) * (1.0 - (1.0 - 1.0 / nodes) ** top_k)
            return self.num_tokens * between, self.num_tokens * reached * (inside - 1) / inside
        return self.num_tokens * reached * (ranks - inside) / ranks, self.num_tokens * reached * (inside - 1) / ranks

    @property
    def row_bytes(self) -> float:
        """Bytes of one token; in fp8 with a scale for each 128 values."""
        scales = self.hidden_size // 128 * FP32_BYTES if self.format is Format.FP8 else 0.0
        return self.hidden_size * ACTIVATION_BITS[self.format] / 8 + scales

    @property
    def flops(self) -> Size:
        return 0.0 * self.num_tokens

    @property
    def num_bytes(self) -> Size:
        """Bytes that a rank sends."""
        between, inside = self.copies
        return (between + inside) * self.row_bytes

    @property
    def text(self) -> str:
        experts = f"{self.experts_per_token} of {self.num_experts}"
        return f"{size_text(self.num_tokens)} x {experts}, {self.hidden_size} {self.format} over {self.num_ranks}"


def low_latency_copies(copies: Size, num_ranks: int, ranks_per_node: int) -> tuple[Size, Size]:
    """Return which of a rank's `copies` go to other nodes, and to other ranks of its node."""
    return copies * (num_ranks - ranks_per_node) / num_ranks, copies * (ranks_per_node - 1) / num_ranks


def sent_format(experts: Format) -> Format:
    """Return the format in which tokens go to experts of that format: as these read them."""
    if experts is Format.NVFP4:
        return Format.NVFP4
    return Format.FP8 if ACTIVATION_BITS[experts] < 16 else Format.BF16
