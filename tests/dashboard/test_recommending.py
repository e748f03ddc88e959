"""Recommendations that a form starts: the verb's answer in the background, stopped with the best so far."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboard.conftest import Ask
from windtunnel.dashboard import recommending
from windtunnel.dashboard.recommending import Recommendation, command_of, space_of
from windtunnel.errors import InputError
from windtunnel.report.search.recommendation import recommendation
from windtunnel.search.space.space import point_at
from windtunnel.search.store import Store
from windtunnel.search.study import search

FORM = {
    "model": "llama-3.1-8b",
    "devices": "h100_sxm, l40s",
    "slo": "ttft_p90=1s,tpot_p99=50ms",
    "input_tokens": "256",
    "output_tokens": "16",
    "num_requests": "60",
    "max_devices": "1",
    "rate": "200",
}


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def awaited(ask: Ask, number: int = 1) -> Any:
    """The document of a recommendation that has ended."""
    end_s = time.monotonic() + 300
    while (found := ask(f"/api/recommend/{number}").document)["state"] == "running":
        assert time.monotonic() < end_s
        time.sleep(0.1)
    return found


@pytest.mark.full
@pytest.mark.compiled
def test_the_answer_is_the_verbs(serve: Callable[[Path], Ask], tmp_path: Path) -> None:
    ask = serve(tmp_path)
    started = ask("/recommendation", post=FORM)
    assert (started.status, started.headers["Location"]) == (303, "/recommend/1")
    found = awaited(ask)
    space, load = space_of(FORM)
    assert load == 200.0
    text = recommendation(search(space, Store(None, print)), load)
    assert (found["state"], found["recommendation"]) == ("done", text)
    assert found["num_answered"] == found["num_points"] == space.num_points
    page = ask("/recommend/1").text
    assert all(words in page for words in ("The best points", "Why", "vllm serve", "windtunnel recommend llama-3.1-8b"))
    assert "stop, and keep" not in page
    assert ">done<" in ask("/recommend").text


@pytest.mark.full
@pytest.mark.compiled
def test_a_search_that_is_stopped_keeps_the_best_so_far() -> None:
    space, load = space_of(FORM)
    known = Recommendation(7, space, load, command_of(FORM))
    progress = known._check
    seen: list[Any] = []

    def stop_after_two(finished: int, total: int) -> None:
        seen.append((known.state, known.shown().study.outcomes[0]))
        if len(seen) == 2:
            known.stop.set()
        progress(finished, total)

    known._check = stop_after_two  # type: ignore[method-assign]
    known.run()
    assert known.state == "stopped"
    outcome = known.shown().study.outcomes[0]
    runs = [len(part.ranking) for _, part in seen]
    assert 0 < runs[0] < runs[1] == len(outcome.ranking) < space.num_points
    assert recommendation(known.shown().study, load).startswith("Serve it on ")
    assert known.shown().why


@pytest.mark.full
@pytest.mark.compiled
def test_what_is_stopped_before_anything_is_found_says_so(
    serve: Callable[[Path], Ask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise recommending.StoppedError

    monkeypatch.setattr(Recommendation, "_check", stop)
    ask = serve(tmp_path)
    ask("/recommendation", post={**FORM, "slo": "ttft_p90=1us"})
    assert awaited(ask)["state"] == "stopped"
    assert "Stopped before anything was found that meets the limits." in ask("/recommend/1").text


def test_only_one_search_runs_at_a_time_and_a_long_one_is_stopped(
    serve: Callable[[Path], Ask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recommendation, "run", lambda _self: None)
    ask = serve(tmp_path)
    assert ask("/recommendation", post=FORM).status == 303
    second = ask("/recommendation", post=FORM)
    assert (second.status, "recommendation 1 is still under way" in second.text) == (400, True)
    page = ask("/recommend/1").text
    assert "stop, and keep the best so far" in page
    assert re.search(r"running: (\d+) of \d+ points</p>.*\1 points evaluated: \1 cannot run, 0 meet", page, re.DOTALL)
    assert ask("/stop/1", post={}).headers["Location"] == "/recommend/1"
    assert "stopping: " in ask("/recommend/1").text
    assert [ask(path).status for path in ("/recommend/2", "/recommend/..", "/api/recommend/x")] == [404] * 3
    assert ask("/stop/9", post={}).status == 404
    monkeypatch.setattr(recommending, "MOST_S", -1.0)
    known = Recommendation(1, *space_of(FORM), "")
    with pytest.raises(recommending.StoppedError):
        known._check(1, 2)
    assert "stopped after" in known.problem


def test_the_command_is_what_the_form_says() -> None:
    trace = {**FORM, "trace": "azure2023_conv", "rate": "", "prices": "l40s=0.9"}
    command = command_of(trace)
    assert command.startswith("windtunnel recommend llama-3.1-8b --devices 'h100_sxm, l40s' --slo ")
    assert "--trace azure2023_conv" in command
    assert "--prices l40s=0.9" in command
    rented, _ = space_of({**FORM, "provider": "nebius"})
    prices = {point_at(rented, i).settings["deployment.price_usd_per_hour"] for i in range(rented.num_points)}
    assert prices == {3.85, 1.55}
    assert "tokens" not in command
    assert "--rate" not in command


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "/etc/passwd"}, "no model '/etc/passwd'"),
        ({"model": "../config.json"}, "no model '../config.json'"),
        ({"devices": "/etc/hostname.yaml"}, "no device '/etc/hostname.yaml'"),
        ({"devices": "h100_sxm,../x.yaml"}, "no device '../x.yaml'"),
        ({"trace": "/etc/passwd"}, "no trace '/etc/passwd'"),
        ({"prices": "/etc/passwd"}, "is no DEVICE=USD"),
        ({"prices": "h100_sxm=-1"}, "prices"),
        ({"provider": "/etc/passwd"}, "there is no provider ''"),
        ({"provider": "lambda"}, "no price of l40s"),
        ({"devices": ",".join(["l40s"] * 9)}, "9 devices are too many"),
        ({"devices": " , "}, "devices is missing"),
        ({"slo": ""}, "limits is missing"),
        ({"slo": "ttft"}, "ttft"),
        ({"num_requests": "1e6"}, "1,000,000 requests are too many"),
        ({"rate": "nan"}, "requests/s in all: 'nan' is not a number above 0"),
        ({"max_devices": "0"}, "devices of a replica: '0'"),
        ({"input_tokens": "1q"}, "input tokens: '1q'"),
    ],
)
def test_nothing_typed_is_a_path_and_each_field_has_its_limit(changed: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        space_of({**FORM, **changed})
    assert message in raised.value.message
