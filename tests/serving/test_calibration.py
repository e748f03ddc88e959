"""Calibrations are found by engine and device, refused for another engine, and say what they do not cover."""

from pathlib import Path

import pytest
import yaml

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.schema import encode
from windtunnel.serving.calibration import Calibration, acceptance_of, calibration_for, load_calibration, outside
from windtunnel.serving.deployment import HostOverheads
from windtunnel.serving.scenario import resolve
from windtunnel.serving.shorthand import scenario
from windtunnel.workload.client import client_of

RAW = {
    "engine": "vllm",
    "device": "h100_sxm",
    "host": {"step_s": "2.5ms", "request_s": "30us"},
    "factors": {"gemm.memory": 1.05},
    "spread": {"tpot": {"p10": 0.9, "p50": 1.0, "p90": 1.1, "num_runs": 20}},
    "provenance": {
        "fitted_on": "runs.csv",
        "num_runs": 20,
        "num_configurations": 4,
        "models": ["a"],
        "devices": ["h100_sxm"],
        "formats": ["fp8"],
        "versions": ["0.19.0"],
    },
}

INFERRED = {
    "device": "h100_sxm",
    "version": "0.19.0",
    "model": "meta-llama/Llama-3.1-8B",
    "num_runs": 2,
    "num_configurations": 1,
}


def saved(folder: Path, **changed: object) -> str:
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump({**RAW, **changed}), encoding="utf-8")
    return str(path)


def test_a_file_is_read_with_its_units_and_written_back_equal(tmp_path: Path) -> None:
    found = load_calibration(saved(tmp_path))
    assert found.host.step_s == 2.5e-3
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(encode(found)), encoding="utf-8")
    assert load_calibration(str(again)) == found


def test_a_calibration_has_times_of_the_clients_of_its_runs_alone(tmp_path: Path) -> None:
    clients = {"inferencex": {"stream_s": "70us"}}
    path = saved(tmp_path, clients=clients)

    def stream_s(client: str | None) -> float | None:
        engine = {"engine": "vllm", "calibration": path, "client": client}
        made = scenario(
            model="llama-3.1-8b", device="h100_sxm", concurrency=1, input_tokens=8, output_tokens=8, **engine
        )
        return resolve(made).client.stream_s

    assert stream_s("inferencex") == 70e-6
    assert stream_s(None) == stream_s("vllm") == client_of(None).stream_s != 70e-6


def test_a_model_new_to_the_device_and_another_client_are_remarked_on(tmp_path: Path) -> None:
    raw = {**RAW["provenance"], "models": ["a", "b"], "devices": ["h100_sxm", "h200_sxm"]}
    raw["models_on"] = {"h100_sxm": ["a"], "h200_sxm": ["b"]}
    found = load_calibration(saved(tmp_path, provenance=raw, clients={"inferencex": {"stream_s": "70us"}}))

    def kinds(device: str, model: str, version: str, client: str) -> list[str]:
        return list(outside(found, device, model, ("fp8",), version, client).values())

    assert kinds("h100_sxm", "a", "0.19.0", "inferencex") == kinds("h200_sxm", "b", "0.19.0", "") == []
    assert kinds("h100_sxm", "b", "0.19.0", "inferencex") == ["model"]
    assert kinds("h100_sxm", "c", "0.20.0", "python") == ["model", "client", "version"]


def test_the_engine_must_be_the_calibrations(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is of vllm, and the engine is sglang"):
        calibration_for("sglang", "h100_sxm", "0.5.9", saved(tmp_path))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"factors": {"gemm.memory": 0.0}}, "more than 0"),
        ({"spread": {"latency": {"p10": 1, "p50": 1, "p90": 1, "num_runs": 1}}}, "no spread of 'latency'"),
        ({"spread": {"tpot": {"p10": 2, "p50": 1, "p90": 1, "num_runs": 1}}}, "do not ascend"),
        ({"factor": {}}, "unknown key"),
        ({"inferred": [{**INFERRED, "settings": {"max_num_seqs": 12.5}}]}, "settings.max_num_seqs cannot be 12.5"),
        ({"inferred": [{**INFERRED, "settings": {"gpu_memory_utilization": 7}}]}, "utilization cannot be 7"),
        ({"inferred": [{**INFERRED, "settings": {"most_seqs": 8}}]}, "most_seqs is no setting"),
        ({"reserve": {"reserved_bytes": -1, "num_runs": 2, "num_configurations": 1}}, "at least 0"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_calibration(saved(tmp_path, **changed))


def test_none_turns_it_off_and_an_unknown_name_is_refused() -> None:
    off = calibration_for("vllm", "h100_sxm", "0.18.0", "none")
    assert (off.calibration, off.reason) == (None, "none was asked for")
    with pytest.raises(InputError, match="no calibration 'vlm-h100'"):
        calibration_for("vllm", "h100_sxm", "0.18.0", "vlm-h100")


def test_a_shipped_one_is_taken_for_versions_between_those_of_its_runs() -> None:
    versions = load_calibration("vllm").provenance.versions
    assert "" not in versions
    assert calibration_for("vllm", "a100_sxm", "0.17.1").name == "vllm"
    assert calibration_for("vllm", "h100_sxm", "0.17.1").name == "vllm-h100_sxm"
    newest_on_h100 = load_calibration("vllm-h100_sxm").provenance.versions[-1]
    assert newest_on_h100 != versions[-1]
    assert calibration_for("vllm", "h100_sxm", versions[-1]).name == "vllm"


@pytest.mark.parametrize("version", ["0.9.0", "0.24.0", "nightly"])
def test_versions_outside_all_runs_take_the_nearest_and_say_so(version: str) -> None:
    choice = calibration_for("vllm", "h100_sxm", version)
    # Among the runs on H100 there is none of the newest measured version.
    assert choice.name == ("vllm-h100_sxm" if version == "0.9.0" else "vllm")
    assert choice.calibration is not None
    assert f"version {version} lies outside 0.10.2 to" in str(outside(choice.calibration, "h100_sxm", "", (), version))
    assert choice.calibration.host_of(version) == choice.calibration.host
    # Half of each factor holds for an older release, as a power, and none for a newer one; an unreleased one keeps all.
    shipped = load_calibration(str(choice.name)).factors
    share = {"0.9.0": 0.5, "0.24.0": 0.0, "nightly": 1.0}[version]
    assert choice.calibration.factors == ({name: factor**share for name, factor in shipped.items()} if share else {})
    assert calibration_for("vllm", "h100_sxm", "0.17.1").calibration == load_calibration("vllm-h100_sxm")


def test_what_ships_says_how_many_draft_tokens_are_accepted() -> None:
    """Without it `validate` refuses every run with drafts that did not record it."""
    for name in catalog.names("calibrations"):
        learnt = load_calibration(name).acceptance
        assert len(learnt) == 6
        three = acceptance_of(learnt, "deepseek-ai/DeepSeek-R1-0528", 4)
        assert three is not None, name
        assert three.num_draft_tokens == 3
        assert acceptance_of(learnt, "meta-llama/Llama-3.1-8B", 3) is None


def test_a_newer_release_takes_half_of_the_overheads() -> None:
    usual = HostOverheads(step_s=0.001, launch_s=40e-6)
    newer = calibration_for("vllm", "h100_sxm", "0.24.0")
    learnt = load_calibration("vllm").host
    assert learnt.step_s is not None
    assert learnt.launch_s is not None
    host = newer.host("0.24.0", usual)
    assert host.step_s == pytest.approx((0.001 * learnt.step_s) ** 0.5)
    assert host.launch_s == pytest.approx((40e-6 * learnt.launch_s) ** 0.5)
    assert host.request_s == learnt.request_s  # there is no usual one
    within = calibration_for("vllm", "h100_sxm", "0.17.1")
    assert within.calibration is not None
    assert within.host("0.17.1", usual) == within.calibration.host_of("0.17.1")


def test_what_lies_outside_is_said(tmp_path: Path) -> None:
    found: Calibration = load_calibration(saved(tmp_path))
    assert outside(found, "h100_sxm", "a", ("fp8",), "0.19.0") == {}
    assert len(outside(found, "h200_sxm", "b", ("nvfp4",), "0.24.0")) == 4


@pytest.mark.parametrize("name", catalog.names("calibrations"))
def test_shipped_ones_carry_their_record(name: str) -> None:
    found = load_calibration(name)
    assert name == (found.engine if found.device is None else f"{found.engine}-{found.device}")
    assert found.provenance.num_runs > 0
    assert found.provenance.median_error["tpot"] > 0


def test_a_folder_with_the_name_of_a_shipped_calibration_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = load_calibration("vllm")
    (tmp_path / "vllm").mkdir()  # as where the engine's source is cloned
    monkeypatch.chdir(tmp_path)
    assert load_calibration("vllm") == shipped
