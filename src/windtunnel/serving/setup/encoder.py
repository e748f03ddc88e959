"""Seconds that a vision tower takes for the images and videos of one step."""

from collections.abc import Sequence
from inspect import unwrap

import numpy as np
from numpy.typing import NDArray

from windtunnel.model.encoder import encoder_launches
from windtunnel.model.operators import Launch
from windtunnel.model.shape import Shard
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.schedulers.step_cost import launched_s
from windtunnel.serving.setup.step_prices import PricedLaunch, price_launch
from windtunnel.workload.media import media_patches
from windtunnel.workload.schema import Workload

MAX_PRICED = 8
"""Images of one step that are priced; more cost as much each as the last of these."""


def encoder_prices(
    estimator: Estimator, shard: Shard, engine: EngineSettings, workload: Workload
) -> NDArray[np.float64]:
    """Return `[2, MAX_PRICED + 1]` the seconds of the encoder in a step with n images, and with n videos.

    Raises:
        InputError: the model has no vision tower.
    """
    prices = np.zeros((2, MAX_PRICED + 1))
    for kind, media in enumerate((workload.images, workload.videos)):
        for count in range(1, MAX_PRICED + 1) if media is not None else ():
            launches = media_launches(shard, workload, kind, count)
            prices[kind, count] = encoder_s([price_launch(estimator, launch) for launch in launches], engine)
    return prices


def encoder_s(launches: Sequence[PricedLaunch], engine: EngineSettings) -> float:
    """Return the seconds of one call of the tower. No CUDA graph holds it: the host launches every kernel."""
    launch_s = (engine.host.launch_s or 0.0) * sum(launch.count for launch in launches)
    return float(unwrap(launched_s)(sum(launch.total_s for launch in launches), launch_s))


def media_launches(shard: Shard, workload: Workload, kind: int, count: int) -> list[Launch]:
    """Return the launches that encode `count` images (`kind` 0) or videos (1) of the workload in one call.

    Raises:
        InputError: the model has no vision tower.
    """
    patches = media_patches(shard.model, workload.images, workload.videos)[kind]
    tower = shard.model.vision
    assert tower is not None, "media_patches refuses models without one"
    return encoder_launches(shard, tower, patches, count)
