"""Worker processes that end with the process that starts them, however it ends."""

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
        super().__init__(num_workers, mp_context=context, initializer=_end_with, initargs=(ours,))

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


def _end_with(parents: Connection) -> None:
    """End this worker once the parent's end of a pipe is closed; Ctrl-C in a terminal is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

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
