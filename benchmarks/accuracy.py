"""The scoreboard: measured serving runs against predictions, calibrated and not, beside naive baselines.

Reads the runs of `DIR/silicon` (`readers.silicon.runs`), prices each once, and simulates it uncalibrated, with
the shipped calibrations, and with calibrations that never saw it: whole configurations left out (5 folds), whole
devices, whole models. Beside them stand two baselines: the same simulations with operators from the roofline alone, and
a log-linear regression on the runs' own numbers, cross-validated by the same configurations.

    python benchmarks/accuracy.py --reference DIR                    the shipped calibrations, 2 minutes
    python benchmarks/accuracy.py --reference DIR --cross-validate   all of it, 8 minutes of one core
    python benchmarks/accuracy.py --reference DIR --cross-validate --page docs/reference/accuracy-tables.md
    python benchmarks/accuracy.py --reference DIR --write            the spreads of intervals without calibration, too
    python benchmarks/accuracy.py --reference DIR --fit              the shipped calibrations fitted again, and written

DIR is also taken from the environment variable WINDTUNNEL_REFERENCE.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from numpy.typing import NDArray
from scipy import stats

from readers.silicon.runs import DISAGGREGATED, ODD_FLAGS, UNRECORDED_SOURCES, read_measurements
from reference import REFERENCE
from windtunnel import catalog
from windtunnel.calibration.fit import Fit, PricedServer, by_configuration, fit_runs, predict, priced_servers
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.profiles import LEAST_CONFIGURATIONS, folds, held_out, kin, profiles, spreads
from windtunnel.calibration.settings_inference import (
    SHARES,
    Drafting,
    Trials,
    acceptances,
    drafting,
    infer,
    with_acceptances,
)
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import score
from windtunnel.metrics.uncertainty import Spread
from windtunnel.pricing.calibrated import factor
from windtunnel.pricing.estimator import Estimator, RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.report.calibration.calibration import write_calibration
from windtunnel.schema import encode
from windtunnel.serving.analysis.intervals import SPREADS_FILE, error_scale
from windtunnel.serving.calibration import Calibration, acceptance_of, calibration_for, load_calibration
from windtunnel.serving.scenario import Setup

REPOSITORY = Path(__file__).resolve().parents[1]

CALIBRATIONS = REPOSITORY / "src" / "windtunnel" / "catalog" / "calibrations"
FITTED_ON = "silicon/dev.csv: runs of aiconfigurator-core 0.12, mostly InferenceX"

METRICS = ("tpot", "ttft", "e2e")
SCORED = ("primary", "secondary")

PAGE_MARK = "<!-- written by benchmarks/accuracy.py -->"
"""Everything after it on the page is replaced."""

NOTES = """\
Noise: 160 pairs of runs with equal settings differ by 0.3-0.4% in TPOT and 3-4% in TTFT (median), by 1.6-2.3% and
16-22% at the 90th percentile.

Others, median absolute error, as measured by running them on parts of the same public table: AIConfigurator 0.12 on 333
runs TPOT 18-22%, TTFT 57%, E2E 17%; AISimulate 0.13-dev on 25 vLLM runs (H100, H200) TPOT 5.5%, TTFT 36%, E2E 4.4%."""

Predicted = dict[str, dict[str, float]]
"""Id of a run -> metric -> seconds."""


def shipped(priced: PricedServer) -> dict[str, float]:
    """The prediction with the calibration that `windtunnel simulate` would take."""
    engine, device, *_ = priced.scope
    version = str(priced.setup.engine.version)
    calibration = calibration_for(engine, device, version).calibration
    if calibration is None:
        return predict(priced, Fit({}))
    host = calibration.host_of(version).over(priced.setup.engine.host)
    client = calibration.clients.get(priced.client_name, priced.setup.client).over(priced.setup.client)
    factors = {name: factor(calibration.factors, name) for name in priced.parts}
    return priced.predict(factors, host.launched(client.launch_ratio), client)


def shipped_calibrations() -> dict[str, Calibration]:
    return {name: load_calibration(name) for name in catalog.names("calibrations")}


def roofline_of(setup: Setup) -> Estimator:
    return RooflineEstimator(Roofline(setup.device, setup.node))


def regression(runs: Sequence[Measurement], fold: np.ndarray) -> Predicted:
    """log(metric) by ridge regression on the logarithms of lengths, load and devices and on which engine, device, model
    and format it is; every run by a fit that did not see its fold.
    """
    words = ("engine", "device", "model", "format", "parallelism")
    kinds = [sorted({run.labels[name] for run in runs}) for name in words]
    rows = []
    for run in runs:
        scenario = run.scenario
        assert scenario is not None
        load = [float(run.labels[name]) for name in ("prompt", "output", "concurrency")]
        devices = scenario.deployment.num_devices
        numbers = [math.log(value) for value in (*load, load[2] / devices, devices)]
        flags = [float(run.labels[name] == kind) for name, known in zip(words, kinds, strict=True) for kind in known]
        rows.append([1.0, *numbers, numbers[2] * numbers[0], *flags])
    features = np.array(rows)
    found: Predicted = {run.id: {} for run in runs}
    ridge = 0.3 * np.eye(features.shape[1])
    for metric in METRICS:
        target = np.log([run.measured[metric] for run in runs])
        for one in np.unique(fold):
            kept = fold != one
            matrix = features[kept].T @ features[kept] + ridge
            weights = np.linalg.solve(matrix, features[kept].T @ target[kept])
            for index in np.flatnonzero(~kept).tolist():
                found[runs[index].id][metric] = float(np.exp(features[index] @ weights))
    return found


# --------------------------------------------------------------------------------------------------------------- tables


def as_measured(runs: Iterable[Measurement], predicted: Predicted) -> Predicted:
    """With the end-to-end latency that the runs' own is made of: TTFT, and TPOT for every further token."""
    found: Predicted = {}
    for run in runs:
        if one := predicted.get(run.id):
            further_tokens = (run.measured["e2e"] - run.measured["ttft"]) / run.measured["tpot"]
            found[run.id] = {**one, "e2e": one["ttft"] + one["tpot"] * further_tokens}
    return found


def is_odd(run: Measurement) -> bool:
    return any(flag in ODD_FLAGS for flag in run.labels.get("flags", "").split())


def is_recovered(run: Measurement) -> bool:
    return run.labels.get("source") not in UNRECORDED_SOURCES


def errors(runs: Iterable[Measurement], predicted: Predicted, metric: str) -> list[float]:
    return [predicted[run.id][metric] / run.measured[metric] - 1 for run in runs if predicted.get(run.id)]


def cells(runs: Sequence[Measurement], *ways: Predicted) -> list[str]:
    """Of several ways to predict the runs, all errors together."""
    found: list[str] = [str(sum(bool(ways[0].get(run.id)) for run in runs))]
    for metric in METRICS:
        one = score([error for predicted in ways for error in errors(runs, predicted, metric)])
        found += ["", "", ""] if one is None else [f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}"]
    return found


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", f"|---|{'---:|' * (len(headers) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


HEADERS = ("n", *(f"{name} {what}" for name in ("TPOT", "TTFT", "E2E") for what in ("median", "p90", "bias")))


def table(title: str, first: str, rows: Iterable[tuple[str, Sequence[Measurement], Predicted]]) -> str:
    body = [(name, *cells(runs, predicted)) for name, runs, predicted in rows if runs]
    return f"### {title}\n\n{markdown((first, *HEADERS), body)}"


def groups(runs: Sequence[Measurement], key: Callable[[Measurement], str]) -> dict[str, list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return dict(sorted(found.items()))


def subsets(runs: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    primary = [run for run in runs if run.use == "primary"]
    return {
        "primary": primary,
        "primary, settings recovered, not odd": [run for run in primary if is_recovered(run) and not is_odd(run)],
        "primary, settings not recorded": [run for run in primary if not is_recovered(run)],
        "primary, odd": [run for run in primary if is_odd(run)],
        "primary, vLLM on H100 and H200, recovered, not odd": [
            run
            for run in primary
            if is_recovered(run)
            and not is_odd(run)
            and run.labels["engine"] == "vllm"
            and run.labels["device"] in ("h100_sxm", "h200_sxm")
        ],
        "secondary": [run for run in runs if run.use == "secondary"],
    }


def speculative_table(runs: Sequence[Drafting]) -> str:
    """Runs with speculative decoding at the acceptance that the other configurations tell, or all runs."""
    held: Predicted = {}
    seen: Predicted = {}
    for run in runs:
        others = [other for other in runs if by_configuration(other.priced) != by_configuration(run.priced)]
        for predicted, told in ((held, others), (seen, runs)):
            learnt = acceptance_of(acceptances(told), run.model, run.num_draft_tokens)
            if learnt is not None:
                predicted[run.priced.measurement.id] = dict(run.predicted[SHARES.index(learnt.fraction)])
    every = [run.priced.measurement for run in runs]
    rows = []
    for name, members in groups(every, lambda run: run.labels["model"]).items():
        rows += [(f"{name}, configuration held out", members, held), (f"{name}, fitted", members, seen)]
    rows += [("all, configuration held out", every, held), ("all, fitted", every, seen)]
    shares = ", ".join(f"{one.model} {one.fraction:.2f} ({one.num_draft_tokens})" for one in acceptances(runs))
    title = "Speculative decoding, one acceptance for a model and a number of draft tokens"
    return (
        f"{table(title, 'runs', rows)}\n\nFitted (draft tokens in brackets): {shares}. "
        f"{len(runs) - len(held)} runs are of models with one configuration, so none can be held out."
    )


def ranking(runs: Sequence[Measurement], predicted: Predicted) -> tuple[float, int]:
    """Median of Kendall's tau between predicted and measured throughput per device, over deployments and loads of each
    model, device and pair of lengths with three runs or more; and the number of such groups.
    """
    taus = []
    for members in groups(
        runs, lambda run: " ".join(run.labels[name] for name in ("model", "device", "prompt", "output"))
    ).values():
        if len(members) >= 3:
            measured = [rate(run, run.measured["e2e"]) for run in members]
            found = [rate(run, predicted[run.id]["e2e"]) for run in members]
            taus.append(float(stats.kendalltau(measured, found).statistic))
    known = [tau for tau in taus if math.isfinite(tau)]
    return (float(np.median(known)), len(known)) if known else (math.nan, 0)


def rate(run: Measurement, e2e_s: float) -> float:
    assert run.scenario is not None
    return float(run.labels["concurrency"]) / e2e_s / run.scenario.deployment.num_devices


Inside = list[tuple[Measurement, dict[str, bool]]]
"""Runs with whether each metric lay in its interval."""


def inside_intervals(runs: Sequence[PricedServer], predicted: Predicted, by_device: bool = True) -> Inside:
    """Whether measurements lie in 80% intervals whose spread comes from other configurations.

    Five folds of whole configurations; each is judged by the spread of the other four's runs, chosen as a profile's
    are (`kin`), or as those without calibration, of the engine on any device.
    """
    predictions = [predicted[priced.measurement.id] for priced in runs]
    found: Inside = []
    fold = folds(runs, seed=1)
    known: dict[tuple[int, ...], dict[str, Spread]] = {}
    for index, priced in enumerate(runs):
        others = [at for at in range(len(runs)) if fold[at] != fold[index]]
        engine, device, *_ = priced.scope
        kept = [runs[at] for at in others]
        places = kin(kept, engine, device if by_device else None, priced.setup.settings_assumed)
        chosen = tuple(others[place] for place in places)
        if not chosen:
            continue
        if chosen not in known:
            known[chosen] = spreads([runs[at] for at in chosen], [predictions[at] for at in chosen])
        measured = priced.measurement.measured
        scale = error_scale(priced.setup)
        ratios = {metric: (measured[metric] / predictions[index][metric]) ** (1 / scale) for metric in METRICS}
        spread = known[chosen]
        found.append((priced.measurement, {m: spread[m].p10 <= ratio <= spread[m].p90 for m, ratio in ratios.items()}))
    return found


def write_shipped(measurements: Sequence[Measurement]) -> None:
    """Fit the calibrations that ship and write them; what they say of KV transfers stays, as pools alone tell it."""
    plain = [run for run in measurements if run.weight > 0 and not run.lacks_acceptance]
    runs = [priced for _, priced in priced_servers(plain) if not isinstance(priced, str)]
    kept = shipped_calibrations()
    fitted = with_acceptances(profiles(runs, FITTED_ON), [run for run in measurements if run.lacks_acceptance])
    for name in kept.keys() - fitted.keys():
        (CALIBRATIONS / f"{name}.yaml").unlink()
        print(f"{name}.yaml: its device is predicted better by the runs of others")
    for name, calibration in fitted.items():
        transfer = kept[name].transfer if name in kept else None
        path = CALIBRATIONS / f"{name}.yaml"
        write_calibration(msgspec.structs.replace(calibration, transfer=transfer), path)
        before, after = (each.provenance.median_error for each in (kept.get(name, calibration), calibration))
        print(f"{path.name}: {calibration.provenance.num_runs} runs, median errors {before} -> {after}")


def write_uncalibrated_spreads(runs: Sequence[PricedServer], predicted: Predicted) -> None:
    """Primary runs that are not odd, by engine; secondary ones among them where the primary ones are of too few
    configurations.
    """
    found: dict[str, dict[str, Any]] = {}
    for engine, assumed in sorted({(priced.scope[0], priced.setup.settings_assumed) for priced in runs}):
        known = [
            b for b in runs if b.scope[0] == engine and b.setup.settings_assumed == assumed and b.measurement.weight > 0
        ]
        chosen = [priced for priced in known if priced.measurement.use == "primary"]
        if len({by_configuration(priced) for priced in chosen}) < LEAST_CONFIGURATIONS:
            chosen = known
        spread = spreads(chosen, [predicted[priced.measurement.id] for priced in chosen])
        found.setdefault(engine, {})["assumed" if assumed else "recorded"] = encode(spread)
    header = (
        "# Measured over predicted without calibration, by engine and by whether a run's settings were recorded.\n"
        "#   python benchmarks/accuracy.py --write\n"
    )
    SPREADS_FILE.write_text(header + yaml.safe_dump(found), encoding="utf-8")


LEAST_OF_GROUP = 20
"""Runs, for a group to be listed: the share of fewer says little."""


def interval_table(calibrated: Inside, uncalibrated: Inside) -> str:
    """The shares by group, calibrated and not."""

    def shares(rows: Inside) -> list[str]:
        return [f"{np.mean([inside[metric] for _, inside in rows]):.0%}" for metric in METRICS]

    def load(run: Measurement) -> str:
        concurrency = int(run.labels["concurrency"])
        return f"concurrency {'1 to 8' if concurrency <= 8 else '9 to 64' if concurrency <= 64 else 'above 64'}"

    keys: list[Callable[[Measurement], str]] = [
        lambda _: "all",
        lambda run: "settings recovered" if is_recovered(run) else "settings not recorded",
        lambda run: run.labels["engine"],
        lambda run: run.labels["device"],
        lambda run: run.labels["model"],
        load,
    ]
    rows = []
    for key in keys:
        for group in sorted({key(run) for run, _ in calibrated}):
            one, other = ([row for row in part if key(row[0]) == group] for part in (calibrated, uncalibrated))
            if len(one) >= LEAST_OF_GROUP:
                rows.append((group, str(len(one)), *shares(one), *shares(other)))
    heads = [f"{name}, {what}" for what in ("held out", "uncalibrated") for name in ("TPOT", "TTFT", "E2E")]
    title = "### Measured values inside 80% intervals, primary, not odd"
    return f"{title}\n\n{markdown(('runs', 'n', *heads), rows)}"


def coverage_table(measurements: Sequence[Measurement], refused: Mapping[str, str]) -> str:
    rows = []
    for use in SCORED:
        of_use = [run for run in measurements if run.use == use]
        done = sum(run.id not in refused for run in of_use)
        rows.append((use, str(len(of_use)), str(done), f"{done / max(len(of_use), 1):.1%}"))
    text = f"### Runs that could be simulated\n\n{markdown(('use', 'runs', 'simulated', ''), rows)}"
    uses = {run.id: run.use for run in measurements}
    reasons = Counter((uses[identity], why) for identity, why in refused.items())
    lines = [(why, use, str(count)) for (use, why), count in sorted(reasons.items())]
    return f"{text}\n\n{markdown(('refused because', 'use', 'runs'), lines)}" if lines else text


def scoreboard(runs: Sequence[PricedServer], columns: Mapping[str, Predicted], best: str) -> list[str]:
    """Every way of predicting on every subset, then the best way broken down."""
    measured = [priced.measurement for priced in runs]
    parts = [
        table(
            f"{name[:1].upper()}{name[1:]}",
            "predicted",
            ((way, members, predicted) for way, predicted in columns.items()),
        )
        for name, members in subsets(measured).items()
        if members
    ]
    primary = [run for run in measured if run.use == "primary"]
    taus = []
    for way, predicted in columns.items():
        tau, count = ranking([run for run in primary if predicted.get(run.id)], predicted)
        taus.append((way, str(count), f"{tau:.2f}"))
    title = "### Ranking of deployments by throughput per device, primary"
    parts.append(f"{title}\n\n{markdown(('predicted', 'groups', 'Kendall tau, median'), taus)}")
    for name in ("engine", "device", "model"):
        rows = []
        for label, members in groups(primary, lambda run, name=name: run.labels[name]).items():  # type: ignore[misc]
            rows += [(f"{label}, {way}", members, columns[way]) for way in ("uncalibrated", best)]
        parts.append(table(f"By {name}, primary", name, rows))
    return parts


def missing_table(runs: Sequence[Measurement], predicted: Predicted) -> str:
    """What would be left if more were known: every prediction times the median of measured over predicted of the other
    runs of its kind, the narrower the kind the more of them it takes; runs that are not odd and have such others.
    """
    kinds: dict[str, tuple[str, ...]] = {
        "engine on a device": ("engine", "device"),
        "model on an engine and a device": ("engine", "device", "model", "format"),
        "configuration": ("engine", "version", "device", "model", "format", "parallelism"),
        "configuration at the load": ("engine", "version", "device", "model", "format", "parallelism", "concurrency"),
    }
    usual = [run for run in runs if predicted.get(run.id) and not is_odd(run)]
    rows: list[tuple[str, Sequence[Measurement], Predicted]] = []
    for name, wanted in (("recovered", True), ("not recorded", False)):
        members = [run for run in usual if is_recovered(run) == wanted]
        rows.append((f"{name}, as predicted", members, predicted))
        for kind, labels in kinds.items():
            known: Predicted = {}
            for others in groups(members, lambda run, labels=labels: repr([run.labels[n] for n in labels])).values():  # type: ignore[misc]
                known |= _with_known_level(others, predicted)
            rows.append((f"{name}, level of the {kind} known", [run for run in members if run.id in known], known))
    title = "What is missing: the best prediction, if the level of its kind were known from other runs, primary"
    return table(title, "settings", rows)


def _with_known_level(runs: Sequence[Measurement], predicted: Predicted) -> Predicted:
    found: Predicted = {}
    for run in runs:
        if others := [other for other in runs if other is not run]:
            level = {m: float(np.median([o.measured[m] / predicted[o.id][m] for o in others])) for m in METRICS}
            found[run.id] = {metric: value * level[metric] for metric, value in predicted[run.id].items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=REFERENCE, metavar="DIR", help="the recorded data")
    parser.add_argument("--measurements", default="silicon/dev.csv", metavar="FILE", help="below DIR")
    parser.add_argument("--cross-validate", action="store_true", help="fit calibrations that never saw a run")
    parser.add_argument("--json", action="store_true", help="print every run's predictions")
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace what follows the mark in this Markdown page")
    parser.add_argument("--write", action="store_true", help="write the spreads of intervals without calibration")
    parser.add_argument("--fit", action="store_true", help="fit the shipped calibrations again and write them")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose id contains it")
    options = parser.parse_args()
    if not options.reference.is_dir():
        print(f"skipped: there is no recorded reference data at {options.reference}")
        return 0
    started_s = time.perf_counter()
    try:
        read = read_measurements(options.reference / options.measurements)
    except InputError as error:
        print(f"error: {error.message}", *([f"hint: {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr)
        return 2
    # Separate pools have a scoreboard of their own: benchmarks/disaggregated_accuracy.py.
    whole = [run for run in read if run.labels.get("mode") != DISAGGREGATED]
    measurements = [run for run in whole if run.use in SCORED and options.only in run.id]
    plain = [run for run in measurements if not run.lacks_acceptance]
    if options.fit:
        write_shipped(measurements)
        return 0
    # Away from the machine's other core these two take as long as pricing and fitting.
    beside = forked([lambda: by_roofline(plain), lambda: speculative(measurements)], 1)
    priced = list(priced_servers(plain))
    refused = {run.id: found for run, found in priced if isinstance(found, str)}
    runs = [found for _, found in priced if not isinstance(found, str)]
    fold = folds(runs)
    columns: dict[str, Predicted] = {
        "uncalibrated": {priced.measurement.id: predict(priced, Fit({})) for priced in runs},
        "shipped calibration": {priced.measurement.id: shipped(priced) for priced in runs},
    }
    best = "shipped calibration"
    intervals = ""
    drawings: dict[str, Predicted] = {}
    if options.cross_validate:
        best = "calibrated, configuration held out"
        found, drawings = cross_validated(runs, best)
        columns |= found
    columns["log-linear regression, configuration held out"] = regression([priced.measurement for priced in runs], fold)
    roofline, (speculative_text, speculative_refused) = (one.result() for one in beside)
    columns["roofline alone, uncalibrated"] = {
        priced.measurement.id: roofline[priced.measurement.id] for priced in runs if priced.measurement.id in roofline
    }
    refused |= speculative_refused
    if options.write:
        write_uncalibrated_spreads(runs, columns["uncalibrated"])
    columns = {way: as_measured(measurements, found) for way, found in columns.items()}
    drawings = {way: as_measured(measurements, found) for way, found in drawings.items()}
    if options.cross_validate:
        fitted = [priced for priced in runs if priced.measurement.use == "primary" and priced.measurement.weight > 0]
        held = inside_intervals(fitted, columns[best])
        intervals = interval_table(held, inside_intervals(fitted, columns["uncalibrated"], False))
    if options.json:
        print(json.dumps({"refused": refused, "predicted": columns}, indent=2))
        if options.page is None:
            return 0
    parts = [coverage_table(measurements, refused), *scoreboard(runs, columns, best)]
    if intervals:
        primary = [priced.measurement for priced in runs if priced.measurement.use == "primary"]
        parts += [drawings_table(primary, drawings), missing_table(primary, columns[best]), intervals]
    text = "\n\n".join([*parts, *filter(None, [speculative_text]), NOTES])
    if options.page is not None:
        head, _, _ = options.page.read_text(encoding="utf-8").partition(PAGE_MARK)
        options.page.write_text(f"{head}{PAGE_MARK}\n\n{text}\n", encoding="utf-8")
    print(text)
    print(f"{time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    return 0


def by_roofline(measurements: Sequence[Measurement]) -> Predicted:
    """Uncalibrated predictions with operators from the roofline alone."""
    found = priced_servers(measurements, roofline_of)
    return {run.id: predict(priced, Fit({})) for run, priced in found if not isinstance(priced, str)}


def speculative(measurements: Sequence[Measurement]) -> tuple[str, dict[str, str]]:
    """The table of runs with speculative decoding, if there are any, and why some are refused."""
    drafted = list(drafting([run for run in measurements if run.lacks_acceptance], shipped_calibrations()))
    runs = [found for _, found in drafted if not isinstance(found, str)]
    return speculative_table(runs) if runs else "", {run.id: why for run, why in drafted if isinstance(why, str)}


def cross_validated(runs: Sequence[PricedServer], name: str) -> tuple[dict[str, Predicted], dict[str, Predicted]]:
    """Predictions of every run by fits that saw none of its configuration, of its device, of its model, of its version;
    and by configuration for several drawings of the folds, of which `name` is the first.

    Runs that their own record calls odd have no weight in any fit.
    """
    whole, trials = fit_runs(runs), Trials(runs)
    # What every fold asks is simulated once, before the processes part.
    infer(trials, whole, whole.fit, np.ones(len(runs), np.bool_))
    drawn = {f"drawing {seed + 1}": folds(runs, seed=seed) for seed in range(NUM_DRAWINGS)}
    ways = {
        "calibrated, version held out": folds(
            runs, lambda priced: f"{priced.scope[0]} {priced.measurement.labels['version']}", None
        ),
        "calibrated, model held out": folds(runs, lambda priced: priced.setup.model.name, None),
        "calibrated, device held out": folds(runs, lambda priced: priced.scope[1], None),
    }

    def held(fold: NDArray[np.int64]) -> Predicted:
        predicted = held_out(runs, whole, fold, trials)
        return {priced.measurement.id: one for priced, one in zip(runs, predicted, strict=True)}

    every = ways | drawn
    done = forked([partial(held, fold) for fold in every.values()], NUM_PROCESSES)
    found = {way: one.result() for way, one in zip(every, done, strict=True)}
    drawings = {way: found[way] for way in drawn}
    return {name: found["drawing 1"], **{way: found[way] for way in reversed(ways)}}, drawings


def drawings_table(primary: Sequence[Measurement], drawings: Mapping[str, Predicted]) -> str:
    rows = []
    for name, members in subsets(primary).items():
        if name not in ("primary, odd", "secondary"):
            rows += [(f"{name}, {way}", *cells(members, predicted)) for way, predicted in drawings.items()]
            rows.append((f"{name}, all {len(drawings)}", *cells(members, *drawings.values())))
    return f"### Configuration held out, by how the folds are drawn\n\n{markdown(('runs', *HEADERS), rows)}"


NUM_PROCESSES, NUM_DRAWINGS = 2, 3

_tasks: list[Callable[[], Any]] = []


def forked(tasks: Sequence[Callable[[], Any]], num_processes: int) -> list[Future[Any]]:
    """Answers to come of tasks in other processes, which begin with all that this one has in memory."""
    _tasks[:] = tasks
    pool = ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("fork"))
    answers = [pool.submit(_answer, index) for index in range(len(tasks))]
    pool.shutdown(wait=False)
    return answers


def _answer(index: int) -> Any:
    return _tasks[index]()


if __name__ == "__main__":
    sys.exit(main())
