"""Seconds that a vision tower takes for the images and videos of one step."""

from inspect import unwrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.model.encoder import encoder_launches
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

    No CUDA graph holds the tower, so that the host launches every kernel.

    Raises:
        InputError: the model has no vision tower.
    """
    prices = np.zeros((2, MAX_PRICED + 1))
    for kind, media in enumerate((workload.images, workload.videos)):
        for count in range(1, MAX_PRICED + 1) if media is not None else ():
            launches = priced_encoder(estimator, shard, workload, kind, count)
            device_s = sum(launch.total_s for launch in launches)
            launch_s = (engine.host.launch_s or 0.0) * sum(launch.count for launch in launches)
            prices[kind, count] = unwrap(launched_s)(device_s, launch_s)
    return prices


def priced_encoder(estimator: Estimator, shard: Shard, workload: Workload, kind: int, count: int) -> list[PricedLaunch]:
    """Return the priced launches that encode `count` images (`kind` 0) or videos (1) in one call."""
    patches: Any = media_patches(shard.model, workload.images, workload.videos)[kind]
    tower = shard.model.vision
    assert tower is not None, "media_patches refuses models without one"
    return [price_launch(estimator, launch) for launch in encoder_launches(shard, tower, patches, count)]
