"""Gradient boosting over the axes (Friedman 2001)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from windtunnel.errors import MissingExtraError
from windtunnel.pricing.table import Floats

RISES = True
SEED = 0


def fit(features: Floats, roofline_s: Floats, seconds: Floats) -> Callable[[Floats, Floats], Floats]:
    """Fit gradient boosting of log seconds that only rise along every axis (Friedman 2001)."""
    model = boosted(np.log1p(features), np.log(seconds), rising=True)
    return lambda points, _: np.asarray(np.exp(model.predict(np.log1p(points))))


def boosted(features: Floats, targets: Floats, rising: bool) -> Any:
    """Fit gradient boosting; with `rising`, of values that never fall along a feature."""
    model = sklearn_ensemble().HistGradientBoostingRegressor(
        max_iter=80,
        learning_rate=0.2,
        max_leaf_nodes=31,
        min_samples_leaf=min(5, max(len(targets) // 4, 1)),
        monotonic_cst=[int(rising)] * features.shape[1],
        random_state=SEED,
    )
    return model.fit(features, targets)


def sklearn_ensemble() -> Any:
    """Import scikit-learn's trees, which are an extra."""
    try:
        from sklearn import ensemble
    except ImportError:
        raise MissingExtraError("scikit-learn", "estimators") from None
    return ensemble
