"""A run beside its simulation: the same numbers agree, errors have the right sign, and other workloads are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import read_capture
from windtunnel.report.lab.comparison import (
    HOST,
    METRICS,
    SUM,
    compare_run,
    compare_steps,
    comparison_report,
    request_columns,
)
from windtunnel.report.render.html import page
from windtunnel.report.render.terminal import show
from windtunnel.report.serving.run import write_run
from windtunnel.serving.scenario import Scenario, resolve, scenario_from
from windtunnel.serving.simulate import simulate


def scenario(model: str, **workload: Any) -> Scenario:
    load = {"arrivals": {"type": "closed_loop", "concurrency": 2}, "num_requests": 4}
    tokens = {"input_tokens": 64, "output_tokens": 8}
    return scenario_from({"model": model, "deployment": {"device": "h100_sxm"}, "workload": load | tokens | workload})


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 16384}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    rest = {"model_type": "llama", "max_position_embeddings": 2048, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(sizes | heads | rest))
    return str(path)


def test_a_run_against_itself_has_no_error_and_slower_ones_are_told(config: str, tmp_path: Path) -> None:
    wanted = scenario(config)
    write_run(simulate(wanted), tmp_path / "run")
    columns = request_columns(tmp_path / "run" / "requests.parquet")
    same = compare_run(tmp_path / "run", columns, resolve(wanted))
    assert [errors["mean_error"] for errors in same.document["requests"].values()] == [0, 0, 0]
    assert "was not profiled" in same.document["notes"][0]
    slower = columns | {name: columns[name] * 1.5 for name in METRICS}
    found = compare_run(tmp_path / "run", slower, resolve(wanted))
    for errors in found.document["requests"].values():
        kinds = ("mean_error", "median_error", "median_absolute_error_by_request")
        assert [errors[kind] for kind in kinds] == pytest.approx([0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_requests": 3}, "the run has 4 requests and the simulation 3"),
        ({"input_tokens": 32}, "request 0 has 64 input tokens in the run and 32 in the simulation"),
    ],
)
def test_another_workload_is_refused(changes: dict[str, int], message: str, config: str, tmp_path: Path) -> None:
    write_run(simulate(scenario(config)), tmp_path / "run")
    write_run(simulate(scenario(config, **changes)), tmp_path / "other")
    other = request_columns(tmp_path / "other" / "requests.parquet")
    with pytest.raises(InputError, match=message):
        compare_run(tmp_path / "run", other, resolve(scenario(config)))


@pytest.mark.full
def test_a_real_trace_stands_beside_the_simulated_steps(
    config: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = scenario(config)
    capture = read_capture(reference / "profiler" / "vllm_cpu_kineto.json.gz")
    steps, notes = compare_steps(capture, resolve(wanted))
    assert notes == []
    assert [(step["name"], step["num_steps"]) for step in steps] == [("Steps with prompts", 2), ("Decode steps", 19)]
    for step in steps:
        rows = {row["name"]: row for row in step["operators"]}
        for side in ("measured_s", "simulated_s"):
            parts = sum(row[side] or 0.0 for name, row in rows.items() if name != SUM)
            assert parts == pytest.approx(rows[SUM][side])
        assert rows["other"]["simulated_s"] is None
        assert rows["other"]["error"] is None
        # A processor of two cores against an H100: every product of weights is far slower.
        assert rows["gate_up_proj"]["error"] < -0.9
        assert rows[HOST]["measured_s"] == pytest.approx(rows[SUM]["measured_s"] * 0.24, rel=0.4)
    write_run(simulate(wanted), tmp_path / "run")
    columns = request_columns(tmp_path / "run" / "requests.parquet")
    found = compare_run(tmp_path / "run", columns, resolve(wanted))
    found = replace(found, document=found.document | {"steps": steps})
    text = page(comparison_report(found))
    assert text.count('<div class="chart">') == 5
    assert "src=" not in text
    assert steps[1]["operators"][-1]["name"] == SUM
    show(comparison_report(found))
    assert "Decode steps: mean of 19" in capsys.readouterr().out


@pytest.mark.full
def test_steps_that_the_engine_would_not_form_are_left_out_and_said(config: str, reference: Path) -> None:
    small = scenario_from(
        {
            "model": config,
            "deployment": {"device": "h100_sxm", "engine": {"name": "vllm", "max_num_batched_tokens": 200}},
            "workload": {
                "arrivals": {"type": "closed_loop", "concurrency": 1},
                "num_requests": 1,
                "input_tokens": 8,
                "output_tokens": 8,
            },
        }
    )
    capture = read_capture(reference / "profiler" / "vllm_cpu_kineto.json.gz")
    steps, notes = compare_steps(capture, resolve(small))
    assert [step["num_steps"] for step in steps] == [1, 19]
    assert notes[0].startswith("1 steps are left out: a step of 256 tokens is above max_num_batched_tokens")
