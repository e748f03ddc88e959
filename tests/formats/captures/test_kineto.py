import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.captures.kineto import collective_calls, read_kineto
from windtunnel.formats.collective_calls import CollectiveCall, totals


def event(**changes: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.5, "args": {}} | changes


def read(tmp_path: Path, *events: dict[str, Any]) -> Any:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return read_kineto(path)


def nccl(name: str, sent: int, received: int, **changes: Any) -> dict[str, Any]:
    args = {
        "Collective name": name,
        "In msg nelems": sent,
        "Out msg nelems": received,
        "Group size": 8,
        "dtype": "BFloat16",
        "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
    }
    return event(name="ncclDevKernel", args=args | changes)


def test_a_recorded_trace_is_read(reference: Path) -> None:
    trace = read_kineto(reference / "aicb" / "chakra" / "kineto.json")
    assert len(trace.events) == 74
    assert len(trace.of_category("cpu_op")) == 54
    linear = trace.of_category("cpu_op")[0]
    assert (linear.name, linear.external_id, linear.duration_us) == ("aten::linear", 1, 2379.73)
    assert linear.inputs("Input Dims") == [[4, 32], [32, 32], [32]]
    assert trace.distributed_info is not None
    assert (trace.distributed_info.backend, trace.distributed_info.world_size) == ("gloo", 1)
    (call,) = collective_calls(trace)
    assert call[:5] == ("all_reduce", "", None, 4 * 32 * 4, 1)
    assert call.duration_s == pytest.approx(35.985e-6)


@pytest.mark.full
def test_a_real_engines_trace_is_read(reference: Path) -> None:
    trace = read_kineto(reference / "profiler" / "vllm_cpu_kineto.json.gz")
    assert len(trace.of_category("cpu_op")) == 41155


def test_sizes_of_collectives_are_the_whole_tensors(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        nccl("_allgather_base", 100, 800),
        nccl("_reduce_scatter_base", 800, 100),
        nccl("allreduce", 800, 800, dtype="Float"),
        nccl("send", 100, 100),
        nccl("recv", 100, 100),
        nccl("all_to_allv", 80, 90),
        nccl("allreduce", 8, 8, dtype="Complex"),
        event(name="gemm"),
    )
    tensor_parallel = "TENSOR_MODEL_PARALLEL_GROUP"
    assert [call[:4] for call in collective_calls(trace)] == [
        ("all_gather", tensor_parallel, 8, 1600),
        ("reduce_scatter", tensor_parallel, 8, 1600),
        ("all_reduce", tensor_parallel, 8, 3200),
        ("send", tensor_parallel, 8, 200),
        ("receive", tensor_parallel, 8, 200),
        ("all_to_all", tensor_parallel, 8, 160),
        ("all_reduce", tensor_parallel, 8, None),
    ]


def test_equal_calls_are_added_up() -> None:
    call = CollectiveCall("all_reduce", "tp", 8, 1600, duration_s=2.0)
    other = call._replace(size_bytes=8, duration_s=None)
    assert totals([call, other, call]) == [call._replace(num_calls=2, duration_s=4.0), other]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"traceEvents": [', "cannot be read as JSON"),
        (b"[]", "is not a Kineto trace"),
        (b'{"nodes": []}', "is not a Kineto trace: Object missing required field `traceEvents`"),
        (b'{"traceEvents": [{"ph": 3}]}', "is not a Kineto trace"),
        (gzip.compress(b"{}" * 100, mtime=0)[:-9], "is a broken gzip file"),
        (b"\x80\x81", "cannot be read as JSON"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_kineto(path)
    assert message in caught.value.message
