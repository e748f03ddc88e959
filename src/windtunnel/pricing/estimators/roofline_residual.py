"""Gradient boosting of what the roofline misses."""

from collections.abc import Callable

import numpy as np

from windtunnel.pricing.estimators.boosting import boosted
from windtunnel.pricing.table import Floats

RISES = False


def fit(features: Floats, roofline_s: Floats, seconds: Floats) -> Callable[[Floats, Floats], Floats]:
    """Fit gradient boosting of log seconds over the roofline's."""
    model = boosted(np.log1p(features), np.log(seconds / roofline_s), rising=False)
    return lambda points, floor_s: np.asarray(floor_s * np.exp(model.predict(np.log1p(points))))
