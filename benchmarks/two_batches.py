"""SGLang's two-batch overlap as published and as predicted: DeepSeek-V3 on 32 and 72 H100. Nothing was fitted to it.

    python benchmarks/two_batches.py

Source: LMSYS, "Deploying DeepSeek with PD Disaggregation and Large-scale Expert Parallelism on 96 H100 GPUs" (May
2025), "Performance Analysis" and "Ablation Study: Two-batch Overlap". Prompts of 1,024 to 4,096 tokens over 32 ranks in
steps of 16,384 tokens each, by DeepEP's normal kernels; requests of 2,048 tokens over 72 ranks, by its low-latency
kernels. How long these take multiprocessors is from the same text (`OCCUPIED_BY_LOW_LATENCY`); it was looked up after
the rows had been predicted without it. Tables of SGLang 0.5.6 and 0.5.14 price the version that served, 0.4.6.
"""

from __future__ import annotations

import statistics
import sys
from typing import NamedTuple

from windtunnel.model.launches.forward import StepBatch
from windtunnel.serving.explain import explain_step
from windtunnel.serving.scenario import Setup, resolve, scenario_from

DEVICES_A_NODE = 8


class Published(NamedTuple):
    """A measured step; None where the text gives no figure."""

    name: str
    ranks: int
    kernels: str
    batch: StepBatch
    tokens_per_s: float | None = None
    """Of a node of eight, with overlap."""
    gain: tuple[float, float] | None = None
    """Least and most of throughput with overlap over that without, less one."""


def prompts(num_tokens: int, length: int) -> StepBatch:
    return StepBatch(prefill_tokens=num_tokens, prefill_pairs=num_tokens * length / 2, sampled=num_tokens // length)


def requests(num: int) -> StepBatch:
    return StepBatch(decode_requests=num, decode_context_tokens=2048.0, sampled=num)


ROWS = (
    Published("prompts of 4,096, steps of 8,192", 32, "deepep_normal", prompts(8192, 4096), gain=(0.27, 0.35)),
    Published("prompts of 1,024", 32, "deepep_normal", prompts(16384, 1024), 57_674),
    Published("prompts of 2,048", 32, "deepep_normal", prompts(16384, 2048), 54_543),
    Published("prompts of 4,096", 32, "deepep_normal", prompts(16384, 4096), 50_302),
    Published("32 requests a device", 72, "deepep_low_latency", requests(32), gain=(-0.27, -0.27)),
    Published("256 requests a device", 72, "deepep_low_latency", requests(256), 22_310, (0.255, 0.255)),
)


def setup_of(row: Published, *, overlaps: bool) -> Setup:
    """What served the row, with and without overlap."""
    engine = {
        "name": "sglang",
        "version": "0.4.6",
        "all2all_backend": row.kernels,
        "num_redundant_experts": 32,
        "enable_eplb": True,
        "max_num_seqs": 512,
        "max_num_batched_tokens": 16384,
        "two_batch_overlap": overlaps,
    }
    parallelism = {"attention_dp": row.ranks, "ep": row.ranks}
    deployment = {"device": "h100_sxm", "parallelism": parallelism, "engine": engine, "calibration": "none"}
    workload = {"arrivals": {"type": "burst"}, "input_tokens": 4096, "output_tokens": 100, "num_requests": 1}
    model = "deepseek-ai/DeepSeek-V3"
    return resolve(scenario_from({"model": model, "deployment": deployment, "workload": workload}))


def main() -> int:
    print("| step | tokens/s a node, published | predicted | error | gain by overlap, published | predicted |")
    print("|---|---:|---:|---:|---:|---:|")
    errors = []
    for row in ROWS:
        plain, halves = (explain_step(setup_of(row, overlaps=on), row.batch) for on in (False, True))
        rate, gain = DEVICES_A_NODE * row.batch.num_tokens / halves.step_s, plain.step_s / halves.step_s - 1
        cells = ["", "", ""]
        if row.tokens_per_s is not None:
            errors.append(rate / row.tokens_per_s - 1)
            cells = [f"{row.tokens_per_s:,.0f}", f"{rate:,.0f}", f"{errors[-1]:+.1%}"]
        published = " to ".join(dict.fromkeys(f"{share:+.1%}" for share in row.gain)) if row.gain else ""
        print(f"| {' | '.join([row.name, *cells, published, f'{gain:+.1%}'])} |")
    median = statistics.median(map(abs, errors))
    print(f"\n{len(ROWS)} rows, none refused; median error of {len(errors)} rates {median:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
