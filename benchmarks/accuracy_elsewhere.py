"""The scoreboard's other rows: published runs of other clients, engines and years. Nothing was fitted to them.

    python benchmarks/accuracy_elsewhere.py --reference DIR [--page FILE]     a row for each set below DIR/serving

- TensorRT-LLM's published offline throughput (0.14, 0.17 and 1.0): all requests at once, output tokens a second.
- TensorRT-LLM's published throughput of static batches (0.5, 0.6.1): all requests of a batch at once.
- TensorRT-LLM's published online latencies (0.14, Triton): Poisson arrivals, TTFT and TPOT.
- LLMServingSim's vLLM 0.19 runs on workstation cards: a trace with more arrivals than the card serves.
- Splitwise's profile of Llama-2-70B (A100, H100): batches of equal prompts, prefill and decode time.
- APEX's runs of vLLM 0.6 on eight H100: Llama-3.1-70B in bf16, the requests that it recorded.
- gpt-fast's single-stream decode on A100: one request; bf16, int8 and int4 weights.
- Mooncake's handoff of prompts of 128 to 32,768 tokens between two nodes of eight H800: KV transfer and TTFT. The
  transfer's latency and share of the links were read off these very nine runs (`serving.deployment.LINK_EFFICIENCY`).

Beside the predictions stand two naive ones: operators from the roofline alone, and a log-linear regression on lengths,
requests, devices and the model's size, which has seen four fifths of the very set and predicts the others (five folds).
DIR is also taken from WINDTUNNEL_REFERENCE.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from readers import trtllm_bench
from readers.pages import write_table
from reference import REFERENCE
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import score
from windtunnel.pricing.estimator import Estimator, RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.serving.calibration import NONE
from windtunnel.serving.deployment import LINK_EFFICIENCY
from windtunnel.serving.scenario import Scenario, keep_published_formats, resolve, scenario_from
from windtunnel.serving.setup.estimators import calibrated, estimator_for, estimator_key
from windtunnel.serving.simulate import simulate
from windtunnel.workload.generate.requests import generate

METRICS = {"tpot": "TPOT", "ttft": "TTFT", "throughput": "throughput", "transfer": "KV transfer"}
HEADERS = [f"{title} {what}" for title in METRICS.values() for what in ("median", "p90")]
MOST_REQUESTS = 1000
"""Of a set's thousands; a burst is at its steady rate long before."""

MODELS = {
    "LLaMA v3.1 8B": "meta-llama/Llama-3.1-8B",
    "Llama 3.1 8B": "meta-llama/Llama-3.1-8B",
    "LLaMA 3.1 8B": "meta-llama/Llama-3.1-8B",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "LLaMA v3.1 70B": "meta-llama/Llama-3.1-70B",
    "LLaMA 3.1 70B": "meta-llama/Llama-3.1-70B",
    "Llama 3.3 70B": "meta-llama/Llama-3.1-70B",
    "Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
    "LLaMA v3.1 405B": "meta-llama/Llama-3.1-405B",
    "Llama 3.1 405B": "meta-llama/Llama-3.1-405B",
    "Llama 4 Scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    # Without the window of v0.1: unless `max_attention_window` is given, TensorRT-LLM's engines attend to every token.
    "Mistral 7B": "mistralai/Mistral-7B-v0.2",
    "Mixtral 8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "LLaMA 7B": "meta-llama/Llama-2-7b-hf",
    "LLaMA 13B": "meta-llama/Llama-2-13b-hf",
    "LLaMA 70B": "meta-llama/Llama-2-70b-hf",
}
DEVICES = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "A100": "a100_sxm",
    "A100-SXM4-80GB": "a100_sxm",
    "A100-PCIE-80GB": "a100_pcie",
    "L40S": "l40s",
    "RTX4090": "rtx_4090",
    "RTXPRO6000": "rtx_pro_6000_server",
    "a100-80gb": "a100_sxm",
    "h100-80gb": "h100_sxm",
}
NODES = {"a100_pcie": "pcie"}
"""Device -> node where it is not the usual one: up to eight A100 on PCIe in one server, of which no page says that
NVLink bridges join any."""
FORMATS: dict[str, dict[str, str]] = {
    "FP8": {"weights": "fp8", "kv_cache": "fp8"},
    "FP4": {"weights": "nvfp4", "kv_cache": "fp8"},
    "FP16": {"weights": "bf16"},
    "BF16": {"weights": "bf16"},
    "int8": {"weights": "w8a16"},
    "int4 g32": {"weights": "int4"},
}

GREEDY: dict[str, Any] = {"sampling": {"temperature": 0.0}}
"""Sampling that vLLM's benchmark client asks for, by which these traces were replayed."""

TENSORRT: dict[str, Any] = {"name": "trtllm", "version": "1.0.0", "backend": "tensorrt"}
"""Releases before 1.0, with engines that TensorRT built before; their kernels are taken as those of 1.0, the first that
were measured."""

Run = tuple[Scenario, dict[str, float]]
Source = Callable[[Path, Path], Iterator["Run | str"]]


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def scenario_of(model: str, device: str, engine: dict[str, Any], workload: dict[str, Any], **rest: Any) -> Scenario:
    raw: dict[str, Any] = {
        "model": model,
        "deployment": {
            "device": device,
            "node": NODES.get(device),
            "engine": engine,
            "parallelism": {name: rest.pop(name) for name in ("tp", "pp") if name in rest},
        },
        "workload": workload,
        **rest,
    }
    keep_published_formats(raw)
    return scenario_from(raw)


def trtllm_offline(folder: Path, _: Path) -> Iterator[Run | str]:
    for row in rows_of(folder / "trtllm_offline_throughput.csv"):
        if row["model"] not in MODELS:
            yield f"{row['model']} is not in the catalog"
            continue
        workload = {
            "arrivals": {"type": "burst"},
            "input_tokens": int(row["isl"]),
            "output_tokens": int(row["osl"]),
            "num_requests": min(int(row["n_requests"]), MOST_REQUESTS),
        }
        shape = {"tp": int(row["tp"]), "pp": int(row["pp"]), "precision": FORMATS[row["precision"]]}
        engine = TENSORRT | {"enable_chunked_prefill": True}
        if row["release"] == "v1.0":
            engine |= {"backend": "pytorch", **trtllm_bench.documented(row["model"], row["gpu"])}
        made = scenario_of(MODELS[row["model"]], DEVICES[row["gpu"]], engine, workload, **shape)
        if row["release"] == "v1.0":
            engine |= trtllm_bench.limits(resolve(made), int(row["isl"]), int(row["osl"]))
            made = scenario_of(MODELS[row["model"]], DEVICES[row["gpu"]], engine, workload, **shape)
        yield made, {"throughput": float(row["output_tok_per_s"])}


def trtllm_static(folder: Path, _: Path) -> Iterator[Run | str]:
    for row in rows_of(folder / "trtllm_static_batch.csv"):
        if row["kind"] != "static_batch_throughput" or row["model"] not in MODELS:
            yield f"{row['kind']} of {row['model']}"
            continue
        batch, prompt = int(row["batch"]), int(row["isl"])
        # A batch runs whole.
        engine = TENSORRT | {"max_num_seqs": batch, "max_num_batched_tokens": batch * prompt}
        workload = {
            "arrivals": {"type": "burst"},
            "input_tokens": prompt,
            "output_tokens": int(row["osl"]),
            "num_requests": batch,
        }
        shape = {"tp": int(row["tp"]), "precision": FORMATS[row["precision"]]}
        made = scenario_of(MODELS[row["model"]], DEVICES[row["gpu"]], engine, workload, **shape)
        devices = int(row["tp"]) if row["unit"].endswith("/GPU") else 1
        yield made, {"throughput": float(row["value"]) * devices}


def trtllm_online(folder: Path, _: Path) -> Iterator[Run | str]:
    for row in rows_of(folder / "trtllm_online.csv"):
        if row["model"] not in MODELS:
            yield f"{row['model']} is not in the catalog"
            continue
        rate = float(row["qps"])
        arrivals = {"type": "burst"} if math.isinf(rate) else {"type": "poisson", "rate_per_s": rate}
        workload = {
            "arrivals": arrivals,
            "input_tokens": int(row["isl"]),
            "output_tokens": int(row["osl"]),
            "num_requests": int(row["n_requests"]),
        }
        engine = TENSORRT | {"enable_chunked_prefill": True}
        shape = {"tp": int(row["tp"]), "precision": FORMATS[row["precision"]]}
        made = scenario_of(MODELS[row["model"]], DEVICES[row["gpu"]], engine, workload, **shape)
        yield made, {"ttft": float(row["mean_ttft_ms"]) * 1e-3, "tpot": float(row["mean_itl_ms"]) * 1e-3}


def llmservingsim(folder: Path, scratch: Path) -> Iterator[Run | str]:
    for row in rows_of(folder / "llmservingsim_vllm.csv"):
        traces = folder.parent / "traces"
        name = {"Llama-3.1-8B": "llama-3.1-8b", "Qwen3-32B": "qwen3-32b"}.get(row["model"], "")
        trace = traces / f"llmservingsim_sharegpt_{name}_300_sps10.csv.gz"
        if not trace.is_file():
            yield f"there is no trace of {row['model']}"
            continue
        path = scratch / f"{name}.csv"
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            lines = [
                f"{int(one['arrival_ns']) * 1e-9},{one['input_toks']},{one['output_toks']}"
                for one in csv.DictReader(file)
            ]
        path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n", encoding="utf-8")
        engine: dict[str, Any] = {
            "name": "vllm",
            "version": row["vllm_version"],
            "max_num_seqs": int(row["max_num_seqs"]),
            "max_num_batched_tokens": int(row["max_num_batched_tokens"]),
        }
        if row["num_gpu_blocks"]:
            engine["num_gpu_blocks"] = int(float(row["num_gpu_blocks"]))
        made = scenario_of(
            MODELS[row["model"]],
            DEVICES[row["gpu"]],
            engine,
            GREEDY | {"trace": {"path": str(path)}},
            tp=int(row["tp"]),
        )
        yield (
            made,
            {
                "ttft": float(row["ttft_mean_ms"]) * 1e-3,
                "tpot": float(row["tpot_mean_ms"]) * 1e-3,
                "throughput": float(row["output_tok_per_s"]),
            },
        )


def splitwise(folder: Path, _: Path) -> Iterator[Run | str]:
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows_of(folder / "splitwise_perf.csv"):
        key = tuple(row[name] for name in ("hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"))
        found.setdefault(key, []).append((float(row["prompt_time"]), float(row["token_time"])))
    for (hardware, tp, prompt, batch, output), times in found.items():
        tokens = int(prompt) * int(batch)
        engine = {"name": "vllm", "version": "0.8.0", "max_num_seqs": 256, "max_num_batched_tokens": max(tokens, 2048)}
        engine |= {"host": {"first_token_s": 0.0, "prompt_token_s": 0.0}}
        workload = {
            "arrivals": {"type": "burst"},
            "input_tokens": int(prompt),
            "output_tokens": int(output),
            "num_requests": int(batch),
        }
        made = scenario_of(MODELS["llama2-70b"], DEVICES[hardware], engine, workload, tp=int(tp))
        prompts, decodes = sorted(one for one, _ in times), sorted(one for _, one in times)
        yield made, {"ttft": prompts[len(prompts) // 2] * 1e-3, "tpot": decodes[len(decodes) // 2] * 1e-3}


def gptfast(folder: Path, _: Path) -> Iterator[Run | str]:
    for row in rows_of(folder / "gptfast_bs1_decode.csv"):
        workload = {
            "arrivals": {"type": "closed_loop", "concurrency": 1},
            "input_tokens": 8,
            "output_tokens": 200,
            "num_requests": 2,
        }
        engine, shape = {"name": "vllm", "version": "0.14.0"}, {"tp": int(row["tp"])}
        precision = FORMATS[row["weight"].replace("bf16", "BF16")]
        made = scenario_of(MODELS[row["model"]], "a100_sxm", engine, workload, precision=precision, **shape)
        yield made, {"tpot": float(row["tpot_ms"]) * 1e-3}


def mooncake(folder: Path, _: Path) -> Iterator[Run | str]:
    """One request at a time, prefilled on one node and decoded on the other; eight interfaces of 200 Gb/s."""
    for row in rows_of(folder / "mooncake_pd_transfer.csv"):
        workload = {
            "arrivals": {"type": "closed_loop", "concurrency": 1},
            "input_tokens": int(row["prompt_len"]),
            "output_tokens": 128,
            "num_requests": 3,
        }
        made = scenario_from(
            {
                "model": "Qwen/Qwen3-8B",
                "deployment": {
                    "device": "h800_sxm",
                    "parallelism": {"tp": int(row["tp"])},
                    "engine": {"name": "vllm", "version": "0.11.2"},
                    "pools": [{"name": role, "role": role} for role in ("prefill", "decode")],
                    "transfer": {"bytes_per_s": LINK_EFFICIENCY * 8 * 25e9},
                },
                "workload": workload,
            }
        )
        yield made, {"ttft": float(row["ttft_ms"]) * 1e-3, "transfer": float(row["transfer_ms"]) * 1e-3}


APEX_LENGTHS = "apex_validation_lengths.csv.gz"


def apex(folder: Path, scratch: Path) -> Iterator[Run | str]:
    requests: dict[str, list[str]] = {}
    with gzip.open(folder / "per_request" / APEX_LENGTHS, "rt", encoding="utf-8", newline="") as file:
        for one in csv.DictReader(file):
            if one["engine"] == "vllm" and one["actual_output_tokens"]:
                line = [one["arrival_offset_s"], one["actual_prompt_tokens"], one["actual_output_tokens"]]
                requests.setdefault(one["case"], []).append(",".join(str(float(value)) for value in line))
    for row in rows_of(folder / "apex_validation.csv"):
        case = Path(row["path"]).stem
        if row["use"] != "primary" or row["engine"] != "vllm" or case not in requests:
            yield "its requests are not recorded" if row["use"] == "primary" else row["use"].replace("_", " ")
            continue
        path = scratch / f"{case}.csv"
        path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *whole(requests[case])]) + "\n", "utf-8")
        # vLLM 0.6 chunks prompts, 512 tokens at a time, of models with more than 32K of context (engine/arg_utils.py,
        # config.py, 0.6.0). Its kernels and overheads are taken as those of 0.8, the first that is described.
        engine = {"name": "vllm", "version": "0.8.0", "scheduler": "sarathi", "max_num_batched_tokens": 512}
        made = scenario_of(
            "meta-llama/Llama-3.1-70B", "h100_sxm", engine, GREEDY | {"trace": {"path": str(path)}}, tp=int(row["tp"])
        )
        yield made, {"ttft": float(row["mean_ttft_s"]), "tpot": float(row["mean_tpot_s"])}


def whole(lines: list[str]) -> Iterator[str]:
    """Arrival, prompt and output of every request in order of arrival; tokens without decimals."""
    for line in sorted(lines, key=lambda line: float(line.partition(",")[0])):
        arrival_s, prompt, output = line.split(",")
        yield f"{arrival_s},{float(prompt):.0f},{max(float(output), 1):.0f}"


SETS: dict[str, Source] = {
    "APEX, vLLM 0.6, 8 x H100, Llama-3.1-70B": apex,
    "TensorRT-LLM offline throughput (0.14, 0.17, 1.0)": trtllm_offline,
    "TensorRT-LLM static batches (0.5, 0.6)": trtllm_static,
    "TensorRT-LLM online (0.14)": trtllm_online,
    "LLMServingSim, vLLM 0.19, RTX cards": llmservingsim,
    "Splitwise, Llama-2-70B static batches": splitwise,
    "gpt-fast, batch 1": gptfast,
    "Mooncake, vLLM 0.11, 2 x 8 H800, KV transfer": mooncake,
}


def predicted(scenario: Scenario, roofline: bool, tables: dict[Any, Estimator]) -> dict[str, float]:
    """Its metrics; `tables` keeps the estimators that read tables, by what they were read for."""
    device = catalog.device(scenario.deployment.device)
    estimator: Estimator | None = None
    if roofline:
        named = scenario.deployment.node
        estimator = RooflineEstimator(Roofline(device, catalog.node(named) if named else catalog.default_node(device)))
    elif not scenario.deployment.pools:
        setup = resolve(scenario)
        key = estimator_key(setup)
        if key not in tables:
            tables[key] = plain_estimator(scenario)
        estimator = calibrated(tables[key], setup)
    summary = simulate(scenario, estimator).summary
    found = {"ttft": summary.ttft_s.mean, "throughput": summary.throughput.output_tokens_per_s}
    if summary.transfer_s is not None:
        found["transfer"] = summary.transfer_s.mean
    return {**found, "tpot": summary.tpot_s.mean} if summary.tpot_s is not None else found


def plain_estimator(scenario: Scenario) -> Estimator:
    """Of the scenario's tables, without calibration."""
    deployment = msgspec.structs.replace(scenario.deployment, calibration=NONE)
    return estimator_for(resolve(msgspec.structs.replace(scenario, deployment=deployment)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, default=REFERENCE, metavar="DIR", help="the recorded data")
    parser.add_argument("--only", default="", metavar="TEXT", help="sets whose name contains it")
    parser.add_argument("--rows", action="store_true", help="print every run")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every so-many-th run of a set")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page to write the medians into")
    options = parser.parse_args()
    folder = options.reference / "serving"
    if not folder.is_dir():
        print(f"skipped: there is no recorded reference data at {folder}")
        return 0
    print(f"| set | runs | refused | predicted by | {' | '.join(HEADERS)} |")
    print(f"|---|---:|---:|---|{'---:|' * len(HEADERS)}")
    short = [
        f"| set | runs | refused | {' | '.join(METRICS.values())} | roofline alone |",
        "|---|---:|---:|---|---|---|---|---|",
    ]
    for name, source in SETS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            by_way = scores_of(list(source(folder, Path(scratch)))[:: options.every], options.rows)
        for way, (counts, cells) in by_way.items():
            print(f"| {name} | {counts} | {way} | {' | '.join(cells)} |", flush=True)
        (counts, ours), (_, plain) = by_way["windtunnel"], by_way["roofline alone"]
        of_plain = ", ".join(cell.partition(" ")[0] for cell in plain[::2] if cell)
        short.append(f"| {name} | {counts} | {' | '.join(ours[::2])} | {of_plain} |")
    if options.page is not None:
        write_table(options.page, "other sets", "accuracy_elsewhere.py", "\n".join(short))
    return 0


LEAST_RUNS = 10
"""Of a regression."""


def regressed(runs: Sequence[Run], num_folds: int = 5) -> list[dict[str, float]]:
    """Every run's metrics by ridge regression of their logarithms on the other folds' runs."""
    rows = []
    for scenario, _ in runs:
        setup = resolve(scenario)
        made = generate(scenario.workload, scenario.seed)
        sizes = (made.input_tokens.mean(), made.output_tokens.mean(), made.input_tokens.size)
        device = setup.device
        speeds = (setup.parallelism.num_devices, device.memory_bytes_per_s, setup.model.num_layers)
        rows.append([1.0, *np.log([*sizes, *speeds, setup.model.hidden_size])])
    features, fold = np.array(rows), np.arange(len(runs)) % num_folds
    found: list[dict[str, float]] = [{} for _ in runs]
    for metric in METRICS:
        known = np.array([metric in measured for _, measured in runs])
        target = np.log([measured.get(metric, 1.0) for _, measured in runs])
        for one in range(num_folds):
            kept = known & (fold != one)
            matrix = features[kept].T @ features[kept] + 0.1 * np.eye(features.shape[1])
            weights = np.linalg.solve(matrix, features[kept].T @ target[kept])
            for index in np.flatnonzero(known & (fold == one)).tolist():
                found[index][metric] = float(np.exp(features[index] @ weights))
    return found


def groups_of(pairs: Sequence[tuple[Run, Mapping[str, float]]]) -> Iterator[str]:
    """Yield the median errors of runs on the same number of devices by the same backend."""
    errors: dict[tuple[str, ...], list[float]] = {}
    for (scenario, measured), found in pairs:
        deployment = scenario.deployment
        place = f"{deployment.parallelism.tp} x {deployment.device}", deployment.engine.backend or ""
        for name, value in measured.items():
            errors.setdefault((*place, name), []).append(found[name] / value - 1)
    for key, each in sorted(errors.items()):
        one = score(each)
        if one is not None:
            yield f"{' '.join(key)}: {len(each)} runs, median {one.median:.1%} ({one.bias:+.1%})"


def row_text(scenario: Scenario, measured: Mapping[str, float], found: Mapping[str, float]) -> str:
    deployment, workload = scenario.deployment, scenario.workload
    shape = f"tp {deployment.parallelism.tp} pp {deployment.parallelism.pp}, {deployment.engine.backend or ''}"
    tokens = f"{workload.input_tokens} in, {workload.output_tokens} out, {workload.num_requests} requests"
    errors = ", ".join(f"{name} {found[name] / value - 1:+.1%}" for name, value in measured.items())
    return f"{scenario.model}, {scenario.precision}, {deployment.device}, {shape}, {tokens}: {errors}"


def scores_of(runs: list[Run | str], show_rows: bool = False) -> dict[str, tuple[str, list[str]]]:
    """Return way of predicting -> runs and refused ones, and the median (bias) and 90th percentile of every metric."""
    done: dict[str, list[tuple[Run, dict[str, float]]]] = {"windtunnel": [], "roofline alone": []}
    tables: dict[Any, Estimator] = {}
    reasons = Counter[str]()
    for run in runs:
        for way, pairs in done.items():
            try:
                if not isinstance(run, str):
                    pairs.append((run, predicted(run[0], way != "windtunnel", tables)))
                elif way == "windtunnel":
                    reasons[run] += 1
            except InputError as error:
                if way == "windtunnel":
                    reasons[error.message] += 1
    for reason, number in reasons.most_common():
        print(f"refused: {number} of {len(runs)}: {reason}", file=sys.stderr)
    ready = [run for run, _ in done["windtunnel"]]
    if show_rows:
        for (scenario, measured), found in done["windtunnel"]:
            print(row_text(scenario, measured, found), file=sys.stderr)
        for line in groups_of(done["windtunnel"]):
            print(line, file=sys.stderr)
    if len(ready) >= LEAST_RUNS:
        done["log-linear regression"] = list(zip(ready, regressed(ready), strict=True))
    found_by: dict[str, tuple[str, list[str]]] = {}
    for way, pairs in done.items():
        cells = []
        for metric in METRICS:
            one = score([found[metric] / run[1][metric] - 1 for run, found in pairs if metric in run[1]])
            cells += ["", ""] if one is None else [f"{one.median:.1%} ({one.bias:+.1%})", f"{one.p90:.1%}"]
        found_by[way] = f"{len(runs)} | {len(runs) - len(pairs)}", cells
    return found_by


if __name__ == "__main__":
    sys.exit(main())
