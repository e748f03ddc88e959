"""A timer of the Linux kernel that wakes an event loop in time; event loops' own timers count whole milliseconds."""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

WAKING_S = 0.0001
"""What it takes from the alarm until the event loop runs."""


class Alarm:
    """Calls a function of an event loop at a time (timerfd_create(2)).

    Args:
        loop: the event loop, in which the file of the timer is watched.
        on_time: called when the time has come.

    Raises:
        OSError: the kernel has no such timers, or gives none.
        NotImplementedError: the event loop watches no files.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_time: Callable[[], None]) -> None:
        self.loop, self._on_time = loop, on_time
        library: Any = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "timerfd_create"):
            raise OSError("no timerfd_create")
        self._set = library.timerfd_settime
        self._file = library.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._when = (ctypes.c_long * 4)()  # seconds and nanoseconds of the interval, which is none, and of the time
        loop.add_reader(self._file, self._ring)

    def start(self, wait_s: float) -> None:
        """Ring once after so many seconds, and not as it was set before."""
        seconds, rest = divmod(max(wait_s - WAKING_S, 1e-9), 1.0)
        self._when[2], self._when[3] = int(seconds), max(int(rest * 1e9), 1)
        self._set(self._file, 0, self._when, None)

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # it has been set anew meanwhile
            os.read(self._file, 8)
            self._on_time()

    def close(self) -> None:
        """Give the timer back."""
        if not self.loop.is_closed():
            self.loop.remove_reader(self._file)
        os.close(self._file)
