"""Figures of runs: latency distributions, and curves over time."""

from collections.abc import Mapping

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.metrics.limits import Slo
from windtunnel.metrics.records import Table
from windtunnel.report.chart import Axis, Chart, Limit, Series
from windtunnel.report.layout import layouts_beside
from windtunnel.serving.over_time import NUM_STRETCHES, integral

CURVES = layouts_beside(__file__)
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
_SHARES = np.linspace(0.0, 1.0, 201)


def cdf(latency: str, runs: Mapping[str, Floats], limit_s: float | None = None) -> tuple[Chart, str]:
    """Return (chart, caption) of one latency's distribution over the requests of one run or several.

    Args:
        latency: a key of `LATENCIES`.
        runs: label -> seconds of each request; those that are not finite are left out.
    """
    known = {name: values[np.isfinite(values)] for name, values in runs.items()}
    series = [
        Series(name, np.quantile(values, _SHARES).tolist(), _SHARES.tolist(), "line")
        for name, values in known.items()
        if values.size
    ]
    limits = [] if limit_s is None else [Limit("x", limit_s, "limit")]
    x, y = Axis(LATENCIES[latency], "s", is_log=None), Axis("requests", "share", low=0.0, high=1.0)
    name = LATENCIES[latency]
    return Chart(x, y, series, limits), f"{name[:1].upper()}{name[1:]}: share of requests that took no longer"


def distributions(runs: Mapping[str, Table], slo: Slo | None = None) -> list[tuple[Chart, str]]:
    """Return (chart, caption) of each latency's distribution over the requests of runs, by their label."""
    tables = {name: measured(requests) for name, requests in runs.items()}
    # A request without outputs, or with one token, ends with its first.
    are_same = all(np.array_equal(each["ttft_s"], each["e2e_s"], equal_nan=True) for each in tables.values())
    return [
        cdf(name, {run: requests[f"{name}_s"] for run, requests in tables.items()}, getattr(slo, f"{name}_s", None))
        for name in [*LATENCIES][are_same:]
        if any(np.isfinite(requests[f"{name}_s"]).any() for requests in tables.values())
    ]


def measured(requests: Table) -> Table:
    """Return the requests that were sent after the warm-up."""
    return requests.where(~requests["is_warmup"]) if "is_warmup" in requests.columns else requests


def curves_over_time(series: Table) -> list[tuple[Chart, str]]:
    """Return (chart, caption) of everything in a run's series, without a constant number of replicas."""
    time_s = series["time_s"] + series["duration_s"] / 2
    drawn = []
    for curve in CURVES:
        names, scale = curve["columns"], curve.get("scale", 1.0)
        known = {name: series[name] for name in names if name in series.columns}
        if "num_replicas" in known and np.ptp(known["num_replicas"]) == 0:
            continue
        lines = [
            Series(names[name], time_s.tolist(), (values * scale).tolist(), "line")
            for name, values in known.items()
            if np.isfinite(values).any()
        ]
        if lines:
            y = Axis(curve["axis"], curve.get("unit", ""), low=0.0)
            # The median of rates is zero where most intervals have nothing: their mean is the rate.
            by = "mean" if all(name.endswith("_per_s") for name in names) else "median"
            drawn.append((Chart(Axis("time", "s"), y, lines, smoothed_by=by), curve["caption"]))
    return drawn


def client_over_time(requests: Table) -> list[tuple[Chart, str]]:
    """Return the curves that a client knows: requests sent and not yet answered, in `NUM_STRETCHES` equal intervals."""
    answered = requests.where(np.isfinite(requests["finish_s"]))
    sent_s, end_s = answered["arrival_s"], answered["finish_s"]
    if not len(answered) or end_s.max() <= sent_s.min():
        return []
    edges = np.linspace(sent_s.min(), end_s.max(), NUM_STRETCHES + 1)
    width_s = np.diff(edges)
    present = np.diff(integral(edges, sent_s, end_s, np.ones(len(answered)))) / width_s
    sent, done = (np.histogram(times, edges)[0] / width_s for times in (sent_s, end_s))
    columns = {"time_s": edges[:-1], "duration_s": width_s, "num_present": present}
    return curves_over_time(Table({**columns, "sent_per_s": sent, "finished_per_s": done}, {}))
