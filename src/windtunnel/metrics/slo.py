"""Service level objective: limits on the latencies of a request."""

from windtunnel.schema import Schema, check_positive


class Slo(Schema):
    """Limits that a request must keep to count as goodput; None means no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        check_positive(ttft_s=self.ttft_s, tpot_s=self.tpot_s, e2e_s=self.e2e_s)
