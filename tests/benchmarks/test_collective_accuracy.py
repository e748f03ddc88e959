"""Published collectives: systems are known by what logs call them."""

import pytest

from collective_accuracy import nccl_seconds, node_of
from windtunnel.errors import InputError


@pytest.mark.parametrize(
    ("system", "node"),
    [
        ("H100 SXM (CoreWeave, 8x8, IB NDR)", "dgx_h100"),
        ("8x NVIDIA H100 SXM (AWS p5.48xlarge, EFA)", "aws_p5"),
        ("AMD Instinct MI300X 8-GPU (Azure ND MI300X v5)", "mi300x"),
        ("GB300 NVL72", "gb300_nvl72"),
        ("B300 8-GPU node", "hgx_b300"),
        ("H200 SXM (AWS p5en.48xlarge)", "aws_p5en"),
        ("B300 (AWS P6-B300, EFA)", "aws_p6_b300"),
    ],
)
def test_a_system_is_known_by_its_gpu_and_its_cloud(system: str, node: str) -> None:
    assert node_of(system) == node


@pytest.mark.parametrize("system", ["unidentified 4-node cluster", "H100 PCIe", "H100 NVL pair"])
def test_a_system_that_does_not_say_is_refused(system: str) -> None:
    with pytest.raises(InputError, match="which GPUs"):
        node_of(system)


def test_racks_of_72_are_domains_of_their_own() -> None:
    row = {"system": "GB200 NVL72", "algo": "default", "collective": "all_reduce", "size_bytes": str(2**33)}
    one, two, four = (nccl_seconds({**row, "n_gpus": str(72 * racks), "nodes": str(18 * racks)}) for racks in (1, 2, 4))
    # A tree between two sends a buffer once, as eight network cards do in the time of the switches.
    assert two > 1.02 * one
    assert four > 1.5 * one


def test_a_system_may_name_its_network() -> None:
    row = {"algo": "default", "collective": "all_reduce", "size_bytes": str(2**33), "n_gpus": "32", "nodes": "4"}
    azure, roce = (nccl_seconds({**row, "system": f"A100 ({network})"}) for network in ("Azure", "RoCE"))
    assert roce == pytest.approx(azure * 0.967 / 0.908, rel=0.01)
