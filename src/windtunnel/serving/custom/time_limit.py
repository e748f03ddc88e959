"""A time limit for calls of users' functions in Python."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_ulong, py_object, pythonapi
from typing import Any

from windtunnel.errors import InputError, place

MOST_CALL_S = 120.0
"""A function that has not returned by then is ended; numba compiles one in a tenth of that, in its first call."""
POLL_S = 0.05

_started_s: dict[int, float] = {}
"""Thread -> when its call began."""
_late: set[int] = set()
"""Threads whose call is being ended."""
_watching = threading.Lock()


GRACE_S = 15.0
"""What the watchdog waits beyond `MOST_CALL_S`, so that functions which can be interrupted are."""
IDLE_S = 1.0
"""The watchdog rests once no function was called for so long."""
_WATCHDOG = """
import os, select, signal, sys
parent, most_s = int(sys.argv[1]), float(sys.argv[2])
armed, missed = False, 0
while missed < 2:
    if not select.select([0], [], [], most_s / 2 if armed else None)[0]:
        missed += 1
        continue
    said = os.read(0, 4096)
    if not said:
        sys.exit()
    armed, missed = not said.endswith(b"-"), 0
sys.stderr.write(sys.argv[3])
os.kill(parent, signal.SIGKILL)
"""
"""Program that kills its parent where no byte comes for a while, unless the last one was `-`; one that is stopped and
goes on gets half the time."""

_arming = threading.Lock()
_ready = threading.Event()
_is_armed = False
_pipe: Any = None
"""To the watchdog."""


def _tell(armed: bool) -> None:
    """Arm the watchdog, or let it rest where no call has begun meanwhile."""
    global _is_armed  # noqa: PLW0603
    with _arming:
        if _pipe is not None and (armed or not _started_s):
            _is_armed = armed
            with suppress(BrokenPipeError):
                _pipe.write(b"+" if armed else b"-")


def call_in_time(what: str, now_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's.

    One that is compiled lets no other thread run and can be interrupted by nobody: then a watchdog kills this process,
    and says why.

    Args:
        what: names the function.
        now_s: the simulated time.
        function, arguments: what to call.

    Raises:
        InputError: it raised, or has not returned after `MOST_CALL_S`.
    """
    thread = threading.get_ident()
    if not _watching.locked() and _watching.acquire(blocking=False):
        threading.Thread(target=_watch, daemon=True).start()
        _ready.wait(MOST_CALL_S)
    _started_s[thread] = time.monotonic()
    if not _is_armed:
        _tell(True)
    try:
        return function(*arguments)
    except KeyboardInterrupt:
        if thread not in _late:
            raise
        raise InputError(f"{what} has not returned for {MOST_CALL_S:g} s", "does it loop without an end?") from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what} failed at {now_s:g} s: {type(error).__name__}: {error}", place(error)) from error
    finally:
        del _started_s[thread]
        _late.discard(thread)


def _watch() -> None:
    """Interrupt calls that take too long, and tell the watchdog that threads run, for as long as this process does."""
    global _pipe
    text = f"error: a compiled scheduler or router has not returned for {MOST_CALL_S:g} s\n"
    words = (str(os.getpid()), str(MOST_CALL_S + GRACE_S), f"{text}hint: does it loop without an end?\n")
    watchdog = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WATCHDOG, *words], stdin=subprocess.PIPE, bufsize=0)
    _pipe, last_call_s = watchdog.stdin, time.monotonic()
    _ready.set()
    while True:
        time.sleep(POLL_S)
        if _started_s:
            last_call_s = time.monotonic()
        if _started_s or _is_armed:
            _tell(time.monotonic() - last_call_s < IDLE_S)
        for thread, started_s in list(_started_s.items()):
            if time.monotonic() - started_s > MOST_CALL_S and thread not in _late:
                _late.add(thread)
                is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
                if thread == threading.main_thread().ident and not is_ignored:
                    # A signal ends a sleep too. Commands that a script starts in the background ignore this one.
                    signal.pthread_kill(thread, signal.SIGINT)
                else:
                    pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(KeyboardInterrupt))
