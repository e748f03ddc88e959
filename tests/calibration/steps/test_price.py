"""Prices of recorded steps: those of `explain_step`, of ranks that step together, and what is left out."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from windtunnel.calibration.steps.fit import Factors
from windtunnel.calibration.steps.price import KINDS, SLOW, TOGETHER, PricedSteps, batch_rows, price_run
from windtunnel.calibration.steps.read import StepRun, read_step_runs
from windtunnel.errors import InputError
from windtunnel.serving.explain import explain_step, step_batch
from windtunnel.serving.setup.estimators import estimator_for

HEADER = "dp_rank,counter,prefill_tokens,prefill_requests,prefill_kv_tokens,prefill_variance,decode_requests,"
HEADER += "decode_kv_tokens,decode_kv_variance,wall_time"
SMALL = {"model": "qwen2.5-0.5b", "device": "h100_sxm", "calibration": "none"}
EXPERTS = {"model": "Qwen/Qwen1.5-MoE-A2.7B", "device": "h100_sxm", "attention_dp": 2, "ep": 2, "calibration": "none"}


def run_of(tmp_path: Path, rows: list[str], options: dict[str, object]) -> StepRun:
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([HEADER, *rows]))
    (run,) = read_step_runs(path, {}, options)
    assert not run.refused
    return run


def priced(tmp_path: Path, rows: list[str], options: dict[str, object]) -> PricedSteps:
    return price_run(run_of(tmp_path, rows, options), estimator_for)


@pytest.mark.parametrize(
    ("row", "step"),
    [
        ("0,1,0,0,0,0,8,32760,0,0.01", (8, 4096)),
        ("0,1,256,1,896,0,0,0,0,0.01", (0, 0, 256, 896)),
        ("0,1,256,1,896,0,8,32760,0,0.01", (8, 4096, 256, 896)),
        ("0,1,512,1,0,0,0,0,0,0.01", (0, 0, 512)),
    ],
)
def test_a_step_costs_what_explain_says(tmp_path: Path, row: str, step: tuple[int, ...]) -> None:
    steps = priced(tmp_path, [row], SMALL)
    assert steps.run.setup is not None
    explanation = explain_step(steps.run.setup, step_batch(*step))
    assert steps.predicted_s[0] == pytest.approx(explanation.step_s, rel=1e-9)
    assert sum(steps.families_s.values())[0] == pytest.approx(explanation.step_s, rel=1e-9)
    gemm_s = explanation.seconds_by(lambda launch: launch.op.kind)["gemm"]
    head_s = explanation.seconds_by(lambda launch: launch.name)["lm_head"]
    assert steps.families_s["GEMM"][0] == pytest.approx(gemm_s - head_s, rel=1e-9)
    assert [KINDS[kind] for kind in steps.kind] == [
        "mixed" if step[0] and len(step) > 2 else "decode" if step[0] else "prefill"
    ]


@pytest.mark.full
@pytest.mark.parametrize(("device", "waits"), [("b200_sxm", True), ("h100_sxm", False)])
@pytest.mark.parametrize(("prompt", "requests", "padded"), [(0, 32, 32), (0, 18, 24), (16, 18, 18)])
def test_unequal_contexts_lengthen_attention_where_the_kernel_waits(
    tmp_path: Path, device: str, waits: bool, prompt: int, requests: int, padded: int
) -> None:
    """To a share of what the requests of the graph take that are all as long as the longest; of that family alone."""
    options, mean, deviation = {**SMALL, "device": device}, 2000, 6000.0
    longest = round(mean + deviation * np.sqrt(2 * np.log(requests))) + 1

    def families_s(prompt: int, requests: int, context: int, variance: float = 0.0) -> dict[str, float]:
        row = f"0,1,{prompt},{min(prompt, 1)},0,0,{requests},{requests * (context - 1)},{variance},0.01"
        return {name: float(seconds[0]) for name, seconds in priced(tmp_path, [row], options).families_s.items()}

    equal, unequal = families_s(prompt, requests, mean), families_s(prompt, requests, mean, deviation**2)
    added_s = {name: unequal[name] - equal[name] for name in equal}
    last_s = 0.48 * families_s(prompt, padded, longest)["attention decode"] if waits else 0.0
    assert last_s > equal["attention decode"] or not waits
    expected_s = max(last_s - equal["attention decode"], 0.0)
    assert added_s.pop("attention decode") == pytest.approx(expected_s, rel=2e-3, abs=1e-12)
    added_s.pop("host floor")  # of so small a model the host hides some of it
    assert all(abs(seconds) < 1e-12 for seconds in added_s.values())


def test_the_pairs_of_whole_prompts_are_exact(tmp_path: Path) -> None:
    lengths = np.array([100.0, 300.0, 50.0])
    row = f"0,1,{lengths.sum():.0f},3,0,{lengths.var()},0,0,0,0.01"
    rows = batch_rows(run_of(tmp_path, [row, "0,2,512,1,1024,9e9,0,0,0,0.01"], SMALL).steps)
    assert rows["prefill_pairs"].tolist() == pytest.approx([(lengths**2).sum() / 2, 512 * (1024 + 256)])


@pytest.mark.full
@pytest.mark.parametrize("batch", ["0,0,0,0,8,32760,5.5", "256,1,0,0,0,0,0"])
def test_ranks_that_step_together_are_one_step(tmp_path: Path, batch: str) -> None:
    """Rows may be interleaved. A rank that nobody recorded is taken to be as busy as the others."""
    both = priced(
        tmp_path, [f"0,1,{batch},0.02", f"1,2,{batch},0.01", f"0,2,{batch},0.02", f"1,1,{batch},0.01"], EXPERTS
    )
    one = priced(tmp_path, [f"0,1,{batch},0.02"], EXPERTS)
    assert both.predicted_s == pytest.approx([one.predicted_s[0]] * 2)
    assert both.measured_s.tolist() == [0.02, 0.02]
    assert any("1 of 2 attention data-parallel ranks" in text for text in one.run.remarks)
    assert both.run.remarks == ()


def test_a_rank_that_nobody_recorded_decodes_beside_a_prompt_of_another(tmp_path: Path) -> None:
    batch, decodes = "256,1,0,0,8,32760,5.5,0.02", "0,0,0,0,8,32760,5.5,0.02"
    last = ["0,2,0,0,0,0,8,32760,5.5,0.02", "1,2,0,0,0,0,8,32760,5.5,0.02"]
    one = priced(tmp_path, [f"0,1,{batch}", last[0]], EXPERTS)
    beside, both = (priced(tmp_path, [f"0,1,{batch}", f"1,1,{other}", *last], EXPERTS) for other in (decodes, batch))
    assert one.predicted_s[0] == pytest.approx(beside.predicted_s[0])
    assert one.predicted_s[0] + one.others_s[0] == pytest.approx(both.predicted_s[0])
    assert one.others_s[0] > 0.0
    assert both.others_s.tolist() == [0.0, 0.0]


def test_the_launch_of_the_next_step_belongs_to_that_step(tmp_path: Path) -> None:
    """A decode step before a mixed one is recorded 4 ms late, and the mixed one as much shorter."""
    decode, mixed = "0,0,0,0,8,32760,0", "256,1,0,0,8,32760,0"
    times_ms = [10.0, 10.0, 10.0, 14.0, 26.0]
    rows = [f"0,{number},{mixed if number % 5 == 4 else decode},{times_ms[number % 5] / 1e3}" for number in range(40)]
    steps = priced(tmp_path, rows, SMALL)
    assert steps.measured_s.tolist() == pytest.approx([0.01, 0.01, 0.01, 0.01, 0.03] * 8)
    apart = [row.replace(f"0,{number}", f"0,{2 * number}", 1) for number, row in enumerate(rows)]
    assert priced(tmp_path, apart, SMALL).measured_s[3:5].tolist() == pytest.approx([0.014, 0.026])


def test_replicas_and_rows_without_counters_are_steps_of_their_own(tmp_path: Path) -> None:
    batch = "0,0,0,0,8,32760,0,0.01"
    assert priced(tmp_path, [f"0,1,{batch}", f"1,1,{batch}"], SMALL).kind.size == 2
    assert priced(tmp_path, [f"0,0,{batch}", f"1,0,{batch}"], EXPERTS).kind.size == 2


def test_the_busiest_rank_and_the_tokens_of_all_decide(tmp_path: Path) -> None:
    small, large, last = "16,1,0,0,1,64,0,0.02", "256,1,0,0,8,32760,0,0.02", ["0,2,0,0,0,0,1,64,0,0.02"]
    rows = [f"0,1,{large}", f"1,1,{small}", *last]
    light, heavy = [f"0,1,{small}", f"1,1,{small}", *last], [f"0,1,{large}", f"1,1,{large}", *last]
    middle_s, light_s, heavy_s = (priced(tmp_path, some, EXPERTS).device_s[0] for some in (rows, light, heavy))
    assert light_s < middle_s < heavy_s


def test_steps_that_tell_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    usual = [f"0,{number},0,0,0,0,8,32760,0,0.01" for number in range(20)]
    odd = [
        "0,20,0,0,0,0,8,32760,0,",
        "0,21,0,0,0,0,-8,32760,0,0.01",
        "0,22,0,0,0,0,0,0,0,0.01",
        "0,23,64,0,0,0,0,0,0,0.01",
        "0,24,0,0,0,0,8,32760,0,1.6",
        "0,25,0,0,0,0,8,32760,0,0.01",
        "0,26,0,0,0,0,8,32760,0,0.0198",
        "0,27,0,0,0,0,8,32760,0,0.0002",
    ]
    steps = priced(tmp_path, [*usual, *odd], SMALL)
    assert steps.kind.size == 21
    assert steps.left_out == {
        "no wall time": 1,
        "a count is missing or negative": 1,
        "an empty step": 1,
        "prompt tokens without a prompt": 1,
        SLOW: 1,
        TOGETHER: 2,
    }


def test_a_run_without_a_usable_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no step can be priced: no wall time"):
        priced(tmp_path, ["0,1,0,0,0,0,8,32760,0,", "0,2,0,0,0,0,8,32760,0,0"], SMALL)


@pytest.mark.parametrize("batch", ["0,0,0,0,8,32760,0", "256,1,0,0,8,32760,0", "2048,4,0,0,0,0,0"])
def test_work_that_nothing_hides_lengthens_every_step_by_itself(tmp_path: Path, batch: str) -> None:
    """Beside a host that needs 9 ms to launch a step, too."""
    run = run_of(tmp_path, [f"0,1,{batch},0.01"], SMALL)
    assert run.setup is not None

    def steps_with(unhidden_step_s: float) -> PricedSteps:
        assert run.setup is not None
        host = msgspec.structs.replace(
            run.setup.engine.host, launch_s=50e-6, step_s=0.0, unhidden_step_s=unhidden_step_s
        )
        engine = msgspec.structs.replace(run.setup.engine, host=host)
        return price_run(replace(run, setup=replace(run.setup, engine=engine)), estimator_for)

    without, with_work = steps_with(0.0), steps_with(2e-3)
    assert with_work.predicted_s[0] - without.predicted_s[0] == pytest.approx(2e-3, rel=1e-9)
    assert with_work.device_s[0] == pytest.approx(without.device_s[0], rel=1e-9)
    assert Factors({}).applied(with_work).predicted_s[0] == pytest.approx(with_work.predicted_s[0], rel=1e-9)
