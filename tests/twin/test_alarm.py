"""The kernel's timer rings once, at the time that it was set to last."""

import asyncio
import ctypes
import sys
import time

import pytest

from live_twins import scenario_of
from windtunnel.twin.alarm import Alarm
from windtunnel.twin.start import twin_app

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no timerfd")


@linux
def test_it_rings_once_at_the_latest_time_it_was_set_to() -> None:
    rung: list[float] = []

    async def wait() -> float:
        alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(time.perf_counter()))
        began_s = time.perf_counter()
        alarm.start(0.01)
        alarm.start(0.0503)
        await asyncio.sleep(0.3)
        alarm.close()
        return began_s

    began_s = asyncio.run(wait())
    assert len(rung) == 1
    assert rung[0] - began_s >= 0.05


@pytest.mark.parametrize("has_timer", [pytest.param(True, marks=linux), False])
def test_a_twin_keeps_time_with_and_without_it(monkeypatch: pytest.MonkeyPatch, has_timer: bool) -> None:
    if not has_timer:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    app = twin_app(scenario_of({}), 1.0, max_requests=4)
    done: list[float] = []

    async def talk() -> float:
        answer = app.twin.submit((64, 20), lambda _a, _b, last: done.extend([time.perf_counter()] * last), range(84))
        began_s = time.perf_counter()
        while not done:
            await asyncio.sleep(0.01)
        assert (app.twin._alarm is not None) == has_timer
        app.twin.close()
        due_s = answer.finish_s - answer.arrival_s
        assert done[0] - began_s >= due_s - 0.01
        return done[0] - began_s

    assert asyncio.run(talk()) < 10
