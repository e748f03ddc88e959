"""How fast and how true collectives on a fabric are: seconds of CPU, and time against recorded ns-3 runs of SimAI.

    python benchmarks/network_speed.py

The opponent is SimAI 1.6's ns-3 backend in a repaired, optimised build: its CPU seconds and simulated times were
recorded on another day and machine; the ratio is of user seconds.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from windtunnel.engine.alike import ring_seconds
from windtunnel.engine.network import run_flow_level
from windtunnel.ops import flows as tables
from windtunnel.spec.fabric import Fabric
from windtunnel.spec.network import SIMAI_SETTINGS, NetworkSettings
from windtunnel.spec.topology import GBPS, DcnPlus, SpectrumX, build_fabric

MIB = 2**20


def a100(n: int) -> Fabric:
    """Servers of A100 on NICs of 100 Gbps."""
    rates = {"nic_bytes_per_s": 100 * GBPS, "scale_up_bytes_per_s": 2400 * GBPS}
    return build_fabric(msgspec.structs.replace(SpectrumX(num_gpus=n, gpu_type="A100"), **rates))


def ranks(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def all_reduce(n: int, size: int) -> tables.Flows:
    rings = tables.simai_rings(ranks(n), n // 8)
    return tables.ring(rings, size // n // rings.num_channels, 2 * (n - 1))


def data_parallel(n: int, size: int) -> tables.Flows:
    groups = [tables.simai_rings(ranks(n)[rail::8], n // 8) for rail in range(8)]
    return tables.together([tables.ring(each, size // (n // 8), 2 * (n // 8 - 1)) for each in groups])


CASES: list[tuple[str, Fabric, tables.Flows, float, float]] = [
    # name, fabric, flows, microseconds and CPU seconds of ns-3
    ("8 GPUs, 256 MiB", a100(8), all_reduce(8, 256 * MIB), 1609.742, 2.28),
    ("64 GPUs, 16 MiB", build_fabric(SpectrumX(num_gpus=64, num_spines=8)), all_reduce(64, 16 * MIB), 496.5, 4.6),
    ("128 GPUs, 16 MiB", a100(128), all_reduce(128, 16 * MIB), 1036.608, 42.2),
    (
        "128 GPUs, data parallel 16 MiB",
        build_fabric(SpectrumX(num_gpus=128, num_spines=8)),
        data_parallel(128, 16 * MIB),
        792.211,
        2.69,
    ),
    (
        "32 GPUs, DCN+, 16 MiB (flows meet)",
        build_fabric(DcnPlus(num_gpus=32, gpus_per_leaf=8)),
        all_reduce(32, 16 * MIB),
        277.798,
        1.4,
    ),
]


def timed(run: Callable[[], float]) -> tuple[float, float]:
    """What `run` returns, and the least CPU seconds of three times."""
    took, value = [], 0.0
    for _ in range(3):
        start = time.process_time()
        value = run()
        took.append(time.process_time() - start)
    return value, min(took)


def main() -> None:
    print("Against ns-3, every flow simulated (compat: simai)\n")
    print("| case | flows | ns-3, us | here, us | off | CPU s | times as fast |\n|---|---|---|---|---|---|---|")
    for name, fabric, flows, recorded_us, recorded_cpu_s in CASES:
        seconds, cpu_s = timed(lambda f=fabric, t=flows: run_flow_level(f, t, SIMAI_SETTINGS).total_s)  # type: ignore[misc]
        off = seconds * 1e6 / recorded_us - 1
        print(
            f"| {name} | {len(flows):,} | {recorded_us:.1f} | {seconds * 1e6:.1f} | {off:+.1%} | {cpu_s:.3f} "
            f"| {recorded_cpu_s / cpu_s:,.0f} |"
        )
    print("\nAll-reduce rings of the default, alike connections once\n")
    print("| GPUs | flows of the whole | time, ms | CPU s |\n|---|---|---|---|")
    for n, size in ((128, 16 * MIB), (1024, 1024 * MIB), (4096, 1024 * MIB), (16384, 8192 * MIB)):
        fabric = build_fabric(SpectrumX(num_gpus=n, leaf_ports_up=256))
        rings = tables.nccl_rings(ranks(n), n // 8)
        chunk, steps = max(size // n // 8, 1), 2 * (n - 1)
        settings = NetworkSettings(backend="flow")
        start = time.process_time()
        seconds = ring_seconds(fabric, rings, chunk, steps, settings)
        print(f"| {n:,} | {8 * n * steps:,} | {seconds * 1e3:.3f} | {time.process_time() - start:.3f} |")
    print(
        f"\nPeak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB ({Path(__file__).name})"
    )


if __name__ == "__main__":
    main()
