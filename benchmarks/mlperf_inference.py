"""MLPerf Inference 4.1 and 5.1: submitted runs against their simulation; nothing was fitted to any of them.

    python benchmarks/mlperf_inference.py [--rows] [--only TEXT] [--every N] [--calibration NAME] [--page FILE]

A row of `serving/mlperf_inference.csv` (WINDTUNNEL_REFERENCE) is a submitted run. In the scenario Offline all samples
are there at once, and the output tokens a second of a replica are predicted. In Server they arrive at random, and
submitters look for the greatest rate at which the 99th percentiles of TTFT and TPOT hold the round's limits: this is
what `windtunnel capacity` predicts. The mean TTFT and TPOT at the submitted rate are predicted too. They say little
where that rate is near saturation: an error of 6% in what a step costs can halve or double them, and where the
predicted server cannot keep up, its queue grows as long as the run. Such rows are `overloaded` and have no predicted
latency.

LoadGen calls the engine in its own process with token ids, so that no HTTP and no tokenizer count
(mlcommons/inference, loadgen and language/*). Replicas share the samples evenly: a run is that of one replica.

Servers are usual ones, but for cards with bridges whose row names no NVLink among them, which are on PCIe 5, and four
H100 SXM, which have six links to each other. Power limits are those of the submitted configuration (MaxQ).

Settings are those of the submitted configuration: tensor parallelism, most requests, most tokens a step, formats,
chunked prefill, scheduling policy. Most rows have none; theirs are taken from the recorded rows with the same round,
model, device, scenario and limit of TPOT, if these agree, and are `as others'`. What nobody recorded is `assumed`:
the engine's defaults, and the fewest devices that hold the weights and half as much again, of those that there are.
Rows of round 4.1 say fp16, the checkpoint's format, where every configuration says FP8; all of that round on
TensorRT-LLM are taken as FP8, and those on vLLM, which made as many tokens a device as others with FP8.

Lengths: answers have the mean that the row's tokens and samples give. Prompts of Open Orca have 294 tokens in the mean
(language/llama2-70b), articles of CNN/DailyMail about 900 (781 words and signs in the mean, by nlpprogress.com), and
the prompts of Mixtral are of three sources whose lengths are not at hand, so that its rows are refused. Lengths are
drawn evenly from a tenth to 1.9 times their mean; answers of Llama-3.1-8B all have 128 tokens.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from readers.pages import write_table
from reference import REFERENCE
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import score
from windtunnel.metrics.limits import limits_from
from windtunnel.model.parameters import count_parameters
from windtunnel.search.capacity.capacity import capacities
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Scenario, keep_published_formats, resolve, scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.workload.arrivals import Poisson

Row = Mapping[str, str]

MODELS = {
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama3_1-8b": "meta-llama/Llama-3.1-8B",
    "llama3_1-70b": "meta-llama/Llama-3.1-70B",
    "neuralmagic_llama-2-7b-chat-hf": "meta-llama/Llama-2-7b-hf",
}
PROMPT_TOKENS = {"meta-llama/Llama-3.1-8B": 900}
OPEN_ORCA_PROMPT_TOKENS = 294

DEVICES = {
    "NVIDIA H100-SXM-80GB": "h100_sxm",
    "NVIDIA H100-NVL-94GB": "h100_nvl",
    "NVIDIA H100-PCIe-80GB": "h100_pcie",
    "NVIDIA H200-SXM-141GB": "h200_sxm",
    "NVIDIA H200-SXM-141GB-CTS": "h200_sxm",
    "Virtualized NVIDIA H200-SXM-141GB": "h200_sxm",
    "NVIDIA H200-NVL-141GB": "h200_nvl",
    "NVIDIA B200-SXM-180GB": "b200_sxm",
    "NVIDIA GH200 Grace Hopper Superchip 96GB": "gh200",
    "NVIDIA GH200 Grace Hopper Superchip 144GB": "gh200_144gb",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx_4090",
    "AMD Instinct MI300X-NPS1-SPX-192GB-750W": "mi300x",
    "AMD MI300X-NPS1-SPX-192GB-750W": "mi300x",
    "AMD Instinct MI300X 192GB HBM3": "mi300x",
    "AMD Instinct MI325X 256GB HBM3e": "mi325x",
}
BRIDGED = ("h100_nvl", "h100_pcie", "h200_nvl")
"""Cards that an NVLink bridge may join in pairs or fours."""
POWER_LIMITS_W = {"H200-SXM-141GBx8_TRT_MaxQ": 500.0}
"""System -> `power_limit` of its devices for Llama-2-70B (closed/NVIDIA/configs/llama2-70b of round 4.1)."""
FORMATS = {"fp8": ("fp8", "fp8"), "fp4": ("nvfp4", "fp8"), "fp16": ("bf16", "bf16"), "int4": ("int4", "bf16")}
"""Format of the weights -> as the catalog calls it, and that of the KV cache."""

FIRST_VERSIONS = {"trtllm": "0.20.0", "vllm": "0.8.0", "sglang": "0.4.0"}
"""The first version of each engine that is described; older ones are taken as it."""

MOST_REQUESTS = 8000
"""Of a replica; at least three times as many as run at once."""

SETTINGS = ("cfg_tp", "cfg_pp", "cfg_batch", "cfg_max_num_tokens", "cfg_precision", "cfg_chunked", "cfg_sched")
METRICS = {
    "throughput": "Offline, output tokens/s",
    "capacity": "Server, requests/s within the limits",
    "ttft": "mean TTFT at the submitted rate",
    "tpot": "mean TPOT there",
}


@dataclass(frozen=True)
class Scored:
    """A row, where its settings come from, and the figures of a replica; if overloaded, no predicted latency."""

    row: Row
    settings: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]

    def error(self, metric: str) -> float:
        return self.predicted[metric] / self.measured[metric] - 1

    @property
    def is_overloaded(self) -> bool:
        return "capacity" in self.measured and "ttft" not in self.predicted


def rows_of(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def model_of(row: Row) -> str:
    """Return the model's name in the catalog.

    Raises:
        InputError: it is not there.
    """
    name = re.sub(r"-(99(\.9)?|edge|fp8.*)$", "", row["model"].lower())
    if name.startswith("mixtral"):
        raise InputError("the lengths of Mixtral's prompts are not at hand")
    if name not in MODELS:
        raise InputError(f"{row['model']} is not in the catalog")
    return MODELS[name]


def group_of(row: Row) -> tuple[str, ...]:
    """Return what rows with the same configuration have in common."""
    model = re.sub(r"-99(\.9)?$", "", row["model"])
    return (row["round"], model, row["accelerator"].removeprefix("Virtualized "), row["scenario"], row["tpot_limit_ms"])


def recorded_settings(rows: Sequence[Row]) -> dict[tuple[str, ...], Row]:
    """Return the configuration of every group whose recorded ones agree."""
    found: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
    for row in rows:
        if row["cfg_path"]:
            found[group_of(row)].add(tuple(row[name] for name in SETTINGS))
    return {group: dict(zip(SETTINGS, one.pop(), strict=True)) for group, one in found.items() if len(one) == 1}


def engine_of(row: Row) -> dict[str, Any]:
    """Return the engine that a row names, in a version that is described.

    Raises:
        InputError: it names none that is simulated.
    """
    framework = row["framework"].lower()
    if "tensorrt" in framework and "vllm" not in framework:
        # Rows name the version of TensorRT, whose engines they ran, not that of TensorRT-LLM.
        return {"name": "trtllm", "version": FIRST_VERSIONS["trtllm"], "backend": "tensorrt"}
    for name in ("vllm", "sglang"):
        if name in framework:
            version = re.search(rf"{name}:?\s*v?(\d+\.\d+\.\d+)", framework)
            first = FIRST_VERSIONS[name]
            newer = version is not None and key_of(version[1]) >= key_of(first)
            return {"name": name, "version": version[1] if version is not None and newer else first}
    raise InputError(f"no engine is simulated for {row['framework'].partition(',')[0]!r}")


def key_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def precision_of(row: Row, settings: Row | None, engine: str) -> dict[str, str]:
    """Return the formats of weights and KV cache.

    Raises:
        InputError: the row does not say it.
    """
    said = (settings or {}).get("cfg_precision") or row["weight_dtype"].lower()
    if not (settings or {}).get("cfg_precision"):
        if (
            engine in ("trtllm", "vllm")
            and row["round"] == "v4.1"
            and said == "fp16"
            and "B200" not in row["accelerator"]
        ):
            said = "fp8"
        if "fp8" in row["model"].lower():
            said = "fp8"
    if said not in FORMATS or (said == "fp16" and "B200" in row["accelerator"]):
        raise InputError(f"the format of the weights is not recorded ({row['weight_dtype'] or 'nothing'})")
    weights, cache = FORMATS[said]
    return {"weights": weights, "kv_cache": cache}


def scenario_of(row: Row, recorded: Mapping[tuple[str, ...], Row], calibration: str | None) -> tuple[Scenario, str]:
    """Return the run of one replica, and where its settings come from.

    Raises:
        InputError: something in it is not known, or the row says that the run was not valid.
    """
    if row["valid"] != "VALID" or not row["tokens_per_s"]:
        raise InputError("the run was not valid, or counts no tokens")
    if row["scenario"] not in ("Offline", "Server"):
        raise InputError(f"the scenario {row['scenario']} is not simulated")
    if row["scenario"] == "Server" and not row["ttft_limit_ms"]:
        raise InputError("the limits of TTFT and TPOT are not recorded")
    if row["accelerator"] not in DEVICES:
        known = f"{row['accelerator']} is not in the catalog"
        raise InputError(known if row["accelerator"] else "the submission names no accelerator")
    model, device, engine = model_of(row), DEVICES[row["accelerator"]], engine_of(row)
    settings = row if row["cfg_path"] else recorded.get(group_of(row)) if engine["name"] == "trtllm" else None
    origin = "assumed" if settings is None else "recorded" if row["cfg_path"] else "as others'"
    raw: dict[str, Any] = {"model": model, "precision": precision_of(row, settings, engine["name"])}
    if settings is not None:
        batch = re.findall(r"\d+", (settings["cfg_batch"].split(":")[-1]))
        engine |= {"max_num_seqs": int(batch[0]), "max_num_batched_tokens": int(float(settings["cfg_max_num_tokens"]))}
        if settings["cfg_sched"] == "max_util":
            engine["scheduler"] = "trtllm_max_utilization"
        engine["enable_chunked_prefill"] = settings["cfg_chunked"] == "True"
        tp = int(float(settings["cfg_tp"]))
    else:
        engine |= {"enable_chunked_prefill": True} if engine["name"] == "trtllm" else {"max_num_seqs": 1024}
        tp = min(fewest_devices(model, device, raw["precision"]["weights"]), int(float(row["n_accel"])))
    replicas = float(row["n_accel"]) / tp
    raw["deployment"] = {"device": device, "engine": engine, "parallelism": {"tp": tp}, "calibration": calibration}
    if engine["name"] != "trtllm":
        raw["deployment"]["engine"]["host"] = {"first_token_s": 0.0, "prompt_token_s": 0.0, "stream_s": 0.0}
    if (node := node_of(row, device)) is not None:
        raw["deployment"]["node"] = node
    if row["system"] in POWER_LIMITS_W:
        raw["deployment"]["power"] = {"limit_w": POWER_LIMITS_W[row["system"]]}
    raw["workload"] = workload_of(row, model, replicas, engine.get("max_num_seqs", 1024))
    keep_published_formats(raw)
    return scenario_from(raw), origin


def node_of(row: Row, device: str) -> str | None:
    """Return the node where the row says that its devices have other links than usual."""
    if device in BRIDGED and "nvl" not in row["interconnect"].lower():
        return "pcie5"
    return "hgx_h100_4" if device == "h100_sxm" and row["accel_per_node"] == "4.0" else None


def fewest_devices(model: str, device: str, weights: str) -> int:
    """Return the smallest power of two whose memory holds the weights and half as much again."""
    size = (
        count_parameters(catalog.model(model)).total * {"fp8": 1.0, "nvfp4": 0.57, "int4": 0.55, "bf16": 2.0}[weights]
    )
    return int(max(2 ** math.ceil(math.log2(1.5 * size / catalog.device(device).memory_bytes)), 1))


def workload_of(row: Row, model: str, replicas: float, max_num_seqs: int) -> dict[str, Any]:
    """Return the samples of one replica."""
    prompt, answer = PROMPT_TOKENS.get(model, OPEN_ORCA_PROMPT_TOKENS), round(float(row["mean_output_tokens_derived"]))
    if row["scenario"] == "Offline":
        samples = float(row["samples_per_s"]) * float(row["lat_max_ms"]) * 1e-3
        arrivals: dict[str, Any] = {"type": "burst"}
    else:
        rate = float(row["scheduled_samples_per_s"])
        samples, arrivals = rate * 600, {"type": "poisson", "rate_per_s": rate / replicas}
    return {
        "arrivals": arrivals,
        "input_tokens": spread(prompt),
        "output_tokens": answer if model in PROMPT_TOKENS else spread(answer),
        "num_requests": max(min(round(samples / replicas), max(MOST_REQUESTS, 3 * max_num_seqs)), 1),
        "client": "trtllm-bench",
        "random_tokens": False,
        "sampling": {"temperature": 0.0},
    }


def spread(mean: float) -> dict[str, Any]:
    return {"type": "uniform", "min_tokens": round(mean / 10), "max_tokens": round(1.9 * mean)}


def scored(rows: Sequence[Row], recorded: Mapping[tuple[str, ...], Row], calibration: str | None) -> Iterator[Any]:
    """Yield every row with its prediction, or with the reason why it has none."""
    estimator_of = PricedDeployments().estimator
    done: dict[Any, Any] = {}
    loads: dict[Any, float] = {}
    for row in rows:
        try:
            scenario, origin = scenario_of(row, recorded, calibration)
            if scenario not in done:
                done[scenario] = simulate(scenario, estimator_of(resolve(scenario)))
            load = 0.0 if row["scenario"] == "Offline" else load_of(row, scenario, loads)
        except InputError as error:
            yield row, error.message
            continue
        summary = done[scenario].summary
        tp = scenario.deployment.parallelism.tp
        if row["scenario"] == "Offline":
            measured = {"throughput": float(row["tokens_per_s"]) * tp / float(row["n_accel"])}
            yield Scored(row, origin, measured, {"throughput": summary.throughput.output_tokens_per_s})
            continue
        measured = {name: float(row[f"{name}_mean_ms"]) * 1e-3 for name in ("ttft", "tpot")}
        measured["capacity"] = float(row["scheduled_samples_per_s"]) * tp / float(row["n_accel"])
        predicted = {"capacity": load}
        if not grows_without_end(done[scenario].requests):
            predicted |= {"ttft": summary.ttft_s.mean, "tpot": summary.tpot_s.mean}
        yield Scored(row, origin, measured, predicted)


def load_of(row: Row, scenario: Scenario, loads: dict[Any, float]) -> float:
    """Return the most requests a second of a replica within the limits; rows of one configuration share it."""
    slo = {f"{name}_p99": float(row[f"{name}_limit_ms"]) * 1e-3 for name in ("ttft", "tpot")}
    workload = msgspec.structs.replace(scenario.workload, arrivals=Poisson(rate_per_s=1.0), num_requests=MOST_REQUESTS)
    key = msgspec.structs.replace(scenario, workload=workload), tuple(slo.values())
    if key not in loads:
        loads[key] = capacities(key[0], limits_from(slo), num_seeds=1).load
    return loads[key]


def grows_without_end(requests: Any) -> bool:
    """Whether requests of the last quarter wait longer than those of the second by more than a second."""
    waits = requests["first_token_s"] - requests["arrival_s"]
    quarter = len(waits) // 4
    return bool(waits[3 * quarter :].mean() > waits[quarter : 2 * quarter].mean() + 1.0)


def line_of(name: str, rows: Sequence[Scored]) -> str:
    cells = []
    for metric in METRICS:
        one = score([row.error(metric) for row in rows if metric in row.predicted])
        cells.append("" if one is None else f"{one.median:.1%} / {one.p90:.1%} ({one.bias:+.1%})")
    return f"| {name} | {len(rows)} | {' | '.join(cells)} | {sum(row.is_overloaded for row in rows) or ''} |"


def table_of(rows: Sequence[Scored]) -> list[str]:
    lines = [f"| rows | number | {' | '.join(METRICS.values())} | overloaded |", f"|---|{'---:|' * (len(METRICS) + 2)}"]
    lines.append(line_of("all", rows))
    names: tuple[Callable[[Scored], str], ...] = (
        lambda row: f"settings {row.settings}",
        lambda row: f"{engine_of(row.row)['name']}, {row.row['round']}",
        lambda row: model_of(row.row),
        lambda row: DEVICES[row.row["accelerator"]],
    )
    for name_of in names:
        groups: dict[str, list[Scored]] = defaultdict(list)
        for row in rows:
            groups[name_of(row)].append(row)
        lines += [line_of(name, groups[name]) for name in sorted(groups)]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose system, model or device contains it")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every so-many-th row")
    parser.add_argument("--calibration", metavar="NAME", help="one of the catalog, or none")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page to write the table into")
    options = parser.parse_args()
    path = REFERENCE / "serving" / "mlperf_inference.csv"
    if not path.is_file():
        print(f"skipped: there is no recorded reference data at {path}")
        return 0
    rows = rows_of(path)
    recorded = recorded_settings(rows)
    names = ("system", "model", "accelerator", "framework", "scenario", "round")
    chosen = [row for row in rows if options.only in " ".join(row[name] for name in names)][:: options.every]
    done, refused = [], Counter[str]()
    for one in scored(chosen, recorded, options.calibration):
        if isinstance(one, tuple):
            refused[one[1]] += 1
            continue
        done.append(one)
        if options.rows:
            figures = [
                f"{metric} {one.measured[metric]:.4g} {one.predicted.get(metric, math.nan):.4g}"
                for metric in one.measured
            ]
            where = f"{one.row['round']} {one.row['model']} {one.row['accelerator']} {one.row['scenario']}"
            print(where, one.row["framework"].partition(",")[0], one.settings, *figures, flush=True)
    lines = table_of(done)
    print("\n".join(lines))
    print(f"\n{len(chosen)} rows, {len(done)} scored, {sum(refused.values())} refused")
    for reason, number in refused.most_common():
        print(f"{number:4} {reason}")
    if options.page is not None:
        write_table(options.page, "MLPerf Inference", "mlperf_inference.py", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
