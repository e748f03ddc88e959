"""Experts over many ranks, published and predicted: DeepSeek-V3 and Kimi-K2 on 4 to 96 devices. Nothing was fitted.

    python benchmarks/two_batches.py

Sources, all of LMSYS, with the settings of the scripts that they name:

- "Deploying DeepSeek with PD Disaggregation and Large-scale Expert Parallelism on 96 H100 GPUs" (May 2025),
  "Performance Analysis", "Overall Throughput" and "Ablation Study: Two-batch Overlap": prompts of 1,024 to 4,096 tokens
  over 32 ranks in steps of 16,384 tokens each, by DeepEP's normal kernels; requests of 2,000 tokens over 72 ranks, by
  its low-latency kernels. It repeats DeepSeek's own profile of prompts (github.com/deepseek-ai/profile-data), in which
  every expert has equally many tokens, and has a run of its own in which it simulates that. How long low-latency
  kernels take multiprocessors is from the same text (`OCCUPIED_BY_LOW_LATENCY`); it was looked up after its rows had
  been predicted without it.
- "Deploying Kimi K2 with PD Disaggregation and Large-Scale Expert Parallelism on 128 H200 GPUs" (July 2025).
- "Deploying DeepSeek on GB200 NVL72 with PD and Large Scale EP", part I (June 2025) and II (September 2025;
  sgl-project/sglang, issue 10903). Part II has `--enable-single-batch-overlap`.
- Single-batch overlap on 16 H20 (deepseek-ai/DeepEP, pull request 390; sgl-project/sglang, 9660): 32 requests a rank of
  4,096 tokens and 1,536 to come, mean inter-token latency 72.37 ms without it and 67.35 with it. DeepGEMM has smaller
  tiles for few rows there than the tables that price them, so that the gain alone is compared.

Tables of SGLang 0.5.6 to 0.5.14 price the versions that served, 0.4.6 to 0.5.3.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any, NamedTuple

from windtunnel.model.launches.forward import StepBatch
from windtunnel.serving.explain import Explanation, explain_step
from windtunnel.serving.scenario import resolve, scenario_from

DEEPSEEK, KIMI, FP4 = "deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct", "nvidia/DeepSeek-R1-0528-NVFP4-v2"
NORMAL, LOW_LATENCY = "deepep_normal", "deepep_low_latency"


class Published(NamedTuple):
    """A measured step; None where the text gives no figure."""

    name: str
    device: str
    ranks: int
    kernels: str
    batch: StepBatch
    tokens_per_s: float | None = None
    """Of a device."""
    gain: tuple[float, float] | None = None
    """Least and most of throughput with two batches over that without, less one."""
    model: str = DEEPSEEK
    redundant: int = 32
    overlaps: bool = True
    """Whether it computed in two batches."""
    beside: bool = False
    """Whether single-batch overlap was on."""


def prompts(num_tokens: int, length: int) -> StepBatch:
    return StepBatch(prefill_tokens=num_tokens, prefill_pairs=num_tokens * length / 2, sampled=num_tokens // length)


def requests(num: int) -> StepBatch:
    return StepBatch(decode_requests=num, decode_context_tokens=2048.0, sampled=num)


def of_node(tokens_per_s: float) -> float:
    """Return the rate of one of a node's eight devices."""
    return tokens_per_s / 8


ROWS = (
    Published("prompts of 4,096, steps of 8,192", "h100_sxm", 32, NORMAL, prompts(8192, 4096), gain=(0.27, 0.35)),
    Published("prompts of 1,024", "h100_sxm", 32, NORMAL, prompts(16384, 1024), of_node(57_674)),
    Published("prompts of 2,048", "h100_sxm", 32, NORMAL, prompts(16384, 2048), of_node(54_543)),
    Published("prompts of 4,096", "h100_sxm", 32, NORMAL, prompts(16384, 4096), of_node(50_302)),
    Published("prompts of 4,096, experts balanced", "h100_sxm", 32, NORMAL, prompts(16384, 4096), of_node(59_337)),
    Published("prompts of 4,096, DeepSeek's profile", "h800_sxm", 32, NORMAL, prompts(16384, 4096), of_node(62_713)),
    Published("32 requests a device", "h100_sxm", 72, LOW_LATENCY, requests(32), gain=(-0.27, -0.27)),
    Published(
        "256 requests a device", "h100_sxm", 72, LOW_LATENCY, requests(256), of_node(22_310), gain=(0.255, 0.255)
    ),
    Published(
        "Kimi-K2, prompts of 2,048", "h200_sxm", 32, NORMAL, prompts(16384, 2048), of_node(56_000), None, KIMI, 0
    ),
    Published(
        "Kimi-K2, 480 requests a device", "h200_sxm", 96, LOW_LATENCY, requests(480), of_node(24_000), None, KIMI, 96
    ),
    Published("768 requests, part I", "gb200", 48, LOW_LATENCY, requests(768), 7_583, overlaps=False),
    Published("768 requests, part II", "gb200", 48, LOW_LATENCY, requests(768), 9_087, overlaps=False, beside=True),
    Published(
        "1,408 requests, NVFP4",
        "gb200",
        48,
        LOW_LATENCY,
        requests(1408),
        13_386,
        None,
        FP4,
        overlaps=False,
        beside=True,
    ),
    Published(
        "32 requests, one batch",
        "h20",
        16,
        LOW_LATENCY,
        StepBatch(decode_requests=32, decode_context_tokens=4864.0, sampled=32),
        gain=(72.37 / 67.35 - 1,) * 2,
        redundant=0,
        overlaps=False,
        beside=True,
    ),
    Published("prompts of 2,048", "gb200", 8, NORMAL, prompts(16384, 2048), 18_471, overlaps=False),
    Published(
        "prompts of 2,048, NVFP4", "gb200", 4, "all_gather", prompts(16384, 2048), 26_156, None, FP4, 0, overlaps=False
    ),
)


def step_of(row: Published, *, overlaps: bool) -> Explanation:
    """Price the row's step with and without what overlaps in it."""
    placed: dict[str, Any] = {} if row.kernels == "all_gather" else {"enable_eplb": True}
    if row.redundant:
        placed["num_redundant_experts"] = row.redundant
    engine = placed | {
        "name": "sglang",
        "version": "0.4.6",
        "all2all_backend": row.kernels,
        "max_num_seqs": 2048,
        "max_num_batched_tokens": 16384,
        "gpu_memory_utilization": 0.9,
        "two_batch_overlap": overlaps and row.overlaps,
        "single_batch_overlap": overlaps and row.beside,
    }
    parallelism = {"attention_dp": row.ranks, "ep": row.ranks}
    deployment = {"device": row.device, "parallelism": parallelism, "engine": engine, "calibration": "none"}
    workload = {"arrivals": {"type": "burst"}, "input_tokens": 4096, "output_tokens": 100, "num_requests": 1}
    scenario = scenario_from({"model": row.model, "deployment": deployment, "workload": workload})
    return explain_step(resolve(scenario), row.batch)


def main() -> int:
    print("| step | device | ranks | tokens/s a device, published | predicted | error | gain by overlap | predicted |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    errors = []
    for row in ROWS:
        served = step_of(row, overlaps=True)
        rate = row.batch.num_tokens / served.step_s
        cells = [row.name, row.device, str(row.ranks), "", "", ""]
        if row.tokens_per_s is not None:
            errors.append(rate / row.tokens_per_s - 1)
            cells[3:] = [f"{row.tokens_per_s:,.0f}", f"{rate:,.0f}", f"{errors[-1]:+.1%}"]
        cells += [" to ".join(dict.fromkeys(f"{share:+.1%}" for share in row.gain)) if row.gain else ""]
        cells += [
            f"{step_of(row, overlaps=False).step_s / served.step_s - 1:+.1%}" if row.overlaps or row.beside else ""
        ]
        print(f"| {' | '.join(cells)} |")
    median = statistics.median(map(abs, errors))
    print(f"\n{len(ROWS)} rows, none refused; median error of {len(errors)} rates {median:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
