"""How forwards are timed on CUDA, on a stand-in for its stream; and torch.profiler's ranges, on this processor."""

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lab.fake_cuda import LAUNCH_S, FakeCuda
from windtunnel.errors import InputError
from windtunnel.lab import timing as profile_timing
from windtunnel.lab.profile import attention as profile_attention
from windtunnel.lab.profile import machine as profile_machine
from windtunnel.lab.profile import torch_steps as profile_torch
from windtunnel.lab.profile.attention import check_attention
from windtunnel.lab.profile.machine import device_of
from windtunnel.lab.profile.model import Mark, StepShape
from windtunnel.lab.profile.samples import Repeats
from windtunnel.lab.profile.torch_steps import timed_forward, whole_forward
from windtunnel.lab.timing import Stopwatch
from windtunnel.model.operators import Elementwise, Op

NORM_S, GEMM_S = 2e-6, 30e-6


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", found.module())
    monkeypatch.setattr(profile_torch.time, "perf_counter", lambda: found.host_s)
    profile_timing.event_cost_s.cache_clear()
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


@pytest.mark.parametrize("clock", ["cuda_event", "cuda_graph"])
def test_what_events_take_in_the_stream_is_taken_off(cuda: FakeCuda, clock: str) -> None:
    cuda.event_s = 1.5e-6
    forward = partial(layers, cuda)
    found = timed_forward(forward, clock)()
    assert found["norm"] == pytest.approx([NORM_S] * 2)
    assert found["gemm"] == pytest.approx([GEMM_S] * 2)
    assert whole_forward(forward, clock)() == pytest.approx(2 * (NORM_S + GEMM_S) + 1e-6)


def test_the_gpu_waits_until_a_slow_host_has_queued_everything(cuda: FakeCuda) -> None:
    """1,600 launches take the host longer than a GPU waits as a rule."""
    assert 1600 * LAUNCH_S > profile_timing.QUEUE_AHEAD_S

    def long(mark: Mark) -> None:
        mark("")
        for _ in range(1600):
            cuda.kernel(NORM_S)
            mark("norm")

    assert timed_forward(long, "cuda_event")()["norm"] == pytest.approx([NORM_S] * 1600)


def test_the_whole_forward_is_a_replayed_graph(cuda: FakeCuda) -> None:
    untimed = whole_forward(lambda mark: layers(cuda, mark), "cuda_event")
    host_s = cuda.host_s
    assert untimed() == pytest.approx(2 * (NORM_S + GEMM_S) + 1e-6)
    assert cuda.host_s > host_s + 1e-3  # the host slept until the GPU was done
    repeats = Repeats()
    timed = timed_forward(lambda mark: layers(cuda, mark), "cuda_event")
    while not repeats.is_enough:
        repeats.add(timed(), untimed())
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


def test_what_a_mark_costs_is_taken_off() -> None:
    times = iter([0.0, 1.0, 1.25])
    watch = Stopwatch(lambda: next(times), mark_s=0.5)
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
    assert [operator.statistics.median_s for operator in step.operators] == pytest.approx([2.2, 2.2])
    assert [operator.count for operator in step.operators] == [2, 1]


def test_attention_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no attention backend 'flash_atn'"):
        check_attention("flash_atn", "cuda")
    with pytest.raises(InputError, match="flashinfer runs on CUDA devices alone"):
        check_attention("flashinfer", "cpu")
    monkeypatch.setattr(profile_attention, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="flash_attn is not installed"):
        check_attention("flash_attn", "cuda")


def gpu(**changes: Any) -> SimpleNamespace:
    """torch as far as it describes a GPU; an H200."""
    found = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "total_memory": 150_754_820_096,
        "multi_processor_count": 132,
        "L2_cache_size": 50 << 20,
        "gcnArchName": "",
    }
    properties = SimpleNamespace(**found | changes)
    is_amd = bool(properties.gcnArchName)
    return SimpleNamespace(
        cuda=SimpleNamespace(get_device_properties=lambda _number: properties),
        version=SimpleNamespace(hip="7.0" if is_amd else None),
    )


def test_a_gpu_is_not_given_the_name_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", gpu())
    assert device_of("h200_sxm", "cuda", "cuda_event").architecture == "hopper"
    with pytest.raises(InputError, match=r"h100_sxm is .* \(hopper, 132 SMs, 79.6 GiB\), and the GPU here") as refused:
        device_of("h100_sxm", "cuda", "cuda_event")
    assert refused.value.hint == "by these figures it is gh200_144gb or h200_nvl or h200_sxm"
    monkeypatch.setitem(sys.modules, "torch", gpu(name="MIG 3g.71gb", multi_processor_count=60, total_memory=71 << 30))
    with pytest.raises(InputError, match="60 SMs"):
        device_of("h200_sxm", "cuda", "cuda_event")


@pytest.mark.parametrize(
    ("about", "architecture"),
    [
        ({}, "hopper"),
        ({"major": 10, "minor": 3}, "blackwell"),
        ({"major": 8, "minor": 9}, "ada"),
        ({"major": 99}, "sm_990"),
        ({"gcnArchName": "gfx942:sramecc+:xnack-"}, "cdna3"),
    ],
)
def test_a_new_gpu_is_of_an_architecture_that_the_roofline_knows(
    monkeypatch: pytest.MonkeyPatch, about: dict[str, Any], architecture: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", gpu(**about))
    monkeypatch.setattr(profile_machine, "_gemm_flops_per_s", lambda *_: 1e12)
    monkeypatch.setattr(profile_machine, "_copy_bytes_per_s", lambda *_: 1e12)
    assert device_of("my_gpu", "cuda", "cuda_event").architecture == architecture
