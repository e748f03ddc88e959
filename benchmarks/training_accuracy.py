"""Predicted step time of published training runs: errors by data set, beside a constant rate for every device.

    python benchmarks/training_accuracy.py [--reference FOLDER] [--json FILE] [--worst N] [--write]

`constant`: the median TFLOP/s per device of a data set's own runs, for all of them: a baseline that has seen the
answers. `left out`: the same runs with each architecture's sustained fraction refitted on the other data sets, which
says how far the constants are fitted to what they are tested on. `held`: the share of runs inside their 80% interval
when the interval knows the other data sets only. `--write` writes the intervals' spreads into the catalog.
"""

import argparse
import json
import os
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import yaml

from readers.training.runs import TrainingRun, runs_in
from windtunnel.errors import InputError
from windtunnel.metrics.uncertainty import Spread
from windtunnel.schema import encode
from windtunnel.training.pricing import TrainingPricer
from windtunnel.training.setup import TrainingSetup, resolve
from windtunnel.training.step import (
    SPREADS_FILE,
    TrainingResult,
    kind_of_job,
    simulate_with,
    step_interval,
    training_prices,
)

QUANTILES = (0.1, 0.5, 0.9)
STEPS = (0.92, 0.96, 1.0, 1.04, 1.08)
"""Sustained fractions tried, against the shipped ones."""


@dataclass(frozen=True)
class Scored:
    table: str
    run: TrainingRun
    setup: TrainingSetup
    result: TrainingResult
    error: float
    """Predicted over measured step time, less 1."""
    error_by_step: tuple[float, ...]

    @property
    def architecture(self) -> str:
        return self.setup.device.architecture


def error_of(run: TrainingRun, result: TrainingResult) -> float | None:
    if run.step_s is not None:
        return result.step_s / run.step_s - 1
    if run.flops_per_s_per_device is not None:
        return run.flops_per_s_per_device / result.flops_per_s_per_device - 1
    return None


def score(folder: Path) -> tuple[list[Scored], list[tuple[str, TrainingRun, bool]], dict[str, int]]:
    scored: list[Scored] = []
    memory: list[tuple[str, TrainingRun, bool]] = []
    left_out: dict[str, int] = defaultdict(int)
    prices: dict[str, list[TrainingPricer]] = {}
    for table, runs, skipped in runs_in(folder):
        left_out[table] += len(skipped)
        for run in runs:
            try:
                setup = resolve(run.job)
            except InputError:
                left_out[table] += 1
                continue
            key = f"{setup.device}{setup.node}"
            if key not in prices:
                shipped = training_prices(setup)
                prices[key] = [
                    replace(shipped, sustained_fraction=shipped.sustained_fraction * step, _known={}) for step in STEPS
                ]
            results = [simulate_with(setup, price) for price in prices[key]]
            shown = results[STEPS.index(1.0)]
            memory.append((table, run, shown.fits))
            errors = [error_of(run, result) for result in results]
            if errors[0] is not None:
                found = tuple(error for error in errors if error is not None)
                scored.append(Scored(table, run, setup, shown, found[STEPS.index(1.0)], found))
    return scored, memory, left_out


def constant_rate_errors(rows: list[Scored]) -> list[float]:
    """Errors of one rate for all runs of a data set: the median of their measured rates."""
    # What was measured, in the simulator's own count of FLOPs.
    measured = [row.result.flops_per_s_per_device * (1 + row.error) for row in rows]
    rate = statistics.median(measured)
    return [value / rate - 1 for value in measured]


def left_out_errors(scored: list[Scored], table: str) -> list[float]:
    """Errors with the sustained fraction of each architecture refitted on all other data sets."""
    found = []
    for row in (row for row in scored if row.table == table):
        others = [other for other in scored if other.table != table and other.architecture == row.architecture]
        best = STEPS.index(1.0)
        if others:
            best = min(
                range(len(STEPS)), key=lambda i: statistics.median(abs(other.error_by_step[i]) for other in others)
            )
        found.append(row.error_by_step[best])
    return found


def median(values: list[float]) -> float:
    return statistics.median(abs(value) for value in values)


def spearman(pairs: list[tuple[float, float]]) -> float:
    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        for position, index in enumerate(order):
            found[index] = float(position)
        return found

    first, second = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    return statistics.correlation(first, second)


def spreads_of(rows: list[Scored]) -> dict[str, Spread]:
    """Class of jobs -> quantiles of measured over predicted step time, a data set weighs the root of its runs."""
    found = {}
    for kind in sorted({kind_of_job(row.setup.job) for row in rows}):
        mine = [row for row in rows if kind_of_job(row.setup.job) == kind]
        num_runs = Counter(row.table for row in mine)
        ordered = sorted((1 / (1 + row.error), num_runs[row.table] ** -0.5) for row in mine)
        ends = list(accumulate(weight for _, weight in ordered))
        points = [next(v for (v, _), end in zip(ordered, ends, strict=True) if end >= q * ends[-1]) for q in QUANTILES]
        p10, p50, p90 = (round(point, 3) for point in points)
        found[kind] = Spread(p10=p10, p50=p50, p90=p90, num_runs=len(mine))
    return found


def held_by_table(scored: list[Scored]) -> dict[str, float]:
    """Data set -> share of its runs inside intervals that know the others only; a class none of them has is dense."""
    found = {}
    for table in {row.table for row in scored}:
        known = spreads_of([row for row in scored if row.table != table])
        known = dict.fromkeys(("dense", "experts", "lora"), known["dense"]) | known
        inside = []
        for row in (row for row in scored if row.table == table):
            expected = step_interval(row.result, known)
            inside.append(expected.low <= row.result.step_s / (1 + row.error) <= expected.high)
        found[table] = sum(inside) / len(inside)
    return found


def write_spreads(scored: list[Scored]) -> None:
    header = (
        "# Measured over predicted step time of published training runs; a data set weighs the root of its runs.\n"
        "#   python benchmarks/training_accuracy.py --write\n"
    )
    SPREADS_FILE.write_text(header + yaml.safe_dump({kind: encode(each) for kind, each in spreads_of(scored).items()}))


def show(
    scored: list[Scored], memory: list[tuple[str, TrainingRun, bool]], left_out: dict[str, int], worst: int
) -> None:
    columns = f"{'median':>9}{'mean':>8}{'bias':>8}{'worst':>8}{'left out':>10}{'constant':>10}{'held':>8}"
    held = held_by_table(scored)
    print(f"{'data set':20}{'runs':>6}{'unsaid':>8}{columns}")
    for table in sorted({row.table for row in scored}):
        rows = [row for row in scored if row.table == table]
        errors = [row.error for row in rows]
        most = max(errors, key=abs)
        print(
            f"{table:20}{len(rows):6}{left_out[table]:8}{median(errors):9.1%}"
            f"{statistics.mean(map(abs, errors)):8.1%}{statistics.median(errors):+8.1%}{most:+8.1%}"
            f"{median(left_out_errors(scored, table)):10.1%}{median(constant_rate_errors(rows)):10.1%}"
            f"{held[table]:8.0%}"
        )
    print()
    groups: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for row in scored:
        job = row.setup.job
        experts = "experts" if job.parallelism.ep > 1 else "LoRA" if job.lora else "dense"
        groups[row.table, row.setup.device.name, job.precision.compute, experts].append(row.error)
    print(f"{'data set':20}{'device':16}{'format':10}{'model':10}{'runs':>6}{'median':>9}{'bias':>8}")
    for (table, device, compute, kind), errors in sorted(groups.items()):
        print(
            f"{table:20}{device:16}{compute:10}{kind:10}{len(errors):6}{median(errors):9.1%}"
            f"{statistics.median(errors):+8.1%}"
        )
    bloom = [row for row in scored if row.table == "bloom_chronicles"]
    pairs = [(row.result.step_s, row.run.step_s) for row in bloom if row.run.step_s]
    rates = [
        (row.result.hardware_flops / row.result.step_s, row.run.flops_per_s_per_device)
        for row in bloom
        if row.run.flops_per_s_per_device
    ]
    if pairs:
        out = [fits for table, run, fits in memory if table == "bloom_chronicles" and run.out_of_memory]
        ran = [fits for table, run, fits in memory if table == "bloom_chronicles" and not run.out_of_memory]
        print(f"\nBLOOM's mapping sweep: rank correlation {spearman(pairs):.2f} of step times, ", end="")
        print(f"{spearman(rates):.2f} of rates; out of memory: ", end="")
        print(f"{sum(not fits for fits in out)} of {len(out)} found, ", end="")
        print(f"{sum(not fits for fits in ran)} of {len(ran)} wrongly")
    measured = [
        (row.table, row.result.worst_memory.total_bytes / row.run.memory_bytes - 1)
        for row in scored
        if row.run.memory_bytes
    ]
    for table in sorted({table for table, _ in measured}):
        errors = [error for name, error in measured if name == table]
        print(
            f"memory, {table}: {len(errors)} runs, median {median(errors):.1%}, bias {statistics.median(errors):+.1%}"
        )
    for row in sorted(scored, key=lambda row: -abs(row.error))[:worst]:
        at = row.setup.degrees
        print(
            f"{row.error:+7.1%} {row.table} row {row.run.row}: {row.setup.model.name}, {at.num_devices} x "
            f"{row.setup.device.name}, tp {at.tp} pp {at.pp} cp {at.cp} ep {at.ep}, {row.setup.job.precision.compute}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[2] / "shared" / "reference"
    parser.add_argument("--reference", type=Path, default=Path(os.environ.get("WINDTUNNEL_REFERENCE", here)))
    parser.add_argument("--json", type=Path, help="write every run's error")
    parser.add_argument("--worst", type=int, default=0, help="show so many of the worst runs")
    parser.add_argument("--write", action="store_true", help="write the intervals' spreads into the catalog")
    arguments = parser.parse_args()
    folder = arguments.reference / "training"
    if not folder.is_dir():
        raise SystemExit(f"there is no folder {folder}; name that of the reference data with --reference")
    scored, memory, left_out = score(folder)
    show(scored, memory, left_out, arguments.worst)
    print(f"{sum(held_by_table(scored).values()) / len({row.table for row in scored}):.0%} held, mean of data sets")
    if arguments.write:
        write_spreads(scored)
    if arguments.json:
        rows = [{"table": row.table, "row": row.run.row, "error": row.error} for row in scored]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
