"""Convert published measurements of serving into a file of measured runs, which `windtunnel validate` reads.

    python benchmarks/measured_runs.py DIR/silicon/dev.csv --out runs.jsonl
    windtunnel validate runs.jsonl

Read are tables of aiconfigurator's published serving runs (`readers.silicon.runs`: the two files of recovered settings
lie beside the table). It prints how many rows were read, how many say too little to be run, and why.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from readers.silicon.runs import is_silicon, read_measurements
from windtunnel.calibration.measured_runs import write_run_file
from windtunnel.errors import WindtunnelError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="a CSV file of measured rows")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    options = parser.parse_args()
    try:
        if not is_silicon(options.table):
            sys.exit(f"error: {options.table} has no column silicon_ttft_ms\nhint: give the table of measured rows")
        runs = read_measurements(options.table)
        write_run_file(runs, options.out)
    except WindtunnelError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    reasons = Counter(run.refused for run in runs if run.refused)
    print(f"{len(runs):,} rows read; {len(runs) - reasons.total():,} have a scenario, {reasons.total():,} are refused")
    for reason, count in reasons.most_common():
        print(f"  {count:,} x {reason}")


if __name__ == "__main__":
    main()
