"""Uncertainty of a prediction: 80% intervals from calibration errors and the provenance of operator times.

An interval is central / spread to central x spread. On a logarithmic scale its halves add up in quadrature from
independent parts: the errors of predictions of runs that were left out of the calibration (an asymmetric pair of
quantiles), the errors of operator times by how they were found, and the run's own sampling error. A model or
a device that was not among the calibration's runs widens the first part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from windtunnel.schema import Schema, Whole

HALF_WIDTH = 1.2816
"""Half width of an 80% interval, in standard deviations of a normal distribution."""
SURE = 2.5758 / HALF_WIDTH
"""Half width of a 99% interval over that of an 80% one, on the logarithm."""

OUTSIDE_WIDENING = 1.5
"""Factor on the logarithm of a spread for each way in which a deployment lies outside the calibration's runs, up to the
second."""

UNMEASURED = "experts on unmeasured silicon"
"""How the operators of a mixture of experts are found on a device of an architecture that nobody measured."""

OPERATOR_ERROR: Mapping[str, float] = {
    "measured": 0.0,
    "interpolated": 0.02,
    "scaled": 0.12,
    "roofline": 0.30,
    UNMEASURED: 0.70,
}
"""Standard deviation of the logarithm of an operator's time, by how it was priced; errors of one run's operators are
taken as fully dependent. The last is such that 80% intervals hold published runs of mixtures of experts on AMD, Google
and Intel devices; dense models there are no farther off than elsewhere (`benchmarks/published_runs.py`)."""

EXPERTS_SCALE = 1.6
"""Errors of mixtures of experts over those of dense models, as logarithms: how tokens spread over experts is not known.

With one scale for both, intervals of configurations left out hold 66% of the TPOT of gpt-oss-120b's 123 runs, the least
of all models of 50 runs; with this one 72%, and the least of any other 74%."""


@dataclass(frozen=True)
class Interval:
    """Range in which 80% of measured values are expected."""

    low: float
    high: float


def interval(
    central: float, spread: Spread, num_outside: float, coverage: Mapping[str, float], sampling_error: float = 0.0
) -> Interval:
    """Return the interval around a prediction, which always lies in it.

    Where measured values mostly lay on one side of the predictions (without calibration, or of a device left out) it
    reaches from the prediction to that side: the prediction is what the model says, the interval what is known of it.

    Args:
        spread: measured over predicted, of runs left out.
        num_outside: in how many ways the deployment lies outside the calibrated runs; a small one counts in part.
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


class Spread(Schema):
    """Measured over predicted, of runs left out of the fit: quantiles of the ratio."""

    p10: float
    p50: float
    p90: float
    num_runs: Whole

    def check(self) -> None:
        if not 0 < self.p10 <= self.p50 <= self.p90:
            raise ValueError(f"the quantiles {self.p10}, {self.p50}, {self.p90} do not ascend from above 0")

    def scaled(self, scale: float) -> Spread:
        """Return the spread of errors that are `scale` times as large, as logarithms."""
        return Spread(p10=self.p10**scale, p50=self.p50**scale, p90=self.p90**scale, num_runs=self.num_runs)

    def around(self, other: Spread) -> Spread:
        """Return the spread, no narrower on either side than another one."""
        p10, p90 = min(self.p10, other.p10), max(self.p90, other.p90)
        return Spread(p10=p10, p50=self.p50, p90=p90, num_runs=self.num_runs)
