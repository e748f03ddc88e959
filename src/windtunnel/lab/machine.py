"""Facts about this machine, and its peak memory use."""

import os
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Any


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
