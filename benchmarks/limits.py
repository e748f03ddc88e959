"""Memory and time that a request, a flow, a packet, a GPU, a task, a run and a point take, beside the estimates.

`python benchmarks/limits.py` runs a command at two sizes, each in a process of its own, and divides the differences of
its peak memory and its CPU time by that of its counts. An estimate is safe where the ratio in the last columns is 1 or
less. Loops that are compiled take long the first time: run it twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from windtunnel.limits import COSTS

SERVED = ("--model", "llama-3.1-8b", "--device", "h100_sxm")
SPACE = {
    "model": "llama-3.1-8b",
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "input_tokens": 64,
        "output_tokens": 4,
        "num_requests": 20,
        "arrivals": {"type": "poisson", "rate_per_s": 2.0},
    },
    "load": "given",
}


def simulate(num_requests: int, output_tokens: int) -> tuple[str, ...]:
    lengths = ("--input-tokens", "64", "--output-tokens", str(output_tokens))
    return ("simulate", *SERVED, *lengths, "--concurrency", "64", "--num-requests", str(num_requests))


def collective(num_gpus: int) -> tuple[str, ...]:
    fabric = ("--topology", f"spectrum_x:num_gpus={num_gpus}")
    return ("collective", "--op", "all_reduce", "--size", "1MiB", *fabric, "--backend", "flow", "--compat", "simai")


def topology(num_gpus: int) -> tuple[str, ...]:
    return ("topology", "check", f"alibaba_hpn:num_gpus={num_gpus}")


def train(global_batch: int) -> tuple[str, ...]:
    size = ("--num-devices", "8", "--pp", "8", "--sequence-tokens", "1024", "--global-batch", str(global_batch))
    return ("train", *SERVED, *size)


def search(num_limits: int, folder: Path) -> tuple[str, ...]:
    path = folder / f"{num_limits}.json"
    path.write_text(json.dumps(SPACE | {"vary": {"max_num_seqs": list(range(1, num_limits + 1))}}))
    return ("search", str(path), "--no-store", "--executor", "here")


def trace(num_rows: int, folder: Path) -> tuple[str, ...]:
    """Read a trace: no verb reads one alone."""
    path = folder / f"{num_rows}.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "1,300,20\n" * num_rows)
    code = (
        "import sys; from windtunnel.workload.traces import requests as r; r.read_requests(r.Trace(path=sys.argv[1]))"
    )
    return ("-c", code, str(path))


def packets(num_bytes: int) -> tuple[str, ...]:
    fabric = ("--topology", "fat_tree:num_gpus=16,gpus_per_server=1,radix=8")
    return ("collective", "--op", "all_to_all", "--size", str(num_bytes), *fabric, "--backend", "packet")


def validate(num_runs: int, folder: Path) -> tuple[str, ...]:
    path = folder / f"{num_runs}.csv"
    columns = "id,model,device,tp,max_num_seqs,input_tokens,output_tokens,concurrency,num_requests,ttft_ms,tpot_ms"
    rows = [f"{number},qwen2.5-0.5b,h100_sxm,1,16,56,4,{1 + number % 8},10,20,3" for number in range(num_runs)]
    path.write_text("\n".join([columns, *rows]))
    return ("validate", str(path))


def commands(folder: Path) -> dict[str, tuple[tuple[float, tuple[str, ...]], tuple[float, tuple[str, ...]]]]:
    """Kind of things -> count and command, small and large."""
    return {
        "requests": ((20_000, simulate(20_000, 2)), (400_000, simulate(400_000, 2))),
        "tokens": ((5_000_000, simulate(50_000, 100)), (50_000_000, simulate(50_000, 1_000))),
        "flows": tuple((2 * n * (n - 1), collective(n)) for n in (64, 512)),  # type: ignore[dict-item]
        "GPUs": ((1_024, topology(1_024)), (16_384, topology(16_384))),
        "tasks": ((2 * 8 * 64, train(64)), (2 * 8 * 4_096, train(4_096))),
        "trace rows": ((100_000, trace(100_000, folder)), (2_000_000, trace(2_000_000, folder))),
        # Each GPU sends 15 of the 16 parts of its buffer, in packets of 4 KiB.
        "packets": tuple((15 * n // 4096, packets(n)) for n in (1 << 24, 1 << 29)),  # type: ignore[dict-item]
        "measured runs": ((10, validate(10, folder)), (60, validate(60, folder))),
        "points": ((400, search(400, folder)), (1_600, search(1_600, folder))),
    }


def measured(words: tuple[str, ...]) -> tuple[float, float]:
    """Return the peak memory in bytes, and the CPU seconds of a command."""
    program = () if words[0] == "-c" else ("-m", "windtunnel")
    process = subprocess.Popen([sys.executable, *program, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {process.returncode}")
    return usage.ru_maxrss * 1024.0, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print what a thing of each kind takes, and its ratio to the estimate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, ((few, small), (many, large)) in commands(Path(folder)).items():
            if options.only not in kind:
                continue
            (small_bytes, small_s), (large_bytes, large_s) = measured(small), measured(large)
            each_bytes, each_s = (
                (large - small) / (many - few) for large, small in ((large_bytes, small_bytes), (large_s, small_s))
            )
            most_bytes, most_s = COSTS[kind]
            rows.append({
                "kind": kind, "bytes": each_bytes, "seconds": each_s,
                "bytes_ratio": each_bytes / most_bytes if most_bytes else None, "seconds_ratio": each_s / most_s,
            })  # fmt: skip
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'kind':14} {'bytes':>9} {'seconds':>9} {'of estimate':>12} {'of estimate':>12}")
    for row in rows:
        share = f"{row['bytes_ratio']:12.2f}" if row["bytes_ratio"] is not None else f"{'':12}"
        print(f"{row['kind']:14} {row['bytes']:9,.0f} {row['seconds']:9.2g} {share} {row['seconds_ratio']:12.2f}")


if __name__ == "__main__":
    main()
