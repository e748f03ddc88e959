"""Processes that end when they must: workers with their parent, and any of them while compiled code runs."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from types import TracebackType


class WorkerProcesses(ProcessPoolExecutor):
    """A pool of processes. They are not forked: forked threads may hold locks that nobody releases.

    As a context manager it waits for the work under way, but where the block raises it ends the workers at once.
    """

    def __init__(self, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        # Only this process holds the end that is written to, so that the other one closes when it is killed too.
        ours, self._ours = context.Pipe(duplex=False)
        self._complaints, theirs = context.Pipe(duplex=False)
        super().__init__(num_workers, mp_context=context, initializer=_end_with, initargs=(ours, theirs))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end()
        super().__exit__(kind, error, traceback)

    def end(self) -> None:
        """End the workers, whatever they do."""
        self._ours.close()
        self.shutdown(wait=True, cancel_futures=True)

    def complaint(self) -> str:
        """Return what was written to `complaints()` of a worker that ended."""
        return os.read(self._complaints.fileno(), 4096).decode() if self._complaints.poll(0) else ""


_pipes: list[Connection] = []
"""In a worker: the end that closes with its parent, and the one for complaints."""


def complaints() -> int | None:
    """Return the file for the last words of this process: of a worker a pipe to its parent, else None, for stderr."""
    return _pipes[1].fileno() if _pipes else None


def _end_with(parents: Connection, complaints: Connection) -> None:
    """End this worker once the parent's end of a pipe is closed; Ctrl-C in a terminal is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _pipes[:] = parents, complaints
    if exit_when_readable(parents.fileno(), 1):
        return

    def wait() -> None:
        parents.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl (linux/prctl.h): the signal that a process gets when its parent ends."""


def end_with_parent() -> None:
    """Let Linux end this process when its parent ends, even if it is killed; a `preexec_fn` of a child process.

    A server gets SIGTERM, on which it ends its own workers.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Notice(ctypes.Structure):
    """`struct sigevent` of Linux: call `function` with `value` in a thread of the C library."""

    _fields_ = (
        *(("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("kind", ctypes.c_int)),
        *(("function", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("unused", ctypes.c_char * 32)),
    )


class _Reading(ctypes.Structure):
    """`struct aiocb` of Linux's C libraries: read from a file in their own thread."""

    _fields_ = (
        *(("file", ctypes.c_int), ("operation", ctypes.c_int), ("priority", ctypes.c_int)),
        *(("buffer", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t), ("notice", _Notice)),
        ("unused", ctypes.c_char * 128),
    )


_SIGEV_THREAD = 2
_kept: list[object] = []
"""What the C library still writes to."""


def exit_when_readable(file: int, code: int) -> bool:
    """End this process with an exit code once a pipe has a byte or is closed, whatever its threads do.

    The C library waits and exits, in a thread that needs no Python: also compiled code that holds the interpreter ends.

    Returns:
        Whether this system can do that.
    """
    if _LIBC is None or not hasattr(_LIBC, "aio_read"):
        return False
    buffer = ctypes.create_string_buffer(1)
    leave = ctypes.cast(_LIBC._exit, ctypes.c_void_p)
    notice = _Notice(value=code, kind=_SIGEV_THREAD, function=leave.value)
    reading = _Reading(file=file, buffer=ctypes.addressof(buffer), num_bytes=1, notice=notice)
    _kept.extend((buffer, reading))
    return bool(_LIBC.aio_read(ctypes.byref(reading)) == 0)
