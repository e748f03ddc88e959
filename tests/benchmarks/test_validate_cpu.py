import pytest

from validate_cpu import merged
from windtunnel.lab.profile.model import StepShape
from windtunnel.lab.profile.samples import Repeats
from windtunnel.model.operators import Elementwise, Op


def test_a_step_measured_at_several_times_forgets_a_burst() -> None:
    known: dict[str, Op] = {"a": Elementwise("a", 1, 1.0)}
    times = []
    for slow in (1.0, 2.5, 1.1):
        repeats = Repeats()
        for _ in range(6):
            repeats.add({"a": [slow]}, slow)
        times.append(repeats.step(StepShape(1, 16), known))
    step = merged(times)
    assert (step.sum_s, step.whole_s) == pytest.approx((1.1, 1.1))
    assert step.operators[0].statistics.num_samples == 18
