"""Gradient boosting (Friedman 2001) of what the roofline misses."""

from collections.abc import Callable

import numpy as np

from windtunnel.pricing.estimators import SEED, sklearn_ensemble
from windtunnel.pricing.table import Floats

RISES = False


def fit(features: Floats, roofline_s: Floats, seconds: Floats) -> Callable[[Floats, Floats], Floats]:
    """Fit gradient boosting of log seconds over the roofline's."""
    model = sklearn_ensemble().HistGradientBoostingRegressor(
        max_iter=80,
        learning_rate=0.2,
        max_leaf_nodes=31,
        min_samples_leaf=min(5, max(len(seconds) // 4, 1)),
        random_state=SEED,
    )
    model.fit(np.log1p(features), np.log(seconds / roofline_s))
    return lambda points, floor_s: np.asarray(floor_s * np.exp(model.predict(np.log1p(points))))
