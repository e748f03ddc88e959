"""Run the chunks of a search here, in threads, in processes, or on a Ray cluster. Results are bit-identical.

A chunk is run whole by one worker, its points in one order, so that no answer depends on where it was found, or with
which other points. Workers return answers; only the process that drives the search keeps them.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, assert_never, get_args

import msgspec

from windtunnel.errors import InputError, WindtunnelError, import_extra
from windtunnel.processes import WorkerProcesses
from windtunnel.schema import Schema
from windtunnel.search.evaluation.duplicates import Neighbours
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.evaluation.training import TrainingEvaluator
from windtunnel.search.scores import score
from windtunnel.search.space.space import Space

ExecutorName = Literal["here", "threads", "processes", "ray"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
AnyEvaluator = Evaluator | TrainingEvaluator
MOST_TRIES = 4
"""Tries of a chunk whose worker dies."""
AHEAD = 2
"""Chunks submitted ahead per process, so that it need not wait for this one to send the next."""
Progress = Callable[[int, int], None]
"""Called with (points answered, points in all)."""


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


RunChunks = Callable[[Sequence[PointChunk], AnyEvaluator], Iterator[Answers]]
"""Runs every chunk once and yields its answers as they come, in any order; the evaluator is this process's own."""


MOST_WORKERS = 1024
"""Threads or processes of one machine."""


@dataclass(frozen=True)
class Means:
    """The workers that run a search; its answers do not depend on them."""

    executor: ExecutorName = "here"
    num_workers: int = 1
    """Threads or processes; processors of a Ray cluster that is started for the search."""
    address: str | None = None
    """Address of a Ray cluster (`auto`: the one that runs on this machine); None starts one."""
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_workers <= MOST_WORKERS:
            raise InputError(f"workers is {self.num_workers:,}; 1 to {MOST_WORKERS:,} can be started")


HERE = Means()
MANY_JOBS, MANY_SERVERS = 10_000, 200
"""Points of a space of training jobs, of milliseconds each, and of servers, from which several processes take part."""
MOST_USUAL_WORKERS = 8
"""Of servers: every process reads the tables of every device."""


def usual_means(space: Space) -> Means:
    """Return the workers of a search that names none."""
    num_processors = os.cpu_count() or 1
    num_workers = num_processors if space.is_training else min(num_processors, MOST_USUAL_WORKERS)
    is_long = space.num_points >= (MANY_JOBS if space.is_training else MANY_SERVERS)
    return Means("processes", num_workers) if is_long and num_workers > 1 else HERE


@contextmanager
def start_workers(space: Space, means: Means = HERE, at_once: bool = True) -> Iterator[RunChunks]:
    """Yield the function that runs chunks; a pool or a cluster starts with the first chunks and ends with the context.
    MissingExtraError where Ray is not installed; WindtunnelError where a chunk's worker died time after time.

    Args:
        at_once: start processes before the first chunks are known, which takes them a second.
    """
    match means.executor:
        case "here":
            yield lambda chunks, evaluator: (run_chunk(evaluator, *numbered) for numbered in enumerate(chunks))
        case "threads":
            with ThreadPoolExecutor(means.num_workers) as pool:
                yield partial(_run_in_threads, pool, space, threading.local())
        case "processes":
            with closing(_Processes(space, means.num_workers - 1)) as processes:
                if at_once:
                    processes.get_ready()
                yield processes.run
        case "ray":
            with ExitStack() as stack:
                yield partial(_run_on_ray, stack, space, means)
        case _:
            assert_never(means.executor)


def evaluator_of(space: Space) -> AnyEvaluator:
    """Return the evaluator of a space's points."""
    return TrainingEvaluator(space) if space.is_training else Evaluator(space)


def run_chunk(evaluator: AnyEvaluator, number: int, chunk: PointChunk) -> Answers:
    """Evaluate a chunk's points in order."""
    neighbours, objective = Neighbours(), evaluator.space.objective
    evaluations: list[Evaluation] = []
    for index, near in zip(chunk.indices, chunk.near, strict=True):
        question = chunk.question
        best = max(evaluations, key=lambda each: score(each, objective), default=None) if question.drops else None
        if best is not None and best.holds:
            length = best.stream_requests or None
            question = msgspec.structs.replace(question, worth=score(best, objective), num_requests=length)
        evaluations.append(evaluator.evaluate(index, chunk.workload, question, neighbours, near))
    return Answers(chunk=number, evaluations=tuple(evaluations))


def _run_in_threads(
    pool: ThreadPoolExecutor,
    space: Space,
    local: threading.local,
    chunks: Sequence[PointChunk],
    _evaluator: AnyEvaluator,
) -> Iterator[Answers]:
    """Run chunks in threads, each with an evaluator of its own; kernels release the interpreter's lock."""

    def work(number: int, chunk: PointChunk) -> Answers:
        if not hasattr(local, "evaluator"):
            local.evaluator = evaluator_of(space)
        return run_chunk(local.evaluator, number, chunk)

    yield from pool.map(work, range(len(chunks)), chunks)


class _Processes:
    """A pool of processes beside this one; where it loses a process it is replaced, and its chunks run again."""

    def __init__(self, space: Space, num_others: int) -> None:
        self.space, self.num_others = msgspec.msgpack.encode(space), num_others
        self.pool: WorkerProcesses | None = None

    def open(self) -> WorkerProcesses:
        self.pool = self.pool or WorkerProcesses(self.num_others)
        return self.pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.end()
            self.pool = None

    def get_ready(self) -> None:
        """Let the processes import and load what every chunk needs."""
        for _ in range(self.num_others):
            self.open().submit(_get_ready, self.space)

    def run(self, chunks: Sequence[PointChunk], evaluator: AnyEvaluator) -> Iterator[Answers]:
        """Run chunks in all processes. This one works too, as it is ready while the others still start."""
        left, waiting, num_lost = list(reversed(range(len(chunks)))), dict[Future[Answers], int](), 0
        while left or waiting:
            try:
                while left and len(waiting) < AHEAD * self.num_others:
                    waiting[self.open().submit(_run_elsewhere, self.space, left[-1], chunks[left[-1]])] = left[-1]
                    left.pop()
                done, _ = wait(waiting, timeout=0 if left else None, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: future.exception() is not None):
                    answers = future.result()
                    del waiting[future]
                    yield answers
            except BrokenProcessPool:
                if complaint := self.open().complaint():
                    raise InputError(*(line.partition(": ")[2] for line in complaint.splitlines()[:2])) from None
                num_lost += 1
                if num_lost == MOST_TRIES:
                    num_left = len(left) + len(waiting)
                    raise WindtunnelError(
                        f"worker processes died {num_lost} times; {num_left} of {len(chunks)} chunks are left"
                    ) from None
                left += sorted(waiting.values(), reverse=True)
                waiting.clear()
                self.close()
                continue
            if left and not done:
                number = left.pop()
                yield run_chunk(evaluator, number, chunks[number])


def _run_on_ray(
    stack: ExitStack, space: Space, means: Means, chunks: Sequence[PointChunk], _evaluator: AnyEvaluator
) -> Iterator[Answers]:
    """Run a Ray task per chunk; Ray starts it again where its worker or node dies."""
    if not chunks:
        return
    ray = import_extra("ray", "ray")
    if not ray.is_initialized():
        new = {"num_cpus": means.num_workers, "include_dashboard": False}
        place = new if means.address is None else {"address": means.address}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**place, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError) as error:
            raise InputError(
                f"there is no Ray cluster at {means.address} ({error})", "start one with `ray start --head`"
            ) from None
        stack.callback(ray.shutdown)
        if threading.current_thread() is threading.main_thread():
            # Ray's own would exit with another code.
            signal.signal(signal.SIGTERM, handler)
    remote = ray.remote(num_cpus=1, max_retries=MOST_TRIES - 1)(_run_elsewhere)
    encoded = ray.put(msgspec.msgpack.encode(space))
    waiting = [remote.remote(encoded, number, chunk) for number, chunk in enumerate(chunks)]
    try:
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            yield from map(ray.get, done)
    except ray.exceptions.WorkerCrashedError:
        raise WindtunnelError(f"a Ray worker died {MOST_TRIES} times on one chunk") from None


def _run_elsewhere(space: bytes, number: int, chunk: PointChunk) -> Answers:
    """Run `run_chunk` in another process, which keeps the evaluator of the encoded space."""
    return run_chunk(_kept_evaluator(space), number, chunk)


def _get_ready(space: bytes) -> None:
    _kept_evaluator(space)


@cache
def _kept_evaluator(space: bytes) -> AnyEvaluator:
    """Return the evaluator of a space, one per process."""
    return evaluator_of(msgspec.msgpack.decode(space, type=Space))
