"""Predicted step time and memory of published training runs: errors by data set, beside a constant rate.

    python benchmarks/training_accuracy.py [--reference FOLDER] [--json FILE] [--worst N] [--write]
    python benchmarks/training_accuracy.py --page docs/reference/training-accuracy.md

`constant`: the median TFLOP/s per device of a data set's own runs, for all of them: a baseline that has seen the
answers. `set left out` and `model left out`: median of the same runs with each architecture's sustained fraction
refitted without the data set, or without any run of the model, which says how far the constants are fitted to what they
are tested on. `inside`: the share of runs inside their 80% interval when the interval knows the other data sets, or the
other models, only. `--write` writes the intervals' spreads into the catalog.
"""

import argparse
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import msgspec
import yaml

from readers.pages import write_table
from readers.training.b200_memory import read_measured_steps
from readers.training.runs import TrainingRun, runs_in
from reference import REFERENCE
from windtunnel.errors import InputError
from windtunnel.metrics.uncertainty import Spread
from windtunnel.schema import encode
from windtunnel.training.pricing import TrainingPricer
from windtunnel.training.setup import TrainingSetup, resolve
from windtunnel.training.step import (
    SPREADS_FILE,
    LearntSpread,
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
        """What has a sustained fraction of its own: an architecture, or a TPU."""
        device = self.setup.device
        return device.name if device.architecture == "tpu" else device.architecture

    @property
    def model(self) -> str:
        return re.sub(r" 2[45]\.\d+$", "", self.setup.model.name)

    @property
    def has_experts(self) -> bool:
        return kind_of_job(self.setup) == "experts"


def error_of(run: TrainingRun, result: TrainingResult) -> float | None:
    if run.step_s is not None:
        return result.step_s / run.step_s - 1
    if run.flops_per_s_per_device is not None:
        return run.flops_per_s_per_device / result.flops_per_s_per_device - 1
    return None


def score(folder: Path) -> tuple[list[Scored], list[tuple[str, TrainingRun, bool]], dict[str, Counter[str]]]:
    scored: list[Scored] = []
    memory: list[tuple[str, TrainingRun, bool]] = []
    refused: dict[str, Counter[str]] = defaultdict(Counter)
    prices: dict[str, list[TrainingPricer]] = {}
    for table, runs, skipped in runs_in(folder):
        refused[table].update(re.sub(r"'[^']*'", "...", row.reason) for row in skipped)
        for run in runs:
            try:
                setup = resolve(run.job)
            except InputError as error:
                refused[table][re.sub(r"[\d,]+", "n", error.message)] += 1
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
    return scored, memory, refused


def constant_rate_errors(rows: list[Scored]) -> list[float]:
    """Errors of one rate for all runs of a data set: the median of their measured rates."""
    # What was measured, in the simulator's own count of FLOPs.
    measured = [row.result.flops_per_s_per_device * (1 + row.error) for row in rows]
    rate = statistics.median(measured)
    return [value / rate - 1 for value in measured]


Of = Callable[[Scored], str]
"""What is left out with a run: its data set or its model."""


def left_out_errors(rows: list[Scored], scored: list[Scored], of: Of) -> list[float]:
    """Errors with the sustained fraction of each architecture refitted without what is left out."""
    best: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (of(row), row.architecture)
        if key not in best:
            others = [other for other in scored if of(other) != key[0] and other.architecture == key[1]]
            fits = [_misfit(others, step) for step in range(len(STEPS))] if others else []
            best[key] = fits.index(min(fits)) if fits else STEPS.index(1.0)
    return [row.error_by_step[best[of(row), row.architecture]] for row in rows]


def _misfit(rows: list[Scored], step: int) -> float:
    """Mean over data sets of their median error with one of the fractions tried, so that no set outweighs another."""
    sets = {row.table: [other.error_by_step[step] for other in rows if other.table == row.table] for row in rows}
    return statistics.mean(map(median, sets.values()))


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


def spreads_of(rows: list[Scored]) -> dict[str, LearntSpread]:
    """Class of jobs -> spread of measured over predicted step time; a data set weighs the root of its runs.

    Quantiles, drawn together or apart about the median until the intervals, which operators widen, hold 80%.
    """
    found = {}
    for kind in sorted({kind_of_job(row.setup) for row in rows}):
        mine = [row for row in rows if kind_of_job(row.setup) == kind]
        num_runs = Counter(row.table for row in mine)
        weights = [num_runs[row.table] ** -0.5 for row in mine]
        ordered = sorted(zip((1 / (1 + row.error) for row in mine), weights, strict=True))
        ends = list(accumulate(weight for _, weight in ordered))
        points = [next(v for (v, _), end in zip(ordered, ends, strict=True) if end >= q * ends[-1]) for q in QUANTILES]
        learnt = LearntSpread(
            spread=Spread(p10=points[0], p50=points[1], p90=points[2], num_runs=len(mine)),
            architectures=tuple(sorted({row.setup.device.architecture for row in mine})),
            formats=tuple(sorted({row.setup.job.precision.compute for row in mine})),
            frameworks=tuple(sorted({row.setup.job.framework for row in mine})),
        )
        low, high = 0.0, 3.0
        for _ in range(12):
            scale = (low + high) / 2
            inside = sum(
                weight
                for row, weight in zip(mine, weights, strict=True)
                if is_held(row, {kind: drawn(learnt, scale), "dense": drawn(learnt, scale)})
            )
            low, high = (scale, high) if inside < 0.8 * sum(weights) else (low, scale)
        found[kind] = drawn(learnt, high)
    return found


def drawn(learnt: LearntSpread, scale: float) -> LearntSpread:
    """Return a spread whose outer quantiles are `scale` times as far from its median, as logarithms."""
    given = learnt.spread
    p10, p90 = (round(given.p50 * (end / given.p50) ** scale, 4) for end in (given.p10, given.p90))
    middle = min(max(round(given.p50, 4), p10), p90)
    return msgspec.structs.replace(learnt, spread=Spread(p10=p10, p50=middle, p90=p90, num_runs=given.num_runs))


def is_held(row: Scored, known: Mapping[str, LearntSpread]) -> bool:
    """Whether the interval that `known` gives holds what was measured."""
    expected = step_interval(row.result, known)
    return expected.low <= row.result.step_s / (1 + row.error) <= expected.high


def held_rows(scored: list[Scored], of: Of) -> dict[int, bool]:
    """Return by run (`id`) whether it lies in the interval that does not know its data set, or its model."""
    inside: dict[int, bool] = {}
    for name in {of(row) for row in scored}:
        known = spreads_of([row for row in scored if of(row) != name])
        inside |= {id(row): is_held(row, known) for row in scored if of(row) == name}
    return inside


def write_spreads(scored: list[Scored]) -> None:
    header = (
        "# Measured over predicted step time of published training runs; a data set weighs the root of its runs, and\n"
        "# intervals hold 80% of them.\n"
        "#   python benchmarks/training_accuracy.py --write\n"
    )
    SPREADS_FILE.write_text(header + yaml.safe_dump({kind: encode(each) for kind, each in spreads_of(scored).items()}))


def table_row(name: str, rows: list[Scored], scored: list[Scored], held: list[dict[int, bool]], refused: str) -> str:
    errors = [row.error for row in rows]
    sizes = sorted(map(abs, errors))
    cells = [
        refused,
        *(f"{value:.1%}" for value in (median(errors), sizes[int(0.9 * (len(sizes) - 1))])),
        *(f"{value:+.1%}" for value in (statistics.median(errors), max(errors, key=abs))),
        *(f"{median(left_out_errors(rows, scored, of)):.1%}" for of in (lambda row: row.table, lambda row: row.model)),
        f"{median(constant_rate_errors(rows)):.1%}",
        *(f"{sum(each[id(row)] for row in rows) / len(rows):.0%}" for each in held),
    ]
    return f"| {name} | {len(rows)} | {' | '.join(cells)} |"


def table_of_sets(scored: list[Scored], held: list[dict[int, bool]], refused: dict[str, Counter[str]]) -> str:
    """Return the errors of each data set, and of all mixtures of experts."""
    heads = ["data set", "runs", "refused", "median", "p90", "bias", "worst", "set left out", "model left out"]
    heads += ["constant", "inside (set)", "inside (model)"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for table in sorted({row.table for row in scored}):
        rows = [row for row in scored if row.table == table]
        lines.append(table_row(table, rows, scored, held, str(refused[table].total())))
    experts = [row for row in scored if row.has_experts]
    return "\n".join([*lines, table_row("mixtures of experts", experts, scored, held, "")])


def table_of_groups(scored: list[Scored]) -> str:
    """Return the errors of each data set by device, format and class of job."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in scored:
        kind = kind_of_job(row.setup).replace("lora", "LoRA")
        groups[row.table, row.setup.device.name, row.setup.job.precision.compute, kind].append(row.error)
    lines = ["| data set | device | format | model | runs | median | bias |", "|---|---|---|---|---:|---:|---:|"]
    for names, errors in sorted(groups.items()):
        cells = [*names, str(len(errors)), f"{median(errors):.1%}", f"{statistics.median(errors):+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(
    scored: list[Scored],
    memory: list[tuple[str, TrainingRun, bool]],
    refused: dict[str, Counter[str]],
    options: argparse.Namespace,
) -> None:
    held = [held_rows(scored, lambda row: row.table), held_rows(scored, lambda row: row.model)]
    sets, groups = table_of_sets(scored, held, refused), table_of_groups(scored)
    print(sets)
    tables = sorted({row.table for row in scored})
    for index, what in enumerate(("sets", "models")):
        share = statistics.mean(
            statistics.mean(held[index][id(row)] for row in scored if row.table == t) for t in tables
        )
        of_runs = statistics.mean(held[index].values())
        print(f"80% intervals without their own {what} hold {share:.0%}, mean of data sets; {of_runs:.0%} of runs")
    num_refused = sum(reasons.total() for reasons in refused.values())
    print(f"\nrefused: {num_refused} of {num_refused + len(memory)} rows; {len(scored)} have a time")
    for table, reasons in sorted(refused.items()):
        for reason, count in reasons.most_common():
            print(f"{count:5} {table}: {reason}")
    wrong = Counter(table for table, run, fits in memory if fits == run.out_of_memory)
    print(f"\nwrongly said to fit or not to: {wrong.total()} of {len(memory)} runs; {dict(wrong)}\n")
    print(groups)
    if options.page is not None:
        for name, table in (("sets", sets), ("groups", groups)):
            write_table(options.page, name, "training_accuracy.py", table)
    show_bloom(scored, memory)
    show_memory(scored)
    for row in sorted(scored, key=lambda row: -abs(row.error))[: options.worst]:
        at = row.setup.degrees
        print(
            f"{row.error:+7.1%} {row.table} row {row.run.row}: {row.setup.model.name}, {at.num_devices} x "
            f"{row.setup.device.name}, tp {at.tp} pp {at.pp} cp {at.cp} ep {at.ep}, {row.setup.job.precision.compute}"
        )


def show_bloom(scored: list[Scored], memory: list[tuple[str, TrainingRun, bool]]) -> None:
    """Print how far BLOOM's mappings are ranked as they were measured, and which are said not to fit."""
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


def show_memory(scored: list[Scored]) -> None:
    """Print the errors of memory of each data set that says it."""
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


def show_measured_steps(path: Path) -> None:
    """Print errors of allocated memory and of steps on eight B200."""
    by_model: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for measured in read_measured_steps(path):
        setup = resolve(measured.job)
        result = simulate_with(setup, training_prices(setup))
        allocated = max(stage.allocated_bytes for stage in result.memory)
        errors = (allocated / measured.allocated_bytes - 1, result.step_s / measured.step_s - 1)
        for name in (measured.model, "all"):
            by_model[name].append(errors)
    print("\neight B200 (training_memory): errors of allocated memory, mean and worst, and of steps")
    for name, pairs in by_model.items():
        memory, step = ([abs(pair[side]) for pair in pairs] for side in (0, 1))
        print(f"{name:12}{len(pairs):4} runs: memory {statistics.mean(memory):.2%}, {max(memory):.2%}; ", end="")
        print(f"step {statistics.mean(step):.1%}, {max(step):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    parser.add_argument("--json", type=Path, help="write every run's error")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page to write the tables into")
    parser.add_argument("--worst", type=int, default=0, help="show so many of the worst runs")
    parser.add_argument("--write", action="store_true", help="write the intervals' spreads into the catalog")
    arguments = parser.parse_args()
    folder = arguments.reference / "training"
    if not folder.is_dir():
        raise SystemExit(f"there is no folder {folder}; name that of the reference data with --reference")
    scored, memory, refused = score(folder)
    show(scored, memory, refused, arguments)
    steps = arguments.reference / "training_memory" / "b200_rows.csv"
    if steps.is_file():
        show_measured_steps(steps)
    if arguments.write:
        write_spreads(scored)
    if arguments.json:
        rows = [{"table": row.table, "row": row.run.row, "error": row.error} for row in scored]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
