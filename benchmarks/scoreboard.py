"""Scoreboard: our errors beside what peers publish, by their definitions, and our worst groups first.

    python benchmarks/accuracy.py --reference DIR --cross-validate --json > predictions.json
    python benchmarks/scoreboard.py predictions.json --reference DIR
    python benchmarks/scoreboard.py predictions.json --reference DIR --page docs/reference/scoreboard.md

DIR holds `silicon/dev.csv`, the runs, and `peer_scores/aisimulate_official_e2e_mape.csv`, AISimulate's own summary of
728 InferenceX runs (and AIConfigurator's errors on them). Theirs are mean absolute percentage errors, and shape errors,
which their summary does not define; ours is the mean error that is left when the runs of a configuration are multiplied
by the median of their measured over predicted times. The rows are not the same ones: the peers' summary names models
and lengths, and no runs, so ours of the same model and lengths stand beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from readers.silicon.runs import read_measurements
from reference import REFERENCE
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import score

PAGE_MARK = "<!-- written by benchmarks/scoreboard.py -->"
PEERS = {"aisim": "AISimulate 0.12", "aic": "AIConfigurator"}
METRICS = ("tpot", "ttft")
CONFIGURATION = ("engine", "version", "device", "model", "format", "parallelism", "prompt", "output")
FEWEST = 8
"""Runs of a group that is ranked."""
WAYS = ("calibrated, configuration held out", "shipped calibration", "uncalibrated")
"""Ways to predict; the first of them that the file has stands beside the peers'."""

Predicted = Mapping[str, Mapping[str, float]]


def family(model: str) -> str:
    """Return a model's name without its format and in small letters: checkpoints of several formats are one model."""
    words = model.lower().replace("qwen-3", "qwen3").split("-")
    return "-".join(word for word in words if word not in ("fp4", "fp8", "nvfp4", "bf16", "v2", "instruct"))


def workload(run: Measurement) -> str:
    """Return a run's lengths in thousands, as the peers' summary has them."""
    return "/".join(f"{int(run.labels[name]) // 1000}k" for name in ("prompt", "output"))


def ratios(runs: Iterable[Measurement], predicted: Predicted, metric: str) -> np.ndarray:
    return np.array([predicted[run.id][metric] / run.measured[metric] for run in runs])


def mean_error(runs: Sequence[Measurement], predicted: Predicted, metric: str) -> float:
    """Mean absolute percentage error."""
    return float(np.abs(ratios(runs, predicted, metric) - 1).mean())


def shape_error(runs: Sequence[Measurement], predicted: Predicted, metric: str) -> float:
    """Mean error that is left when each configuration's median error is taken away; NaN without curves of two runs."""
    curves = by(runs, lambda run: " ".join(run.labels[name] for name in CONFIGURATION)).values()
    left = [ratios(curve, predicted, metric) for curve in curves if len(curve) > 1]
    return float(np.concatenate([np.abs(curve / np.median(curve) - 1) for curve in left]).mean()) if left else np.nan


def by(runs: Iterable[Measurement], key: Callable[[Measurement], str]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def percent(value: float) -> str:
    return "" if not np.isfinite(value) else f"{value:.1%}"


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(headers)} |", f"|---|{'---:|' * (len(headers) - 1)}", *(f"| {' | '.join(r)} |" for r in rows)]
    )


def peers_table(runs: Sequence[Measurement], predicted: Predicted, peers: Path) -> str:
    """Our mean and shape errors beside the peers' own, by model and lengths; models of which we have runs."""
    with peers.open(newline="", encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    rows = []
    for theirs in published:
        ours = [
            run
            for run in runs
            if theirs["model"] in ("ALL",) or family(run.labels["model"]) == family(theirs["model"])
            if theirs["workload"] in ("ALL", workload(run))
        ]
        own = [
            percent(error(ours, predicted, m)) if ours else "" for m in METRICS for error in (mean_error, shape_error)
        ]
        names = [f"{peer}_{metric}_{what}" for peer in PEERS for metric in METRICS for what in ("mape", "shape")]
        cells = [f"{float(theirs[name]):.1f}%" for name in names]
        rows.append(
            (
                f"{theirs['model']}, {theirs['workload']}".replace("ALL, ALL", "all"),
                str(len(ours)),
                *own,
                theirs["rows"],
                *cells,
            )
        )
    what = [f"{metric.upper()} {kind}" for metric in METRICS for kind in ("mean", "shape")]
    headers = ["model and lengths", "our runs", *(f"ours {one}" for one in what), "their runs"]
    return markdown([*headers, *(f"{peer} {one}" for peer in PEERS.values() for one in what)], rows)


def worst_table(runs: Sequence[Measurement], predicted: Predicted) -> str:
    """Groups of engine, device and model by the 90th percentile of their E2E error, the worst first."""
    rows = []
    groups = by(runs, lambda run: ", ".join(run.labels[name] for name in ("engine", "device", "model")))
    for name, members in groups.items():
        if len(members) < FEWEST:
            continue
        scores = [score(list(ratios(members, predicted, metric) - 1)) for metric in ("tpot", "ttft", "e2e")]
        cells = [text for one in scores if one for text in (percent(one.median), percent(one.p90), f"{one.bias:+.1%}")]
        rows.append((scores[2].p90 if scores[2] else 0.0, (name, str(len(members)), *cells)))
    headers = ["group", "runs", *(f"{m} {what}" for m in ("TPOT", "TTFT", "E2E") for what in ("median", "p90", "bias"))]
    return markdown(headers, [row for _, row in sorted(rows, reverse=True)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", type=Path, nargs="?", help="what accuracy.py --json printed")
    parser.add_argument("--reference", type=Path, default=REFERENCE, metavar="DIR")
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace what follows the mark in this Markdown page")
    options = parser.parse_args()
    peers = options.reference / "peer_scores" / "aisimulate_official_e2e_mape.csv"
    if options.predictions is None or not peers.is_file():
        print("skipped: it takes the predictions of accuracy.py --json, and the recorded reference data")
        return 0
    try:
        read = read_measurements(options.reference / "silicon" / "dev.csv")
    except InputError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    answers = json.loads(options.predictions.read_text(encoding="utf-8"))["predicted"]
    way = next(name for name in WAYS if name in answers)
    predicted: Predicted = answers[way]
    runs = [run for run in read if predicted.get(run.id)]
    refused = len([run for run in read if run.use in ("primary", "secondary")]) - len(runs)
    counted = f"{len(runs)} runs scored, {refused} refused; predicted: {way}."
    if way == "shipped calibration":
        counted += " It has seen most of these runs, so that its errors here are too optimistic."
    text = "\n\n".join(
        [
            f"{counted}",
            "## Beside the peers' own figures, by their definitions",
            peers_table(runs, predicted, peers),
            "## Worst groups first",
            f"Groups of at least {FEWEST} runs, by the 90th percentile of the E2E error.",
            worst_table(runs, predicted),
        ]
    )
    if options.page is not None:
        head, _, _ = options.page.read_text(encoding="utf-8").partition(PAGE_MARK)
        options.page.write_text(f"{head}{PAGE_MARK}\n\n{text}\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
