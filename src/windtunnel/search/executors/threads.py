"""Run chunks in threads, each with an evaluator of its own; kernels release the interpreter's lock."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

from windtunnel.search.space.space import Space
from windtunnel.search.workers import Answers, AnyEvaluator, Means, PointChunk, RunChunks, evaluator_of, run_chunk


@contextmanager
def start(space: Space, means: Means, _at_once: bool) -> Iterator[RunChunks]:
    """Yield the function that runs chunks; threads start with the first ones."""
    local = threading.local()

    def work(number: int, chunk: PointChunk) -> Answers:
        if not hasattr(local, "evaluator"):
            local.evaluator = evaluator_of(space)
        return run_chunk(local.evaluator, number, chunk)

    with ThreadPoolExecutor(means.num_workers) as pool:

        def run(chunks: Sequence[PointChunk], _evaluator: AnyEvaluator) -> Iterator[Answers]:
            futures = [pool.submit(work, number, chunk) for number, chunk in enumerate(chunks)]
            try:
                yield from (future.result() for future in as_completed(futures))
            finally:
                for future in futures:
                    future.cancel()

        yield run
