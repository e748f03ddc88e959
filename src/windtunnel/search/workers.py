"""The workers of a search: chunks of points, the evaluator that runs them, and the executor that decides where.

A chunk is run whole by one worker, its points in one order, so that results are bit-identical wherever it runs. Workers
return answers; only the process that drives the search keeps them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import msgspec

from windtunnel.plugins import Registry
from windtunnel.schema import Schema
from windtunnel.search.evaluation.duplicates import Neighbours
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Evaluation, Question
from windtunnel.search.evaluation.training import TrainingEvaluator
from windtunnel.search.space.space import Space

EXECUTORS = Registry("windtunnel.executors", "windtunnel.search.executors", "executor")
AnyEvaluator = Evaluator | TrainingEvaluator
MOST_TRIES = 4
"""Tries of a chunk whose worker dies."""
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


@dataclass(frozen=True)
class Means:
    """The workers that run a search; its answers do not depend on them."""

    executor: str = "here"
    """Name in `EXECUTORS`."""
    num_workers: int = 1
    """Threads or processes; processors of a Ray cluster that is started for the search."""
    address: str | None = None
    """Address of a Ray cluster (`auto`: the one that runs on this machine); None starts one."""
    progress: Progress | None = None


HERE = Means()


def start_workers(space: Space, means: Means = HERE, at_once: bool = True) -> AbstractContextManager[RunChunks]:
    """Return the context in which workers run chunks of a space's points.

    Args:
        space: whose points they are.
        means: the executor and the number of workers.
        at_once: start processes before the first chunks are known, which takes them a second; else with the first
            chunks, if there are any.
    """
    context: AbstractContextManager[RunChunks] = EXECUTORS.get(means.executor).start(space, means, at_once)
    return context


def evaluator_of(space: Space) -> AnyEvaluator:
    """Return the evaluator of a space's points."""
    return TrainingEvaluator(space) if space.is_training else Evaluator(space)


def run_chunk(evaluator: AnyEvaluator, number: int, chunk: PointChunk) -> Answers:
    """Evaluate a chunk's points in order."""
    neighbours = Neighbours()
    evaluations = tuple(
        evaluator.evaluate(index, chunk.workload, chunk.question, neighbours, near)
        for index, near in zip(chunk.indices, chunk.near, strict=True)
    )
    return Answers(chunk=number, evaluations=evaluations)


def run_encoded(space: bytes, number: int, chunk: bytes) -> bytes:
    """Run `run_chunk` in another process: spaces, chunks and answers are sent as bytes."""
    answers = run_chunk(_kept_evaluator(space), number, msgspec.msgpack.decode(chunk, type=PointChunk))
    return msgspec.msgpack.encode(answers)


def get_ready(space: bytes) -> None:
    """Import and load what every chunk of an encoded space needs."""
    _kept_evaluator(space)


@cache
def _kept_evaluator(space: bytes) -> AnyEvaluator:
    """Return the evaluator of an encoded space, one per process."""
    return evaluator_of(msgspec.msgpack.decode(space, type=Space))
