"""Prices of tasks: collectives inside a node, and products in a step whose products are all in one format."""

import pytest
from msgspec.structs import replace

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model import operators as ops
from windtunnel.network.collectives.call import Ranks
from windtunnel.network.collectives.closed_forms import closed_form
from windtunnel.pricing.estimator import Coverage, Estimate
from windtunnel.training.costs import message_seconds
from windtunnel.training.figures import FIGURES
from windtunnel.training.job import TrainingJob, TrainingParallelism, TrainingPrecision
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group, Rank
from windtunnel.training.pricing import pricer
from windtunnel.training.setup import resolve


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


def product_s(device: str, *formats: str) -> list[float]:
    """Seconds of one bf16 product in jobs that compute in `formats` and share their prices."""
    setups = [
        resolve(
            TrainingJob(
                model="meta-llama/Meta-Llama-3-8B",
                device=device,
                num_devices=8,
                sequence_tokens=4096,
                global_batch=8,
                precision=TrainingPrecision(compute=compute),
            )
        )
        for compute in formats
    ]
    prices = pricer(Slow(), setups[0].device, setups[0].node)
    product = Task("product", ops.Gemm(4096, 4096, 4096))
    return [prices.of_job(Rank(setup)).task(product).seconds for setup in setups]


def test_products_of_a_step_all_in_bf16_are_slower_on_blackwell_than_the_same_products_in_another_step():
    whole, among_fp8, whole_again, in_fp16 = product_s("b200_sxm", "bf16", "fp8", "bf16", "fp16")
    assert whole / among_fp8 == pytest.approx(1 / FIGURES.whole_step_rates["blackwell"]["bf16"])
    assert whole_again == whole == in_fp16
    whole, among_fp8 = product_s("h100_sxm", "bf16", "fp8")
    assert whole == among_fp8


def test_a_message_between_stages_crosses_nodes_as_often_as_neighbouring_stages_lie_in_two() -> None:
    split = TrainingParallelism(tp=4, pp=4)
    job = TrainingJob("gemma-2-9b", "h100_sxm", 4096, 16, num_devices=16, parallelism=split)
    setup = resolve(job)
    prices = pricer(Slow(), setup.device, setup.node)
    message = ops.Collective("send_recv", 4096 * 3584 * 2 / 4, 2, 2)
    across = prices.task(Task("send_recv", message, 1.0, Group.PIPELINE)).seconds
    inside = 1.0 + FIGURES.collective_launch_s
    assert message_seconds(Rank(setup), prices) == pytest.approx((2 * inside + across) / 3)


def test_collectives_between_nodes_take_nccls_model_at_the_share_of_the_cards_that_a_job_reaches():
    where = catalog.node("dgx_h100")
    prices = pricer(Slow(), catalog.device(where.device), where)
    assert where.scale_out is not None
    card = where.scale_out.bytes_per_s * FIGURES.network_efficiency
    ranks = Ranks(32, 4, where.scale_up.bytes_per_s, card)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        task = Task(op, ops.Collective(op, 64e6, 32, 4), 1.0, Group.DATA)
        alone = closed_form(op, 64e6, ranks)[0]
        assert prices.task(task).seconds == pytest.approx(alone + FIGURES.collective_launch_s)
    unlinked = replace(where, scale_out=None)
    with pytest.raises(InputError, match="needs a link between nodes"):
        pricer(Slow(), catalog.device(where.device), unlinked).task(task)
