"""Score diffusion jobs on the text-to-image and text-to-video runs of ML.ENERGY.

    python benchmarks/diffusion.py DIR              every row, each model with an efficiency fitted on the others
    python benchmarks/diffusion.py DIR --rows       a line for each row too
    python benchmarks/diffusion.py DIR --shared     choose figures that all models share without each model too

DIR holds `mlenergy/diffusion_energy.csv`; it is also taken from WINDTUNNEL_REFERENCE. A row is a batch of xDiT
(`mlenergy/diffusion/benchmark.py`): eager PyTorch, bf16, Ulysses and ring degrees, joules of all GPUs by Zeus.

One efficiency for each device is fitted to latencies, as the value with the least median error; errors are printed for
each model with the efficiency of its device fitted on the other models, and with the shipped ones. `--shared` also
takes the rates of products, attention and elementwise operators and the host's times from a grid, by the other models.
"""

import argparse
import csv
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from reference import REFERENCE
from windtunnel.diffusion.job import DiffusionJob, DiffusionSetup, job_from, resolve
from windtunnel.diffusion.operators import block_kernels
from windtunnel.diffusion.simulate import Pricer, ends_work, seconds_by_part, simulate_diffusion, step_work
from windtunnel.errors import InputError

FILE = Path("mlenergy") / "diffusion_energy.csv"
DEVICES = {"H100": "h100_sxm", "B200": "b200_sxm"}
EFFICIENCIES = np.geomspace(0.7, 1.8, 25)


@dataclass(frozen=True)
class ScoredRow:
    """A row and its prediction."""

    row: dict[str, str]
    setup: DiffusionSetup
    efficiency: float
    latency_s: float
    energy_j: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of latency and of joules for each image or video."""
        joules = float(self.row["energy_per_image_joules"] or self.row["energy_per_video_joules"])
        each_j = self.energy_j / int(self.row["batch_size"])
        return self.latency_s / float(self.row["batch_latency_s"]) - 1, each_j / joules - 1


def job_of(row: dict[str, str]) -> DiffusionJob:
    """Return a row's job."""
    raw: dict[str, Any] = {
        "model": row["model_id"],
        "device": DEVICES[row["gpu_model"]],
        "height": int(row["image_height"] or row["video_height"]),
        "width": int(row["image_width"] or row["video_width"]),
        "frames": int(row["num_frames"] or 1),
        "steps": int(row["inference_steps"]),
        "batch": int(row["batch_size"]),
        "parallelism": {"ulysses": int(row["ulysses_degree"]), "ring": int(row["ring_degree"])},
    }
    return job_from(raw)


def with_efficiency(row: dict[str, str], setup: DiffusionSetup, efficiency: float | None) -> ScoredRow:
    """Predict a row; None takes the shipped efficiency."""
    job = msgspec.structs.replace(setup.job, efficiency=efficiency)
    result = simulate_diffusion(replace(setup, job=job))
    return ScoredRow(row, setup, efficiency or 0.0, result.batch_s, result.energy_j or 0.0)


def fitted(rows: Sequence[tuple[dict[str, str], DiffusionSetup]]) -> dict[str, dict[float, list[float]]]:
    """Return device -> efficiency -> absolute errors of latency."""
    errors: dict[str, dict[float, list[float]]] = {}
    for row, setup in rows:
        of_device = errors.setdefault(setup.device.name, {float(value): [] for value in EFFICIENCIES})
        for value, those in of_device.items():
            those.append(abs(with_efficiency(row, setup, value).errors[0]))
    return errors


def best(errors: dict[float, list[float]], others: Sequence[bool]) -> float:
    """Return the efficiency with the least median error over the rows that `others` chooses."""
    chosen = np.asarray(others)
    return min(errors, key=lambda value: float(np.median(np.asarray(errors[value])[chosen])))


def without_each_model(rows: Sequence[tuple[dict[str, str], DiffusionSetup]]) -> list[ScoredRow]:
    """Predict every row with the efficiency of its device that the other models give."""
    errors, scored = fitted(rows), []
    for device in errors:
        ours = [(row, setup) for row, setup in rows if setup.device.name == device]
        for model in sorted({row["model_id"] for row, _ in ours}):
            value = best(errors[device], [row["model_id"] != model for row, _ in ours])
            scored += [with_efficiency(row, setup, value) for row, setup in ours if row["model_id"] == model]
        print(f"{device}: {best(errors[device], [True] * len(ours)):.3f} on all {len(ours)} rows")
    return scored


def shared_grid(rows: Sequence[tuple[dict[str, str], DiffusionSetup]]) -> tuple[Any, list[tuple[float, ...]]]:
    """Return relative errors of latency `[figures, efficiency, row]` and the figures of each point of the grid.

    Figures are factors on the shipped times of products, attention and elementwise operators, microseconds of a launch
    and seconds to save a megapixel.
    """
    parts = np.array([row_parts(setup) for _, setup in rows])
    measured = np.array([float(row["batch_latency_s"]) for row, _ in rows])
    factors = (0.8, 0.9, 1.0, 1.15, 1.33)
    points: list[tuple[float, ...]] = list(
        itertools.product(factors, factors, factors, (13.0, 17.0, 21.0), (0.06, 0.12, 0.2))
    )
    errors = np.empty((len(points), len(EFFICIENCIES), len(rows)), np.float32)
    for index, (products, attention, elementwise, host_us, saving) in enumerate(points):
        busy = parts[:, :4] @ np.array([products, attention, elementwise, 1.0])
        for place, efficiency in enumerate(EFFICIENCIES):
            steps = np.maximum(busy / efficiency, parts[:, 5] * host_us * 1e-6)
            latency = steps + parts[:, 4] / efficiency + parts[:, 6] * saving
            errors[index, place] = latency / measured - 1
    return errors, points


def row_parts(setup: DiffusionSetup) -> list[float]:
    """Return seconds of products, attention, elementwise operators, exchange and ends; launches and megapixels."""
    job, model, pricer = setup.job, setup.model, Pricer(setup)
    step, ends = seconds_by_part(step_work(setup), pricer), seconds_by_part(ends_work(setup), pricer)
    passes = (job.steps or 1) * setup.sequential_passes
    launches = sum(blocks.number * block_kernels(model, blocks, setup.share) for blocks in model.blocks)
    pixels = job.batch * (job.height or 0) * (job.width or 0) if job.frames == 1 else 0
    named = [step.get(part, 0.0) * passes for part in ("products", "attention", "elementwise", "exchange")]
    return [*named, sum(ends.values()), float(launches * passes), pixels / 1e6]


def report_shared(rows: Sequence[tuple[dict[str, str], DiffusionSetup]]) -> None:
    """Print the errors of every model with shared figures and efficiencies chosen on the other models."""
    errors, points = shared_grid(rows)
    models = np.array([row["model_id"] for row, _ in rows])
    devices = np.array([setup.device.name for _, setup in rows])
    found, size = np.zeros(len(rows)), np.abs(errors)
    print("\n## Shared figures and efficiency chosen without the model\n")
    for model in sorted(set(models)):
        medians = {
            device: np.median(size[:, :, (models != model) & (devices == device)], axis=2)
            for device in sorted(set(devices))
        }
        chosen = int(np.argmin(sum(each.min(axis=1) for each in medians.values())))
        for device, each in medians.items():
            ours = (models == model) & (devices == device)
            found[ours] = size[chosen, int(each[chosen].argmin())][ours]
        print(f"{model:52} {np.median(found[models == model]):6.1%}  {points[chosen]}")
    print(f"all: {np.median(found):.1%} / {found.mean():.1%} / {np.quantile(found, 0.9):.1%}")


def line_of(name: str, rows: Sequence[ScoredRow]) -> str:
    """Return a line of the table."""
    cells = []
    for index in range(2):
        errors = np.array([row.errors[index] for row in rows])
        size = np.abs(errors)
        bias, p90 = np.median(errors), np.quantile(size, 0.9)
        cells.append(f"{np.median(size):.1%} / {size.mean():.1%} / {p90:.1%} ({bias:+.1%})")
    efficiencies = sorted({f"{row.efficiency:.2f}" for row in rows if row.efficiency})
    return f"| {name} | {len(rows)} | {' | '.join(cells)} | {', '.join(efficiencies[:4])} |"


GROUPS: dict[str, Callable[[ScoredRow], str]] = {
    "task": lambda row: row.row["task"],
    "device": lambda row: row.row["gpu_model"],
    "GPUs": lambda row: row.row["num_gpus"],
    "batch": lambda row: f"{int(row.row['batch_size']):2}",
    "model": lambda row: f"{row.row['nickname']}, {row.row['gpu_model']}",
}


def report(title: str, rows: Sequence[ScoredRow], prints_rows: bool) -> None:
    """Print the errors of all rows and of groups."""
    print(f"\n## {title}\n\nMedian / mean / p90 of the absolute error (bias)\n")
    print("| rows | number | latency | joules each | efficiency |\n|---|---:|---:|---:|---:|")
    print(line_of("all", rows))
    for name, key in GROUPS.items():
        for group in sorted({key(row) for row in rows}):
            print(line_of(f"{name}: {group}", [row for row in rows if key(row) == group]))
    for row in rows if prints_rows else ():
        of, split = row.row, row.setup.job.parallelism
        print(
            f"{of['nickname']:28} {of['gpu_model']} u{split.ulysses} r{split.ring} b{of['batch_size']:>2} "
            f"{float(of['batch_latency_s']):9.2f} {row.latency_s:9.2f} {row.errors[0]:+7.1%} {row.errors[1]:+7.1%}"
        )


def main() -> int:
    """Score the rows that the options choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", nargs="?", type=Path, default=REFERENCE, metavar="DIR")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--shipped", action="store_true", help="only with the shipped efficiencies")
    parser.add_argument("--shared", action="store_true", help="choose shared figures without each model too")
    options = parser.parse_args()
    file = options.reference / FILE
    if not file.is_file():
        print(f"skipped: there is no recorded reference data at {file}")
        return 0
    with file.open(newline="", encoding="utf-8") as text:
        rows = list(csv.DictReader(text))
    resolved, refused = [], Counter[str]()
    for row in rows:
        try:
            resolved.append((row, resolve(job_of(row))))
        except InputError as error:
            refused[error.message] += 1
    print(f"{len(rows)} rows, {len(resolved)} scored, {refused.total()} refused")
    for reason, count in refused.most_common():
        print(f"- {count} x {reason}")
    report("Shipped efficiencies", [with_efficiency(row, setup, None) for row, setup in resolved], options.rows)
    if not options.shipped:
        report("Efficiency fitted without the model", without_each_model(resolved), False)
    if options.shared:
        report_shared(resolved)
    return 0


if __name__ == "__main__":
    sys.exit(main())
