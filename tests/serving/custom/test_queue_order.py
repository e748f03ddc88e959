"""A queue order in Python is one file of an installed package, and orders waiting requests as it says."""

from pathlib import Path

import numpy as np
import pytest

import windtunnel as wt
from plugin_package import installed_plugin
from windtunnel.errors import InputError

LONGEST = '''
def order(requests):
    """The longest prompt first, whenever it was sent."""
    return -100.0 * requests.input_tokens
'''


def served(order: str, **settings: object) -> wt.Result:
    return wt.simulate(
        wt.scenario(
            model="llama-3.1-8b", device="h100_sxm", rate_per_s=200, num_requests=60, output_tokens=20,
            settings={
                "workload.input_tokens": {"type": "uniform", "min_tokens": 100, "max_tokens": 2000},
                "deployment.engine.max_num_seqs": 1, "deployment.engine.scheduling_policy": order, **settings,
            },
        )
    )  # fmt: skip


def answered(tmp_path: Path, source: str) -> wt.Result:
    with installed_plugin(tmp_path, "windtunnel.queue_orders", "own", source, "order") as files:
        assert len(files) == 1
        return served("own")


def test_the_longest_of_those_that_wait_is_next(tmp_path: Path) -> None:
    requests = answered(tmp_path, LONGEST).requests
    begun = np.argsort(requests["scheduled_s"])
    for place, i in enumerate(begun):
        waiting = [j for j in begun[place + 1 :] if requests["arrival_s"][j] < requests["scheduled_s"][i]]
        assert all(requests["input_tokens"][j] <= requests["input_tokens"][i] for j in waiting)
    assert not np.array_equal(begun, np.arange(60))


def test_one_that_says_what_a_shipped_one_says_gives_its_run(tmp_path: Path) -> None:
    own = answered(tmp_path, LONGEST.replace("-100.0", "100.0"))
    shipped = served("shortest")
    for name in ("scheduled_s", "first_token_s", "finish_s"):
        np.testing.assert_array_equal(own.requests[name], shipped.requests[name])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("requests.input_tokens[1:]", "the queue order order returned array"),
        ("requests.input_tokens * float('nan')", "the queue order order returned array"),
        ("None", "the queue order order returned None"),
        ("{}", "the queue order order returned {}"),
        ("requests.length", "has no attribute 'length'"),
        ("requests.input_tokens.sort()", "read-only"),
    ],
)
def test_an_answer_that_orders_nothing_is_refused(tmp_path: Path, answer: str, problem: str) -> None:
    with pytest.raises(InputError) as refused:
        answered(tmp_path, f"def order(requests):\n    return {answer}\n")
    assert problem in str(refused.value)


def test_names_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(?s)scheduling_policy is 'longest'.*fcfs, .*, module:function"):
        served("longest")
    taken = installed_plugin(tmp_path, "windtunnel.queue_orders", "shortest", LONGEST, "order")
    with taken, pytest.raises(InputError, match="has the name of a shipped one"):
        served("shortest")
    with pytest.raises(InputError, match=r"knows no os:getcwd order"):
        served("os:getcwd", **{"deployment.engine.scheduler": "sarathi"})
