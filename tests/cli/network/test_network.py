"""`windtunnel topology`, `collective` and `network run`."""

from __future__ import annotations

import gzip
import json
import shlex
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from recorded import entries
from windtunnel.network.topology import fabric_of
from windtunnel.report.network.network import topology_report

if TYPE_CHECKING:
    from cli.conftest import Command

WORKLOAD = """HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 ep: 1 pp: 1 vpp: 1 ga: 1 all_gpus: 16
2
first -1 500000 ALLREDUCE 16777216 1 NONE 0 1 ALLREDUCE 1048576 1
second -1 500000 NONE 0 800000 ALLGATHER 16777216 1 REDUCESCATTER 4194304 1
"""


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "workload.txt"
    path.write_text(WORKLOAD)
    return str(path)


def test_generate_understands_simais_flags_and_ours(windtunnel: Command, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    done = windtunnel(
        *("topology", "generate", "-topo", "Spectrum-X", "-g", "16", "-psn", "8", "-bw", "200Gbps", "-o", str(theirs))
    )
    assert done.code == 0
    assert "200 Gbps" in done.stdout
    windtunnel(
        *("topology", "generate", "--type", "spectrum_x", "--num-gpus", "16", "--num-spines", "8"),
        *("--set", "nic_bytes_per_s=25GB/s", "--out", str(ours)),
    )
    assert theirs.read_bytes() == ours.read_bytes()
    again = windtunnel("topology", "generate", "-topo", "Spectrum-X", "-g", "16", "-o", str(theirs))
    assert again.code == 2
    assert "exists already" in again.stderr


def test_show_draws(windtunnel: Command, tmp_path: Path) -> None:
    picture = tmp_path / "fabric.html"
    done = windtunnel("topology", "show", "dgx_h100:num_servers=2", "--html", str(picture), "--json")
    document = json.loads(done.stdout)
    assert document["num_gpus"] == 16
    assert sum(link["num"] for link in document["links"]) == document["num_links"]
    text = picture.read_text()
    assert text.count("<circle") == 16
    assert "http" not in text


def test_check_finds_what_a_failure_cuts_off(windtunnel: Command) -> None:
    assert windtunnel("topology", "check", "spectrum_x:num_gpus=16,num_spines=2", "--fail-node", "26").code == 0
    # Without servers' NVLink, a leaf is the only way to its GPUs.
    done = windtunnel("topology", "check", "spectrum_x:num_gpus=16,gpus_per_server=1", "--fail-node", "32")
    assert done.code == 2
    assert "cannot reach GPU 0, nor" in done.stderr
    alone = windtunnel("topology", "check", "spectrum_x:num_gpus=2,gpus_per_server=1", "--fail-link", "1-4")
    assert "GPU 1 cannot reach GPU 0\nhint: " in alone.stderr


@pytest.mark.parametrize("backend", ["analytic", "flow"])
def test_collective_prints_nccl_tests_bandwidths(windtunnel: Command, backend: str) -> None:
    words = ("collective", "--op", "all_reduce", "--size", "256MiB", "--topology", "dgx_h100", "--backend", backend)
    document = json.loads(windtunnel(*words, "--json").stdout)
    assert document["algorithm_bytes_per_s"] == pytest.approx(2**28 / document["seconds"])
    assert document["bus_bytes_per_s"] == pytest.approx(document["algorithm_bytes_per_s"] * 2 * 7 / 8)
    assert "busbw" in windtunnel(*words).stdout


def test_a_collective_of_many_sizes_is_a_table(windtunnel: Command, tmp_path: Path) -> None:
    words = ("collective", "--op", "all_reduce", "--device", "h100_sxm")
    page = tmp_path / "sizes.html"
    many = windtunnel(*words, "--size", "1MiB..1GiB", "--json", "--html", str(page))
    assert many.code == 0
    runs = json.loads(many.stdout)["runs"]
    assert [run["size_bytes"] for run in runs] == [2**power for power in range(20, 31)]
    one = json.loads(windtunnel(*words, "--size", "1GiB", "--json").stdout)
    assert runs[-1] == {name: value for name, value in one.items() if name != "windtunnel"}
    rates = [run["bus_bytes_per_s"] for run in runs]
    shown = windtunnel(*words, "--size", "1MiB..1GiB").stdout
    half = next(run["size_bytes"] for run in runs if run["bus_bytes_per_s"] >= max(rates) / 2)
    assert f"half of it from {half // 2**20}.0 MiB on" in shown
    assert "bus bandwidth over the size" in page.read_text()
    two = json.loads(windtunnel(*words, "--size", "3MiB, 5MiB", "--json").stdout)["runs"]
    assert [run["size_bytes"] for run in two] == [3 * 2**20, 5 * 2**20]
    assert "half of it" not in windtunnel(*words, "--size", "512MiB,1GiB").stdout  # the least size says nothing


def nccl_log(gpu: str, num_hosts: int) -> str:
    """What nccl-tests prints of eight ranks; times as published of eight H100 (benchmarks/collective_accuracy.py)."""
    ranks = "".join(
        f"#  Rank {rank:2d} Group  0 Pid {rank:6d} on   host{rank * num_hosts // 8} device  {rank} [0000:8d:00] {gpu}\n"
        for rank in range(8)
    )
    return f"""# Collective test starting: all_reduce_perf
{ranks}
     1048576        262144     float     sum      -1    27.37   38.31   67.04      0    26.90   38.98   68.22      0
   134217728      33554432     float     sum      -1    586.4  228.88  400.53      0    585.1  229.39  401.43    N/A
"""


@pytest.mark.parametrize(
    ("gpu", "num_hosts", "num_servers"),
    [("NVIDIA H100 80GB HBM3", 1, 1), ("NVIDIA H100 80GB HBM3", 2, 2), ("NVIDIA GB200", 2, 1)],
)
def test_a_log_of_nccl_tests_is_compared_size_by_size(
    windtunnel: Command, tmp_path: Path, gpu: str, num_hosts: int, num_servers: int
) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(nccl_log(gpu, num_hosts))
    runs = json.loads(windtunnel("collective", "--measured", str(log), "--json").stdout)["runs"]
    assert [(run["num_ranks"], run["num_servers"]) for run in runs] == [(8, num_servers)] * 2
    assert [run["measured_bus_bytes_per_s"] / 1e9 for run in runs] == pytest.approx([67.04, 400.53], rel=1e-3)
    assert [run["error"] for run in runs] == [run["seconds"] / run["measured_s"] - 1 for run in runs]
    chosen = json.loads(windtunnel("collective", "--measured", str(log), "--ranks", "0,1", "--json").stdout)["runs"]
    assert [(run["num_ranks"], run["num_servers"]) for run in chosen] == [(2, 1)] * 2  # as asked for
    shown = windtunnel("collective", "--measured", str(log)).stdout
    assert "reached 401 GB/s of bus bandwidth, and" in shown


def test_a_log_of_a_process_for_each_gpu_has_no_launch(windtunnel: Command, tmp_path: Path) -> None:
    log, text = tmp_path / "nccl.log", nccl_log("NVIDIA H100 80GB HBM3", 2)
    seconds = []
    for header in ("# nThread 1 nGpus 8 minBytes 8\n", "# nThread 1 nGpus 1 minBytes 8\n"):
        log.write_text(header + text)
        done = json.loads(windtunnel("collective", "--measured", str(log), "--json").stdout)
        seconds.append(done["runs"][0]["seconds"])
    assert seconds[0] - seconds[1] == pytest.approx(19.5e-6)


def test_a_log_without_names_of_gpus_needs_a_device(windtunnel: Command, tmp_path: Path) -> None:
    log = tmp_path / "rccl.log"
    log.write_text(nccl_log("", 2))
    refused = windtunnel("collective", "--measured", str(log))
    assert refused.code == 2
    assert "does not name its GPUs\nhint: give --device" in refused.stderr
    done = windtunnel("collective", "--measured", str(log), "--device", "mi355x", "--json")
    assert [run["num_servers"] for run in json.loads(done.stdout)["runs"]] == [2, 2]


def test_a_device_has_its_usual_nodes(windtunnel: Command) -> None:
    def ranks(*words: str) -> tuple[int, int]:
        done = json.loads(windtunnel("collective", "--op", "all_reduce", "--size", "1MiB", "--json", *words).stdout)
        return done["num_ranks"], done["num_servers"]

    assert ranks("--device", "h100_sxm") == (8, 1)
    assert ranks("--device", "h100_sxm", "--num-devices", "64") == (64, 8)
    assert ranks("--device", "h100_sxm", "--num-devices", "4") == (4, 1)
    assert ranks("--device", "gb200", "--num-devices", "16") == (16, 1)
    assert (
        "--topology names another"
        in windtunnel(*("collective", "--op", "all_reduce", "--size", "1MiB", "--device", "rtx_4090")).stderr
    )


def test_collective_writes_simccls_table(windtunnel: Command, tmp_path: Path) -> None:
    path = tmp_path / "flows.csv"
    done = windtunnel(
        *("collective", "--op", "all_reduce", "--size", "4MiB", "--topology", "spectrum_x:num_gpus=16"),
        *("--compat", "simai", "--backend", "flow", "--flows", str(path)),
    )
    assert done.code == 0
    assert len(path.read_text().splitlines()) == 1 + 3840


def test_a_flow_table_says_whose_flows_it_has(windtunnel: Command, tmp_path: Path) -> None:
    file = tmp_path / "flows.csv"
    words = ("collective", "--topology", "dgx_h100:num_servers=2", "--size", "1MiB", "--flows", str(file))
    done = windtunnel(*words, "--op", "all_reduce", "--algorithm", "collnet")
    assert "note: collnet has only a closed form; the flows are those of ring" in done.stderr
    assert file.read_text().splitlines()[1].split(",")[3] == "1"
    file.unlink()
    done = windtunnel(*words, "--op", "all_to_all", "--algorithm", "hierarchical", "--backend", "flow")
    assert done.code == 2
    assert "has no number for the algorithm 'hierarchical'" in done.stderr
    assert not file.exists()


@pytest.mark.parametrize("options", [[], ["--backend", "flow"], ["--backend", "flow", "--compat", "simai"]])
def test_network_run_reports_every_layer(
    windtunnel: Command, workload: str, options: list[str], tmp_path: Path
) -> None:
    report = tmp_path / "EndToEnd.csv"
    words = ("network", "run", "--workload", workload, "--topology", "spectrum_x:num_gpus=16", *options)
    document = json.loads(windtunnel(*words, "--json", "--out", str(report)).stdout)
    spent = document["compute_s"] + sum(document["exposed_s"].values()) + document["pp_s"] + document["bubble_s"]
    assert document["total_s"] == pytest.approx(spent)
    assert [layer["name"] for layer in document["layers"]] == ["first", "second"]
    assert report.read_text().count("\n") == 5


def test_gradients_hide_behind_what_is_computed_later(windtunnel: Command, workload: str) -> None:
    words = ("network", "run", "--workload", workload, "--topology", "spectrum_x:num_gpus=16", "--json")
    second = json.loads(windtunnel(*words).stdout)["layers"][1]["phases"]["weight_gradient"]
    assert 0 <= second["exposed_s"] < second["communication_s"]


def test_several_workloads_share_a_network(windtunnel: Command, workload: str) -> None:
    words = ("network", "run", "-w", workload, "-w", workload, "--topology", "spectrum_x:num_gpus=32", "--json")
    document = json.loads(windtunnel(*words, "--placement", "striped", "--iterations", "3").stdout)
    assert [job["gpus"][:9:8] for job in document["jobs"]] == [[0, 16], [8, 24]]
    assert all(job["slowdown"] == pytest.approx(1.0, abs=0.2) for job in document["jobs"])
    refused = windtunnel(*words, "--out", "EndToEnd.csv")
    assert refused.code == 2
    assert "report of one job" in refused.stderr


def test_what_only_simai_analytical_reads_is_not_ignored_elsewhere(windtunnel: Command, workload: str) -> None:
    done = windtunnel("network", "run", "-w", workload, "--topology", "dgx_h100", "--backend", "flow", "-nv", "360")
    assert (done.code, done.stdout) == (2, "")
    assert "--nvlink-busbw is SimAI-Analytical's" in done.stderr


def test_compat_simai_needs_no_topology(windtunnel: Command, workload: str) -> None:
    done = windtunnel("network", "run", "-w", workload, "--compat", "simai", "-nv", "360", "-nic", "48.5", "--json")
    # 16 MiB over 8 ranks at 360 GiB/s: 2 x 7/8 x 1/64 GiB / 360.
    assert json.loads(done.stdout)["layers"][0]["phases"]["forward"]["communication_s"] == pytest.approx(75.954e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["topology", "generate", "-topo", "Foo"], "there is no topology 'Foo'"),
        (["topology", "generate", "-g", "12"], "does not divide"),
        (["topology", "generate", "-bw", "banana"], "'banana' is not a number"),
        (["topology", "show", "nowhere"], "there is no topology 'nowhere'"),
        (["topology", "check", "dgx_h100", "--fail-link", "0"], "is not two node ids"),
        (["topology", "gen"], "did you mean generate?"),
        (["topology", "generate", "fat_tree", "--radix", "16"], "--set radix=64"),
        (["collective", "all_reduce", "-b", "8"], "--size 8..128MiB --device h100_sxm --num-devices 8"),
        (["collective", "all_reduce", "--op", "all_gather", "--size", "1"], "all_reduce and --op both say it"),
        (["network", "run", "one.txt", "-w", "two.txt"], "one.txt and --workload both say it"),
        (["collective", "--op", "all_reduce", "--size", "1GiB"], "--topology is missing"),
        (["collective", "--measured", "nccl.log", "--size", "1MiB"], "--size does not go with it"),
        (["collective", "--measured", "nccl.log", "--num-devices", "8"], "--num-devices does not go with it"),
        (["collective", "--measured", "nothing.log"], "there is no file nothing.log"),
        (["collective", "--op", "sum", "--size", "2MiB..1MiB", "--device", "h100_sxm"], "is not a range"),
        (["collective", "--op", "sum", "--size", "1..2..3", "--device", "h100_sxm"], "'1..2..3' is not a range"),
        (["collective", "--op", "all_reduce", "--size", "1MiB", "--num-devices", "8"], "--topology is missing"),
        (
            ["collective", "--op", "all_reduce", "--size", "1MiB", "--num-devices", "8", "--topology", "dgx_h100"],
            "--num-devices does not go with it",
        ),
        (
            [*["collective", "--op", "all_reduce", "--size", "1,2", "--device", "h100_sxm", "--flows", "flows.csv"]],
            "--flows is for one size",
        ),
        (["collective", "--op", "sum", "--size", "1GiB", "--topology", "dgx_h100"], "there is no collective 'sum'"),
        (["collective", "--op", "all_reduce", "--size", "1.5", "--topology", "dgx_h100"], "whole number of bytes"),
        (["collective", "--op", "all_to_all", "--size", "1", "--topology", "torus"], "has no switches"),
        (
            ["collective", "--op", "all_reduce", "--tokens", "8", "--topology", "dgx_h100"],
            "--op all_reduce does not go",
        ),
        (["collective", "--op", "all_to_all", "--top-k-experts", "8", "--topology", "dgx_h100"], "--tokens is missing"),
        (
            [*["collective", "--op", "all_to_all", "--tokens", "8", "--topology", "dgx_h100", "--backend", "flow"]],
            "in closed form; --backend does not go with them",
        ),
        (["network", "run"], "--workload is missing"),
        (["network", "run", "-w", "nothing.txt", "--topology", "dgx_h100"], "there is no file nothing.txt"),
        (["network", "run", "-w", "one.txt", "--placement", "packed"], "are for several jobs"),
    ],
)
def test_wrong_words_are_answered_in_a_sentence(windtunnel: Command, words: list[str], message: str) -> None:
    done = windtunnel(*words)
    assert done.code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_runs_may_stand_before_the_options(windtunnel: Command, workload: str, tmp_path: Path) -> None:
    network = ("--topology", "dgx_h100:num_servers=2")
    for first, option, rest in (
        (["collective", "all_reduce"], ["collective", "--op", "all_reduce"], ("--size", "1MiB", *network)),
        (["network", "run", workload], ["network", "run", "--workload", workload], network),
        (["topology", "generate", "fat_tree"], ["topology", "generate", "--type", "fat_tree"], ("--num-gpus", "128")),
    ):
        out = ("--out", str(tmp_path / "made"), "--overwrite") if "topology" in first else ()
        done = windtunnel(*first, *rest, *out)
        assert (done.code, done.stdout) == (0, windtunnel(*option, *rest, *out).stdout)


def test_a_group_without_a_command_shows_its_help(windtunnel: Command) -> None:
    for group in ("topology", "network"):
        done = windtunnel(group)
        assert done.code == 0
        assert "Commands:" in done.stdout


def test_a_message_between_servers_takes_one_network_card(windtunnel: Command) -> None:
    words = ["collective", "send_recv", "--size", "1GiB", "--topology", "dgx_h100:num_servers=2", "--json"]
    closed, flow = (json.loads(windtunnel(*words, *more).stdout) for more in ([], ["--backend", "flow"]))
    assert closed["bus_bytes_per_s"] < 50e9
    assert closed["seconds"] == pytest.approx(flow["seconds"], rel=0.05)


def test_an_all_to_all_in_closed_form_is_direct_as_its_flows_are(windtunnel: Command) -> None:
    words = ["collective", "--op", "all_to_all", "--size", "64MiB", "--topology", "dgx_h100:num_servers=2", "--json"]
    found = [json.loads(windtunnel(*words, *more).stdout) for more in ([], ["--algorithm", "direct"])]
    assert [each["algorithm"] for each in found] == ["direct", "direct"]
    assert found[0]["source"] == found[1]["source"] == "closed form"
    refused = windtunnel(*words, "--algorithm", "ring")
    assert (refused.code, "no ring for all_to_all" in refused.stderr) == (2, True)


def test_a_workload_must_fit_its_topology(windtunnel: Command, workload: str) -> None:
    done = windtunnel("network", "run", "-w", workload, "--topology", "dgx_h100")
    assert done.code == 2
    assert "is for 16 GPUs" in done.stderr


def test_traffic_that_is_not_balanced_goes_either_way(windtunnel: Command, tmp_path: Path) -> None:
    matrix = [[0 if a == b else 2**20 for b in range(16)] for a in range(16)]
    matrix[0][8:] = [2**23] * 8
    file = tmp_path / "traffic.csv"
    file.write_text("".join(",".join(map(str, row)) + "\n" for row in matrix))
    words = ["collective", "--op", "all_to_all", "--traffic", str(file), "--topology", "spectrum_x:num_gpus=16"]
    # GPU 0's NIC carries 64 MiB out where its tokens stay on its rail; else each NIC carries 15 MiB to its own rail.
    for algorithm, num_mib in (("hierarchical", 64), ("direct", 15)):
        result = windtunnel(*words, "--backend", "flow", "--algorithm", algorithm, "--cuda-graph", "--json")
        assert num_mib * 2**20 / 50e9 < json.loads(result.stdout)["seconds"] < 1.2 * num_mib * 2**20 / 50e9
    file.write_text("1,2\n3,x\n")
    answer = windtunnel(*words, "--backend", "flow", "--ranks", "2")
    assert answer.code == 2
    assert f"{file}, line 2: 'x' is not a whole number of bytes" in answer.stderr


def test_algorithm_and_protocol_can_be_chosen(windtunnel: Command) -> None:
    words = ["collective", "--op", "all_reduce", "--size", "4GiB", "--topology", "spectrum_x:num_gpus=64", "--json"]

    def seconds(*more: str) -> float:
        return float(json.loads(windtunnel(*words, *more).stdout)["seconds"])

    by_ring = {name: seconds("--algorithm", "ring", "--protocol", name) for name in ("simple", "ll128", "ll")}
    assert by_ring["simple"] < by_ring["ll128"] < by_ring["ll"]
    assert seconds("--algorithm", "collnet") < by_ring["simple"]
    flow = ("--backend", "flow", "--algorithm", "ring")
    # LL reaches 35 GB/s of bus bandwidth, where NCCL's rings of `simple` reach most of eight NICs.
    assert seconds(*flow, "--protocol", "ll") == pytest.approx(by_ring["ll"], rel=0.15)
    assert seconds(*flow) == pytest.approx(by_ring["simple"], rel=0.15)


def test_failures_slow_what_crosses_them(windtunnel: Command) -> None:
    words = ["collective", "--op", "all_to_all", "--size", "64MiB", "--backend", "flow", "--json"]
    words += ["--topology", "dcn_plus:num_gpus=16,gpus_per_leaf=8,num_spines=2"]
    whole = json.loads(windtunnel(*words).stdout)["seconds"]
    assert json.loads(windtunnel(*words, "--fail-node", "20").stdout)["seconds"] > 1.1 * whole
    answer = windtunnel(*words, "--fail-node", "20", "--fail-node", "21")
    assert answer.code == 2
    assert "there is no path" in answer.stderr
    closed = windtunnel(*words, "--fail-node", "20", "--backend", "analytic")
    assert "not between switches; --backend flow" in closed.stderr


def test_links_inside_a_row_are_drawn_as_arches(windtunnel: Command, tmp_path: Path) -> None:
    """The 32 links of a 4 x 4 torus would all lie on one line."""
    assert windtunnel("topology", "show", "torus:dimensions=[4,4]", "--html", str(tmp_path / "torus.html")).code == 0
    drawing = (tmp_path / "torus.html").read_text()
    assert drawing.count("Q") == 32
    assert windtunnel("topology", "show", "dgx_h100", "--html", str(tmp_path / "node.html")).code == 0
    assert 'd="M' in (tmp_path / "node.html").read_text()


def test_what_happened_is_written_flow_by_flow_and_link_by_link(windtunnel: Command, tmp_path: Path) -> None:
    call = ("collective", "--op", "all_to_all", "--size", "64KiB", "--topology", "spectrum_x:num_gpus=16,num_spines=1")
    files = {name: tmp_path / f"{name}.csv" for name in ("times", "links")}
    option = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert windtunnel(*call, "--backend", "packet", *option).code == 0
    rows = {name: [line.split(",") for line in path.read_text().splitlines()] for name, path in files.items()}
    times = {name: [float(row[place]) for row in rows["times"][1:]] for place, name in enumerate(rows["times"][0])}
    # A flow for each pair, and one more to the rank on the right rail for pairs of other servers and rails.
    assert len(times["source"]) == 16 * 15 + 16 * 7
    assert all(0 < a < b < c for a, b, c in zip(times["begin_us"], times["sent_us"], times["finish_us"], strict=True))
    head, *links = rows["links"]
    carried = [float(row[head.index("bytes")]) for row in links if row[1] == "0"]
    assert sum(carried) >= 15 * 4096
    assert all(0 < float(row[head.index("busy_fraction")]) <= 1 for row in links)
    assert max(float(row[head.index("most_queued_bytes")]) for row in links) > 0


@pytest.mark.parametrize(
    ("backend", "option", "says"), [("analytic", "--times", "--times is for flows; the analytic backend has none")]
)
def test_what_a_backend_does_not_know_is_refused_before_anything_runs(
    windtunnel: Command, tmp_path: Path, backend: str, option: str, says: str
) -> None:
    done = windtunnel(
        *("collective", "--op", "all_reduce", "--size", "1MiB", "--topology", "dgx_h100", "--backend", backend),
        *(option, str(tmp_path / "out.csv")),
    )
    assert done.code == 2
    assert says in done.stderr
    assert not (tmp_path / "out.csv").exists()


def recorded(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


@pytest.mark.full
def test_simais_recorded_generator_commands_give_its_files(
    windtunnel: Command, reference: Path, tmp_path: Path
) -> None:
    """Every command without a failure in it makes the file of its name, where that was recorded; most were."""
    folder = reference / "simai"
    texts = {recorded(path) for path in (folder / "topo").glob("*.gz")}
    commands = (folder / "topo_commands.txt").read_text().splitlines()
    made = set()
    for number, line in enumerate(commands):
        command, _, name = line.partition(" -> ")
        flags = shlex.split(command.removeprefix("python3 gen_Topo_Template.py"))
        path = tmp_path / str(number)
        if windtunnel("topology", "generate", *flags, "-o", str(path)).code == 0:
            made.add(path.read_text())
            file = folder / "topo" / f"{name}.gz"
            assert not name or not file.exists() or path.read_text() == recorded(file), line
    assert len(made & texts) > 0.8 * len(texts)


@pytest.mark.parametrize("file", entries("simai/analytical/*.cmd"))
def test_simais_recorded_analytical_commands_give_their_reports(
    windtunnel: Command, reference: Path, file: str, tmp_path: Path
) -> None:
    folder = reference / "simai"
    line = (folder / "analytical" / file).read_text().splitlines()[0]
    given = shlex.split(line.removeprefix("cmd: "))[1:]
    flags = dict(zip(given[::2], given[1::2], strict=True))
    name = Path(flags.pop("-w")).name
    workload, report = tmp_path / name, tmp_path / "EndToEnd.csv"
    workload.write_text(recorded(folder / "workloads" / f"{name}.gz"))
    prefix = flags.pop("-r")
    for flag in ("-g", "-r_f", "-v", "-l"):
        flags.pop(flag, None)
    options = [part for pair in flags.items() for part in pair]
    done = windtunnel("network", "run", "-w", str(workload), "--compat", "simai", *options, "-o", str(report))
    assert done.code == 0, done.stderr
    theirs = recorded(folder / "analytical" / f"{prefix}EndToEnd.csv.gz")
    assert report.read_text().split("\n", 2)[2] == theirs.split("\n", 2)[2]
    totals = [text.splitlines()[1].partition(",")[2] for text in (report.read_text(), theirs)]
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    ("topology", "headline"),
    [
        ("spectrum_x:num_gpus=16,num_spines=2", "2,880 Gbps to a scale-up switch and 400 Gbps to a leaf."),
        ("torus", "2,400 Gbps to its neighbours."),
    ],
)
def test_a_page_of_a_topology_says_what_a_gpu_has(topology: str, headline: str) -> None:
    assert topology_report(fabric_of(topology)).verdict.endswith(headline)


@pytest.mark.parametrize(
    "words",
    [("all-reduce", "--bytes", "1MiB"), ("--op", "ncclAllReduce", "--message-size", "1MiB"), ("all_reduce_perf",)],
)
def test_a_collective_is_known_by_the_names_of_nccl(windtunnel: Command, words: tuple[str, ...]) -> None:
    done = windtunnel("collective", *words, "--size", "1MiB", "--device", "h100_sxm")
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("all_reduce of 1.00 MiB")


def test_a_kind_of_network_that_is_not_known_is_refused_with_those_that_are(windtunnel: Command) -> None:
    done = windtunnel("collective", "all_reduce", "--topology", "fat_tree:network=token_ring", "--bytes", "1MiB")
    assert done.code == 2
    assert "is 'token_ring', which is not known" in done.stderr
    assert done.stderr.rstrip().endswith("known here: efa, ethernet, ici, infiniband, slingshot, tcpx, tcpxo")


ASSUMED = "are taken for InfiniBand, as nothing says their kind"


def test_links_whose_kind_nothing_says_are_announced(windtunnel: Command, workload: str, tmp_path: Path) -> None:
    file = str(tmp_path / "sixteen.txt")
    windtunnel("topology", "generate", "spectrum_x", "--num-gpus", "16", "-bw", "200Gbps", "--out", file)
    words = ("collective", "all_gather", "--size", "1GiB")
    for given in (["--size", "64MiB"], ["--size", "1MiB,64MiB"]):
        assert f"note: the links between servers of sixteen.txt {ASSUMED}" in windtunnel(
            *words[:2], *given, "--topology", file
        ).stdout.replace("\n", " ")
    (note,) = json.loads(windtunnel(*words, "--topology", file, "--json").stdout)["notes"]
    assert ASSUMED in note
    known = json.loads(windtunnel(*words, "--topology", f"{file}:network=ethernet", "--json").stdout)
    assumed = json.loads(windtunnel(*words, "--topology", file, "--json").stdout)
    assert "notes" not in known
    assert known["seconds"] > assumed["seconds"]
    run = windtunnel("network", "run", "--workload", workload, "--topology", file, "--json")
    assert json.loads(run.stdout)["notes"] == [note]
    run = windtunnel("network", "run", "--workload", workload, "--topology", file, "--compat", "simai", "-b", "flow")
    for quiet in (run, windtunnel(*words, "--topology", "spectrum_x:num_gpus=16")):
        assert ASSUMED not in quiet.stdout + quiet.stderr
    for given, hint in (("network=ethernt", "did you mean ethernet?"), ("num_gpus=8", "known: network=infiniband, ")):
        done = windtunnel(*words, "--topology", f"{file}:{given}")
        assert done.code == 2
        assert hint in done.stderr


@pytest.mark.full
def test_a_node_of_ones_own_whose_links_have_no_known_kind_is_announced(windtunnel: Command, tmp_path: Path) -> None:
    node = (files("windtunnel") / "catalog/nodes/dgx_h100.yaml").read_text()
    own = tmp_path / "own.yaml"
    own.write_text(node.replace("name: dgx_h100", "name: own").replace("infiniband_ndr", "rails"))
    hardware = ("--device", "h100_sxm", "--node", str(own), "--json")
    training = ("--num-devices", "16", "--tp", "8", "--sequence-tokens", "4096", "--global-batch", "16")
    document = json.loads(windtunnel("train", "--model", "llama-3.1-8b", *training, *hardware).stdout)
    assert document["notes"][0].startswith(f"the links between servers of own {ASSUMED}")
    load = ("--rate", "1", "--num-requests", "2", "--input-tokens", "64", "--output-tokens", "4")
    for tp, notes in (("16", document["notes"]), ("8", [])):
        served = windtunnel("simulate", "--model", "llama-3.1-70b", "--tp", tp, *load, *hardware)
        assert json.loads(served.stdout).get("notes", []) == notes
