"""A time limit for calls of users' functions in Python."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_ulong, py_object, pythonapi
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError, place
from windtunnel.processes import complaints, exit_when_readable

MOST_CALL_S = 120.0
"""A function that has not returned by then is ended; numba compiles one in a tenth of that, in its first call."""
POLL_S = 0.05

_started: dict[int, tuple[float, str, float]] = {}
"""Thread -> when its call began, the name of what it calls, and its time limit."""
_late: set[int] = set()
"""Threads whose call is being ended."""
_watching = threading.Lock()

GRACE_S = 15.0
"""What the watchdog waits beyond `MOST_CALL_S`, so that functions which can be interrupted are."""
IDLE_S = 1.0
"""The watchdog rests once no function was called for so long."""
MOST_NAME = 300
"""Bytes of a name that the watchdog is told."""
_WATCHDOG = """
import os, select, signal, sys, time
parent, most_s, end = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
name, missed = "", 0
while missed < 2:
    if not select.select([0], [], [], most_s / 2 if name else None)[0]:
        missed += 1
        continue
    said = os.read(0, 65536)
    if not said:
        sys.exit()
    name, missed = said.decode(errors="replace").splitlines()[-1], 0
sys.stderr.write(sys.argv[4].format(name))
sys.stderr.flush()
os.write(end, b".")
time.sleep(2)
if os.getppid() == parent:
    os.kill(parent, signal.SIGKILL)
"""
"""Program that ends its parent where no line comes for a while, unless the last one was empty; one that is stopped and
goes on gets half the time. Where the parent cannot wait for a byte without Python, it is killed."""

END = signal.SIGURG
"""Signal that ends a late call of the main thread. Commands in the background ignore SIGINT, and hand that on to
theirs; nobody else sends or handles this one, and without a handler it does nothing."""
PATIENCE_S = 1.0
"""A call that has taken so long is ended by Ctrl-C, whatever the process makes of it otherwise."""
_MAIN = threading.main_thread().ident or 0
_handler: Callable[[int, Any], Any] = signal.default_int_handler
"""Of SIGINT, before `_interrupt`."""

_arming = threading.Lock()
_ready = threading.Event()
_is_armed = False
_watchdog: subprocess.Popen[bytes] | None = None


def _tell(armed: bool) -> None:
    """Tell the watchdog what is called, or let it rest where no call has begun meanwhile."""
    global _is_armed  # noqa: PLW0603
    with _arming:
        if _watchdog is not None and _watchdog.stdin and (armed or not _started):
            _is_armed = armed
            name = min(_started.values(), default=(0.0, "a custom scheduler or router", 0.0))[1]
            with suppress(BrokenPipeError):
                _watchdog.stdin.write(name.encode(errors="replace")[:MOST_NAME] + b"\n" if armed else b"\n")


@dataclass(slots=True)
class InTime:
    """A function of the user's, called with a time limit (None: `MOST_CALL_S`); `what` names it in errors.

    One that is compiled lets no other thread run and can be interrupted by nobody: then a watchdog ends this process
    with exit code 2, and says why.
    """

    what: str
    function: Callable[..., Any]
    most_call_s: float | None = None

    def __call__(self, now_s: float, *arguments: Any) -> Any:
        """Call it at a simulated time; InputError where it raised, or has not returned in time."""
        thread, what = threading.get_ident(), self.what
        if not _watching.locked() and _watching.acquire(blocking=False):
            threading.Thread(target=_watch, daemon=True).start()
            _ready.wait(MOST_CALL_S)
        if thread == _MAIN:
            _hear_signals()
        most_s = self.most_call_s or MOST_CALL_S
        _started[thread] = time.monotonic(), what, most_s
        if not _is_armed:
            _tell(True)
        try:
            return self.function(*arguments)
        except KeyboardInterrupt:
            if thread not in _late:
                raise
            raise InputError(f"{what} has not returned for {most_s:g} s", "does it loop without an end?") from None
        except InputError:
            raise
        except Exception as error:
            # numba's messages are coloured paragraphs
            text = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())
            where, compiled = place(error), getattr(self.function, "py_func", None)
            if compiled is not None and Path(compiled.__code__.co_filename).name not in (where or ""):
                where = f"{Path(compiled.__code__.co_filename).name}, line {compiled.__code__.co_firstlineno}"
            raise InputError(f"{what} failed at {now_s:g} s: {type(error).__name__}: {text:.300}", where) from error
        finally:
            del _started[thread]
            _late.discard(thread)


def _hear_signals() -> None:
    """Let signals end a call of the main thread: `END` a late one, SIGINT where a server's handler would not."""
    global _handler  # noqa: PLW0603
    if signal.getsignal(END) is not _end_late_call:
        signal.signal(END, _end_late_call)
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler) and handler not in (signal.default_int_handler, _interrupt):
        _handler = handler
        signal.signal(signal.SIGINT, _interrupt)


def _end_late_call(_number: int, _frame: Any) -> None:
    if _MAIN in _late:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: Any) -> None:
    """End a call of the main thread that a user waits for; else do what was done before."""
    started = _started.get(_MAIN)
    if started is not None and time.monotonic() - started[0] > PATIENCE_S:
        raise KeyboardInterrupt
    _handler(number, frame)


def _start_watchdog() -> None:
    """Start the process that ends this one; in a worker of a search the parent prints what it says."""
    global _watchdog  # noqa: PLW0603
    text = f"error: {{}} has not returned for {MOST_CALL_S:g} s\nhint: does it loop without an end?\n"
    wakes, end = os.pipe()
    exit_when_readable(wakes, InputError.exit_code)
    words = (str(os.getpid()), str(MOST_CALL_S + GRACE_S), str(end), text)
    command = [sys.executable, "-I", "-S", "-c", _WATCHDOG, *words]
    pipe = subprocess.PIPE
    _watchdog = subprocess.Popen(command, stdin=pipe, stderr=complaints(), bufsize=0, pass_fds=(end,))
    _ready.set()


def _watch() -> None:
    """Interrupt calls that take too long, and tell the watchdog that threads run, for as long as this process does."""
    _start_watchdog()
    last_call_s = time.monotonic()
    while True:
        time.sleep(POLL_S)
        if _started:
            last_call_s = time.monotonic()
        if _started or _is_armed:
            _tell(time.monotonic() - last_call_s < IDLE_S)
        for thread, (started_s, _, most_s) in list(_started.items()):
            if time.monotonic() - started_s > most_s and thread not in _late:
                _late.add(thread)
                if thread == _MAIN:
                    signal.pthread_kill(thread, END)  # it ends a sleep too
                else:
                    pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(KeyboardInterrupt))
