"""How far predictions of measured runs with separate pools for prefill and decode are off.

    python benchmarks/disaggregated_accuracy.py --reference DIR
    python benchmarks/disaggregated_accuracy.py --reference DIR --page docs/reference/accuracy-tables.md
    python benchmarks/disaggregated_accuracy.py --reference DIR --write             the spreads of their intervals, too

Every run of `DIR/silicon` that was served by pools, without speculative decoding, is simulated twice, with the
calibrations that ship and without. Only the KV transfer of a calibration was fitted to such runs; its record says how
well it predicts those left out. `--page` replaces what lies between the two marks of this benchmark in a Markdown page.
DIR is also taken from WINDTUNNEL_REFERENCE.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from readers.silicon.runs import DISAGGREGATED, read_measurements
from reference import REFERENCE
from windtunnel.calibration.fit import crowding_weights
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.profiles import LEAST_CONFIGURATIONS, SHARED_ERROR, spread_of
from windtunnel.calibration.validate import RunPrediction, predict_runs
from windtunnel.metrics.accuracy import score
from windtunnel.metrics.uncertainty import Spread
from windtunnel.report.calibration.validation import NAMES, score_cells
from windtunnel.schema import encode
from windtunnel.serving.analysis.intervals import DISAGGREGATED_FILE
from windtunnel.serving.calibration import NONE

USES = ("primary", "secondary", "bounds_only")
METRICS = ("tpot", "ttft", "e2e")
REPEATED = "duplicate_of_canonical"
"""The flag of a row that repeats another row's measurement."""
WAITS = "conc>decode_slots"
"""The flag of a run whose client keeps more requests under way than there are places to decode."""
BEGIN, END = "<!-- written by benchmarks/disaggregated_accuracy.py -->", "<!-- end of disaggregated_accuracy.py -->"

GROUPS: Mapping[str, Callable[[Measurement], str]] = {
    "all": lambda run: "all",  # noqa: ARG005
    "engine": lambda run: run.labels["engine"],
    "engine, places to decode": lambda run: f"{run.labels['engine']}, {_places(run)}",
    "engine, prompt and output": lambda run: f"{run.labels['engine']}, {run.labels['prompt']}/{run.labels['output']}",
    "engine, device, model": lambda run: " ".join(run.labels[name] for name in ("engine", "device", "model")),
}


def _places(run: Measurement) -> str:
    return "fewer than requests" if WAITS in run.labels["flags"].split() else "enough"


def chosen(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Runs of pools, each measurement once, none of them speculative; those that cannot be said come without labels of
    a mode.
    """
    return [
        run
        for run in measurements
        if run.use in USES
        and run.labels.get("mode") == DISAGGREGATED
        and not run.lacks_acceptance
        and REPEATED not in run.labels["flags"].split()
    ]


def table(ways: Mapping[str, Sequence[RunPrediction]]) -> list[str]:
    """Markdown rows: median, 90th percentile and bias of every metric, by group."""
    headers = ("runs", *(f"{NAMES[name]} {what}" for name in METRICS for what in ("median", "p90", "bias")))
    lines = []
    for title, key in GROUPS.items():
        lines += ["", f"| {title} | {' | '.join(headers)} |", f"|---|{'---:|' * len(headers)}"]
        for way, predictions in ways.items():
            found: dict[str, list[RunPrediction]] = {}
            for one in predictions:
                if not one.refused:
                    found.setdefault(key(one.measurement), []).append(one)
            for name, members in sorted(found.items()):
                scores = (score([one.error(metric) for one in members]) for metric in METRICS)
                cells = [cell for each in scores for cell in score_cells(None if each is None else vars(each))]
                lines.append(f"| {name}, {way} | {len(members)} | {' | '.join(cells)} |")
    return lines


def refusals(measurements: Sequence[Measurement], predictions: Sequence[RunPrediction]) -> list[str]:
    """A line for each reason why runs of pools are not predicted."""
    unsaid = Counter(
        run.refused for run in measurements if run.use in USES and run.refused and "servers" in run.refused
    )
    reasons = unsaid + Counter(one.refused for one in predictions if one.refused)
    return ["", *(f"- {count} refused: {reason}" for reason, count in sorted(reasons.items()))]


def spreads_of(predictions: Sequence[RunPrediction], engine: str) -> dict[str, Spread]:
    """Metric -> measured over predicted, of the engine's runs; where these are of few configurations, of all."""
    own = [one for one in predictions if one.measurement.labels["engine"] == engine]
    enough = len({one.measurement.configuration for one in own}) >= LEAST_CONFIGURATIONS
    found = {metric: _spread(own if enough else predictions, metric) for metric in METRICS}
    e2e = found["e2e"]
    inverse = {"p10": 1 / e2e.p90, "p50": 1 / e2e.p50, "p90": 1 / e2e.p10}
    rounded = {name: float(f"{value:.4g}") for name, value in inverse.items()}
    return {**found, "throughput": Spread(**rounded, num_runs=e2e.num_runs)}


def engines(predictions: Sequence[RunPrediction]) -> list[str]:
    return sorted({one.measurement.labels["engine"] for one in predictions})


def _spread(predictions: Sequence[RunPrediction], metric: str) -> Spread:
    configurations = [one.measurement.configuration for one in predictions]
    ratios = np.array([1 / (1 + one.error(metric)) for one in predictions])
    return spread_of(ratios, crowding_weights(configurations, SHARED_ERROR), configurations)


def inside(predictions: Sequence[RunPrediction]) -> list[str]:
    """Share of measured values between the quantiles of the runs of other configurations, by engine."""
    held: dict[str, list[list[bool]]] = {}
    for left_out in sorted({one.measurement.configuration for one in predictions}):
        others = [one for one in predictions if one.measurement.configuration != left_out]
        for one in predictions:
            if one.measurement.configuration == left_out:
                engine = one.measurement.labels["engine"]
                spread = spreads_of(others, engine)
                ratios = [(metric, 1 / (1 + one.error(metric))) for metric in METRICS]
                held.setdefault(engine, []).append([spread[m].p10 <= ratio <= spread[m].p90 for m, ratio in ratios])
    rows = [("all", [one for members in held.values() for one in members]), *held.items()]
    lines = [
        "",
        f"| inside 80% intervals | runs | {' | '.join(NAMES[m] for m in METRICS)} |",
        "|---|---:|---:|---:|---:|",
    ]
    return lines + [
        f"| {name} | {len(of)} | {' | '.join(f'{x:.0%}' for x in np.mean(of, axis=0))} |" for name, of in rows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=REFERENCE, metavar="DIR", help="the recorded data")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page to write the tables into")
    parser.add_argument("--write", action="store_true", help="write the spreads of intervals of separate pools")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="to simulate in")
    options = parser.parse_args()
    path = options.reference / "silicon" / "dev.csv"
    if not path.is_file():
        print(f"skipped: there is no recorded reference data at {path}")
        return 0
    started_s = time.perf_counter()
    read = read_measurements(path)
    runs = chosen(read)
    ways = {
        "uncalibrated": predict_runs(runs, NONE, options.processes),
        "shipped calibration": predict_runs(runs, None, options.processes),
    }
    done = [one for one in ways["shipped calibration"] if not one.refused]
    if options.write:
        header = "# Measured over predicted, runs of separate pools, by engine.\n"
        header += "#   python benchmarks/disaggregated_accuracy.py --write\n"
        found = {engine: encode(spreads_of(done, engine)) for engine in engines(done)}
        DISAGGREGATED_FILE.write_text(header + yaml.safe_dump(found), encoding="utf-8")
    text = "\n".join([*table(ways), *inside(done), *refusals(read, ways["uncalibrated"])])
    if options.page is not None:
        head, _, rest = options.page.read_text(encoding="utf-8").partition(BEGIN)
        options.page.write_text(f"{head}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(text)
    print(f"{time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
