"""How far a prediction may be off: 80% intervals from what calibration left over and where operator times come from.

An interval is central / spread to central x spread. On a logarithmic scale its halves add up in quadrature from
independent parts: the errors of predictions of runs that were left out of the calibration (an asymmetric pair of
quantiles), the errors of operator times by how they were found, and the run's own sampling error. What lies outside the
calibration's runs, a model or a device that was not among them, widens the first part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from windtunnel.spec.calibration import Spread

COVERED = 0.8
"""The share of measured values that an interval is meant to hold."""
HALF_WIDTH = 1.2816
"""Of 80%, in standard deviations of a normal distribution."""

UNCALIBRATED: Mapping[str, Mapping[str, Spread]] = {
    "vllm": {
        "tpot": Spread(p10=0.9287, p50=1.065, p90=1.228, num_runs=314),
        "ttft": Spread(p10=1.053, p50=1.258, p90=1.846, num_runs=314),
        "e2e": Spread(p10=0.9317, p50=1.07, p90=1.249, num_runs=314),
        "throughput": Spread(p10=0.801, p50=0.9349, p90=1.073, num_runs=314),
    },
    "trtllm": {
        "tpot": Spread(p10=0.841, p50=1.004, p90=1.081, num_runs=169),
        "ttft": Spread(p10=0.9032, p50=1.068, p90=1.205, num_runs=169),
        "e2e": Spread(p10=0.8457, p50=1.005, p90=1.081, num_runs=169),
        "throughput": Spread(p10=0.925, p50=0.9952, p90=1.182, num_runs=169),
    },
    "sglang": {
        "tpot": Spread(p10=0.8749, p50=1.039, p90=1.184, num_runs=84),
        "ttft": Spread(p10=1.099, p50=1.632, p90=2.529, num_runs=84),
        "e2e": Spread(p10=0.8806, p50=1.042, p90=1.205, num_runs=84),
        "throughput": Spread(p10=0.8302, p50=0.96, p90=1.136, num_runs=84),
    },
}
"""Measured over predicted without calibration, by engine: primary runs of `benchmarks/accuracy.py` that are not odd and
whose settings were recovered. SGLang has five of these: its secondary ones are among them."""

UNCALIBRATED_ASSUMED: Mapping[str, Mapping[str, Spread]] = {
    "vllm": {
        "tpot": Spread(p10=0.3572, p50=1.533, p90=2.126, num_runs=30),
        "ttft": Spread(p10=0.3493, p50=1.079, p90=5.144, num_runs=30),
        "e2e": Spread(p10=0.3635, p50=1.511, p90=2.132, num_runs=30),
        "throughput": Spread(p10=0.4691, p50=0.6617, p90=2.751, num_runs=30),
    },
    "trtllm": {
        "tpot": Spread(p10=0.8089, p50=1.032, p90=1.203, num_runs=163),
        "ttft": Spread(p10=0.86, p50=1.227, p90=2.559, num_runs=163),
        "e2e": Spread(p10=0.8174, p50=1.049, p90=1.239, num_runs=163),
        "throughput": Spread(p10=0.8074, p50=0.9533, p90=1.223, num_runs=163),
    },
    "sglang": {
        "tpot": Spread(p10=0.9238, p50=1.069, p90=1.166, num_runs=35),
        "ttft": Spread(p10=1.644, p50=2.705, p90=9.212, num_runs=35),
        "e2e": Spread(p10=0.9313, p50=1.119, p90=1.272, num_runs=35),
        "throughput": Spread(p10=0.7863, p50=0.8941, p90=1.074, num_runs=35),
    },
}
"""The same of primary runs whose settings were not recorded."""

OUTSIDE_WIDENING = 1.5
"""By so much a spread grows, in logarithm, with each way in which a deployment lies outside the calibration's runs, up
to the second."""

OPERATOR_ERROR: Mapping[str, float] = {"measured": 0.0, "interpolated": 0.02, "scaled": 0.12, "roofline": 0.30}
"""Standard deviation of the logarithm of an operator's time, by how it was found; errors of one run's operators are
taken as fully dependent."""


@dataclass(frozen=True)
class Interval:
    """80% of measured values are expected in it."""

    low: float
    high: float


def interval(
    central: float, spread: Spread, num_outside: int, coverage: Mapping[str, float], sampling_error: float = 0.0
) -> Interval:
    """The interval of a prediction, which it holds.

    Where measured values mostly lay on one side of the predictions (without calibration, or of a device left out) it
    reaches from the prediction to that side: the prediction is what the model says, the interval what is known of it.

    Args:
        central: the prediction.
        spread: measured over predicted, of runs left out.
        num_outside: in how many ways the deployment lies outside the calibrated runs.
        coverage: shares of device time by how operator times were found.
        sampling_error: relative standard error of the prediction over seeds.
    """
    widening = OUTSIDE_WIDENING ** min(num_outside, 2)
    operators = HALF_WIDTH * sum(OPERATOR_ERROR[how] * share for how, share in coverage.items())
    other = math.hypot(operators, HALF_WIDTH * sampling_error)
    below = math.hypot(math.log(spread.p50 / spread.p10) * widening, other)
    above = math.hypot(math.log(spread.p90 / spread.p50) * widening, other)
    middle = math.log(spread.p50)
    return Interval(central * math.exp(min(middle - below, 0.0)), central * math.exp(max(middle + above, 0.0)))
