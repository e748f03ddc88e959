"""Time to the first token of single prompts of DeepSeek-V4.1-Flash on GB200, published and predicted; nothing fitted.

    python benchmarks/deepseek_v41.py [--page FILE]

The 30 times are those of `measured/deepseek_v41`, which says what its source leaves out. A prediction knows whether
layers behind the last compressor compute prompts' tails alone, and not whether they have CUDA graphs of their own.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from typing import Any

from readers.pages import write_table
from windtunnel.serving.simulate import simulate

MEASURED = Path(__file__).parent / "measured" / "deepseek_v41" / "prompts.csv"
LAYOUTS = {"tp4": {"tp": 4, "ep": 4}, "dep2": {"attention_dp": 2, "ep": 2}}
VERSION = "0.33.0"


def scenario(layout: str, prompt_tokens: int, replay: bool) -> dict[str, Any]:
    engine = {"name": "vllm", "version": VERSION, "enable_prefix_caching": False, "max_model_len": 2**18}
    engine |= {"swa_bounded_replay": replay, "ngram_tables_on_host": True}
    return {
        "model": "deepseek-ai/DeepSeek-V4.1-Flash",
        "deployment": {"device": "gb200", "parallelism": LAYOUTS[layout], "engine": engine},
        "workload": {
            "input_tokens": prompt_tokens,
            "output_tokens": 2,
            "num_requests": 4,
            "arrivals": {"type": "closed_loop", "concurrency": 1},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the table into this page")
    options = parser.parse_args()
    with MEASURED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    keys = dict.fromkeys((row["layout"], int(row["prompt_tokens"]), row["replay"] == "on") for row in rows)
    predicted = {key: 1e3 * simulate(scenario(*key)).summary.ttft_s.p50 for key in keys}
    table = ["| layout | prompt | replay | measured | predicted | error |", "|---|---:|---|---:|---:|---:|"]
    errors: dict[str, list[float]] = {}
    for row in rows:
        key = row["layout"], int(row["prompt_tokens"]), row["replay"] == "on"
        error = predicted[key] / float(row["ttft_ms"]) - 1
        kind = {"": "off", "no": "on, eager", "yes": "on, graphs"}[row["decoder_graphs"]]
        for group in ("all", row["layout"], f"{row['layout']} from 8K on" if key[1] >= 8192 else "up to 4K"):
            errors.setdefault(group, []).append(error)
        shown = f"| {row['layout']} | {key[1] // 1024}K | {kind} | {float(row['ttft_ms']):,.1f} ms "
        table.append(f"{shown}| {predicted[key]:,.1f} ms | {error:+.1%} |")
    print("\n".join(table))
    print(f"\n{len(rows)} rows scored, 0 refused; median of the absolute error (bias)")
    for group, each in errors.items():
        print(f"{group:18}{len(each):4}  {statistics.median(map(abs, each)):6.1%} ({statistics.median(each):+.1%})")
    if options.page:
        write_table(options.page, "prompts of DeepSeek-V4.1", "deepseek_v41.py", "\n".join(table))


if __name__ == "__main__":
    main()
