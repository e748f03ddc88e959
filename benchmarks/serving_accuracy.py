"""How far predicted serving runs are from measured ones.

    python benchmarks/serving_accuracy.py --reference DIR            tables in Markdown
    python benchmarks/serving_accuracy.py --reference DIR --json     the same as JSON
    python benchmarks/serving_accuracy.py --reference DIR --out rows.csv
    python benchmarks/serving_accuracy.py --reference DIR --page docs/accuracy.md

Every aggregated run of DIR/silicon/dev.csv becomes a scenario with the server and client settings that were recovered
for it, is simulated, and its mean TTFT, TPOT and E2E latency are compared with the measured means. Nothing is fitted
to these runs. Errors are predicted / measured - 1; tables give the median and 90th percentile of their magnitude and,
as bias, their median. DIR is also taken from the environment variable WINDTUNNEL_REFERENCE.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from windtunnel.engine.serving import estimator_for, simulate
from windtunnel.errors import InputError
from windtunnel.estimate.estimator import Coverage, Estimator
from windtunnel.interop.silicon import MeasuredRun, read_runs, scenario_of
from windtunnel.spec.scenario import resolve

REPOSITORY = Path(__file__).resolve().parents[1]

SCORED = ("primary", "secondary")
METRICS = ("tpot", "ttft", "e2e")

ODD_FLAGS = ("cold_start_no_warmup", "token_inflation_5x", "debug_run_c512", "gtl_client_unknown", "ttft>30%_of_e2e")
"""Rows that are not a steady run of what their settings say: no warm-up, prompts five times too long, a debugging run,
an unknown client, or mostly queueing."""

UNRECORDED_SOURCES = ("autogap", "gtl")
"""Collections of which neither server flags nor client settings are known; engine defaults are assumed."""

PAGE_MARK = "<!-- written by benchmarks/serving_accuracy.py -->"
"""Everything after it on the page is replaced."""
NUM_PAGE_TABLES = 7
"""All rows, then by system, engine and model; the finer tables are only printed."""

NOTES = """\
Noise: 160 pairs of runs with equal settings differ by 0.3-0.4% in TPOT and 3-4% in TTFT (median), by 1.6-2.3% and
16-22% at the 90th percentile.

Others, median absolute error, as measured by running them on parts of the same public table: AIConfigurator 0.12 on 333
runs TPOT 18-22%, TTFT 57%, E2E 17%; AISimulate 0.13-dev on 25 vLLM runs (H100, H200) TPOT 5.5%, TTFT 36%, E2E 4.4%; a
log-linear regression fitted on the primary runs themselves TPOT 15%, TTFT 35%."""


@dataclass(frozen=True)
class Prediction:
    """One row, measured and predicted; seconds."""

    id: str
    use: str
    source: str
    system: str
    engine: str
    version: str
    model: str
    weights: str
    experts: str
    kv_cache: str
    tp: int
    ep: int
    attention_dp: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    flags: str
    unmodelled: str
    refused: str
    measured_tpot_s: float
    measured_ttft_s: float
    measured_e2e_s: float
    predicted_tpot_s: float
    predicted_ttft_s: float
    predicted_e2e_s: float
    tpot_error: float
    ttft_error: float
    e2e_error: float
    bound_by: str
    kv_peak_fraction: float
    num_preemptions: int
    roofline_fraction: float
    scaled_fraction: float
    host_fraction: float
    communication_fraction: float

    @property
    def is_recovered(self) -> bool:
        return self.source not in UNRECORDED_SOURCES

    @property
    def is_odd(self) -> bool:
        return any(flag in self.flags.split() for flag in ODD_FLAGS)

    def error(self, metric: str) -> float:
        return float(getattr(self, f"{metric}_error"))


_ESTIMATORS: dict[tuple[str, str, str | None, str | None], Estimator] = {}
"""Of one worker: tables are read once for each device, engine version and backend of the experts."""


def predict(run: MeasuredRun) -> Prediction:
    try:
        return _simulated(run)
    except InputError as error:
        return _prediction(run, refused=error.message)


def _simulated(run: MeasuredRun) -> Prediction:
    scenario = scenario_of(run)
    setup = resolve(scenario)
    key = (run.system, run.engine.name, setup.engine.version, setup.engine.moe_backend)
    if key not in _ESTIMATORS:
        _ESTIMATORS[key] = estimator_for(setup)
    result = simulate(scenario, _ESTIMATORS[key])
    summary = result.summary
    assert summary.tpot_s is not None
    predicted = {
        "tpot": summary.tpot_s.mean,
        "ttft": summary.ttft_s.mean,
        "e2e": summary.ttft_s.mean + summary.tpot_s.mean * (run.mean_output_tokens - 1),
    }
    return _prediction(
        run,
        version=setup.engine.version or "",
        model=setup.model.name,
        weights=str(setup.precision.weights),
        experts=str(setup.precision.experts_format),
        kv_cache=str(setup.precision.kv_cache),
        **{f"predicted_{name}_s": seconds for name, seconds in predicted.items()},
        **{f"{name}_error": seconds / _measured(run)[name] - 1 for name, seconds in predicted.items()},
        bound_by=summary.bound_by,
        kv_peak_fraction=summary.utilisation.kv_peak_fraction,
        num_preemptions=summary.utilisation.num_preemptions,
        roofline_fraction=result.coverage.get(Coverage.ROOFLINE, 0.0),
        scaled_fraction=result.coverage.get(Coverage.SCALED, 0.0),
        host_fraction=summary.time_fractions["host"],
        communication_fraction=summary.time_fractions["communication"],
    )


def _measured(run: MeasuredRun) -> dict[str, float]:
    return {"tpot": run.tpot_s, "ttft": run.ttft_s, "e2e": run.e2e_s}


def _prediction(run: MeasuredRun, **found: object) -> Prediction:
    nothing = {name: "" if kind == "str" else float("nan") for name, kind in Prediction.__annotations__.items()}
    known = {
        "id": run.id,
        "use": run.use,
        "source": run.source,
        "system": run.system,
        "engine": run.engine.name,
        "model": run.checkpoint or run.model,
        "tp": run.parallelism.tp,
        "ep": run.parallelism.ep,
        "attention_dp": run.parallelism.attention_dp,
        "input_tokens": run.input_tokens,
        "output_tokens": run.output_tokens,
        "concurrency": run.concurrency or 0,
        "flags": " ".join(run.flags),
        "unmodelled": "; ".join(run.unmodelled),
        **{f"measured_{name}_s": seconds for name, seconds in _measured(run).items()},
    }
    return Prediction(**{**nothing, **known, **found})  # type: ignore[arg-type]


def predict_all(runs: Sequence[MeasuredRun], num_processes: int) -> list[Prediction]:
    """In the order of `runs`; those of one device and engine version go together: their tables are read once."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.system, run.engine.name, run.engine.version or ""), []).append(index)
    batches = [batch for group in groups.values() for batch in _split(group, 60)]
    batches.sort(key=len, reverse=True)
    predictions: dict[int, Prediction] = {}
    with ProcessPoolExecutor(num_processes) as pool:
        for batch, found in zip(
            batches, pool.map(_predict_batch, ([runs[i] for i in b] for b in batches)), strict=True
        ):
            predictions.update(zip(batch, found, strict=True))
            if sys.stderr.isatty():
                print(f"\r{len(predictions)} of {len(runs)} rows", end="", file=sys.stderr)
    return [predictions[index] for index in range(len(runs))]


def _split(items: list[int], most: int) -> list[list[int]]:
    return [items[start : start + most] for start in range(0, len(items), most)]


def _predict_batch(runs: list[MeasuredRun]) -> list[Prediction]:
    return [predict(run) for run in runs]


# --------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Score:
    """Errors of one group of rows."""

    group: str
    num_rows: int
    median: dict[str, float]
    p90: dict[str, float]
    bias: dict[str, float]


def score(group: str, rows: Sequence[Prediction]) -> Score:
    errors = {metric: np.array([row.error(metric) for row in rows]) for metric in METRICS}
    return Score(
        group,
        len(rows),
        {metric: float(np.median(np.abs(values))) for metric, values in errors.items()},
        {metric: float(np.quantile(np.abs(values), 0.9)) for metric, values in errors.items()},
        {metric: float(np.median(values)) for metric, values in errors.items()},
    )


Key = Callable[[Prediction], str]

DIMENSIONS: dict[str, Key] = {
    "system": lambda row: row.system,
    "engine": lambda row: row.engine,
    "model": lambda row: row.model.rpartition("/")[2],
    "engine, model and system": lambda row: f"{row.engine} {row.model.rpartition('/')[2]} {row.system}",
    "prompt / output tokens": lambda row: f"{_thousands(row.input_tokens)} / {_thousands(row.output_tokens)}",
    "concurrency": lambda row: (
        f"{1 << row.concurrency.bit_length() - 1:3d} to {(1 << row.concurrency.bit_length()) - 1}"
    ),
    "devices": lambda row: f"{row.tp * row.attention_dp}" + (" (attention DP)" if row.attention_dp > 1 else ""),
}


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:.1f}k" if tokens < 1000 else f"{round(tokens / 1000)}k"


def by(key: Key, rows: Iterable[Prediction]) -> list[Score]:
    groups: dict[str, list[Prediction]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [score(name, groups[name]) for name in sorted(groups)]


def overall(rows: Sequence[Prediction]) -> list[Score]:
    """All simulated rows, and parts of them by how much is known about the measurement."""
    groups = {
        "primary": [row for row in rows if row.use == "primary"],
        "secondary": [row for row in rows if row.use == "secondary"],
        "both": list(rows),
        "both, settings recovered": [row for row in rows if row.is_recovered],
        "both, settings recovered, not odd": [row for row in rows if row.is_recovered and not row.is_odd],
        "both, settings not recorded": [row for row in rows if not row.is_recovered],
        "odd": [row for row in rows if row.is_odd],
    }
    return [score(name, found) for name, found in groups.items() if found]


def tables_of(rows: Sequence[Prediction]) -> dict[str, list[Score]]:
    """Title -> scores; primary and secondary rows apart where a reader compares subsets."""
    tables = {"All rows": overall(rows)}
    for name, key in DIMENSIONS.items():
        if name in ("system", "engine", "model"):
            for use in SCORED:
                tables[f"By {name}, {use}"] = by(key, [row for row in rows if row.use == use])
        else:
            tables[f"By {name}"] = by(key, rows)
    return tables


def report(rows: Sequence[Prediction], tables: dict[str, list[Score]]) -> dict[str, object]:
    refused = Counter((row.use, row.refused) for row in rows if row.refused)
    return {
        "rows": {use: sum(row.use == use for row in rows) for use in SCORED},
        "simulated": {use: sum(row.use == use and not row.refused for row in rows) for use in SCORED},
        "refused": [{"use": use, "reason": why, "rows": n} for (use, why), n in sorted(refused.items())],
        "scores": {name: [asdict(one) for one in scores] for name, scores in tables.items()},
    }


def markdown(title: str, scores: list[Score]) -> str:
    lines = [
        f"### {title}",
        "",
        "| rows | n | TPOT median | p90 | bias | TTFT median | p90 | bias | E2E median | p90 | bias |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in scores:
        cells = [
            cell
            for metric in METRICS
            for cell in (f"{one.median[metric]:.1%}", f"{one.p90[metric]:.1%}", f"{one.bias[metric]:+.1%}")
        ]
        lines.append(f"| {one.group} | {one.num_rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def coverage_table(rows: Sequence[Prediction]) -> str:
    lines = ["### Rows that could be simulated", "", "| use | rows | simulated | |", "|---|---:|---:|---:|"]
    for use in SCORED:
        of_use = [row for row in rows if row.use == use]
        done = sum(not row.refused for row in of_use)
        lines.append(f"| {use} | {len(of_use)} | {done} | {done / max(len(of_use), 1):.1%} |")
    reasons = Counter((row.use, row.refused) for row in rows if row.refused)
    if reasons:
        lines += ["", "| refused because | use | rows |", "|---|---|---:|"]
        lines += [f"| {reason} | {use} | {count} |" for (use, reason), count in sorted(reasons.items())]
    return "\n".join(lines)


def write_rows(rows: Sequence[Prediction], path: Path) -> None:
    if path.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist([asdict(row) for row in rows]), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Prediction.__annotations__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("WINDTUNNEL_REFERENCE") or REPOSITORY.parent / "shared" / "reference"
    parser.add_argument("--reference", type=Path, default=Path(default), metavar="DIR", help="the recorded data")
    parser.add_argument("--measurements", default="silicon/dev.csv", metavar="FILE", help="below DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a CSV or Parquet file of every row")
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace what follows the mark in this Markdown page")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose id contains it")
    options = parser.parse_args()
    if not options.reference.is_dir():
        print(f"skipped: there is no recorded reference data at {options.reference}")
        return 0
    started_s = time.perf_counter()
    try:
        runs = read_runs(options.reference / options.measurements)
    except InputError as error:
        print(f"error: {error.message}", *([f"hint: {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr)
        return 2
    rows = predict_all([run for run in runs if run.use in SCORED and options.only in run.id], options.processes)
    if options.out is not None:
        write_rows(rows, options.out)
    simulated = [row for row in rows if not row.refused]
    tables = tables_of(simulated)
    if options.json:
        print(json.dumps(report(rows, tables), indent=2))
        return 0
    tables_text = [markdown(name, scores) for name, scores in tables.items()]
    text = "\n\n".join([coverage_table(rows), *tables_text, NOTES])
    if options.page is not None:
        head, _, _ = options.page.read_text(encoding="utf-8").partition(PAGE_MARK)
        short = "\n\n".join([coverage_table(rows), *tables_text[:NUM_PAGE_TABLES], NOTES])
        options.page.write_text(f"{head}{PAGE_MARK}\n\n{short}\n", encoding="utf-8")
    print(text)
    print(f"{time.perf_counter() - started_s:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
