"""ML.ENERGY's runs of vLLM 0.11.1 (real prompts, random sampling) against their simulation; nothing is fitted.

    python benchmarks/mlenergy.py DIR                 every text row, and the same without the engine's version; then
                                                      images and videos
    python benchmarks/mlenergy.py DIR --rows          a line for each row too
    python benchmarks/mlenergy.py DIR --inferred      text rows with the release that `windtunnel validate` infers

DIR holds `mlenergy/llm_serving_energy.csv`; it is also taken from WINDTUNNEL_REFERENCE. A row is a run at one
`max_num_seqs`; its settings are those of the benchmark's launch files: 8,192 batched tokens, asynchronous scheduling,
temperature 0.8 and top-p 0.95 (top-k and penalties are those of the model's generation config, as in `vllm serve`),
tensor parallelism with or without experts spread over the same devices, FlashInfer's experts for DeepSeek, and its
fused all-reduce up to 32 MiB for gpt-oss on B200.

All requests are sent at once (`mlenergy/llm/benchmark.py`), 1,024 for chat and 198 for gpqa, repeated as often as the
sweeps of most models say; code completion is taken to send as many as chat. The table's percentiles are those of every
interval between tokens of the run, its first and its last wave included (`mlenergy_data`,
`_client_itl_percentiles_ms`); its rate is that between the first token of the `max_num_seqs`-th request and the end of
the last one but `max_num_seqs` + 1, and the mean is its batch over its rate.

Prompt lengths are not in the table. `step2` and `step3` of LiYing-98/computational_load_to_power rebuilt the requests
from the benchmark's datasets and seed with the models' tokenizers, and publish mean, standard deviation and
percentiles. Code completion and gpqa are drawn from these. Chat sends every turn of a conversation with all turns
before it, one after the other, so that most of a long prompt is in the prefix cache: half of the prompts have fewer
than 96 tokens, one in ten more than 2,157. Conversations are drawn such that these figures come out, and so many turns
before a request as the tokens of chat templates in the same tables say (`conversations`).
Outputs are drawn from the model's published histogram, scaled to the row's mean.

Requests with an image or a video are those of the language model with as many more tokens: 20 to 150 of text and, for
0.3 to 1.5 megapixels, one for 32 x 32 pixels (Qwen3-VL), 256 (Gemma 3), 144 a tile of 336 x 336 (Llama 4) or 256 a tile
of 512 x 512 (Nemotron VL). Of a video, which the benchmark writes as one second of 32 frames, Qwen3-VL's processor is
taken to keep four frames, two to a token. Where the catalogue has the model's vision tower (Qwen3-VL, Gemma 3), every
request has an image or a video of the middle size instead, and the tower takes its time; of other models only the
median, a step without prompts, can be right.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gzip
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reference import REFERENCE
from windtunnel import catalog
from windtunnel.calibration.measured_runs import VERSION as UNRECORDED
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.releases import with_inferred_versions
from windtunnel.calibration.validate import RunPrediction, with_odd_runs
from windtunnel.errors import InputError
from windtunnel.metrics.accuracy import score
from windtunnel.metrics.records import Table
from windtunnel.model.shape import ModelSpec
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Scenario, resolve, scenario_from
from windtunnel.serving.simulate import simulate

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = "mlenergy"
DEVICES = {"H100": "h100_sxm", "B200": "b200_sxm"}
CHAT, FIM = "lm-arena-chat", "sourcegraph-fim"
GPQA_TOKENS = (183, 283)
"""Least and most tokens of a prompt of gpqa, around the published mean of 233; their spread is assumed."""

FIM_QUANTILES = {0.0: 65, 0.5: 1204, 0.9: 2428, 0.95: 2798, 1.0: 5005}
"""Share of code completion's prompts -> most tokens of these."""

TEXT_TASKS = (CHAT, "gpqa", FIM)
VISION_TOKENS: dict[str, dict[str, tuple[int, int]]] = {
    "image-chat": {"Qwen/": (300, 1500), "google/": (256, 256), "meta-llama/": (600, 2000), "nvidia/": (512, 1800)},
    "video-chat": {"Qwen/": (450, 1800)},
}
"""Task -> start of a model's name -> least and most tokens of an image or video."""

BESIDE_IMAGE_TOKENS = (20, 150)

MEDIA: dict[str, dict[str, Any]] = {
    "image-chat": {"images": {"width": 1104, "height": 816}},
    "video-chat": {"videos": {"frames": 4, "width": 896, "height": 640}},
}
"""Task -> the image or video of every request, of 0.9 megapixels or four frames of 0.6, where the catalogue has the
model's vision tower."""

LANGUAGE_MODELS = {
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": "Qwen/Qwen3-30B-A3B",
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16": "nvidia/NVIDIA-Nemotron-Nano-12B-v2",
}
"""Model that the catalogue lacks -> that with the shape of its language model."""

METRICS = {"median": "median ITL", "mean": "mean ITL", "rate": "tokens/s"}
VERSION = "0.11.1"
NUM_PROMPTS = {"lm-arena-chat": 1024, "gpqa": 198, "sourcegraph-fim": 1024, "image-chat": 1024, "video-chat": 512}
REPEATS = {
    "lm-arena-chat": {256: 1, 1024: 2, 2048: 3, 3072: 4, 4096: 6},
    "gpqa": {128: 1, 256: 2, 512: 3, 1024: 6, 1536: 9, 2048: 12, 3072: 18, 4096: 24},
    "sourcegraph-fim": {256: 1, 1024: 2, 2048: 3, 3072: 4, 4096: 6},
    "image-chat": {512: 1, 1024: 2, 2048: 4, 4096: 8},
    "video-chat": {256: 1, 512: 2, 1024: 4, 4096: 8},
}
"""`max_num_seqs` up to which the prompts are sent so many times (`configs/vllm/<task>/<model>/<gpu>/sweeps.yaml`)."""

BLOCK_TOKENS = 16
FILES = tempfile.TemporaryDirectory()

Row = Mapping[str, str]
Histograms = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class ScoredRow:
    """A row with its measured and predicted figures; those are seconds and tokens a second."""

    row: Row
    scenario: Scenario
    measured: Mapping[str, float]
    predicted: Mapping[str, float]

    @property
    def series(self) -> str:
        return f"{self.row['task']}, {self.row['gpu_model']} x {self.row['num_gpus']}, {self.row['model_id']}"

    def error(self, metric: str) -> float:
        return self.predicted[metric] / self.measured[metric] - 1

    @property
    def model(self) -> ModelSpec:
        assert isinstance(self.scenario.model, str)
        return catalog.model(self.scenario.model)

    @property
    def vocabulary(self) -> int:
        return self.model.vocab_size


def output_lengths(row: Row, histograms: Histograms) -> Any:
    """Return the row's distribution of output lengths: the model's histogram, scaled to the row's mean."""
    mean = float(row["avg_output_len"])
    histogram = histograms.get(f"{row['model_id']}|{row['task']}")
    if histogram is None:
        return round(mean)
    edges, counts = np.array(histogram["bins"]), np.array(histogram["counts"])
    middles = (edges[:-1] + edges[1:]) / 2 if edges.size == counts.size + 1 else edges
    kept = counts > 0
    scaled = middles * mean / np.average(middles, weights=counts)
    values = np.maximum(np.round(scaled[kept]), 2).astype(int)
    return {"type": "empirical", "values": values.tolist(), "weights": counts[kept].tolist()}


def num_requests(row: Row) -> int:
    """Return the requests that a row's run sent, all at once."""
    repeats, num_seqs = REPEATS[row["task"]], int(row["max_num_seqs"])
    return NUM_PROMPTS[row["task"]] * repeats[min(limit for limit in repeats if num_seqs <= limit)]


def input_tokens(row: Row) -> dict[str, Any]:
    """Return the workload's prompts.

    Raises:
        InputError: nothing is known of them.
    """
    task, model = row["task"], row["model_id"]
    if task == CHAT:
        return {"trace": {"path": str(conversations(num_requests(row))), "hash_block_tokens": BLOCK_TOKENS}}
    if task == FIM:
        values = np.interp(np.linspace(0.005, 0.995, 100), list(FIM_QUANTILES), list(FIM_QUANTILES.values()))
        return {"input_tokens": {"type": "empirical", "values": np.round(values).astype(int).tolist()}}
    by_model = VISION_TOKENS.get(task, {})
    tokens = next((tokens for start, tokens in by_model.items() if model.startswith(start)), None)
    shortest, longest = BESIDE_IMAGE_TOKENS
    if task == "gpqa":
        shortest, longest = GPQA_TOKENS
    elif tokens is None:
        raise InputError(f"prompt lengths of {task} are not documented")
    elif not media_of(row):
        shortest, longest = tokens[0] + shortest, tokens[1] + longest
    return {"input_tokens": {"type": "uniform", "min_tokens": shortest, "max_tokens": longest}}


@functools.cache
def conversations(number: int) -> Path:
    """Write chat's requests in their order, and return the file: every turn of each conversation, all at once.

    Runs of more than 1,024 requests repeat the first ones. The six numbers below and the seed are chosen such that of
    1,024 prompts mean (635), standard deviation (1,123), median (96), 90th and 95th percentile (2,157 and 2,999) and
    the turns before a request (2.8) come out as published, within 5%; a chat template adds 8 tokens, and 10 for each of
    those turns. Every process writes a file of its own.
    """
    single, further_turns, first_tokens, spread, turn_tokens, turn_spread = 0.945, 8.6, 36, 1.5, 197, 0.32
    rng, block = np.random.default_rng(1372), 0
    lines: list[str] = []
    while len(lines) < NUM_PROMPTS[CHAT]:
        turns = 1 if rng.random() < single else 1 + rng.geometric(1 / further_turns)
        first = rng.lognormal(np.log(first_tokens), spread)
        each = rng.lognormal(np.log(turn_tokens), turn_spread)
        for turn in range(turns):
            tokens = max(round(first + turn * each) + 8 + 10 * turn, 1)
            ids = list(range(block, block - (-tokens // BLOCK_TOKENS)))
            lines.append(json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 2, "hash_ids": ids}))
        block = block - (-tokens // BLOCK_TOKENS)
    lines = lines[: NUM_PROMPTS[CHAT]]
    path = Path(FILES.name) / f"{number}-{os.getpid()}.jsonl"
    path.write_text("\n".join(lines[place % len(lines)] for place in range(number)) + "\n", encoding="utf-8")
    return path


def media_of(row: Row) -> dict[str, Any]:
    """Return the images or videos of a row's requests; nothing where only their number of tokens is assumed."""
    media = MEDIA.get(row["task"], {})
    return media if media and catalog.model(model_name(row)).vision is not None else {}


def model_name(row: Row) -> str:
    """Return the row's model, or the one that has its shape."""
    return LANGUAGE_MODELS.get(row["model_id"], row["model_id"])


def scenario_of(row: Row, histograms: Histograms, version: str | None) -> Scenario:
    """Return the row's run as a scenario.

    Raises:
        InputError: the model is not known.
    """
    prompts = input_tokens(row)
    num_seqs, experts = int(row["max_num_seqs"]), int(row["expert_parallel"])
    engine: dict[str, Any] = {"max_num_seqs": num_seqs, "max_num_batched_tokens": 8192, "async_scheduling": True}
    if row["model_id"].startswith("deepseek-ai/"):
        engine["moe_backend"] = "trtllm"
    if row["model_id"].startswith("openai/") and row["gpu_model"] == "B200":
        engine |= {"fused_all_reduce": True, "fused_all_reduce_bytes": 32 * 2**20}
    # The launch files of Nemotron's hybrids keep states in fp32 (`mamba-ssm-cache-dtype`), as their model cards say.
    precision = {"precision": {"recurrent_state": "fp32"}} if "Nemotron" in row["model_id"] else {}
    return scenario_from(
        precision
        | {
            "model": model_name(row),
            "deployment": {
                "device": DEVICES[row["gpu_model"]],
                "engine": engine | ({} if version is None else {"version": version}),
                "parallelism": {"tp": int(row["num_gpus"]), "ep": experts},
            },
            "workload": {
                "arrivals": {"type": "closed_loop", "concurrency": num_requests(row)},
                **prompts,
                "output_tokens": output_lengths(row, histograms),
                "num_requests": num_requests(row),
                "sampling": {"temperature": 0.8, "top_p": 0.95},
                **media_of(row),
            },
        }
    )


def is_steady(steps: Table, requests: Table, num_seqs: int) -> Any:
    """Return which steps the table's rate is of, `[num_steps]` bool; all that decode where there are none."""
    first_s, finish_s = np.sort(requests["first_token_s"]), np.sort(requests["finish_s"])
    end_s = finish_s[max(finish_s.size - num_seqs - 2, 0)]
    inside = (steps["start_s"] >= first_s[num_seqs - 1]) & (steps["start_s"] < end_s)
    return inside if inside.any() else steps["decode_tokens"] > 0


def measured_as(steps: Table, requests: Table, num_seqs: int) -> dict[str, float]:
    """Return the median ITL of the whole run, and mean ITL and output rate of its steady part."""
    each_s = steps["duration_s"] / steps["num_steps"]
    weights = (steps["num_steps"] * steps["decode_tokens"]).astype(np.float64)
    order = np.argsort(each_s)
    middle = np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)
    inside = is_steady(steps, requests, num_seqs)
    tokens = weights[inside].sum() + np.maximum(steps["num_sampled"][inside] - steps["decode_tokens"][inside], 0).sum()
    return {
        "median": float(each_s[order][middle]),
        "mean": float(np.average(each_s[inside], weights=weights[inside])),
        "rate": float(tokens / steps["duration_s"][inside].sum()),
    }


def inferred_version(rows: Sequence[Row], histograms: Histograms) -> str:
    """Return the release that explains most rows best, as `windtunnel validate` infers it of runs without a version."""
    runs = [
        replace(as_run(ScoredRow(row, scenario_of(row, histograms, None), measured_of(row), {})), unknown=(UNRECORDED,))
        for row in rows
    ]
    known = with_inferred_versions(runs)
    print(known[0].labels["inferred"])
    return Counter(run.labels["version"] for run in known).most_common(1)[0][0]


def measured_of(row: Row) -> dict[str, float]:
    """Return a row's measured figures, in seconds and tokens a second."""
    rate = float(row["output_throughput_tokens_per_sec"])
    return {"median": float(row["median_itl_ms"]) * 1e-3, "mean": float(row["avg_batch_size"]) / rate, "rate": rate}


def scored(rows: Sequence[Row], histograms: Histograms, version: str | None) -> Iterator[ScoredRow | tuple[Row, str]]:
    """Yield every row with its prediction, or with the reason why it has none."""
    estimator_of = PricedDeployments().estimator
    for row in rows:
        try:
            scenario = scenario_of(row, histograms, version)
            result = simulate(scenario, estimator_of(resolve(scenario)))
        except InputError as error:
            yield row, error.message
            continue
        yield ScoredRow(
            row, scenario, measured_of(row), measured_as(result.steps, result.requests, int(row["max_num_seqs"]))
        )


def line_of(name: str, rows: Sequence[ScoredRow]) -> str:
    cells = []
    for metric in METRICS:
        one = score([row.error(metric) for row in rows])
        assert one is not None
        mean = float(np.mean([abs(row.error(metric)) for row in rows]))
        cells.append(f"{one.median:.1%} / {mean:.1%} / {one.p90:.1%} ({one.bias:+.1%})")
    return f"| {name} | {len(rows)} | {' | '.join(cells)} |"


def trend(rows: Sequence[ScoredRow], of: Callable[[ScoredRow], float]) -> str:
    """Return Pearson's correlation of the signed error of the median ITL with the logarithm of a figure."""
    sizes = np.log([of(row) for row in rows])
    errors = [row.error("median") for row in rows]
    slope = np.polyfit(sizes, errors, 1)[0]
    return f"{np.corrcoef(sizes, errors)[0, 1]:+.2f} ({slope * np.log(2):+.1%} a doubling)"


def as_run(row: ScoredRow) -> Measurement:
    """Return the row as `windtunnel validate` has it, with its mean ITL as time per output token."""
    labels = {
        "device": row.row["gpu_model"],
        "model": row.row["model_id"],
        "parallelism": row.row["num_gpus"],
        "prompt": row.row["task"],
        "format": row.row["weight_precision"],
    }
    labels["concurrency"] = row.row["max_num_seqs"]
    return Measurement("", row.scenario, "", {"tpot": row.measured["mean"]}, labels)


def odd_series(rows: Sequence[ScoredRow]) -> dict[str, str]:
    """Return the series that `windtunnel validate` flags as those of a faulty server, with its words."""
    runs = with_odd_runs([RunPrediction(as_run(row), "", {"tpot": row.predicted["mean"]}, {}, "", {}) for row in rows])
    return {row.series: run.odd for row, run in zip(rows, runs, strict=True) if run.odd}


def clients_of(row: ScoredRow) -> str:
    clients = int(row.row["max_num_seqs"])
    return next(f"{low} to {high}" for low, high in ((8, 16), (17, 64), (65, 256), (257, 4096)) if clients <= high)


GROUPS: Mapping[str, Callable[[ScoredRow], str]] = {
    "task": lambda row: row.row["task"],
    "device": lambda row: row.row["gpu_model"],
    "series": lambda row: row.series,
    "network": lambda row: "experts" if row.model.has_experts else "dense",
    "network on device": lambda row: f"{GROUPS['network'](row)}, {row.row['gpu_model']}",
    "max_num_seqs": clients_of,
    "vocabulary": lambda row: f"{row.vocabulary:,}",
}


def report(title: str, rows: Sequence[Row], histograms: Histograms, version: str | None, prints_rows: bool) -> None:
    found = list(scored(rows, histograms, version))
    done = [row for row in found if isinstance(row, ScoredRow)]
    refused = Counter(row[1] for row in found if not isinstance(row, ScoredRow))
    print(f"\n## {title}\n\n{len(found)} rows, {len(done)} scored, {refused.total()} refused")
    for reason, count in refused.most_common():
        print(f"- {count} x {reason}")
    if not done:
        return
    print("\nMedian / mean / p90 of the absolute error (bias), ITL in the steady state\n")
    print(f"| rows | number | {' | '.join(METRICS.values())} |\n|---|---:|{'---:|' * len(METRICS)}")
    odd = odd_series(done)
    print(line_of("all", done))
    print(line_of("all but those flagged as odd", [row for row in done if row.series not in odd]))
    for name, key in GROUPS.items():
        for group in sorted({key(row) for row in done}):
            print(line_of(f"{name}: {group}", [row for row in done if key(row) == group]))
    print(f"\ntrend with clients: {trend(done, lambda row: float(row.row['max_num_seqs']))}")
    print(f"trend with vocabulary: {trend(done, lambda row: float(row.vocabulary))}")
    for series, reason in odd.items():
        print(f"flagged as odd: {series}: {reason}")
    for row in done if prints_rows else ():
        per_logit = (row.measured["median"] - row.predicted["median"]) / (
            float(row.row["avg_batch_size"]) * row.vocabulary
        )
        print(
            f"{row.series:70} {row.row['max_num_seqs']:>5} "
            f"{row.measured['median'] * 1e3:8.2f} {row.predicted['median'] * 1e3:8.2f} {row.error('median'):+7.1%} "
            f"{row.error('mean'):+7.1%} {row.error('rate'):+7.1%} {per_logit * 1e9:+.3f} ns a logit"
        )


def read_rows(reference: Path) -> tuple[list[Row], Histograms]:
    """Return all rows and the models' histograms of output lengths; none, and a line that says so, without the data."""
    folder = reference / FOLDER
    if not folder.is_dir():
        print(f"skipped: there is no recorded reference data at {folder}")
        return [], {}
    with (folder / "llm_serving_energy.csv").open(newline="", encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
    with gzip.open(folder / "output_length_distributions.json.gz", "rt", encoding="utf-8") as file:
        return rows, json.load(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", nargs="?", type=Path, default=REFERENCE, metavar="DIR")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose task, device or model contains it")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every so-many-th row")
    parser.add_argument("--inferred", action="store_true", help="only text rows, with the version inferred from them")
    parser.add_argument("--named", action="store_true", help="only with the version named")
    options = parser.parse_args()
    rows, histograms = read_rows(options.reference)
    if not rows:
        return 0
    rows = [row for row in rows if options.only in f"{row['task']} {row['gpu_model']} {row['model_id']}"]
    text = [row for row in rows if row["task"] in TEXT_TASKS][:: options.every]
    vision = [row for row in rows if row["task"] in VISION_TOKENS][:: options.every]
    if options.inferred:
        report("version inferred", text, histograms, inferred_version(text, histograms), options.rows)
        return 0
    report(f"vLLM {VERSION}", text, histograms, VERSION, options.rows)
    if not options.named:
        report("version not named", text, histograms, None, options.rows)
    report(f"images and videos, vLLM {VERSION}", vision, histograms, VERSION, options.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
