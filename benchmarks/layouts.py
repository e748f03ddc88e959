"""Layouts that NVIDIA published for training runs beside the best that `train --search` finds for the same job.

    python benchmarks/layouts.py [DIR] [--most N]

DIR holds the tables of `training/` of WINDTUNNEL_REFERENCE, which it is taken from by default. Of every model, device
and format of Megatron-Bridge's and DGX Cloud's tables, the last row of pre-training with a time counts. Degrees of
parallelism, micro-batch and recomputation are searched, all else stays as published. "Gain" is how much faster the best
layout is predicted than the published one: engineers chose it on the real system, so a large gain means that the search
is wrong about some layout, or that nobody tried it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from readers.training.runs import TrainingRun, read_training_runs
from reference import REFERENCE
from windtunnel.errors import InputError
from windtunnel.schema import encode
from windtunnel.search.executors import usual_means
from windtunnel.search.space.space import ALL, LAYOUTS, Space, point_at, space_from
from windtunnel.search.store import Store
from windtunnel.search.study import search
from windtunnel.training.setup import TrainingSetup, resolve
from windtunnel.training.step import simulate_training

TABLES = ("nemo_bridge", "dgxcloud")
SEARCHED = ("tp", "pp", "cp", "ep", "virtual_stages", "dp", "layers_per_stage", "experts_tp", "sequence_parallel")


def chosen(folder: Path) -> list[tuple[TrainingRun, TrainingSetup]]:
    """Return the last run of every model, device and format, with its job resolved."""
    last: dict[tuple[int, int, str, str], tuple[TrainingRun, TrainingSetup]] = {}
    for table in TABLES:
        runs, _ = read_training_runs(folder / f"{table}.csv")
        for run in runs:
            if run.step_s is None or run.job.lora is not None or run.job.document_tokens is not None:
                continue
            try:
                setup = resolve(run.job)
            except InputError:
                continue  # its batch does not divide as it says
            if setup.job.framework == "megatron":
                shape = (setup.model.hidden_size, setup.model.num_layers)
                last[*shape, setup.device.name, setup.job.precision.compute] = (run, setup)
    return list(last.values())


def layouts_of(run: TrainingRun) -> Space:
    """Return the space of all layouts of a run's job."""
    raw: dict[str, Any] = encode(run.job)
    for name in SEARCHED:
        raw.get("parallelism", {}).pop(name, None)
    for name in ("micro_batch", "recompute", "schedule"):
        raw.pop(name, None)
    return space_from({**raw, "vary": {LAYOUTS: ALL}})


def layout_text(setup: TrainingSetup) -> str:
    """Return a layout in the words of the search."""
    split = setup.job.parallelism
    degrees = {"tp": split.tp, "cp": split.cp, "pp": split.pp, "vpp": split.virtual_stages, "ep": split.ep}
    written = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return ", ".join([*written, f"micro_batch {setup.job.micro_batch}", f"recompute {setup.job.recompute.granularity}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=REFERENCE / "training")
    parser.add_argument("--most", type=int, default=1000, help="jobs to search")
    options = parser.parse_args()
    gains: dict[str, list[float]] = {"dense": [], "experts": []}
    num_refused = 0
    for run, setup in chosen(options.folder)[: options.most]:
        name = f"{setup.model.name}, {setup.job.precision.compute}, {setup.degrees.num_devices} x {setup.device.name}"
        space = layouts_of(run)
        try:
            outcome = search(space, Store(None, print), usual_means(space)).outcomes[0]
        except InputError as error:
            num_refused += 1
            print(f"refused: {name}: {error.message}")
            continue
        if not outcome.ranking:
            num_refused += 1
            print(f"refused: {name}: no layout fits")
            continue
        own_s, best = simulate_training(setup).step_s, outcome.ranking[0]
        best_s = outcome.evaluations[best].figures["step_s"]
        gain = own_s / best_s - 1.0
        gains["experts" if setup.model.has_experts else "dense"].append(gain)
        print(name)
        print(f"  published  {layout_text(setup)}: {own_s:.2f} s predicted, {run.step_s:.2f} s measured")
        print(f"  best       {point_at(space, best).title}: {best_s:.2f} s predicted, gain {gain:.1%}", flush=True)
    for kind, each in gains.items():
        if not each:
            continue
        middle, high = np.percentile(each, [50, 90])
        print(f"{kind}: {len(each)} jobs, gain {middle:.1%} in the median, {high:.1%} at the 90th percentile;", end=" ")
        print(f"the published layout is within 10% of the best in {np.mean(np.array(each) <= 0.1):.0%}")
    print(f"{num_refused} refused")


if __name__ == "__main__":
    main()
