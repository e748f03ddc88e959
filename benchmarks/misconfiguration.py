"""Two findings of Vidur's authors, looked for on the shipped traces and models: the best deployment changes with the
workload, and models of equal size need different ones.

Source of the findings: Agrawal et al., Vidur: A Large-Scale Simulation Framework For LLM Inference (MLSys 2024),
section 7: they serve LLaMA2-70B (grouped queries) and Qwen-72B (multi-head attention), and search for the most queries
per dollar with TTFT p90 under 2 s and time between tokens p99 under 200 ms. Their traces but one are not shipped here;
these are Azure's of 2023, for conversations and for code.
"""

import sys
import time
from typing import Any

from windtunnel.search.answers import equally_good, misconfiguration
from windtunnel.search.space.space import space_from
from windtunnel.search.store import Store
from windtunnel.search.study import Study, search

MODELS = ("meta-llama/Llama-2-70b-hf", "Qwen/Qwen-72B")
VARY: dict[str, Any] = {
    "device": ["a100_sxm", "h100_sxm"],
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4],
    "max_num_batched_tokens": [512, 1024, 2048, 4096],
    "max_num_seqs": [32, 64, 128, 256, 512],
}
LIMITS = {"ttft_p90": "2s", "itl_p99": "200ms"}


def workload(trace: str, num_requests: int) -> dict[str, Any]:
    """The trace's lengths, cut to the 4,096 tokens that Llama 2 accepts, under Poisson arrivals."""
    return {
        "trace": {"path": trace, "max_tokens": 4096},
        "arrivals": {"type": "poisson", "rate_per_s": 1.0},
        "num_requests": num_requests,
    }


def study_of(model: str, num_requests: int) -> Study:
    raw = {
        "model": model,
        "deployment": {"device": "h100_sxm", "engine": {"name": "vllm"}},
        "workload": workload("azure2023_conv", num_requests),
        "workloads": {
            "conversations": workload("azure2023_conv", num_requests),
            "code": workload("azure2023_code", num_requests),
        },
        "vary": VARY,
        "limits": LIMITS,
        "budget": {"devices": 16},
    }
    return search(space_from(raw), Store(None, print))


def shown(num_requests: int) -> None:
    print("| model | workload | best deployment | requests/s | requests/$ | bound of the load |")
    print("|---|---|---|---|---|---|")
    studies = {model: study_of(model, num_requests) for model in MODELS}
    for model, study in studies.items():
        for found in study.outcomes:
            index = found.ranking[0]
            one = found.evaluations[index]
            equal = len(equally_good(study, found)) - 1
            also = f" (and {equal} as good)" if equal else ""
            print(
                f"| {model} | {found.workload} | {study.point(index).title}{also} | {one.load:.2f} "
                f"| {one.figures['requests_per_usd']:,.0f} | {one.limited_by.replace('_', ' ')} |"
            )
    print("\n| model | best for | under conversations | under code |\n|---|---|---|---|")
    for model, study in studies.items():
        for found, row in zip(study.outcomes, misconfiguration(study, Store(None, print)), strict=True):
            print(f"| {model} | {found.workload} | {' | '.join(f'{share:.0%}' for share in row)} |")
    print("\n| workload | best of | for Llama-2-70b | for Qwen-72B |\n|---|---|---|---|")
    llama, qwen = studies.values()
    for at, found in enumerate(llama.outcomes):
        for name, chosen in (
            ("Llama-2-70b", equally_good(llama, found)),
            ("Qwen-72B", equally_good(qwen, qwen.outcomes[at])),
        ):
            worth = [worth_of(study, at, chosen) for study in (llama, qwen)]
            print(f"| {found.workload} | {name} | {' | '.join(worth)} |")


def worth_of(study: Study, at: int, indices: list[int]) -> str:
    """The score of the best of some points as a share of the best of all, or that none can be."""
    found = study.outcomes[at]
    reached = [found.evaluations[index] for index in indices if not found.evaluations[index].refused]
    if not reached:
        return "does not fit"
    best = found.evaluations[found.ranking[0]].figures["requests_per_usd"]
    return f"{max(one.figures.get('requests_per_usd', 0.0) for one in reached) / best:.0%}"


if __name__ == "__main__":
    began_s = time.process_time()
    shown(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    print(f"\n{time.process_time() - began_s:.0f} CPU s")
