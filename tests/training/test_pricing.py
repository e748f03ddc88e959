"""Prices of collectives inside a node: measured tables, or the links of a server of PCIe cards."""

from windtunnel import catalog
from windtunnel.model import operators as ops
from windtunnel.pricing.estimator import Coverage, Estimate
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group
from windtunnel.training.pricing import pricer


class Slow:
    """An estimator of a server whose cards reach each other by the host's memory."""

    def estimate(self, op: ops.Op) -> Estimate:
        return Estimate(1.0, Coverage.MEASURED, f"a server's {op.kind}", 0.0)


def seconds(node: str) -> float:
    where = catalog.node(node)
    reduce = ops.Collective("all_gather", 64e6, 4, 1)
    return pricer(Slow(), catalog.device(where.device), where).task(Task("gather", reduce, 1.0, Group.TENSOR)).seconds


def test_pcie_cards_use_their_links_where_a_measured_server_did_not():
    assert 48e6 / 32e9 < seconds("l40s_pcie") < 48e6 / 15e9
    assert seconds("dgx_h100") > 1.0
