"""Published serving runs on AMD, Google and Intel accelerators, whose operators nobody measured; nothing was fitted.

    python benchmarks/other_devices.py [--rows] [--only TEXT] [--page FILE]

Reads benchmarks/measured/other_devices/serving.csv; its README names every source, its versions and what it leaves
open. Every operator is priced by the calibrated roofline. Engines older than the first version that is described are
taken as that one, whose numbers say so in the column of versions. `inside` is the share of rows within the 80% interval
that the prediction states.

Errors are of times: measured over predicted throughput is one.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readers.pages import write_table
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import score
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, keep_published_formats, resolve, scenario_from
from windtunnel.serving.simulate import simulate

FILE = Path(__file__).parent / "measured" / "other_devices" / "serving.csv"

FIRST_VERSIONS = {"vllm": "0.8.0", "sglang": "0.4.0"}
"""The first version of each engine that is described; older ones are taken as it."""
ENGINES = {"vllm-gaudi": "vllm", "vllm-tpu": "vllm"}
CORES_OF_A_CHIP = {"TPU v7": 2}
FORMATS = {"fp16": "bf16"}
MOST_REQUESTS = 1000
"""Of a run's; a burst is at its steady rate long before."""

FLAGS: Mapping[str, Mapping[str, Any]] = {
    "inferencex": {"max_num_batched_tokens": 131072, "enable_prefix_caching": False, "gpu_memory_utilization": 0.8},
    "dstack_online": {"enable_prefix_caching": False},
}
"""Set -> engine settings that its source gives for all rows."""

METRICS = {"tpot": "TPOT", "ttft": "TTFT", "e2e": "end to end", "throughput": "throughput", "batch": "a whole batch"}

Row = Mapping[str, str]


@dataclass(frozen=True)
class Scored:
    """A row with its measured and predicted figures, and the intervals of the latter; seconds, or tokens a second."""

    row: Row
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]

    def error(self, metric: str) -> float:
        """Return predicted over measured, less one; of a throughput the other way round."""
        ratio = self.predicted[metric] / self.measured[metric]
        return (1 / ratio if metric == "throughput" else ratio) - 1

    def is_inside(self, metric: str) -> bool:
        low, high = self.intervals[metric]
        return low <= self.measured[metric] <= high


def engine_of(row: Row) -> dict[str, Any]:
    """Return the engine of a row, with the flags that its source gives."""
    name = ENGINES.get(row["engine"], row["engine"])
    engine: dict[str, Any] = {"name": name, **FLAGS.get(row["set"], {})}
    release = re.match(r"\d+\.\d+(\.\d+)?(\.post\d+)?", row["version"])
    if release and version_key(release[0]) >= version_key(FIRST_VERSIONS[name]):
        engine["version"] = release[0]
    elif row["set"].partition("_")[0] in ("rocm", "azure", "oracle", "dstack"):
        engine["version"] = FIRST_VERSIONS[name]
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        if row[key]:
            engine[key] = int(row[key])
    if row["set"].endswith("_throughput") and not row["max_num_seqs"]:
        engine["max_num_seqs"] = MOST_REQUESTS
    return engine


def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def lengths(row: Row, column: str) -> Any:
    """Return the lengths of prompts or outputs: one, or evenly drawn where the row says so."""
    tokens = round(float(row[column]))
    if "80% to 100%" not in row["note"]:
        return tokens
    return {"type": "uniform", "min_tokens": round(0.8 * tokens), "max_tokens": tokens}


def scenario_of(row: Row) -> Scenario:
    """Return a row's run as a scenario.

    Raises:
        InputError: something in it is not known.
    """
    cores = CORES_OF_A_CHIP.get(row["device"], 1)
    ranks = int(row["tp"]) * int(row["attention_dp"] or 1) // cores
    num_requests = min(int(row["num_requests"] or row["concurrency"] or MOST_REQUESTS), MOST_REQUESTS)
    if row["set"] == "inferencex_tpu":
        num_requests = 10 * int(row["concurrency"])
    raw: dict[str, Any] = {
        "model": row["model"],
        "deployment": {
            "device": row["device"],
            "engine": engine_of(row),
            "parallelism": {"tp": ranks} | ({"ep": ranks} if row["ep"] not in ("", "1") else {}),
        },
        "workload": {
            "arrivals": {"type": "closed_loop", "concurrency": int(row["concurrency"] or num_requests)},
            "input_tokens": lengths(row, "input_tokens"),
            "output_tokens": lengths(row, "output_tokens"),
            "num_requests": num_requests,
            "sampling": {"temperature": 0.0},
        },
    }
    if "data-parallel attention" in row["note"] or int(row["attention_dp"] or 1) > 1:
        raw["deployment"]["parallelism"] = {"tp": 1, "ep": ranks, "attention_dp": ranks}
    formats = {"kv_cache": row["kv_cache"], "weights": row["weights"] if row["weights"] != "fp4" else ""}
    if row["model"].startswith(("amd/", "deepseek-ai/", "Qwen/Qwen3.5", "zai-org/")):
        formats["weights"] = ""
    raw["precision"] = {key: FORMATS.get(value, value) for key, value in formats.items() if value}
    keep_published_formats(raw)
    return scenario_from(raw)


def measured_of(row: Row) -> dict[str, float]:
    """Return what a row says: metric -> seconds, or output tokens a second."""
    columns = {
        "tpot": "mean_tpot_s",
        "ttft": "mean_ttft_s",
        "e2e": "mean_e2e_s",
        "throughput": "output_tokens_per_s",
        "batch": "latency_s",
    }
    found = {metric: float(row[column]) for metric, column in columns.items() if row[column]}
    if "batch" in found or "tpot" in found:
        found.pop("throughput", None)  # the same again
    return found


def predicted_by(result: Result) -> dict[str, float]:
    summary = result.summary
    assert summary.tpot_s is not None
    return {
        "tpot": summary.tpot_s.mean,
        "ttft": summary.ttft_s.mean,
        "e2e": summary.e2e_s.mean,
        "throughput": summary.throughput.output_tokens_per_s,
        "batch": float(result.requests["finish_s"].max()),
    }


def scored(rows: Sequence[Row]) -> Iterator[Scored | tuple[Row, str]]:
    """Yield every row with its prediction, or with the reason why it has none."""
    estimator_of = PricedDeployments().estimator
    for row in rows:
        try:
            scenario = scenario_of(row)
            result = simulate(scenario, estimator_of(resolve(scenario)))
        except InputError as error:
            yield row, error.message
            continue
        found = {metric: (each.low, each.high) for metric, each in result.intervals.items()}
        found["batch"] = found["e2e"]
        yield Scored(row, measured_of(row), predicted_by(result), found)


def line_of(name: str, rows: Sequence[Scored]) -> str:
    cells = []
    for metric in METRICS:
        having = [row for row in rows if metric in row.measured]
        one = score([row.error(metric) for row in having])
        inside = "" if not having else f", {sum(row.is_inside(metric) for row in having) / len(having):.0%} inside"
        cells.append("" if one is None else f"{one.median:.1%} / {one.p90:.0%} ({one.bias:+.1%}){inside}")
    return f"| {name} | {len(rows)} | {' | '.join(cells)} |"


def device_of(row: Row) -> str:
    return f"on {row['device']}"


def set_of(row: Row) -> str:
    version = row["version"].partition("+")[0] or "(version not said)"
    return f"{row['set']}, {row['engine']} {version}, {row['device']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page to write the table into")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose set, device, version or model has it")
    options = parser.parse_args()
    with FILE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if options.only in " ".join(list(row.values())[:5])]
    found = list(scored(rows))
    done = [row for row in found if isinstance(row, Scored)]
    refused = Counter(row[1] for row in found if not isinstance(row, Scored))
    print(f"{len(found)} rows, {len(done)} scored, {refused.total()} refused")
    for reason, count in refused.most_common():
        print(f"- {count} x {reason}")
    groups = [(key, group) for key in (device_of, set_of) for group in dict.fromkeys(key(row.row) for row in done)]
    table = "\n".join(
        [
            f"| rows | number | {' | '.join(METRICS.values())} |",
            f"|---|---:|{'---|' * len(METRICS)}",
            line_of("all", done),
            *(line_of(group, [row for row in done if key(row.row) == group]) for key, group in groups),
        ]
    )
    print("\nMedian / p90 of the absolute error of times (bias), and the share inside the stated 80% interval\n")
    print(table)
    if options.page is not None:
        write_table(options.page, "other devices", "other_devices.py", table)
    for row in done if options.rows else ():
        figures = "  ".join(
            f"{metric} {row.measured[metric]:.4g} {row.predicted[metric]:.4g} {row.error(metric):+.1%}"
            for metric in row.measured
        )
        about = [row.row[key] for key in ("set", "device", "version", "model", "input_tokens", "output_tokens")]
        print(f"{' '.join(about)} x{row.row['concurrency'] or row.row['num_requests']}: {figures}")


if __name__ == "__main__":
    main()
