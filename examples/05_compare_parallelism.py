"""Compare latency and cost of 1 to 8 devices per replica, at the same load per device."""

import windtunnel as wt

print("tp  TPOT ms  p99 TTFT ms  tokens/s per device  $ per million output tokens")
for tp in (1, 2, 4, 8):
    scenario = wt.scenario(
        model="Qwen/Qwen3-32B",
        device="h100_sxm",
        quant="fp8",
        tp=tp,
        concurrency=32 * tp,
        input_tokens=1024,
        output_tokens=256,
        num_requests=320 * tp,
    )
    summary = wt.simulate(scenario).summary
    assert summary.tpot_s is not None
    assert summary.cost is not None
    print(
        f"{tp:2}  {summary.tpot_s.mean * 1e3:7.1f}  {summary.ttft_s.p99 * 1e3:11.0f}  "
        f"{summary.throughput.output_tokens_per_s_per_device:19,.0f}  "
        f"{summary.cost.usd_per_million_output_tokens:27.2f}"
    )
