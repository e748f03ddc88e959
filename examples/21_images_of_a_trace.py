"""Replay a trace whose requests have images, of which many come again, on vLLM and on SGLang."""

import json
import tempfile
from pathlib import Path

import numpy as np

import windtunnel as wt

rng = np.random.default_rng(0)
SIZES = [(1024, 768), (768, 1024), (512, 512), (1600, 1200)]
images = [(*SIZES[rng.integers(4)], f"image {number}") for number in range(100)]
popularity = 1 / np.arange(1, 101)

rows = []
for arrival_s in np.cumsum(rng.exponential(0.15, 400)):
    chosen = rng.choice(100, size=rng.integers(0, 4), p=popularity / popularity.sum())
    request = {"arrival_s": arrival_s, "input_tokens": 200, "output_tokens": 100}
    rows.append(request | {"images": [images[number] for number in chosen]})

engines = {
    "vLLM": {"name": "vllm"},
    "SGLang, 100 MiB": {"name": "sglang"},
    "SGLang, 8 GiB": {"name": "sglang", "encoder_cache_bytes": "8GiB"},
    "SGLang, no cache": {"name": "sglang", "encoder_cache_bytes": 0},
}
with tempfile.TemporaryDirectory() as folder:
    trace = Path(folder) / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{'':18}encoder  mean TTFT  p99 TTFT")
    for name, engine in engines.items():
        settings = {"workload.trace": {"path": str(trace)}, "deployment.engine": engine}
        result = wt.simulate(wt.scenario(model="Qwen/Qwen3-VL-8B-Instruct", device="h100_sxm", settings=settings))
        ttft_s, encoder = result.summary.ttft_s, result.summary.time_fractions["encoder"]
        print(f"{name:18}{encoder:7.1%}  {ttft_s.mean * 1e3:6.0f} ms  {ttft_s.p99 * 1e3:5.0f} ms")
print(result.trace_remarks[0])
