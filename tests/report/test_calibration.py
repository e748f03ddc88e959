"""What a user is told about a fitted calibration."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from windtunnel.report.calibration import calibration_report
from windtunnel.spec.calibration import Calibration, Provenance


def told(before: float, after: float) -> str:
    record = Provenance(
        fitted_on="runs",
        num_runs=4,
        num_configurations=2,
        median_error_before={"tpot": before, "ttft": 0.2},
        median_error={"tpot": after, "ttft": 0.1},
    )
    console = Console(file=StringIO(), width=120)
    for part in calibration_report({"vllm": Calibration(engine="vllm", provenance=record)}, 4, 4, Path("out.yaml")):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_fit_that_predicts_unseen_runs_worse_says_so() -> None:
    assert "vllm: TPOT no better for it on configurations left out" in told(before=0.05, after=0.08)
    assert "no better" not in told(before=0.08, after=0.05)
