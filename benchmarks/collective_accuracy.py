"""Collectives in closed form and by flows against published measurements: nccl-tests, and DeepEP's all-to-all.

    python benchmarks/collective_accuracy.py

nccl-tests: bus bandwidth of every published point (time, hence bandwidth, launch included) on the catalog's nodes.
DeepEP: its own test's workload (4,096 tokens a rank, hidden 7,168, 8 of 256 experts in at most 4 servers, FP8 out and
BF16 back) as a hierarchical all-to-all by flows on NVLink of 160 GB/s and NICs of 400 Gb/s, as its tables say; what it
prints is the bytes that leave a GPU for servers, its own included, by time. Nothing is fitted on either.
"""

import csv
import os
from collections import defaultdict
from pathlib import Path

import numpy as np

from windtunnel.network.collectives.algorithms.direct import all_to_all
from windtunnel.network.collectives.algorithms.hierarchical import all_to_all_by_rail
from windtunnel.network.collectives.call import CollectiveChoices
from windtunnel.network.collectives.closed_forms import LAUNCH_S
from windtunnel.network.collectives.run import flows_seconds, run_collective
from windtunnel.network.settings import GBPS, NetworkSettings
from windtunnel.network.topology import NodeRails, SpectrumX

REFERENCE = Path(os.environ.get("WINDTUNNEL_REFERENCE") or Path(__file__).resolve().parents[2] / "shared" / "reference")
NODES = {"H100": "dgx_h100", "H200": "hgx_h200", "B200": "hgx_b200", "A100": "dgx_a100"}
NUM_TOKENS, HIDDEN, TOP_K, MOST_SERVERS, NUM_EXPERTS = 4096, 7168, 8, 4, 256
ROW_BYTES = {"dispatch": HIDDEN + HIDDEN // 128 * 4, "combine": 2 * HIDDEN}
FLOW = NetworkSettings(backend="flow", send_latency_s=0.0)
RING = CollectiveChoices(algorithm="ring")


def print_nccl() -> None:
    errors: dict[tuple[str, str, str, bool], list[float]] = defaultdict(list)
    with (REFERENCE / "collectives/busbw_public.csv").open() as file:
        for row in csv.DictReader(file):
            node, servers, ranks = NODES.get(row["system"].split()[0]), int(row["nodes"]), int(row["n_gpus"])
            if node is None or "SHARP" in row["algo"] or not row["time_us"]:
                continue
            fabric, size = NodeRails(node=node, num_servers=servers).build(), int(row["size_bytes"])
            if "Ring" in row["algo"]:
                seconds = run_collective(fabric, row["collective"], size, ranks, choices=RING).seconds
            else:
                seconds = run_collective(fabric, row["collective"], size, ranks).seconds
            name = (row["system"][:34], row["collective"], row["algo"][:14], size >= 2**20)
            errors[name].append((float(row["time_us"]) * 1e-6 / (seconds + LAUNCH_S) - 1) * 100)
    print(f"{'nccl-tests':36s}{'op':16s}{'algorithm':16s}{'sizes':>9s}{'points':>8s}{'median off':>12s}{'mean':>8s}")
    for (system, op, algorithm, is_large), found in sorted(errors.items()):
        sizes = ">= 1 MiB" if is_large else "< 1 MiB"
        print(
            f"{system:36s}{op:16s}{algorithm:16s}{sizes:>9s}{len(found):8d}{np.median(np.abs(found)):11.1f}%"
            f"{np.mean(found):+7.1f}%"
        )
    for is_large in (True, False):
        every = np.abs([error for name, found in errors.items() if name[3] == is_large for error in found])
        sizes = "1 MiB and up" if is_large else "below"
        share = f"{np.mean(every <= 10):.0%} within 10%"
        print(f"{sizes}: {len(every)} points, {np.median(every):.1f}% in the median, {share}")


def routed(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """(ranks, servers) and (ranks, ranks) tokens that each rank has for each server and for each GPU."""
    rng, servers = np.random.default_rng(0), ranks // 8
    scores = rng.random((ranks, NUM_TOKENS, NUM_EXPERTS))
    by_server = scores.reshape(ranks, NUM_TOKENS, servers, -1)
    best = np.sort(by_server, axis=3)[..., -2:].sum(axis=3)
    chosen = np.argsort(best, axis=2)[..., -min(servers, MOST_SERVERS) :]
    allowed = np.zeros((ranks, NUM_TOKENS, servers), bool)
    np.put_along_axis(allowed, chosen, True, axis=2)
    experts = np.argsort(np.where(allowed[..., None], by_server, -1.0).reshape(scores.shape), axis=2)[..., -TOP_K:]
    wanted = np.zeros(scores.shape, bool)
    np.put_along_axis(wanted, experts, True, axis=2)
    to_gpu = wanted.reshape(ranks, NUM_TOKENS, ranks, -1).any(axis=3)
    return to_gpu.reshape(ranks, NUM_TOKENS, servers, 8).any(axis=3).sum(axis=1), to_gpu.sum(axis=1)


def print_deepep() -> None:
    measured: dict[tuple[int, str], list[float]] = defaultdict(list)
    with (REFERENCE / "collectives/deepep_published.csv").open() as file:
        for row in csv.DictReader(file):
            if row["mode"].startswith("normal"):
                measured[int(row["ep"]), row["op"]].append(float(row["bw_GBps"]))
    print(f"\n{'DeepEP, normal':16s}{'op':10s}{'here':>10s}{'published versions, GB/s':>30s}{'off the fastest':>18s}")
    for (ranks, op), published in sorted(measured.items()):
        fabric = SpectrumX(
            num_gpus=ranks,
            num_spines=8,
            gpu_type="H800",
            nic_bytes_per_s=400 * GBPS,
            scale_up_bytes_per_s=160e9,
        ).build()
        to_server, to_gpu = routed(ranks)
        gpus = np.arange(ranks, dtype=np.int32)
        if ranks == 8:
            flows, counted = all_to_all(gpus, to_gpu * ROW_BYTES[op]), to_gpu.sum(axis=0).mean()
        else:
            to_server_bytes, to_gpu_bytes = to_server * ROW_BYTES[op], to_gpu * ROW_BYTES[op]
            flows = all_to_all_by_rail(gpus, ranks // 8, to_server_bytes, to_gpu_bytes, num_chunks=8)
            counted = to_server.sum(axis=1).mean()
        here = counted * ROW_BYTES[op] / flows_seconds(fabric, flows, FLOW, "flow") / 1e9
        versions = ", ".join(f"{value:g}" for value in published)
        print(f"EP {ranks:<13d}{op:10s}{here:10.1f}{versions:>30s}{(here / max(published) - 1) * 100:+17.0f}%")


if __name__ == "__main__":
    print_nccl()
    print_deepep()
