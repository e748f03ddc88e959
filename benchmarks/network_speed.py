"""How fast the network is at each depth, against SimAI's recorded CPU seconds: every bound in one run.

    python benchmarks/network_speed.py [CASE]

The opponent is SimAI 1.6's ns-3 backend in a repaired, optimised build, and SimAI-Analytical: their CPU seconds were
recorded on another day and machine; ratios are of user seconds. Every line runs in a process of its own, which compiles
first; its CPU seconds are then the least of three,
of fewer where they take long. Memory is that process's peak, the compiled code included.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from reference import REFERENCE
from windtunnel.formats.simai.analytical import read_layers, run_simai_analytical
from windtunnel.network.collectives.algorithms.direct import all_to_all
from windtunnel.network.collectives.algorithms.ring import ring
from windtunnel.network.collectives.call import CollectiveChoices
from windtunnel.network.collectives.ring_classes import ring_seconds
from windtunnel.network.collectives.rings import nccl_rings, simai_rings
from windtunnel.network.collectives.run import groups_seconds, run_collective
from windtunnel.network.fabric import Fabric
from windtunnel.network.flow.run import run_flow_level
from windtunnel.network.flows import Flows, together
from windtunnel.network.packet.runner import run_in_parts
from windtunnel.network.packet.tables import tables_of
from windtunnel.network.settings import GBPS, SIMAI_PACKETS, SIMAI_SETTINGS, NetworkSettings, PacketSettings
from windtunnel.network.topology import DcnPlus, SpectrumX

MIB = 2**20
FLOW = NetworkSettings(backend="flow")
RING = CollectiveChoices(algorithm="ring")


def a100(n: int) -> Fabric:
    """Servers of A100 on NICs of 100 Gbps."""
    rates = {"nic_bytes_per_s": 100 * GBPS, "scale_up_bytes_per_s": 2400 * GBPS}
    return msgspec.structs.replace(SpectrumX(num_gpus=n, gpu_type="A100"), **rates).build()


def all_reduce(n: int, size: int) -> Flows:
    rings = simai_rings(np.arange(n, dtype=np.int32), n // 8)
    return ring(rings, size // n // rings.num_channels, 2 * (n - 1))


def flow_128() -> str:
    """All-reduce of 16 MiB on NCCL's rings, as `windtunnel collective` runs it; equivalent connections once."""
    return f"{run_collective(a100(128), 'all_reduce', 16 * MIB, 128, 'flow', FLOW, RING).seconds * 1e6:.0f} us"


def as_simai(backend: str) -> str:
    seconds = run_collective(a100(128), "all_reduce", 16 * MIB, 128, backend, SIMAI_SETTINGS, RING).seconds
    return f"{seconds * 1e6:.0f} us"


def flow_128_as_simai() -> str:
    """The same on SimAI's rings, which hash every flow anew; equivalent connections once, and a check that none met."""
    return (
        f"{run_collective(a100(128), 'all_reduce', 16 * MIB, 128, 'flow', SIMAI_SETTINGS, RING).seconds * 1e6:.0f} us"
    )


def flow_128_every_flow() -> str:
    """The same with all 260,096 flows, from making them on: what rings cost that meet between switches."""
    return f"{run_flow_level(a100(128), all_reduce(128, 16 * MIB), SIMAI_SETTINGS).total_s * 1e6:.0f} us"


def packet_128_as_simai() -> str:
    """The same packet by packet."""
    return as_simai("packet")


def together_seconds(fabric: Fabric, op: str, size: int, groups: np.ndarray, settings: NetworkSettings) -> float:
    return groups_seconds(fabric, op, size, groups, msgspec.structs.replace(settings, backend="packet"))


def packet_128_servers() -> str:
    """SimAI's README packet by packet: all-reduces of 16 and 64 MiB in each of 16 servers."""
    groups = np.arange(128, dtype=np.int32).reshape(-1, 8)
    took = [together_seconds(a100(128), "all_reduce", size * MIB, groups, SIMAI_SETTINGS) for size in (16, 64)]
    return f"{sum(took) * 1e6:.0f} us"


def packet_256_rails() -> str:
    """An all-reduce of 64 MiB on each rail of 32 servers, packet by packet."""
    settings = msgspec.structs.replace(SIMAI_SETTINGS, send_latency_s=2e-6)
    groups = np.arange(256, dtype=np.int32).reshape(-1, 8).T.copy()
    seconds = together_seconds(SpectrumX(num_gpus=256).build(), "all_reduce", 64 * MIB, groups, settings)
    return f"{seconds * 1e6:.0f} us"


def packet_16384() -> str:
    """Collectives of one training iteration on 16,384 GPUs, packet by packet: TP 8, EP 8, DP 2,048."""
    fabric, settings = SpectrumX(num_gpus=16384, leaf_ports_up=256).build(), NetworkSettings()
    ids = np.arange(16384, dtype=np.int32)
    servers, rails = ids.reshape(-1, 8), ids.reshape(-1, 8).T.copy()
    experts = ids.reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1, 8)
    calls = (
        ("reduce_scatter", 5615517696, rails),
        ("all_gather", 2807758848, rails),
        ("all_reduce", 16384, rails),
        ("all_gather", 48 * MIB, servers),
        ("reduce_scatter", 48 * MIB, servers),
        ("all_to_all", 48 * MIB, experts),
    )
    return f"{sum(together_seconds(fabric, *call, settings) for call in calls) * 1e3:.1f} ms"


def flow_16384() -> str:
    """All-reduce of 8 GiB over 16,384 GPUs, the fabric built anew."""
    fabric = SpectrumX(num_gpus=16384, leaf_ports_up=256).build()
    rings = nccl_rings(np.arange(16384, dtype=np.int32), 2048)
    return f"{ring_seconds(fabric, rings, 8192 * MIB // 16384 // 8, 2 * 16383, FLOW) * 1e3:.1f} ms"


def analytical_9216() -> str:
    """SimAI-Analytical's example of 9,216 GPUs, from reading the file to the report's totals."""
    iteration = run_simai_analytical(read_layers(REFERENCE / "simai/workloads/workload_analytical.txt.gz"))
    return f"{int(iteration.total_ns) // 1000:,} us"


CASES: dict[str, tuple[Callable[[], str], float | None, str]] = {
    # CPU seconds of SimAI, and what is asked for
    "flow_128": (flow_128, 42.18, "1,000x"),
    "flow_128_as_simai": (flow_128_as_simai, 42.18, "1,000x"),
    "flow_128_every_flow": (flow_128_every_flow, 42.18, ""),
    "packet_128_as_simai": (packet_128_as_simai, 42.18, "1,000x, 300 MiB"),
    "packet_128_servers": (packet_128_servers, 13.84, "1,000x"),
    "packet_256_rails": (packet_256_rails, 24.55, "1,000x"),
    "packet_16384": (packet_16384, None, "600 s"),
    "flow_16384": (flow_16384, None, "30 s, 4 GiB"),
    "analytical_9216": (analytical_9216, 8.5, "50 ms"),
}


def print_case(name: str) -> None:
    """One line of the table; run in a process of its own."""
    run, recorded_s, bound = CASES[name]
    run()
    took: list[float] = []
    while len(took) < 3 and sum(took) < 10:
        start = time.process_time()
        result = run()
        took.append(time.process_time() - start)
    ratio = f"{recorded_s / min(took):,.0f}" if recorded_s else ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name:22s}{result:>14s}{min(took):10.4f}{ratio:>9s}{peak:9.0f}   {bound}", flush=True)


def rings_of_four(num_gpus: int) -> Flows:
    """An all-reduce over each rail of each four servers, every one of another size: no two are equivalent."""
    rails = np.arange(num_gpus, dtype=np.int32).reshape(-1, 4, 8).transpose(0, 2, 1).reshape(-1, 4)
    rings = [simai_rings(np.ascontiguousarray(ranks), 4) for ranks in rails]
    return together([ring(each, 2**20 + 64 * number, 6) for number, each in enumerate(rings)])


def print_growth() -> None:
    """Cost of an event as the fabric grows."""
    print(f"\n{'GPUs':>8s}{'flows':>10s}{'flow events':>14s}{'ns each':>10s}{'packet events':>15s}{'ns each':>10s}")
    run_flow_level(a100(64), rings_of_four(64), SIMAI_SETTINGS)
    for num_gpus in (64, 256, 1024, 4096):
        fabric, flows = SpectrumX(num_gpus=num_gpus).build(), rings_of_four(num_gpus)
        start = time.process_time()
        num_flow_events = run_flow_level(fabric, flows, SIMAI_SETTINGS).num_events
        flow_ns = (time.process_time() - start) / num_flow_events * 1e9
        packets = tables_of(fabric, flows, SIMAI_SETTINGS, SIMAI_PACKETS)
        start = time.process_time()
        outcome = run_in_parts(packets)
        num_events = outcome.counters.num_events
        packet_ns = (time.process_time() - start) / num_events * 1e9
        print(f"{num_gpus:8d}{len(flows):10d}{num_flow_events:14d}{flow_ns:10.0f}{num_events:15d}{packet_ns:10.0f}")


def coupled(num_gpus: int) -> Flows:
    """All-to-alls of 16 GPUs, each of another size, that all cross the same spines."""
    groups = np.arange(num_gpus, dtype=np.int32).reshape(16, -1).T
    return together([all_to_all(group.copy(), 4 * MIB + 4096 * k) for k, group in enumerate(groups)])


def print_coupled() -> None:
    """Cost of an event where nearly all flows meet, shared max-min fairly and under control."""
    print(f"\n{'GPUs':>8s}{'flows':>10s}{'control':>10s}{'events':>10s}{'us each':>10s}")
    for num_gpus in (64, 256, 512):
        fabric, flows = DcnPlus(num_gpus=num_gpus).build(), coupled(num_gpus)
        for control in ("none", "dcqcn", "hpcc"):
            settings = NetworkSettings(backend="flow", packet=PacketSettings(congestion=control))
            if num_gpus == 64:
                run_flow_level(fabric, flows, settings)  # compiles
            start = time.process_time()
            num_events = run_flow_level(fabric, flows, settings).num_events
            each_us = (time.process_time() - start) / num_events * 1e6
            print(f"{num_gpus:8d}{len(flows):10d}{control:>10s}{num_events:10d}{each_us:10.1f}", flush=True)


def print_start() -> None:
    """CPU seconds of a whole process: the interpreter, imports, the cached code, the collective and its table."""
    words = ["collective", "--op", "all_reduce", "--size", "16MiB", "--topology", "spectrum_x:num_gpus=128"]
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "windtunnel", *words, "--backend", "flow"], check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"\n`windtunnel {' '.join(words)} --backend flow`, a process from start to end: {min(took):.2f} CPU seconds")


def main() -> None:
    if len(sys.argv) > 1:
        print_case(sys.argv[1])
        return
    print(f"{'case':22s}{'result':>14s}{'CPU s':>10s}{'ratio':>9s}{'MiB':>9s}   asked for", flush=True)
    for name in CASES:
        subprocess.run([sys.executable, __file__, name], check=True)
    print_growth()
    print_coupled()
    print_start()


if __name__ == "__main__":
    main()
