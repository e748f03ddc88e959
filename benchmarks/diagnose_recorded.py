"""What `windtunnel diagnose` says of recorded runs of real servers, described by model and device alone.

    python benchmarks/diagnose_recorded.py [DIR]

DIR holds `serving/per_request/` (it is also taken from WINDTUNNEL_REFERENCE): requests of CodeLlama-34B on one H100,
with the size of its KV cache, and of Llama-3.1-8B and Qwen3-32B on RTX cards, whose limits of running requests
`serving/llmservingsim_vllm.csv` has: they are not given to the diagnosis.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import windtunnel as wt
from reference import REFERENCE
from windtunnel.production.diagnose import diagnose
from windtunnel.production.observed import Observed, observed
from windtunnel.report.diagnosis import verdict
from windtunnel.serving.scenario import Scenario

BLOCK_TOKENS = 16
RTX: dict[str, dict[str, Any]] = {
    "RTX4090/Llama-3.1-8B": {"model": "llama-3.1-8b", "device": "rtx_4090"},
    "RTXPRO6000/Llama-3.1-8B": {"model": "llama-3.1-8b", "device": "rtx_pro_6000_server"},
    "RTXPRO6000/Qwen3-32B": {"model": "qwen3-32b", "device": "rtx_pro_6000_server", "tp": 2},
}


def described(num_blocks: int | None = None, **options: str | int) -> Scenario:
    settings = {} if num_blocks is None else {"deployment.engine.num_gpu_blocks": num_blocks}
    return wt.scenario(**options, rate_per_s=1.0, input_tokens=1, output_tokens=1, settings=settings)  # type: ignore[arg-type]


def runs(folder: Path) -> Iterator[tuple[str, Scenario, Observed]]:
    """Yield the name of each run, its deployment and its requests."""
    spans = pd.read_csv(folder / "blis_vllm_otel_requests.csv.gz")
    for name, rows in spans.groupby("experiment"):
        columns = {each: rows[each].to_numpy(np.float64) for each in ("arrival_s", "ttft_s", "e2e_s")}
        columns |= {"input_tokens": rows["prompt_tokens"].to_numpy()}
        columns |= {"output_tokens": rows["completion_tokens"].clip(lower=1).to_numpy()}
        num_blocks = int(rows["kv_cache_tokens"].iloc[0]) // BLOCK_TOKENS
        server = described(num_blocks, model="codellama/CodeLlama-34b-Instruct-hf", device="h100_sxm")
        yield str(name), server, observed(columns)
    clients = pd.read_csv(folder / "llmservingsim_vllm_requests.csv.gz")
    for name, rows in clients.groupby("case"):
        columns = {each: rows[each].to_numpy() for each in ("arrival_s", "input_tokens", "output_tokens")}
        columns |= {"ttft_s": rows["ttft_ms"].to_numpy() / 1e3, "e2e_s": rows["latency_ms"].to_numpy() / 1e3}
        yield str(name), described(**RTX[str(name)]), observed(columns)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else REFERENCE)
    alarms, num_runs = 0, 0
    for name, server, requests in runs(folder / "serving" / "per_request"):
        diagnosis = diagnose(server, requests)
        num_runs, alarms = num_runs + 1, alarms + bool(diagnosis.late)
        causes = ", ".join(f"{each.name} {each.severity:.3g}" for each in diagnosis.findings)
        print(f"{name} ({requests.arrival_s.size} requests): {verdict(diagnosis)} [{causes or 'no cause'}]", flush=True)
    print(f"{alarms} of {num_runs} runs raise an alarm")


if __name__ == "__main__":
    main()
