"""The batch of a step, read from the range around it.

vLLM's detailed annotations (`detailed_trace_annotation`, 0.32) name a step after the sums over its requests of the
tokens computed (sq), of the keys that they see (sk), and of their squares and products:
`execute_146_context_2(sq144sk200sqsq11936sqsk14400)_generation_2(sq2sk202sqsq2sqsk202)`. The lab's own runs use the
same names.
"""

import re
from dataclasses import dataclass

import numpy as np

from windtunnel.formats.captures.capture import Capture
from windtunnel.model.forward import StepBatch

_SUMS = r"\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)"
_STEP = re.compile(rf"(?:^|[:/])execute_(\d+)_context_(\d+){_SUMS}_generation_(\d+){_SUMS}$")

MEASURED = "windtunnel:measured"
"""Name of the range around the measured run, after loading and warming up."""


def step_name(computed: list[int], seen: list[int], num_prefills: int) -> str:
    """Return the name of a step.

    Args:
        computed: number of tokens computed for each request, prompts first.
        seen: number of keys that the last of these tokens attends to, itself included.
        num_prefills: number of requests that are prompts.
    """
    parts = []
    for which in (slice(num_prefills), slice(num_prefills, None)):
        tokens, keys = computed[which], seen[which]
        squares, products = sum(q * q for q in tokens), sum(q * k for q, k in zip(tokens, keys, strict=True))
        parts.append(f"{len(tokens)}(sq{sum(tokens)}sk{sum(keys)}sqsq{squares}sqsk{products})")
    return f"execute_{sum(computed)}_context_{parts[0]}_generation_{parts[1]}"


def step_batch_of(name: str) -> StepBatch | None:
    """Return the batch in a step's name; None for other names.

    A chunk of c tokens that ends at key k has c (k - c / 2) pairs. Every prompt is assumed to end in the step: the name
    does not say.
    """
    match = _STEP.search(name)
    if match is None:
        return None
    _, prompts, computed, _, squares, products, decodes, _, keys, *_ = map(int, match.groups())
    return StepBatch(
        decode_requests=decodes,
        decode_context_tokens=keys / decodes if decodes else 0.0,
        prefill_tokens=computed,
        prefill_pairs=products - squares / 2,
        sampled=prompts + decodes,
    )


@dataclass(frozen=True)
class CapturedStep:
    """One step of a capture."""

    name: str
    batch: StepBatch
    host_s: float
    """Duration of its range on the host."""
    rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Rows of the kernel table, in the order of their start."""


def captured_steps(capture: Capture) -> list[CapturedStep]:
    """Return the steps whose ranges name their batch, in order, with the kernels launched within.

    Kernels without a known launch count where they run; a capture without a timeline has none.
    """
    ranges, launched_s = capture.ranges, capture.launched_s()
    steps = []
    for row in np.argsort(ranges["start_s"], kind="stable"):
        name = capture.name_of(ranges["name"][row])
        batch = step_batch_of(name)
        if batch is not None:
            start_s = ranges["start_s"][row]
            end_s = start_s + ranges["duration_s"][row]
            rows = np.flatnonzero((launched_s >= start_s) & (launched_s < end_s))
            steps.append(CapturedStep(name, batch, float(ranges["duration_s"][row]), rows))
    return steps
