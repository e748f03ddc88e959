"""A router of the user's own: the same loop and the same records as the built-in ones, and clear refusals."""

from pathlib import Path

import numba
import numpy as np
import pytest

import windtunnel as wt
from windtunnel.errors import InputError
from windtunnel.serving.custom.router import Arrival, Replicas


def scenario(**settings: object) -> wt.Scenario:
    return wt.scenario(
        model="llama-3.1-8b",
        device="h100_sxm",
        rate_per_s=60,
        num_requests=800,
        input_tokens=700,
        output_tokens=150,
        replicas=4,
        settings={f"deployment.{name}": value for name, value in settings.items()},
    )


def fewest(_request: Arrival, replicas: Replicas) -> int:
    return int(np.argmin(replicas.num_waiting + replicas.num_running))


@numba.njit
def compiled_fewest(_request, replicas):  # type: ignore[no-untyped-def]
    return np.argmin(replicas.num_waiting + replicas.num_running)


def at_most_three(_request: Arrival, replicas: Replicas) -> int | None:
    present = replicas.num_waiting + replicas.num_running
    replica = int(np.argmin(present))
    return replica if present[replica] < 3 else None


@pytest.mark.compiled
@pytest.mark.parametrize("router", [fewest, compiled_fewest])
def test_own_router_is_the_built_in_of_the_same_rule(router: object) -> None:
    own = wt.simulate(scenario(), router=router)  # type: ignore[arg-type]
    built_in = wt.simulate(scenario(router="least_outstanding"))
    for name in ("replica", "scheduled_s", "finish_s"):
        np.testing.assert_array_equal(own.requests[name], built_in.requests[name], err_msg=name)
    assert own.summary.checks is not None
    assert own.summary.checks.passed


@pytest.mark.compiled
def test_holding_back_is_the_deferred_router() -> None:
    own = wt.simulate(scenario(), router=at_most_three)
    built_in = wt.simulate(scenario(router="deferred", router_limit=3))
    np.testing.assert_array_equal(own.requests["finish_s"], built_in.requests["finish_s"])


def test_a_closed_loop_asks_between_a_step_and_the_next() -> None:
    closed = {"arrivals": {"type": "closed_loop", "concurrency": 12}}
    settings = {"workload": {**closed, "input_tokens": 300, "output_tokens": 40, "num_requests": 200}}
    common = {"model": "llama-3.1-8b", "device": "h100_sxm", "replicas": 3}
    own = wt.simulate(wt.scenario(**common, settings=settings), router=fewest)
    built_in = wt.simulate(wt.scenario(**common, router="least_outstanding", settings=settings))
    np.testing.assert_array_equal(own.requests["finish_s"], built_in.requests["finish_s"])


def test_it_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_routing.py").write_text("def last(request, replicas):\n    return len(replicas.is_up) - 1\n")
    monkeypatch.chdir(tmp_path)
    result = wt.simulate(scenario(router="own_routing:last"))
    assert set(result.requests["replica"]) == {3}
    with pytest.raises(InputError, match=r"the module 'own_routing' has no function 'lost'"):
        wt.simulate(scenario(router="own_routing:lost"))


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (lambda _request, _replicas: 9, "to replica 9"),
        (lambda _request, _replicas: "first", "returned 'first'"),
        (lambda _request, _replicas: -1, "returned -1 for request 0"),
        (lambda _request, _replicas: True, "returned True for request 0"),
        (lambda _request, _replicas: 1 // 0, "ZeroDivisionError"),
        (lambda _request, _replicas: None, "wait at the router"),
    ],
)
def test_nonsense_is_refused(router: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        wt.simulate(scenario(), router=router)  # type: ignore[arg-type]
