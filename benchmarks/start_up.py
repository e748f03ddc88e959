"""CPU seconds of a start: `--help`, a simulation whose loop was compiled before, and the first one on a machine.

CPU time (user and system) is printed, not wall time: other work on the machine changes it little. The least of several
starts counts. After `windtunnel warm --out src/windtunnel/kernels` the first run is that of a wheel with its loops.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence

REPEATS = 5
SIMULATE = (
    *("simulate", "--model", "meta-llama/Llama-3.1-70B", "--device", "h100_sxm", "--tp", "4", "--quant", "fp8"),
    *("--engine", "vllm", "--input-tokens", "1024", "--output-tokens", "1024"),
    *("--concurrency", "64", "--num-requests", "10000"),
)


def cpu_s(arguments: Sequence[str], repeats: int = REPEATS, **environment: str) -> float:
    """Return the least CPU seconds of a command in `repeats` processes."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    least_s = float("inf")
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "windtunnel", *arguments]
        subprocess.run(command, env=without | environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least_s = min(least_s, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return least_s


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        first_s = cpu_s(SIMULATE, 1, NUMBA_CACHE_DIR=folder, XDG_CACHE_HOME=folder)
        again_s = cpu_s(SIMULATE, NUMBA_CACHE_DIR=folder, XDG_CACHE_HOME=folder)
    print("| command | CPU seconds |\n|---|---|")
    print(f"| `--help` | {cpu_s(['--help']):.3f} |")
    print(f"| `simulate`, 10,000 requests | {again_s:.2f} |")
    print(f"| the same, first run | {first_s:.1f} |")


if __name__ == "__main__":
    main()
