"""Compare aggregated and disaggregated serving on four H100 at rising request rates."""

import windtunnel as wt

POOLS = {
    "aggregated, 4": [{"name": "all", "replicas": 4}],
    "disaggregated, 1 + 3": [
        {"name": "prefill", "role": "prefill", "replicas": 1},
        {"name": "decode", "role": "decode", "replicas": 3},
    ],
    "disaggregated, 2 + 2": [
        {"name": "prefill", "role": "prefill", "replicas": 2},
        {"name": "decode", "role": "decode", "replicas": 2},
    ],
}

print("requests/s  deployment            p90 TTFT ms  p90 TPOT ms  p99 ITL ms  within the SLO")
for rate in (8, 16, 20):
    for name, pools in POOLS.items():
        scenario = wt.scenario(
            model="meta-llama/Llama-3.1-8B",
            device="h100_sxm",
            router="least_outstanding",
            rate_per_s=rate,
            input_tokens=4096,
            output_tokens=256,
            num_requests=2000,
            slo={"ttft_s": 0.5, "tpot_s": 0.0125},
            settings={"deployment.pools": pools, "deployment.transfer.router": "least_outstanding"},
        )
        summary = wt.simulate(scenario).summary
        assert summary.tpot_s is not None
        assert summary.itl_s is not None
        assert summary.goodput is not None
        print(
            f"{rate:10}  {name:20}  {summary.ttft_s.p90 * 1e3:11.0f}  {summary.tpot_s.p90 * 1e3:11.1f}  "
            f"{summary.itl_s.p99 * 1e3:10.1f}  {summary.goodput.fraction:14.0%}"
        )
