"""Kineto traces as captures: kernels, copies, calls and ranges of a device; outermost operators of a CPU."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.formats.captures.capture import CLASSES, COPY, KERNEL, OPERATOR, Capture, read_capture
from windtunnel.formats.captures.kernel_time import by_name, class_time, launch_times
from windtunnel.formats.captures.step_operators import captured_steps


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": 1e12 + ts, "dur": dur, "args": args}


def gpu_trace() -> list[dict[str, Any]]:
    mm = {"External id": 1, "Input Dims": [[8, 64], [64, 32]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    where = {"device": 0, "stream": 7}
    return [
        event("user_annotation", "module:layers.0.mlp.up_proj", 0, 40),
        event("cpu_op", "aten::mm", 2, 20, **mm),
        event("cuda_runtime", "cudaLaunchKernel", 5, 4, correlation=11, **{"External id": 1}),
        event(
            *("kernel", "nvjet_hsh_64x8", 15, 10),
            **where,
            correlation=11,
            **{"External id": 1, "grid": [4, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 25},
        ),
        event("cuda_runtime", "cudaMemcpyAsync", 50, 3, correlation=12),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 60, 2, **where, correlation=12, bytes=4096),
        event("cuda_runtime", "cudaGraphLaunch", 70, 3, correlation=13),
        event("kernel", "void rms_norm_kernel()", 80, 2, **where, correlation=13),
        event("kernel", "ncclDevKernel_AllReduce", 83, 5, **where, correlation=13),
    ]


def read(tmp_path: Path, events: list[dict[str, Any]]) -> Capture:
    path = tmp_path / "trace.json"
    devices = [{"id": 0, "name": "NVIDIA H100"}]
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": devices, "traceEvents": events}))
    return read_capture(path)


def test_kernels_have_their_launch_range_operator_and_work(tmp_path: Path) -> None:
    capture = read(tmp_path, gpu_trace())
    kernels = capture.kernels
    assert capture.devices == {0: "NVIDIA H100"}
    assert kernels["activity"].tolist() == [KERNEL, COPY, KERNEL, KERNEL]
    assert [CLASSES[code] for code in kernels["kernel_class"]] == ["gemm", "copy", "norm", "communication"]
    assert kernels["start_s"] == pytest.approx(np.array([15, 60, 80, 83]) * 1e-6, abs=1e-9)
    assert capture.name_of(kernels["operator"][0]) == "aten::mm"
    assert capture.name_of(capture.ranges["name"][kernels["range"][0]]) == "module:layers.0.mlp.up_proj"
    assert kernels["range"][1] == -1
    assert kernels["flops"][0] == 2 * 8 * 64 * 32
    assert kernels["num_bytes"].tolist()[:2] == [2 * (8 * 64 + 64 * 32 + 8 * 32), 4096]
    assert (kernels["grid_x"][0], kernels["occupancy_fraction"][0]) == (4, 0.25)
    assert launch_times(capture).latency_s[0] == pytest.approx(10e-6, abs=1e-9)


def test_kernels_of_a_graph_are_told(tmp_path: Path) -> None:
    (note,) = read(tmp_path, gpu_trace()).notes
    assert note.startswith("2 kernels were launched by CUDA graphs")


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        ("aten::linear", [[4, 32, 16], [48, 16], [48]], 2 * 128 * 16 * 48),
        ("aten::addmm", [[48], [8, 16], [16, 48], [], []], 2 * 8 * 16 * 48),
        ("aten::bmm", [[4, 8, 16], [4, 16, 2]], 2 * 4 * 8 * 16 * 2),
        ("aten::matmul", [[2, 4, 8, 16], [16, 32]], 2 * 64 * 16 * 32),
        ("_C::onednn_mm", [[4, 48], [4, 16], [], []], 2 * 4 * 48 * 16),
        ("aten::scaled_dot_product_attention", [[1, 8, 10, 64], [1, 8, 20, 64], [1, 8, 20, 64]], 4 * 8 * 10 * 20 * 64),
    ],
)
def test_work_follows_from_shapes(name: str, dims: list[Any], flops: float, tmp_path: Path) -> None:
    args = {"Input Dims": dims, "Input type": ["float"] * len(dims)}
    assert read(tmp_path, [event("cpu_op", name, 0, 5, **args)]).kernels["flops"].tolist() == [flops]


def test_without_a_device_the_outermost_operators_count_once(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::addmm", 1, 8),
        event("cpu_op", "aten::add", 10, 2),
        event("cpu_op", "aten::mul", 5, 3, tid=2),
    ]
    capture = read(tmp_path, events)
    assert [capture.names[code] for code in capture.kernels["name"]] == ["aten::linear", "aten::mul", "aten::add"]
    assert set(capture.kernels["activity"]) == {OPERATOR}
    assert capture.kernels["duration_s"].sum() == pytest.approx(15e-6)
    assert capture.notes[0].startswith("no device was traced")


@pytest.mark.full
def test_a_real_trace_of_vllm_on_a_cpu(reference: Path) -> None:
    capture = read_capture(reference / "profiler" / "vllm_cpu_kineto.json.gz")
    steps = captured_steps(capture)
    assert len(steps) == 21
    assert (steps[1].batch.prefill_tokens, steps[1].batch.decode_requests) == (144, 2)
    # Two chunks: sum of q k - q q / 2 over them.
    assert steps[1].batch.prefill_pairs == 14400 - 11936 / 2
    assert steps[2].batch.decode_context_tokens == 406 / 4
    # The layers of the 12-layer model: four products each and the head, in each of 21 steps.
    table = by_name(capture, "kernels")
    counts = dict(zip((capture.names[code] for code in table["name"]), table["count"].tolist(), strict=True))
    assert counts["_C::onednn_mm"] == 21 * (12 * 4 + 1)
    assert counts["vllm::unified_attention_with_output"] == 21 * 12
    # Operators that run within others are not counted twice: 76% of a decode step is in outermost operators.
    step = steps[2]
    assert capture.kernels["duration_s"][step.rows].sum() / step.host_s == pytest.approx(0.761, abs=0.001)
    assert max(class_time(capture), key=class_time(capture).__getitem__) == "gemm"


def test_a_device_without_a_number_has_its_place(tmp_path: Path) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 5}
    devices = [{"id": 3, "name": "a"}, {"id": "one", "name": "b"}, {"name": "c"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [kernel], "deviceProperties": devices}))
    assert read_capture(tmp_path / "trace.json").devices == {3: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"traceEvents": [', "cannot be read as JSON"),
        (b'{"schemaVersion": 1}', "is not a Kineto trace"),
        (b'{"traceEvents": []}', "neither operators nor kernels"),
        (b"[1, 2]", "is not a Kineto trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "broken gzip"),
        (b"\x00\x01\x02", "is no capture that is known"),
    ],
)
def test_a_broken_or_foreign_file_gives_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_capture(path)
    with pytest.raises(InputError, match="is a folder"):
        read_capture(tmp_path)
