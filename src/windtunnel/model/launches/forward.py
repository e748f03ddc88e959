"""A forward step as operators: the launches of one rank of every pipeline stage, from model, parallelism and formats.

The launches of pipeline stages follow one another, so that their sum is a batch's time through the pipeline. A step
has four parts, by what they depend on: `token_launches` on the tokens of the step, `head_launches`
on the positions sampled, `decode_launches` and `prefill_launches` (attention cores) on the context. Batch dimensions
may be arrays, so the same functions price one step for `explain` and a whole grid for the simulator.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from windtunnel.errors import InputError
from windtunnel.model.launches import context_parallel
from windtunnel.model.operators import BF16_BYTES, FP32_BYTES, Collective, Gemm, Launch, Op, Size
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Format
from windtunnel.model.sampling import sampling_launches
from windtunnel.model.shape import Attention, FeedForward, LayerGroup, Shard


def token_launches(shard: Shard, num_tokens: Size, tail_tokens: Size | None = None) -> list[Launch]:
    """Return what depends on the tokens of a step alone: all but the cores of attention and the head.

    Args:
        shard: the deployed model.
        num_tokens: tokens that one attention data-parallel rank computes.
        tail_tokens: those of them that layers compute of which only prompts' tails are read later; None: all.
    """
    tails = num_tokens if tail_tokens is None else tail_tokens
    layers = (
        (group.num_layers, _layer(shard, group, tails if _is_tail(group) else num_tokens))
        for group in shard.model.layers
    )
    embedding = shard.elementwise("embedding", num_tokens, 2 * shard.model.hidden_size * BF16_BYTES)
    inputs = shard.model.layer_inputs.step_launches(shard, num_tokens) if shard.model.layer_inputs else ()
    ngrams = shard.model.ngram_tables.launches(shard, num_tokens) if shard.model.ngram_tables else ()
    launches = [embedding, *shard.all_reduce("embedding_all_reduce", num_tokens), *inputs, *ngrams, *_repeated(layers)]
    launches.append(shard.norm("final_norm", num_tokens, shard.precision.lm_head))
    if shard.parallelism.pp > 1:
        # Hidden states and residual go to the next stage; a rank sends its share of them.
        message = num_tokens * shard.model.hidden_size * 2 * BF16_BYTES / shard.tp
        num_sends = shard.parallelism.pp - 1
        between_nodes = min(shard.span_nodes(shard.parallelism.num_devices) - 1, num_sends)
        within_node = num_sends - between_nodes
        for count, span_nodes in ((within_node, 1), (between_nodes, 2)):
            if count > 0:
                send = Collective("send_recv", message, 2, span_nodes)
                launches.append(Launch("pipeline_send_recv", send, count))
    return launches


def head_launches(shard: Shard, num_sampled: Size) -> list[Launch]:
    """Return the LM head over the sampled positions only, the gathering of its shards, and the sampler; or a pooler."""
    model, tp = shard.model, shard.tp
    if model.is_pooled:
        # The prompt's last hidden state becomes fp32 and is normalised, or scored (vLLM 0.33 `layers/pooler/`).
        pooled = [shard.elementwise("pooler", num_sampled, model.hidden_size * (BF16_BYTES + 3 * FP32_BYTES))]
        dense = Launch("score_dense", Gemm(num_sampled, model.hidden_size, model.hidden_size))
        return [*pooled, dense] if model.head == "score" else pooled
    vocabulary = -(-model.vocab_size // tp)
    launches = [Launch("lm_head", Gemm(num_sampled, vocabulary, model.hidden_size, shard.precision.lm_head))]
    if tp > 1:
        message = num_sampled * model.vocab_size * BF16_BYTES
        launches.append(Launch("logits_all_gather", shard.collective("all_gather", message, tp)))
    return [*launches, *sampling_launches(shard.sampler, num_sampled, model.vocab_size)]


def decode_launches(shard: Shard, batch: Size, context_tokens: Size) -> list[Launch]:
    """Return the attention cores of `batch` decoding requests with `context_tokens` keys each, the new one included."""
    attentions = shard.model.attentions
    if shard.parallelism.dcp > 1:
        divided = context_parallel.decode_launches
        return _repeated((num, divided(kind, shard, batch, context_tokens)) for num, kind in attentions)
    return _repeated((num, kind.decode_launches(shard, batch, context_tokens)) for num, kind in attentions)


def prefill_launches(shard: Shard, batch: Size, num_tokens: Size) -> list[Launch]:
    """Return the attention cores of prefill chunks, `batch` and `num_tokens` as in `operators.PrefillBatch`."""
    attentions = shard.model.attentions
    if shard.parallelism.dcp > 1:
        divided = context_parallel.prefill_launches
        return _repeated((num, divided(kind, shard, batch, num_tokens)) for num, kind in attentions)
    return _repeated(
        (num, kind.prefill_launches(shard, *_read_later(shard, kind, batch, num_tokens))) for num, kind in attentions
    )


def _is_tail(group: LayerGroup) -> bool:
    return group.attention is not None and group.attention.tail_tokens is not None


def _read_later(shard: Shard, kind: Attention, batch: Size, num_tokens: Size) -> tuple[Size, Size]:
    """Return `batch` and `num_tokens` of the part of prefill chunks that layers of `kind` compute: all, or their tails.

    The last r of c tokens that follow p others are a chunk of r after p + c - r, in the terms of `PrefillBatch`.
    """
    if not shard.prefills_tails or kind.tail_tokens is None:
        return batch, num_tokens
    chunk = num_tokens * np.minimum(batch, 1.0)
    tail = np.minimum(chunk, kind.tail_tokens)
    length = num_tokens + chunk - tail
    return np.maximum(batch, 1.0) * tail / length, length


def num_tail_tokens(shard: Shard, prefill_tokens: Size, length: Size) -> Size:
    """Return the tokens of prefill chunks that are read later: of `prefill_tokens` in chunks of `length`, as in
    `PrefillBatch`. All of them where the engine computes all."""
    tails = [kind.tail_tokens for _, kind in shard.model.attentions if kind.tail_tokens is not None]
    if not shard.prefills_tails or not tails:
        return prefill_tokens
    chunks = np.maximum(prefill_tokens / length, 1.0)
    return np.asarray(np.minimum(prefill_tokens, chunks * max(tails)), np.float64)


def tail_launches(shard: Shard, num_tokens: Size) -> list[Launch]:
    """Return the part of `token_launches` in layers of which only prompts' tails are read later."""
    return _repeated(
        (group.num_layers, _layer(shard, group, num_tokens)) for group in shard.model.layers if _is_tail(group)
    )


def _repeated(layers: Iterable[tuple[int, Any]]) -> list[Launch]:
    """Return the launches of one layer of each group, counted for all of its layers."""
    repeated: list[Launch] = []
    for num, launches in layers:
        for launch in launches if isinstance(launches, Iterable) else (launches,):
            if not isinstance(launch, Launch) or not isinstance(launch.op, Op):
                hint = "projections, launches and the like of a kind yield model.operators.Launch"
                raise InputError(f"a kind of layer launches {launch!r:.80}, which is no Launch of an operator", hint)
            repeated.append(replace(launch, count=launch.count * num))
    return repeated


@dataclass(frozen=True)
class StepBatch:
    """Tokens that one attention data-parallel rank computes in a step."""

    decode_requests: int = 0
    decode_context_tokens: float = 0.0
    """Mean context of the decoding requests, the token being computed included."""
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Query-key pairs of the prefill chunks: a chunk of c tokens after p has c (p + c / 2)."""
    sampled: int = 0
    """Decoding requests and prompts that end in this step."""

    @property
    def num_tokens(self) -> int:
        return self.decode_requests + self.prefill_tokens

    def tail_tokens(self, shard: Shard) -> float:
        """Return the tokens of the step that layers compute of which only prompts' tails are read later."""
        if not self.prefill_tokens:
            return self.decode_requests
        length = 2 * self.prefill_pairs / self.prefill_tokens
        return self.decode_requests + float(num_tail_tokens(shard, self.prefill_tokens, length))


def forward_launches(shard: Shard, batch: StepBatch) -> list[Launch]:
    """Return a whole step, in the order of execution of its first layer."""
    tokens = token_launches(shard, batch.num_tokens, batch.tail_tokens(shard))
    head = head_launches(shard, batch.sampled)
    return tokens + attention_launches(shard, batch) + head


def attention_launches(shard: Shard, batch: StepBatch) -> list[Launch]:
    """Return the attention cores of a step, those of its prefill chunks first."""
    launches = []
    if batch.prefill_tokens:
        length = 2 * batch.prefill_pairs / batch.prefill_tokens
        launches += prefill_launches(shard, batch.prefill_tokens / length, length)
    if batch.decode_requests:
        launches += decode_launches(shard, batch.decode_requests, batch.decode_context_tokens)
    return launches


def _layer(shard: Shard, group: LayerGroup, num_tokens: Size) -> Iterator[Launch]:
    attention, feed_forward = group.attention, group.feed_forward
    precision = shard.precision
    normed = feed_forward.input_format(shard) if feed_forward else Format.BF16
    yield from _entered(shard, "input_norm", num_tokens, precision.attention_format if attention else normed)
    if attention is not None:
        yield from shard.norm_gate(num_tokens)
        yield from attention.projections(shard, num_tokens)
        yield from shard.all_reduce("attention_all_reduce", num_tokens)
        yield from shard.mix("post", num_tokens)
    if group.num_norms > 1:
        yield from _entered(shard, "post_attention_norm", num_tokens, normed, group.num_norms - 1)
    if feed_forward is not None:
        if feed_forward.num_experts:
            yield from shard.norm_gate(num_tokens)
        if shard.parallelism.ffn is None:
            yield from feed_forward.launches(shard, num_tokens)
        else:
            # The feed-forward is on devices of its own; two transfers go there and back.
            yield from _their_launches(shard, feed_forward, num_tokens)
            yield replace(hop_launch(shard, num_tokens), count=2)
        yield from shard.mix("post", num_tokens)
    if inputs := shard.model.layer_inputs:
        yield from inputs.layer_launches(shard, num_tokens)


def _entered(shard: Shard, name: str, num_tokens: Size, output: Format, count: int = 1) -> Iterator[Launch]:
    """Yield the norm before a part of a layer; with several streams of the residual their mixing, which norms too
    (vLLM 0.24 `mhc_pre_tilelang`)."""
    if shard.model.residual_streams > 1:
        yield from shard.mix("pre", num_tokens)
    else:
        yield shard.norm(name, num_tokens, output, count)


HOP = "ffn_transfer"
"""Launch that sends hidden states from attention to feed-forward devices, or back."""


def attention_side(shard: Shard) -> Shard:
    """Return what the attention devices of a replica with `ffn` hold and compute: all but the feed-forwards. Without
    `ffn` they hold all of it."""
    if shard.parallelism.ffn is None:
        return shard
    layers = tuple(msgspec.structs.replace(group, feed_forward=None) for group in shard.model.layers)
    parallelism = msgspec.structs.replace(shard.parallelism, ffn=None)
    return replace(shard, model=msgspec.structs.replace(shard.model, layers=layers), parallelism=parallelism)


def feed_forward_side(shard: Shard) -> Shard:
    """Return the model as the feed-forward devices of a replica with `ffn` split it: experts over their groups, and
    the matrices of a model without experts over all devices."""
    side = shard.parallelism.ffn
    assert side is not None
    split = Parallelism(tp=side.devices)
    if shard.model.has_experts:
        split = Parallelism(attention_dp=side.devices, ep=side.groups)
    return replace(shard, parallelism=split)


def feed_forward_launches(shard: Shard, num_tokens: Size) -> list[Launch]:
    """Return the launches of all feed-forwards on one feed-forward device, where every attention data-parallel rank has
    `num_tokens`."""
    return _repeated((num, _their_launches(shard, part, num_tokens)) for num, part in shard.model.feed_forwards)


def hop_launch(shard: Shard, num_tokens: Size) -> Launch:
    """Return one transfer of the hidden states of `num_tokens` of every rank from attention to feed-forward devices.

    A token goes to each group that has one of its experts, and there to each device that has a part of it; with random
    routing to g (1 - (1 - 1/g)^k) of g groups for k experts. The way back, with their partial sums, is as long. The
    devices of a rank share its tokens, and the slower of senders and receivers decides; both directions in bf16.
    """
    side, shape = shard.parallelism.ffn, shard.parallelism
    assert side is not None
    chosen = max((getattr(part, "experts_per_token", 0) for _, part in shard.model.feed_forwards), default=0)
    copies = float(side.devices)
    if chosen:
        copies = side.devices * (1.0 - (1.0 - 1.0 / side.groups) ** chosen)
    sent = num_tokens * shard.model.hidden_size * BF16_BYTES * copies
    widest = max(1.0 / shape.tp, shape.attention_dp / side.devices)
    return Launch(HOP, Collective("send_recv", sent * widest, 2, min(shard.span_nodes(shape.num_devices), 2)))


def _their_launches(shard: Shard, feed_forward: FeedForward, num_tokens: Size) -> Iterator[Launch]:
    """Yield one feed-forward on its devices: with experts each takes its share of the tokens, and transfers stand for
    the dispatch and the sum; without, each computes its part for all tokens."""
    theirs = feed_forward_side(shard)
    tokens = num_tokens * shard.parallelism.attention_dp / theirs.parallelism.attention_dp
    for launch in feed_forward.launches(theirs, tokens):
        if theirs.parallelism.attention_dp == 1 or not isinstance(launch.op, Collective):
            yield launch
