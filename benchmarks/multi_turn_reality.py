"""Recorded multi-turn chats against their simulation from the measured operators, texts and number of clients alone.

    python benchmarks/multi_turn_reality.py DIR

DIR holds `serving/inferencex_multiturn_llama70b_fp4.csv` and its `per_request/` rows: vLLM with Llama-3.3-70B in
NVFP4, 16 to 512 clients with conversations of up to eight turns; it is also taken from WINDTUNNEL_REFERENCE. Of the
eight runs that are marked clean nothing is fitted. Device and format of the KV cache are not recorded: that of the pool
follows from its bytes and tokens (two tell fp8 from bf16), and only a B200 has a pool of that size. The version is
not recorded either; settings are those of 0.14. The servers' command lines say
`--attention-config.use_trtllm_attention=0`: attention ran in kernels of FlashInfer itself, which SGLang's tables time.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from readers.multi_turn_client import recorded_conversations
from reference import REFERENCE
from windtunnel.serving.prepared import prepare
from windtunnel.serving.scenario import scenario_from
from windtunnel.serving.setup.frontend import streams
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

RUNS = Path("serving", "inferencex_multiturn_llama70b_fp4.csv")
ROWS = Path("serving", "per_request", "inferencex_multiturn_llama70b_fp4.csv.gz")
BLOCK_TOKENS = 16


def clean_runs(folder: Path) -> Iterator[tuple[dict[str, str], list[dict[str, str]]]]:
    """Each run that is marked clean, with its requests."""
    with gzip.open(folder / ROWS, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with (folder / RUNS).open(encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            if run["clean"] == "yes":
                yield run, [row for row in rows if row["case"] == run["case"]]


def later(ttft: NDArray[np.float64], start_s: NDArray[np.float64], run: dict[str, str]) -> NDArray[np.float64]:
    """Of all but the first request of each client: with `--kv_offloading_backend` those took 2.7 s and more."""
    return ttft[np.argsort(start_s, kind="stable")[int(run["clients"]) :]]


def requests_of(run: dict[str, str], rows: list[dict[str, str]]) -> RequestArrays:
    names = ("conversation_id", "start_s", "input_turns", "input_tokens", "output_tokens")
    chats = recorded_conversations({name: [row[name] for row in rows] for name in names})
    n = chats.input_tokens.size
    return RequestArrays(
        arrival_s=np.zeros(n),
        input_tokens=chats.input_tokens,
        output_tokens=chats.output_tokens,
        priority=np.zeros(n, np.int64),
        concurrency=int(run["clients"]),
        previous=chats.previous,
        prefixes=PrefixArrays(chats.node_parent, chats.node_tokens, chats.request_node, chats.request_output_node),
    )


def predicted(run: dict[str, str], requests: RequestArrays) -> dict[str, float]:
    """Means in the units of the recorded columns."""
    engine = {
        "name": "vllm",
        "version": "0.14.0",
        "max_num_seqs": int(run["max_num_seqs"]),
        "num_gpu_blocks": int(float(run["kv_cache_tokens"])) // BLOCK_TOKENS,
        "attention_backend": "flashinfer",
    }
    scenario = scenario_from(
        {
            "model": "meta-llama/Llama-3.1-70B",
            "precision": {"weights": "nvfp4", "kv_cache": "fp8"},
            "deployment": {"device": "b200_sxm", "parallelism": {"tp": int(run["tp"])}, "engine": engine},
            "workload": {"arrivals": {"type": "burst"}, "input_tokens": 1, "output_tokens": 1, "num_requests": 1},
        }
    )
    prepared = prepare(scenario, requests)
    (server,) = prepared.pools
    run_of_loop = prepared.serve(requests)
    records, cache = run_of_loop.requests, run_of_loop.cache
    assert cache is not None
    seen_s = server.setup.frontend.ttft_s(requests.input_tokens, streams(records, records["rank"] * 0, 1))
    decode_s = records["finish_s"] - records["first_token_s"]
    several = records["output_tokens"] > 1
    ttft_s = records["first_token_s"] - records["arrival_s"] + seen_s
    return {
        "kv_cache_GiB_per_gpu": server.memory.kv_cache_bytes / 2**30,
        "gpu_hit_rate": 100 * cache.requests["cached_tokens"].sum() / records["input_tokens"].sum(),
        "mean_ttft_ms": 1e3 * float(ttft_s.mean()),
        "later_ttft_ms": 1e3 * float(later(ttft_s, records["arrival_s"], run).mean()),
        "mean_tpot_ms": 1e3 * float((decode_s[several] / (records["output_tokens"][several] - 1)).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=REFERENCE)
    folder = parser.parse_args().folder
    if not (folder / RUNS).is_file():
        sys.exit(f"error: {folder / RUNS} is not there\nhint: give the folder that holds {RUNS}")
    print("| run | quantity | measured | predicted | error |\n|---|---|---:|---:|---:|")
    for run, rows in clean_runs(folder):
        ttft_ms, start_s = (np.array([float(row[name]) for row in rows]) for name in ("ttft_ms", "start_s"))
        run["later_ttft_ms"] = str(later(ttft_ms, start_s, run).mean())
        for name, value in predicted(run, requests_of(run, rows)).items():
            was = float(run[name])
            error = f"{value - was:+.1f} points" if name == "gpu_hit_rate" else f"{value / was - 1:+.1%}"
            print(f"| {run['case']} | {name} | {was:.4g} | {value:.4g} | {error} |", flush=True)


if __name__ == "__main__":
    main()
