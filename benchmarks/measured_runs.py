"""Convert published measurements into a file of measured runs, which `windtunnel validate` reads.

    python benchmarks/measured_runs.py DIR/silicon/dev.csv --out runs.jsonl
    python benchmarks/measured_runs.py DIR/training/torchtitan.csv --out runs.jsonl
    windtunnel validate runs.jsonl

Read are tables of aiconfigurator's published serving runs (`readers.silicon.runs`: the two files of recovered settings
lie beside the table), and tables of published training runs (`readers.training.runs`, which knows their sources'
settings). It prints how many rows were read, how many say too little to be run, and why.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from readers.silicon.runs import is_silicon, read_measurements
from readers.training.runs import read_training_runs
from windtunnel.calibration.measured_runs import Measurement, write_run_file
from windtunnel.calibration.training_runs import training_labels
from windtunnel.errors import WindtunnelError


def training_measurements(table: Path) -> list[Measurement]:
    """Return every row of a table of training runs; those that say too little with the reason."""
    runs, skipped = read_training_runs(table)
    found = [Measurement(f"{table.stem}-{row.row}", None, row.reason, {}, {}) for row in skipped]
    for run in runs:
        known = {"step": run.step_s} if run.step_s else {"rate": run.flops_per_s_per_device}
        measured = {name: value for name, value in known.items() if value}
        refused = "" if measured else "it ran out of memory"
        labels = training_labels(run.job) | {"source": run.source}
        job = run.job if measured else None
        found.append(Measurement(f"{table.stem}-{run.row}", None, refused, measured, labels, job=job))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="a CSV file of measured rows")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    options = parser.parse_args()
    try:
        runs = read_measurements(options.table) if is_silicon(options.table) else training_measurements(options.table)
        write_run_file(runs, options.out)
    except WindtunnelError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    reasons = Counter(run.refused for run in runs if run.refused)
    num_kept = len(runs) - reasons.total()
    print(f"{len(runs):,} rows read; {num_kept:,} have a scenario or a job, {reasons.total():,} are refused")
    for reason, count in reasons.most_common():
        print(f"  {count:,} x {reason}")


if __name__ == "__main__":
    main()
