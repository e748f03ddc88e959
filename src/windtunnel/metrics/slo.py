"""Service level objective: limits on the latencies of a request."""

from functools import partial
from typing import Annotated

from windtunnel.schema import Positive, Schema, check_between

LEAST_PERCENTILE = 1
"""A limit that fewer of the requests must keep is none."""
Percentile = Annotated[float, partial(check_between, LEAST_PERCENTILE, 100)]


class Slo(Schema):
    """Limits that a request must keep to count as goodput, and the share of the requests that must; None: no limit."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2e_s: Positive | None = None
    ttft_percentile: Percentile = 99.0
    """Percent of the requests that must keep the limit, as in `--slo ttft_p90=2s`."""
    tpot_percentile: Percentile = 99.0
    e2e_percentile: Percentile = 99.0

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """Latency (`ttft`, `tpot`, `e2e`) -> its limit in seconds and the percentile that must keep it."""
        given = {
            "ttft": (self.ttft_s, self.ttft_percentile),
            "tpot": (self.tpot_s, self.tpot_percentile),
            "e2e": (self.e2e_s, self.e2e_percentile),
        }
        return {name: (limit_s, share) for name, (limit_s, share) in given.items() if limit_s is not None}
