"""A mixture of experts: a router, routed experts of which each token uses some, and experts that all tokens share."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import msgspec
import numpy as np

from windtunnel.errors import InputError
from windtunnel.model import exchange
from windtunnel.model.config_reader import ConfigReader
from windtunnel.model.exchange import TokenExchange
from windtunnel.model.feed_forward.dense import matrix_launches, matrix_parameters
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Gemm, Launch, Op, Size, size_text
from windtunnel.model.precision import ACTIVATION_BITS, BITS, Format
from windtunnel.model.quantization import Names
from windtunnel.model.shape import FeedForward, FeedForwardParameters, Shard
from windtunnel.schema import Schema

GROUP_LAUNCHES = frozenset({"dispatch_all_gather", "dispatch", "experts", "combine", "combine_reduce_scatter"})
"""Launches whose cost follows the tokens of all ranks of an attention data-parallel group."""

ROUTER_BITS = 16


@dataclass(frozen=True)
class Experts(Op):
    """The grouped GEMMs of a mixture of experts on one rank, gate/up and down, for `num_tokens` tokens of the whole
    expert-parallel group; `tp` shards every expert's width, `ep` spreads the experts.
    """

    kind: ClassVar[str] = "experts"
    axes: ClassVar[tuple[str, ...]] = ("num_tokens",)
    num_tokens: Size
    hidden_size: int
    intermediate_size: int
    """Width of one expert, before sharding."""
    num_experts: int
    experts_per_token: int
    tp: int = 1
    ep: int = 1
    format: Format = Format.BF16
    gated: bool = True

    @property
    def num_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def pairs_per_rank(self) -> Size:
        """Token-expert pairs that this rank computes when the load is balanced."""
        return self.num_tokens * self.experts_per_token / self.ep

    @property
    def active_experts(self) -> Size:
        """Expected number of this rank's experts that a token chose, with random routing."""
        miss = 1.0 - self.experts_per_token / self.num_experts
        return self.num_experts / self.ep * (1.0 - miss**self.num_tokens)

    @property
    def flops(self) -> Size:
        return 2.0 * self.pairs_per_rank * self.num_matrices * self.hidden_size * self.intermediate_size / self.tp

    @property
    def held_bytes(self) -> Size:
        """Those of the experts of one token, as all tokens may choose the same."""
        expert = self.num_matrices * self.hidden_size * self.intermediate_size / self.tp * BITS[self.format] / 8
        return expert * max(self.experts_per_token / self.ep, 1.0)

    @property
    def num_bytes(self) -> Size:
        width = self.intermediate_size / self.tp
        weights = self.active_experts * self.num_matrices * self.hidden_size * width * BITS[self.format] / 8
        return weights + self.pairs_per_rank * 2 * (self.hidden_size + width) * BF16_BYTES

    @property
    def text(self) -> str:
        experts = f"{self.experts_per_token} of {self.num_experts}"
        width = size_text(self.intermediate_size / self.tp)
        return f"{size_text(self.num_tokens)} x {experts}, {self.hidden_size} x {width} {self.format}"


@dataclass(frozen=True)
class MegaMoe(Experts):
    """The same with the exchange of tokens in one kernel, which computes some while others are on their way (DeepGEMM's
    Mega MoE); `num_tokens` are those of all `ep` ranks.
    """

    kind: ClassVar[str] = "mega_moe"
    ranks_per_node: int = 8
    """Ranks that one node holds."""

    @property
    def compute_format(self) -> Format:
        """Activations have eight bits beside weights of four."""
        return Format.FP8 if self.format is Format.MXFP4 else self.format

    @property
    def num_kernels(self) -> int:
        """Tokens are quantised into the kernel's buffer first."""
        return 2

    @property
    def exchanges(self) -> tuple[TokenExchange, TokenExchange]:
        """Its dispatch and its combine."""
        dispatch = TokenExchange(
            op="dispatch",
            name=exchange.MEGA_MOE,
            num_tokens=self.num_tokens / self.ep,
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            num_ranks=self.ep,
            ranks_per_node=self.ranks_per_node,
            format=Format.FP8,
        )
        return dispatch, replace(dispatch, op="combine", format=Format.BF16)


class ExpertsFeedForward(Schema, FeedForward, tag="experts", tag_field="type"):
    """A mixture of experts: a router, `num_experts` routed experts of which each token uses some, and shared ones."""

    operators: ClassVar[tuple[type[Op], ...]] = (Experts, MegaMoe, TokenExchange)
    layer_types: ClassVar[tuple[str, ...]] = ("moe",)
    shared_modules: ClassVar[tuple[Names, ...]] = (
        ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj", "mlp.down_proj"),
    )
    routed_modules: ClassVar[tuple[Names, ...]] = (("mlp.experts.0.down_proj", "mlp.experts.down_proj", "mlp.experts"),)
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of one routed expert."""
    shared_intermediate_size: int = 0
    """Width of all shared experts together."""
    shared_gate: bool = False
    """A sigmoid gate of one output scales the shared expert (Qwen2-MoE, Qwen3.5)."""
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    fp32_router: bool = False
    """Engines keep the router's weights in fp32 and multiply in fp32 (MiniMax-M2)."""
    latent_size: int | None = None
    """Width of the routed experts' inputs and outputs, between two projections that every rank keeps whole in bf16
    (vLLM 0.33 `nemotron_h.py`, `fc1_latent_proj`; `kimi_k3/nvidia/model.py`); None: the hidden size."""
    has_dense: bool = False
    """The shared expert is a dense feed-forward of its own beside the routed ones: normed and summed over ranks apart
    (Gemma 4; vLLM 0.33 `gemma4.py`)."""
    num_zero_experts: int = 0
    """Further columns of the router, whose experts compute nothing (LongCat-Flash)."""
    latent_norm: bool = False
    """Whether outputs are normed before the projection back (Kimi K3)."""

    @classmethod
    def layers(cls, reader: ConfigReader) -> Iterable[bool]:
        """Return whether each layer is a mixture of experts."""
        if not reader.count("num_local_experts", default=0, minimum=0):
            return [False] * reader.num_layers
        named = reader.named_layers("mlp_layer_types", ("dense", "sparse", "moe", "hash_moe"))
        if named:
            return [layer != "dense" for layer in named]
        if listed := set(reader.numbers("moe_layers")):
            return [index in listed for index in range(reader.num_layers)]
        if period := reader.count("expert_layer_period", default=0, minimum=0):
            offset = reader.count("expert_layer_offset", default=0, minimum=0)
            has_several = reader.count("num_local_experts") > 1  # Jamba says 1 where it has none
            return [has_several and index % period == offset for index in range(reader.num_layers)]
        starts = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_last_k_dense_replace")
        first = reader.count(*starts, default=0, minimum=0)
        # ERNIE counts from the back with -1.
        last = reader.count("moe_layer_end_index", default=-1, minimum=-1) % reader.num_layers
        step = reader.count("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
        dense = set(reader.numbers("mlp_only_layers"))
        frequency = _moe_layer_frequency(reader)
        return [
            first <= index <= last and frequency[index] and index not in dense and (index + 1) % step == 0
            for index in range(reader.num_layers)
        ]

    @classmethod
    def read(cls, reader: ConfigReader) -> "ExpertsFeedForward":
        architecture = reader.architecture
        num_experts = reader.count("num_local_experts")
        chosen = reader.count("num_experts_per_tok")
        if chosen > num_experts:
            raise InputError(f"{reader.name}: each token uses {chosen} experts, and there are {num_experts}")
        num_zero = reader.count("zero_expert_num", default=0, minimum=0)
        chosen = max(round(chosen * num_experts / (num_experts + num_zero)), 1)  # those that compute, in the mean
        width = reader.count("moe_intermediate_size", "intermediate_size")
        has_dense = architecture.paired or reader.flag("enable_moe_block")
        shared = reader.count("shared_expert_intermediate_size", default=0, minimum=0)
        if has_dense:
            shared = reader.count("intermediate_size")
        num_shared = reader.count("n_shared_experts", default=architecture.shared_experts, minimum=0)
        return cls(
            num_experts=num_experts,
            experts_per_token=chosen,
            intermediate_size=width,
            shared_intermediate_size=shared or num_shared * width,
            shared_gate=architecture.shared_gate and shared > 0,
            gated=architecture.gated,
            bias=reader.rule(architecture.feed_forward_bias),
            router_bias=reader.rule(architecture.router_bias),
            fp32_router=architecture.fp32_router,
            latent_size=reader.count("moe_latent_size", default=0) or None,
            latent_norm=reader.flag("latent_moe_use_norm"),
            has_dense=has_dense,
            num_zero_experts=num_zero,
        )

    @property
    def expert_modules(self) -> tuple[Names, ...]:
        return (("experts.0.down_proj",),) if self.has_dense else self.routed_modules

    def parameters(self, hidden_size: int) -> FeedForwardParameters:
        expert = self.expert_parameters(hidden_size)
        shared = self.shared_intermediate_size
        return FeedForwardParameters(
            routed=self.num_experts * expert,
            shared=matrix_parameters(hidden_size, shared, self.gated, self.bias) if shared else 0,
            router=(hidden_size + self.router_bias) * (self.num_experts + self.num_zero_experts)
            + (hidden_size if self.shared_gate else 0)
            + (self.latent_size or 0) * (2 * hidden_size + self.latent_norm),
            inactive=(self.num_experts - self.experts_per_token) * expert,
        )

    def expert_parameters(self, hidden_size: int) -> int:
        return matrix_parameters(self.latent_size or hidden_size, self.intermediate_size, self.gated, self.bias)

    def weight_bits(self, shard: Shard) -> float:
        """Routed experts are split over all ranks of the group; every rank keeps the whole router and the projections
        to and from a latent width."""
        count = self.parameters(shard.model.hidden_size)
        routed = count.routed * (1 + shard.redundant_experts / self.num_experts)
        return (
            routed * shard.bits("experts_format") / shard.num_group_ranks
            + count.shared * shard.bits("weights") / shard.tp
            + count.router * ROUTER_BITS
        )

    @property
    def with_shared_routed(self) -> Self:
        """The same with the shared expert as one more routed one, if it is one beside 256 of its size."""
        if self.num_experts != 256 or self.shared_intermediate_size != self.intermediate_size or self.shared_gate:
            return self
        chosen = self.experts_per_token + 1
        return msgspec.structs.replace(self, num_experts=257, experts_per_token=chosen, shared_intermediate_size=0)

    def launches(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        if shard.routes_shared_expert and (routed := self.with_shared_routed) is not self:
            yield from routed.launches(shard, num_tokens)
            return
        width, ranks, parallelism = shard.model.hidden_size, shard.num_group_ranks, shard.parallelism
        latent = self.latent_size or width
        all_tokens = num_tokens * parallelism.attention_dp
        message = all_tokens * latent * BF16_BYTES
        yield from self._router(shard, num_tokens)
        if self.latent_size:
            yield Launch("latent_down_proj", Gemm(num_tokens, latent, width))
        yield shard.elementwise("top_k", num_tokens, 3 * FP32_BYTES * self.num_experts)
        if is_exchanged(shard):
            yield from self._exchange(shard, "dispatch", num_tokens)
        elif parallelism.attention_dp > 1:
            form = shard.precision.experts_format
            bits = ACTIVATION_BITS[form if form in shard.gathers_quantised else Format.BF16]
            gathered = all_tokens * latent * bits / 8
            yield Launch("dispatch_all_gather", shard.collective("all_gather", gathered, ranks))
        yield Launch("experts", self._routed(shard, all_tokens))
        if self.shared_intermediate_size:
            # A dense part of its own runs before the experts (vLLM 0.33 `gemma4.py`, `longcat_flash.py`).
            beside_tokens = 0 if self.has_dense else shard.beside_tokens
            adds = np.where(np.asarray(num_tokens) <= beside_tokens, 0.0, 1.0)
            for launch in matrix_launches(shard, num_tokens, self.shared_intermediate_size, self.gated, "shared_"):
                yield replace(launch, adds=adds)
            yield shard.elementwise("experts_sum", num_tokens, 3 * width * BF16_BYTES)
            if self.has_dense:
                yield from shard.all_reduce("shared_all_reduce", num_tokens)
        yield from self._combined(shard, num_tokens, message)

    def _routed(self, shard: Shard, all_tokens: Size) -> Experts:
        experts = Experts(
            num_tokens=all_tokens,
            hidden_size=self.latent_size or shard.model.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts + shard.redundant_experts,
            experts_per_token=self.experts_per_token,
            tp=shard.parallelism.experts_tp,
            ep=shard.parallelism.ep,
            format=shard.precision.experts_format,
            gated=self.gated,
        )
        is_fused = shard.all2all_backend == exchange.MEGA_MOE
        if not is_fused:
            return experts
        return MegaMoe(**vars(experts), ranks_per_node=min(shard.devices_per_node, experts.ep))

    def _combined(self, shard: Shard, num_tokens: Size, message: Size) -> Iterator[Launch]:
        """Yield the sum of experts' outputs over ranks and the projection back from the latent width. What is normed in
        between is summed at both widths; else the projection comes before the sum, with which it commutes."""
        width, ranks, latent = shard.model.hidden_size, shard.num_group_ranks, self.latent_size
        if is_exchanged(shard):
            yield from self._exchange(shard, "combine", num_tokens)
        elif shard.parallelism.attention_dp > 1:
            yield Launch("combine_reduce_scatter", shard.collective("reduce_scatter", message, ranks))
        if latent:
            yield Launch("latent_up_proj", Gemm(num_tokens, width, latent))
        if latent and self.latent_norm:
            yield shard.elementwise("latent_norm", num_tokens, 2 * latent * BF16_BYTES)
        share = num_tokens * width * BF16_BYTES
        if shard.parallelism.attention_dp == 1 and ranks > 1 and not is_exchanged(shard):
            share += num_tokens * latent * BF16_BYTES if latent and self.latent_norm else 0.0
            yield Launch("experts_all_reduce", shard.collective("all_reduce", share, ranks))
        elif shard.tp > 1 and ranks > 1:
            # Each rank is left with its share of its group's tokens.
            yield Launch("tokens_all_gather", shard.collective("all_gather", share, shard.tp))

    def _exchange(self, shard: Shard, phase: str, num_tokens: Size) -> Iterator[Launch]:
        """Yield the dispatch or combine of the tokens that each of a group's ranks has, by the kernels for so many;
        nothing where the experts' kernel does both."""
        ranks, backend = shard.num_group_ranks, shard.all2all_backend
        if backend == exchange.MEGA_MOE:
            return
        tokens = num_tokens / shard.tp
        is_few = np.asarray(tokens) <= exchange.LOW_LATENCY_TOKENS
        chosen: dict[str, Size] = {backend: 1.0}
        if backend == exchange.DEEPEP_AUTO:
            low, normal = np.where(is_few, 1.0, 0.0), np.where(is_few, 0.0, 1.0)
            chosen = {exchange.DEEPEP_LOW_LATENCY: low, exchange.DEEPEP_NORMAL: normal}
        form = exchange.sent_format(shard.precision.experts_format) if phase == "dispatch" else Format.BF16
        for kernels, adds in chosen.items():
            if not np.any(adds):
                continue
            sent = TokenExchange(
                op=phase,
                name=kernels,
                num_tokens=tokens,
                hidden_size=self.latent_size or shard.model.hidden_size,
                num_experts=self.num_experts,
                experts_per_token=self.experts_per_token,
                num_ranks=ranks,
                ranks_per_node=min(shard.devices_per_node, ranks),
                format=form,
            )
            yield Launch(phase, sent, adds=adds)

    def _router(self, shard: Shard, num_tokens: Size) -> Iterator[Launch]:
        """Yield the router; one in fp32 converts its input first (vLLM 0.18 `MiniMaxM2MoE.forward`)."""
        width, computed = shard.model.hidden_size, Format.BF16
        if self.fp32_router:
            yield shard.elementwise("router_input", num_tokens, width * (BF16_BYTES + FP32_BYTES))
            computed = Format.TF32 if shard.tf32 else Format.FP32
        yield Launch("router", Gemm(num_tokens, self.num_experts + self.num_zero_experts, width, computed))

    def peak_values(self, shard: Shard) -> float:
        """The permuted inputs and outputs of every token's experts, beside hidden states and residual."""
        inner, width = self.intermediate_size / shard.parallelism.experts_tp, shard.model.hidden_size
        rows = self.experts_per_token * shard.parallelism.attention_dp / shard.parallelism.ep
        return rows * (3 * inner + (self.latent_size or width)) + 2 * width

    def workspace_values(self, shard: Shard) -> float:
        """Two buffers for the experts of the tokens of all ranks (vLLM 0.13 to 0.24 `TritonExperts.workspace_shapes`,
        as in its Marlin, CUTLASS and DeepGEMM kernels); kernels for experts of four bits have their own, transient.
        """
        if shard.precision.experts_format in (Format.NVFP4, Format.MXFP4, Format.MXFP4A4):
            return 0.0
        inner = self.intermediate_size / shard.parallelism.experts_tp
        width = self.latent_size or shard.model.hidden_size
        columns = max(inner, width) + max((2 if self.gated else 1) * inner, width)
        return self.experts_per_token * shard.parallelism.attention_dp * columns


def is_exchanged(shard: Shard) -> bool:
    """Whether tokens go only to the ranks with their experts, each of which is whole on one rank."""
    is_spread = shard.parallelism.ep > 1 and shard.parallelism.experts_tp == 1
    return is_spread and shard.all2all_backend != exchange.ALL_GATHER


def _moe_layer_frequency(reader: ConfigReader) -> list[bool]:
    """Return whether DeepSeek's `moe_layer_freq`, a period or a list, or EXAONE's list lets each layer have experts."""
    for key in ("is_moe_layer", "moe_layer_freq"):
        if isinstance(reader.raw.get(key), list):
            return [bool(item) for item in reader.per_layer(key, reader.numbers(key))]
    every = reader.count("moe_layer_freq", default=1)
    return [index % every == 0 for index in range(reader.num_layers)]


KIND = ExpertsFeedForward
