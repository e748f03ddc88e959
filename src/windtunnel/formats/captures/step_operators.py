"""Find the steps of a capture, and match their kernels to operators of the model, to compare them with simulated times.

vLLM's detailed annotations (`detailed_trace_annotation`, 0.32) name a step after the sums over its requests of the
tokens computed (sq), of the keys that they see (sk), and of their squares and products:
`execute_146_context_2(sq144sk200sqsq11936sqsk14400)_generation_2(sq2sk202sqsq2sqsk202)`. The lab's own runs use the
same names.

Kernels are matched by the module whose range they were launched in (`module:model.layers.0.mlp.up_proj`), where there
are such ranges. Elsewhere by their class, matrix products by their shapes or by their order in a layer, and kernels
that only move or map numbers by the products around them: between `o_proj` and `gate_up_proj` a kernel is part of a
norm, however it is fused. Unclear kernels make the row `other`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import CLASSES, COPY, MEMSET, Capture
from windtunnel.model.launches.forward import StepBatch, forward_launches
from windtunnel.model.operators import Gemm, Launch, Op
from windtunnel.model.shape import Shard
from windtunnel.pricing.table import MeasurementTable, Points, tables_from
from windtunnel.schema import read_yaml

_SUMS = r"\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)"
_STEP = re.compile(rf"(?:^|[:/])execute_(\d+)_context_(\d+){_SUMS}_generation_(\d+){_SUMS}$")

MEASURED = "windtunnel:measured"
"""Name of the range around the measured run, after loading and warming up."""


def step_name(computed: list[int], seen: list[int], num_prefills: int) -> str:
    """Return the name of a step.

    Args:
        computed: number of tokens computed for each request, prompts first.
        seen: number of keys that the last of these tokens attends to, itself included.
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


_TABLES: Mapping[str, Any] = read_yaml(Path(__file__).with_name("step_operators.yaml"))
_LAUNCHES = tuple((re.compile(f"(?:{pattern})$"), row) for row, pattern in _TABLES["launches"].items())
_MODULES = tuple((re.compile(pattern), row) for pattern, row in _TABLES["modules"].items())
_BETWEEN: Mapping[tuple[str, str | None], str] = {(before, after): row for before, after, row in _TABLES["between"]}
_ANCHORS = frozenset(row for pair in _BETWEEN for row in pair if row is not None)

OTHER = "other"
ROWS = (*_TABLES["launches"], OTHER)


def row_of_launch(name: str) -> str:
    """Return the row of a launch of `model/launches/forward.py`."""
    return next((row for pattern, row in _LAUNCHES if pattern.match(name)), OTHER)


@dataclass(frozen=True)
class MatchedStep:
    """A captured step by operators."""

    step: CapturedStep
    launches: tuple[Launch, ...]
    """The model's launches for that batch."""
    seconds: Mapping[str, float]
    """Row -> time of its kernels."""

    @property
    def unmatched_fraction(self) -> float:
        """Share of the kernels' time that no operator of the model claims."""
        total_s = sum(self.seconds.values())
        return self.seconds.get(OTHER, 0.0) / total_s if total_s else 0.0

    @property
    def between_s(self) -> float:
        """Time of the step's range in which none of its kernels ran: the host, or waiting."""
        return max(self.step.host_s - sum(self.seconds.values()), 0.0)


def measured_steps(capture: Capture, shard: Shard) -> list[MatchedStep]:
    """Return every captured step by operators of the model; InputError where no range names a batch with kernels."""
    steps = [step for step in captured_steps(capture) if len(step.rows)]
    if not steps:
        raise InputError(
            "no step of the capture can be told: no range names its batch",
            "record with `windtunnel lab run`, or vLLM with detailed_trace_annotation",
        )
    matched = []
    for step in steps:
        launches, seconds = tuple(forward_launches(shard, step.batch)), dict[str, float]()
        rows = rows_of_kernels(capture, step, launches)
        for row, took_s in zip(rows, capture.kernels["duration_s"][step.rows].tolist(), strict=True):
            seconds[row] = seconds.get(row, 0.0) + took_s
        matched.append(MatchedStep(step, launches, seconds))
    return matched


def rows_of_kernels(capture: Capture, step: CapturedStep, launches: Sequence[Launch]) -> list[str]:
    """Return the row of every kernel of a step."""
    kernels = capture.kernels
    ranges = [capture.name_of(capture.ranges["name"][row]) if row >= 0 else "" for row in kernels["range"][step.rows]]
    modules = [name.partition("module:")[2] for name in ranges]
    classes = [CLASSES[code] for code in kernels["kernel_class"][step.rows]]
    is_copy = np.isin(kernels["activity"][step.rows], (COPY, MEMSET)).tolist()
    if any(modules):
        return _sampling_after_the_head(list(map(_by_module, modules, classes)))
    rows = [None if copy else _TABLES["classes"].get(name) for name, copy in zip(classes, is_copy, strict=True)]
    for kernel, row in _products(capture, step, classes, launches):
        rows[kernel] = row
    return _between(rows)


def _by_module(module: str, kernel_class: str) -> str | None:
    if kernel_class == "communication":
        return "communication"
    row = next((row for pattern, row in _MODULES if pattern.search(module)), None) if module else None
    return "rope and cache" if row == "attention" and kernel_class != "attention" else row


def _sampling_after_the_head(rows: list[str | None]) -> list[str]:
    """Fill in rows of kernels outside of modules: after the LM head they sample; before it, they are unclear."""
    head = max((i for i, row in enumerate(rows) if row == "lm_head"), default=len(rows))
    return [row or ("sample" if i > head else OTHER) for i, row in enumerate(rows)]


def _products(
    capture: Capture, step: CapturedStep, classes: list[str], launches: Sequence[Launch]
) -> Iterator[tuple[int, str]]:
    """Yield (kernel, row) of the matrix products: by shape where that is enough, else by their order."""
    kernels = capture.kernels
    gemms = [i for i, name in enumerate(classes) if name == "gemm"]
    # cuBLAS adds the parts of a product in a kernel of its own.
    sums = {i for i in gemms if _SPLIT_K_SUM.search(capture.name_of(kernels["name"][step.rows[i]]).lower())}
    products = [i for i in gemms if i not in sums]
    expected = [launch for launch in launches if isinstance(launch.op, Gemm)]
    order = _order_of_products(expected)
    by_order = dict(zip(products, order, strict=True)) if len(products) == len(order) else {}
    by_work = _rows_by_work(expected)
    for i in products:
        yield i, by_work.get(_work_key(kernels["flops"][step.rows[i]])) or by_order.get(i, OTHER)
    for i in sorted(sums):
        product = max((product for product in products if product < i), default=None)
        if product in by_order:
            yield i, by_order[product]


_SPLIT_K_SUM = re.compile("splitk_?reduce")


def _order_of_products(expected: Sequence[Launch]) -> list[str]:
    """Return the rows of a step's products in their order; empty where the layers are not all equal."""
    in_layer = [launch for launch in expected if launch.name != "lm_head"]
    counts = {launch.count for launch in in_layer}
    if len(counts) != 1:
        return []
    return [row_of_launch(launch.name) for launch in in_layer] * int(counts.pop()) + ["lm_head"]


def _rows_by_work(expected: Sequence[Launch]) -> dict[float, str]:
    """Return FLOPs -> row of the products whose work no other row's product has."""
    by_work: dict[float, set[str]] = {}
    for launch in expected:
        by_work.setdefault(_work_key(launch.op.flops), set()).add(row_of_launch(launch.name))
    return {work: next(iter(rows)) for work, rows in by_work.items() if len(rows) == 1}


def _work_key(flops: object) -> float:
    return float(np.asarray(flops, np.float64).round())


def _between(rows: list[str | None]) -> list[str]:
    """Fill in unclear kernels by the anchors around them."""
    after: list[str | None] = []
    anchor: str | None = None
    for row in reversed(rows):
        after.append(anchor)
        anchor = row if row in _ANCHORS else anchor
    filled, anchor = [], None
    for row, next_anchor in zip(rows, reversed(after), strict=True):
        filled.append(row or _BETWEEN.get((str(anchor), next_anchor), OTHER))
        anchor = row if row in _ANCHORS else anchor
    return filled


def measurement_tables(steps: Sequence[MatchedStep], source: str) -> list[MeasurementTable]:
    """Return the times of operators as tables that an estimator reads: one point for each operator and step.

    Rows with operators of several shapes (rope and cache, a batch of prompts and decoding requests) are left out:
    their parts were not told apart.

    InputError where nothing is left.
    """
    measured = (single for step in steps for single in _single_operators(step))
    points: list[Points] = [(op, np.array([seconds]), {}) for op, seconds in measured]
    if not points:
        raise InputError("no operator of the capture could be told from the others")
    return tables_from(points, source)


def _single_operators(measured: MatchedStep) -> Iterator[tuple[Op, float]]:
    """Yield the operators that do not share a row, with the seconds of one execution."""
    by_row: dict[str, list[Launch]] = {}
    for launch in measured.launches:
        by_row.setdefault(row_of_launch(launch.name), []).append(launch)
    for row, launches in by_row.items():
        seconds = measured.seconds.get(row, 0.0)
        if seconds > 0 and all(launch.op == launches[0].op for launch in launches):
            yield launches[0].op, seconds / sum(launch.count for launch in launches)
