"""Topologies against their closed-form counts, and fabrics that are wrong."""

import msgspec
import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.network.collectives.algorithms import torus
from windtunnel.network.collectives.run import run_collective
from windtunnel.network.fabric import NodeKind, check, connected_groups, without
from windtunnel.network.topology import (
    AlibabaHpn,
    DcnPlus,
    Dragonfly,
    FatTree,
    NodeRails,
    NvLinkDomains,
    SpectrumX,
    Topology,
    Torus,
    TwoTier,
    fabric_of,
    nodes_of,
)

EVERY: list[Topology] = [
    SpectrumX(num_gpus=128, num_spines=8),
    AlibabaHpn(num_gpus=64, num_spines=16),
    AlibabaHpn(num_gpus=64, num_spines=16, dual_plane=True),
    DcnPlus(num_gpus=128),
    DcnPlus(num_gpus=128, dual_tor=True),
    TwoTier(num_gpus=32, rail_optimised=True),
    FatTree(num_gpus=128, radix=16),
    FatTree(num_gpus=128, radix=8, num_tiers=3),
    FatTree(num_gpus=96, radix=24, oversubscription=3.0),
    NvLinkDomains(num_gpus=144),
    NvLinkDomains(num_gpus=1152, gpus_per_server=576),
    NodeRails(node="dgx_h100", num_servers=3),
    NodeRails(node="a100_pairwise_nvlink"),
    Torus(dimensions=(4, 3, 2)),
    Dragonfly(),
]


@pytest.mark.parametrize("topology", EVERY, ids=lambda topology: type(topology).__name__)
def test_every_fabric_is_sound(topology: Topology) -> None:
    check(topology.build())


@pytest.mark.parametrize(
    ("topology", "header"),
    [
        # nodes, scale-up switches, other switches and links of SimAI 1.6's own generator
        (SpectrumX(), (4736, 512, 128, 12288)),
        (AlibabaHpn(), (17640, 1920, 360, 74880)),
        (AlibabaHpn(num_gpus=64, num_spines=16, dual_plane=True), (104, 8, 32, 320)),
        (DcnPlus(num_gpus=256, num_spines=64), (356, 32, 68, 768)),
        (DcnPlus(num_gpus=128, dual_tor=True), (154, 16, 10, 400)),
        (SpectrumX(num_gpus=144, gpus_per_server=72, leaf_ports_up=72, num_spines=18), (236, 2, 90, 1584)),
    ],
)
def test_counts_are_those_of_simai(topology: Topology, header: tuple[int, ...]) -> None:
    fabric = topology.build()
    switches = [len(fabric.nodes_of(kind)) for kind in (NodeKind.SCALE_UP_SWITCH, NodeKind.SWITCH)]
    assert (fabric.num_nodes, *switches, fabric.num_links) == header


def test_a_k_ary_fat_tree_has_k_cubed_over_four_hosts() -> None:
    # Al-Fares et al. 2008: k = 8 gives 128 hosts, 32 leaves, 32 aggregation and 16 core switches.
    fabric = FatTree(num_gpus=128, gpus_per_server=1, radix=8, num_tiers=3).build()
    assert [len(fabric.nodes_of(NodeKind.SWITCH, tier)) for tier in (1, 2, 3)] == [32, 32, 16]
    ports = np.bincount(np.concatenate([fabric.link_a, fabric.link_b]), minlength=fabric.num_nodes)
    assert set(ports[fabric.kind == NodeKind.SWITCH].tolist()) == {8}


def test_a_torus_has_two_links_a_dimension_each() -> None:
    fabric = Torus(dimensions=(4, 4, 4)).build()
    ports = np.bincount(np.concatenate([fabric.link_a, fabric.link_b]))
    assert set(ports.tolist()) == {6}


def test_pairs_are_bridged() -> None:
    fabric = NodeRails(node="a100_pairwise_nvlink").build()
    pairs = {(int(a), int(b)) for a, b in zip(fabric.link_a, fabric.link_b, strict=True) if b < fabric.num_gpus}
    assert pairs == {(0, 1), (2, 3)}


def test_failures_are_taken_out_and_seen() -> None:
    fabric = SpectrumX(num_gpus=16, num_spines=1).build()
    leaf = int(fabric.nodes_of(NodeKind.SWITCH, 1)[0])
    left = without(fabric, nodes=(leaf,))
    assert left.num_links == fabric.num_links - 3
    check(left)  # GPU 0 still has NVLink
    spine = int(fabric.nodes_of(NodeKind.SWITCH, 2)[0])
    assert len(set(connected_groups(without(fabric, nodes=(spine,)))[:16].tolist())) == 1
    alone = without(fabric, links=((0, 16), (0, leaf)))
    with pytest.raises(InputError, match="cannot reach GPU 0"):
        check(alone)
    with pytest.raises(InputError, match="no link between 0 and 1"):
        without(fabric, links=((0, 1),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link_b": 99999}, "it joins 0 and 99999; nodes are 0 to"),
        ({"link_b": 0}, "joins node 0 to itself"),
        ({"bandwidth_bytes_per_s": 0.0}, "more than 0 is needed"),
        ({"latency_s": -1.0}, "at least 0 is needed"),
        ({"error_fraction": 1.0}, "below 1 is possible"),
        ({"link_b": 19}, "nodes 0 and 19 are joined twice"),
    ],
)
def test_a_wrong_link_is_named(change: dict[str, float], message: str) -> None:
    fabric = SpectrumX(num_gpus=16, num_spines=1).build()
    ((name, value),) = change.items()
    column = getattr(fabric, name)
    column[0] = value
    if "twice" in message:
        fabric.link_b[1] = 19
    with pytest.raises(InputError, match=message):
        check(fabric)


@pytest.mark.parametrize(
    ("schema", "fields", "message"),
    [
        (SpectrumX, {"num_gpus": 12}, "does not divide"),
        (SpectrumX, {"num_gpus": 0}, "at least 1"),
        (FatTree, {"num_tiers": 4}, "2 or 3"),
        (Torus, {"dimensions": [1]}, "at least two"),
        (Dragonfly, {"num_gpus": 720}, "can be joined"),
    ],
)
def test_parameters_that_cannot_be_are_refused(schema: type, fields: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"type": schema.__struct_config__.tag, **fields}, schema)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (SpectrumX(num_gpus=5000), "5000 GPUs need 10 segments"),
        (TwoTier(dual_plane=True), "dual_plane needs"),
        (FatTree(num_gpus=4096, radix=16), "need 512 leaves"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(topology: Topology, message: str) -> None:
    with pytest.raises(InputError, match=message):
        topology.build()


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("dgx_b200", "hgx_b200"),
        ("hgx_h100:num_servers=2", "dgx_h100"),
        ("DGX-H200", "hgx_h200"),
        ("p5.48xlarge", "aws_p5"),
        ("p6-b200", "aws_p6_b200"),
        ("dgx_gb200", "gb200_nvl72"),
    ],
)
def test_names_of_vendors_and_clouds_are_known(text, node):
    assert fabric_of(text).name.removesuffix("_2servers") == node


@pytest.mark.parametrize(
    ("text", "hint"),
    [("h100", "its usual node is dgx_h100"), ("tpu_v5p", "its usual node is tpu_v5p_host"), ("dgx_b20", "dgx_b200")],
)
def test_other_names_are_refused_with_the_nearest(text, hint):
    with pytest.raises(InputError) as caught:
        fabric_of(text)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("device", "num_devices", "lengths", "link_bytes_per_s"),
    [
        ("tpu_v5p", 64, (4, 4, 4), 90e9),
        ("tpu_v4", 128, (4, 4, 8), 45e9),
        ("tpu_v7", 2048, (8, 16, 16), 100e9),
        ("tpu_v6e", 256, (16, 16), 90e9),
        ("tpu_v5e", 32, (4, 8), 45e9),
    ],
)
def test_hosts_of_a_tpu_form_a_torus(device, num_devices, lengths, link_bytes_per_s):
    text, num = nodes_of(catalog.device(device), num_devices)
    fabric = fabric_of(text)
    assert (num, fabric.num_gpus, torus.lengths_of(fabric)) == (num_devices, num_devices, lengths)
    assert set(fabric.bandwidth_bytes_per_s) == {link_bytes_per_s}


def test_a_tpu_takes_the_rings_of_its_torus():
    """64 v5p send 6 x 90 GB/s each: 2 x 63/64 GiB take 3.9 ms, and their steps the rest."""
    text, num = nodes_of(catalog.device("tpu_v5p"), 64)
    seconds = run_collective(fabric_of(text), "all_reduce", 2**30, num).seconds
    assert 2 * 63 / 64 * 2**30 / 540e9 < seconds < 1.06 * 2 * 63 / 64 * 2**30 / 540e9


def test_a_host_of_a_tpu_is_the_node_that_was_measured():
    assert nodes_of(catalog.device("tpu_v7"), None) == ("tpu_v7_host:num_servers=1", 4)
    assert nodes_of(catalog.device("h100_sxm"), 64) == ("dgx_h100:num_servers=8", 64)


def test_devices_behind_an_assumed_switch_have_their_own_rate():
    device = msgspec.structs.replace(catalog.device("t4"), name="t5", scale_up_bytes_per_s=300e9)
    text, num = nodes_of(device, 16)
    fabric = fabric_of(text)
    to_switch = fabric.kind[fabric.directions[1]] == NodeKind.SCALE_UP_SWITCH
    assert (fabric.name, num) == ("switch_2servers", 16)
    assert set(np.repeat(fabric.bandwidth_bytes_per_s, 2)[to_switch]) == {300e9}


def test_every_other_name_has_a_node():
    assert set(catalog.other_names("nodes").values()) <= set(catalog.names("nodes"))
