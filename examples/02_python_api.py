"""Build a scenario in Python, simulate it, and read the records as arrays."""

import numpy as np

import windtunnel as wt

scenario = wt.scenario(
    model="meta-llama/Llama-3.1-8B",
    device="h100_sxm",
    rate_per_s=20,
    input_tokens={"type": "lognormal", "median_tokens": 512, "sigma": 0.8, "max_tokens": 8192},
    output_tokens=128,
    num_requests=2000,
    slo={"ttft_s": 0.2},
)
result = wt.simulate(scenario)

print(f"p99 TTFT {result.summary.ttft_s.p99 * 1e3:.0f} ms, bound by {result.summary.bound_by}")

# One row per request, one row per sequence of equal steps. `to_arrow()` and `to_pandas()` convert the numpy columns.
requests, steps = result.requests, result.steps
long = requests["input_tokens"] > 2048
print(f"{long.sum()} prompts above 2048 tokens wait {np.mean(requests['ttft_s'][long]) * 1e3:.0f} ms on average,")
print(f"the others {np.mean(requests['ttft_s'][~long]) * 1e3:.0f} ms.")
print(f"At most {steps['num_running'].max()} requests ran at once.")
print("Columns:", ", ".join(requests.to_arrow().column_names))
