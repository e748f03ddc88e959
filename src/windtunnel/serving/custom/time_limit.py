"""A time limit for calls of users' functions in Python."""

import signal
import threading
import time
from collections.abc import Callable
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


def call_in_time(what: str, now_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's. One that is compiled cannot be ended while it runs.

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
    _started_s[thread] = time.monotonic()
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
    """Interrupt calls that take too long, for as long as this process runs."""
    while True:
        time.sleep(POLL_S)
        for thread, started_s in list(_started_s.items()):
            if time.monotonic() - started_s > MOST_CALL_S and thread not in _late:
                _late.add(thread)
                is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
                if thread == threading.main_thread().ident and not is_ignored:
                    # A signal ends a sleep too. Commands that a script starts in the background ignore this one.
                    signal.pthread_kill(thread, signal.SIGINT)
                else:
                    pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(KeyboardInterrupt))
