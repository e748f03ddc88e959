"""Collectives in closed form against published measurements: nccl-tests, and DeepEP's dispatch and combine.

    python benchmarks/collective_accuracy.py

nccl-tests: bus bandwidth of every published point (time, hence bandwidth, launch included) on the nodes of the catalog.
Apart from these, points over several servers (`measured/collectives_between_servers.csv`).
`launch left out`: the same with the launch refitted without the point's own system.
DeepEP: the workloads of its tests (4,096 or 128 tokens a rank, hidden 7,168, 8 of 256 experts, for normal kernels in at
most 4 servers, FP8 out and BF16 back) on H800 or, for the current version, H100. Two constants of low-latency kernels
are fitted on these rows; nothing else is. No row is left out: those that cannot be predicted are counted as refused.
"""

import csv
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reference import REFERENCE
from windtunnel.errors import InputError
from windtunnel.network.collectives.call import CollectiveChoices, bus_factor
from windtunnel.network.collectives.closed_forms import LAUNCH_S
from windtunnel.network.collectives.expert_parallel import TokenTraffic, run_expert_all_to_all
from windtunnel.network.collectives.run import run_collective
from windtunnel.network.topology import NetworkKind, NodeRails

NODES = {
    "H100": "dgx_h100",
    "H200": "hgx_h200",
    "B200": "hgx_b200",
    "A100": "dgx_a100",
    "GB200": "gb200_nvl72",
    "GB300": "gb300_nvl72",
    "B300": "hgx_b300",
    "H800": "hgx_h800",
    "H20": "hgx_h20",
    "V100": "dgx_v100",
    "MI250X": "mi250x",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
    "TPU7x": "tpu_v7_host",
}
CLOUD_NODES = {
    "aws_p4d": ("A100", "p4d"),
    "aws_p5": ("H100", "p5"),
    "aws_p5en": ("H200", "p5en"),
    "aws_p6_b200": ("B200", "p6"),
    "aws_p6_b300": ("B300", "p6"),
    "gcp_a3_mega": ("H100", "a3"),
}
"""Node of a cloud whose network is its own -> words of a system's name."""
NETWORKS: dict[str, NetworkKind] = {
    "RoCE": "ethernet",
    "Slingshot": "slingshot",
    "IB": "infiniband",
    "Azure": "infiniband",
}
"""Word of a system's name -> kind of its links between servers, where that is not the node's."""
BETWEEN_SERVERS = Path(__file__).parent / "measured/collectives_between_servers.csv"
"""Points over several servers, with the repository or issue that each was published in."""
ALGORITHMS = {"Ring": "ring", "SHARP": "collnet"}
QUEUED = "NVIDIA/dgxc-benchmarking"
"""Source whose log says `nGpus 1` and `graph: 0`: a process for each GPU queues 20 calls. The others with small sizes
ran `all_reduce_perf -g 8`, one process for eight GPUs, or a torch script that waits for each call."""
BANDS = {"< 1 MiB": 0, "1 to 64 MiB": 2**20, "> 64 MiB": 2**26 + 1}
"""Sizes -> the least of them in bytes."""
LAUNCH_SIZES = (2**15, 2**18)
"""Sizes in bytes by which the launch is fitted: every run with small sizes has them."""


def node_of(system: str) -> str:
    """Return the node of the catalog that a system's name means: `8x NVIDIA H100 SXM (AWS p5.48xlarge, EFA)`.

    Raises:
        InputError: it does not say which GPUs these are.
    """
    words = re.split(r"[^A-Za-z0-9]+", system)
    for node, (gpu, instance) in CLOUD_NODES.items():
        if gpu in words and (any(word.lower().startswith(instance) for word in words) or "EFA" in words):
            return node
    known = [NODES[word] for word in words if word in NODES]
    if not known or re.search("PCIe|NVL(?!72)|unidentified", system):
        raise InputError("the row does not say which GPUs these are")
    return known[0]


def nccl_seconds(row: dict[str, str]) -> float:
    """Predict a published point; raises InputError where the catalog lacks its system or the network its algorithm."""
    node, ranks, size_bytes = node_of(row["system"]), int(row["n_gpus"]), int(row["size_bytes"])
    # A row counts hosts; a rack of 72 is one NVLink domain.
    servers = -(-ranks // 72) if "nvl72" in node else int(row["nodes"])
    algorithm = next((ours for theirs, ours in ALGORITHMS.items() if theirs in row["algo"]), "auto")
    if node == "tpu_v7_host":
        # A ring over four chips in either slice; its bandwidth counts three shards, which says how large they are.
        ranks = 4
        size_bytes = round(float(row["busbw_GBps"]) * float(row["time_us"]) * 1e3 / bus_factor("all_gather", ranks))
    network = next((kind for word, kind in NETWORKS.items() if word in re.split(r"[^A-Za-z0-9]+", row["system"])), None)
    fabric, choices = NodeRails(node=node, num_servers=servers, network=network).build(), CollectiveChoices(algorithm)
    return run_collective(fabric, row["collective"], size_bytes, ranks, choices=choices).seconds


@dataclass(frozen=True)
class Point:
    """One published point, with its time in closed form."""

    name: tuple[str, str, str]
    size_bytes: int
    measured_s: float
    kernel_s: float
    has_launch: bool

    def error(self, launch_s: float) -> float:
        """Return percent of measured over predicted time, less 100."""
        return (self.measured_s / (self.kernel_s + launch_s * self.has_launch) - 1) * 100


def nccl_points(path: Path) -> tuple[list[Point], Counter[str]]:
    """Return all points of a file that can be predicted, and how many could not be, by reason."""
    points, refused = [], Counter[str]()
    with path.open() as file:
        for row in csv.DictReader(file):
            try:
                seconds = nccl_seconds(row)
            except InputError as error:
                refused[f"{row['system'][:40]}, {row['algo'][:5]}: {error.message}"] += 1
                continue
            # A program of a TPU is launched whole.
            has_launch = not row["system"].startswith("TPU") and not row["source"].startswith(QUEUED)
            has_launch &= path != BETWEEN_SERVERS  # started by MPI, a process for each GPU
            gpus = f", {row['n_gpus']}" if path == BETWEEN_SERVERS else ""
            name = (row["system"][:34] + gpus, row["collective"], row["algo"][:14])
            points.append(Point(name, int(row["size_bytes"]), float(row["time_us"]) * 1e-6, seconds, has_launch))
    return points, refused


def fitted_launch_s(points: list[Point]) -> float:
    """Return the median over systems of the median launch of a system's small points."""
    launches: dict[str, list[float]] = defaultdict(list)
    for point in points:
        if point.has_launch and LAUNCH_SIZES[0] <= point.size_bytes <= LAUNCH_SIZES[1]:
            launches[point.name[0]].append(point.measured_s - point.kernel_s)
    return float(np.median([np.median(each) for each in launches.values()]))


def print_nccl(path: Path) -> None:
    points, refused = nccl_points(path)
    errors: dict[tuple[str, str, str, int], list[float]] = defaultdict(list)
    left_out: dict[int, list[float]] = defaultdict(list)
    for point in points:
        band = sum(point.size_bytes >= least for least in BANDS.values()) - 1
        errors[*point.name, band].append(point.error(LAUNCH_S))
        if path != BETWEEN_SERVERS:
            others = [other for other in points if other.name[0] != point.name[0]]
            left_out[band].append(abs(point.error(fitted_launch_s(others))))
    print(f"{'nccl-tests':36s}{'op':16s}{'algorithm':16s}{'sizes':>11s}{'points':>8s}{'median off':>12s}{'mean':>8s}")
    for (system, op, algorithm, band), found in sorted(errors.items()):
        print(
            f"{system:36s}{op:16s}{algorithm:16s}{list(BANDS)[band]:>11s}{len(found):8d}{np.median(np.abs(found)):11.1f}%"
            f"{np.mean(found):+7.1f}%"
        )
    for band, sizes in enumerate(BANDS):
        every = np.abs([error for name, found in errors.items() if name[3] == band for error in found])
        if not every.size:
            continue
        share = f"{np.mean(every <= 10):.0%} within 10%, nine in ten within {np.quantile(every, 0.9):.0f}%"
        held = f"; {np.median(left_out[band]):.1f}% with the launch left out" if left_out[band] else ""
        print(f"{sizes}: {len(every)} points, {np.median(every):.1f}% in the median, {share}{held}")
    if path != BETWEEN_SERVERS:
        print(f"launch: {LAUNCH_S * 1e6:.1f} us shipped, {fitted_launch_s(points) * 1e6:.1f} us fitted to all systems")
    print(f"nccl-tests: {sum(map(len, errors.values()))} points scored, {sum(refused.values())} refused")
    for why, count in refused.items():
        print(f"  {count} of {why}")


def print_nvls_flows() -> None:
    """Print the errors of flows of NVLS, with the launch, against the points of 32 MiB and more that NVLS took."""
    errors: dict[tuple[str, bool], list[float]] = defaultdict(list)
    with (REFERENCE / "collectives/busbw_public.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["collective"] == "all_reduce"]
    for row in rows:
        is_nvls = ("NVLS" in row["algo"] and "off" not in row["algo"]) or "NVL72" in row["system"]
        if not is_nvls or int(row["size_bytes"]) < 2**25:
            continue
        fabric, choices = NodeRails(node=node_of(row["system"])).build(), CollectiveChoices("nvls")
        size_bytes, ranks = int(row["size_bytes"]), int(row["n_gpus"])
        run = run_collective(fabric, "all_reduce", size_bytes, ranks, "flow", choices=choices)
        measured_s = float(row["time_us"]) * 1e-6
        is_large = size_bytes >= 2**28
        errors[row["system"][:34], is_large].append(((run.seconds + LAUNCH_S) / measured_s - 1) * 100)
    print("\nflows of NVLS, with the launch")
    for (system, is_large), found in sorted(errors.items()):
        sizes = ">= 256 MiB" if is_large else "32 to 128 MiB"
        print(f"{system:36s}{sizes:14s}{len(found):4d} points, {np.median(np.abs(found)):5.1f}% in the median", end="")
        print(f", worst {max(found, key=abs):+.1f}%")
    every = np.abs([error for found in errors.values() for error in found])
    print(f"all: {every.size} points, {np.median(every):.1f}% in the median, {np.sum(every <= 10)} within 10%")


def print_deepep() -> None:
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    print(f"\n{'DeepEP':26s}{'mode':14s}{'op':10s}{'EP':>4s}{'published':>11s}{'here':>9s}{'off':>7s}")
    with (REFERENCE / "collectives/deepep_published.csv").open() as file:
        for row in csv.DictReader(file):
            is_normal, ranks = row["mode"].startswith("normal"), int(row["ep"])
            is_first = row["version"].startswith("v1 ")
            low_latency = "deepep_low_latency_rdma" if is_first else "deepep_low_latency"
            traffic = TokenTraffic(
                num_tokens=4096 if is_normal else 128,
                max_servers=4 if is_normal else None,
                phase=row["op"],
                kernel="deepep_normal" if is_normal else low_latency,
            )
            node = "hgx_h800" if row["system"].startswith("H800") else "dgx_h100"
            run = run_expert_all_to_all(NodeRails(node=node, num_servers=max(ranks // 8, 2)).build(), traffic, ranks)
            here, published, unit = run.algorithm_bytes_per_s / 1e9, float(row["bw_GBps"]), "GB/s"
            slower = published / here
            if row["latency_us"]:
                here, published, unit = run.seconds * 1e6, float(row["latency_us"]), "us"
                slower = here / published
            name = row["version"][:24], row["mode"]
            errors[name].append((slower - 1) * 100)
            print(
                f"{name[0]:26s}{name[1]:14s}{row['op']:10s}{ranks:4d}{published:6.0f} {unit:4s}{here:9.1f}"
                f"{errors[name][-1]:+6.0f}%"
            )
    for (version, mode), found in errors.items():
        print(f"{version}, {mode}: {np.sum(np.abs(found) <= 10)} of {len(found)} within 10%")
    every = np.abs(np.concatenate(list(errors.values())))
    print(
        f"DeepEP: {every.size} rows scored, 0 refused; time off by {np.median(every):.1f}% in the median, "
        f"{np.sum(every <= 10)} within 10%"
    )


if __name__ == "__main__":
    print_nccl(REFERENCE / "collectives/busbw_public.csv")
    print("\nbetween servers; the networks' shares are read off some of these systems")
    print_nccl(BETWEEN_SERVERS)
    print_nvls_flows()
    print_deepep()
