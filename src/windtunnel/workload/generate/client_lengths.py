"""Lengths of a benchmark client's random data set, number for number."""

import numpy as np
from numpy.typing import NDArray

from windtunnel.workload.lengths import Lengths, Uniform

Counts = NDArray[np.int64]


def drawn_lengths(
    input_tokens: Lengths | None, output_tokens: Lengths | None, num_requests: int, seed: int
) -> tuple[Counts, Counts]:
    """Draw prompt and output tokens of each request, shape `[num_requests]`: all prompts before all outputs.

    Args:
        input_tokens, output_tokens: numbers, or uniform.
        num_requests: of the run; another number of requests has other outputs.
        seed: of NumPy's legacy generator, whose numbers no later NumPy changes.

    Source: https://github.com/kimbochen/bench_serving, `sample_random_requests` of `benchmark_serving.py`.
    """
    rng = np.random.RandomState(seed)
    (low, high), (shortest, longest) = _bounds(input_tokens), _bounds(output_tokens)
    prompts = rng.randint(low, high + 1, num_requests, np.int64)
    return prompts, rng.randint(shortest, longest + 1, num_requests, np.int64)


def _bounds(lengths: Lengths | None) -> tuple[int, int]:
    if isinstance(lengths, int):
        return lengths, lengths
    assert isinstance(lengths, Uniform), "Workload checks that lengths are numbers or uniform"
    return lengths.min_tokens, lengths.max_tokens
