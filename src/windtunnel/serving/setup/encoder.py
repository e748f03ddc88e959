"""Seconds that a vision tower takes for the images and videos of one step."""

from collections.abc import Sequence
from inspect import unwrap

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.model.launches.encoder import encoder_launches
from windtunnel.model.operators import BF16_BYTES, Launch
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.model.towers import VisionTower
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving import codes
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.schedulers.step_cost import launched_s
from windtunnel.serving.setup.fleet_plan import comes_and_goes
from windtunnel.serving.setup.step_prices import PricedLaunch, price_launch
from windtunnel.workload.generate.requests import RequestArrays
from windtunnel.workload.media import MAX_SIDE, media_patches
from windtunnel.workload.schema import Workload

MAX_PRICED = 8
"""Images of one step that are priced; more cost as much each as the last of these."""


def encoder_prices(
    estimator: Estimator,
    shard: Shard,
    engine: EngineSettings,
    workload: Workload,
    requests: RequestArrays | None = None,
) -> Floats:
    """Return `[kind, MAX_PRICED + 1]` the seconds of the encoder in a step with n images of each size, and n videos.

    Those of a trace are those of `requests`, and priced up to the number of images that there are of a kind.

    Raises:
        InputError: the model has no vision tower.
    """
    tower = _tower(shard)
    if requests is not None and requests.media_patches:
        assert requests.media is not None
        kinds, patches = requests.media[..., 0], requests.media_patches
        most = np.minimum(np.bincount(kinds[kinds >= 0], minlength=len(patches)), MAX_PRICED)
    else:
        patches = media_patches(shard.model, workload.images, workload.videos)
        most = np.full(len(patches), MAX_PRICED)
    prices = np.zeros((len(patches), MAX_PRICED + 1))
    for kind, each in enumerate(patches):
        for count in range(1, int(most[kind]) + 1) if each.tokens else ():
            launches = encoder_launches(shard, tower, each, count)
            prices[kind, count] = encoder_s([price_launch(estimator, launch) for launch in launches], engine)
    return prices


def _tower(shard: Shard) -> VisionTower:
    tower = shard.model.vision
    assert tower is not None, "models without one are refused before"
    return tower


def encoder_s(launches: Sequence[PricedLaunch], engine: EngineSettings) -> float:
    """Return the seconds of one call of the tower. No CUDA graph holds it: the host launches every kernel."""
    launch_s = (engine.host.launch_s or 0.0) * sum(launch.count for launch in launches)
    return float(unwrap(launched_s)(sum(launch.total_s for launch in launches), launch_s))


def media_launches(shard: Shard, workload: Workload, kind: int, count: int) -> list[Launch]:
    """Return the launches that encode `count` images or videos of a kind of `workload.media_tokens` in one call.

    Raises:
        InputError: the model has no vision tower.
    """
    patches = media_patches(shard.model, workload.images, workload.videos)[kind]
    return encoder_launches(shard, _tower(shard), patches, count)


def encoder_limits(scenario: Scenario, setup: Setup, requests: RequestArrays) -> tuple[int, int]:
    """Return the tokens of a rank's encoder cache, and those that a step encodes at most; (0, 0) without a cache.

    vLLM has as many of either as `max_num_batched_tokens`, or as the largest item that the model accepts
    (`compute_mm_encoder_budget`, vllm/v1/core/encoder_cache_manager.py, 0.11 to 0.24); here the largest square image,
    or the largest of the workload.

    Raises:
        InputError: another engine's scheduler, a cache that is too small, or replicas that come and go.
    """
    engine, workload = setup.engine, scenario.workload
    given = engine.encoder_cache_tokens or engine.max_num_encoder_input_tokens
    is_vllm = engine.scheduler == codes.SCHEDULERS[codes.VLLM_V1]
    if not is_vllm and given:
        raise InputError(
            f"engine.encoder_cache_tokens and max_num_encoder_input_tokens are vLLM's; the scheduler is "
            f"{engine.scheduler}",
            "leave both out, or take engine.name: vllm; SGLang's cache is of encoder_cache_bytes",
        )
    if requests.media is None or not is_vllm or not (given or images_repeat(workload, requests)):
        return 0, 0
    _refuse_lost_caches(scenario)
    needed = max(requests.media_tokens)
    largest = max(needed, _largest_image_tokens(setup.model))
    most = max(engine.max_num_batched_tokens or 0, largest)
    budget = engine.max_num_encoder_input_tokens or most
    cache = engine.encoder_cache_tokens or max(budget, most)
    if min(budget, cache) < needed:
        name = "encoder_cache_tokens" if cache < needed else "max_num_encoder_input_tokens"
        raise InputError(
            f"engine.{name} is {min(budget, cache):,}, and an image or video of the workload has {needed:,} tokens",
            f"raise it to {needed} at least",
        )
    return cache, budget


def _refuse_lost_caches(scenario: Scenario) -> None:
    if comes_and_goes(scenario.deployment):
        raise InputError(
            "an encoder cache is lost with its replica, and replicas that come and go are simulated without one",
            "leave out autoscaling and faults, or images that come again and the size of the engine's encoder cache",
        )


def encoder_cache(scenario: Scenario, setup: Setup, given: EngineSettings, requests: RequestArrays) -> dict[str, int]:
    """Return the kernel's settings of a pool's encoder cache, vLLM's or SGLang's; `given`: the pool's before defaults.

    SGLang's is of bytes: an embedding has the width of the language model, in bf16, and with DeepStack as many of them
    as the tower has mergers.

    Raises:
        InputError: settings of another engine, a cache that is too small, or replicas that come and go.
    """
    cache_tokens, budget_tokens = encoder_limits(scenario, setup, requests)
    engine, is_given = setup.engine, given.encoder_cache_bytes is not None or given.encoder_cache_unit is not None
    if engine.scheduler != codes.SCHEDULERS[codes.SGLANG]:
        if is_given:
            raise InputError(
                f"engine.encoder_cache_bytes and encoder_cache_unit are SGLang's; the scheduler is {engine.scheduler}",
                "leave both out, or take engine.name: sglang",
            )
    elif requests.media is not None and (is_given or images_repeat(scenario.workload, requests)):
        _refuse_lost_caches(scenario)
        tower = setup.model.vision
        assert tower is not None, "models without one are refused before"
        tokens = (engine.encoder_cache_bytes or 0) // (tower.output_size * tower.num_mergers * BF16_BYTES)
        by_request = int(engine.encoder_cache_unit == "request")
        return {"embedding_cache_tokens": int(tokens), "embeddings_by_request": by_request}
    return {"encoder_cache_tokens": cache_tokens, "encoder_budget_tokens": budget_tokens}


def images_repeat(workload: Workload, requests: RequestArrays) -> bool:
    """Whether an image may come again."""
    if workload.draws_media:
        return workload.images is not None and workload.images.distinct is not None
    if requests.media is None:
        return False
    numbers = requests.media[requests.num_warmup :, :, 1]
    return np.unique(numbers[numbers >= 0]).size < int((numbers >= 0).sum())


def _largest_image_tokens(model: ModelSpec) -> int:
    """Return the tokens of the largest square image; 0 where the rule is not known."""
    if model.vision is None or model.vision.rule == "other":
        return 0
    return model.vision.image(MAX_SIDE, MAX_SIDE).tokens
