"""Recorded vLLM servers against their simulation from the measured operators and the recorded arrivals alone.

    python benchmarks/serving_reality.py DIR

DIR holds `per_request/blis_vllm_otel_requests.csv.gz`: requests of CodeLlama-34B on one H100, as OpenTelemetry spans of
the engine say (arrival, tokens, TTFT, TPOT, end to end); it is also taken from WINDTUNNEL_REFERENCE. Nothing is fitted.
The KV cache's size is the server's own; its version and other settings are not recorded. In `prefill-1` a prompt
of 3,000 tokens alone on the server takes 35 steps of 25 ms: its token budget was below a hundred, and is not known.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reference import REFERENCE
from windtunnel.serving.scenario import scenario_from
from windtunnel.serving.simulate import simulate

SPANS = Path("serving", "per_request", "blis_vllm_otel_requests.csv.gz")
BLOCK_TOKENS = 16
METRICS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}


def experiments(path: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Name -> its requests, in order of arrival."""
    found: dict[str, list[dict[str, str]]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["experiment"], []).append(row)
    for name, rows in found.items():
        yield name, sorted(rows, key=lambda row: float(row["arrival_s"]))


def measured(rows: list[dict[str, str]]) -> dict[str, float]:
    tpot = [float(row["tpot_ms"]) / 1e3 for row in rows if row["tpot_ms"]]
    return {
        "ttft_s": float(np.mean([float(row["ttft_s"]) for row in rows])),
        "tpot_s": float(np.mean(tpot)),
        "e2e_s": float(np.mean([float(row["e2e_s"]) for row in rows])),
    }


def predicted(rows: list[dict[str, str]], folder: Path) -> dict[str, float]:
    trace = folder / "trace.csv"
    lines = [f"{row['arrival_s']},{row['prompt_tokens']},{max(int(row['completion_tokens']), 1)}" for row in rows]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n", encoding="utf-8")
    engine = {"name": "vllm", "num_gpu_blocks": int(rows[0]["kv_cache_tokens"]) // BLOCK_TOKENS}
    scenario = {
        "model": "codellama/CodeLlama-34b-Instruct-hf",
        "deployment": {"device": "h100_sxm", "engine": engine},
        "workload": {"trace": {"path": str(trace)}, "sampling": {"temperature": 0.0}},
    }
    requests = simulate(scenario_from(scenario)).requests
    return {name: float(np.nanmean(requests[name])) for name in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=REFERENCE)
    path = parser.parse_args().folder / SPANS
    if not path.is_file():
        sys.exit(f"error: {path} is not there\nhint: give the folder that holds {SPANS}")
    print("| requests | metric | measured | predicted | error |\n|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, rows in experiments(path):
            was, found = measured(rows), predicted(rows, Path(scratch))
            for metric, title in METRICS.items():
                error = found[metric] / was[metric] - 1
                print(
                    f"| {name} ({len(rows)}) | {title} | {was[metric]:.3g} s | {found[metric]:.3g} s | {error:+.1%} |"
                )


if __name__ == "__main__":
    main()
