"""A small model's operators, measured on this processor and simulated from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.lab.profile import samples as profile_samples
from windtunnel.lab.profile.compute import ComputePlan, measure_steps
from windtunnel.lab.profile.model import StepShape, check_profilable, operators_of
from windtunnel.lab.profile.run import parse_degrees, profile_compute
from windtunnel.lab.profile.samples import (
    Journal,
    MeasuredOperator,
    MeasuredStep,
    TimeStatistics,
    read_journal,
    without_event_cost,
)
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.launches.forward import StepBatch, forward_launches
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Precision
from windtunnel.model.shape import LayerGroup, ModelSpec, Shard
from windtunnel.pricing.estimator import Coverage
from windtunnel.pricing.profile import profile_estimator, profile_provenance, tables_by_words
from windtunnel.pricing.table import STATISTICS
from windtunnel.serving.setup.step_prices import price_step

GROUPED = GroupedQueryAttention(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True)
UNROTATED = GroupedQueryAttention(num_heads=4, num_kv_heads=2, head_dim=16, rotary=False)
WIDE = GroupedQueryAttention(num_heads=8, num_kv_heads=4, head_dim=64, qk_norm=True)
LATENT = LatentAttention(
    num_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
DENSE = DenseFeedForward(intermediate_size=96)
EXPERTS = ExpertsFeedForward(num_experts=4, experts_per_token=2, intermediate_size=32, shared_intermediate_size=32)


def model_of(attention: Any = GROUPED, feed_forward: Any = DENSE, hidden_size: int = 64) -> ModelSpec:
    group = LayerGroup(num_layers=3, attention=attention, feed_forward=feed_forward)
    return ModelSpec(name="lab/small", hidden_size=hidden_size, vocab_size=256, max_context_tokens=256, layers=(group,))


class CountingStepper:
    """Measures nothing: a step takes what a formula says."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.shapes: list[StepShape] = []

    def fits(self, shape: StepShape) -> bool:
        return shape.batch * (shape.context + shape.chunk) <= 2048

    def measure(self, shape: StepShape) -> MeasuredStep:
        self.shapes.append(shape)
        known = operators_of(self.shard, self.shard.model.layers[0], shape)
        seconds = 1e-6 * (shape.num_tokens + shape.batch * shape.context / 16)
        kept = TimeStatistics(seconds, seconds, seconds, seconds, 0.0, 5, 0)
        operators = tuple(MeasuredOperator(name, op, 1, kept) for name, op in known.items() if op.kind != "collective")
        return MeasuredStep(shape, operators, seconds * len(operators))


SHARD = Shard(model_of(), model_of().precision, Parallelism())
PLAN = ComputePlan(tp=(1, 2), max_batch=8, max_context=128, max_tokens=64)


def run_of(
    stepper: CountingStepper, known: dict[StepShape, MeasuredStep], plan: ComputePlan = PLAN
) -> list[MeasuredStep]:
    return list(measure_steps(stepper, plan, known, lambda *_: None))


def test_steps_keep_to_the_extent_and_go_on_where_they_stopped() -> None:
    first = CountingStepper(SHARD)
    steps = run_of(first, {})
    shapes = [step.shape for step in steps]
    assert len(shapes) == len(set(shapes)) == len(first.shapes)
    for shape in shapes:
        assert shape.batch <= 8
        assert shape.context + shape.chunk <= 128
        assert shape.num_tokens <= 64
    assert {shape.batch for shape in shapes if not shape.chunk} >= {1, 4, 8}
    assert any(shape.chunk and shape.context for shape in shapes)
    half = {step.shape: step for step in steps[: len(steps) // 2]}
    second = CountingStepper(SHARD)
    rest = run_of(second, half)
    assert not half.keys() & set(second.shapes)
    assert {*half, *(step.shape for step in rest)} == set(shapes)


def test_a_budget_that_is_spent_leaves_the_coarse_grid() -> None:
    hurried = {step.shape for step in run_of(CountingStepper(SHARD), {}, replace(PLAN, budget_s=0.0))}
    assert StepShape(8, 128) in hurried
    assert hurried < {step.shape for step in run_of(CountingStepper(SHARD), {}, replace(PLAN, tolerance=0.001))}


def test_a_journal_survives_an_interruption_and_refuses_another_measurement(tmp_path: Path) -> None:
    path, about = tmp_path / "steps" / "a.jsonl", {"device": "cpu", "clock": "cpu_time"}
    journal = Journal(path, about)
    step = CountingStepper(SHARD).measure(StepShape(2, 64))
    journal.add(step)
    with path.open("a") as file:
        file.write('{"shape": {"batch"')
    again = Journal(path, about)
    assert again.steps == {step.shape: step}
    journal.add(step)
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(InputError, match="was measured with clock cpu_time, now it is wall"):
        Journal(path, about | {"clock": "wall"})


@pytest.mark.parametrize("left", ["", '{"device": "c'])
def test_a_journal_that_was_cut_in_its_first_line_begins_anew(left: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(left)
    Journal(path, {"device": "cpu"})
    assert path.read_text() == '{"device": "cpu"}\n'


@pytest.mark.full
@pytest.mark.parametrize("attention", [GROUPED, UNROTATED, LATENT], ids=["grouped query", "unrotated", "latent"])
@pytest.mark.parametrize("feed_forward", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("shape", [StepShape(3, 40), StepShape(2, 0, 8), StepShape(1, 16, 8)], ids=str)
def test_the_forward_executes_the_operators_that_a_step_is_priced_by(
    attention: Any, feed_forward: Any, shape: StepShape
) -> None:
    pytest.importorskip("torch", reason="torch is not installed; operators are measured with it")
    from windtunnel.lab.profile.model import LayerStack

    model = model_of(attention, feed_forward)
    shard = Shard(model, model.precision, Parallelism(tp=2))
    stack = LayerStack(shard, model.layers[0], 2, "cpu", 64, 512)
    marks: list[str] = []
    chosen = stack.run(shape, marks.append)
    assert chosen.shape == (shape.batch,)
    priced = {launch.name for launch in forward_launches(shard, shape.step_batch) if launch.op.kind != "collective"}
    assert {mark for mark in marks if mark} == priced


@pytest.mark.full
def test_attention_of_the_forward_is_that_of_its_definition() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; operators are measured with it")
    from windtunnel.lab.profile.attention import sdpa

    torch.manual_seed(0)
    query, keys, values = (torch.randn(n, heads, 4) for n, heads in ((3, 2), (8, 1), (8, 1)))
    attended = sdpa(query[None], keys[None], values[None])[0]  # a chunk of three tokens after five
    scores = torch.einsum("qhd,kd->hqk", query, keys[:, 0]) / 2.0
    hidden = torch.arange(8)[None, :] > torch.arange(3)[:, None] + 5
    expected = torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values[:, 0])
    torch.testing.assert_close(attended, expected)


@pytest.mark.slow
def test_a_profile_is_measured_closed_and_simulated_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_samples, "REPEAT_S", 0.02)
    torch = pytest.importorskip("torch", reason="torch is not installed; operators are measured with it")
    torch.set_num_threads(1)
    model = model_of(WIDE, DenseFeedForward(intermediate_size=1536), hidden_size=512)
    folder = tmp_path / "profile"
    profile = profile_compute(model, model.precision, "test_cpu", folder, replace(PLAN, budget_s=0.0))
    assert {table.kind for table in profile.tables} == {"gemm", "prefill_attention", "decode_attention", "elementwise"}
    assert profile_provenance(folder)["device"] == "test_cpu"
    assert abs(np.median(profile.closure_errors)) < 0.25  # milliseconds on a busy machine; benchmarks are stricter
    tables = list(tables_by_words(folder).values())
    gemm = next(table for table in tables if table.kind == "gemm")
    assert set(gemm.statistics) == set(STATISTICS)
    assert (gemm.statistics["min_s"] <= gemm.seconds).all()
    device = catalog.device(str(folder / "device.yaml"))
    assert device.architecture == "cpu"
    estimator = profile_estimator(folder, device, None)
    for degree in (1, 2):
        shard = Shard(model, model.precision, Parallelism(tp=degree))
        for launch in forward_launches(shard, StepBatch(4, 16.0, 0, 0.0, 4)):
            if launch.op.kind != "collective":
                assert estimator.estimate(launch.op).coverage in (Coverage.MEASURED, Coverage.INTERPOLATED), launch
    before = sorted((folder / "steps").glob("*"))
    again = profile_compute(model, model.precision, "test_cpu", folder, replace(PLAN, tp=(1,), budget_s=0.0))
    assert len(again.steps) == len(profile.steps)
    assert sorted((folder / "steps").glob("*")) == before


@pytest.mark.full
def test_a_processor_is_not_measured_under_the_name_of_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed; operators are measured with it")
    with pytest.raises(InputError, match=r"h100_sxm is NVIDIA H100 .* is this machine's processor"):
        profile_compute(SHARD.model, SHARD.precision, "h100_sxm", tmp_path / "profile", ComputePlan(torch_device="cpu"))
    assert not (tmp_path / "profile").exists()


def test_a_profile_of_another_device_is_refused(tmp_path: Path) -> None:
    from windtunnel.lab.profile.compute import operator_tables
    from windtunnel.pricing.profile import write_profile

    operators = CountingStepper(SHARD).measure(StepShape(2, 64)).operators
    tables = operator_tables([(operator.op, operator.statistics) for operator in operators], "test")
    write_profile(tmp_path, tables, {"device": "some_cpu"})
    with pytest.raises(InputError, match="was measured on some_cpu, the deployment is on h100_sxm"):
        profile_estimator(tmp_path, catalog.device("h100_sxm"), None)
    with pytest.raises(InputError, match="holds no measured operators"):
        tables_by_words(tmp_path.parent)


def test_what_cannot_be_measured_is_said() -> None:
    quantised = replace(SHARD, precision=catalog.model("deepseek-ai/DeepSeek-V3").precision)
    with pytest.raises(InputError, match="has weights in fp8_block"):
        check_profilable(quantised)
    narrow = replace(SHARD, model=catalog.model("XiaomiMiMo/MiMo-V2-Flash"))
    with pytest.raises(InputError, match="has narrow values or latent experts"):
        check_profilable(narrow)
    gated = replace(SHARD, model=catalog.model("stepfun-ai/Step-3.7-Flash"))
    with pytest.raises(InputError, match="has a gate for each head"):
        check_profilable(gated)
    with pytest.raises(InputError, match="is not a list of sizes"):
        parse_degrees("1,two")
    assert parse_degrees("1, 2,2,8") == (1, 2, 8)


def test_a_model_that_does_not_fit_is_refused_before_it_fills_the_memory() -> None:
    from windtunnel.lab.profile.torch_steps import torch_steppers
    from windtunnel.model.precision import Precision

    shard = Shard(catalog.model("deepseek-ai/DeepSeek-V3"), Precision(), Parallelism())
    with pytest.raises(InputError, match=r"takes .* too much for the 16.0 GiB that are free"):
        list(torch_steppers(shard, replace(PLAN, torch_device="cpu", clock="wall"), 1 << 25, 16 << 30))


def test_the_sharded_config_is_the_shard_of_the_config() -> None:
    from windtunnel.lab.profile.vllm_steps import sharded_config

    config = catalog.model_config("llama-3.1-8b")
    config_of_shard = sharded_config(config, 4)
    assert (
        config_of_shard["num_attention_heads"],
        config_of_shard["num_key_value_heads"],
        config_of_shard["head_dim"],
    ) == (8, 2, 128)
    assert config_of_shard["intermediate_size"] == 14336 // 4
    assert json.dumps(config)  # and the config itself is left as it was
    assert config["num_attention_heads"] == 32
    with pytest.raises(InputError, match="tp = 3 does not divide num_attention_heads = 32"):
        sharded_config(config, 3)


MEASURED = Path(__file__).parents[3] / "benchmarks" / "measured" / "h200" / "profile"


def test_events_between_kernels_are_taken_out() -> None:
    """81 steps that were measured on an H200, whose operators' sum was 9.8% more than the whole."""
    steps = [step for path in (MEASURED / "steps").glob("*.jsonl") for step in read_journal(path)]
    corrected = without_event_cost(steps)
    before, after = (np.array([step.closure_error for step in found]) for found in (steps, corrected))
    assert np.median(before) == pytest.approx(0.098, abs=0.001)
    assert abs(np.median(after)) < 0.002
    assert np.abs(after).max() < 0.035
    spans = [[operator.statistics.median_s for operator in step.operators] for step in (steps[0], corrected[0])]
    assert np.array(spans[0]) - np.array(spans[1]) == pytest.approx(2.6e-6, abs=0.3e-6)  # of every operator
    assert without_event_cost([]) == []


def test_a_profile_predicts_whole_steps_between_its_points() -> None:
    measured = json.loads((MEASURED / "check.json").read_text())
    estimator = profile_estimator(MEASURED, catalog.device("h200_sxm"), None)
    shard = Shard(catalog.model("meta-llama/Llama-3.1-8B"), Precision(), Parallelism())
    shapes = [StepShape(batch, context) for batch in (1, 8, 48) for context in (200, 700, 2500)]
    for shape in shapes:
        sum_s = sum(launch.total_s for launch in price_step(estimator, shard, shape.step_batch))
        assert sum_s == pytest.approx(measured[f"decode {shape.batch} x {shape.context}"], rel=0.015)
