"""Regressions over measured tables, one module each; `Profile.estimator` names one.

A module has `fit(features, roofline_s, seconds)`: from features `[k, d]` (the axes of a table; for prefill, prompts,
tokens of each and tokens cached before them), the roofline's seconds `[k]` and the measured ones `[k]` to a function of
features and the roofline's seconds, which returns seconds; and `RISES`, whether these never fall along an axis. Real
kernels fall where they switch: holding a forest of Vidur's decode attention to it raises its mean error on points left
out from 1.2% to 2.3%.
"""

from typing import Any

from windtunnel.errors import MissingExtraError

SEED = 0


def sklearn_ensemble() -> Any:
    """Import scikit-learn's trees, which are an extra."""
    try:
        from sklearn import ensemble
    except ImportError:
        raise MissingExtraError("scikit-learn", "estimators") from None
    return ensemble
