"""Measure one rank's part of context-parallel attention, and what kernels draw, by PyTorch on the GPU at hand.

    python benchmarks/measure_ring.py --out measured/h100

Writes `ring.csv`: forward and backward of PyTorch's own ring attention as one rank computes it; messages to the other
ranks are answered by nobody (the `fake` backend), so that their time is not in it. Writes `power.csv`: seconds, watts
and clock of matrix products of random numbers and of zeros, of attention and of copies. Needs torch and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from measure_training import seconds

HEADS, HEAD_SIZE = 32, 128
"""Of Llama-3.1-8B, whose KV heads torchtitan repeats before it attends."""
SHARDS = ((32768, 1), (32768, 2), (32768, 4), (32768, 8), (8192, 4))
"""Tokens of a rank, ranks."""
POWER_S = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    for name, rows in {"ring": ring_rows, "power": power_rows}.items():
        with (arguments.out / f"{name}.csv").open("w", newline="") as output:
            writer = None
            for row in rows():
                writer = writer or csv.DictWriter(output, [*row, *about])
                if not output.tell():
                    writer.writeheader()
                writer.writerow(row | about)
                output.flush()
                print(name, *row.values(), flush=True)


def ring_rows() -> Iterator[dict[str, Any]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for tokens, ranks in SHARDS:
        for rank in sorted({0, ranks // 2, ranks - 1}):
            dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
            for balanced in (True, False) if ranks > 1 else (True,):
                for rotate in ("allgather", "alltoall"):
                    if rotate == "alltoall" and (rank != ranks - 1 or not balanced):
                        continue
                    key = {"tokens": tokens, "ranks": ranks, "rank": rank, "balanced": balanced, "rotate": rotate}
                    ring._cp_options.enable_load_balance = balanced
                    ring.set_rotate_method(rotate)
                    try:
                        yield key | measured_ring(tokens)
                    except (RuntimeError, TypeError, AttributeError) as error:
                        print(key, type(error).__name__, str(error).splitlines()[0], flush=True)
                    torch.cuda.empty_cache()
            dist.destroy_process_group()


def measured_ring(tokens: int) -> dict[str, Any]:
    """Forward and backward of causal attention over `tokens` of a rank, by FlashAttention-2."""
    shape = (1, HEADS, tokens, HEAD_SIZE)
    q, k, v, gradient = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    aten, group = torch.ops.aten, dist.group.WORLD

    def forward() -> Any:
        return ring._templated_ring_attention(
            group, 2, aten._scaled_dot_product_flash_attention, q, k, v, is_causal=True, dropout_p=0.0
        )

    out, logsumexp, *rest = forward()
    cum_q, cum_k, max_q, max_k, seed, offset, _ = rest

    def backward() -> Any:
        return ring._templated_ring_attention_backward(
            group,
            2,
            aten._scaled_dot_product_flash_attention_backward.default,
            grad_out=gradient,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=logsumexp,
            is_causal=True,
            cum_seq_q=cum_q,
            cum_seq_k=cum_k,
            max_q=max_q,
            max_k=max_k,
            dropout_p=0.0,
            philox_seed=seed,
            philox_offset=offset,
        )

    torch.cuda.reset_peak_memory_stats()
    backward()
    forward_s, backward_s = seconds(forward, 5), seconds(backward, 5)
    peak = torch.cuda.max_memory_allocated()
    return {"forward_s": f"{forward_s:.6f}", "backward_s": f"{backward_s:.6f}", "peak_bytes": peak}


def power_rows() -> Iterator[dict[str, Any]]:
    import pynvml  # type: ignore[import-not-found]

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for name, (run, flops, num_bytes) in kernels().items():
        run()
        torch.cuda.synchronize()
        watts: list[float] = []
        clocks: list[float] = []
        over = threading.Event()

        def sample(over: threading.Event = over, watts: list[float] = watts, clocks: list[float] = clocks) -> None:
            while not over.wait(0.05):
                watts.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
                clocks.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))

        watcher = threading.Thread(target=sample)
        watcher.start()
        count, from_s = 0, time.monotonic()
        while time.monotonic() - from_s < POWER_S:
            for _ in range(10):
                run()
            torch.cuda.synchronize()
            count += 10
        call_s = (time.monotonic() - from_s) / count
        over.set()
        watcher.join()
        late = len(watts) // 3
        yield {
            "kernel": name,
            "seconds": f"{call_s:.8f}",
            "watts": round(statistics.mean(watts[late:]), 1),
            "mhz": round(statistics.mean(clocks[late:])),
            "tflops": round(flops / call_s / 1e12, 1),
            "gbytes_per_s": round(num_bytes / call_s / 1e9, 1),
        }


def kernels() -> dict[str, tuple[Callable[[], object], float, float]]:
    """Name -> call, floating-point operations, bytes."""
    made: dict[str, tuple[Callable[[], object], float, float]] = {}

    def product(name: str, m: int, n: int, k: int, fill: float, dtype: torch.dtype = torch.bfloat16) -> None:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        a[int(m * fill) :] = 0
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        size = m * k + n * k
        if dtype is torch.bfloat16:
            made[name] = (lambda: a @ b.T, 2.0 * m * n * k, 2.0 * (size + m * n))
            return
        a8, b8, one = a.to(dtype), b.to(dtype), torch.ones((), device="cuda")
        made[name] = (
            lambda: torch._scaled_mm(a8, b8.T, one, one, out_dtype=torch.bfloat16),
            2.0 * m * n * k,
            size + 2.0 * m * n,
        )

    for fill in (1.0, 0.5, 0.125, 0.0):
        product(f"bf16 8192 x 8192 x 8192, {fill:.3g} of rows random", 8192, 8192, 8192, fill)
        product(f"fp8 8192 x 8192 x 8192, {fill:.3g} of rows random", 8192, 8192, 8192, fill, torch.float8_e4m3fn)
    for rows in (16, 64, 128, 256, 512):
        product(f"bf16 {rows} x 28672 x 8192", rows, 28672, 8192, 1.0)
        product(f"fp8 {rows} x 28672 x 8192", rows, 28672, 8192, 1.0, torch.float8_e4m3fn)
    x, y = (torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    made["copy of 2 GiB"] = (lambda: y.copy_(x), 0.0, 4.0 * x.numel())
    q, k, v = (torch.randn((1, HEADS, 16384, HEAD_SIZE), device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flops = 2.0 * HEADS * HEAD_SIZE * 16384**2
    attend = torch.nn.functional.scaled_dot_product_attention
    made["causal attention of 16384 tokens"] = (lambda: attend(q, k, v, is_causal=True), flops, 0.0)
    made["idle"] = (lambda: time.sleep(0.05), 0.0, 0.0)
    return made


if __name__ == "__main__":
    main()
