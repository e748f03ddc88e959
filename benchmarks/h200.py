"""One H200, measured: vLLM 0.24.0 under loads, a profile of operators, training steps; predictions beside them.

    python benchmarks/h200.py [--calibration NAME] [--set workload.client.stream_s=600us]

Reads benchmarks/measured/h200, which `measure_vllm.py`, `profile_gpu.py` and `measure_training.py` wrote. Nothing that
is predicted was fitted to these measurements, except training's memory, whose rules they taught. With no calibration
named, serving takes the one that vLLM's version has.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import profile_gpu
from windtunnel import catalog
from windtunnel.calibration.steps.fit import scores_by_kind, validate_steps
from windtunnel.calibration.steps.read import read_step_runs
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Precision
from windtunnel.model.shape import Shard
from windtunnel.pricing.profile import profile_estimator
from windtunnel.schema import read_yaml, set_path
from windtunnel.serving.scenario import scenario_from
from windtunnel.serving.setup.step_prices import price_step
from windtunnel.serving.simulate import simulate

FOLDER = Path(__file__).parent / "measured" / "h200"
DEVICE = "h200_sxm"
HEALTHY = ("llama-8b", "qwen3-30b")
"""Servers as anybody starts them; the others have a fault that was made."""
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}
FIRST_USE = ("llama-8b/sampled", "qwen3-30b/open", "qwen3-30b/many")
"""Loads in which vLLM compiled a kernel at its first use, as steps of 1.0 to 9.6 s show; a second row is without."""


def runs() -> dict[str, dict[str, str]]:
    """Return server -> its line of runs.csv."""
    with (FOLDER / "runs.csv").open() as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def described(run: dict[str, str], workload: dict[str, Any]) -> dict[str, Any]:
    """Return a server as a raw scenario."""
    raw: dict[str, Any] = read_launch_command(f"vllm serve {run['engine_args']}").raw
    raw["workload"] = workload
    set_path(raw, "deployment.device", DEVICE)
    set_path(raw, "deployment.engine.version", run["vllm_version"])
    return raw


def kv_cache_tokens() -> tuple[int, int]:
    """Return the tokens of the KV cache that vLLM printed, and those predicted."""
    run = runs()["llama-8b"]
    workload = {"arrivals": {"type": "burst"}, "input_tokens": 1, "output_tokens": 1, "num_requests": 1}
    memory = simulate(scenario_from(described(run, workload), "", None)).memory
    return int(run["kv_cache_tokens"]), memory.num_blocks * memory.block_size


def loads(
    calibration: str | None, settings: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, tuple[float, float]]]]:
    """Yield each load of the healthy servers with the mean latencies that were measured and are predicted."""
    for folder in sorted(path for name in HEALTHY for path in (FOLDER / "loads" / name).iterdir()):
        raw = described(runs()[folder.parent.name], read_yaml(folder / "scenario.yaml")["workload"])
        if calibration is not None:
            set_path(raw, "deployment.calibration", calibration)
        for path, _, value in (setting.partition("=") for setting in settings):
            set_path(raw, path, value)
        predicted = simulate(scenario_from(raw, str(folder), None)).requests
        measured = pq.read_table(folder / "requests.parquet").to_pydict()
        counts = ~np.array(measured["is_warmup"])
        yield (
            f"{folder.parent.name}/{folder.name}",
            {
                name: (
                    float(np.nanmean(np.array(measured[name], float)[counts])),
                    float(np.nanmean(np.array(predicted[name], float))),
                )
                for name in LATENCIES
            },
        )


def print_loads(calibration: str | None, settings: Sequence[str]) -> None:
    print(f"| server and load | {' | '.join(LATENCIES.values())} |\n|---|{'---|' * len(LATENCIES)}")
    errors: dict[str, list[float]] = {name: [] for name in LATENCIES}
    scored: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for label, means in loads(calibration, settings):
        is_scored = label not in FIRST_USE
        cells = []
        for name, (measured, predicted) in means.items():
            cells.append(f"{measured * 1e3:.1f} ms, {predicted / measured - 1:+.1%}")
            errors[name].append(abs(predicted / measured - 1))
            if is_scored:
                scored[name].append(errors[name][-1])
        print(f"| {label}{'' if is_scored else ' (first use)'} | {' | '.join(cells)} |")
    for what, each in (("all", errors), ("without first uses", scored)):
        medians = " | ".join(f"{statistics.median(values):.1%}" for values in each.values())
        print(f"| median of {len(each['ttft_s'])}, {what} | {medians} |")


def print_steps(calibration: str | None) -> None:
    validation = validate_steps(read_step_runs(FOLDER, {}, {"device": DEVICE, "calibration": calibration}))
    print("\n| recorded steps | decode | mixed | decode after the first 5% | left out |\n|---|---|---|---|---|")
    for run in validation.priced:
        if run.run.name in HEALTHY:
            now, later = scores_by_kind([run]), scores_by_kind([validation.after_first[run.run.name]])
            cells = [f"{scores['decode'].median:.1%}" for scores in (now, later)]
            rest = f"{cells[0]} of {int((run.kind == 0).sum()):,} | {now['mixed'].median:.1%} | {cells[1]}"
            print(f"| {run.run.label} | {rest} | {sum(run.left_out.values())} |")


def print_profile() -> None:
    """Whole steps of the model between the points that were profiled."""
    measured = json.loads((FOLDER / "profile" / "check.json").read_text())
    estimator = profile_estimator(FOLDER / "profile", catalog.device(DEVICE), None)
    shard = Shard(catalog.model("meta-llama/Llama-3.1-8B"), Precision(), Parallelism())
    errors = []
    for shape in profile_gpu.wanted():
        sum_s = sum(launch.total_s for launch in price_step(estimator, shard, shape.step_batch))
        errors.append(sum_s / measured[profile_gpu.key(shape)] - 1)
    absolute = np.abs(errors)
    print(f"\nprofile: {len(errors)} whole steps, median {np.median(absolute):.1%}, most {absolute.max():.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", help="in place of the one that the version has")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="of each load's scenario")
    arguments = parser.parse_args()
    print_loads(arguments.calibration, arguments.set)
    print_steps(arguments.calibration)
    print_profile()
    printed, predicted = kv_cache_tokens()
    print(f"KV cache: {printed:,} tokens, predicted {predicted:,} ({predicted / printed - 1:+.1%})")


if __name__ == "__main__":
    main()
