"""Random forests over the axes (Breiman 2001)."""

from collections.abc import Callable

import numpy as np

from windtunnel.pricing.estimators import SEED, sklearn_ensemble
from windtunnel.pricing.table import Floats

RISES = False


def fit(features: Floats, roofline_s: Floats, seconds: Floats) -> Callable[[Floats, Floats], Floats]:
    """Fit a random forest of log seconds over the axes (Breiman 2001), with Vidur's usual depth."""
    forest = sklearn_ensemble().RandomForestRegressor(
        n_estimators=30, max_depth=16, min_samples_split=2, random_state=SEED, n_jobs=1
    )
    forest.fit(np.log1p(features), np.log(seconds))
    return lambda points, _: np.asarray(np.exp(forest.predict(np.log1p(points))))
