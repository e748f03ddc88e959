"""Run the chunks of a search here, in threads, in processes, or on a Ray cluster. Results are bit-identical.

A chunk is run whole by one worker, its points in one order, so that no answer depends on where or beside what it was
found. Workers return answers; only the process that drives the search keeps them.
"""

import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from functools import cache, cached_property
from typing import Any, Literal

import msgspec

from windtunnel.errors import InputError, MissingExtraError, WindtunnelError
from windtunnel.schema import Schema
from windtunnel.search.evaluation.duplicates import Neighbours
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.evaluation.training import TrainingEvaluator
from windtunnel.search.space.space import Space

ExecutorName = Literal["here", "threads", "processes", "ray"]
EXECUTORS = ("here", "threads", "processes", "ray")
AnyEvaluator = Evaluator | TrainingEvaluator
MOST_TRIES = 4
"""Tries of a chunk whose worker dies."""
AHEAD = 2
"""Chunks submitted ahead per process, so that it need not wait for this one to send the next."""


class PointChunk(Schema):
    """Points that one worker evaluates one after the other."""

    workload: str | None
    indices: tuple[int, ...]
    question: Question
    near: tuple[float | None, ...]
    """For each point, a load to begin at."""


class Answers(Schema):
    """The answers of a chunk: an evaluation for each of its points, in order."""

    chunk: int
    evaluations: tuple[Evaluation, ...]


def evaluator_of(space: Space) -> AnyEvaluator:
    """Return the evaluator of a space's points."""
    return TrainingEvaluator(space) if space.is_training else Evaluator(space)


def run_chunk(evaluator: AnyEvaluator, chunk: PointChunk) -> tuple[Evaluation, ...]:
    """Evaluate a chunk's points in order."""
    neighbours = Neighbours()
    return tuple(
        evaluator.evaluate(index, chunk.workload, chunk.question, neighbours, near)
        for index, near in zip(chunk.indices, chunk.near, strict=True)
    )


class Workers:
    """The workers that run chunks; processes or a cluster start with the first chunks and end with the context.

    Args:
        space: whose points they are.
        executor: here, or in threads, processes, or Ray's workers.
        num_workers: threads or processes; processors of a Ray cluster that is started for it.
        address: of a Ray cluster (`auto`: the one that runs on this machine); None starts one.
        at_once: processes start before the first chunks are known, which takes them a second; else with the first
            chunks, if there are any.
    """

    def __init__(
        self,
        space: Space,
        executor: ExecutorName = "here",
        num_workers: int = 1,
        address: str | None = None,
        at_once: bool = True,
    ) -> None:
        self.space = space
        self.executor = executor
        self.num_workers = num_workers
        self.address = address
        self.at_once = at_once
        self.pool: Executor | None = None
        self.joined = False
        self.local = threading.local()

    @cached_property
    def encoded(self) -> bytes:
        """The space, encoded for other processes."""
        return msgspec.msgpack.encode(self.space)

    def __enter__(self) -> "Workers":
        if self.at_once and self.executor == "processes" and self.num_workers > 1:
            self.pool = self._new_pool()
            for _ in range(self.num_workers - 1):
                self.pool.submit(get_ready, self.encoded)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_pool()
        if self.joined:
            import ray

            ray.shutdown()

    def run(self, chunks: Sequence[PointChunk], evaluator: AnyEvaluator) -> Iterator[Answers]:
        """Run every chunk once and give its answers when they come, in any order.

        Args:
            chunks: what to run.
            evaluator: of this process, for what runs here.

        Raises:
            MissingExtraError: Ray is not installed.
            WindtunnelError: a chunk's worker died time after time.
        """
        if self.executor == "ray" and chunks:
            return self._on_ray(chunks)
        if self.executor == "processes" and chunks:
            return self._in_processes(chunks, evaluator)
        if self.executor == "threads" and chunks:
            return self._in_threads(chunks)
        return (Answers(chunk=number, evaluations=run_chunk(evaluator, chunk)) for number, chunk in enumerate(chunks))

    def _in_threads(self, chunks: Sequence[PointChunk]) -> Iterator[Answers]:
        """Run chunks in threads, each with an evaluator of its own; kernels release the interpreter's lock."""
        self.pool = self.pool or ThreadPoolExecutor(self.num_workers)

        def work(number: int) -> Answers:
            if not hasattr(self.local, "evaluator"):
                self.local.evaluator = evaluator_of(self.space)
            return Answers(chunk=number, evaluations=run_chunk(self.local.evaluator, chunks[number]))

        for future in as_completed([self.pool.submit(work, number) for number in range(len(chunks))]):
            yield future.result()

    def _in_processes(self, chunks: Sequence[PointChunk], evaluator: AnyEvaluator) -> Iterator[Answers]:
        """Run chunks in this process and in others. Each of the others has a few chunks submitted ahead; this one works
        too, as it is ready while they still start. A pool that loses a worker is replaced, and its unanswered chunks
        run again.
        """
        left, waiting, num_lost = list(reversed(range(len(chunks)))), dict[Future[bytes], int](), 0
        while left or waiting:
            try:
                while left and len(waiting) < AHEAD * (self.num_workers - 1):
                    waiting[self._submit(left[-1], chunks[left[-1]])] = left[-1]
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
                self._end_pool()
                continue
            if left and not done:
                number = left.pop()
                yield Answers(chunk=number, evaluations=run_chunk(evaluator, chunks[number]))

    def _submit(self, number: int, chunk: PointChunk) -> "Future[bytes]":
        self.pool = self.pool or self._new_pool()
        return self.pool.submit(run_encoded, self.encoded, number, msgspec.msgpack.encode(chunk))

    def _new_pool(self) -> Executor:
        # Forked threads may hold locks that nobody releases.
        return ProcessPoolExecutor(self.num_workers - 1, mp_context=multiprocessing.get_context("spawn"))

    def _end_pool(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
            self.pool = None

    def _on_ray(self, chunks: Sequence[PointChunk]) -> Iterator[Answers]:
        """Run a Ray task per chunk; Ray starts it again where its worker or node dies."""
        try:
            import ray
        except ImportError:
            raise MissingExtraError("ray", "ray") from None
        if not ray.is_initialized():
            _join(ray, self.num_workers, self.address)
            self.joined = True
        remote = ray.remote(num_cpus=1, max_retries=MOST_TRIES - 1)(run_encoded)
        encoded = ray.put(self.encoded)
        waiting = [remote.remote(encoded, number, msgspec.msgpack.encode(chunk)) for number, chunk in enumerate(chunks)]
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                for reference in done:
                    yield msgspec.msgpack.decode(ray.get(reference), type=Answers)
        except ray.exceptions.WorkerCrashedError:
            raise WindtunnelError(f"a Ray worker died {MOST_TRIES} times on one chunk") from None


def run_encoded(space: bytes, number: int, chunk: bytes) -> bytes:
    """Run `run_chunk` in another process: spaces, chunks and answers are sent as bytes."""
    evaluations = run_chunk(_kept_evaluator(space), msgspec.msgpack.decode(chunk, type=PointChunk))
    return msgspec.msgpack.encode(Answers(chunk=number, evaluations=evaluations))


def get_ready(space: bytes) -> None:
    """Import and load what every chunk needs."""
    _kept_evaluator(space)


@cache
def _kept_evaluator(space: bytes) -> AnyEvaluator:
    """Return the evaluator of a space, one per process."""
    return evaluator_of(msgspec.msgpack.decode(space, type=Space))


def _join(ray: Any, num_workers: int, address: str | None) -> None:
    try:
        if address is None:
            ray.init(num_cpus=num_workers, include_dashboard=False, log_to_driver=False, logging_level="error")
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise InputError(
            f"there is no Ray cluster at {address} ({error})", "start one with `ray start --head`"
        ) from None
