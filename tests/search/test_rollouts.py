"""Devices divided between rollouts and training: what an iteration takes, who waits, and what is refused."""

from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from windtunnel.errors import InputError
from windtunnel.report.render.terminal import show
from windtunnel.report.search.rollouts import division_document, division_report
from windtunnel.search.rollouts import Division, Iteration, Rollouts, divide
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.training.job import load
from windtunnel.training.step import simulate_training
from windtunnel.units import format_seconds

FIXED = {"parallelism": {"tp": 1}, "framework": "fsdp2"}


def batch(**more: Any) -> Scenario:
    workload = {
        "arrivals": {"type": "burst"},
        "input_tokens": 100,
        "output_tokens": {"type": "lognormal", "median_tokens": 200, "sigma": 0.7, "max_tokens": 1500},
        "num_requests": 64,
    }
    raw = {"model": "qwen3-0.6b", "deployment": {"device": "h100_sxm"}, "workload": {**workload, **more}}
    return scenario_from(raw, "")


@pytest.fixture(scope="module")
def division() -> Division:
    return divide(batch(), 4, FIXED)


@pytest.mark.full
def test_every_division_runs_in_every_way(division: Division) -> None:
    found = [(each.way, each.rollouts.num_devices, each.training.num_devices) for each in division.iterations]
    apart = [(1, 3), (2, 2), (3, 1)]
    assert found == [("colocated", 4, 4), *[(way, *pair) for way in ("one_step_off", "asynchronous") for pair in apart]]


@pytest.mark.full
def test_the_parts_are_those_of_the_simulators(division: Division) -> None:
    each = next(each for each in division.iterations if (each.way, each.rollouts.num_devices) == ("one_step_off", 1))
    alone = simulate(batch())
    assert each.rollouts.makespan_s == pytest.approx(alone.requests["finish_s"].max())
    lengths = alone.requests["input_tokens"] + alone.requests["output_tokens"]
    assert division.batch.num_tokens == lengths.sum()
    assert division.batch.document_tokens == pytest.approx((lengths**2).sum() / lengths.sum(), abs=1)
    job = each.training.result.setup.job
    assert job.global_batch % 3 == 0
    assert 0 <= job.global_batch * job.sequence_tokens - lengths.sum() < 128 * job.global_batch
    raw = {
        **FIXED,
        "model": "qwen3-0.6b",
        "device": "h100_sxm",
        "num_devices": 3,
        "sequence_tokens": job.sequence_tokens,
        "global_batch": job.global_batch,
        "document_tokens": division.batch.document_tokens,
    }
    assert each.training.step_s == simulate_training(load(None, raw)).step_s
    # Of a step's three passes the forward one is about a third, and there are two of them.
    assert each.training.forward_s == pytest.approx(2 / 3 * each.training.step_s, rel=0.35)


@pytest.mark.full
def test_replicas_that_never_wait_give_no_fewer_tokens(division: Division) -> None:
    for each in division.iterations:
        assert each.rollouts.p90_s < each.rollouts.makespan_s
        assert each.rollouts.endless_s < each.rollouts.makespan_s


def an_iteration(division: Division, way: Any, rollouts_s: float, endless_s: float, update_s: float) -> Iteration:
    training = with_fields(division.iterations[0].training, forward_s=3.0, step_s=7.0)
    return Iteration(way, Rollouts(2, rollouts_s, 0.5 * rollouts_s, endless_s, 4.0 * rollouts_s, update_s), training)


@pytest.mark.parametrize(
    ("way", "seconds", "behind", "waits"),
    [("colocated", 31.0, 0, ""), ("one_step_off", 21.0, 1, "training"), ("asynchronous", 10.0, 8, "rollouts")],
)
def test_an_iteration_takes_turns_or_the_longer_part(
    division: Division, way: str, seconds: float, behind: int, waits: str
) -> None:
    each = an_iteration(division, way, rollouts_s=20.0, endless_s=8.0, update_s=1.0)
    assert each.seconds == seconds
    assert each.num_versions_behind == behind
    assert each.waits == waits


@pytest.mark.full
def test_the_verdict_names_the_fastest_way(division: Division, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [each.seconds for each in division.iterations]
    assert division.best.seconds == min(seconds)
    assert division_document(division)["best"] == int(np.argmin(seconds))
    verdict = division_report(division).verdict
    first, second = division.best.rollouts.num_devices, division.best.training.num_devices
    assert verdict.startswith(f"Fastest: asynchronous with {first} devices for rollouts and {second} for training, ")
    assert "In turn on all 4 takes" in verdict
    (table,) = division_report(division).sections[0].blocks
    assert table.rows[table.winner][2].value == min(seconds)
    assert str(table.rows[table.winner][2]) == format_seconds(min(seconds))
    show(division_report(division))
    assert "Every division" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scenario", "num_devices", "job", "says"),
    [
        (batch(arrivals={"type": "poisson", "rate_per_s": 3}), 4, {}, "a batch that is sent at once"),
        (batch(), 1, {}, "1 device cannot be divided: a replica has 1"),
        (batch(), 4, {"device": "b200_sxm"}, "the rollouts decide device of the training job"),
        (batch(), 4, {"paralelism": {"tp": 2}}, r"unknown key \$.paralelism"),
        (batch(task="embed", output_tokens=None), 4, {}, "task is 'embed', whose requests have no answers"),
        (batch(), 4, {"global_batch": 8, "device": "x", "node": "y"}, "decide device, node, global_batch of"),
        (batch(), 4, {"parallelism": {"tp": 8}}, "no division of 4 devices can train the model"),
    ],
)
def test_what_cannot_be_divided_is_refused(scenario: Scenario, num_devices: int, job: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        divide(scenario, num_devices, job)


@pytest.mark.full
def test_the_rate_of_replicas_that_never_wait_is_that_of_the_tokens() -> None:
    """Answers of one length on one replica: a batch takes as long again as it adds tokens to a closed loop."""
    equal = divide(batch(output_tokens=50), 2, FIXED)
    rollouts = next(each.rollouts for each in equal.iterations if each.way == "asynchronous")
    assert rollouts.endless_s == pytest.approx(rollouts.makespan_s, rel=0.15)
    single = divide(batch(output_tokens=1), 2, FIXED)
    assert all(0 < each.rollouts.endless_s < 1 for each in single.iterations)


@pytest.mark.full
def test_answers_of_a_trace_are_drawn_again_where_rollouts_never_stop(tmp_path: Path) -> None:
    rows = "\n".join(f"0,{100 + 7 * (i % 9)},{20 + 40 * (i % 5)}" for i in range(30))
    (tmp_path / "answers.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}\n")
    trace = {"path": str(tmp_path / "answers.csv")}
    recorded = divide(batch(input_tokens=None, output_tokens=None, trace=trace, num_requests=30), 2, FIXED)
    assert recorded.batch.num_sequences == 30
    assert recorded.batch.num_tokens == sum(100 + 7 * (i % 9) + 20 + 40 * (i % 5) for i in range(30))


@pytest.mark.full
def test_an_own_price_counts(division: Division) -> None:
    own = replace(division.scenario, deployment=replace(division.scenario.deployment, price_usd_per_hour=1.5))
    assert with_fields(division, scenario=own).usd_per_hour == 6.0
    assert division.usd_per_hour == 4 * 2.95


@pytest.mark.full
def test_layouts_are_searched_where_the_job_names_none() -> None:
    searched = divide(replace(batch(), seed=1), 2, {})
    assert {each.training.result.setup.degrees.num_devices for each in searched.iterations} == {1, 2}
    fixed = divide(replace(batch(), seed=1), 2, {"parallelism": {"tp": 1}})
    for free, own in zip(searched.iterations, fixed.iterations, strict=True):
        assert free.training.step_s <= own.training.step_s * 1.0001
