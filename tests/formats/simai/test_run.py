"""SimAI's files: equal to what SimAI wrote, and a sentence for each way in which they can be wrong."""

import csv
import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.formats.simai.analytical import SimaiOptions, collective_ns, read_layers, run_simai_analytical
from windtunnel.formats.simai.report import end_to_end_csv, flow_table_csv
from windtunnel.formats.simai.workload import OPERATIONS
from windtunnel.network.collectives.algorithms.direct import all_to_all
from windtunnel.network.collectives.algorithms.nvls import nvls
from windtunnel.network.collectives.algorithms.ring import ring
from windtunnel.network.collectives.rings import simai_rings
from windtunnel.network.fabric import read_topology, topology_text
from windtunnel.network.flows import Flows
from windtunnel.network.settings import GBPS
from windtunnel.network.topology import AlibabaHpn, DcnPlus, SpectrumX, Topology, TwoTier
from windtunnel.training.iteration.layers import Communication, IterationLayer, LayerPhase, LayerWorkload, RankGroup

A100 = {"gpu_type": "A100", "nic_bytes_per_s": 100 * GBPS, "scale_up_bytes_per_s": 2400 * GBPS}
GENERATED: dict[str, Topology] = {
    "Spectrum-X_8g_8gps_400Gbps_H100": SpectrumX(num_gpus=8, num_spines=1),
    "Spectrum-X_128g_8gps_100Gbps_A100": SpectrumX(num_gpus=128, **A100),
    "Spectrum-X_4096g_8gps_400Gbps_H100": SpectrumX(),
    "AlibabaHPN_64g_8gps_DualToR_SinglePlane_200Gbps_H100": AlibabaHpn(num_gpus=64, num_spines=16),
    "AlibabaHPN_15360g_8gps_DualToR_SinglePlane_200Gbps_H100": AlibabaHpn(),
    "DCN+SingleToR_256g_8gps_400Gbps_H100": DcnPlus(num_gpus=256, num_spines=64),
    "DCN+DualToR_128g_8gps_200Gbps_H100": DcnPlus(num_gpus=128, dual_tor=True),
    "Rail_Opti_SingleToR_32g_8gps_400Gbps_H100": TwoTier(rail_optimised=True, scale_up_bytes_per_s=1360 * GBPS),
    "No_Rail_Opti_16g_8gps_SingleToR_400Gbps_H100": TwoTier(num_gpus=16),
}


def recorded(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


@pytest.mark.parametrize("name", GENERATED)
def test_generated_topologies_are_equal_to_the_byte(reference: Path, name: str) -> None:
    fabric = GENERATED[name].build()
    assert fabric.name == name
    assert topology_text(fabric) == recorded(reference / "simai" / "topo" / f"{name}.gz")


def test_what_is_read_is_written_again(reference: Path) -> None:
    for path in sorted((reference / "simai" / "topo").glob("*.gz")):
        if "15360" not in path.name:
            assert topology_text(read_topology(path)) == recorded(path)


def test_a_fabric_survives_its_file(tmp_path: Path) -> None:
    fabric = AlibabaHpn(num_gpus=64, num_spines=16, dual_plane=True).build()
    path = tmp_path / "topology"
    path.write_text(topology_text(fabric))
    read = read_topology(path)
    for name in ("kind", "tier", "server", "link_a", "link_b", "bandwidth_bytes_per_s", "latency_s"):
        np.testing.assert_allclose(getattr(read, name), getattr(fabric, name), rtol=1e-12)


GOOD = """4 2 1 1 4 H100
2 3
0 2 2880Gbps 0.000025ms 0
1 2 2880Gbps 0.000025ms 0
0 3 400Gbps 0.0005ms 0
1 3 400Gbps 0.0005ms 0
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 lines"),
        (GOOD.replace("4 2 1 1 4 H100", "4 2 1 1 4"), "line 1: it has 5 fields"),
        (GOOD.replace("4 2 1 1 4 H100", "4 two 1 1 4 H100"), "line 1: 'two' is not a number"),
        (GOOD.replace("H100", "H900"), "line 1: the GPU type 'H900' is not known"),
        (GOOD.replace("4 2 1 1 4", "4 3 1 1 4"), "line 1: 2 GPUs do not fill servers of 3"),
        (GOOD.replace("4 2 1 1 4", "4 2 1 1 9"), "line 1: it announces 9 links; 4 follow"),
        (GOOD.replace("4 2 1 1 4", "4 2 1 1 3"), "line 6: line 1 announces 3 links"),
        (GOOD.replace("\n2 3\n", "\n2\n"), "line 2: it lists 1 switches"),
        (GOOD.replace("\n2 3\n", "\n3 2\n"), "line 2: the switch '3' is out of place"),
        (GOOD.replace("0 2 2880Gbps 0.000025ms 0", "0 2 fast 0.000025ms 0"), "line 3: rate_bytes_per_s: 'fast'"),
        (GOOD.replace("0 3 400Gbps 0.0005ms", "0 3 400Gbps 5parsec"), "line 5: latency_s: '5parsec'"),
        (GOOD.replace("1 3 400Gbps 0.0005ms 0", "1 3 400Gbps"), "line 6: it has 3 fields"),
        (GOOD.replace("1 3 400Gbps", "1 77 400Gbps"), "line 6: it joins 1 and 77"),
        (GOOD.replace("1 3 400Gbps", "0 3 400Gbps"), "line 6: nodes 0 and 3 are joined twice"),
        (GOOD.replace("0 3 400Gbps", "0 3 0Gbps"), "line 5: its bandwidth is 0"),
    ],
)
def test_a_wrong_topology_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "topology"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        read_topology(path)
    assert message in raised.value.message
    assert str(path) in raised.value.message


HEADER = (
    "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 ep: 1 pp: 1 vpp: 8 ga: 1 all_gpus: 16 checkpoints: 0"
)
LINE = "layer -1 1000 ALLREDUCE 16777216 1 NONE 0 1 NONE 0 1"


def test_a_file_of_another_tool_is_for_another_command(tmp_path: Path) -> None:
    path = tmp_path / "list.csv"
    path.write_text("comm_type,comm_group,comm_group_size,msg_size\n")
    with pytest.raises(InputError) as raised:
        read_layers(path)
    assert "`windtunnel workload` shows" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (f"{HEADER}\n", "line 2: the number of layers is ''"),
        (f"{HEADER}\nabc\n{LINE}\n", "line 2: the number of layers is 'abc'"),
        (f"{HEADER}\n5\n{LINE}\n", "line 2 says that 5 layers follow; there are 1"),
        (f"{HEADER}\n1\n{LINE.replace('1000', 'abc')}\n", "line 3: a compute time is 'abc'"),
        (f"{HEADER}\n1\n{LINE.replace('16777216', '-5')}\n", "line 3: a size is -5"),
        (f"{HEADER}\n1\n{LINE.replace('ALLREDUCE', 'BROADCAST')}\n", "line 3: BROADCAST has no time"),
        (f"{HEADER}\n1\n{LINE} 7\n", "line 3 has 13 columns"),
        (f"{HEADER.replace('HYBRID', 'WILD')}\n1\n{LINE}\n", "is not a SimAI workload"),
        (f"{HEADER.replace('all_gpus: 16', '')}\n1\n{LINE}\n", "line 1: all_gpus is missing"),
        (f"{HEADER.replace('ga: 1', 'ga: 0')}\n1\n{LINE}\n", "line 1: ga is 0"),
        (f"{HEADER.replace('group: 8', 'group: 7')}\n1\n{LINE}\n", "line 1: tp x pp = 7 does not divide 16"),
        (f"{HEADER.replace(' ep:', ' eq:')}\n1\n{LINE}\n", "line 1: 'eq' is no setting"),
    ],
)
def test_a_wrong_workload_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "workload.txt"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        read_layers(path)
    assert message in raised.value.message
    assert str(path) in raised.value.message


RUNS = {
    "readme9216": SimaiOptions(),
    "nic2x_9216": SimaiOptions(nic_gib_per_s=97.0),
    "dpo05_9216": SimaiOptions(dp_fraction=0.5, ep_fraction=0.3, tp_fraction=0.3, pp_fraction=0.8),
    "micro8": SimaiOptions(),
}


@pytest.mark.parametrize("name", RUNS)
def test_simai_analyticals_reports_are_equal_to_the_byte(reference: Path, name: str, tmp_path: Path) -> None:
    workload = "microAllReduce.txt" if name == "micro8" else "workload_analytical.txt"
    path = tmp_path / workload
    path.write_text(recorded(reference / "simai" / "workloads" / f"{workload}.gz"))
    text = end_to_end_csv(run_simai_analytical(read_layers(path), RUNS[name]), f"{name}-")
    assert text == recorded(reference / "simai" / "analytical" / f"{name}-EndToEnd.csv.gz")


@pytest.mark.parametrize(
    ("hardware", "total_us"),
    [
        (SimaiOptions(gpus_per_server=64, nics_per_server=64), 5947375),
        (SimaiOptions(nvlink_gib_per_s=900.0, nic_gib_per_s=97.0, gpus_per_server=72, nics_per_server=72), 5312485),
        (SimaiOptions(nvlink_gib_per_s=8 * 20.6), 7954439),
        (SimaiOptions(nvlink_gib_per_s=12 * 20.0, nic_gib_per_s=23.5), 10271609),
    ],
)
def test_other_hardware_totals_as_simai_does(
    reference: Path, hardware: SimaiOptions, total_us: int, tmp_path: Path
) -> None:
    path = tmp_path / "workload.txt"
    path.write_text(recorded(reference / "simai" / "workloads" / "workload_analytical.txt.gz"))
    assert round(run_simai_analytical(read_layers(path), hardware).total_ns / 1000) == total_us


def test_every_collective_of_simai_analytical_takes_as_long(reference: Path) -> None:
    with (reference / "simai" / "analytical" / "collective_table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 1000
    for row in rows:
        job = LayerWorkload("", int(row["tp"]), int(row["ep"]), 1, 1, 1, int(row["gpus"]), 0, ())
        hardware = SimaiOptions(
            nvlink_gib_per_s=float(row["nv_GBps"]),
            nic_gib_per_s=float(row["nic_GBps"]),
            nics_per_server=int(row["nics_per_server"]),
            gpus_per_server=int(row["gpus_per_server"]),
        )
        call = Communication(OPERATIONS[row["op"]], RankGroup(row["group"].lower()), int(row["size_bytes"]))
        assert abs(collective_ns(call, job, hardware) / 1000 - int(row["time_us"])) <= 1, row


def ranks(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


SIZE = 4194304
TABLES = {
    "ar_8_ring": ("all_reduce", "ring", lambda: ring(simai_rings(ranks(8), 1), SIZE // 64, 14)),
    "ar_16_ring": ("all_reduce", "ring", lambda: ring(simai_rings(ranks(16), 2), SIZE // 128, 30)),
    "ar_16_ring_pxn": ("all_reduce", "ring", lambda: ring(simai_rings(ranks(16), 2, pxn=True), SIZE // 128, 30)),
    "ag_16_ring": ("all_gather", "ring", lambda: ring(simai_rings(ranks(16), 2), SIZE // 128, 15)),
    "ar_4n1g": ("all_reduce", "ring", lambda: ring(simai_rings(ranks(4), 4), SIZE // 4, 6)),
    "ar_8_nvls": ("all_reduce", "nvls", lambda: nvls(ranks(8), 8, SIZE)),
    "a2a_16": ("all_to_all", "direct", lambda: all_to_all(ranks(16), SIZE)),
}


@pytest.mark.parametrize("name", TABLES)
def test_flow_tables_are_equal_to_the_line(reference: Path, name: str) -> None:
    op, algorithm, make = TABLES[name]
    # One table was recorded of a data-parallel group, which only its label says.
    text = recorded(reference / "simai" / "simccl" / f"{name}.csv.gz").replace("DP_0_0_0", "TP_0_0_0")
    assert list(flow_table_csv(make(), op, SIZE, algorithm)) == text.splitlines()


def decomposed(flags: dict[str, str], environment: str) -> Flows:
    """A collective as SimCCL's command has it: in one group of the kind that it names."""
    op, size, num_ranks = flags["op"], int(flags["size"]), int(flags["nRanks"])
    num_servers, group = int(flags["nNodes"]), flags.get("group", "TP")
    if group == "EP":
        num_ranks = int(flags["ep"])
    if group == "DP":
        num_ranks = num_servers = num_ranks // int(flags["tp"])
    if op == "AlltoAll":
        return all_to_all(ranks(num_ranks), size)
    if "AS_NVLS_ENABLE=1" in environment and flags["gpu_type"] == "H100":
        return nvls(ranks(num_ranks), num_ranks, size)
    rings = simai_rings(ranks(num_ranks), num_servers, pxn="PXN" in environment and op != "AllGather")
    steps = (2 if op == "AllReduce" else 1) * (num_ranks - 1)
    return ring(rings, size // num_ranks // rings.num_channels, steps)


def test_every_recorded_decomposition_has_as_many_flows_and_bytes(reference: Path) -> None:
    pattern = re.compile(
        r"\[\w+\] (?P<environment>.*?)--(?P<flags>.*?) -> .* flows=(?P<flows>\d+) total_bytes=(?P<bytes>\d+)"
    )
    lines = (reference / "simai" / "simccl" / "commands.txt").read_text().splitlines()
    matches = [match for match in map(pattern.match, lines) if match]  # the others crashed
    assert matches
    for match in matches:
        flags = dict(flag.split() for flag in match["flags"].split("--"))
        made = decomposed(flags, match["environment"])
        assert len(made.source) == int(match["flows"]), match[0]
        assert int(made.size_bytes.sum()) == int(match["bytes"]), match[0]


def test_what_simai_cannot_price_is_answered_with_file_and_line() -> None:
    layer = IterationLayer(
        "big", LayerPhase(0.0, Communication("all_gather", RankGroup.TP, 40 * 10**9)), LayerPhase(0.0), LayerPhase(0.0)
    )
    workload = LayerWorkload("job.txt", 8, 1, 1, 1, 1, 8, 0, (layer,))
    with pytest.raises(InputError, match=r"job.txt, line 3: .*end at 16 GiB"):
        run_simai_analytical(workload, SimaiOptions())
