"""A version that nobody recorded is inferred from the other configurations' runs, and what explains them is said."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from windtunnel.calibration import releases
from windtunnel.calibration.measured_runs import Measurement, read_client_files, read_table
from windtunnel.calibration.releases import with_inferred_versions
from windtunnel.calibration.validate import RunPrediction, predict_runs
from windtunnel.errors import InputError
from windtunnel.report.calibration.validation import validation_document, validation_report
from windtunnel.serving.shorthand import scenario

pytestmark = pytest.mark.compiled

SORTS, NEWEST = "0.11.0", "0.33.0"
"""Releases whose samplers sort the vocabulary, and do not: at random sampling, steps of small models differ by half."""


def table(path: Path, versions: Mapping[str, str], written: str) -> Path:
    """Write a run of each configuration, measured as a release serves them, with `written` for its version."""
    header = "id,model,device,engine_version,tp,input_tokens,output_tokens,concurrency,num_requests,temperature,top_p"
    rows = [
        (f"tp{tp}", version, f"llama-3.1-8b,h100_sxm,VERSION,{tp},256,32,64,64,0.8,0.95")
        for tp, version in versions.items()
    ]
    path.write_text(
        "\n".join([f"{header},tpot_ms", *(f"{name},{row.replace('VERSION', own)},1" for name, own, row in rows)])
    )
    measured = [run.predicted["tpot"] * 1e3 for run in predict_runs(read_table(path))]
    lines = [
        f"{name},{row.replace('VERSION', written)},{ms!r}" for (name, _, row), ms in zip(rows, measured, strict=True)
    ]
    path.write_text("\n".join([f"{header},tpot_ms", *lines]))
    return path


@pytest.mark.slow
def test_the_release_that_explains_the_runs_is_taken_and_said(tmp_path: Path) -> None:
    runs = read_table(table(tmp_path / "runs.csv", {"1": SORTS, "2": SORTS}, "?"))
    assert all(run.scenario and run.scenario.deployment.engine.version is None for run in runs)
    assert not any(run.scenario and run.scenario.deployment.settings_assumed for run in runs)

    predictions = predict_runs(with_inferred_versions(runs))

    assert max(abs(run.error("tpot")) for run in predictions) < 0.02
    assert not any(run.measurement.unknown for run in predictions)
    [said] = validation_document(predictions)["inferred"]
    assert said.startswith("vLLM 0.1")
    assert "mean error 0% (" in said
    assert said.endswith(f"% with {NEWEST})")
    assert said in validation_report(predictions).lead


def priced(monkeypatch: pytest.MonkeyPatch, own: Mapping[str, str], refused: str = "") -> None:
    """Let each configuration be predicted right with the release that it ran, and 20% long with all others."""

    def predict(runs: Sequence[Measurement], *_: Any) -> list[RunPrediction]:
        return [
            RunPrediction(run, "", {"tpot": 1.0 if own[run.id] == run.labels["version"] else 1.2}, {}, "", {})
            if run.id != refused
            else RunPrediction(run, "no room", {}, {}, "", {})
            for run in runs
        ]

    monkeypatch.setattr(releases, "predict_runs", predict)


def unknown(names: Iterable[str]) -> list[Measurement]:
    made = scenario(model="llama-3.1-8b", device="h100_sxm", input_tokens=8, output_tokens=8, concurrency=1)
    return [
        Measurement(name, made, "", {"tpot": 1.0}, {"parallelism": name}, unknown=("engine_version",)) for name in names
    ]


def test_a_configuration_does_not_choose_its_own_release(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"tp1": "0.11", "tp2": "0.11", "tp4": "0.19"}
    priced(monkeypatch, own)
    runs = with_inferred_versions(unknown(own))
    assert runs[2].labels["version"] == "0.11"


def test_a_configuration_that_no_release_predicts_leaves_the_others_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"refused": "", "tp1": "0.11", "tp2": "0.19"}
    priced(monkeypatch, own, refused="refused")
    runs = with_inferred_versions(unknown(own))
    assert [run.labels["version"] for run in runs] == ["0.19", "0.19", "0.11"]


def test_a_version_that_is_known_stays_and_others_do_not_learn_from_it(tmp_path: Path) -> None:
    known = read_table(table(tmp_path / "known.csv", {"1": NEWEST}, NEWEST))
    assert with_inferred_versions(known) == known


def test_a_client_s_file_may_leave_the_version_open(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(
        json.dumps(
            {
                "backend": "vllm",
                "model_id": "llama-3.1-8b",
                "num_prompts": 32,
                "max_concurrency": 16,
                "completed": 32,
                "total_input_tokens": 32 * 256,
                "total_output_tokens": 32 * 32,
                "output_throughput": 2000.0,
                "mean_ttft_ms": 30.0,
                "mean_tpot_ms": 7.0,
            }
        )
    )
    engine = {"name": "vllm", "version": "?"}
    [run] = read_client_files(path, {"model": "llama-3.1-8b", "deployment": {"device": "h100_sxm", "engine": engine}})
    assert run.unknown == ("engine_version",)
    assert engine["version"] == "?"


def test_runs_that_no_release_predicts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "model,device,engine_version,tp,input_tokens,output_tokens,concurrency,tpot_ms\n"
        "llama-3.1-8b,h100_sxm,?,1,500000,32,1,9\n"
    )
    with pytest.raises(InputError, match="no release of vLLM predicts the runs whose engine_version"):
        with_inferred_versions(read_table(path))
