"""The packet and the flow level against the recorded ns-3 runs of SimAI: error, and CPU seconds.

    python benchmarks/ns3_runs.py [PATTERN]

Every run of `simai/ns3/results.csv` that ended with a result: the same collective as the same flows over the same
topology. Ours is the CPU time from flows to finish times: routes, tables and loop, kernels compiled. Runs whose name
begins with A, B, C or dbg are of SimAI's debug build as shipped; O are of an optimised one, the fair opponent.

`+`: flows of a ring pile up at its NICs. `*`: flows meet on a link between switches, where hashes decide which do; the
flow level, which finds out, then gives the mean of eight hashes for rings.
"""

import csv
import re
import resource
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from reference import REFERENCE
from windtunnel.network.backends.flow import full_between_switches
from windtunnel.network.backends.packet import ring_seconds, simulate_packets
from windtunnel.network.collectives.algorithms.direct import all_to_all
from windtunnel.network.collectives.algorithms.nvls import nvls
from windtunnel.network.collectives.algorithms.ring import ring
from windtunnel.network.collectives.rings import Rings, simai_rings
from windtunnel.network.collectives.run import flows_seconds
from windtunnel.network.fabric import Fabric, NodeKind, read_topology
from windtunnel.network.flows import Flows, Reduction, together
from windtunnel.network.paths import FlowTimes, run_flows
from windtunnel.network.settings import GBPS, SIMAI_PACKETS, SIMAI_SETTINGS, NetworkSettings
from windtunnel.network.topology import AlibabaHpn, DcnPlus, SpectrumX, Topology, TwoTier

CONTROLS = {1: "dcqcn", 7: "timely", 8: "dctcp"}
REDUCTIONS = {"ALLREDUCE": Reduction.ALTERNATE, "REDUCESCATTER": Reduction.EVERY}


def number(pattern: str, text: str, otherwise: int = 0) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else otherwise


def topology_of(name: str) -> Topology:
    """What SimAI's topology of that file name was generated from."""
    num_gpus = number(r"_(\d+)g", name)
    common: dict[str, Any] = {"num_gpus": num_gpus, "num_spines": number(r"psn(\d+)", name, 64)}
    if "100Gbps_A100" in name:
        common |= {"gpu_type": "A100", "nic_bytes_per_s": 100 * GBPS, "scale_up_bytes_per_s": 2400 * GBPS}
    if name.startswith("DCN"):
        return DcnPlus(**common, nic_bytes_per_s=400 * GBPS, gpus_per_leaf=number(r"npa(\d+)", name) or None)
    if name.startswith("AlibabaHPN"):
        return AlibabaHpn(num_gpus=num_gpus, num_spines=16, dual_plane="DualPlane" in name)
    if name.startswith("Rail_"):
        scale_up = number(r"_(\d+)_psn", name) * GBPS
        nic = 400 * GBPS
        return TwoTier(**common, rail_optimised=True, scale_up_bytes_per_s=scale_up, nic_bytes_per_s=nic)
    return SpectrumX(**common)


@dataclass(frozen=True)
class Layer:
    """The flows of a layer's collective, and its rings, if it has any."""

    flows: Flows
    rings: Rings | None = None
    chunk_bytes: int = 0
    num_steps: int = 0


def collective(name: str, size_bytes: int, ranks: np.ndarray, gpus_per_server: int, row: dict[str, str]) -> Layer:
    servers = len(np.unique(ranks // gpus_per_server))
    if name == "ALLTOALL":
        return Layer(all_to_all(ranks, size_bytes))
    is_reduce = name == "ALLREDUCE"
    is_hopper = "H100" in row["topology"] or row["topology"].startswith("Rail_32g_1360")
    if "AS_NVLS_ENABLE=1" in row["env"] and is_reduce and is_hopper and len(ranks) == 8:
        switch = int(row["num_gpus"]) + ranks[0] // gpus_per_server
        return Layer(nvls(ranks, switch, size_bytes))
    rings = simai_rings(ranks, servers, pxn="AS_PXN_ENABLE=1" in row["env"] and is_reduce)
    steps = (2 if is_reduce else 1) * (len(ranks) - 1)
    chunk_bytes = size_bytes // len(ranks) // rings.num_channels
    reduction = REDUCTIONS.get(name, Reduction.NONE)
    return Layer(ring(rings, chunk_bytes, steps, reduction), replace(rings, reduction=reduction), chunk_bytes, steps)


def at_once(groups: list[Layer]) -> Layer:
    """The same collective in several groups of ranks; one of several in servers of their own."""
    if (
        np.ptp(groups[0].flows.source // 8) == 0
        and (groups[0].flows.source // 8 == groups[0].flows.destination // 8).all()
    ):
        return replace(groups[0], rings=None)
    flows, rings = together([group.flows for group in groups]), [group.rings for group in groups if group.rings]
    if not rings or (rings[0].via >= 0).any():
        return Layer(flows)
    order, via = (np.concatenate([getattr(each, name) for each in rings]) for name in ("order", "via"))
    return replace(groups[0], flows=flows, rings=Rings(order, via, rings[0].reduction, len(rings)))


def layers_of(row: dict[str, str]) -> list[Layer]:
    """Every layer with a collective."""
    head, *layers = re.split(r"[|;]", row["workload"])
    sizes = dict(re.findall(r"(\w+): (\d+)", head.replace("model_parallel_NPU_group", "tp")))
    tp, ep = int(sizes["tp"]), int(sizes["ep"])
    num_gpus = int(row["num_gpus"])
    ranks = np.arange(num_gpus, dtype=np.int32)
    found = []
    for layer in layers:
        _, _, _, forward, forward_bytes, _, _, _, _, weights, weight_bytes, _ = layer.split()
        tensor_groups = ranks.reshape(-1, tp)
        if weights != "NONE":
            groups, name, size_bytes = tensor_groups.T, weights, int(weight_bytes)
        elif forward.endswith("_EP"):
            groups = tensor_groups.reshape(-1, ep, tp).transpose(0, 2, 1).reshape(-1, ep)
            name, size_bytes = forward.removesuffix("_EP"), int(forward_bytes)
        else:
            groups, name, size_bytes = tensor_groups, forward, int(forward_bytes)
        found.append(at_once([collective(name, size_bytes, np.ascontiguousarray(g), 8, row) for g in groups]))
    return found


def recorded_us(row: dict[str, str]) -> list[float]:
    layers = [layer for layer in row["layers_us"].split(" / ") if not layer.startswith("SUM")]
    return [max(float(value) for value in re.findall(r"_comm=([\d.]+)", layer)) for layer in layers]


@dataclass(frozen=True)
class Run:
    """One recorded run at both depths: the time of every layer in microseconds, and CPU seconds."""

    packet_us: list[float]
    flow_us: list[float]
    packet_cpu_s: float
    flow_cpu_s: float
    where: str
    """Where flows share a link of the network: nowhere, `+` at NICs, `*` between switches."""


def control_of(row: dict[str, str]) -> str:
    """The congestion control of a recorded run."""
    return CONTROLS[number(r"cc(\d+)", row["dir"], 1)]


def run(row: dict[str, str]) -> Run:
    payload = 4096 if "mtu4096" in row["dir"] else 9000
    settings = msgspec.structs.replace(
        SIMAI_SETTINGS, send_latency_s=number(r"AS_SEND_LAT=(\d+)", row["env"], 6000) * 1e-6, payload_bytes=payload
    )
    packet = msgspec.structs.replace(SIMAI_PACKETS, congestion=control_of(row), ecn="noecn" not in row["dir"])
    settings = msgspec.structs.replace(settings, packet=packet)
    file = REFERENCE / "simai" / "topo" / f"{row['topology']}.gz"
    fabric = read_topology(file) if file.exists() else topology_of(row["topology"]).build()
    packet_us, flow_us, packet_cpu_s, flow_cpu_s, where = [], [], 0.0, 0.0, ""
    for layer in layers_of(row):
        flows = layer.flows
        started = time.process_time()
        packet_us.append(packet_seconds(fabric, layer, settings) * 1e6)
        packet_cpu_s += time.process_time() - started
        started = time.process_time()
        flow_us.append(flows_seconds(fabric, flows, settings, "flow") * 1e6)
        flow_cpu_s += time.process_time() - started
        where = max(where, meeting_place(fabric, run_flows(fabric, flows, settings)), key=("", "+", "*").index)
    return Run(packet_us, flow_us, packet_cpu_s, flow_cpu_s, where)


def packet_seconds(fabric: Fabric, layer: Layer, settings: NetworkSettings) -> float:
    """What `windtunnel collective --backend packet` does: a stretch of the rings where that can stand for all."""
    seconds = None
    if layer.rings is not None:
        seconds = ring_seconds(fabric, layer.rings, layer.chunk_bytes, layer.num_steps, settings)
    return simulate_packets(fabric, layer.flows, settings).total_s if seconds is None else seconds


def meeting_place(fabric: Fabric, times: FlowTimes) -> str:
    """Where flows had to share a link of the network."""
    if full_between_switches(fabric, times):
        return "*"
    network = (fabric.kind[fabric.link_a] == NodeKind.SWITCH) | (fabric.kind[fabric.link_b] == NodeKind.SWITCH)
    return "+" if times.link_was_full[np.repeat(network, 2)].any() else ""


def rows() -> list[dict[str, str]]:
    with (REFERENCE / "simai/ns3/results.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["rc"] == "0" and row["layers_us"]]
    for row in found:
        row["num_gpus"] = str(number(r"_(\d+)g", row["topology"]))
    return [row for row in found if sum(recorded_us(row)) > 0 and "pp2" not in row["dir"]]


def error_percent(ours: list[float], recorded: list[float]) -> float:
    """Of the layer that is farthest off."""
    return max(((one / other - 1) * 100 for one, other in zip(ours, recorded, strict=True)), key=abs)


def print_summary(title: str, errors: list[float], bound: float) -> None:
    sizes = np.abs(errors)
    if len(sizes):
        print(
            f"{title}: {np.count_nonzero(sizes <= bound)} of {len(sizes)} within {bound:g}%, "
            f"median {np.median(sizes):.2f}%, mean {np.mean(errors):+.2f}%, worst {max(errors, key=abs):+.1f}%"
        )


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for pattern in ("", "cc8_a2a_tp32"):  # compiles, the second what congestion control needs
        run(min((row for row in rows() if pattern in row["dir"]), key=lambda row: float(row["user_cpu_s"])))
    titles = ("flows", "ns-3 us", "packet us", "error", "flow us", "error", "ns-3 s", "packet s", "ratio", "flow s")
    print(f"{'run':34s}" + "".join(f"{title:>11s}" for title in (*titles, "ratio")))
    packet_errors, flow_errors = {}, {}
    ns3_s_of: dict[str, float] = {}
    cpu_s: dict[str, list[float]] = {"packet": [], "flow": []}
    places, controls = {}, {}
    for row in rows():
        name = row["dir"]
        if not re.search(wanted, name):
            continue
        found, recorded = run(row), recorded_us(row)
        packet_errors[name] = error_percent(found.packet_us, recorded)
        flow_errors[name] = error_percent(found.flow_us, recorded)
        places[name], controls[name] = found.where, control_of(row)
        ns3_s = float(row["user_cpu_s"])
        ns3_s_of[name] = ns3_s
        cpu_s["packet"].append(found.packet_cpu_s)
        cpu_s["flow"].append(found.flow_cpu_s)
        print(
            f"{name + found.where:34s}{row['n_flows_in_fct'].removesuffix('.0'):>11s}{sum(recorded):11.2f}"
            f"{sum(found.packet_us):11.2f}{packet_errors[name]:+10.2f}%{sum(found.flow_us):11.2f}{flow_errors[name]:+10.2f}%"
            f"{ns3_s:11.2f}{found.packet_cpu_s:11.3f}{ns3_s / found.packet_cpu_s:11.0f}"
            f"{found.flow_cpu_s:11.3f}{ns3_s / found.flow_cpu_s:11.0f}",
            flush=True,
        )
    print()
    for depth, errors in (("packet", packet_errors), ("flow", flow_errors)):
        for where, title, bound in (("", "apart", 5), ("+", "+ at NICs", 5), ("*", "* between switches", 10)):
            chosen = [error for name, error in errors.items() if places[name] == where]
            print_summary(f"{depth} level, {title}", chosen, bound)
    for control in CONTROLS.values():
        chosen = [error for name, error in flow_errors.items() if places[name] == "*" and controls[name] == control]
        print_summary(f"flow level, * under {control}", chosen, 10)
    for depth, ours_s in cpu_s.items():
        ratios = np.array(list(ns3_s_of.values())) / ours_s
        print(
            f"CPU seconds of ns-3 / of the {depth} level: least {ratios.min():.0f}, median {np.median(ratios):.0f}, "
            f"greatest {ratios.max():.0f}, of the sums {sum(ns3_s_of.values()) / sum(ours_s):.0f}; "
            f"{np.count_nonzero(ratios >= 1000)} of {len(ratios)} reach 1,000"
        )
    print(f"largest memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
