"""The page of a client's measurements: whether the server holds its SLO, and that requests failed."""

import numpy as np
import pytest

from windtunnel.metrics.client import client_summary, client_tables
from windtunnel.metrics.limits import Slo
from windtunnel.report.lab.bench import bench_report


@pytest.mark.parametrize(
    ("ttft_s", "num_failed", "is_good", "begins"),
    [
        (1.0, 0, True, "Holds the SLO: 9.90 requests/s with "),
        (0.01, 0, False, "Breaks the SLO: 9.90 requests/s with "),
        (1.0, 10, None, "Measured: "),
        (None, 0, None, "Measured: "),
    ],
)
def test_a_server_is_judged_by_its_slo_and_never_praised_where_requests_fail(
    ttft_s: float | None, num_failed: int, is_good: bool | None, begins: str
) -> None:
    sent_s, slo = np.arange(20) * 0.1, None if ttft_s is None else Slo(ttft_s=ttft_s)
    parts = [time_s + 0.05 + 0.01 * np.arange(8) for time_s in sent_s]
    parts[:num_failed] = [np.array([])] * num_failed
    requests, tokens = client_tables(sent_s, np.zeros(20), np.full(20, 64), np.full(20, 8), parts)
    report = bench_report(client_summary(requests, tokens, slo), {"model": "served", "endpoint": "http://x"}, slo)
    assert (report.is_good, report.verdict.startswith(begins)) == (is_good, True), report.verdict
    assert ("10 requests failed" in report.verdict) == bool(num_failed)
