"""How forwards are timed on CUDA, on a stand-in for its stream; and torch.profiler's ranges, on this processor."""

import sys

import pytest

from lab.fake_cuda import LAUNCH_S, FakeCuda
from windtunnel.errors import InputError
from windtunnel.lab import profile_attention
from windtunnel.lab.profile_attention import check_attention
from windtunnel.lab.profile_model import Mark, StepShape
from windtunnel.lab.profile_samples import Repeats, merged
from windtunnel.lab.profile_timing import HostStopwatch, KinetoStopwatch
from windtunnel.lab.profile_torch import timed_forward, whole_forward
from windtunnel.ops.op import Elementwise, Op

NORM_S, GEMM_S = 2e-6, 30e-6


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", found.module())
    return found


def layers(cuda: FakeCuda, mark: Mark) -> None:
    """Two layers of a norm and a product, and something that belongs to none."""
    mark("")
    for _ in range(2):
        cuda.kernel(NORM_S)
        mark("norm")
        cuda.kernel(GEMM_S)
        mark("gemm")
    cuda.kernel(1e-6)
    mark("")


@pytest.mark.parametrize("clock", ["cuda_event", "cuda_graph"])
def test_kernels_are_timed_without_the_gaps_of_their_launches(cuda: FakeCuda, clock: str) -> None:
    timed = timed_forward(lambda mark: layers(cuda, mark), clock)
    for _ in range(3):
        found = timed()
        assert found.keys() == {"norm", "gemm"}
        assert found["norm"] == pytest.approx([NORM_S] * 2)  # five times shorter than a launch
        assert found["gemm"] == pytest.approx([GEMM_S] * 2)


def test_the_whole_forward_is_a_replayed_graph(cuda: FakeCuda) -> None:
    whole = whole_forward(lambda mark: layers(cuda, mark), "cuda_event")
    host_s = cuda.host_s
    assert whole() == pytest.approx(2 * (NORM_S + GEMM_S) + 1e-6)
    assert cuda.host_s > host_s + 1e-3  # the host slept until the GPU was done
    repeats = Repeats()
    timed = timed_forward(lambda mark: layers(cuda, mark), "cuda_event")
    while not repeats.is_enough:
        repeats.add(timed(), whole())
    known: dict[str, Op] = {name: Elementwise(name, 1, 1.0) for name in ("norm", "gemm")}
    step = repeats.step(StepShape(1, 16), known)
    assert step.closure_error == pytest.approx(-1e-6 / (2 * (NORM_S + GEMM_S) + 1e-6))


def test_a_forward_that_waits_for_the_gpu_is_timed_outside_of_a_graph(cuda: FakeCuda) -> None:
    def waiting(mark: Mark) -> None:
        mark("")
        cuda.kernel(GEMM_S)
        cuda.read_back()
        cuda.kernel(GEMM_S)
        mark("gemm")

    assert whole_forward(waiting, "cuda_event")() == pytest.approx(2 * GEMM_S + LAUNCH_S)
    with pytest.raises(InputError, match="cannot be captured as a CUDA graph"):
        timed_forward(waiting, "cuda_graph")


def test_ranges_of_the_profiler_are_the_stretches_between_marks() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; operators are measured with it")
    large, small = torch.ones(512, 512), torch.ones(8, 8)
    watch = KinetoStopwatch(is_cuda=False)
    watch.mark("")
    for matrix, name in ((large, "large"), (small, "small"), (large, ""), (large, "large")):
        for _ in range(5):
            matrix @ matrix
        watch.mark(name)
    found = watch.durations()
    assert {name: len(seconds) for name, seconds in found.items()} == {"large": 2, "small": 1}
    assert min(found["large"]) > 2 * found["small"][0] > 0
    assert sum(found["large"]) < 10


def test_what_a_mark_costs_is_taken_off() -> None:
    times = iter([0.0, 1.0, 1.25])
    watch = HostStopwatch(lambda: next(times), mark_s=0.5)
    for name in ("", "long", "short"):
        watch.mark(name)
    assert watch.durations() == {"long": [0.5], "short": [0.0]}


def test_operators_that_slow_down_together_still_add_up() -> None:
    repeats, known = Repeats(), {name: Elementwise(name, 1, 1.0) for name in ("a", "b")}
    for number in range(9):
        slow = (1.0, 1.4, 1.0, 1.9, 1.1)[number % 5]
        # Two executions of `a`, the first always slower; timers cost a hundredth.
        repeats.add({"a": [3.0 * slow, 1.0 * slow], "b": [2.0 * slow]}, 6.0 * slow / 1.01)
    step = repeats.step(StepShape(1, 16), known)
    assert step.closure_error == pytest.approx(0.01)
    assert [one.statistics.median_s for one in step.operators] == pytest.approx([2.2, 2.2])
    assert [one.count for one in step.operators] == [2, 1]


def test_attention_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no attention backend 'flash_atn'"):
        check_attention("flash_atn", "cuda")
    with pytest.raises(InputError, match="flashinfer runs on CUDA devices alone"):
        check_attention("flashinfer", "cpu")
    monkeypatch.setattr(profile_attention, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="flash_attn is not installed"):
        check_attention("flash_attn", "cuda")


def test_a_step_measured_at_several_times_forgets_a_burst() -> None:
    known: dict[str, Op] = {"a": Elementwise("a", 1, 1.0)}
    times = []
    for slow in (1.0, 2.5, 1.1):
        repeats = Repeats()
        for _ in range(6):
            repeats.add({"a": [slow]}, slow)
        times.append(repeats.step(StepShape(1, 16), known))
    found = merged(times)
    assert (found.sum_s, found.whole_s) == pytest.approx((1.1, 1.1))
    assert found.operators[0].statistics.num_samples == 18
