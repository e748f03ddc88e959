"""Time limits of users' functions, in processes that hear Ctrl-C and in those that do not."""

import signal
import subprocess
import sys

import pytest

CHILD = """
import signal, sys, time
from windtunnel.errors import InputError
from windtunnel.serving.custom.time_limit import InTime

if sys.argv[3] == "False":  # the tests may run in the background, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] == "server":
    signal.signal(signal.SIGINT, lambda *_: None)

def sleeping():
    print("asleep", flush=True)
    time.sleep(60)

try:
    InTime("the scheduler sleeping", sleeping, float(sys.argv[2]))(0.0)
except InputError as error:
    print(error.message)
except KeyboardInterrupt:
    print("interrupted")
"""


def child(kind: str, limit_s: float, ignores: bool = False) -> "subprocess.Popen[str]":
    """Start a process that calls a function which sleeps for a minute; `server` handles SIGINT by doing nothing."""
    ignored = ["sh", "-c", "trap '' INT; exec \"$@\"", "nohup"] if ignores else []
    words = [sys.executable, "-c", CHILD, kind, str(limit_s), str(ignores)]
    return subprocess.Popen([*ignored, *words], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("kind", ["script", "server"])
def test_a_function_that_sleeps_is_ended_also_under_nohup(kind: str, ignores: bool) -> None:
    process = child(kind, 0.2, ignores)
    said, _ = process.communicate(timeout=20)
    assert said.splitlines() == ["asleep", "the scheduler sleeping has not returned for 0.2 s"]


@pytest.mark.parametrize("kind", ["script", "server"])
def test_ctrl_c_still_ends_it(kind: str) -> None:
    process = child(kind, 60.0)
    assert process.stdout is not None
    assert process.stdout.readline() == "asleep\n"
    with pytest.raises(subprocess.TimeoutExpired):  # a server's call is ended once it takes long
        process.wait(1.2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert said == "interrupted\n"
