"""Figures of runs: latency distributions, and curves over time."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from windtunnel.metrics.records import Table
from windtunnel.metrics.slo import Slo
from windtunnel.report.layout import layouts_beside
from windtunnel.report.render.plots import Axis, Series, figure
from windtunnel.serving.over_time import NUM_STRETCHES, integral
from windtunnel.units import format_seconds

Floats = NDArray[np.float64]

CURVES = layouts_beside(__file__)
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
SIZE = {"width": 440, "height": 260}
_SHARES = np.linspace(0.0, 1.0, 201)
_FAR = 30.0
"""The axis is logarithmic where a latency's maximum is this many times its median."""
_BEYOND = 2.0
"""A limit beyond this many times the longest latency is not drawn: the curve would have no room."""


def cdf(latency: str, runs: Mapping[str, Floats], limit_s: float | None = None) -> tuple[str, str]:
    """Return (SVG, caption) of one latency's distribution over the requests of one run or several.

    Args:
        latency: a key of `LATENCIES`.
        runs: label -> seconds of each request; those that are not finite are left out.
        limit_s: of the SLO.
    """
    known = {name: values[np.isfinite(values)] for name, values in runs.items()}
    known = {name: values for name, values in known.items() if values.size}
    most_s = max((float(values.max()) for values in known.values()), default=1.0)
    middle_s = max((float(np.median(values)) for values in known.values()), default=1.0)
    unit, scale = ("s", 1.0) if middle_s >= 1 else ("ms", 1e3)
    drawn = [
        Series(name, (np.quantile(values, _SHARES) * scale).tolist(), (_SHARES * 100).tolist(), "line")
        for name, values in known.items()
    ]
    is_log = middle_s > 0 and most_s > _FAR * middle_s
    x = Axis(f"{LATENCIES[latency]} ({unit})", is_log=is_log)
    caption = f"{LATENCIES[latency]}: share of requests that took no longer"
    if limit_s is not None and limit_s > _BEYOND * most_s:
        caption += f"; the limit of {format_seconds(limit_s)} is further out"
    elif limit_s is not None:
        drawn.append(Series("limit", [limit_s * scale] * 2, [0.0, 100.0], "dashes", colour="currentColor"))
    return figure(drawn, x, Axis("requests (%)", low=0.0, high=100.0), **SIZE), caption


def distributions(runs: Mapping[str, Table], slo: Slo | None = None) -> list[tuple[str, str]]:
    """Return (SVG, caption) of each latency's distribution over the requests of one run or several, by their label."""
    tables = {name: measured(requests) for name, requests in runs.items()}
    return [
        cdf(name, {run: requests[f"{name}_s"] for run, requests in tables.items()}, getattr(slo, f"{name}_s", None))
        for name in LATENCIES
        if any(np.isfinite(requests[f"{name}_s"]).any() for requests in tables.values())
    ]


def measured(requests: Table) -> Table:
    """Return the requests that were sent after the warm-up."""
    return requests.where(~requests["is_warmup"]) if "is_warmup" in requests.columns else requests


def curves_over_time(series: Table) -> list[tuple[str, str]]:
    """Return (SVG, caption) of everything in a run's series, without a constant number of replicas."""
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
            drawing = figure(lines, Axis("time (s)"), Axis(curve["unit"], low=0.0), **SIZE)
            drawn.append((drawing, curve["caption"]))
    return drawn


def client_over_time(requests: Table) -> list[tuple[str, str]]:
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
