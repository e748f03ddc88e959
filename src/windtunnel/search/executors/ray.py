"""Run chunks on a Ray cluster, a task each; Ray starts a task again where its worker or node dies."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from windtunnel.errors import InputError, WindtunnelError, import_extra
from windtunnel.search.space.space import Space
from windtunnel.search.workers import MOST_TRIES, Answers, AnyEvaluator, Means, PointChunk, RunChunks, run_encoded


@contextmanager
def start(space: Space, means: Means, _at_once: bool) -> Iterator[RunChunks]:
    """Yield the function that runs chunks; the cluster is joined with the first ones, and left in the end."""
    with ExitStack() as stack:

        def run(chunks: Sequence[PointChunk], _evaluator: AnyEvaluator) -> Iterator[Answers]:
            if not chunks:
                return
            ray = import_extra("ray", "ray")
            if not ray.is_initialized():
                _join(ray, means)
                stack.callback(ray.shutdown)
            yield from _run(ray, msgspec.msgpack.encode(space), chunks)

        yield run


def _run(ray: Any, space: bytes, chunks: Sequence[PointChunk]) -> Iterator[Answers]:
    remote, encoded = ray.remote(num_cpus=1, max_retries=MOST_TRIES - 1)(run_encoded), ray.put(space)
    waiting = [remote.remote(encoded, number, msgspec.msgpack.encode(chunk)) for number, chunk in enumerate(chunks)]
    try:
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            yield from (msgspec.msgpack.decode(ray.get(reference), type=Answers) for reference in done)
    except ray.exceptions.WorkerCrashedError:
        raise WindtunnelError(f"a Ray worker died {MOST_TRIES} times on one chunk") from None


def _join(ray: Any, means: Means) -> None:
    """Start a cluster on this machine, or join the one at the address.

    Raises:
        InputError: there is no cluster at the address.
    """
    new = {"num_cpus": means.num_workers, "include_dashboard": False}
    try:
        ray.init(**({"address": means.address} if means.address else new), log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise InputError(
            f"there is no Ray cluster at {means.address} ({error})", "start one with `ray start --head`"
        ) from None
