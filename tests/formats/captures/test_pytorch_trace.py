import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.errors import InputError
from windtunnel.formats.captures.pytorch_trace import collective_calls, read_execution_trace
from windtunnel.formats.collective_calls import CollectiveCall

TENSORS: dict[str, Any] = {"values": [], "shapes": [], "types": []}


def node(number: int, name: str, parent: int, attributes: dict[str, Any] | None = None) -> dict[str, Any]:
    attrs = [{"name": key, "type": "", "value": value} for key, value in (attributes or {}).items()]
    return {"id": number, "name": name, "ctrl_deps": parent, "inputs": TENSORS, "outputs": TENSORS, "attrs": attrs}


def written(tmp_path: Path, *nodes: dict[str, Any], **changes: Any) -> Path:
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes} | changes))
    return path


def test_a_recorded_trace_is_read(reference: Path) -> None:
    trace = read_execution_trace(reference / "aicb" / "chakra" / "torch_et.json")
    assert len(trace.operators) == 58
    assert [operator.id for operator in trace.operators] == sorted(operator.id for operator in trace.operators)
    linear = next(operator for operator in trace.operators if operator.name == "aten::linear")
    assert linear.inputs.shapes == [[4, 32], [32, 32], [32]]
    assert linear.attributes["rf_id"] == 2

    assert [*collective_calls(trace)] == [CollectiveCall("all_reduce", "", None, 512)]


def test_collectives_with_their_metadata(tmp_path: Path) -> None:
    metadata = {
        "collective_name": "_allgather_base",
        "dtype": "BFloat16",
        "in_msg_nelems": 100,
        "out_msg_nelems": 800,
        "pg_desc": "DATA_PARALLEL_GROUP",
        "pg_size": 8,
    }
    path = written(tmp_path, node(1, "root", 1), node(2, "record_param_comms", 1, metadata), node(3, "nccl:x", 2))
    assert [*collective_calls(read_execution_trace(path))] == [
        CollectiveCall("all_gather", "DATA_PARALLEL_GROUP", 8, 1600)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "2.0"}, "has the schema '2.0', which is not read"),
        ({"schema": 3}, "is not a PyTorch execution trace"),
        ({"nodes": [node(1, "a", 1), node(1, "b", 1)]}, "two nodes have the same id"),
        ({"nodes": [node(1, "a", 9)]}, "node 1 (a) belongs to node 9, which is not there"),
        ({"nodes": [{"id": 1}]}, "is not a PyTorch execution trace"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_execution_trace(written(tmp_path, **changes))
    assert message in caught.value.message


def test_files_that_are_cut_off_or_of_another_kind(tmp_path: Path) -> None:
    path = written(tmp_path, node(1, "a", 1))
    path.write_text(path.read_text()[:-9])
    with pytest.raises(InputError, match="cannot be read as JSON"):
        read_execution_trace(path)
    path.write_text('{"traceEvents": []}')
    with pytest.raises(InputError, match="is not a PyTorch execution trace"):
        read_execution_trace(path)
