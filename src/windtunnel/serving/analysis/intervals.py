"""The 80% intervals of a run's headline metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np

from windtunnel import catalog
from windtunnel.metrics.records import Table
from windtunnel.metrics.summary import Summary
from windtunnel.metrics.uncertainty import EXPERTS_SCALE, UNMEASURED, Interval, Spread, interval
from windtunnel.pricing.estimator import Coverage
from windtunnel.pricing.roofline import is_measured
from windtunnel.schema import decode, read_yaml
from windtunnel.serving.calibration import outside
from windtunnel.serving.scenario import Setup
from windtunnel.workload.client import DEFAULT_CLIENT

SPREADS_FILE = catalog.shipped("uncalibrated_spreads.yaml")
"""Written by `benchmarks/accuracy.py --write`."""

DISAGGREGATED_FILE = SPREADS_FILE.with_name("disaggregated_spreads.yaml")
"""Written by `benchmarks/disaggregated_accuracy.py --write`."""


@cache
def disaggregated_spreads() -> dict[str, dict[str, Spread]]:
    """Return engine -> metric -> measured over predicted, for runs with separate pools for prefill and decode."""
    return decode(read_yaml(DISAGGREGATED_FILE), dict[str, dict[str, Spread]])


@cache
def uncalibrated_spreads() -> dict[str, dict[str, dict[str, Spread]]]:
    """Return engine -> `recorded` or `assumed` settings of its runs -> metric -> measured over predicted."""
    return decode(read_yaml(SPREADS_FILE), dict[str, dict[str, dict[str, Spread]]])


PUBLISHED_FILE = SPREADS_FILE.with_name("published_spreads.yaml")
"""Written by `benchmarks/published_runs.py --write`."""


@cache
def published_spreads() -> dict[str, Spread]:
    """Return metric -> measured over predicted, for runs that others published, with the shipped calibrations."""
    return decode(read_yaml(PUBLISHED_FILE), dict[str, Spread])


UNCALIBRATED_CLIENTS = ("inferencex", "unrecorded")
"""Clients of the runs that the spreads without calibration are of."""


def is_by_others(setup: Setup) -> bool:
    """Whether a client is named that no run behind the spreads had: a run of people who publish few of their settings.

    The client that stands where none is named says nothing of that.
    """
    known = UNCALIBRATED_CLIENTS if setup.calibration is None else tuple(setup.calibration.clients)
    return bool(known) and setup.client_name not in ("", DEFAULT_CLIENT, *known)


OUTSIDE: Mapping[str, float] = {"device": 1.0, "model": 1.0, "format": 1.0, "version": 1.0, "version between": 0.45}
"""Kind of difference from a calibration's runs -> how much it counts (`metrics.uncertainty.OUTSIDE_WIDENING`).

To hold 80% of 488 runs with recorded settings, spreads of configurations left out must be 1.35 times as wide (TPOT and
TTFT) where all runs of a model are left out, 1.25 and 1.4 times where those of a model on a device are, and 1.2 and
1.15 times where those of a version are."""

OUTSIDE_TTFT: Mapping[str, float] = {**OUTSIDE, "client": 1.0}


def remarks(setup: Setup) -> dict[str, str]:
    """Return the differences between a setup and the runs of its calibration, with their kinds; none without one."""
    if setup.calibration is None:
        return {}
    formats = tuple(dict.fromkeys((str(setup.precision.weights), str(setup.precision.experts_format))))
    version = setup.engine.version or ""
    return outside(setup.calibration, setup.device.name, setup.model.name, formats, version, setup.client_name)


def intervals(
    setup: Setup,
    summary: Summary,
    requests: Table,
    coverage: Mapping[Coverage, float],
    is_open_loop: bool = False,
    is_disaggregated: bool = False,
) -> dict[str, Interval]:
    """Return metric -> interval of its mean (`tpot`, `ttft`, `e2e`, seconds) or of the whole run (`throughput`, output
    tokens a second).

    The spread of throughput is that of closed loops, whose clients wait for answers. In an open loop the arrivals are
    given, so throughput follows from the time of the last answer, with end-to-end times at either end of their
    interval.

    Where `setup` decodes for separate pools that prefill, the spreads are the errors on measured runs of such pools
    with the shipped calibrations, none of which was fitted to such a run.
    """
    differences: tuple[str, ...] = ()
    spreads, scale = _spreads_of(setup.engine.name, disaggregated_spreads()), 1.0
    if not is_disaggregated:
        scale = error_scale(setup)
        kind = "assumed" if setup.settings_assumed else "recorded"
        of_engines = {engine: by_kind[kind] for engine, by_kind in uncalibrated_spreads().items()}
        spreads = _spreads_of(setup.engine.name, of_engines)
        if setup.calibration is not None:
            spreads |= (setup.settings_assumed and setup.calibration.spread_assumed) or setup.calibration.spread
        differences = tuple(remarks(setup).values())
        if is_by_others(setup):
            # Models and versions that no fitted run had are among the published ones.
            differences = ()
            spreads = {name: published_spreads()[name].around(spread) for name, spread in spreads.items()}
    fractions = {origin.value: fraction for origin, fraction in coverage.items()}
    if setup.model.has_experts and not is_measured(setup.device):
        fractions[UNMEASURED] = fractions.pop(Coverage.ROOFLINE.value, 0.0)
    by_metric = {}
    for name, central in headline(summary).items():
        sampling = 0.0 if name == "throughput" else _sampling_error(requests, f"{name}_s")
        counts = OUTSIDE_TTFT if name == "ttft" else OUTSIDE
        num_outside = sum(counts.get(kind, 0.0) for kind in differences)
        by_metric[name] = interval(central, spreads[name].scaled(scale), num_outside, fractions, sampling)
    by_metric |= _reconciled(summary, by_metric)
    if is_open_loop:
        by_metric["throughput"] = _open_loop_throughput(summary, requests, by_metric["e2e"])
    return by_metric


def _reconciled(summary: Summary, by_metric: Mapping[str, Interval]) -> dict[str, Interval]:
    """Return the intervals of the end-to-end time, which is TTFT and decoding, and of throughput as TTFT's asks for.

    The spread of the end-to-end time was learnt from long outputs. Where most of it is TTFT, it takes that of TTFT, so
    that neither contradicts the other. Throughput is the clients over it (Little's law), but for queueing, which
    follows from throughput and not the other way round.
    """
    central, ttft, e2e, rate = headline(summary), *(by_metric[name] for name in ("ttft", "e2e", "throughput"))
    decode_s, served = central["e2e"] - central["ttft"], max(1 - summary.queueing_s.mean / central["ttft"], 0.0)
    tpot, tpot_s = by_metric.get("tpot", Interval(1.0, 1.0)), central.get("tpot", 1.0)
    shortest_s, longest_s = decode_s * tpot.low / tpot_s, decode_s * tpot.high / tpot_s
    whole = Interval(min(max(e2e.low, ttft.low), ttft.low + longest_s), max(e2e.high, ttft.high + shortest_s))
    slowest_s, fastest_s = (own + served * (new - own) for own, new in ((e2e.high, whole.high), (e2e.low, whole.low)))
    rate = Interval(rate.low * (e2e.high / slowest_s), rate.high * (e2e.low / fastest_s))
    return {"e2e": whole, "throughput": rate}


def error_scale(setup: Setup) -> float:
    """Return how large errors of the setup's model are beside those of dense ones."""
    return EXPERTS_SCALE if setup.model.has_experts else 1.0


def _spreads_of(engine: str, of_engines: Mapping[str, Mapping[str, Spread]]) -> dict[str, Spread]:
    """Return metric -> spread of an engine; of one that nobody measured, the widest of all engines."""
    if engine in of_engines:
        return dict(of_engines[engine])
    by_metric: dict[str, list[Spread]] = {}
    for spreads in of_engines.values():
        for metric, spread in spreads.items():
            by_metric.setdefault(metric, []).append(spread)
    return {
        metric: Spread(
            p10=min(spread.p10 for spread in spreads),
            p50=float(np.median([spread.p50 for spread in spreads])),
            p90=max(spread.p90 for spread in spreads),
            num_runs=sum(spread.num_runs for spread in spreads),
        )
        for metric, spreads in by_metric.items()
    }


def _open_loop_throughput(summary: Summary, requests: Table, e2e: Interval) -> Interval:
    """Return the throughput if all end-to-end times were those at either end of their interval."""
    measured = requests.where(~requests["is_warmup"])
    arrival_s = measured["arrival_s"] - measured["arrival_s"].min()

    def output_tokens_per_s(stretch: float) -> float:
        until_s = (arrival_s + stretch * (measured["finish_s"] - measured["arrival_s"])).max()
        return float(measured["output_tokens"].sum() / until_s)

    central = summary.e2e_s.mean
    return Interval(output_tokens_per_s(e2e.high / central), output_tokens_per_s(e2e.low / central))


def headline(summary: Summary) -> dict[str, float]:
    """Return the metrics that have intervals."""
    means = {"ttft": summary.ttft_s.mean, "e2e": summary.e2e_s.mean}
    if summary.tpot_s is not None:
        means["tpot"] = summary.tpot_s.mean
    return {**means, "throughput": summary.throughput.output_tokens_per_s}


def _sampling_error(requests: Table, column: str) -> float:
    """Relative standard error of the mean over the measured requests, as if they were independent."""
    values = requests[column][~requests["is_warmup"]]
    values = values[np.isfinite(values)]
    if values.size < 2 or values.mean() <= 0:
        return 0.0
    return float(values.std(ddof=1) / values.mean() / math.sqrt(values.size))
