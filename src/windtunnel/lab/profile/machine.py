"""The measured machine: as a `Device` that the simulator takes, as provenance of rows, and as facts for a record."""

import os
import platform
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.lab.timing import stopwatch
from windtunnel.pricing.roofline import CPU
from windtunnel.schema import encode, read_yaml
from windtunnel.units import format_bytes

GEMM_SIZES = {"cpu": 1024, "cuda": 8192}
"""Sizes of square matrices, large enough to reach a device's peak and small enough to take milliseconds."""
COPY_BYTES = 1 << 28
BEST_OF = 5
UNKNOWN_CACHE_BYTES = 32 << 20

NAMES: Mapping[str, Mapping[Any, str]] = read_yaml(Path(__file__).with_name("machine.yaml"))
"""Names of architectures and of methods, by vendor and by clock."""
MEMORY_TOLERANCE = 0.1
"""Relative tolerance of memory sizes: drivers and error correction take some; other boards of a chip differ more."""


def device_of(name: str, torch_device: str, clock: str) -> Device:
    """Return the device called `name`: from the catalog, else this machine with rates measured here. InputError where
    the name is not a slug, or names a device of the catalog that this machine does not have."""
    if name in catalog.names("devices"):
        device = catalog.device(name)
        if torch_device == "cpu" and device.architecture != CPU:
            raise InputError(
                f"{name} is {device.title}, and what would be measured is this machine's processor",
                "give a name of its own, such as my_cpu, or --torch-device cuda",
            )
        if torch_device == "cuda":
            _check_same(device, _cuda_figures())
        return device
    if not name.replace("_", "").isalnum():
        raise InputError(f"{name!r} is not a device's name", "letters, digits and _, such as h200_sxm or my_cpu")
    size = GEMM_SIZES[torch_device]
    rates = {kind: _gemm_flops_per_s(torch_device, kind, clock) for kind in ("bf16", "fp32")}
    figures = _cuda_figures() if torch_device == "cuda" else _cpu_figures()
    return Device(
        name=name,
        memory_bytes_per_s=_copy_bytes_per_s(torch_device, clock),
        peak_flops_per_s=rates,
        sources={
            "peak_flops_per_s": f"measured: the best of {BEST_OF} products of {size} x {size} matrices",
            "memory_bytes_per_s": f"measured: the best of {BEST_OF} copies of {COPY_BYTES >> 20} MiB, read and written",
        },
        **figures,
    )


def _cpu_figures() -> dict[str, Any]:
    import torch

    return {
        "title": cpu_name(),
        "vendor": platform.machine(),
        "architecture": CPU,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "num_sms": torch.get_num_threads(),
        "l2_bytes": last_level_cache_bytes(),
    }


def _cuda_figures() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        target = properties.gcnArchName.partition(":")[0]
        vendor, architecture = "amd", NAMES["amd"].get(target, target)
    else:
        capability = 10 * properties.major + properties.minor
        vendor, architecture = "nvidia", NAMES["nvidia"].get(capability, f"sm_{capability}")
    return {
        "title": properties.name,
        "vendor": vendor,
        "architecture": architecture,
        "memory_bytes": properties.total_memory,
        "num_sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
    }


def _check_same(named: Device, measured: Mapping[str, Any]) -> None:
    """Raise InputError where this machine's GPU is another chip, another board of it, or a part of one."""
    if not _is_same(named, measured):
        known = [name for name in catalog.names("devices") if _is_same(catalog.device(name), measured)]
        raise InputError(
            f"{named.name} is {named.title} ({_figures(encode(named))}), and the GPU here is {measured['title']} "
            f"({_figures(measured)})",
            f"by these figures it is {' or '.join(known)}" if known else "give it a name of its own, such as my_gpu",
        )


def _is_same(named: Device, measured: Mapping[str, Any]) -> bool:
    return (
        named.architecture == measured["architecture"]
        and named.num_sms in (None, measured["num_sms"])
        and abs(measured["memory_bytes"] / named.memory_bytes - 1) < MEMORY_TOLERANCE
    )


def _figures(device: Mapping[str, Any]) -> str:
    sms = f", {device['num_sms']} SMs" if device.get("num_sms") else ""
    return f"{device['architecture']}{sms}, {format_bytes(device['memory_bytes'])}"


def _best_seconds(work: Any, clock: str) -> float:
    best_s = float("inf")
    for _ in range(BEST_OF + 1):
        watch = stopwatch(clock)
        watch.mark("")
        work()
        watch.mark("work")
        best_s = min(best_s, watch.durations()["work"][0])
    return best_s


def _gemm_flops_per_s(torch_device: str, kind: str, clock: str) -> float:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    size = GEMM_SIZES[torch_device]
    left, right = (torch.randn(size, size, device=torch_device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _best_seconds(lambda: left @ right, clock)


def _copy_bytes_per_s(torch_device: str, clock: str) -> float:
    import torch

    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=torch_device)
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / _best_seconds(lambda: target.copy_(source), clock)


def last_level_cache_bytes(torch_device: str = "cpu") -> int:
    """Return the size of the cache that weights must exceed."""
    if torch_device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        sizes.append(int(text.rstrip("KM")) << (20 if text.endswith("M") else 10))
    return max(sizes, default=UNKNOWN_CACHE_BYTES)


def free_memory_bytes(torch_device: str) -> int:
    """Return the memory that a process may still take."""
    if torch_device == "cuda":
        import torch

        # What torch keeps of memory that nothing uses any more is free too.
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + int(kept)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def provenance_of(device: Device, torch_device: str, clock: str) -> dict[str, str]:
    """Return device, driver, libraries and method, for a table's file."""
    import torch

    about = {
        "device": device.name,
        "device_title": device.title,
        "method": NAMES["methods"][clock],
        "clock": clock,
        "num_threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "system": f"{platform.system()} {platform.release()}",
    }
    if torch_device == "cuda":
        driver = Path("/proc/driver/nvidia/version")
        version = driver.read_text(encoding="utf-8").split("\n", 1)[0] if driver.is_file() else "unknown"
        about |= {"cuda": str(torch.version.cuda), "driver": version}
    return about


def machine() -> dict[str, Any]:
    """Describe this machine: processor, memory, GPUs and the versions of libraries."""
    facts: dict[str, Any] = {
        "processor": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "gpus": [],
    }
    if find_spec("torch") is not None:
        import torch

        facts |= {"torch": torch.__version__, "cuda": torch.version.cuda, "num_threads": torch.get_num_threads()}
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            properties = torch.cuda.get_device_properties(number)
            facts["gpus"].append(
                {
                    "name": properties.name,
                    "memory_bytes": properties.total_memory,
                    "num_sms": properties.multi_processor_count,
                    "compute_capability": f"{properties.major}.{properties.minor}",
                }
            )
    return facts


def cpu_name() -> str:
    """Return the processor's name from the kernel."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_memory() -> int:
    """Return the peak memory use: of the GPU where there is one, else of this process."""
    import resource

    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
