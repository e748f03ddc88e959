import numpy as np

from drive import drive
from lab.test_stepped import OneTokenAStep


def test_idle_time_is_jumped_over_and_tokens_bear_the_end_of_their_step() -> None:
    run = drive(OneTokenAStep(), np.array([1.0, 1.2, 9.0]), np.array([4, 5, 6]), np.array([3, 2, 1]), 100)
    assert [step.scheduled for step in run.steps] == [((0, 4),), ((1, 5),), ((0, 1), (1, 1)), ((0, 1),), ((2, 6),)]
    assert {name: np.round(at, 9).tolist() for name, at in run.token_times_s.items()} == {
        "0": [1.5, 2.1, 2.2],
        "1": [2.0, 2.1],
        "2": [9.5],
    }
