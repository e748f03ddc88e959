"""Recorded steps of vLLM on B300 against their prices: nothing fitted, after each run's first steps, and wider TP.

    python benchmarks/engine_steps.py DIR [--calibration NAME]

DIR holds `engine_steps/` (`runs.csv` and `steps.csv.gz`: Qwen3-32B and Qwen3.6-35B-A3B on vLLM 0.20.1, a row a forward
pass); it is also taken from WINDTUNNEL_REFERENCE. First steps, which hold compilation, and pairs of steps that were
recorded together are left out and counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reference import REFERENCE
from windtunnel.calibration.steps.fit import fit_factors, scores_by_kind, validate_steps
from windtunnel.calibration.steps.price import KINDS, PricedSteps
from windtunnel.calibration.steps.read import StepRun, read_step_runs
from windtunnel.metrics.accuracy import Score

DEVICE = "b300_sxm"
LEARNT_UP_TO_TP = 2


def with_random_tokens(run: StepRun) -> StepRun:
    """Return the run with prompts of random tokens, as `prompt_token_mode` says of five runs; nine say `safe_ascii`."""
    return run if run.setup is None else replace(run, setup=replace(run.setup, random_tokens=True))


def held_out_by_tp(runs: Sequence[PricedSteps]) -> list[PricedSteps]:
    """Fit factors on each model's runs up to TP 2, and return its wider runs with corrected predictions."""
    narrow: dict[str, list[PricedSteps]] = {}
    wide = []
    for run in runs:
        assert run.run.setup is not None
        if run.run.setup.parallelism.tp <= LEARNT_UP_TO_TP:
            narrow.setdefault(run.run.model, []).append(run)
        else:
            wide.append(run)
    factors = {model: fit_factors(members) for model, members in narrow.items()}
    return [factors[run.run.model].applied(run) for run in wide if run.run.model in factors]


def cell(score: Score | None) -> str:
    """Median, 90th percentile and bias, in percent."""
    return "" if score is None else f"{score.median:.1%} / {score.p90:.0%} / {score.bias:+.1%}"


def print_table(title: str, runs: list[PricedSteps]) -> None:
    print(f"\n{title}\n\n| run | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    for label, members in [*((run.run.label, [run]) for run in runs), ("all", runs)]:
        scores = scores_by_kind(members)
        print(f"| {label} | {' | '.join(cell(scores.get(kind)) for kind in KINDS)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=REFERENCE)
    parser.add_argument("--calibration", help="in place of the one that the version has")
    arguments = parser.parse_args()
    folder = arguments.folder / "engine_steps"
    if not (folder / "runs.csv").is_file():
        sys.exit(f"error: {folder / 'runs.csv'} is not there\nhint: give the folder that holds engine_steps/runs.csv")
    runs = read_step_runs(folder, {}, {"device": DEVICE, "calibration": arguments.calibration})
    validation = validate_steps([with_random_tokens(run) for run in runs])
    print("median / p90 / bias of predicted over measured, less one")
    print_table("Nothing fitted", list(validation.priced))
    print_table("After the first 5% of each run's steps", list(validation.after_first.values()))
    print_table("TP 4, learnt from TP 1 and 2", held_out_by_tp(validation.priced))
    print("\nParts of measured less predicted seconds that terms explain\n\n| run | parts |\n|---|---|")
    for name, shares in validation.shares.items():
        print(f"| {name} | {', '.join(f'{term} {share:.0%}' for term, share in shares.items() if abs(share) > 0.02)} |")
    for steps in validation.priced:
        for reason, count in steps.left_out.items():
            print(f"{steps.run.name}: {count:,} left out: {reason}")
    for run in validation.refused:
        print(f"{run.name}: refused: {run.refused}")


if __name__ == "__main__":
    main()
