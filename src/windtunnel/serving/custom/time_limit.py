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

from windtunnel.errors import InputError

MOST_CALL_S = 120.0
"""A function that has not returned by then is ended; numba compiles one in a tenth of that, in its first call."""
POLL_S = 0.05

_started_s: dict[int, float] = {}
"""Thread -> when its call began."""
_late: set[int] = set()
"""Threads whose call is being ended."""
_watching = threading.Lock()


GRACE_S = 15.0
_WATCHDOG = """
import os, select, signal, sys
parent, most_s = int(sys.argv[1]), float(sys.argv[2])
missed = 0
while missed < 2:
    if not select.select([0], [], [], most_s / 2)[0]:
        missed += 1
    elif os.read(0, 4096):
        missed = 0
    else:
        sys.exit()
sys.stderr.write(sys.argv[3])
os.kill(parent, signal.SIGKILL)
"""
"""Program that kills its parent where no byte comes for a while; one who is stopped and goes on gets half the time."""


def call_in_time(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's.

    One that is compiled lets no other thread run and can be interrupted by nobody: then a watchdog kills this process,
    and says why.

    Args:
        what: names the function.

    Raises:
        InputError: it has not returned after `MOST_CALL_S`.
    """
    thread = threading.get_ident()
    if not _watching.locked() and _watching.acquire(blocking=False):
        threading.Thread(target=_watch, daemon=True).start()
    _started_s[thread] = time.monotonic()
    try:
        return function(*arguments)
    except KeyboardInterrupt:
        if thread not in _late:
            raise
        raise InputError(f"{what} has not returned for {MOST_CALL_S:g} s", "does it loop without an end?") from None
    finally:
        del _started_s[thread]
        _late.discard(thread)


def _watch() -> None:
    """Interrupt calls that take too long, and tell the watchdog that threads run, for as long as this process does."""
    text = f"error: a compiled scheduler or router has not returned for {MOST_CALL_S:g} s\n"
    words = (str(os.getpid()), str(MOST_CALL_S + GRACE_S), f"{text}hint: does it loop without an end?\n")
    watchdog = subprocess.Popen([sys.executable, "-I", "-S", "-c", _WATCHDOG, *words], stdin=subprocess.PIPE, bufsize=0)
    assert watchdog.stdin is not None
    while True:
        time.sleep(POLL_S)
        with suppress(BrokenPipeError):
            watchdog.stdin.write(b".")
        for thread, started_s in list(_started_s.items()):
            if time.monotonic() - started_s > MOST_CALL_S and thread not in _late:
                _late.add(thread)
                is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
                if thread == threading.main_thread().ident and not is_ignored:
                    # A signal ends a sleep too. Commands that a script starts in the background ignore this one.
                    signal.pthread_kill(thread, signal.SIGINT)
                else:
                    pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(KeyboardInterrupt))
