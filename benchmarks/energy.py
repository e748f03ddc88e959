"""Power and energy of ML.ENERGY's runs of vLLM on H100 and B200 against their simulation.

    python benchmarks/energy.py DIR              every row of text, images and videos
    python benchmarks/energy.py DIR --fit        fit the curves of `metrics/power.yaml` again, and write them

DIR holds `mlenergy/llm_serving_energy.csv`; it is also taken from WINDTUNNEL_REFERENCE. Runs are those of
`benchmarks/mlenergy.py`, and their power is the mean of the steady part. The curve of a device's draw,
steps + memory x MBU + compute x the root of MFU, is scored twice: with all rows of a model left out of its fit ("held
out"), and as shipped. "Power alone" takes the measured time of a token in place of the predicted one, so that only the
curve can be wrong; joules of a token have the errors of both. Rows flagged as those of a slow server, and block-scaled
experts in padded blocks, whose arithmetic MFU does not count, are scored and not fitted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from mlenergy import (
    REPOSITORY,
    TEXT_TASKS,
    VERSION,
    VISION_TOKENS,
    Row,
    ScoredRow,
    is_steady,
    measured_as,
    odd_series,
    read_rows,
    scenario_of,
)
from reference import REFERENCE
from windtunnel.calibration.validate import LEAST_SLOWER
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import score
from windtunnel.metrics.power import PowerCurve, PowerTerms, curve_of, waited
from windtunnel.model.precision import Format
from windtunnel.serving.analysis.device_use import step_work
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import resolve
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.simulate import simulate

CURVES = REPOSITORY / "src" / "windtunnel" / "metrics" / "power.yaml"
NUM_STEPS = 256
"""Steps of the steady part, evenly spaced, that stand for it."""

HEAD = """\
# Draw of a device in a step as a share of its thermal design power: steps + memory x MBU + compute x the root of MFU,
# at most 1. Fitted to ML.ENERGY's runs of vLLM 0.11.1 on H100 and B200 by `python benchmarks/energy.py --fit`; `other`
# is fitted to both together.
"""


@dataclass(frozen=True)
class PoweredRow:
    """A run: its steady steps' use of memory and arithmetic `[num_steps]`, and its measured power."""

    scored: ScoredRow
    architecture: str
    tdp_w: float
    num_devices: int
    is_padded: bool
    duration_s: Any
    mbu: Any
    mfu: Any

    @property
    def measured_fraction(self) -> float:
        return float(self.scored.row["avg_power_watts"]) / self.num_devices / self.tdp_w

    @property
    def slower(self) -> float:
        """Measured over predicted time of a token."""
        return self.scored.predicted["rate"] / self.scored.measured["rate"]

    def fraction(self, curve: PowerCurve, slower: float = 1.0) -> float:
        """Return the mean share of the power limit, where every step takes `slower` times its predicted time."""
        return float(np.average(curve.fraction(self.mbu / slower, self.mfu / slower), weights=self.duration_s))

    def waited(self, curve: PowerCurve) -> bool:
        """Whether `windtunnel validate` says that its devices waited."""
        slow, idle = self.fraction(curve, self.slower), PowerTerms().idle_fraction
        is_waiting = waited(self.measured_fraction, slow, self.fraction(curve), idle, self.slower)
        return self.slower >= LEAST_SLOWER and is_waiting

    def joules(self, curve: PowerCurve) -> float:
        return self.fraction(curve) * self.tdp_w * self.num_devices / self.scored.predicted["rate"]


def powered(row: Row, histograms: Any, estimator_of: Any) -> PoweredRow | str:
    """Return a row with its simulation, or the reason why it has none."""
    try:
        scenario = scenario_of(row, histograms, VERSION)
        result = simulate(scenario, estimator_of(resolve(scenario)))
    except InputError as error:
        return error.message
    num_seqs, rate = int(row["max_num_seqs"]), float(row["output_throughput_tokens_per_sec"])
    measured = {"mean": float(row["avg_batch_size"]) / rate, "rate": rate}
    steps, setup = result.steps, result.setup
    inside = np.flatnonzero(is_steady(steps, result.requests, num_seqs))
    steady = steps.where(inside[np.linspace(0, inside.size - 1, min(NUM_STEPS, inside.size)).astype(int)])
    work, tdp_w = step_work(setup.device, shard_of(setup), steady), setup.device.tdp_w
    assert tdp_w is not None
    return PoweredRow(
        ScoredRow(row, scenario, measured, measured_as(steps, result.requests, num_seqs)),
        setup.device.architecture,
        tdp_w,
        int(row["num_gpus"]),
        setup.model.has_experts and setup.precision.experts_format is Format.FP8_BLOCK,
        steady["duration_s"],
        (work.body_memory_s + work.head_memory_s) / steady["duration_s"],
        (work.body_compute_s + work.head_compute_s) / steady["duration_s"],
    )


def powered_part(rows: Sequence[Row], histograms: Any) -> list[PoweredRow | str]:
    estimator_of = PricedDeployments().estimator
    return [powered(row, histograms, estimator_of) for row in rows]


def fitted(rows: Sequence[PoweredRow]) -> PowerCurve:
    """Return the curve whose relative errors at the measured times are smallest; large ones count with their root."""

    def errors(values: Any) -> Any:
        curve = curve_from(values)
        return [row.fraction(curve, row.slower) / row.measured_fraction - 1 for row in rows]

    found = least_squares(errors, [0.4, 0.3, 0.7], bounds=(0, 2), loss="soft_l1", f_scale=0.1)
    return curve_from(np.round(found.x, 3))


def curve_from(values: Sequence[float]) -> PowerCurve:
    steps, memory, compute = (float(value) for value in values)
    return PowerCurve(steps=steps, memory=memory, compute=compute)


def held_out(rows: Sequence[PoweredRow], is_fitted: Sequence[bool]) -> list[PowerCurve]:
    """Return each row's curve, fitted to the rows of its architecture with all of its model left out."""
    curves: dict[tuple[str, str], PowerCurve] = {}
    for row in rows:
        key = row.architecture, row.scored.row["model_id"]
        if key not in curves:
            curves[key] = fitted(
                [
                    other
                    for other, fits in zip(rows, is_fitted, strict=True)
                    if fits and other.architecture == key[0] and other.scored.row["model_id"] != key[1]
                ]
            )
    return [curves[row.architecture, row.scored.row["model_id"]] for row in rows]


def table(rows: Sequence[PoweredRow], curves: Sequence[PowerCurve], is_fitted: Sequence[bool]) -> str:
    """Return the errors by group."""
    both = list(zip(rows, curves, strict=True))
    alone = [row.fraction(curve, row.slower) / row.measured_fraction - 1 for row, curve in both]
    watts = [row.fraction(curve) / row.measured_fraction - 1 for row, curve in both]
    joules = [row.joules(curve) / float(row.scored.row["energy_per_token_joules"]) - 1 for row, curve in both]
    rated = [1 / row.measured_fraction - 1 for row in rows]
    groups = {
        "all": [True] * len(rows),
        "all that are fitted": is_fitted,
        **{f"{device}": [row.scored.row["gpu_model"] == device for row in rows] for device in ("H100", "B200")},
        **{task: [row.scored.row["task"] == task for row in rows] for task in (*TEXT_TASKS, *VISION_TOKENS)},
        "experts in padded blocks": [row.is_padded for row in rows],
    }
    lines = [
        "| rows | number | power alone | power | joules a token | thermal design power in place of the curve |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, chosen in groups.items():
        cells = []
        for errors in (alone, watts, joules, rated):
            found = score([error for error, taken in zip(errors, chosen, strict=True) if taken])
            assert found is not None
            cells.append(f"{found.median:.1%} / {found.p90:.1%} ({found.bias:+.1%})")
        lines.append(f"| {name} | {sum(chosen)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", nargs="?", type=Path, default=REFERENCE, metavar="DIR")
    parser.add_argument("--fit", action="store_true", help="fit the curves again and write them")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every so-many-th row")
    options = parser.parse_args()
    rows, histograms = read_rows(options.reference)
    if not rows:
        return 0
    rows = sorted(rows[:: options.every], key=lambda row: (row["model_id"], row["gpu_model"], row["num_gpus"]))
    num_workers = min(os.cpu_count() or 1, len(rows))
    bounds = np.linspace(0, len(rows), num_workers + 1).astype(int)
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("fork")) as workers:
        parts = [workers.submit(powered_part, rows[a:b], histograms) for a, b in pairwise(bounds)]
        found = [row for part in parts for row in part.result()]
    done = [row for row in found if isinstance(row, PoweredRow)]
    print(f"{len(rows)} rows, {len(done)} scored, {len(rows) - len(done)} refused")
    for reason in sorted({row for row in found if isinstance(row, str)}):
        print(f"- {reason}")
    odd = odd_series([row.scored for row in done])
    is_fitted = [row.scored.series not in odd and not row.is_padded for row in done]
    kept = [row for row, fits in zip(done, is_fitted, strict=True) if fits]
    names = sorted({row.architecture for row in done})
    curves = {name: curve_of(name) for name in names}
    if options.fit:
        curves = {name: fitted([row for row in kept if row.architecture == name]) for name in names}
        lines = [f"  {name}: {words(curve)}" for name, curve in curves.items()]
        CURVES.write_text("\n".join([HEAD + "by_architecture:", *lines, f"other: {words(fitted(kept))}\n"]), "utf-8")
    print("\nMedian and 90th percentile of the absolute error (bias); a model's rows left out of its curve\n")
    print(table(done, held_out(done, is_fitted), is_fitted))
    print("\nAs shipped\n")
    print(table(done, [curves[row.architecture] for row in done], is_fitted))
    print_waiting(done, [row.waited(curves[row.architecture]) for row in done])
    return 0


def print_waiting(rows: Sequence[PoweredRow], waited: Sequence[bool]) -> None:
    """Print how many devices waited, and the errors of the median ITL with these rows and without."""
    idle = Counter(f"{row.num_devices} x {row.scored.row['gpu_model']}" for row in compress(rows, waited))
    print(f"\nIn {sum(waited)} rows, slower than predicted by a quarter, devices waited by their power: {dict(idle)}")
    errors = [row.scored.predicted["median"] * 1e3 / float(row.scored.row["median_itl_ms"]) - 1 for row in rows]
    for name, chosen in (("all", errors), ("others", [e for e, does in zip(errors, waited, strict=True) if not does])):
        each = score(chosen)
        assert each is not None
        print(f"median ITL of {name}, {len(chosen)} rows: {each.median:.1%} / {each.p90:.1%} ({each.bias:+.1%})")


def words(curve: PowerCurve) -> str:
    return f"{{steps: {curve.steps}, memory: {curve.memory}, compute: {curve.compute}}}"


if __name__ == "__main__":
    sys.exit(main())
