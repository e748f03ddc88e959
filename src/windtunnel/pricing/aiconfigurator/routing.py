"""Experts that real text or random tokens choose, on the busiest of several ranks, from measured spreads of tokens.

Real text spreads tokens almost evenly: Gini coefficients of tokens per expert are 0.11 to 0.3 in five models (arXiv
2605.20982, on H100). Random token ids, the prompts of most benchmark clients, reach 0.38, and the measured power law
0.46 with 32 tokens and 0.63 with 256 (log-uniform between 1 and 0.8 x tokens, `power_law_logits_v3` of AIConfigurator's
collector). What several ranks wait for is chance: the rank with the most active experts, while reading weights bounds
them, and that with the most tokens. Rows with a power law show neither, as their busiest rank has a few experts with
most of the tokens.
DeepSeek-V3.1 on vLLM 0.11.1 and eight B200 (ML.ENERGY, 8, 32, 64 and 256 requests) takes 133, 240, 337 and 478 us a
layer by its steps, 108, 154, 222 and 278 with the power law, and 121, 231, 301 and 374 by this law.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np

from windtunnel.pricing.aiconfigurator.collection import KERNELS, MOE_POINT, Rows
from windtunnel.pricing.table import Floats, grouped

GINI = 0.25
"""Gini coefficient of tokens per expert in real text: latent attention has 0.24 to 0.3, others less."""

GINI_OF_RANDOM = 0.38
"""The same of random token ids."""

DRIFT = 0.10
"""How far the load of a copy of an expert strays in a step from what it was placed by, over the mean. With it the
busiest of 32 and of 36 ranks has the 1.109 and 1.115 times the mean that TensorRT-LLM counted for 288 copies of
DeepSeek-R1's experts ("Scaling Expert Parallelism in TensorRT-LLM", part 1, table 1: 1,024 choices a rank)."""


def _variation(gini: float) -> float:
    """Return the standard deviation over the mean of a normal distribution with that Gini coefficient."""
    return gini * math.sqrt(math.pi)


def _popularity(gini: float, count: int) -> Floats:
    """Return the popularity of `count` equal shares of the experts, over the mean."""
    inverse = NormalDist().inv_cdf
    normal = np.array([inverse((index + 0.5) / count) for index in range(count)])
    return np.maximum(1.0 + _variation(gini) * normal, 0.0)


def _deviations(ep: Floats) -> Floats:
    """Return the expected maximum of `ep` standard normal numbers (Blom's approximation)."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((ranks - 0.375) / (ranks + 0.25)) for ranks in ep.tolist()])


def busiest_active(tokens: Floats, num_experts: Floats, topk: Floats, ep: Floats, gini: float = GINI) -> Floats:
    """Return how many of its experts the rank with the most active ones computes, each token choosing at random.

    A rank's number is taken as binomial: an expert of mean popularity is missed by all tokens with
    (1 - topk / experts) ** tokens.
    """
    local, chosen = num_experts / ep, topk / num_experts
    missed = [(1.0 - np.minimum(popularity * chosen, 1.0)) ** tokens for popularity in _popularity(gini, 8)]
    share = 1.0 - np.mean(missed, axis=0)
    active = local * share + _deviations(ep) * np.sqrt(local * share * (1.0 - share))
    return np.asarray(np.minimum(active, np.minimum(local, tokens * topk)))


def busiest_load(
    tokens: Floats, num_experts: Floats, topk: Floats, ep: Floats, redundant: int | None = None, gini: float = GINI
) -> Floats:
    """Return the choices that fall on the busiest rank over the mean, by chance and by experts' popularity.

    With `redundant` experts, 0 too, the popularity leaves what their placement leaves, and what a step's tokens choose
    otherwise than the tokens before them (`DRIFT`); None: they are not placed by it.
    """
    by_chance = ep / (tokens * topk)
    if redundant is not None:
        sites, index = np.unique(np.column_stack([num_experts, ep]).astype(int), axis=0, return_inverse=True)
        excess = np.array([placed_excess(experts, redundant, ranks, gini) for experts, ranks in sites.tolist()])
        variance = DRIFT**2 * ep / (num_experts + redundant) + by_chance
        return np.asarray(np.minimum(1.0 + excess[index.ravel()] + _deviations(ep) * np.sqrt(variance), ep))
    variance = _variation(gini) ** 2 * ep / num_experts + by_chance
    return np.asarray(np.minimum(1.0 + _deviations(ep) * np.sqrt(variance), ep))


@cache
def placed_excess(num_experts: int, redundant: int, ep: int, gini: float = GINI) -> float:
    """Return how far the busiest rank's load exceeds the mean, once experts are copied and placed by their popularity.

    Each further copy goes to the expert whose copies have most tokens; then copies go in order of their tokens to the
    rank with the fewest that has room (https://github.com/deepseek-ai/EPLB: `replicate_experts`, `balanced_packing`).
    """
    popularity = _popularity(gini, num_experts)
    copies = np.ones(num_experts)
    for _ in range(redundant):
        copies[np.argmax(popularity / copies)] += 1
    loads = np.sort(np.repeat(popularity / copies, copies.astype(int)))[::-1]
    ranks, room = np.zeros(ep), np.full(ep, -(-len(loads) // ep))
    for load in loads.tolist():
        rank = int(np.argmin(np.where(room > 0, ranks, np.inf)))
        ranks[rank] += load
        room[rank] -= 1
    return float(ranks.max() / ranks.mean() - 1.0)


def as_text(even: Rows, skewed: Rows, redundant: int | None = None, gini: float = GINI) -> Rows:
    """Return experts' rows with evenly spread tokens as the busiest rank's with tokens of that Gini coefficient.

    With `redundant` experts, as in `busiest_load`, that holds of prompts alone: no rank has all popular experts.

    As many experts are active as with fewer evenly spread tokens. What tokens cost beyond those that reach every expert
    is the cost of as many as the busiest rank has. Once every expert has a token it is no less than `skewed`, and where
    arithmetic bounds experts the same: a rank's share of prompts with random tokens is skewed, and some files seem to
    time all ranks' choices on one (vLLM 0.24 and SGLang 0.5.14 on H200, DeepSeek's 256 experts over eight ranks, 8,192
    tokens: 6.0 and 5.1 ms evenly spread, 3.5 and 3.2 ms by a power law; TensorRT-LLM 1.3 and 2.2).
    """
    *shape, tokens = (even[name] for name in MOE_POINT)
    _, _, num_experts, topk, _, ep = shape
    filled = num_experts / topk
    few = busiest_active(tokens, num_experts, topk, ep, gini) * ep / topk
    many = np.maximum(tokens * busiest_load(tokens, num_experts, topk, ep, redundant, gini), filled)
    known = even.at_same_points(skewed, skewed.latency, MOE_POINT)
    is_computing = (tokens / filled >= KERNELS.many_tokens_an_expert) & np.isfinite(known)
    known = np.where(is_computing if redundant is not None else tokens >= filled, known, np.nan)
    latency = even.latency.copy()
    for here in grouped(shape, [tokens]):
        measured, took = np.log(tokens[here]), np.log(even.latency[here])
        reading, start, end = (np.exp(np.interp(np.log(each[here]), measured, took)) for each in (few, filled, many))
        end *= np.maximum(many[here] / tokens[here[-1]], 1.0)
        more = np.where(is_computing[here], 0.0, np.maximum(end - start, 0.0))
        latency[here] = np.maximum.accumulate(np.fmax(reading + more, known[here]))
    return even.replaced(latency=latency)
