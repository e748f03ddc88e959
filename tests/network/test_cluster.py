"""Collectives of jobs and replicas on the network of their servers."""

from dataclasses import replace

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.operators import Collective
from windtunnel.network.cluster import OnNetwork, OverNodes, between_nodes, groups_of, handoff_bytes_per_s, network_of
from windtunnel.network.collectives.call import Ranks
from windtunnel.network.collectives.closed_forms import closed_form
from windtunnel.network.collectives.run import run_collective
from windtunnel.network.settings import ClusterNetwork
from windtunnel.network.topology import NodeRails
from windtunnel.pricing.estimator import RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode
from windtunnel.training.job import TrainingJob
from windtunnel.training.layers.rank import Group, Rank, group_ranks
from windtunnel.training.setup import TrainingSetup, resolve
from windtunnel.training.step import simulate_training, training_prices

DEVICE = catalog.device("h100_sxm")
NODE = catalog.default_node(DEVICE)


def setup_of(**changes: object) -> TrainingSetup:
    raw = {
        "model": "meta-llama/Llama-3.1-8B",
        "device": "h100_sxm",
        "num_devices": 32,
        "sequence_tokens": 4096,
        "global_batch": 64,
        "parallelism": {"tp": 2, "pp": 2, "cp": 2},
        **changes,
    }
    return resolve(decode(raw, TrainingJob))


@pytest.mark.parametrize(
    "group", [Group.TENSOR, Group.CONTEXT, Group.DATA, Group.EXPERTS, Group.EXPERTS_DATA, Group.REPLICAS]
)
def test_groups_are_those_that_ranks_are_in(group: Group) -> None:
    setup = setup_of(
        model="mistralai/Mixtral-8x7B-v0.1",
        parallelism={"tp": 2, "pp": 2, "ep": 2, "experts_tp": 2},
        sharding={"zero": 1, "group": 4},
    )
    rank = Rank(setup)
    num_ranks, stride = rank.layout(group)
    rows = groups_of(Collective("all_gather", 1.0, num_ranks), 32, stride)
    assert sorted(map(tuple, rows.tolist())) == sorted({group_ranks(rank, group, number) for number in range(32)})


def test_stages_send_to_the_next_one() -> None:
    pairs = groups_of(Collective("send_recv", 1.0, 2), 12, 4)
    np.testing.assert_array_equal(pairs, [(rank, rank + 4) for rank in range(8)])


def test_first_and_last_stage_sum_the_gradients_of_an_embedding_that_they_share() -> None:
    rank = Rank(setup_of(parallelism={"tp": 2, "pp": 4}))
    pairs = groups_of(Collective("all_reduce", 1.0, 2), 32, rank.layout(Group.EMBEDDING)[1])
    np.testing.assert_array_equal(pairs, [group_ranks(rank, Group.EMBEDDING, number) for number in range(8)])


def test_an_exchange_takes_what_the_links_between_leaves_carry() -> None:
    """32 ranks exchange all with all; a leaf of 32 ports down and 8 up carries what crosses it at a quarter."""
    topology = "fat_tree:num_gpus=64,radix=40,oversubscription=4"
    settings = ClusterNetwork(backend="flow", routing="spray", topology=topology)
    op = Collective("all_to_all", 1.0, 64, 8)
    size_bytes = 64 * 2**20
    network = network_of(settings, NODE, 64)
    crossing = 32 * size_bytes / 2 / (8 * 50e9)
    assert network.seconds(op, size_bytes) == pytest.approx(crossing * (1 + 66 / 4096), rel=0.01)


@pytest.mark.compiled  # millions of steps of the flows' rates
def test_a_family_of_sizes_lies_between_single_ones() -> None:
    network = network_of(ClusterNetwork(backend="flow"), NODE, 16)
    on = OnNetwork(RooflineEstimator(Roofline(DEVICE, NODE)), network, 16)
    sizes = np.array([3e5, 1e6, 5e6, 4e7])
    family = on.estimate(Collective("all_reduce", sizes, 16, 2)).seconds
    single = [on.estimate(Collective("all_reduce", size, 16, 2)).seconds for size in sizes]
    np.testing.assert_allclose(family, single, rtol=0.08)
    assert (np.diff(family) > 0).all()


def test_what_stays_in_a_node_is_not_the_networks() -> None:
    plain = RooflineEstimator(Roofline(DEVICE, NODE))
    on = OnNetwork(plain, network_of(ClusterNetwork(), NODE, 16), 16)
    op = Collective("all_reduce", 1e6, 8)
    assert on.estimate(op) == plain.estimate(op)


def test_oversubscription_slows_a_job_down_and_rails_agree_with_closed_forms() -> None:
    plain = RooflineEstimator(Roofline(DEVICE, NODE))

    def step_s(**network: object) -> float:
        changes = {"network": network} if network else {}
        sharded = {"sharding": {"zero": 3}, "framework": "fsdp2", "parallelism": {"tp": 1}, "global_batch": 32}
        return simulate_training(setup_of(**sharded, **changes), plain).step_s

    closed, rails = step_s(), step_s(backend="flow")
    assert rails == pytest.approx(closed, rel=0.1)
    assert step_s(backend="analytic") == pytest.approx(closed, rel=0.1)
    narrow = step_s(backend="flow", topology="fat_tree:num_gpus=32,radix=17,oversubscription=16,gpus_per_server=8")
    assert narrow > 1.5 * rails


def test_a_layout_of_a_search_is_timed_by_its_own_groups() -> None:
    setup = setup_of(network={"backend": "flow"})
    prices = training_prices(setup, RooflineEstimator(Roofline(DEVICE, NODE)))
    network = prices.network
    other = prices.of_job(Rank(setup_of(network={"backend": "flow"}, parallelism={"tp": 8, "pp": 1}))).network
    assert network is not None
    assert other is not None
    op = Collective("all_reduce", 1e8, 4, 4)
    assert network.rank.layout(Group.DATA) != other.rank.layout(Group.DATA)
    assert other.estimate(op, Group.DATA).seconds == pytest.approx(
        network.network.seconds(op, 1e8, stride=8), rel=1e-12
    )


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ({"topology": "spectrum_x:num_gpus=16"}, "has 16 GPUs, and 32 are needed"),
        ({"topology": "spectrum_x:num_gpus=64,gpus_per_server=4"}, "has 4 of the devices; one"),
        ({"topology": "no_such_network"}, "there is no topology"),
    ],
)
def test_a_topology_that_does_not_suit_is_refused(network: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        training_prices(setup_of(network=network), RooflineEstimator(Roofline(DEVICE, NODE)))


def test_compat_is_refused() -> None:
    with pytest.raises(InputError, match="compat is for"):
        setup_of(network={"compat": "simai"})


@pytest.mark.compiled  # millions of steps of the flows' rates
def test_a_handoff_gets_its_share_of_the_links_between_leaves() -> None:
    """16 GPUs below one leaf send to 16 below another over 4 uplinks of a NIC's rate each; DCQCN favours some."""
    settings = ClusterNetwork(
        backend="flow", routing="spray", topology="fat_tree:num_gpus=32,radix=20,oversubscription=4"
    )
    network = network_of(settings, NODE, 32)
    ranks = np.arange(32).reshape(2, 8, 2)
    each = handoff_bytes_per_s(network, ranks[0], ranks[1])
    assert each == pytest.approx(2 * 50e9 / 4 / (1 + 66 / 4096), rel=0.02)
    assert handoff_bytes_per_s(network, ranks[0][:1], ranks[1]) == pytest.approx(2 * 50e9 / (1 + 66 / 4096), rel=0.01)


@pytest.mark.parametrize(("node", "algorithm"), [("dgx_a100", "tree"), ("dgx_h100", "nvls_tree")])
def test_only_switches_that_add_do_so_between_nodes(node: str, algorithm: str) -> None:
    """The times of a job between two nodes are those of `collective`, where NVSwitches add since Hopper."""
    run = run_collective(NodeRails(node=node, num_servers=2).build(), "all_reduce", 2**30, 16)
    estimate = between_nodes(Collective("all_reduce", 2.0**30, 16, 2), catalog.node(node))
    assert run.algorithm == algorithm
    assert float(estimate.seconds) == pytest.approx(run.seconds, rel=0.01)


def test_pairs_of_cards_reach_others_over_the_host_between_nodes_too() -> None:
    """Four A100 PCIe a node, joined by NVLink in pairs: four in one node and eight in two wait for PCIe, not NVLink."""
    node = catalog.node("a100_pairwise_nvlink")
    assert (node.link_among(2), node.link_among(4)) == (node.scale_up, node.host)
    joined = catalog.behind_switch(node, node.scale_up.bytes_per_s)
    reduce = Collective("all_reduce", 2.0**22, 8, 2)
    assert float(between_nodes(reduce, node).seconds) > 2 * float(between_nodes(reduce, joined).seconds)


def test_without_a_network_rings_between_nodes_take_what_nccls_model_says() -> None:
    """28 KiB over two servers of eight H100: a tree with LL, 26 us (`network run` of the same collective)."""
    plain = RooflineEstimator(Roofline(DEVICE, NODE))
    over = OverNodes(plain, NODE)
    reduce = Collective("all_reduce", 28 * 1024.0, 16, 2)
    assert NODE.scale_out is not None
    ranks = Ranks(16, 2, NODE.scale_up.bytes_per_s, NODE.scale_out.bytes_per_s)
    assert float(over.estimate(reduce).seconds) == pytest.approx(closed_form("all_reduce", 28 * 1024, ranks)[0])
    assert float(over.estimate(reduce).seconds) > 1.5 * float(plain.estimate(reduce).seconds)
    sizes = np.array([2.0**14, 3e4, 2.0**20])
    several = np.asarray(over.estimate(replace(reduce, message_bytes=sizes)).seconds)
    assert several[[0, 2]] == pytest.approx([closed_form("all_reduce", size, ranks)[0] for size in sizes[[0, 2]]])
    assert several[0] < several[1] < several[2]
    for other in (replace(reduce, span_nodes=1), replace(reduce, op="all_to_all")):
        assert over.estimate(other).seconds == plain.estimate(other).seconds
