"""One H100, measured: vLLM 0.24.0 healthy and with faults made for real; predictions beside them.

    python benchmarks/h100.py [--calibration NAME]

Reads benchmarks/measured/h100, which `measure_vllm.py` and `measure_ring.py` wrote. Every server is simulated as its
command line says, under the workload that its client sent. Loads that found a tenth of their prompts or more in the
prefix cache, because an earlier load had the same ones, are left out and counted: a simulation of one load has an empty
cache. Steps are priced by what they held, whatever was cached; what requests of a step share is not recorded, so the
loads `prefix` are priced too high.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from windtunnel.calibration.steps.fit import scores_by_kind, validate_steps
from windtunnel.calibration.steps.read import read_step_runs
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.schema import read_yaml, set_path
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.serving.simulate import simulate

FOLDER = Path(__file__).parent / "measured" / "h100"
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
MOST_CACHED = 0.1


def runs() -> list[dict[str, str]]:
    with (FOLDER / "runs.csv").open() as file:
        return list(csv.DictReader(file))


def described(run: dict[str, str], calibration: str | None = None) -> Scenario:
    """Return a server as its command line says, under its client's workload."""
    raw: dict[str, Any] = read_launch_command(f"vllm serve {run['engine_args']}").raw
    raw["workload"] = read_yaml(FOLDER / "loads" / run["run"] / "scenario.yaml")["workload"]
    set_path(raw, "deployment.device", "h100_sxm")
    set_path(raw, "deployment.engine.version", run["vllm_version"])
    if calibration is not None:
        set_path(raw, "deployment.calibration", calibration)
    return scenario_from(raw, run["run"], None)


def counted(run: str, metric: str) -> float:
    """Return by how much a counter of the server's /metrics grew in a load."""
    values = []
    for name in ("before", "after"):
        lines = gzip.decompress((FOLDER / "loads" / run / f"{name}.prom.gz").read_bytes()).decode().splitlines()
        values.append(sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{metric}{{")))
    return values[1] - values[0]


def unexpectedly_cached(run: dict[str, str]) -> float:
    """Share of the prompt tokens found in the prefix cache beyond what the load's own requests share."""
    found, asked = counted(run["run"], "prefix_cache_hits_total"), counted(run["run"], "prefix_cache_queries_total")
    own = simulate(described(run)).requests["cached_tokens"].sum() if asked and found / asked >= MOST_CACHED else 0.0
    return max(found - own, 0.0) / asked if asked else 0.0


def print_loads(calibration: str | None) -> None:
    print(f"| server and load | {' | '.join(LATENCIES.values())} |\n|---|{'---|' * len(LATENCIES)}")
    errors: dict[str, list[float]] = {name: [] for name in LATENCIES}
    num_left_out = 0
    for run in runs():
        if run["fault"] or unexpectedly_cached(run) >= MOST_CACHED:
            num_left_out += 1
            continue
        predicted = simulate(described(run, calibration)).requests
        measured = pq.read_table(FOLDER / "loads" / run["run"] / "requests.parquet").to_pydict()
        counts, cells = ~np.array(measured["is_warmup"]), []
        for name in LATENCIES:
            mean = float(np.nanmean(np.array(measured[name], float)[counts]))
            error = float(np.nanmean(np.array(predicted[name], float))) / mean - 1
            errors[name].append(abs(error))
            cells.append(f"{mean * 1e3:.1f} ms, {error:+.1%}")
        print(f"| {run['run']} | {' | '.join(cells)} |")
    medians = " | ".join(f"{statistics.median(values):.1%}" for values in errors.values())
    print(f"| median of {len(errors['ttft_s'])}; {num_left_out} left out | {medians} |")


def print_steps(calibration: str | None) -> None:
    validation = validate_steps(read_step_runs(FOLDER, {}, {"device": "h100_sxm", "calibration": calibration}))
    faults = {run["run"] for run in runs() if run["fault"]}
    print("\n| recorded steps | decode | mixed |\n|---|---|---|")
    for run in validation.priced:
        if run.run.name not in faults:
            now = scores_by_kind([run])
            cells = [f"{now[kind].median:.1%}" if kind in now else "" for kind in ("decode", "mixed")]
            print(f"| {run.run.name} ({run.kind.size:,} steps) | {' | '.join(cells)} |")


def print_power() -> None:
    print("\n| load | measured W | predicted W |\n|---|---|---|")
    errors = []
    for run in runs():
        if run["watts"] and not run["fault"] and unexpectedly_cached(run) < MOST_CACHED:
            power = simulate(described(run)).summary.power
            assert power is not None
            error = power.mean_w / float(run["watts"]) - 1
            errors.append(abs(error))
            print(f"| {run['run']} | {run['watts']} | {power.mean_w:.0f}, {error:+.0%} |")
    print(f"| median of {len(errors)} | | {statistics.median(errors):.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", help="in place of the one that the version has")
    arguments = parser.parse_args()
    print_loads(arguments.calibration)
    print_steps(arguments.calibration)
    print_power()


if __name__ == "__main__":
    main()
