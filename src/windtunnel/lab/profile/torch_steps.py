"""Steps of a few layers in torch, timed operator by operator on a CPU or a GPU."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from windtunnel.errors import InputError, import_extra
from windtunnel.lab.profile import model as torch_model
from windtunnel.lab.profile.compute import ComputePlan
from windtunnel.lab.profile.samples import MeasuredStep, Repeats
from windtunnel.lab.timing import CLOCKS_OF_HOST, captured, cuda_stopwatch, event_cost_s, stopwatch
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.precision import BITS
from windtunnel.model.shape import LayerGroup, Shard
from windtunnel.units import format_bytes

WARM_UPS = 2

Forward = Callable[[torch_model.Mark], object]
"""Runs a step, and marks the boundaries between its operators."""


@dataclass(frozen=True)
class TorchStepper:
    """Steps of a few layers in torch."""

    stack: torch_model.LayerStack
    clock: str

    def fits(self, shape: torch_model.StepShape) -> bool:
        length, attention = shape.context + shape.chunk, self.stack.group.attention
        window = (attention.window_tokens or 0) if isinstance(attention, GroupedQueryAttention) else 0
        # torch's own kernels have no window; a prompt within it, or one token's last keys, need none.
        is_within = not (shape.chunk and window) or length <= window
        return is_within and shape.num_tokens <= self.stack.max_tokens and shape.batch * length <= self.stack.max_cached

    def measure(self, shape: torch_model.StepShape) -> MeasuredStep:
        self.stack.prepare(shape)

        def forward(mark: torch_model.Mark) -> object:
            return self.stack.run(shape, mark)

        for _ in range(WARM_UPS):
            forward(_no_mark)
        timed, untimed = timed_forward(forward, self.clock), whole_forward(forward, self.clock)
        repeats = Repeats()
        while not repeats.is_enough:
            repeats.add(timed(), untimed())
        return repeats.step(shape, torch_model.operators_of(self.stack.shard, self.stack.group, shape))


def _no_mark(_name: str) -> None:
    """Mark nothing: a forward without timers inside."""


def timed_forward(forward: Forward, clock: str) -> Callable[[], dict[str, list[float]]]:
    """Return a function that runs the forward with timers inside; it returns the seconds of each operator's executions.
    InputError where the clock needs a CUDA graph, and the forward cannot be captured as one."""
    if clock == "cuda_graph":
        watch = cuda_stopwatch(in_graph=True, mark_s=event_cost_s(in_graph=True))
        replay = captured(lambda: forward(watch.mark))
        if replay is None:
            raise InputError("this forward cannot be captured as a CUDA graph", "take --clock cuda_event or kineto")

        def replayed() -> dict[str, list[float]]:
            replay()
            return watch.durations()

        return replayed

    launch_s = 0.0 if clock in CLOCKS_OF_HOST else launch_seconds(forward)

    def timed() -> dict[str, list[float]]:
        watch = stopwatch(clock, launch_s)
        forward(watch.mark)
        return watch.durations()

    return timed


def launch_seconds(forward: Forward) -> float:
    """Measure the time in which the host queues a forward with the marks of a GPU's clock, while the GPU is idle."""
    import torch

    torch.cuda.synchronize()
    before_s = time.perf_counter()
    forward(cuda_stopwatch().mark)
    return time.perf_counter() - before_s


def whole_forward(forward: Forward, clock: str) -> Callable[[], float]:
    """Return a function that runs the forward without timers inside and returns its seconds.

    On CUDA that is a replayed graph, as engines decode; where it cannot be captured, kernels queued ahead.
    """
    graph = None if clock in CLOCKS_OF_HOST else captured(lambda: forward(_no_mark))
    launch_s = 0.0 if clock in CLOCKS_OF_HOST or graph else launch_seconds(forward)
    run = graph or (lambda: forward(_no_mark))

    def whole() -> float:
        watch = stopwatch(clock, launch_s)
        watch.mark("")
        run()
        watch.mark("whole")
        return watch.durations()["whole"][0]

    return whole


def require_torch(device: str | None) -> str:
    """Return the torch device to measure: the given one, else a GPU; InputError where torch or the device is absent."""
    torch = import_extra("torch", "profile")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("torch finds no CUDA device here", "measure the CPU with --torch-device cpu")
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"{device!r} cannot be measured", "cpu or cuda")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


MEMORY_SHARE, CACHE_SHARE = 0.4, 0.3
"""Shares of the free memory for the layers' weights and for their KV caches; activations need some too."""

MOST_CACHED_TOKENS = {"cpu": 1 << 16, "cuda": 1 << 19}
"""Most tokens in the KV cache of one layer; larger products of batch and context are left to the roofline's shape."""


def torch_steppers(shard: Shard, plan: ComputePlan, cache_bytes: int, memory_bytes: int) -> Iterator[TorchStepper]:
    """Yield a stepper for every group of layers of the shard; their weights exceed `cache_bytes` where memory allows.
    InputError where a single layer does not fit."""
    torch_model.check_profilable(shard)
    if plan.attention != "sdpa" and not all(
        isinstance(group.attention, GroupedQueryAttention) and not group.attention.window_tokens
        for group in shard.model.layers
    ):
        raise InputError(
            f"{shard.model.name} has latent or windowed attention, which is measured with torch's kernels alone",
            "take --attention sdpa",
        )
    device = str(plan.torch_device)
    element_bytes = BITS[shard.precision.weights] // 8
    ends_bytes = 2 * -(-shard.model.vocab_size // shard.tp) * shard.model.hidden_size * element_bytes
    fitting = [_num_fitting(shard, group, ends_bytes, memory_bytes) for group in shard.model.layers]
    for group, num_fitting in zip(shard.model.layers, fitting, strict=True):
        # Weights that the last level holds twice over are read from memory, as in the whole model; no more layers than
        # it has, or a small model would seem slower than it is.
        enough = -(-2 * cache_bytes // torch_model.layer_weight_bytes(shard, group))
        num_layers = min(max(3, enough), max(group.num_layers, 3), num_fitting)
        fitting_tokens = int(CACHE_SHARE * memory_bytes / (num_layers * torch_model.cache_token_bytes(shard, group)))
        cached = min(plan.max_context * plan.max_batch, MOST_CACHED_TOKENS[device], fitting_tokens)
        stack = torch_model.LayerStack(shard, group, num_layers, device, plan.max_tokens, cached, plan.attention)
        yield TorchStepper(stack, str(plan.clock))


def _num_fitting(shard: Shard, group: LayerGroup, ends_bytes: float, memory_bytes: int) -> int:
    """Return how many layers of a group fit beside the embedding and the head."""
    num_layers = int((MEMORY_SHARE * memory_bytes - ends_bytes) / torch_model.layer_weight_bytes(shard, group))
    if num_layers < 1:
        size = format_bytes(torch_model.layer_weight_bytes(shard, group) + ends_bytes)
        raise InputError(
            f"a layer of {shard.model.name} with its embedding and head takes {size}, too much for the "
            f"{format_bytes(memory_bytes)} that are free",
            "measure a larger --tp: each of its ranks holds less",
        )
    return num_layers
