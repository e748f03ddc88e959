"""Serving runs that others published, against their simulation; nothing was fitted to any of them.

    python benchmarks/published_runs.py [FOLDER ...] [--rows] [--only TEXT] [--uncalibrated] [--page FILE]
    python benchmarks/published_runs.py other_clients --write     the spreads of intervals of other clients' runs

FOLDER is one of those in benchmarks/measured whose README names every source, its versions and what it leaves open;
both unless named:

- other_clients: NVIDIA's GPUs, engines driven by other clients than InferenceX's.
- other_devices: AMD's, Google's and Intel's accelerators, whose operators nobody measured, so that the calibrated
  roofline prices each.

Engines older than the first version that is described are taken as that one, whose numbers say so in the column of
versions, but vLLM's have the scheduler of V0, the default before 0.8 (its release notes); and NVIDIA's NIM, whose
engine its source does not say, as TensorRT-LLM with NVIDIA's FP8 checkpoint. Limits that `trtllm-bench` chooses are
chosen as it does (`readers.trtllm_bench`). Prompts and answers of SGLang's client have the lengths that it draws; those
of ShareGPT have the mean of the row and the spread of traces/sharegpt_8k_lengths_llama2.csv.gz in WINDTUNNEL_REFERENCE,
and are refused without it. `inside` is the share of rows within the 80% interval that the prediction states; a second
table of other_clients gives the share by the spreads that `--write` would take from all other sources. TPOT is the mean
over requests, of conversations the median.

Errors are of times: measured over predicted throughput is one. TTFT is the mean over requests, of which the first ones
of a server that compiles kernels as they come can be most; the median, where it is given, has no stated interval.
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from readers import trtllm_bench
from readers.pages import write_table
from reference import REFERENCE
from windtunnel import catalog
from windtunnel.calibration.fit import crowding_weights
from windtunnel.calibration.profiles import SHARED_ERROR, spread_of
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import score
from windtunnel.metrics.uncertainty import Spread
from windtunnel.model.precision import Format
from windtunnel.schema import encode
from windtunnel.serving.analysis.intervals import PUBLISHED_FILE, error_scale
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import Scenario, keep_published_formats, resolve, scenario_from
from windtunnel.serving.simulate import simulate

MEASURED = Path(__file__).parent / "measured"
FOLDERS = ("other_clients", "other_devices")

FIRST_VERSIONS = {"vllm": "0.8.0", "sglang": "0.4.0", "trtllm": "0.20.0"}
"""The first version of each engine that is described; older ones are taken as it."""
NEWEST = {"trtllm_overview": "1.1.0"}
"""Set -> the version that its README gives for all rows."""
ENGINES = {"vllm-gaudi": "vllm", "vllm-tpu": "vllm", "nim": "trtllm", "tensorrt-llm": "trtllm"}
MODELS = {"nim": "nvidia/Llama-3.3-70B-Instruct-FP8"}
"""Set -> the checkpoint that it is taken to have run; so many requests as it ran need its FP8 KV cache."""
DEVICES = {
    "A100": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "RTX PRO 6000 Blackwell Server": "rtx_pro_6000_server",
}
CORES_OF_A_CHIP = {"TPU v7": 2}
FORMATS = {"fp16": "bf16"}
MOST_REQUESTS = 3000
"""Of a run at once whose source does not say how many it had; a burst is at its steady rate long before."""

FLAGS: Mapping[str, Mapping[str, Any]] = {
    "inferencex": {"max_num_batched_tokens": 131072, "enable_prefix_caching": False, "gpu_memory_utilization": 0.8},
    "dstack_online": {"enable_prefix_caching": False},
}
"""Set -> engine settings that its source gives for all rows."""

CLIENTS = {
    "vllm bench serve": "vllm",
    "sglang.bench_serving": "sglang",
    "aiperf": "aiperf",
    "guidellm": "guidellm",
    "trtllm-bench throughput": "trtllm-bench",
}
"""Client of a row -> its name in the catalog."""

OPTIONS = {"--enable_chunked_prefill": "enable_chunked_prefill", "--async-scheduling": "async_scheduling"}
"""Option that a row's note names -> the setting that it turns on."""

METRICS = {
    "tpot": "TPOT",
    "ttft": "TTFT",
    "e2e": "end to end",
    "throughput": "throughput",
    "batch": "a whole batch",
    "ttft_median": "median TTFT",
}

Row = Mapping[str, str]


@dataclass(frozen=True)
class Scored:
    """A row with its measured and predicted figures, and the intervals of the latter; seconds, or tokens a second."""

    row: Row
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    scale: float
    """How large errors of its model are beside those of dense ones, as logarithms."""

    def ratio(self, metric: str) -> float:
        """Return measured over predicted, of a dense model."""
        return float((self.measured[metric] / self.predicted[metric]) ** (1 / self.scale))

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
    release = re.match(r"\d+\.\d+(\.\d+)?(\.post\d+|rc\d+)?", row["version"])
    if row["set"] in NEWEST:
        engine["version"] = NEWEST[row["set"]]
    elif release and row["engine"] != "nim" and version_key(release[0]) >= version_key(FIRST_VERSIONS[name]):
        engine["version"] = release[0]
    elif row["set"].partition("_")[0] in ("rocm", "azure", "oracle", "dstack", "nim"):
        engine["version"] = FIRST_VERSIONS[name]
    for key in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len"):
        if row.get(key):
            engine[key] = float(row[key]) if "utilization" in key else int(row[key])
    engine |= {key: True for option, key in OPTIONS.items() if option in row["note"]}
    if row["set"] == "trtllm_overview":
        engine |= trtllm_bench.documented(row["model"], row["device"])
    if name == "trtllm" and row["set"] == "dstack_online":
        engine |= {"backend": "pytorch", "async_scheduling": False}
    if row["engine"] == "vllm" and release and version_key(release[0]) < version_key(FIRST_VERSIONS["vllm"]):
        engine["scheduler"] = "vllm_v0"
    if row["set"].endswith("_throughput") and not row["max_num_seqs"] and name != "trtllm":
        engine["max_num_seqs"] = MOST_REQUESTS
    return engine


def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def parallelism_of(row: Row) -> dict[str, int]:
    """Return the ranks of a row; its `tp` counts those of data-parallel attention where the engine does."""
    attention_dp = int(row["attention_dp"] or 1)
    cores = CORES_OF_A_CHIP.get(row["device"], 1)
    devices = int(row.get("num_devices") or int(row["tp"]) * attention_dp) // cores
    if "data-parallel attention" in row["note"]:
        attention_dp = devices
    is_spread = row["ep"] not in ("", "1") or (cores > 1 and attention_dp > 1)
    ep = 1 if not is_spread else int(row["ep"]) if "num_devices" in row else devices
    pp = devices // int(row["tp"]) if "num_devices" in row else 1
    tp = max(devices // pp // attention_dp, 1)
    return {"tp": tp, "pp": pp, "attention_dp": devices // pp // tp, "ep": ep}


def lengths_of(row: Row, num_requests: int, folder: Path) -> dict[str, Any]:
    """Return the lengths of prompts and outputs: one, evenly drawn, as SGLang's client draws them, or ShareGPT's."""
    tokens = {key: round(float(row[key])) for key in ("input_tokens", "output_tokens")}
    if row["set"].endswith("_sharegpt"):
        return {"trace": sharegpt(tokens)}
    if row["range_ratio"] in ("", "1"):
        return tokens
    shortest = {key: max(int(float(row["range_ratio"]) * most), 1) for key, most in tokens.items()}
    if row.get("client") != "sglang.bench_serving":
        return {key: {"type": "uniform", "min_tokens": shortest[key], "max_tokens": tokens[key]} for key in tokens}
    drawn = np.random.RandomState(1)
    columns = [drawn.randint(shortest[key], tokens[key] + 1, size=num_requests) for key in tokens]
    path = folder / "lengths.csv"
    np.savetxt(path, np.column_stack(columns), fmt="%d", delimiter=",", header=",".join(tokens), comments="")
    return {"trace": {"path": str(path)}}


def client_of(row: Row) -> dict[str, Any]:
    """Return the client of a row, and whether its prompts are random tokens, as those of conversations never are."""
    name = CLIENTS.get(row.get("client", ""))
    chats = name == "vllm" and row["set"].startswith("gpustack")
    found = {"client": f"{name}-chat" if chats else name} if name else {}
    return {**found, "random_tokens": False} if row["set"].endswith("_sharegpt") else found


def sharegpt(mean_tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return a trace with ShareGPT's lengths, scaled to these means.

    Raises:
        InputError: WINDTUNNEL_REFERENCE does not have them.
    """
    path = REFERENCE / "traces" / "sharegpt_8k_lengths_llama2.csv.gz"
    if not path.is_file():
        raise InputError("ShareGPT's lengths are not here", f"WINDTUNNEL_REFERENCE names the folder of {path.name}")
    means = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 1)).mean(axis=0)
    return {
        "path": str(path),
        "columns": {"input_tokens": "num_prefill_tokens", "output_tokens": "num_decode_tokens"},
        "input_scale": mean_tokens["input_tokens"] / means[0],
        "output_scale": mean_tokens["output_tokens"] / means[1],
        "order": "resampled",
    }


def scenario_of(row: Row, folder: Path, calibration: str | None = None) -> Scenario:
    """Return a row's run as a scenario.

    Args:
        folder: where a file of lengths may be written.
        calibration: one of the catalog, or "none"; None: the one that ships.

    Raises:
        InputError: something in it is not known.
    """
    model, num_requests = (
        MODELS.get(row["set"], row["model"]),
        int(row["num_requests"] or row["concurrency"] or MOST_REQUESTS),
    )
    if row["set"] in ("inferencex_tpu", "benhamm"):
        num_requests = 10 * int(row["concurrency"])
    if row["set"] == "nim":
        num_requests = 4 * int(row["concurrency"])
    concurrency = min(int(row["concurrency"] or num_requests), num_requests)
    raw: dict[str, Any] = {
        "model": model,
        "deployment": {
            "device": DEVICES.get(row["device"], row["device"]),
            "engine": engine_of(row),
            "parallelism": parallelism_of(row),
            "calibration": calibration,
        },
        "workload": {
            "arrivals": {"type": "closed_loop", "concurrency": concurrency},
            **lengths_of(row, num_requests, folder),
            "num_requests": num_requests,
            "sampling": {"temperature": 0.0},
            **client_of(row),
        },
    }
    formats = {"kv_cache": row["kv_cache"], "weights": row["weights"]}
    published = catalog.model(model).precision
    if published.weights != Format.BF16 or published.experts is not None:
        formats["weights"] = ""
    raw["precision"] = {key: FORMATS.get(value, value) for key, value in formats.items() if value}
    keep_published_formats(raw)
    if row.get("client") == "trtllm-bench throughput":
        tokens = (round(float(row[key])) for key in ("input_tokens", "output_tokens"))
        raw["deployment"]["engine"] |= trtllm_bench.limits(resolve(scenario_from(raw)), *tokens)
    return scenario_from(raw)


def rows_of(folder: str) -> list[Row]:
    with (MEASURED / folder / "serving.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured_of(row: Row) -> dict[str, float]:
    """Return what a row says: metric -> seconds, or output tokens a second."""
    columns = {
        "tpot": "mean_tpot_s",
        "ttft": "mean_ttft_s",
        "ttft_median": "median_ttft_s",
        "e2e": "mean_e2e_s",
        "throughput": "output_tokens_per_s",
        "batch": "latency_s",
    }
    found = {metric: float(row[column]) for metric, column in columns.items() if row.get(column)}
    if is_of_medians(row):
        found["tpot"] = float(row["median_tpot_s"])
    if "batch" in found or "tpot" in found:
        found.pop("throughput", None)  # the same again
    return found


def is_of_medians(row: Row) -> bool:
    """Whether the median TPOT counts: a mean over conversations is that of answers of a few tokens."""
    return row["set"].endswith("_sharegpt") and bool(row["median_tpot_s"])


def predicted_by(result: Result, row: Row) -> dict[str, float]:
    summary = result.summary
    assert summary.tpot_s is not None
    return {
        "tpot": summary.tpot_s.p50 if is_of_medians(row) else summary.tpot_s.mean,
        "ttft": summary.ttft_s.mean,
        "ttft_median": summary.ttft_s.p50,
        "e2e": summary.e2e_s.mean,
        "throughput": summary.throughput.output_tokens_per_s,
        "batch": float(result.requests["finish_s"].max()),
    }


def scored(rows: Sequence[Row], calibration: str | None = None) -> Iterator[Scored | tuple[Row, str]]:
    """Yield every row with its prediction, or with the reason why it has none."""
    estimator_of = PricedDeployments().estimator
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            try:
                scenario = scenario_of(row, Path(folder), calibration)
                setup = resolve(scenario)
                result = simulate(scenario, estimator_of(setup))
            except InputError as error:
                yield row, error.message
                continue
            found = {metric: (each.low, each.high) for metric, each in result.intervals.items()}
            found["batch"] = found["e2e"]
            yield Scored(row, measured_of(row), predicted_by(result, row), found, error_scale(setup))


def line_of(name: str, rows: Sequence[Scored], metrics: Sequence[str]) -> str:
    cells = []
    for metric in metrics:
        having = [row for row in rows if metric in row.measured]
        one = score([row.error(metric) for row in having])
        stated = [row for row in having if metric in row.intervals]
        inside = f", {sum(row.is_inside(metric) for row in stated) / len(stated):.0%} inside" if stated else ""
        cells.append("" if one is None else f"{one.median:.1%} / {one.p90:.0%} ({one.bias:+.1%}){inside}")
    return f"| {name} | {len(rows)} | {' | '.join(cells)} |"


def device_of(row: Row) -> str:
    return f"on {row['device']}"


def set_of(row: Row) -> str:
    version = row["version"].partition("+")[0] or "(version not said)"
    return f"{row['set']}, {row['engine']} {version}, {row['device']}"


def table_of(done: Sequence[Scored]) -> str:
    groups = [(key, group) for key in (device_of, set_of) for group in dict.fromkeys(key(row.row) for row in done)]
    measured = [metric for metric in METRICS if any(metric in row.measured for row in done)]
    return "\n".join(
        [
            f"| rows | number | {' | '.join(METRICS[metric] for metric in measured)} |",
            f"|---|---:|{'---|' * len(measured)}",
            line_of("all", done, measured),
            *(line_of(group, [row for row in done if key(row.row) == group], measured) for key, group in groups),
        ]
    )


def source_of(row: Scored) -> str:
    return row.row["set"].partition("_")[0]


def configuration_of(row: Scored) -> str:
    return " ".join(row.row[key] for key in ("set", "device", "engine", "version", "model", "tp"))


def spreads_of(rows: Sequence[Scored]) -> dict[str, Spread]:
    """Return metric -> measured over predicted, weighted as those of a calibration are.

    The end-to-end time has the spread of TPOT, which is most of it: few sources give it.
    """
    found = {}
    for metric in ("tpot", "ttft", "throughput"):
        having = [row for row in rows if metric in row.measured]
        groups = [configuration_of(row) for row in having]
        values = np.array([row.ratio(metric) for row in having])
        found[metric] = spread_of(values, np.array(crowding_weights(groups, SHARED_ERROR)), groups)
    return {**found, "e2e": found["tpot"]}


def inside_held_out(rows: Sequence[Scored]) -> str:
    """Return a table: the share of each source's rows in an interval by the spreads of all other sources."""
    inside: dict[str, dict[str, list[bool]]] = {}
    for source in dict.fromkeys(map(source_of, rows)):
        spreads = spreads_of([row for row in rows if source_of(row) != source])
        for row in rows:
            for metric, spread in spreads.items():
                if source_of(row) == source and metric in row.measured:
                    held = min(spread.p10, 1.0) <= row.ratio(metric) <= max(spread.p90, 1.0)
                    for name in ("all", source):
                        inside.setdefault(name, {}).setdefault(metric, []).append(held)
    metrics = ("tpot", "ttft", "e2e", "throughput")
    lines = [f"| source | {' | '.join(METRICS[metric] for metric in metrics)} |", f"|---|{'---:|' * len(metrics)}"]
    for name, by_metric in inside.items():
        cells = (by_metric.get(metric, []) for metric in metrics)
        texts = (f"{np.mean(held):.0%} of {len(held)}" if held else "" for held in cells)
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def print_row(row: Scored) -> None:
    figures = "  ".join(
        f"{metric} {row.measured[metric]:.4g} {row.predicted[metric]:.4g} {row.error(metric):+.1%}"
        for metric in row.measured
    )
    about = [row.row[key] for key in ("set", "device", "version", "model", "input_tokens", "output_tokens")]
    print(f"{' '.join(about)} x{row.row['concurrency'] or row.row['num_requests']}: {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=f"{' or '.join(FOLDERS)}; default both")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--uncalibrated", action="store_true", help="leave out the calibrations that ship")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page to write the tables into")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose set, device, version or model has it")
    parser.add_argument("--write", action="store_true", help="write the spreads of intervals of other clients' runs")
    options = parser.parse_args()
    if unknown := set(options.folders) - set(FOLDERS):
        parser.error(f"there is no folder {unknown.pop()!r}; known: {', '.join(FOLDERS)}")
    if options.page is not None and (options.only or options.uncalibrated):
        parser.error("--page takes the tables of all rows as they are shipped, without --only and --uncalibrated")
    for folder in options.folders or FOLDERS:
        rows = [row for row in rows_of(folder) if options.only in " ".join(list(row.values())[:6])]
        if not rows:
            print(f"\n{folder}: no row has {options.only!r}")
            continue
        found = list(scored(rows, "none" if options.uncalibrated else None))
        done = [row for row in found if isinstance(row, Scored)]
        refused = Counter(row[1] for row in found if not isinstance(row, Scored))
        print(f"\n{folder}: {len(found)} rows, {len(done)} scored, {refused.total()} refused")
        for reason, count in refused.most_common():
            print(f"- {count} x {reason}")
        table = table_of(done)
        print("\nMedian / p90 of the absolute error of times (bias), and the share inside the stated 80% interval\n")
        print(table)
        if options.page is not None:
            write_table(options.page, folder.replace("_", " "), "published_runs.py", table)
        if folder == "other_clients" and not (options.only or options.uncalibrated):
            print("\nInside an interval by the spreads of all other sources\n")
            print(inside_held_out(done))
            if options.write:
                header = "# Measured over predicted, runs that others published, of dense models.\n"
                header += "#   python benchmarks/published_runs.py other_clients --write\n"
                PUBLISHED_FILE.write_text(header + yaml.safe_dump(encode(spreads_of(done))), encoding="utf-8")
        for row in done if options.rows else ():
            print_row(row)


if __name__ == "__main__":
    main()
