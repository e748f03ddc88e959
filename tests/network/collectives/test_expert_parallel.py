"""Dispatch and combine of tokens, by hand and against DeepEP's published tables."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.network.collectives.closed_forms import place_of
from windtunnel.network.collectives.expert_parallel import TokenTraffic, routed, run_expert_all_to_all
from windtunnel.network.fabric import Fabric
from windtunnel.network.topology import NodeRails


def fabric_of(num_servers: int, node: str = "hgx_h800") -> Fabric:
    return NodeRails(node=node, num_servers=num_servers).build()


def test_a_token_is_counted_once_for_each_server_and_gpu_that_needs_it() -> None:
    place = place_of(fabric_of(4), np.arange(32, dtype=np.int32))
    to_server, to_gpu = routed(TokenTraffic(1000, max_servers=2), place)
    assert 1990 < to_server.sum(axis=1).min() <= to_server.sum(axis=1).max() <= 2000
    # 8 of 128 experts in two servers, 8 on each of 16 GPUs: a GPU is missed with 1 - C(120, 8) / C(128, 8).
    missed = np.prod([(120 - k) / (128 - k) for k in range(8)])
    assert to_gpu.sum(axis=1).mean() == pytest.approx(1000 * 16 * (1 - missed), rel=0.01)
    assert np.all(to_gpu.reshape(32, 4, 8).max(axis=2) <= to_server)


def test_low_latency_kernels_send_every_copy() -> None:
    run = run_expert_all_to_all(fabric_of(4), TokenTraffic(128, kernel="deepep_low_latency"), 32)
    row_bytes = 7168 + 56 * 4
    assert run.call.size_bytes == 128 * 8 * row_bytes
    # 24 of 32 ranks are on other servers, behind a NIC of 50 GB/s.
    assert run.seconds == pytest.approx(30e-6 + 128 * 8 * 24 / 32 * row_bytes / (50e9 * 0.93))
    back = run_expert_all_to_all(fabric_of(4), TokenTraffic(128, kernel="deepep_low_latency", phase="combine"), 32)
    assert back.call.size_bytes == 128 * 8 * 7168 * 2


def test_a_normal_kernel_takes_as_long_as_the_smallest_exchange() -> None:
    run = run_expert_all_to_all(fabric_of(2), TokenTraffic(1, kernel="deepep_normal"), 16)
    assert run.seconds > 5e-6


@pytest.mark.full
def test_sending_once_for_each_server_halves_the_bytes_of_the_network() -> None:
    each, once = (
        run_expert_all_to_all(fabric_of(4), TokenTraffic(4096, dedup_per_server=dedup), 32) for dedup in (False, True)
    )
    # Eight experts on four servers are on 7.1 GPUs and, but for one token in ten, on all the servers.
    assert each.seconds / once.seconds == pytest.approx(7.1 / 3.6, rel=0.1)


def published() -> list[Any]:
    """Row of DeepEP's table -> the largest error of its time. The first normal kernels and EP 16 are slower."""
    return [("v1.1", "normal", 0.12), ("v1.1", "low_latency", 0.12), ("v1 first table +", "low_latency", 0.075)]


@pytest.mark.full
@pytest.mark.parametrize(("version", "mode", "tolerance"), published())
def test_published_times_of_deepep(reference: Path, version: str, mode: str, tolerance: float) -> None:
    with (reference / "collectives/deepep_published.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["version"].startswith(version) and row["mode"] == mode]
    assert len(rows) >= 8
    for row in rows:
        ranks, is_normal = int(row["ep"]), mode == "normal"
        kernel = "deepep_normal" if is_normal else "deepep_low_latency" + ("" if version == "v1.1" else "_rdma")
        traffic = TokenTraffic(
            4096 if is_normal else 128, max_servers=4 if is_normal else None, phase=row["op"], kernel=kernel
        )
        run = run_expert_all_to_all(fabric_of(max(ranks // 8, 2)), traffic, ranks)
        here = run.algorithm_bytes_per_s / 1e9 if is_normal else float(row["latency_us"]) * 1e-6 / run.seconds
        measured = float(row["bw_GBps"]) if is_normal else 1.0
        assert measured / here == pytest.approx(1, abs=tolerance), row


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "nccl"}, "there is no kernel 'nccl'"),
        ({"phase": "back"}, "there is no phase 'back'"),
        ({"dtype": "int8"}, "there is no token type 'int8'"),
        ({"num_experts": 100}, "100 experts do not spread evenly over 16 ranks"),
        ({"num_tokens": 0}, "0 tokens of width 7168 cannot choose 8 of 256 experts"),
        ({"max_servers": 1, "top_k": 200}, "cannot choose 200 of 128 experts"),
        ({"kernel": "deepep_low_latency", "dedup_per_server": True}, "low-latency kernels send every copy by itself"),
    ],
)
def test_traffic_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_expert_all_to_all(fabric_of(2), TokenTraffic(**{"num_tokens": 8, **options}), 16)
