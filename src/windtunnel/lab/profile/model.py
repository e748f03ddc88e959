"""A few layers of a model as torch modules with the operators of `model.forward`, one rank's shard, for timing.

The forward is real: every operator reads what the one before wrote, layers have weights of their own, and all of it
runs in order. Operators timed alone, in a loop, are 18% to 54% too fast on a CPU: their weights stay in the
cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from windtunnel.errors import InputError
from windtunnel.lab.profile.attention import Attend, flashinfer_prefill, plan_flash_attention, plan_flashinfer, sdpa
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import Experts, ExpertsFeedForward
from windtunnel.model.launches.forward import StepBatch, forward_launches, token_launches
from windtunnel.model.operators import Gemm, Op
from windtunnel.model.precision import BITS, Format
from windtunnel.model.shape import LayerGroup, Shard

TORCH_FORMATS = {Format.BF16: "bfloat16", Format.FP32: "float32"}

Tensor = Any
Mark = Callable[[str], None]
"""Called before the first operator and after each, with the name of the launch that ended."""


@dataclass(frozen=True)
class StepShape:
    """The shape of a measured step: decoding requests, or prompts of `chunk` tokens after `cached` ones."""

    batch: int
    context: int
    """Decoding: keys of each request, the new one included. Prefill: tokens cached before the chunk."""
    chunk: int = 0
    """Tokens of a prompt's chunk; 0: decoding."""

    @property
    def num_tokens(self) -> int:
        return self.batch * max(self.chunk, 1)

    @property
    def step_batch(self) -> StepBatch:
        """The same step in the simulator's terms."""
        if not self.chunk:
            return StepBatch(self.batch, float(self.context), 0, 0.0, self.batch)
        pairs = self.num_tokens * (self.context + self.chunk / 2)
        return StepBatch(0, 0.0, self.num_tokens, pairs, self.batch)


@dataclass
class LayerFlow:
    """Tensors that flow through a layer."""

    hidden: Tensor
    residual: Tensor
    shape: StepShape


def check_profilable(shard: Shard) -> None:
    """Raise InputError where the torch forward lacks operators. InputError for a format that is not a float type of
    torch, or attention without softmax."""
    precision = shard.precision
    formats = {precision.weights, precision.attention_format, precision.experts_format, precision.lm_head}
    formats |= {precision.attention_output_format}
    for name in sorted(formats - set(TORCH_FORMATS)):
        raise InputError(
            f"{shard.model.name} has weights in {name}; torch's operators are measured in {', '.join(TORCH_FORMATS)}",
            "measure it in bf16 with --quant bf16",
        )
    if len(formats) > 1:
        raise InputError(f"{shard.model.name} mixes {', '.join(sorted(formats))}; one format is measured at a time")
    for group in shard.model.layers:
        if not isinstance(group.attention, GroupedQueryAttention | LatentAttention):
            layers = "layers of one part" if group.attention is None else f"{group.attention.text} layers"
            raise InputError(f"{shard.model.name} has {layers}, which cannot be measured yet")
        if not isinstance(group.feed_forward, DenseFeedForward | ExpertsFeedForward):
            raise InputError(f"{shard.model.name} has layers of one part, which cannot be measured yet")
        if isinstance(group.attention, LatentAttention) and group.attention.indexer:
            raise InputError(f"{shard.model.name} has sparse attention with an indexer, which cannot be measured yet")
        odd = any(getattr(group.attention, each, False) for each in ("head_gate", "shares_kv"))
        if odd or shard.model.layer_inputs:
            what = "a gate for each head, shared keys or inputs of layers"
            raise InputError(f"{shard.model.name} has {what}, which cannot be measured yet")
        if getattr(group.attention, "value_head_dim", None) or getattr(group.feed_forward, "latent_size", None):
            raise InputError(f"{shard.model.name} has narrow values or latent experts, which cannot be measured yet")


class LayerStack:
    """`num_layers` layers of one group of a shard, its embedding and head, ready to run steps.

    Args:
        num_layers: layers with weights of their own; their bytes should exceed the last-level cache.
        max_cached: tokens that the KV cache of one layer holds, over all requests.
        attention: owner of the attention kernels, a key of `lab.profile.attention.PACKAGES`; the decoding steps of
            latent attention are written out in torch.
    """

    def __init__(
        self,
        shard: Shard,
        group: LayerGroup,
        num_layers: int,
        device: str,
        max_tokens: int,
        max_cached: int,
        attention: str = "sdpa",
    ) -> None:
        import torch

        self.shard, self.group, self.num_layers = shard, group, num_layers
        self.device, self.dtype = device, getattr(torch, TORCH_FORMATS[shard.precision.weights])
        self.max_tokens, self.max_cached = max_tokens, max_cached
        self.backend = attention
        self.attend: Attend = sdpa
        generator = torch.Generator(device).manual_seed(0)

        def matrix(*shape: int) -> Tensor:
            # Numbers, not zeros: an H200 multiplies zeros 13% faster.
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype).mul_(0.02)

        width = shard.model.hidden_size
        self.vocabulary = -(-shard.model.vocab_size // shard.tp)
        self.embedding, self.head = matrix(self.vocabulary, width), matrix(self.vocabulary, width)
        self.norm = matrix(width)
        self.layers = [_weights(shard, group, matrix) for _ in range(num_layers)]
        heads, entry_width, rotated = _cache_widths(shard, group)
        self.caches = [matrix(2, max_cached, heads, entry_width) for _ in range(num_layers)]
        self.angles = matrix(2, max_tokens, 1, rotated)
        self.ids = torch.randint(self.vocabulary, (max_tokens,), generator=generator, device=device)

    def prepare(self, shape: StepShape) -> None:
        """Plan the attention of a shape, which an engine's host does before the forward."""
        attention = self.group.attention
        if self.backend == "flash_attn":
            self.attend = plan_flash_attention(shape.batch, shape.context + shape.chunk, self.device)
        elif self.backend == "flashinfer" and shape.chunk:
            self.attend = flashinfer_prefill
        elif self.backend == "flashinfer" and isinstance(attention, GroupedQueryAttention):
            heads, kv_heads = attention.num_heads // self.shard.tp, max(attention.num_kv_heads // self.shard.tp, 1)
            length = min(shape.context, attention.window_tokens or shape.context)
            self.attend = plan_flashinfer(shape.batch, length, heads, kv_heads, attention.head_dim, self.dtype)

    def run(self, shape: StepShape, mark: Mark) -> Tensor:
        """Run one step; call `mark` at every boundary between operators."""
        import torch

        with torch.inference_mode():
            mark("")
            hidden = torch.nn.functional.embedding(self.ids[: shape.num_tokens], self.embedding)
            mark("embedding")
            flow = LayerFlow(hidden, torch.zeros_like(hidden), shape)
            mark("")
            for weights, cache in zip(self.layers, self.caches, strict=True):
                self._layer(flow, weights, cache, mark)
            _norm(flow, self.norm)
            mark("final_norm")
            sampled = flow.hidden[:: max(shape.chunk, 1)].contiguous()
            mark("")
            logits = torch.nn.functional.linear(sampled, self.head)
            mark("lm_head")
            chosen = logits.float().argmax(dim=-1)
            mark("sample")
            return chosen

    def _layer(self, flow: LayerFlow, weights: dict[str, Tensor], cache: Tensor, mark: Mark) -> None:
        _norm(flow, weights["input_norm"])
        mark("input_norm")
        if isinstance(self.group.attention, GroupedQueryAttention):
            self._grouped_query(flow, weights, cache, mark)
        else:
            self._latent(flow, weights, cache, mark)
        if self.group.num_norms > 1:
            _norm(flow, weights["input_norm"])
            mark("post_attention_norm")
        if isinstance(self.group.feed_forward, DenseFeedForward):
            _feed_forward(flow, weights, "", self.group.feed_forward.gated, mark)
        elif isinstance(self.group.feed_forward, ExpertsFeedForward):
            self._experts(flow, weights, self.group.feed_forward, mark)

    def _grouped_query(self, flow: LayerFlow, weights: dict[str, Tensor], cache: Tensor, mark: Mark) -> None:
        import torch
        from torch.nn.functional import linear

        attention = self.group.attention
        assert isinstance(attention, GroupedQueryAttention)
        heads, kv_heads = attention.num_heads // self.shard.tp, max(attention.num_kv_heads // self.shard.tp, 1)
        tokens, dim = flow.hidden.shape[0], attention.head_dim
        projected = linear(flow.hidden, weights["qkv_proj"])
        mark("qkv_proj")
        gate_heads = heads if attention.output_gate else 0
        query, gate, key, value = projected.view(tokens, -1, dim).split([heads, gate_heads, kv_heads, kv_heads], dim=1)
        mark("")
        if attention.qk_norm:
            query = torch.nn.functional.rms_norm(query, (dim,), weights["qk_norm"])
            key = torch.nn.functional.rms_norm(key, (dim,), weights["qk_norm"])
            mark("qk_norm")
        if attention.rotary:
            query, key = _rotate(query, self.angles[:, :tokens]), _rotate(key, self.angles[:, :tokens])
            mark("rope")
        keys, values = self._write_cache(flow.shape, cache, key, value)
        mark("kv_cache_write")
        if attention.window_tokens and not flow.shape.chunk:
            keys, values = keys[:, -attention.window_tokens :], values[:, -attention.window_tokens :]
        queries = query.view(flow.shape.batch, -1, heads, dim)
        attended = self.attend(queries, keys, values).reshape(tokens, heads * dim)
        core = "window_attention" if attention.window_tokens else "attention"
        mark(f"{core}_{'prefill' if flow.shape.chunk else 'decode'}")
        if attention.output_gate:
            attended = attended * torch.sigmoid(gate.reshape(tokens, heads * dim))
            mark("attention_gate")
        flow.hidden = linear(attended, weights["o_proj"])
        mark("o_proj")

    def _write_cache(self, shape: StepShape, cache: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens; return the cache `[batch, context, heads, width]` of the step's requests."""
        length = shape.context + shape.chunk
        rows = cache[:, : shape.batch * length].view(2, shape.batch, length, *cache.shape[2:])
        new = max(shape.chunk, 1)
        rows[0, :, length - new :] = key.reshape(shape.batch, new, *key.shape[1:])
        rows[1, :, length - new :] = value.reshape(shape.batch, new, *value.shape[1:])
        return rows[0], rows[1]

    def _latent(self, flow: LayerFlow, weights: dict[str, Tensor], cache: Tensor, mark: Mark) -> None:
        """Run multi-head latent attention: expanded in prefill, absorbed in decode (arXiv:2405.04434, section 2.1)."""
        import torch
        from torch.nn.functional import linear

        attention = self.group.attention
        assert isinstance(attention, LatentAttention)
        tokens, heads = flow.hidden.shape[0], attention.num_heads // self.shard.tp
        rank, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
        nope, wide = attention.qk_nope_head_dim, attention.v_head_dim
        projected = linear(flow.hidden, weights["q_kv_a_proj"])
        mark("q_kv_a_proj")
        query, latent, key = projected.split([projected.shape[1] - rank - rope, rank, rope], dim=1)
        latent = torch.nn.functional.rms_norm(latent, (rank,), weights["latent_norm"])
        if attention.q_lora_rank is not None:
            query = torch.nn.functional.rms_norm(query, (attention.q_lora_rank,), weights["q_norm"])
        mark("latent_norm")
        if attention.q_lora_rank is not None:
            query = linear(query, weights["q_b_proj"])
            mark("q_b_proj")
        query = query.view(tokens, heads, nope + rope)
        angles = self.angles[:, :tokens]
        query_rope, key_rope = _rotate(query[..., nope:], angles), _rotate(key.unsqueeze(1), angles)
        mark("rope")
        entry = torch.cat([latent.unsqueeze(1), key_rope], dim=-1)
        cached, _ = self._write_cache(flow.shape, cache, entry, entry)
        cached = cached.squeeze(2)
        mark("kv_cache_write")
        up = weights["kv_b_proj"]
        if flow.shape.chunk:
            batch, length = cached.shape[:2]
            expanded = linear(cached[..., :rank], up).view(batch, length, heads, nope + wide)
            mark("kv_b_proj")
            shared = cached[..., rank:].unsqueeze(2).expand(batch, length, heads, rope)
            keys = torch.cat([expanded[..., :nope], shared], dim=-1)
            queries = torch.cat([query[..., :nope], query_rope], dim=-1)
            queries = queries.view(batch, -1, heads, nope + rope)
            attended = self.attend(queries, keys, expanded[..., nope:]).reshape(tokens, heads * wide)
            mark("latent_attention_prefill")
        else:
            by_head = up.view(heads, nope + wide, rank)
            absorbed = torch.einsum("thd,hdr->thr", query[..., :nope], by_head[:, :nope])
            queries = torch.cat([absorbed, query_rope], dim=-1)
            scores = torch.einsum("thr,tcr->thc", queries, cached) * (nope + rope) ** -0.5
            read = torch.einsum("thc,tcr->thr", scores.softmax(dim=-1), cached[..., :rank])
            attended = torch.einsum("thr,hdr->thd", read, by_head[:, nope:]).reshape(tokens, heads * wide)
            mark("latent_attention_decode")
        flow.hidden = linear(attended, weights["o_proj"])
        mark("o_proj")

    def _experts(self, flow: LayerFlow, weights: dict[str, Tensor], experts: ExpertsFeedForward, mark: Mark) -> None:
        """Sort tokens by their experts, run one grouped product over all experts, and put the rows back in place.

        Nothing is read back from the GPU on the way, so that a CUDA graph can hold it.
        """
        import torch
        from torch.nn.functional import linear

        inputs, top_k = flow.hidden, experts.experts_per_token
        logits = linear(inputs, weights["router"])
        mark("router")
        shares, chosen = torch.topk(logits.float().softmax(dim=-1), top_k, dim=-1)
        mark("top_k")
        sorted_experts, order = chosen.flatten().sort()
        numbers = torch.arange(weights["experts_up"].shape[0], device=inputs.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True).to(torch.int32)
        inner = _activate(_grouped_product(inputs[order // top_k], weights["experts_up"], ends), experts.gated)
        parts = _grouped_product(inner, weights["experts_down"], ends) * shares.flatten()[order, None].to(inputs.dtype)
        out = torch.empty_like(parts)
        out[order] = parts
        out = out.view(-1, top_k, out.shape[-1]).sum(dim=1)
        mark("experts")
        if experts.shared_intermediate_size:
            _feed_forward(flow, weights, "shared_", experts.gated, mark)
            out = out + flow.hidden
            mark("experts_sum")
        flow.hidden = out


def _grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows `[n, k]` by the matrices `[experts, m, k]` of their experts, whose rows end before `ends`."""
    import torch

    # Public since torch 2.10.
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


def operators_of(shard: Shard, group: LayerGroup, shape: StepShape) -> dict[str, Op]:
    """Launch name -> the operator that a step of this shape executes under that name in the layers of one group."""
    return {launch.name: launch.op for launch in forward_launches(of_group(shard, group), shape.step_batch)}


def _weights(shard: Shard, group: LayerGroup, matrix: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Create the matrices of one layer, by the names of their launches."""
    matrices = {"input_norm": matrix(shard.model.hidden_size)}
    for launch in token_launches(of_group(shard, group), 1):
        op = launch.op
        if isinstance(op, Gemm):
            matrices[launch.name] = matrix(op.n, op.k)
    attention, feed_forward = group.attention, group.feed_forward
    if isinstance(attention, GroupedQueryAttention):
        matrices["qk_norm"] = matrix(attention.head_dim)
    elif isinstance(attention, LatentAttention):
        heads = attention.num_heads // shard.tp
        matrices["kv_b_proj"] = matrix(
            heads * (attention.qk_nope_head_dim + attention.v_head_dim), attention.kv_lora_rank
        )
        matrices["latent_norm"] = matrix(attention.kv_lora_rank)
        matrices["q_norm"] = matrix(attention.q_lora_rank or 1)
    if isinstance(feed_forward, ExpertsFeedForward):
        local = feed_forward.num_experts // shard.parallelism.ep
        inner = feed_forward.intermediate_size // shard.parallelism.experts_tp
        width = shard.model.hidden_size
        matrices["experts_up"] = matrix(local, (2 if feed_forward.gated else 1) * inner, width)
        matrices["experts_down"] = matrix(local, width, inner)
    return matrices


def of_group(shard: Shard, group: LayerGroup) -> Shard:
    """Return the shard as if the model consisted of these layers alone."""
    return replace(shard, model=msgspec.structs.replace(shard.model, layers=(group,)))


def layer_weight_bytes(shard: Shard, group: LayerGroup) -> int:
    """Return the bytes of one layer's matrices on one rank."""
    total = 0.0
    for launch in token_launches(of_group(shard, group), 1):
        op = launch.op
        if isinstance(op, Gemm):
            total += launch.count / group.num_layers * op.n * op.k * BITS[op.format] / 8
        elif isinstance(op, Experts):
            expert_bytes = op.num_matrices * op.hidden_size * op.intermediate_size * BITS[op.format] / 8
            total += expert_bytes * op.num_experts / op.ep / op.tp
    return int(total)


def cache_token_bytes(shard: Shard, group: LayerGroup) -> int:
    """Return the bytes of a token in the cache of one layer."""
    heads, width, _ = _cache_widths(shard, group)
    return 2 * heads * width * int(BITS[shard.precision.weights]) // 8


def _cache_widths(shard: Shard, group: LayerGroup) -> tuple[int, int, int]:
    """Return the heads of a token's entry in the cache, the width of each, and the width that is rotated."""
    attention = group.attention
    if isinstance(attention, GroupedQueryAttention):
        return max(attention.num_kv_heads // shard.tp, 1), attention.head_dim, attention.head_dim
    assert isinstance(attention, LatentAttention)
    return 1, attention.kv_lora_rank + attention.qk_rope_head_dim, attention.qk_rope_head_dim


def _norm(flow: LayerFlow, weight: Tensor) -> None:
    """Add the residual, then normalise the sum."""
    import torch

    flow.residual = flow.residual + flow.hidden
    flow.hidden = torch.nn.functional.rms_norm(flow.residual, (weight.numel(),), weight)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply the rotary embedding, halves swapped (`rotate_half` of transformers' Llama)."""
    import torch

    first, second = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat([-second, first], dim=-1) * angles[1]


def _activate(x: Tensor, gated: bool) -> Tensor:
    from torch.nn.functional import gelu, silu

    if not gated:
        return gelu(x)
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def _feed_forward(flow: LayerFlow, weights: dict[str, Tensor], prefix: str, gated: bool, mark: Mark) -> None:
    from torch.nn.functional import linear

    up = f"{prefix}gate_up_proj" if gated else f"{prefix}up_proj"
    projected = linear(flow.hidden, weights[up])
    mark(up)
    inner = _activate(projected, gated)
    mark(f"{prefix}activation")
    flow.hidden = linear(inner, weights[f"{prefix}down_proj"])
    mark(f"{prefix}down_proj")
