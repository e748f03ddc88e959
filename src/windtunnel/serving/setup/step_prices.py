"""Lower an estimator to the arrays in which the serving loop looks up durations, and price single steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.arguments import checked
from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.hardware import Device
from windtunnel.model.attention.grouped_query import DecodeAttention
from windtunnel.model.feed_forward.experts import GROUP_LAUNCHES
from windtunnel.model.launches import forward
from windtunnel.model.operators import Launch, Op, Size
from windtunnel.model.sampling import mask_s
from windtunnel.model.shape import Shard
from windtunnel.pricing.estimator import Coverage, Estimate, Estimator
from windtunnel.pricing.roofline import machine
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.launches import decode_tokens, num_launches, unhidden_s
from windtunnel.serving.setup.overlap import (
    Beside,
    Halves,
    PingPong,
    expert_layers_share,
    launches_beside,
    part_of,
    room_beside,
)
from windtunnel.serving.state.records import StepCost

NODES_PER_OCTAVE = 4
"""Nodes of the attention grids: linear interpolation between them exceeds a quadratic by 0.75% at most."""


@dataclass(frozen=True, kw_only=True)
class PricedLaunch(Launch):
    """A launch of one step with its price."""

    estimate: Estimate

    @property
    def coverage(self) -> Coverage:
        return self.estimate.coverage

    @property
    def source(self) -> str:
        """Table or fit that the time comes from."""
        return self.estimate.source

    @property
    def each_s(self) -> float:
        """Seconds of one execution."""
        return float(np.asarray(self.estimate.seconds, np.float64))

    @property
    def total_s(self) -> float:
        """Seconds that all its executions add to the step: none beside launches that take longer."""
        return float(self.each_s * self.count * self.adds)


@dataclass(frozen=True)
class LoweredSteps:
    """A `StepCost`, and the parts of its times that explain a run."""

    cost: StepCost
    unhidden_s: Floats
    """[max_num_seqs + 1] the part of `cost.decode_token_s` and `cost.sample_s` that no operator holds: the host's, and
    gaps between kernels."""
    decode_communication_s: Floats
    """[max_num_seqs + 1] the part of `cost.decode_token_s` that is collectives."""
    mixed_token_s: Floats
    """[max tokens + 1] everything but attention and head, of a step in which every rank has so many tokens."""
    mixed_communication_s: Floats
    """[max tokens + 1] the part of `mixed_token_s` that is collectives."""
    decode_compute_s: Floats
    """[max_num_seqs + 1] time of decode operators at which arithmetic, not memory, is the tighter bound."""
    mixed_compute_s: Floats
    sides: PingPong | None = None
    """Of decode steps, `[max_num_seqs + 1, c]` over contexts as `cost.decode_attention_s`; None where every device
    computes attention and feed-forwards."""
    mixed_ffn_s: Floats | None = None
    """[max tokens + 1] the part of `mixed_token_s` on feed-forward devices; None likewise."""


Split = tuple[Floats, Floats, Floats]
"""Seconds of operators: all, those of collectives, those of compute-bound ones."""


@dataclass(frozen=True)
class StepPrices:
    """Prices of every step that an engine can form, at the nodes of grids; linear in the operators' seconds.

    Prices of parts of the operators add up to those of all: a calibration is fitted on such parts.
    """

    shard: Shard
    engine: EngineSettings
    token_nodes: Floats
    """Tokens of one rank."""
    token: Split
    """At `token_nodes`: everything that depends on the tokens alone."""
    group: Floats
    """At `token_nodes`: the part of `token` that the ranks of an attention data-parallel group do together."""
    sampled_nodes: Floats
    head: Split
    """At `sampled_nodes`: LM head and sampling."""
    batch_nodes: Floats
    context_nodes: Floats
    decode: Floats
    """Decode attention, at `batch_nodes` x `context_nodes`."""
    chunk_nodes: Floats
    length_nodes: Floats
    prefill: Floats
    """Prefill attention, at `chunk_nodes` x `length_nodes`, less what layers leave out of `token` for tokens that no
    other reads."""
    queries: int = 1
    """Tokens that a decode step computes for each request: more than one with speculative decoding."""
    draft: Floats | None = None
    """[max_num_seqs + 1] drafting for so many requests; None without speculative decoding."""
    longest_share: float = 0.0
    """As `StepCost.longest_share`."""
    repeated_share: float = 1.0
    """As `StepCost.repeated_share`."""
    waiting: Floats | None = None
    """The part of `decode` of kernels that wait for their longest request; None where none does."""
    sides: PingPong | None = None
    """As `LoweredSteps.sides`, at `batch_nodes` x `context_nodes`; of a step of all prices, not of parts of them."""
    ffn: Floats | None = None
    """At `token_nodes`: the part of `token` on feed-forward devices."""
    halves: Halves | None = None
    """At `token_nodes`, and at `batch_nodes` x `context_nodes`: half a step; None where none is split in two."""
    beside: Beside | None = None
    """At `token_nodes`; None without single-batch overlap."""

    def _at_every_batch(self, grid: Floats) -> Floats:
        """Interpolate a grid over `batch_nodes` at every number of requests."""
        upto = np.arange((self.engine.max_num_seqs or 0) + 1)
        columns = [np.interp(upto, self.batch_nodes, column) for column in grid.T]
        return np.ascontiguousarray(np.stack(columns, axis=1))

    def _by_batch(self) -> tuple[PingPong | None, Floats, Floats]:
        """Return the sides of a decode step, and decode attention in steps without prompts and with some, at every
        number of requests. With sides the whole pipeline is in the former; steps with prompts take one after the other.
        """
        decode_s = self._at_every_batch(self.decode)
        if self.halves is not None:
            return None, self._overlapped_decode_s(decode_s, self.halves), decode_s
        if self.sides is None:
            return None, decode_s, np.zeros((0, 0))
        return self.sides.mapped(self._at_every_batch), self._at_every_batch(self.sides.step_s), decode_s

    def _overlapped_decode_s(self, decode_s: Floats, halves: Halves) -> Floats:
        """Return decode attention at every number of requests, less what it hides beyond what `token` has hidden."""
        tokens = decode_tokens(self.engine, decode_s.shape[0] - 1, self.queries)
        cores_s = self._at_every_batch(halves.cores_s)
        padded = np.minimum(tokens, self.token_nodes[-1])
        here = Halves._make([*(np.interp(padded, self.token_nodes, part)[:, None] for part in halves[:-1]), cores_s])
        further_s = here.hidden_s(expert_layers_share(self.shard) * cores_s) - here.hidden_s()
        is_split = tokens >= (self.engine.overlap_decode_tokens or 1)
        return np.where(is_split[:, None], 2 * cores_s - further_s, decode_s)

    def _waiting(self, waiting: Floats, tokens: Ints) -> dict[str, Any]:
        """Return the fields of `StepCost` on kernels that wait; `tokens` of decode steps, as padded to a graph."""
        padded = np.minimum(-(-tokens // self.queries), tokens.size - 1)
        return {"waiting_attention_s": self._at_every_batch(waiting), "padded_requests": padded}

    def _split_in_two(self, least_tokens: int | None) -> tuple[Split, Floats]:
        """Return `token` and `group` where steps of at least so many tokens are computed in halves."""
        if self.halves is None:
            hidden_s = 0.0 if self.beside is None else self.beside.hidden_s()
            all_s, communication_s, compute_s = self.token
            return (all_s - hidden_s, communication_s - hidden_s, compute_s), self.group - hidden_s
        halves, hidden_s = self.halves, self.halves.hidden_s()
        is_split = self.token_nodes >= (least_tokens or 1)
        both = (2 * halves.token_s - hidden_s, 2 * halves.communication_s - hidden_s, 2 * halves.compute_s)
        all_s, communication_s, compute_s = (np.where(is_split, *pair) for pair in zip(both, self.token, strict=True))
        return (all_s, communication_s, compute_s), np.where(is_split, 2 * halves.group_s - hidden_s, self.group)

    def _by_rank(self, token_s: Floats, group: Floats) -> tuple[Floats, Floats]:
        """Return `StepCost.group_token_s`, and what is left of `token_s`, `[tokens + 1]`, without it."""
        ranks, every = self.shard.parallelism.attention_dp, np.arange(token_s.size, dtype=np.float64)
        if ranks == 1:
            return np.zeros(1), token_s
        group_token_s = np.interp(np.arange(ranks * (token_s.size - 1) + 1) / ranks, self.token_nodes, group)
        return group_token_s, token_s - np.interp(every, self.token_nodes, group)

    def lowered(self) -> LoweredSteps:
        """Return the arrays in which the loop looks up durations, the host's overheads included."""
        engine, host = self.engine, self.engine.host
        assert engine.max_num_seqs is not None
        most_tokens = int(self.token_nodes[-1])
        every = np.arange(most_tokens + 1, dtype=np.float64)
        mixed, group = self._split_in_two(engine.overlap_prefill_tokens)
        token_s, communication_s, compute_s = (np.interp(every, self.token_nodes, part) for part in mixed)
        group_token_s, rank_token_s = self._by_rank(token_s, group)
        split, _ = self._split_in_two(engine.overlap_decode_tokens)
        decode = [np.interp(every, self.token_nodes, part) for part in split]
        upto = np.arange(engine.max_num_seqs + 1)
        verified = decode_tokens(engine, engine.max_num_seqs, self.queries)
        positions = np.arange(self.queries * engine.max_num_seqs + 1)
        draft_s = np.zeros(1) if self.draft is None else self.draft
        not_hidden_s = np.asarray(unhidden_s(self.shard, engine, upto), np.float64)
        unhidden_step_s = float(host.unhidden_step_s or 0.0)
        of_requests_s = not_hidden_s - unhidden_step_s
        launch_s, (head_s, head_communication_s, head_compute_s) = float(host.launch_s or 0.0), self.head

        def at_padded(by_token: Floats, by_sample: Floats) -> Floats:
            return by_token[np.minimum(verified, most_tokens)] + np.interp(verified, self.sampled_nodes, by_sample)

        sides, decode_s, mixed_s = self._by_batch()
        apart = float(sides is None)
        cost = StepCost(
            decode_token_s=at_padded(decode[0] * apart, head_s) + draft_s + of_requests_s,
            mixed_token_s=rank_token_s,
            sample_s=np.interp(positions, self.sampled_nodes, head_s) + of_requests_s[positions // self.queries],
            context_nodes=self.context_nodes,
            decode_attention_s=decode_s,
            chunk_nodes=self.chunk_nodes,
            length_nodes=self.length_nodes,
            prefill_attention_s=np.array(self.prefill, order="C"),
            host_step_s=float(host.step_s or 0.0),
            host_request_s=float(host.request_s or 0.0) + mask_s(self.shard.sampler),
            host_overlaps=int(bool(engine.async_scheduling)),
            recorded_step_s=np.zeros(0),
            group_token_s=group_token_s,
            launch_s=launch_s * num_launches(self.shard, engine, every),
            decode_launch_s=launch_s * num_launches(self.shard, engine, self.queries * upto, self.queries),
            draft_s=draft_s,
            mixed_decode_attention_s=mixed_s,
            longest_share=self.longest_share,
            repeated_share=self.repeated_share,
            **({} if self.waiting is None else self._waiting(self.waiting, verified)),
            unhidden_step_s=unhidden_step_s,
        )
        return LoweredSteps(
            cost=cost,
            unhidden_s=not_hidden_s,
            decode_communication_s=at_padded(decode[1] * apart, head_communication_s),
            mixed_token_s=token_s,
            mixed_communication_s=communication_s,
            decode_compute_s=at_padded(decode[2] * apart, head_compute_s),
            mixed_compute_s=compute_s,
            sides=sides,
            mixed_ffn_s=None if self.ffn is None else np.interp(every, self.token_nodes, self.ffn),
        )


class DeployedModel(NamedTuple):
    """A model as an engine serves it, which decides what steps there can be."""

    device: Device
    """Its peak rates tell which operators arithmetic bounds."""
    shard: Shard
    engine: EngineSettings
    """Resolved."""
    max_model_len: int
    """Tokens of the longest request; the grids end there."""
    drafter: Shard | None = None
    """The model that drafts, with speculative decoding; None where drafting costs nothing."""


def price_steps(estimator: Estimator, deployed: DeployedModel) -> StepPrices:
    """Price every step that the engine can form.

    With speculative decoding a decode step verifies `num_draft_tokens` + 1 tokens for each request: dense operators at
    so many tokens, attention as the slower of reading the cache once and computing all queries at the device's peak.
    Drafting comes before it, a pass of the drafter for every draft token.
    """
    device, shard, engine, max_model_len, drafter = deployed
    queries = 1 if engine.speculative is None else engine.speculative.num_draft_tokens + 1
    assert engine.max_num_seqs is not None
    pricer = _Pricer(estimator, device)
    widest = max(engine.max_num_batched_tokens or 0, engine.max_prefill_tokens or 0)
    tokens = token_nodes(most_tokens := widest + queries * engine.max_num_seqs)
    launches = forward.token_launches(shard, tokens)
    group = np.zeros(tokens.size)
    if shard.parallelism.attention_dp > 1 and shard.parallelism.ffn is None:
        group = group + pricer.total(launch for launch in launches if launch.name in GROUP_LAUNCHES)[0]
    most_sampled = max(int(decode_tokens(engine, engine.max_num_seqs, queries).max()), queries * engine.max_num_seqs)
    sampled = token_nodes(max(most_sampled, 2))
    contexts, batches = geometric_nodes(max_model_len), batch_nodes(engine.max_num_seqs)
    chunks, lengths = geometric_nodes(most_tokens), geometric_nodes(2 * max_model_len)
    decode = pricer.decode_s(shard, batches, contexts)
    sides, ffn = None, None
    if shard.parallelism.ffn is not None:
        ffn = pricer.total(forward.feed_forward_launches(shard, tokens))[0]
        sides = price_sides(estimator, device, shard, engine, decode_nodes=(batches, contexts))
        pricer.longest_share, pricer.waiting_s = 0.0, None
    longest_share, waiting = pricer.longest_share, pricer.waiting_s
    cores = pricer.decode_s(shard, batches / 2, contexts) if engine.two_batch_overlap else None
    if queries > 1:
        drafting = _drafting_s(pricer, drafter, queries, batches, contexts)
        decode = np.maximum(decode, queries * _ideal_compute_s(shard, device, batches, contexts)) + drafting
        if cores is not None:
            cores = np.maximum(cores, queries * _ideal_compute_s(shard, device, batches / 2, contexts)) + drafting / 2
    return StepPrices(
        shard=shard,
        engine=engine,
        token_nodes=tokens,
        token=pricer.total(launches),
        group=group,
        sampled_nodes=sampled,
        head=pricer.total(forward.head_launches(shard, sampled)),
        batch_nodes=batches,
        context_nodes=contexts,
        decode=decode,
        chunk_nodes=chunks,
        length_nodes=lengths,
        prefill=_prefill_s(pricer, shard, tokens, chunks, lengths),
        queries=queries,
        draft=_draft_s(pricer, drafter, queries, engine.max_num_seqs),
        longest_share=longest_share,
        repeated_share=repeated_share(device, shard) if sides is None and queries == 1 else 1.0,
        waiting=waiting,
        sides=sides,
        ffn=ffn,
        halves=None if cores is None else price_halves(estimator, device, shard, tokens, cores),
        beside=price_beside(estimator, device, shard, tokens) if engine.single_batch_overlap else None,
    )


def _prefill_s(pricer: _Pricer, shard: Shard, tokens: Floats, chunks: Floats, lengths: Floats) -> Floats:
    """Return `StepPrices.prefill`; `tokens` are its `token_nodes`."""
    cores_s = pricer.over_grid(chunks, lengths, lambda all_, each: forward.prefill_launches(shard, all_ / each, each))
    if not shard.prefills_tails or not (launches := forward.tail_launches(shard, tokens)):
        return cores_s
    tail_s = pricer.total(launches)[0]
    prefilled, length = np.meshgrid(chunks, lengths, indexing="ij")
    read = forward.num_tail_tokens(shard, prefilled, length)
    return cores_s - np.interp(prefilled, tokens, tail_s) + np.interp(read, tokens, tail_s)


def price_halves(estimator: Estimator, device: Device, shard: Shard, tokens: Floats, cores_s: Floats) -> Halves:
    """Price half of steps whose whole has so many tokens on a rank; `cores_s` is the half's decode attention."""
    pricer, launches = _Pricer(estimator, device), forward.token_launches(shard, tokens / 2)
    seconds = dict.fromkeys(("rest", "experts", "dispatch", "combine"), np.zeros(tokens.size))
    for launch in launches:
        seconds[part_of(launch)] = seconds[part_of(launch)] + room_beside(launch, device) * pricer.total([launch])[0]
    seconds["rest"] = seconds["rest"] * expert_layers_share(shard)
    group = pricer.total(launch for launch in launches if launch.name in GROUP_LAUNCHES)[0]
    return Halves._make([*pricer.total(launches), group, *seconds.values(), cores_s])


def price_beside(estimator: Estimator, device: Device, shard: Shard, tokens: Floats) -> Beside:
    """Price what single-batch overlap sets beside each other in steps with so many tokens on a rank."""
    pricer, parts = _Pricer(estimator, device), np.zeros((len(Beside._fields), tokens.size))
    for launch in forward.token_launches(shard, tokens):
        shares = launches_beside(launch, device)
        if any(shares):
            parts += np.outer(shares, pricer.total([launch])[0])
    return Beside._make(parts)


ATTAINED = 0.87
"""Share of memory's peak rate at which decode attention reads: 2.9 of 3.35 TB/s in vLLM 0.24 on an H100
(benchmarks/measured/h100, steps of `cache-off/prefix`)."""


def repeated_share(device: Device, shard: Shard) -> float:
    """Return what reading KV again from the L2 cache takes over reading it from memory; see `StepCost.repeated_share`.

    1.0 where the rate of the cache is not known, and for models whose attention is not all over the whole context of
    grouped queries: latent attention is bound by arithmetic, and a window lies behind the shared beginning.
    """
    launches = forward.decode_launches(shard, np.ones(1), np.ones(1))
    is_plain = all(type(launch.op) is DecodeAttention and not launch.op.window_tokens for launch in launches)
    if device.l2_bytes_per_s is None or not is_plain:
        return 1.0
    return min(ATTAINED * device.memory_bytes_per_s / device.l2_bytes_per_s, 1.0)


def price_sides(
    estimator: Estimator, device: Device, shard: Shard, engine: EngineSettings, decode_nodes: tuple[Floats, Floats]
) -> PingPong:
    """Price a layer on both sides for one of a step's micro-batches, over the grid batches x contexts.

    Each has its share of the requests, padded to a CUDA graph; layers of several kinds count with their mean.
    """
    assert shard.parallelism.ffn is not None
    pricer, (batches, contexts) = _Pricer(estimator, device), decode_nodes
    count = np.minimum(shard.parallelism.ffn.microbatches, batches)
    padded = decode_tokens(engine, int(batches[-1]))
    tokens = padded[np.ceil(batches / count).astype(np.int64)].astype(np.float64)
    attention_s = pricer.total(forward.token_launches(forward.attention_side(shard), tokens))[0][:, None]
    attention_s = attention_s + pricer.decode_s(shard, batches / count, contexts)
    ffn_s = pricer.total(forward.feed_forward_launches(shard, tokens))[0]
    hop_s = pricer.total([forward.hop_launch(shard, tokens)])[0]
    layers, every = shard.model.num_layers, np.ones(contexts.size)
    return PingPong(
        attention_s / layers, np.outer(ffn_s / layers, every), np.outer(hop_s, every), np.outer(count, every), layers
    )


def _drafting_s(pricer: _Pricer, drafter: Shard | None, queries: int, batches: Floats, contexts: Floats) -> Floats:
    """Return seconds of decode attention of all drafts of a step, over the grid batches x contexts."""
    if drafter is None:
        return np.zeros((batches.size, contexts.size))
    return (queries - 1) * pricer.decode_s(drafter, batches, contexts)


def _draft_s(pricer: _Pricer, drafter: Shard | None, queries: int, max_num_seqs: int) -> Floats | None:
    """Seconds to draft for 0 to `max_num_seqs` requests, attention apart; None without speculative decoding."""
    if drafter is None:
        return np.zeros(max_num_seqs + 1) if queries > 1 else None
    nodes, batches = token_nodes(max(max_num_seqs, 2)), np.arange(max_num_seqs + 1)
    pass_s = (
        pricer.total(forward.token_launches(drafter, nodes))[0] + pricer.total(forward.head_launches(drafter, nodes))[0]
    )
    return np.asarray((queries - 1) * np.interp(batches, nodes, pass_s) * (batches > 0))


@dataclass(frozen=True)
class Pricing:
    """An estimator that is one function."""

    estimate: Callable[[Op], Estimate]


def priced_parts(
    estimator: Estimator, deployed: DeployedModel, split: Callable[[Op], Mapping[str, Floats]]
) -> dict[str, StepPrices]:
    """Price every step that the engine can form, part by part; the parts add up to the whole (`combined`).

    `split` is operator -> part -> its share of the operator's time, at every point of its axes; shares sum to 1.
    """
    answers: list[tuple[Estimate, Mapping[str, Floats]]] = []

    def recorded(op: Op) -> Estimate:
        answers.append((estimator.estimate(op), split(op)))
        return answers[-1][0]

    def replayed(name: str) -> Callable[[Op], Estimate]:
        remaining = iter(answers)

        def estimate(_op: Op) -> Estimate:
            whole, parts = next(remaining)
            return replace(whole, seconds=np.asarray(whole.seconds) * parts.get(name, np.asarray(0.0)))

        return estimate

    price_steps(Pricing(recorded), deployed)
    names = dict.fromkeys(name for _, parts in answers for name in parts)
    return {name: price_steps(Pricing(replayed(name)), deployed) for name in names}


def combined(parts: Mapping[str, StepPrices], weights: Mapping[str, float]) -> StepPrices:
    """Return the weighted sum of prices at equal nodes."""
    first = next(iter(parts.values()))

    def total(of: Callable[[StepPrices], Floats]) -> Floats:
        return np.asarray(sum(weights[name] * of(part) for name, part in parts.items()), np.float64)

    def split(of: Callable[[StepPrices], Split]) -> Split:
        seconds, communication, compute = (total(lambda part, i=i: of(part)[i]) for i in range(3))  # type: ignore[misc]
        return seconds, communication, compute

    def fields(of: Callable[[StepPrices], Halves | Beside | None]) -> Iterable[Floats]:
        return (total(lambda part, i=i: of(part)[i]) for i in range(len(of(first) or ())))  # type: ignore[misc,index]

    return replace(
        first,
        token=split(lambda part: part.token),
        group=total(lambda part: part.group),
        head=split(lambda part: part.head),
        decode=total(lambda part: part.decode),
        prefill=total(lambda part: part.prefill),
        waiting=None if first.waiting is None else total(lambda part: np.asarray(part.waiting)),
        halves=None if first.halves is None else Halves._make(fields(lambda part: part.halves)),
        beside=None if first.beside is None else Beside._make(fields(lambda part: part.beside)),
    )


def lower_steps(estimator: Estimator, deployed: DeployedModel) -> LoweredSteps:
    """Return `price_steps` as the arrays in which the loop looks up durations."""
    return price_steps(estimator, deployed).lowered()


@checked
def price_step(estimator: Estimator, shard: Shard, batch: forward.StepBatch) -> list[PricedLaunch]:
    """Price every launch of one step."""
    return [price_launch(estimator, launch) for launch in forward.forward_launches(shard, batch)]


def price_launch(estimator: Estimator, launch: Launch) -> PricedLaunch:
    """Price one launch."""
    return PricedLaunch(**vars(launch), estimate=estimator.estimate(launch.op))


def token_nodes(limit: int) -> Floats:
    """Return token counts to price exactly: each to 512, then each multiple of 64 and the next, where tiles are added.

    Measured against every count from 65 to 4,352 (Llama-3.1-8B, Qwen3-30B-A3B and DeepSeek-V2-Lite on H100): 90% of the
    look-ups within 0.2%; with eight nodes an octave, 3%.
    """
    tiles = np.arange(512, limit + 64, 64)
    return _upto(np.unique([*range(1, 513), *tiles, *(tiles + 1)]), limit)


def batch_nodes(limit: int) -> Floats:
    """Return batch sizes to price decode attention at, which is smooth in them: each to 64, then eight an octave."""
    return _upto(np.unique([*range(1, 65), *np.round(64 * 2.0 ** (np.arange(200) / 8))]), limit)


def _upto(nodes: NDArray[Any], limit: int) -> Floats:
    """Return the ascending nodes to the first that is at least `limit`.

    A shorter grid is the beginning of a longer one, so that a step's price does not depend on how far its grid reaches.
    """
    return nodes[: int(np.searchsorted(nodes, limit)) + 1].astype(np.float64)


def geometric_nodes(limit: int) -> Floats:
    """Return `NODES_PER_OCTAVE` nodes an octave from 1 to `limit` or just beyond."""
    octaves = np.log2(max(limit, 2))
    return 2.0 ** (np.arange(int(np.ceil(octaves * NODES_PER_OCTAVE)) + 1) / NODES_PER_OCTAVE)


def is_compute_bound(op: Op, device: Device) -> Bools:
    """Whether `op` takes longer at the device's peak rate than at its memory bandwidth, at each point of its axes."""
    peak = machine(device, op.compute_format)
    return np.asarray(op.flops / peak.flops_per_s > op.num_bytes / peak.bytes_per_s)


class _Pricer:
    """Sums launches by what bounds them."""

    def __init__(self, estimator: Estimator, device: Device) -> None:
        self.estimator = estimator
        self.device = device
        self.longest_share = 0.0
        self.waiting_s: Floats | None = None

    def total(self, launches: Iterable[Launch]) -> Split:
        """Return seconds of all, of collectives and of compute-bound operators at every point of the axes."""
        total: Size = 0.0
        communication: Size = 0.0
        compute: Size = 0.0
        for launch in launches:
            seconds = np.asarray(self.estimator.estimate(launch.op).seconds, np.float64) * launch.count * launch.adds
            total = total + seconds
            if launch.op.is_communication:
                communication = communication + seconds
            else:
                compute = compute + seconds * is_compute_bound(launch.op, self.device)
        return np.asarray(total), np.asarray(communication) + 0.0 * total, np.asarray(compute) + 0.0 * total

    def over_grid(self, first: Floats, second: Floats, launches: Callable[[Floats, Floats], list[Launch]]) -> Floats:
        """Return seconds over the grid first x second."""
        a, b = np.meshgrid(first, second, indexing="ij")
        seconds, _, _ = self.total(launches(a.ravel(), b.ravel()))
        return np.broadcast_to(seconds, a.size).reshape(a.shape)

    def decode_s(self, shard: Shard, batches: Floats, contexts: Floats) -> Floats:
        """Return seconds of decode attention over the grid batches x contexts.

        Notes the part of kernels that wait for the longest request of a batch.
        """
        a, b = np.meshgrid(batches, contexts, indexing="ij")
        total = np.zeros(a.size)
        self.longest_share, self.waiting_s = 0.0, None
        for launch in forward.decode_launches(shard, a.ravel(), b.ravel()):
            estimate = self.estimator.estimate(launch.op)
            seconds = np.asarray(estimate.seconds, np.float64) * launch.count * launch.adds
            total = total + seconds
            if estimate.longest_share and not getattr(launch.op, "window_tokens", 0):
                self.longest_share = estimate.longest_share
                waiting_s = np.broadcast_to(seconds, a.size).reshape(a.shape)
                self.waiting_s = waiting_s if self.waiting_s is None else self.waiting_s + waiting_s
        return total.reshape(a.shape)


def _ideal_compute_s(shard: Shard, device: Device, batches: Floats, context: Floats) -> Floats:
    """Return seconds of decode attention's arithmetic alone, at the device's peak, over the grid batches x context."""
    a, b = np.meshgrid(batches, context, indexing="ij")
    total: Size = 0.0
    for launch in forward.decode_launches(shard, a.ravel(), b.ravel()):
        total = total + launch.count * launch.op.flops / machine(device, launch.op.compute_format).flops_per_s
    return np.broadcast_to(np.asarray(total), a.size).reshape(a.shape)
