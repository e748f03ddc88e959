"""Speculative decoding: the drafter, its weights, and the loop's settings."""

from dataclasses import replace

import msgspec

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.memory import weight_bytes
from windtunnel.model.sampling import GREEDY_SAMPLER
from windtunnel.model.shape import LayerGroup, Shard
from windtunnel.serving.engines.defaults import ENGINE_SCHEDULERS, OTHER_SCHEDULERS
from windtunnel.serving.scenario import Setup
from windtunnel.serving.state.records import Speculation

LAYER_METHODS = ("mtp", "eagle")
"""Methods that draft with a layer of the model's kind, its embedding and its head."""


def speculation_of(setup: Setup) -> Speculation | None:
    """Return the setup's speculation as the loop takes it; None where every step gives a token. InputError for a
    pipeline, a scheduler that cannot verify, or a step too small for one verification."""
    speculative = setup.engine.speculative
    if speculative is None:
        return None
    queries = speculative.num_draft_tokens + 1
    if setup.parallelism.pp > 1:
        raise InputError(f"speculative decoding does not run in a pipeline; pp = {setup.parallelism.pp}", "set pp to 1")
    if setup.engine.scheduler in OTHER_SCHEDULERS:
        raise InputError(
            f"the scheduler {setup.engine.scheduler} has no speculative decoding",
            f"those that have: {', '.join(ENGINE_SCHEDULERS)}",
        )
    if (setup.engine.max_num_batched_tokens or 0) < queries:
        raise InputError(
            f"a step of {setup.engine.max_num_batched_tokens} tokens cannot verify the {queries} of one request",
            "raise engine.max_num_batched_tokens, or draft fewer",
        )
    return Speculation(queries, speculative.tokens_per_step)


def drafter_of(setup: Setup, shard: Shard) -> Shard | None:
    """Return the drafter, deployed as the model is: its last layer (multi-token prediction) or another model.

    None for n-grams. It drafts the likeliest token, whatever the requests' sampling.

    DeepSeek-V3's module (technical report, section 2.2) is a layer like the last ones, with the model's embedding and
    head. Its projection of two hidden states to one is left out. EAGLE's head (Li et al., arXiv 2401.15077 and
    2503.01840) is such a layer too, dense whatever the model's are; EAGLE-3's smaller vocabulary is left out.
    InputError where there is no such model, or it does not split over as many devices; a model without such a layer.
    """
    speculative = setup.engine.speculative
    if speculative is None or speculative.method == "ngram":
        return None
    if speculative.method in LAYER_METHODS:
        if speculative.method == "mtp" and shard.model.prediction_layers == 0:
            raise InputError(
                f"{shard.model.name} has no prediction layer (num_nextn_predict_layers) for the method mtp",
                "eagle drafts with a layer trained apart; draft_model names a model that drafts; ngram needs none",
            )
        last = msgspec.structs.replace(shard.model.layers[-1], num_layers=1)
        if speculative.method == "eagle":
            last = _with_dense(last)
        return replace(shard, model=msgspec.structs.replace(shard.model, layers=(last,)), sampler=GREEDY_SAMPLER)
    model = catalog.model(str(speculative.draft_model))
    if model.vocab_size != shard.model.vocab_size:
        raise InputError(
            f"{model.name} has {model.vocab_size:,} tokens and {shard.model.name} has {shard.model.vocab_size:,}",
            "a draft model needs the same vocabulary",
        )
    return replace(shard, model=model, precision=model.precision, sampler=GREEDY_SAMPLER)


def _with_dense(layer: LayerGroup) -> LayerGroup:
    """Return the layer with a dense feed-forward as wide as the experts that a token uses, where it has experts."""
    experts = layer.feed_forward
    if not isinstance(experts, ExpertsFeedForward):
        return layer
    width = experts.experts_per_token * experts.intermediate_size + experts.shared_intermediate_size
    return msgspec.structs.replace(layer, feed_forward=DenseFeedForward(intermediate_size=width))


def with_drafter(setup: Setup, drafter: Shard | None) -> Setup:
    """Add the drafter's weights to the setup's reserve: one layer of the model itself, or all of another model."""
    if drafter is None or setup.engine.speculative is None:
        return setup
    added = weight_bytes(drafter)
    if setup.engine.speculative.method in LAYER_METHODS:
        layer = drafter.model.layers[0]
        twice = msgspec.structs.replace(drafter.model, layers=(msgspec.structs.replace(layer, num_layers=2),))
        added = weight_bytes(replace(drafter, model=twice)) - added
    reserved = (setup.engine.reserved_bytes or 0) + round(added)
    return replace(setup, engine=msgspec.structs.replace(setup.engine, reserved_bytes=reserved))
