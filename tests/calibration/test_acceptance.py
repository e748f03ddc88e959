"""The share of accepted draft tokens that is fitted is the one that was put in; without one, such runs are refused."""

from pathlib import Path

import pytest
import yaml

from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.settings_inference import Drafting, acceptances, drafting
from windtunnel.calibration.validate import predict_runs
from windtunnel.report.calibration.validation import validation_document
from windtunnel.schema import encode
from windtunnel.serving.calibration import NONE, Calibration, Provenance
from windtunnel.serving.deployment import HostOverheads
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate

MODEL, SHARE = "meta-llama/Llama-3.1-8B", 0.65

FITTED = Calibration(
    engine="vllm",
    device="h100_sxm",
    host=HostOverheads(unhidden_step_s=1e-3),
    factors={"gemm.memory": 1.1},
    provenance=Provenance(fitted_on="a test", num_runs=1, num_configurations=1),
)


def speculating(concurrency: int, calibration: str) -> Scenario:
    return scenario(
        model="llama-3.1-8b",
        device="h100_sxm",
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        input_tokens=128,
        output_tokens=64,
        concurrency=concurrency,
        num_requests=3 * concurrency,
        calibration=calibration,
        settings={
            "deployment.engine.speculative": {"method": "ngram", "num_draft_tokens": 3, "acceptance_fraction": SHARE}
        },
    )


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "profile.yaml"
    path.write_text(yaml.safe_dump(encode(FITTED)), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def runs(profile: str) -> list[Measurement]:
    """Measured by the simulator itself, with the calibration and the true share; the record has lost the share."""
    found = []
    for concurrency in (1, 8):
        made = speculating(concurrency, profile)
        summary = simulate(made).summary
        assert summary.tpot_s is not None
        measured = {"tpot": summary.tpot_s.mean, "ttft": summary.ttft_s.mean}
        lost = Measurement(f"c{concurrency}", made, "", measured, {"engine": "vllm", "device": "h100_sxm"})
        found.append(Measurement(**{**vars(lost.accepting(0.0)), "lacks_acceptance": True}))
    return found


@pytest.mark.full
def test_the_share_that_was_put_in_is_found(runs: list[Measurement]) -> None:
    found = [one for _, one in drafting(runs, {"vllm-h100_sxm": FITTED}) if isinstance(one, Drafting)]
    assert len(found) == len(runs)
    (learnt,) = acceptances(found)
    assert (learnt.fraction, learnt.num_draft_tokens, learnt.num_runs) == (SHARE, 3, len(runs))
    assert max(one.error.min() for one in found) < 1e-6


@pytest.mark.full
def test_runs_without_a_share_are_refused_and_with_one_reported_apart(runs: list[Measurement], tmp_path: Path) -> None:
    plain = list(predict_runs(runs, calibration=NONE))
    assert all("no calibration is in force" in one.refused for one in plain)
    path = tmp_path / "with.yaml"
    learnt = {"model": MODEL, "num_draft_tokens": 3, "fraction": SHARE, "num_runs": 2}
    path.write_text(yaml.safe_dump(encode(FITTED) | {"acceptance": [learnt]}), encoding="utf-8")
    predicted = list(predict_runs(runs, calibration=str(path)))
    assert not any("draft tokens" in remark for one in predicted for remark in one.remarks)
    document = validation_document(predicted)
    assert document["predicted"] == len(runs)
    assert document["scores"]["tpot"] is None
    assert document["scores_of_acceptance_fitted"]["tpot"]["median"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.full
def test_the_nearest_number_of_draft_tokens_stands_in_and_is_said(runs: list[Measurement], tmp_path: Path) -> None:
    learnt = [
        {"model": MODEL, "num_draft_tokens": 2, "fraction": SHARE, "num_runs": 2},
        {"model": MODEL, "num_draft_tokens": 7, "fraction": 0.2, "num_runs": 2},
    ]
    path = tmp_path / "nearest.yaml"
    path.write_text(yaml.safe_dump(encode(FITTED) | {"acceptance": learnt}), encoding="utf-8")
    for one in predict_runs(runs, calibration=str(path)):
        assert one.predicted["tpot"] == pytest.approx(one.measurement.measured["tpot"])
        assert "the acceptance was measured with 2 draft tokens a step" in one.remarks


@pytest.mark.full
def test_a_run_that_cannot_be_said_tells_nothing(runs: list[Measurement]) -> None:
    unsaid = Measurement("unsaid", None, "it may draft", runs[0].measured, runs[0].labels, lacks_acceptance=True)
    assert [one.id for one, _ in drafting([unsaid, *runs], {})] == [one.id for one in runs]
