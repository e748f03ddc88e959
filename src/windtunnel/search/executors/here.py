"""Run chunks one after the other in this thread."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from windtunnel.search.space.space import Space
from windtunnel.search.workers import Answers, AnyEvaluator, Means, PointChunk, RunChunks, run_chunk


def _run(chunks: Sequence[PointChunk], evaluator: AnyEvaluator) -> Iterator[Answers]:
    return (run_chunk(evaluator, number, chunk) for number, chunk in enumerate(chunks))


@contextmanager
def start(_space: Space, _means: Means, _at_once: bool) -> Iterator[RunChunks]:
    """Yield the function that runs chunks."""
    yield _run
