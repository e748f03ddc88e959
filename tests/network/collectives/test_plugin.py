"""A collective algorithm of an installed package: one file, used by its name wherever a shipped one is."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plugin_package import installed_plugin
from windtunnel.cli import run as windtunnel
from windtunnel.errors import InputError
from windtunnel.formats.simai.report import flow_table_csv
from windtunnel.network.collectives.call import ALGORITHMS, CollectiveChoices
from windtunnel.network.collectives.run import flows_like, run_collective
from windtunnel.network.fabric import Fabric
from windtunnel.network.settings import GBPS, NetworkSettings
from windtunnel.network.topology import SpectrumX

STAR = '''
"""An all-reduce in which all ranks send to the first, which adds and sends the sum back."""

import numpy as np

from windtunnel.network.collectives.closed_forms import ClosedForm, Latency
from windtunnel.network.flows import flows_of, parents_from

OPERATIONS = ("all_reduce",)
CLOSED_FORM = ClosedForm(
    latencies={"simple": Latency(0.0, 0.0, 0.0)},
    applies=lambda op, ranks: op == "all_reduce",
    steps_us=lambda op, ranks, near, far: 1e6,
    on_request=True,
)


def flows(call):
    root, leaves = call.gpus[0], call.gpus[1:]
    n = len(leaves)
    source = np.concatenate([leaves, np.full(n, root)])
    destination = np.concatenate([np.full(n, root), leaves])
    parents = np.concatenate([np.full((n, n), -1), np.tile(np.arange(n), (n, 1))])
    return flows_of(source, destination, call.size_bytes, parents=parents_from(parents), connection=np.arange(2 * n))
'''
NUM_RANKS = 4
SIZE_BYTES = 2**20
NIC = 400 * GBPS
IDEAL = NetworkSettings(send_latency_s=0.0, header_bytes=0)


@pytest.fixture
def star_files(tmp_path: Path) -> Iterator[list[Path]]:
    with installed_plugin(tmp_path, "windtunnel.collectives", "star", STAR) as files:
        yield files


@pytest.fixture
def flat() -> Fabric:
    """Four GPUs in servers of one, on one leaf."""
    return SpectrumX(num_gpus=NUM_RANKS, gpus_per_server=1, num_spines=1, latency_s=0.0, network="infiniband").build()


def test_an_algorithm_is_one_file(star_files: list[Path]) -> None:
    assert len(star_files) == 1
    assert "star" in ALGORITHMS.names()


@pytest.mark.usefixtures("star_files")
@pytest.mark.parametrize("backend", ["flow", "packet"])
def test_its_flows_are_simulated(flat: Fabric, backend: str) -> None:
    run = run_collective(flat, "all_reduce", SIZE_BYTES, NUM_RANKS, backend, IDEAL, CollectiveChoices("star"))
    assert (run.algorithm, run.source) == ("star", f"{backend} level, 6 flows")
    # Three buffers cross the root's NIC each way, one way after the other.
    assert run.seconds == pytest.approx(2 * 3 * SIZE_BYTES / NIC, rel=0.02)


@pytest.mark.usefixtures("star_files")
def test_the_command_line_takes_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "collective --op all_reduce --size 1MiB --topology dgx_h100 --backend flow --algorithm star --json"
    assert windtunnel(arguments.split()) == 0
    assert json.loads(capsys.readouterr().out)["algorithm"] == "star"


@pytest.mark.usefixtures("star_files")
def test_its_closed_form_is_used_where_it_is_asked_for(flat: Fabric) -> None:
    run = run_collective(flat, "all_reduce", SIZE_BYTES, NUM_RANKS, choices=CollectiveChoices("star"))
    assert (run.algorithm, run.backend) == ("star", "analytic")
    assert run.seconds > 1.0
    assert run_collective(flat, "all_reduce", SIZE_BYTES, NUM_RANKS).algorithm != "star"


@pytest.mark.usefixtures("star_files")
def test_an_operation_that_it_cannot_do_is_refused(flat: Fabric) -> None:
    with pytest.raises(InputError, match="'star' has no flows of all_gather") as error:
        run_collective(flat, "all_gather", SIZE_BYTES, NUM_RANKS, "flow", IDEAL, CollectiveChoices("star"))
    assert error.value.hint == "these have: pat, ring, torus"


@pytest.mark.usefixtures("star_files")
def test_it_is_not_written_as_an_algorithm_of_nccl(flat: Fabric) -> None:
    run = run_collective(flat, "all_reduce", SIZE_BYTES, NUM_RANKS, "flow", IDEAL, CollectiveChoices("star"))
    flows, algorithm = flows_like(run)
    assert algorithm == "star"
    with pytest.raises(InputError, match="no number for the algorithm 'star'"):
        next(flow_table_csv(flows, "all_reduce", SIZE_BYTES, algorithm))
    assert np.count_nonzero(flows.destination == 0) == 3


def test_an_algorithm_of_flows_alone_names_the_backend_that_runs_it(tmp_path: Path, flat: Fabric) -> None:
    flows_alone = STAR.replace("CLOSED_FORM = ClosedForm", "_FORM = ClosedForm")
    with installed_plugin(tmp_path, "windtunnel.collectives", "star", flows_alone):
        with pytest.raises(InputError, match="NCCL has no star") as refused:
            run_collective(flat, "all_reduce", SIZE_BYTES, NUM_RANKS, choices=CollectiveChoices("star"))
        assert "--backend flow" in str(refused.value.hint)


def test_without_the_package_the_name_is_unknown(flat: Fabric) -> None:
    with pytest.raises(InputError, match=r"(?m)^unknown collective algorithm 'star'$"):
        run_collective(flat, "all_reduce", SIZE_BYTES, NUM_RANKS, "flow", choices=CollectiveChoices("star"))
