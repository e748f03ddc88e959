"""Run chunks in this process and in others; a pool that loses a process is replaced, and its chunks run again."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import msgspec

from windtunnel.errors import WindtunnelError
from windtunnel.search.space.space import Space
from windtunnel.search.workers import (
    MOST_TRIES,
    Answers,
    AnyEvaluator,
    Means,
    PointChunk,
    RunChunks,
    get_ready,
    run_chunk,
    run_encoded,
)

AHEAD = 2
"""Chunks submitted ahead per process, so that it need not wait for this one to send the next."""


@contextmanager
def start(space: Space, means: Means, at_once: bool) -> Iterator[RunChunks]:
    """Yield the function that runs chunks; the other processes import and load what every chunk needs."""
    processes = _Processes(space, means.num_workers - 1)
    try:
        for _ in range(processes.num_others if at_once else 0):
            processes.open_pool().submit(get_ready, processes.space)
        yield processes.run
    finally:
        processes.close_pool()


class _Processes:
    """A pool of other processes that may die."""

    def __init__(self, space: Space, num_others: int) -> None:
        self.space, self.num_others = msgspec.msgpack.encode(space), num_others
        self.pool: ProcessPoolExecutor | None = None

    def open_pool(self) -> ProcessPoolExecutor:
        """Return the pool, started anew where there is none; forked threads may hold locks that nobody releases."""
        self.pool = self.pool or ProcessPoolExecutor(self.num_others, mp_context=multiprocessing.get_context("spawn"))
        return self.pool

    def close_pool(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None

    def run(self, chunks: Sequence[PointChunk], evaluator: AnyEvaluator) -> Iterator[Answers]:
        """Run chunks in all processes. This one works too, as it is ready while the others still start.

        Raises:
            WindtunnelError: a process died time after time.
        """
        left, waiting, num_lost = list(reversed(range(len(chunks)))), dict[Future[bytes], int](), 0
        while left or waiting:
            try:
                while left and len(waiting) < AHEAD * self.num_others:
                    chunk = msgspec.msgpack.encode(chunks[left[-1]])
                    waiting[self.open_pool().submit(run_encoded, self.space, left[-1], chunk)] = left[-1]
                    left.pop()
                done, _ = wait(waiting, timeout=0 if left else None, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    answers = future.result()
                    del waiting[future]
                    yield msgspec.msgpack.decode(answers, type=Answers)
            except BrokenProcessPool:
                num_lost += 1
                if num_lost == MOST_TRIES:
                    num_left = len(left) + len(waiting)
                    raise WindtunnelError(
                        f"worker processes died {num_lost} times; {num_left} of {len(chunks)} chunks are left"
                    ) from None
                left += sorted(waiting.values(), reverse=True)
                waiting.clear()
                self.close_pool()
                continue
            if left and not done:
                number = left.pop()
                yield run_chunk(evaluator, number, chunks[number])
