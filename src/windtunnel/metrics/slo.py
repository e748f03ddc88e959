"""Service level objective: limits on the latencies of a request."""

from windtunnel.schema import Positive, Schema


class Slo(Schema):
    """Limits that a request must keep to count as goodput; None means no limit."""

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2e_s: Positive | None = None
