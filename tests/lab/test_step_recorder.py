"""The recorder of a vLLM server's steps, on a scheduler that behaves as vLLM's (V1)."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from windtunnel.calibration.steps.read import read_steps
from windtunnel.lab import step_recorder


@dataclass
class Request:
    num_prompt_tokens: int
    num_computed_tokens: int = 0


def scheduler_class():
    """A class of its own for each test, for `watch` changes it."""

    @dataclass
    class Scheduler:
        plans: list[dict[str, int]]
        requests: dict[str, Request]
        waiting: list[str] = field(default_factory=list)
        vllm_config: object = field(
            default_factory=lambda: SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=3))
        )

        def schedule(self, throttle_prefills=False):  # noqa: ARG002 vLLM's own
            scheduled = self.plans.pop(0)
            for name, tokens in scheduled.items():
                self.requests[name].num_computed_tokens += tokens
            return SimpleNamespace(num_scheduled_tokens=scheduled)

        def update_from_output(self, scheduler_output, model_output):  # noqa: ARG002 vLLM's own
            return model_output

    return Scheduler


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(step_recorder.time, "monotonic", lambda: now.s)
    return now


def test_steps_have_their_batch_and_time(tmp_path, clock):
    cls = scheduler_class()
    step_recorder.watch(cls, tmp_path / "steps.csv")
    step_recorder.watch(cls, tmp_path / "steps.csv")  # a second call changes nothing
    requests = {"a": Request(1000), "b": Request(600), "c": Request(40)}
    plans = [{"a": 1000, "b": 200}, {"a": 1, "b": 400, "c": 40}, {"a": 1, "b": 1, "c": 1}, {}]
    scheduler = cls(plans, requests, waiting=["d"])
    first = scheduler.schedule()
    clock.s += 0.5
    assert scheduler.update_from_output(first, "tokens") == "tokens"
    # As asynchronous scheduling does: the third step is scheduled before the second one ends.
    second, third = scheduler.schedule(), scheduler.schedule(throttle_prefills=True)
    clock.s += 0.25
    scheduler.update_from_output(second, None)
    clock.s += 0.125
    scheduler.update_from_output(third, None)
    scheduler.update_from_output(scheduler.schedule(), None)  # an empty step is none
    scheduler.windtunnel_recorder.output.close()
    steps = read_steps(tmp_path / "steps.csv")
    assert steps["wall_s"].tolist() == pytest.approx([0.5, 0.25, 0.125])
    assert steps["prefill_tokens"].tolist() == [1200, 440, 0]
    assert steps["prefill_requests"].tolist() == [2, 2, 0]
    assert steps["prefill_kv_tokens"].tolist() == [0, 200, 0]
    assert steps["prefill_variance"].tolist() == [200.0**2, 280.0**2, 0]
    assert steps["decode_requests"].tolist() == [0, 1, 3]
    assert steps["decode_kv_tokens"].tolist() == [0, 1001, 1002 + 601 + 41]
    assert steps["dp_rank"].tolist() == [3, 3, 3]
    assert steps["counter"].tolist() == [1, 2, 3]


def test_nothing_is_recorded_unless_asked(monkeypatch):
    monkeypatch.delenv(step_recorder.VARIABLE, raising=False)
    step_recorder.register()  # would import vLLM, which is not installed


def test_engines_append_to_one_file(tmp_path):
    for rank in (0, 1):
        recorder = step_recorder.StepRecorder(tmp_path / "runs" / "steps.csv", rank)
        recorder.write("0,0,0,0.0,1,50,0.0,0", 1.0, 1.5)
        recorder.output.close()
    steps = read_steps(tmp_path / "runs" / "steps.csv")
    assert steps["dp_rank"].tolist() == [0, 1]
    assert steps["wall_s"].tolist() == [0.5, 0.5]


def test_a_server_goes_on_where_its_record_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cls = scheduler_class()
    step_recorder.watch(cls, tmp_path / "file" / "steps.csv")
    scheduler = cls([{"a": 10}, {"a": 1}], {"a": Request(10)})
    for _ in range(2):
        assert scheduler.update_from_output(scheduler.schedule(), "tokens") == "tokens"
    assert len(caplog.records) == 1
    assert "steps.csv cannot be written: " in caplog.text
