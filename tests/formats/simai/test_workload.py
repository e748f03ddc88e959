import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.formats.simai.workload import (
    MICRO,
    OPERATIONS,
    Block,
    FilePhase,
    Header,
    SimaiWorkload,
    WorkloadLayer,
    meaning,
    read_workload,
    workload_text,
)

HEADER = "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 ep: 1 pp: 1 vpp: 8 ga: 1 all_gpus: 16"
TAIL = " checkpoints: 0 checkpoint_initiates: 0"
LINE = "embedding_layer -1 1000 ALLREDUCE 16777216 1 NONE 0 1 NONE 0 1"

WORDS = ("NONE", *(word + suffix for word in OPERATIONS for suffix in ("", "_EP", "_DP_EP")))
numbers = st.integers(0, 2**40)
phases = st.builds(FilePhase, numbers, st.sampled_from(WORDS), numbers)
layers = st.builds(WorkloadLayer, st.sampled_from(["mlp_row", "grad_gather"]), phases, phases, phases, numbers)
degrees = st.integers(1, 64)
headers = st.one_of(
    st.builds(Header, tp=degrees),
    st.builds(
        Header,
        tp=degrees,
        ep=degrees,
        pp=degrees,
        vpp=degrees,
        num_microbatches=degrees,
        num_devices=degrees,
        pp_comm_bytes=st.one_of(numbers, numbers.map(float)),
        inference=st.booleans(),
    ),
)
blocks = st.lists(st.builds(Block, st.lists(layers, max_size=3).map(tuple), st.integers(0, 3)), max_size=3).map(tuple)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "workload.txt"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        read_workload(written(tmp_path, text))
    return f"{caught.value.message}; {caught.value.hint}"


@pytest.mark.full
@given(headers, blocks)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, header: Header, found: tuple[Block, ...]
) -> None:
    workload = SimaiWorkload(header, found)
    text = workload_text(workload)
    again = read_workload(written(tmp_path_factory.mktemp("w"), text))
    assert list(again.layers()) == list(workload.layers())
    assert again.header == header
    assert workload_text(again) == text
    assert workload.num_layers == again.num_layers == len(text.splitlines()) - 2


def test_shipped_workloads_of_both_vintages_are_read(reference: Path) -> None:
    workload = read_workload(reference / "simai" / "workloads" / "workload_analytical.txt.gz")
    assert workload.header == Header(2, 16, 12, 8, 24, 9216, 50331648)
    assert workload.num_layers == 1789
    micro = read_workload(reference / "simai" / "workloads" / "microAllReduce.txt.gz")
    assert [layer.forward.size_bytes for layer in micro.layers()] == [16777216, 67108864]
    assert micro.header.pp_comm_bytes is None


def test_files_of_2024_have_tabs_blanks_and_only_tensor_parallelism(tmp_path: Path) -> None:
    text = (
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD\tmodel_parallel_NPU_group: 2 checkpoints: 0 checkpoint_initiates: 0\n2\n"
        "norm\t-1\t0\tBROADCAST\t16384\t1\tNONE\t0\t1\tNONE\t0\t100\n"
        "Llama_layer1\t-1\t 14356000\tNONE\t0   4756000\tALLGATHER\t357468\t 1\tREDUCESCATTER\t1889785610\t100"
    )
    workload = read_workload(written(tmp_path, text))
    assert workload.header == Header(tp=2)
    first, second = workload.layers()
    assert first.forward == FilePhase(0, "BROADCAST", 16384)
    assert second.weight_gradient == FilePhase(1, "REDUCESCATTER", 1889785610)


def test_micro_files_have_no_settings(tmp_path: Path) -> None:
    workload = read_workload(
        written(tmp_path, "MICRO\n1\nmicro_test\t-1\t1\tNONE\t0\t1\tNONE\t0\t1\tALLTOALL\t4096\t1\n")
    )
    assert workload.policy == MICRO
    assert next(workload.layers()).weight_gradient == FilePhase(1, "ALLTOALL", 4096)
    assert workload_text(workload).startswith("MICRO\n1\n")


def test_lists_of_checkpoints_are_passed_over(tmp_path: Path) -> None:
    text = f"{HEADER} checkpoints: 2 3 7 checkpoint_initiates: 1 4 pp_comm 64\n1\n{LINE}\n"
    assert read_workload(written(tmp_path, text)).header.pp_comm_bytes == 64


def test_a_word_without_a_suffix_means_the_data_parallel_group_for_weights() -> None:
    assert meaning("ALLREDUCE", is_weight_gradient=False) == ("all_reduce", "tp")
    assert meaning("ALLREDUCE", is_weight_gradient=True) == ("all_reduce", "dp")
    assert meaning("ALLTOALL_EP", is_weight_gradient=True) == ("all_to_all", "ep")
    assert meaning("REDUCESCATTER_DP_EP", is_weight_gradient=False) == ("reduce_scatter", "dp_ep")
    assert meaning("NONE", is_weight_gradient=True) is None


def test_malformed_samples_that_crash_or_hang_simai_are_refused_by_line(reference: Path) -> None:
    messages = {
        "badcount": "line 2: the number of layers is 'abc'",
        "badnum": "line 3: a compute time is 'abc'",
        "empty": "is empty",
        "negsize": "line 3: a size is -5; at least 0",
        "toofew": "line 2 says that 5 layers follow; there are 1",
        "zeros": "line 1: model_parallel_NPU_group is 0; at least 1",
    }
    for name, message in messages.items():
        with pytest.raises(InputError, match=message):
            read_workload(reference / "simai" / "malformed" / f"{name}.txt")
    assert read_workload(reference / "simai" / "malformed" / "ag40G.txt").num_layers == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "it begins with '{}'"),
        ("HYBRID_TRANSFORMER_FWD_IN_BCKWARD x: 1", "did you mean HYBRID_TRANSFORMER_FWD_IN_BCKWD"),
        (f"{HEADER} all_gpu: 3{TAIL}\n0\n", "'all_gpu' is no setting of a workload; did you mean all_gpus"),
        (f"{HEADER} pp_comm:", "ends after 'pp_comm'; a number is missing"),
        (f"{HEADER} pp_comm: nan\n0\n", "pp_comm is nan"),
        (f"{HEADER}{TAIL}", "line 2: the number of layers is ''"),
        (f"{HEADER}{TAIL}\n1\n{LINE} 7", "line 3 has 13 columns; a layer has 12"),
        (f"{HEADER}{TAIL}\n1\n{LINE.replace('ALLREDUCE', 'ALLREDUC')}", "did you mean ALLREDUCE"),
        (f"{HEADER}{TAIL}\n1\n{LINE.replace('ALLREDUCE', 'ALLREDUCEALLTOALL')}", "is no collective of a workload"),
        (f"{HEADER}{TAIL}\n1\n{LINE}\n{LINE}\n", "says that 1 layers follow; there are 2"),
        (f"{HEADER}{TAIL}\n1\n{LINE.replace('16777216', '1.5')}", "a size is '1.5'; a whole number is needed"),
    ],
)
def test_wrong_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "workload.txt"
    for content, message in ((b"\xff\xfe\x00", "is not a text file"), (gzip.compress(b"x" * 99)[:20], "broken gzip")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_workload(path)
    with pytest.raises(InputError, match="there is no file"):
        read_workload(tmp_path / "none.txt")
