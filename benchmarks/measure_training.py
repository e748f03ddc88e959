"""Measure attention, matrix products and whole training steps by PyTorch on the GPU at hand.

    python benchmarks/measure_training.py --out measured/h100 [--only attention] [--minutes 9]

Writes `attention.csv` (forward and backward of causal attention by torch's flash and cuDNN kernels, by length),
`products.csv` (the rate of large matrix products from their first milliseconds on, second by second) and `steps.csv`
(steps of models under FSDP2 with one rank, fp32 parameters and bf16 computation: time and memory). What is measured is
kept, and the command goes on where it stopped. `--only host` needs no GPU: it prints what a host takes to launch a
layer that computes nothing, with and without FSDP2. Needs torch and transformers, not Windtunnel.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS = ((32, 8, 128), (16, 16, 128), (32, 8, 64), (16, 2, 256))
"""Query heads, KV heads, values of a head."""
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

LLAMA_1B = {"kind": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
            "tie_word_embeddings": True}  # fmt: skip
LLAMA_8B_LAYERS = {"kind": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
                   "tie_word_embeddings": False}  # fmt: skip
QWEN_600M = {"kind": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
             "tie_word_embeddings": True}  # fmt: skip
MODELS = {"llama-3.2-1b": LLAMA_1B, "llama-3.1-8b-8-layers": LLAMA_8B_LAYERS, "qwen3-0.6b": QWEN_600M}
STEPS = (
    ("llama-3.2-1b", 2048, 4, "none", False), ("llama-3.2-1b", 8192, 1, "none", False),
    ("llama-3.2-1b", 8192, 2, "full", False), ("llama-3.2-1b", 32768, 1, "full", False),
    ("llama-3.1-8b-8-layers", 4096, 2, "none", False), ("llama-3.1-8b-8-layers", 8192, 1, "full", False),
    ("llama-3.1-8b-8-layers", 32768, 1, "full", False), ("qwen3-0.6b", 4096, 2, "none", False),
    ("qwen3-0.6b", 16384, 1, "full", False), ("llama-3.1-8b-8-layers", 4096, 2, "none", True),
    ("llama-3.2-1b", 8192, 1, "none", True), ("llama-3.2-1b", 65536, 1, "full", False),
)  # fmt: skip
"""Model, tokens of a sequence, sequences, recomputation, whether layers are compiled."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=("attention", "products", "steps", "host"))
    parser.add_argument("--minutes", type=float, default=9.0)
    arguments = parser.parse_args()
    if arguments.only == "host":
        show_host()
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + 60 * arguments.minutes
    parts = {"attention": attention_rows, "products": product_rows, "steps": step_rows}
    for name, rows in parts.items():
        if arguments.only in (None, name):
            write(arguments.out / f"{name}.csv", rows, ends_s)


def write(path: Path, rows: Callable[[set[tuple[str, ...]]], Iterator[dict[str, Any]]], ends_s: float) -> None:
    """Append rows to a table as they are measured; those that it has are not measured again."""
    known = [] if not path.is_file() else list(csv.DictReader(path.open()))
    done = {tuple(row[key] for key in row if key.startswith("of_")) for row in known}
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    with path.open("a", newline="") as output:
        writer = None
        for row in rows(done):
            row |= about
            if writer is None:
                writer = csv.DictWriter(output, list(row))
                if not known:
                    writer.writeheader()
            writer.writerow(row)
            output.flush()
            print(path.stem, " ".join(str(value) for value in list(row.values())[:-3]), flush=True)
            if time.monotonic() > ends_s:
                sys.exit("the time is over: give the command again")


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call on the device."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def attention_rows(done: set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    for heads, kv_heads, size in HEADS:
        for tokens in LENGTHS:
            for kernel in BACKENDS:
                key = {"of_kernel": kernel, "of_heads": heads, "of_kv_heads": kv_heads, "of_head_size": size}
                key["of_tokens"] = tokens
                if tuple(str(value) for value in key.values()) in done:
                    continue
                try:
                    yield key | measured_attention(kernel, (heads, kv_heads, size), tokens)
                except RuntimeError as error:
                    print(kernel, key, str(error).splitlines()[0], flush=True)
                torch.cuda.empty_cache()


def measured_attention(kernel: str, shape: tuple[int, int, int], tokens: int) -> dict[str, Any]:
    """Forward and backward of causal attention over as many sequences as have 16,384 tokens."""
    heads, kv_heads, size = shape
    batch = max(1, 16384 // tokens)
    q, k, v = (
        torch.randn((batch, count, tokens, size), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    repeats = 7 if tokens < 65536 else 3

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    with sdpa_kernel(BACKENDS[kernel]):
        out = attend()
        gradient = torch.randn_like(out)
        out.backward(gradient, retain_graph=True)
        forward_s = seconds(attend, repeats)
        backward_s = seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), repeats)
    flops = 4.0 * batch * heads * tokens * tokens / 2 * size
    return {
        "batch": batch,
        "forward_s": f"{forward_s:.8f}",
        "backward_s": f"{backward_s:.8f}",
        "forward_tflops": round(flops / forward_s / 1e12, 1),
        "backward_tflops": round(2.5 * flops / backward_s / 1e12, 1),
    }


def product_rows(done: set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """Large products back to back: power lowers the clock within seconds."""
    for size in (4096, 8192):
        if any(key[0] == str(size) for key in done):
            continue
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        count = max(1, int(0.05 / (2 * size**3 / 7e14)))
        multiply = functools.partial(products, a, b, count)
        torch.cuda.synchronize()
        time.sleep(2.0)
        from_s = told_s = time.monotonic()
        while (at_s := time.monotonic() - from_s) < 8:
            product_s = seconds(multiply, 1) / count
            if at_s < 0.5 or time.monotonic() - told_s > 0.5:
                told_s = time.monotonic()
                yield {"of_size": size, "of_second": round(at_s, 2), "tflops": round(2 * size**3 / product_s / 1e12, 1)}


def products(a: torch.Tensor, b: torch.Tensor, count: int) -> None:
    for _ in range(count):
        a @ b


def show_host() -> None:
    """Print the processor's milliseconds of a layer's passes, from models of 4 and 12 layers too small to compute."""
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1)
    tiny: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128}
    tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    for kind in ("llama", "qwen3"):
        for sharded in (False, True):
            shapes = [tiny | {"kind": kind, "num_hidden_layers": layers} for layers in (4, 12)]
            few, many = (host_milliseconds(sharded_model(shape, "none", False, 128, sharded)) for shape in shapes)
            forward, backward = ((more - less) / 8 for less, more in zip(few, many, strict=True))
            print(f"{kind}, {'FSDP2' if sharded else 'plain'}: {forward:.2f} ms forward, {backward:.2f} ms backward")
    dist.destroy_process_group()


def host_milliseconds(model: Any) -> tuple[float, float]:
    """Median processor time of a forward and a backward pass over eight tokens."""
    words = torch.randint(0, 128, (1, 8))
    times = []
    for _ in range(25):
        begin_s = time.process_time()
        loss = model(input_ids=words, labels=words).loss
        middle_s = time.process_time()
        loss.backward()
        times.append((middle_s - begin_s, time.process_time() - middle_s))
        model.zero_grad()
    forward, backward = (1e3 * statistics.median(column) for column in zip(*times[5:], strict=True))
    return forward, backward


def step_rows(done: set[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("nccl", rank=0, world_size=1)
    for model, tokens, sequences, recompute, compiled in STEPS:
        key = {"of_model": model, "of_tokens": tokens, "of_sequences": sequences, "of_recompute": recompute,
               "of_compiled": compiled}  # fmt: skip
        if tuple(str(value) for value in key.values()) in done:
            continue
        try:
            yield key | measured_step(MODELS[model], tokens, sequences, recompute, compiled)
        except torch.OutOfMemoryError as error:
            print("out of memory", key, str(error).splitlines()[0], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def sharded_model(shape: dict[str, Any], recompute: str, compiled: bool, tokens: int, sharded: bool = True) -> Any:
    """A Hugging Face model with random weights, each layer and the whole under FSDP2, on a GPU if there is one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    settings = {key: value for key, value in shape.items() if key != "kind"} | {"max_position_embeddings": tokens}
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[shape["kind"]](**settings)
    config._attn_implementation = "sdpa"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (1,))
    for layer in model.model.layers:
        if compiled:
            layer.compile()
        if sharded:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return (fully_shard(model, mesh=mesh, mp_policy=policy) if sharded else model).train()


def measured_step(shape: dict[str, Any], tokens: int, sequences: int, recompute: str, compiled: bool) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    model = sharded_model(shape, recompute, compiled, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    words = torch.randint(0, shape["vocab_size"], (sequences, tokens), device="cuda")
    times = []
    for number in range(8):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin_s)
    return {
        "step_s": f"{statistics.median(times[3:]):.6f}",
        "fastest_step_s": f"{min(times[3:]):.6f}",
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


if __name__ == "__main__":
    main()
