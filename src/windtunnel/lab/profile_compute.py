"""Measure a model's operators on this machine: steps of a grid, timed operator by operator inside a real forward."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from windtunnel.errors import InputError, MissingExtraError
from windtunnel.estimate.table import STATISTICS, MeasurementTable, site_names, text_names
from windtunnel.lab.profile_grid import Point, Refinement, octaves
from windtunnel.lab.profile_model import (
    LayerStack,
    StepShape,
    check_profilable,
    layer_weight_bytes,
    operators_of,
)
from windtunnel.lab.profile_timing import Statistics, Stopwatch, cpu_pressure, statistics_of, stopwatch
from windtunnel.ops.forward import Shard
from windtunnel.ops.op import Op
from windtunnel.spec.model import ExpertsFeedForward
from windtunnel.units import format_bytes

MIN_REPEATS, MAX_REPEATS = 5, 50
REPEAT_S = 0.3
"""A step is repeated until so much time was measured, within the two counts above."""
WARM_UPS = 2
MOST_CACHED_TOKENS = 1 << 16
"""KV cache of one layer of the torch forward; larger products of batch and context are left to the roofline's shape."""


@dataclass(frozen=True)
class MeasuredOperator:
    """An operator as a step executed it."""

    name: str
    op: Op
    count: int
    """Executions in the step."""
    statistics: Statistics


@dataclass(frozen=True)
class MeasuredStep:
    """One step with all of its operators."""

    shape: StepShape
    operators: tuple[MeasuredOperator, ...]
    whole_s: float
    """Median of the same forward without timers inside."""

    @property
    def sum_s(self) -> float:
        """Of the operators, each at its median."""
        return sum(one.count * one.statistics.median_s for one in self.operators)

    @property
    def closure_error(self) -> float:
        """Sum of the operators over the whole forward, minus one."""
        return self.sum_s / self.whole_s - 1


class Stepper(Protocol):
    """Something that executes steps and times their operators."""

    def measure(self, shape: StepShape) -> MeasuredStep:
        """Execute and time one step, with repeats."""
        ...

    def fits(self, shape: StepShape) -> bool:
        """Whether it can execute a step."""
        ...


@dataclass(frozen=True)
class TorchStepper:
    """Steps of a few layers in torch."""

    stack: LayerStack
    clock: str

    def fits(self, shape: StepShape) -> bool:
        cached = shape.batch * (shape.context + shape.chunk)
        return shape.num_tokens <= self.stack.max_tokens and cached <= self.stack.max_cached

    def measure(self, shape: StepShape) -> MeasuredStep:
        for _ in range(WARM_UPS):
            self.stack.run(shape, _no_mark)
        untimed = self._untimed(shape)
        parts, whole = repeated(
            lambda watch: self.stack.run(shape, watch.mark), lambda: self._whole(untimed), self.clock
        )
        known = operators_of(self.stack.shard, self.stack.group, shape)
        operators = [
            MeasuredOperator(name, known[name], len(samples) // len(whole), statistics_of(samples))
            for name, samples in parts.items()
        ]
        return MeasuredStep(shape, tuple(operators), float(np.median(whole)))

    def _untimed(self, shape: StepShape) -> Callable[[], object]:
        """The forward without timers inside: on CUDA a graph, which engines replay too, where experts allow one."""
        if self.clock != "cuda_event" or isinstance(self.stack.group.feed_forward, ExpertsFeedForward):
            return lambda: self.stack.run(shape, _no_mark)
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.stack.run(shape, _no_mark)
        replay: Callable[[], object] = graph.replay
        return replay

    def _whole(self, forward: Callable[[], object]) -> float:
        watch = stopwatch(self.clock)
        watch.mark("")
        forward()
        watch.mark("whole")
        return watch.durations()["whole"][0]


def _no_mark(_name: str) -> None:
    """A forward without timers inside."""


def repeated(
    timed: Callable[[Stopwatch], object], whole: Callable[[], float], clock: str
) -> tuple[dict[str, list[float]], list[float]]:
    """Alternate forwards with timers inside and without, so that both meet the same machine.

    Returns:
        Name -> seconds of all its executions; seconds of each whole forward.
    """
    parts: dict[str, list[float]] = {}
    wholes: list[float] = []
    while len(wholes) < MIN_REPEATS or (sum(wholes) < REPEAT_S and len(wholes) < MAX_REPEATS):
        watch = stopwatch(clock)
        timed(watch)
        for name, seconds in watch.durations().items():
            parts.setdefault(name, []).extend(seconds)
        wholes.append(whole())
    return parts, wholes


@dataclass(frozen=True)
class Extent:
    """How far to measure."""

    max_batch: int = 64
    """Decoding requests."""
    max_context: int = 4096
    """Tokens of a request."""
    max_tokens: int = 2048
    """Of a step."""


@dataclass(frozen=True)
class Progress:
    """What a run of the profiler says of itself."""

    num_steps: int
    elapsed_s: float
    left_s: float | None
    """Until the budget ends; None without one."""
    expected_error: float
    """Largest of the intervals not looked at yet."""
    shape: StepShape


@dataclass(frozen=True)
class Budget:
    """When to stop refining."""

    seconds: float | None = None
    tolerance: float = 0.05
    """Largest deviation from a straight line (log-log) between measured points."""


Notify = Callable[[Progress], None]


def decode_grid(extent: Extent, stepper: Stepper) -> Refinement:
    """Decoding requests x their context."""

    def allowed(point: Point) -> bool:
        return stepper.fits(_decode_shape(point))

    contexts = [level for level in octaves(extent.max_context, 4) if level >= 16]
    return Refinement((octaves(extent.max_batch, 4), contexts), allowed)


def prefill_grid(extent: Extent, stepper: Stepper) -> Refinement:
    """Effective length over chunk (1: nothing cached) x tokens of the chunk."""

    def allowed(point: Point) -> bool:
        ratio, chunk = point
        longest = _prefill_shape(point)
        whole = ((ratio - 1) * chunk) % 2 == 0
        return whole and longest.context + longest.chunk <= extent.max_context and stepper.fits(longest)

    chunks = [level for level in octaves(extent.max_tokens, 4) if level >= 4]
    return Refinement(([1.0, 3.0, 9.0], chunks), allowed)


def _decode_shape(point: Point) -> StepShape:
    return StepShape(int(point[0]), int(point[1]))


def _prefill_shape(point: Point) -> StepShape:
    """A chunk of c tokens after p cached ones has the effective length 2 p + c (`ops.PrefillAttention`)."""
    ratio, chunk = point
    return StepShape(1, int((ratio - 1) * chunk / 2), int(chunk))


def measure_steps(
    stepper: Stepper, extent: Extent, budget: Budget, known: Mapping[StepShape, MeasuredStep], notify: Notify
) -> Iterator[MeasuredStep]:
    """Measure the coarse grids, then refine them worst interval first; what is `known` is not measured again.

    Yields:
        Every step that was measured now.
    """
    started_s = time.monotonic()
    grids = [(decode_grid(extent, stepper), _decode_shape), (prefill_grid(extent, stepper), _prefill_shape)]
    steps = dict(known)
    cost_s: dict[StepShape, float] = {}

    def spent() -> float:
        return time.monotonic() - started_s

    def take(shape: StepShape, error: float) -> Iterator[MeasuredStep]:
        if shape not in steps:
            before_s = time.monotonic()
            steps[shape] = stepper.measure(shape)
            cost_s[shape] = time.monotonic() - before_s
            left_s = None if budget.seconds is None else max(budget.seconds - spent(), 0.0)
            notify(Progress(len(steps), spent(), left_s, error, shape))
            yield steps[shape]

    for grid, shape_of in grids:
        for point in grid.coarse():
            yield from take(shape_of(point), 1.0)
        grid.start({point: steps[shape_of(point)].sum_s for point in grid.coarse()})
    while True:
        grid, shape_of = max(grids, key=lambda pair: pair[0].worst())
        if grid.worst() <= budget.tolerance or (budget.seconds is not None and spent() >= budget.seconds):
            return
        found = grid.next_point()
        if found is None:
            continue
        interval, middle = found
        shape = shape_of(middle)
        longest_s = max((cost_s.get(shape_of(end), 0.0) for end in (interval.low, interval.high)), default=0.0)
        if budget.seconds is not None and spent() + longest_s > budget.seconds:
            continue
        yield from take(shape, grid.worst())
        grid.learn(interval, middle, steps[shape].sum_s)


def tables_of(steps: Iterable[MeasuredStep], source: str) -> list[MeasurementTable]:
    """All executions of the same kind and words as one table, with their statistics."""
    rows: dict[tuple[str, ...], list[tuple[Op, Statistics]]] = {}
    for step in steps:
        for one in step.operators:
            words = tuple(str(getattr(one.op, name)) for name in text_names(one.op.kind))
            rows.setdefault((one.op.kind, *words), []).append((one.op, one.statistics))
    return [_table(kind, words, found, source) for (kind, *words), found in sorted(rows.items())]


def _table(kind: str, words: list[str], rows: list[tuple[Op, Statistics]], source: str) -> MeasurementTable:
    def column(name: str) -> Any:
        return np.array([float(getattr(op, name)) for op, _ in rows])

    return MeasurementTable(
        kind,
        {name: column(name) for name in site_names(kind)},
        {name: column(name) for name in rows[0][0].axes},
        np.array([kept.median_s for _, kept in rows]),
        source,
        dict(zip(text_names(kind), words, strict=True)),
        {name: np.array([float(getattr(kept, name)) for _, kept in rows]) for name in STATISTICS},
    )


class Journal:
    """The steps measured so far, a line each, so that an interrupted profile goes on where it stopped.

    Args:
        path: of the file.
        about: what was measured and how; a journal of something else is refused.

    Raises:
        InputError: the file belongs to another measurement, or is broken.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self.path, self.about = path, dict(about)
        self.steps: dict[StepShape, MeasuredStep] = {}
        if path.exists():
            header, *lines = _json_lines(path)
            changed = sorted(key for key in self.about if header.get(key) != self.about[key])
            if changed:
                key = changed[0]
                raise InputError(
                    f"{path} was measured with {key} {header.get(key)}, now it is {self.about[key]}",
                    "choose another folder, or start anew with --overwrite",
                )
            for line in lines:
                step = _step_from(line)
                self.steps[step.shape] = step
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.about) + "\n", encoding="utf-8")

    def add(self, step: MeasuredStep) -> None:
        """Keep a step."""
        self.steps[step.shape] = step
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_step_document(step)) + "\n")


def read_journals(folder: Path) -> list[MeasuredStep]:
    """The steps of all journals in a folder.

    Raises:
        InputError: one is broken.
    """
    return [step for path in sorted(folder.glob("*.jsonl")) for step in read_journal(path)]


def read_journal(path: Path) -> list[MeasuredStep]:
    """The steps of one journal.

    Raises:
        InputError: it is broken.
    """
    return [_step_from(line) for line in _json_lines(path)[1:]]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; a last one that was cut off by an interruption is left out, and cut off the file."""
    text = path.read_text(encoding="utf-8")
    whole, _, rest = text.rpartition("\n")
    if rest:
        path.write_text(whole + "\n" if whole else "", encoding="utf-8")
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise InputError(f"{path} is not a journal of a profile: {error}") from None
    if not lines:
        raise InputError(f"{path} is empty", "start anew with --overwrite")
    return lines


def _step_document(step: MeasuredStep) -> dict[str, Any]:
    operators = [
        {
            "name": one.name,
            "kind": one.op.kind,
            "op": {f.name: _plain(getattr(one.op, f.name)) for f in fields(one.op)},
            "count": one.count,
            "statistics": asdict(one.statistics),
        }
        for one in step.operators
    ]
    return {"shape": asdict(step.shape), "whole_s": step.whole_s, "operators": operators}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int) else float(value)


def _step_from(line: Mapping[str, Any]) -> MeasuredStep:
    from windtunnel.estimate.table import KINDS

    try:
        operators = tuple(
            MeasuredOperator(
                one["name"], KINDS[one["kind"]](**one["op"]), int(one["count"]), Statistics(**one["statistics"])
            )
            for one in line["operators"]
        )
        return MeasuredStep(StepShape(**line["shape"]), operators, float(line["whole_s"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a journal of a profile is broken: {error!r}", "start anew with --overwrite") from None


def require_torch(device: str | None) -> str:
    """The torch device to measure: the one asked for, else a GPU where there is one.

    Raises:
        InputError: torch or the device is missing.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "profile") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("torch finds no CUDA device here", "measure the CPU with --torch-device cpu")
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"{device!r} cannot be measured", "cpu or cuda")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


MEMORY_SHARE = 0.4
"""Of the memory that is free, what the layers' weights may take; caches and activations need some too, and a matrix is
drawn in fp32 before it is rounded."""


def torch_steppers(
    shard: Shard, device: str, clock: str, extent: Extent, cache_bytes: int, memory_bytes: int
) -> Iterator[TorchStepper]:
    """A stepper for every group of layers of the shard; their weights exceed `cache_bytes` where memory allows.

    Raises:
        InputError: a single layer does not fit.
    """
    check_profilable(shard)
    ends_bytes = 2 * -(-shard.model.vocab_size // shard.tp) * shard.model.hidden_size * 4
    for group in shard.model.layers:
        fitting = int((MEMORY_SHARE * memory_bytes - ends_bytes) / layer_weight_bytes(shard, group))
        if fitting < 1:
            one = format_bytes(layer_weight_bytes(shard, group) + ends_bytes)
            raise InputError(
                f"a layer of {shard.model.name} with its embedding and head takes {one}, too much for the "
                f"{format_bytes(memory_bytes)} that are free",
                "measure a larger --tp: each of its ranks holds less",
            )
        # Weights that the last level holds twice over are read from memory, as in the whole model; no more layers than
        # it has, or a small model would seem slower than it is.
        enough = -(-2 * cache_bytes // layer_weight_bytes(shard, group))
        num_layers = min(max(3, enough), max(group.num_layers, 3), fitting)
        cached = min(extent.max_context * extent.max_batch, MOST_CACHED_TOKENS)
        stack = LayerStack(shard, group, num_layers, device, extent.max_tokens, cached)
        yield TorchStepper(stack, clock)


@dataclass(frozen=True)
class Pressure:
    """How much of a stretch of time some task of the machine waited for a CPU."""

    start_s: float | None
    started_s: float

    @staticmethod
    def start() -> Pressure:
        return Pressure(cpu_pressure(), time.monotonic())

    def fraction(self) -> float | None:
        """Of the time since the start; None where the kernel does not say."""
        now_s = cpu_pressure()
        if self.start_s is None or now_s is None:
            return None
        return (now_s - self.start_s) / max(time.monotonic() - self.started_s, 1e-9)
