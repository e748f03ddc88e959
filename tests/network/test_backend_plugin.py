"""A network backend of an installed package: one file, used by its name wherever a shipped one is."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugin_package import installed_plugin
from windtunnel import catalog
from windtunnel.cli import run as windtunnel
from windtunnel.model.operators import Collective
from windtunnel.network.cluster import network_of
from windtunnel.network.collectives.call import CollectiveChoices
from windtunnel.network.collectives.run import run_collective
from windtunnel.network.settings import BACKENDS, ClusterNetwork
from windtunnel.network.topology import NodeRails
from windtunnel.schema import decode

HOCKNEY = '''
"""Hockney's model: every flow takes a latency and its bytes over one rate, whatever else is on the network."""

import numpy as np

from windtunnel.network.paths import FlowTimes

LATENCY_S, BYTES_PER_S = 1e-6, 1e9


def run_flows(fabric, flows, settings):
    begin, finish = flows.start_s.copy(), np.zeros(len(flows))
    for flow in np.argsort(flows.step, kind="stable"):
        begin[flow] = max([begin[flow], *finish[flows.parents_of(flow)]])
        finish[flow] = begin[flow] + LATENCY_S + flows.size_bytes[flow] / BYTES_PER_S
    unused = np.zeros(2 * fabric.num_links)
    return FlowTimes(begin, finish, finish, unused, unused > 0, len(flows), float(finish.max()))
'''
FABRIC = NodeRails(node="dgx_h100").build()
COMMAND = "collective --op send_recv --size 1MB --topology dgx_h100 --backend hockney --protocol simple --cuda-graph"
KERNEL_S = 8.4e-6
"""Base latency of rings and of sends with the protocol simple (NCCL src/graph/tuning.cc)."""


@pytest.fixture
def hockney_files(tmp_path: Path) -> Iterator[list[Path]]:
    with installed_plugin(tmp_path, "windtunnel.network_backends", "hockney", HOCKNEY) as files:
        yield files


def test_a_backend_is_one_file(hockney_files: list[Path]) -> None:
    assert len(hockney_files) == 1
    assert BACKENDS.names() == ("analytic", "flow", "packet", "hockney")


@pytest.mark.usefixtures("hockney_files")
def test_it_times_a_ring() -> None:
    run = run_collective(FABRIC, "all_gather", 8 * 10**6, 8, "hockney", choices=CollectiveChoices("ring", "simple"))
    assert (run.backend, run.algorithm) == ("hockney", "ring")
    # Seven steps of an eighth of the data, in eight channels, and NCCL's kernel.
    assert run.seconds == pytest.approx(7 * (1e-6 + 1e6 / 8 / 1e9) + KERNEL_S)


@pytest.mark.usefixtures("hockney_files")
def test_the_network_of_a_job_takes_it() -> None:
    settings = decode({"backend": "hockney", "topology": "dgx_h100:num_servers=2"}, ClusterNetwork)
    network = network_of(settings, catalog.node("dgx_h100"), 16)
    # Messages have no LL128, and LL sends twice the bytes.
    run = network.run(Collective("send_recv", 1e6, 2), 1e6, stride=8)
    assert (run.protocol, run.seconds) == ("simple", pytest.approx(1e-6 + 1e-3 + 8.4e-6))


@pytest.mark.usefixtures("hockney_files")
def test_the_command_line_takes_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert windtunnel([*COMMAND.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["backend"], answer["seconds"]) == ("hockney", pytest.approx(1.001e-3 + KERNEL_S))


@pytest.mark.parametrize(
    ("good", "wrong"),
    [("= 1e-6,", "= float('nan'),"), ("= 1e-6,", "= -1.0,"), ("FlowTimes(begin,", "FlowTimes(begin[:0],")],
)
def test_times_that_no_flows_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], good: str, wrong: str
) -> None:
    assert good in HOCKNEY
    with installed_plugin(tmp_path, "windtunnel.network_backends", "hockney", HOCKNEY.replace(good, wrong)):
        assert windtunnel(COMMAND.split()) == 2
    assert "the network backend 'hockney' returned times that no flows have" in capsys.readouterr().err
