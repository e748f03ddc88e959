import gzip
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.files import write_bytes
from windtunnel.formats.chakra.trace import (
    VERSION,
    ChakraCollective,
    ChakraKind,
    ChakraTrace,
    messages,
    read_trace,
    trace_bytes,
    value_of,
)


def trace_of(*nodes: dict[str, Any], **metadata: Any) -> ChakraTrace:
    return ChakraTrace(
        messages().metadata(**{"version": VERSION, **metadata}), [messages().node(**node) for node in nodes]
    )


SAMPLE = trace_of(
    {
        "id": 1,
        "name": "all_reduce_4npus_1MB",
        "kind": ChakraKind.COLLECTIVE,
        "attributes": [
            {"name": "is_cpu_op", "bool": False},
            {"name": "comm_type", "int64": ChakraCollective.ALL_REDUCE},
            {"name": "comm_size", "int64": 1 << 20},
        ],
    }
)
"""ASTRA-sim's examples/workload/microbenchmarks/all_reduce/4npus_1MB/all_reduce.1.et."""

RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "sint32": (-(2**31), 2**31 - 1),
    "sint64": (-(2**63), 2**63 - 1),
    "sfixed32": (-(2**31), 2**31 - 1),
    "sfixed64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "fixed32": (0, 2**32 - 1),
    "fixed64": (0, 2**64 - 1),
}
SCALARS = {
    **{kind: st.integers(*limits) for kind, limits in RANGES.items()},
    "bool": st.booleans(),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(max_size=5),
    "bytes": st.binary(max_size=5),
}


def of_kind(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    scalar = SCALARS[kind]
    lists = st.lists(scalar, max_size=4).map(lambda values: {f"{kind}_list": {"values": values}})
    value = st.one_of(scalar.map(lambda value: {kind: value}), lists)
    return st.builds(lambda name, value: {"name": name, **value}, st.text(max_size=5), value)


ids = st.integers(0, 2**64 - 1)
attributes = st.lists(st.sampled_from(sorted(SCALARS)).flatmap(of_kind), max_size=4)
operands = st.fixed_dictionaries(dict.fromkeys(("values", "shapes", "types"), st.text(max_size=5)))
nodes = st.fixed_dictionaries(
    {
        "id": ids,
        "name": st.text(max_size=8),
        "kind": st.sampled_from(ChakraKind),
        "data_dependencies": st.lists(ids, max_size=3),
        "duration_us": ids,
        "attributes": attributes,
    },
    optional={"inputs": operands, "outputs": operands},
)
traces = st.builds(
    lambda nodes, attributes: trace_of(*nodes, attributes=attributes), st.lists(nodes, max_size=4), attributes
)


def read(tmp_path: Path, content: bytes) -> ChakraTrace:
    path = tmp_path / "trace.0.et"
    path.write_bytes(content)
    return read_trace(path)


def test_the_sample_of_astra_sim_is_written_byte_for_byte(reference: Path) -> None:
    path = reference / "aicb" / "chakra" / "et_repro.et"
    assert trace_bytes(SAMPLE) == path.read_bytes()
    assert read_trace(path) == SAMPLE
    assert value_of(SAMPLE.nodes[0], "comm_size") == 1048576
    assert value_of(SAMPLE.nodes[0], "comm_group") is None


def test_encoding_of_the_sample_without_its_file() -> None:
    # Field numbers and wire types of et_def.proto; false and 0 of a oneof stand on the wire.
    assert trace_bytes(SAMPLE).hex(" ") == (
        "07 0a 05 30 2e 30 2e 34 4a 08 01 12 14 61 6c 6c 5f 72 65 64 75 63 65 5f 34 6e 70 75 73 5f 31 4d 42 18 07 "
        "52 0e 0a 09 69 73 5f 63 70 75 5f 6f 70 d8 01 00 52 0d 0a 09 63 6f 6d 6d 5f 74 79 70 65 48 00 "
        "52 0f 0a 09 63 6f 6d 6d 5f 73 69 7a 65 48 80 80 40"
    )


@pytest.mark.full
@settings(max_examples=50)
@given(traces)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, trace: ChakraTrace) -> None:
    assert read(tmp_path_factory.mktemp("et"), trace_bytes(trace)) == trace


def test_packed_files_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.0.et.gz"
    write_bytes(path, trace_bytes(SAMPLE))
    assert gzip.decompress(path.read_bytes()) == trace_bytes(SAMPLE)
    assert read_trace(path) == SAMPLE


def test_unpacked_lists_and_unknown_fields_are_read(tmp_path: Path) -> None:
    # ChakraNode 2 depends on 5 and 6, one field each; field 99 is of no schema yet.
    node = b"\x08\x02" + b"\x28\x05" + b"\x28\x06" + b"\x9a\x06\x01x"
    (found,) = read(tmp_path, b"\x00" + bytes([len(node)]) + node).nodes
    assert (found.id, found.data_dependencies) == (2, [5, 6])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x07\x0a\x05", "byte 0: the metadata is no message of a Chakra trace"),
        (trace_bytes(SAMPLE)[:-1], "byte 8: node 1 is no message of a Chakra trace"),
        (b"\xff", "byte 0: the metadata is no message of a Chakra trace"),
        (b"\xff" * 20, "byte 0: the metadata is no message of a Chakra trace"),
        (b"\xff" * 9 + b"\x01", "byte 0: the metadata is no message of a Chakra trace"),
        (b'{"schemaVersion": 1, "traceEvents": []}' * 9, "no message of a Chakra trace"),
        (b"\x00\x02\x18\x63", "node 1 is no message of a Chakra trace: 99 is not a valid ChakraKind"),
        (b"\x00\x02\x12\x09", "node 1 is no message of a Chakra trace"),
        (b"\x00\x02\x0f\x09", "node 1 is no message of a Chakra trace"),
    ],
)
def test_wrong_files_are_refused_by_byte(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, content)
    assert message in caught.value.message


def test_every_cut_of_a_file_is_refused_or_a_shorter_trace(tmp_path: Path) -> None:
    content = trace_bytes(SAMPLE)
    for length in range(1, len(content)):
        if length == 8:  # the metadata alone is a trace of no nodes
            assert read(tmp_path, content[:length]).nodes == []
            continue
        with pytest.raises(InputError):
            read(tmp_path, content[:length])


def test_without_protobuf_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    messages.cache_clear()
    with pytest.raises(InputError, match="protobuf is not installed") as caught:
        read(tmp_path, b"\x00")
    assert "windtunnel[chakra]" in str(caught.value.hint)
