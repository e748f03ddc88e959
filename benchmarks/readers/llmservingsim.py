"""LLMServingSim's layer profiles (casys-kaist/LLMServingSim, its profiler's version 1): kernels of a vLLM model runner
timed one by one, as the cost of every step that the engine forms.

Files, gzipped CSV with a row a measured point, times in microseconds: `v1_dense` (a layer at so many tokens),
`v1_per_sequence` (LM head and sampler at so many sequences), `v1_attention` (attention of a layer, for a chunk of
`prefill_chunk` tokens after `kv_prefill` and `n_decode` requests with `kv_decode` keys each), and `v1_moe` (router and
experts of a layer, for so many tokens that choose so many experts between them). The devices of a tensor parallel group
are profiled without their all-reduce, which the profile does not hold.

In one kernel with a prompt, decoding requests take 1.3 to 3.6 times what they take alone on the profiled cards
(FlashAttention 2 lets the query heads of a KV head share its keys only where every query is a single token:
`seqlenq_ngroups_swapped` in flash_api.cpp). Both are priced apart.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.launches import decode_tokens, num_launches
from windtunnel.serving.state.records import StepCost

Floats = NDArray[np.float64]
Curve = tuple[Floats, Floats]
"""Nodes, ascending, and seconds."""

ONCE = ("embedding", "final_layernorm")
A_LAYER: Mapping[str, int] = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""Kernel of a layer -> how often a layer runs it; one that the profile lacks is not in the model."""

NEEDED = ("qkv_proj", "o_proj", "layernorm")
FEED_FORWARD = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class LayerProfile:
    """The measured kernels of one model on one GPU at one tensor parallelism."""

    dense_s: Mapping[str, Curve]
    """Layer -> tokens, ascending, and seconds."""
    sequence_s: Mapping[str, Curve]
    """`lm_head` and `sampler` -> sequences and seconds."""
    decode_s: Mapping[tuple[int, int], float]
    """(requests, keys of each) -> seconds of one layer's attention."""
    prefill_s: Mapping[tuple[int, int], float]
    """(tokens of the chunk, tokens before it) -> the same."""
    beside_s: Mapping[tuple[int, int], float]
    """(requests, keys of each) -> what they add to the attention of a chunk: the median over the measured chunks."""
    experts_s: Mapping[int, Curve]
    """Experts that a step's tokens choose -> tokens, ascending, and seconds of a layer's experts; empty: none."""


def read_layer_profile(folder: Path, gpu: str, model: str, tp: int) -> LayerProfile:
    """Read the profile of `model` on `gpu` from the files in `folder`; `v1_moe` where a model has no dense
    feed-forward.

    Raises:
        InputError: a file is missing or malformed, or holds no such model on such a GPU.
    """
    profiled = (gpu, model, str(tp))
    dense = _curves(folder / "v1_dense.csv.gz", "tokens", profiled)
    missing = [name for name in (*NEEDED, *FEED_FORWARD) if name not in dense]
    experts = {}
    if missing and not set(missing) - set(FEED_FORWARD):
        chosen = _curves(folder / "v1_moe.csv.gz", "tokens", profiled, by="activated_experts")
        experts = {int(count): curve for count, curve in chosen.items()}
    if missing and not experts:
        raise InputError(f"{folder} has no {missing[0]} of {model} on {gpu} with tp = {tp}")
    decode, prefill, mixed = {}, {}, {}
    for row in _rows(folder / "v1_attention.csv.gz", profiled):
        chunk, before, requests, keys = (_whole(row, name) for name in _ATTENTION)
        if chunk == 0:
            decode[requests, keys] = _seconds(row)
        elif requests == 0:
            prefill[chunk, before] = _seconds(row)
        else:
            mixed[chunk, before, requests, keys] = _seconds(row)
    sequences = _curves(folder / "v1_per_sequence.csv.gz", "sequences", profiled)
    return LayerProfile(dense, sequences, decode, prefill, _beside(mixed, prefill), experts)


def _beside(
    mixed: Mapping[tuple[int, int, int, int], float], prefill: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    added: dict[tuple[int, int], list[float]] = {}
    for (chunk, before, requests, keys), seconds in mixed.items():
        if (chunk, before) in prefill:
            added.setdefault((requests, keys), []).append(seconds - prefill[chunk, before])
    return {point: max(float(np.median(seconds)), 0.0) for point, seconds in added.items()}


def layer_steps(
    profile: LayerProfile,
    shard: Shard,
    engine: EngineSettings,
    max_model_len: int,
    all_reduce_s: Floats | None = None,
    exchange_s: Floats | None = None,
) -> StepCost:
    """Return the profile as the arrays that the loop looks durations up in.

    Args:
        profile: profile of the model and parallelism of `shard`.
        shard: gives the number of layers.
        engine: resolved settings, with the host's overheads.
        max_model_len: tokens of the longest request.
        all_reduce_s: `[max_num_batched_tokens + max_num_seqs + 1]` seconds of one all-reduce by tokens; a layer has
            two; None where tp is 1.
        exchange_s: `[ranks * (max_num_batched_tokens + max_num_seqs) + 1]` seconds, by tokens of all ranks, in which
            the ranks of attention data parallelism gather tokens before a layer's experts and scatter them after; None
            for one rank.
    """
    assert engine.max_num_seqs is not None
    assert engine.max_num_batched_tokens is not None
    layers, max_requests, ranks = shard.model.num_layers, engine.max_num_seqs, shard.parallelism.attention_dp
    tokens = np.arange(engine.max_num_batched_tokens + max_requests + 1, dtype=np.float64)
    requests = np.arange(max_requests + 1, dtype=np.float64)
    token_s = _token_seconds(profile, layers, tokens, all_reduce_s)
    group_s = np.zeros(ranks * (tokens.size - 1) + 1)
    if profile.experts_s:
        group_s = _experts_seconds(profile.experts_s, shard, np.arange(group_s.size, dtype=np.float64))
    if exchange_s is not None:
        group_s = group_s + layers * exchange_s
    together_s = token_s + group_s[::ranks]
    host = engine.host
    unhidden_s = float(host.unhidden_request_s or 0.0) * requests
    sample_s = sum((_at(curve, requests) for curve in profile.sequence_s.values()), np.zeros(requests.size))
    padded = decode_tokens(engine, max_requests)
    context = np.array(sorted({keys for _, keys in profile.decode_s}), np.float64)
    chunks, lengths, prefill_s = _prefill_grid(profile, max_model_len)
    return StepCost(
        decode_token_s=together_s[padded] + sample_s[np.minimum(padded, max_requests)] + unhidden_s,
        mixed_token_s=token_s if ranks > 1 else together_s,
        sample_s=sample_s + unhidden_s,
        context_nodes=context,
        decode_attention_s=layers * _decode_grid(profile.decode_s, context, requests),
        chunk_nodes=chunks,
        length_nodes=lengths,
        prefill_attention_s=layers * prefill_s,
        host_step_s=float(host.step_s or 0.0),
        unhidden_step_s=float(host.unhidden_step_s or 0.0),
        host_request_s=float(host.request_s or 0.0),
        host_overlaps=int(bool(engine.async_scheduling)),
        recorded_step_s=np.zeros(0),
        group_token_s=group_s if ranks > 1 else np.zeros(1),
        launch_s=float(host.launch_s or 0.0) * num_launches(shard, engine, tokens),
        mixed_decode_attention_s=layers * _decode_grid(profile.beside_s or profile.decode_s, context, requests),
    )


def _token_seconds(profile: LayerProfile, layers: int, tokens: Floats, all_reduce_s: Floats | None) -> Floats:
    """Return seconds of the kernels that depend on the tokens of a step alone, with two all-reduces a layer."""
    seconds = np.zeros(tokens.size)
    for name, count in {**dict.fromkeys(ONCE, 1), **{name: layers * each for name, each in A_LAYER.items()}}.items():
        if name in profile.dense_s:
            seconds += count * _at(profile.dense_s[name], tokens)
    return seconds if all_reduce_s is None else seconds + 2 * layers * all_reduce_s


def _experts_seconds(experts_s: Mapping[int, Curve], shard: Shard, tokens: Floats) -> Floats:
    """Return seconds of all layers' experts on one rank by the tokens n of all ranks, each with k of E drawn at random:
    together they choose E (1 - (1 - k / E)^n).

    A rank of expert parallelism has its share of the experts and of the choices: it is priced as so many times fewer
    tokens that choose all their experts from among its own.
    """
    total = np.zeros(tokens.size)
    counts = np.array(sorted(experts_s), np.float64)
    ep = shard.parallelism.ep
    measured = np.stack([_at(experts_s[int(count)], tokens / ep) for count in counts])
    for group in shard.model.layers:
        part = group.feed_forward
        if isinstance(part, ExpertsFeedForward):
            chosen = part.num_experts / ep * (1 - (1 - part.experts_per_token / part.num_experts) ** tokens)
            of_step = [np.interp(count, counts, column) for count, column in zip(chosen, measured.T, strict=True)]
            total += group.num_layers * np.array(of_step)
    return total


def _decode_grid(measured_s: Mapping[tuple[int, int], float], context: Floats, requests: Floats) -> Floats:
    """Return seconds of one layer for every number of requests, 0 for none, at the lengths `context`."""
    batches = sorted({count for count, _ in measured_s})
    rows = []
    for count in batches:
        known = sorted((keys, seconds) for (n, keys), seconds in measured_s.items() if n == count)
        rows.append(_at((np.array([k for k, _ in known], np.float64), np.array([s for _, s in known])), context))
    measured = np.stack(rows)
    nodes = np.array(batches, np.float64)
    grid = np.stack([_at((nodes, measured[:, column]), requests) for column in range(context.size)], axis=1)
    grid[0] = 0.0
    return grid


def _prefill_grid(profile: LayerProfile, max_model_len: int) -> tuple[Floats, Floats, Floats]:
    """Return tokens of a chunk, effective lengths 2 W / C, and seconds of one layer.

    A chunk of c tokens after p has the length 2 p + c. Below c a step holds several prompts of that length, which do
    the work of so many short ones: the time of the whole chunk falls with its pairs, but not below a short chunk's.
    """
    chunks = np.array(sorted({chunk for chunk, _ in profile.prefill_s}), np.float64)
    lengths = 2.0 ** np.arange(np.ceil(np.log2(2 * max_model_len)) + 1)
    least = min(profile.prefill_s.values())
    grid = np.empty((chunks.size, lengths.size))
    for row, chunk in enumerate(chunks):
        known = sorted((before, seconds) for (c, before), seconds in profile.prefill_s.items() if c == chunk)
        nodes = np.array([2.0 * before + chunk for before, _ in known])
        seconds = np.array([taken for _, taken in known])
        alone = seconds[0] * lengths / chunk
        grid[row] = np.where(lengths < chunk, np.maximum(alone, least), _at((nodes, seconds), lengths))
    return chunks, lengths, grid


def _at(curve: Curve, points: Floats) -> Floats:
    """Interpolate linearly between nodes and beyond the last; the first holds below it."""
    nodes, seconds = curve
    if nodes.size == 1:
        return np.full(points.size, seconds[0])
    slope = (seconds[-1] - seconds[-2]) / (nodes[-1] - nodes[-2])
    beyond = np.maximum(points - nodes[-1], 0.0) * max(slope, 0.0)
    return np.asarray(np.interp(points, nodes, seconds) + beyond, np.float64)


_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def _curves(path: Path, axis: str, profiled: tuple[str, str, str], by: str = "layer") -> dict[str, Curve]:
    """Return column `by` -> seconds along `axis`."""
    curves: dict[str, dict[int, float]] = {}
    for row in _rows(path, profiled):
        curves.setdefault(row[by], {})[_whole(row, axis)] = _seconds(row)
    return {
        name: (np.array(sorted(seconds), np.float64), np.array([seconds[point] for point in sorted(seconds)]))
        for name, seconds in curves.items()
    }


def _rows(path: Path, profiled: tuple[str, str, str]) -> Iterator[dict[str, str]]:
    """Yield the rows of one (GPU, model, tensor parallelism)."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if (row.get("gpu"), row.get("model"), row.get("tp")) == profiled:
                    yield row
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _whole(row: Mapping[str, str], column: str) -> int:
    try:
        return int(row[column])
    except (KeyError, ValueError):
        raise InputError(f"{column} is {row.get(column)!r} in a layer profile; a whole number is needed") from None


def _seconds(row: Mapping[str, str]) -> float:
    try:
        return float(row["time_us"]) * 1e-6
    except (KeyError, ValueError):
        raise InputError(f"time_us is {row.get('time_us')!r} in a layer profile; a number is needed") from None
