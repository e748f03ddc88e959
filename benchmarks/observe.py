"""What `windtunnel observe` learns from the first steps of recorded runs, judged on the others.

    python benchmarks/observe.py [DIR] [SHARE]

DIR holds `engine_steps/` (vLLM 0.20.1 on B300); it is also taken from WINDTUNNEL_REFERENCE. SHARE of each run's steps
is learnt from, 0.2 where it is not given. Errors of the others are those of the calibration file, priced again.
"""

import os
import sys
from pathlib import Path

from windtunnel.calibration.steps.price import KINDS
from windtunnel.calibration.steps.read import read_step_runs
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import Score
from windtunnel.production.observe import observe_steps


def cell(before: Score | None, after: Score | None) -> str:
    return "" if before is None or after is None else f"{before.median:.1%} -> {after.median:.1%}"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("WINDTUNNEL_REFERENCE", "../shared/reference"))
    share = float(sys.argv[2]) if len(sys.argv) > 2 else 0.2
    print(f"| run | learnt | {' | '.join(KINDS)} |\n|---|---|{'---|' * len(KINDS)}")
    num_runs, refused = 0, []
    for run in read_step_runs(folder / "engine_steps", {}, {"device": "b300_sxm"}):
        num_runs += 1
        try:
            made = observe_steps(run, share)
        except InputError as error:
            refused.append(error.message)
            continue
        cells = " | ".join(cell(made.before.get(kind), made.after.get(kind)) for kind in KINDS)
        print(f"| {made.run} | {made.learnt} | {cells} |", flush=True)
    print(f"\n{num_runs - len(refused)} of {num_runs} runs; refused: {'; '.join(refused) or 'none'}")


if __name__ == "__main__":
    main()
