"""Compare multi-turn chats with no prefix cache, with one, with a small block pool, and with host memory below it."""

import windtunnel as wt

CHATS = {
    "workload.arrivals": {"type": "closed_loop", "concurrency": 64},
    "workload.sessions": {"turns": {"type": "uniform", "least": 2, "most": 10}, "think_s": "5s"},
    "workload.shared_prompts": {"tokens": 1000},
    "workload.input_tokens": {"type": "lognormal", "median_tokens": 100, "sigma": 0.8},
    "workload.output_tokens": {"type": "lognormal", "median_tokens": 200, "sigma": 0.7},
    "workload.num_requests": 3000,
}
SMALL_POOL = {"deployment.engine.num_gpu_blocks": 3000}
HOST_MEMORY = {"deployment.engine.kv_tiers": [{"capacity_bytes": "200GiB", "bandwidth_bytes_per_s": "25GB/s"}]}

variants = {
    "no cache": {"deployment.engine.enable_prefix_caching": False},
    "prefix cache": {},
    "small pool": SMALL_POOL,
    "small pool and host memory": SMALL_POOL | HOST_MEMORY,
}

print(f"{'':29}  hit  loaded share  mean TTFT  p99 TTFT  output tokens/s")
for name, settings in variants.items():
    result = wt.simulate(
        wt.scenario(model="meta-llama/Llama-3.1-70B", device="h100_sxm", quant="fp8", tp=4, settings=CHATS | settings)
    )
    summary = result.summary
    loaded = result.requests["loaded_tokens"].sum() / max(result.requests["cached_tokens"].sum(), 1)
    print(
        f"{name:29}{summary.cache_hit_fraction or 0.0:5.0%}  {loaded:12.0%}  {summary.ttft_s.mean * 1e3:6.0f} ms"
        f"  {summary.ttft_s.p99 * 1e3:5.0f} ms  {summary.throughput.output_tokens_per_s:15,.0f}"
    )
