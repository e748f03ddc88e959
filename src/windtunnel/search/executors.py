"""Where the chunks of a search run: here, in threads, in processes, or on a Ray cluster. The answers are the same.

A chunk is run whole by one worker, its points in one order, so that no answer depends on where or beside what it was
found. Workers return answers; only the process that drives the search keeps them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any, Literal

import msgspec

from windtunnel.errors import InputError, MissingExtraError, WindtunnelError
from windtunnel.search.evaluate import Evaluation, Evaluator, Neighbours, Question
from windtunnel.search.space import Space
from windtunnel.spec.noun import Noun

ExecutorName = Literal["here", "threads", "processes", "ray"]
EXECUTORS = ("here", "threads", "processes", "ray")
MOST_TRIES = 4
"""Of a chunk whose worker died."""


class Chunk(Noun):
    """Points that one worker evaluates one after the other."""

    workload: str | None
    indices: tuple[int, ...]
    question: Question


class Answers(Noun):
    """What came of a chunk: an evaluation for each of its points, in order."""

    chunk: int
    evaluations: tuple[Evaluation, ...]


def run_chunk(evaluator: Evaluator, chunk: Chunk) -> tuple[Evaluation, ...]:
    """Evaluate a chunk's points in order."""
    neighbours = Neighbours()
    return tuple(evaluator.evaluate(index, chunk.workload, chunk.question, neighbours) for index in chunk.indices)


def run_chunks(
    space: Space,
    chunks: Sequence[Chunk],
    evaluator: Evaluator,
    executor: ExecutorName = "here",
    num_workers: int = 1,
    address: str | None = None,
) -> Iterator[Answers]:
    """Run every chunk once and give its answers when they come, in any order.

    Args:
        space: whose points they are.
        chunks: what to run.
        evaluator: used by what runs in this process.
        executor: where they run.
        num_workers: threads or processes; Ray takes what its cluster has.
        address: of a Ray cluster (`auto`: the one that runs here); None starts one of `num_workers` processors.

    Raises:
        MissingExtraError: Ray is not installed.
        WindtunnelError: a chunk's worker died time after time.
    """
    if executor == "ray":
        yield from _on_ray(space, chunks, num_workers, address)
    elif executor == "processes":
        yield from _in_processes(space, chunks, num_workers)
    elif executor == "threads" and num_workers > 1:
        yield from _in_threads(space, chunks, num_workers)
    else:
        for number, chunk in enumerate(chunks):
            yield Answers(chunk=number, evaluations=run_chunk(evaluator, chunk))


def _in_threads(space: Space, chunks: Sequence[Chunk], num_workers: int) -> Iterator[Answers]:
    """Kernels release the interpreter's lock; a thread has an evaluator of its own."""
    import threading

    own = threading.local()

    def work(number: int) -> Answers:
        if not hasattr(own, "evaluator"):
            own.evaluator = Evaluator(space)
        return Answers(chunk=number, evaluations=run_chunk(own.evaluator, chunks[number]))

    with ThreadPoolExecutor(num_workers) as pool:
        yield from _as_they_come(pool, work, range(len(chunks)))


def _in_processes(space: Space, chunks: Sequence[Chunk], num_workers: int) -> Iterator[Answers]:
    """A pool that loses a worker is replaced, and what it had not answered is run again."""
    import multiprocessing

    encoded = msgspec.msgpack.encode(space)
    left = set(range(len(chunks)))
    for _ in range(MOST_TRIES):
        # Forked threads may hold locks that nobody releases.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
            work = [(encoded, number, msgspec.msgpack.encode(chunks[number])) for number in sorted(left)]
            futures = [pool.submit(run_encoded, *one) for one in work]
            try:
                for future in as_completed(futures):
                    answers = msgspec.msgpack.decode(future.result(), type=Answers)
                    left.discard(answers.chunk)
                    yield answers
            except BrokenProcessPool:
                continue
        if not left:
            return
    raise WindtunnelError(f"worker processes died {MOST_TRIES} times; {len(left)} of {len(chunks)} chunks are left")


def _as_they_come(pool: Executor, work: Any, numbers: range) -> Iterator[Answers]:
    futures = [pool.submit(work, number) for number in numbers]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def run_encoded(space: bytes, number: int, chunk: bytes) -> bytes:
    """`run_chunk` in another process: spaces, chunks and answers travel as bytes."""
    evaluations = run_chunk(_evaluator_of(space), msgspec.msgpack.decode(chunk, type=Chunk))
    return msgspec.msgpack.encode(Answers(chunk=number, evaluations=evaluations))


@cache
def _evaluator_of(space: bytes) -> Evaluator:
    """A process keeps one for every space that it works on."""
    return Evaluator(msgspec.msgpack.decode(space, type=Space))


def _on_ray(space: Space, chunks: Sequence[Chunk], num_workers: int, address: str | None) -> Iterator[Answers]:
    """A task a chunk; Ray starts it again where its worker or node dies."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
    is_ours = not ray.is_initialized()
    if is_ours:
        _join(ray, num_workers, address)
    remote = ray.remote(num_cpus=1, max_retries=MOST_TRIES - 1)(run_encoded)
    try:
        encoded = ray.put(msgspec.msgpack.encode(space))
        waiting = [remote.remote(encoded, number, msgspec.msgpack.encode(chunk)) for number, chunk in enumerate(chunks)]
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            for reference in done:
                yield msgspec.msgpack.decode(ray.get(reference), type=Answers)
    except ray.exceptions.WorkerCrashedError:
        raise WindtunnelError(f"a Ray worker died {MOST_TRIES} times on one chunk") from None
    finally:
        if is_ours:
            ray.shutdown()


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
