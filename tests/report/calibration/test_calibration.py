"""What a user is told about a fitted calibration."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from windtunnel.report.calibration.calibration import calibration_report
from windtunnel.report.calibration.validation import verdict_of
from windtunnel.report.render.terminal import parts_of
from windtunnel.serving.calibration import Calibration, Provenance, Reserve


def told(before: float, after: float, num_runs: int = 4, reserve: Reserve | None = None) -> str:
    record = Provenance(
        fitted_on="runs",
        num_runs=4,
        num_configurations=2,
        median_error_before={"tpot": before, "ttft": 0.2},
        median_error={"tpot": after, "ttft": 0.1},
    )
    console = Console(file=StringIO(), width=120)
    made = {"vllm": Calibration(engine="vllm", provenance=record, reserve=reserve)}
    for part in parts_of(calibration_report(made, num_runs, num_runs, Path("out.yaml"))):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_fit_that_predicts_unseen_runs_worse_says_so() -> None:
    assert "vllm: TPOT no better for it on configurations left out" in told(before=0.05, after=0.08)
    assert "no better" not in told(before=0.08, after=0.05)


def test_where_all_runs_were_of_separate_pools_no_count_of_others_stands() -> None:
    assert "4 of 4 runs fitted" in told(0.1, 0.1)
    alone = told(0.1, 0.1, num_runs=0)
    assert "Only transfers fitted" in alone
    assert "0 of" not in alone


def test_a_value_that_no_other_configuration_speaks_for_is_told_apart() -> None:
    one, two = (Reserve(reserved_bytes=2**30, num_runs=4, num_configurations=count) for count in (1, 2))
    assert "the same runs that the value was inferred from" in told(0.1, 0.1, reserve=one)
    assert "reserved_bytes 1.00 GiB" in told(0.1, 0.1, reserve=two)
    assert "the same runs that the value was inferred from" not in told(0.1, 0.1, reserve=two)


def test_the_first_sentence_of_a_validation_names_runs_whose_devices_waited() -> None:
    rows = [{"id": f"run {number}", "waited": True} for number in range(5)] + [{"id": "other"}]
    text = verdict_of({"scores": {"tpot": {"median": 0.5}}, "rows": rows})
    assert text.endswith("Devices waited for their host or the client in run 0, run 1, run 2 and 2 more.")
    assert verdict_of({"scores": {"tpot": {"median": 0.5}}, "rows": rows[-1:]}) == "Median error: TPOT 50.0%."
