"""Read benchmark clients' result files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError, is_number
from windtunnel.formats.recognise import FileContent, FileFormat, find_format

MS = 1e-3
UNITS_S = {"ms": MS, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}
_BACKENDS = {"sglang": "sglang", "trt": "trtllm", "tensorrt": "trtllm"}
"""Beginning of a client's `--backend` that names one engine -> that engine; `vllm` is any server of the OpenAI API."""
_PERCENTILE = re.compile(r"median|p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True)
class ClientResult:
    """One run as its client saw it."""

    id: str
    client: str
    input_tokens: float
    """Mean over requests; 0 where the client knows no tokens."""
    output_tokens: float
    num_requests: int
    concurrency: int | None
    """None with a rate: an open loop. None without one: not recorded."""
    rate_per_s: float | None
    """None: as fast as `concurrency` allows."""
    measured: Mapping[str, float]
    """Metric -> mean, as in `Measurement.measured`."""
    range_ratio: float | None = None
    """Shortest length as a share of the longest, where lengths were drawn; None: not recorded."""
    gap_cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals at a rate: 1 is Poisson, 0 equal gaps."""
    model: str | None = None
    """Name of the model that the client asked for; None: not recorded."""
    num_failed: int = 0
    """Requests besides that were not answered."""
    engine: str | None = None
    """Engine that the client was told of; None: any server of the OpenAI API."""
    percentiles: Mapping[str, float] = field(default_factory=dict)
    """Latency and percentile (`ttft_p99`) -> seconds, of those that the client wrote."""

    def values(self) -> dict[str, float]:
        """Return metric or percentile -> value."""
        return {**self.measured, **self.percentiles}

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}, which is {getattr(self, name)}")
        for name, value in {"concurrency": self.concurrency, "rate_per_s": self.rate_per_s, **self.values()}.items():
            if value is not None and (not is_number(value) or value <= 0):
                raise ValueError(f"{name}, which is {value!r:.60}")


def read_client_results(path: Path) -> list[ClientResult]:
    """Read the runs in a client's result file; InputError for an unknown client, or a file without a finished run."""
    known = find_format(path, "client result")
    results: Any = known.read(path)
    if not isinstance(results, list) or not all(isinstance(result, ClientResult) for result in results):
        raise InputError(f"the reader of {known.name} returned {results!r:.60}, which is no list of ClientResult")
    if not results:
        raise InputError(f"{path} holds no finished run")
    return results


def of_documents(read: Callable[[str, dict[str, Any]], Iterable[ClientResult]]) -> Callable[[Path], list[ClientResult]]:
    """Return a reader of files that hold one JSON document, or one a line.

    `read` takes a name for a document's runs, and the document.
    """

    def read_file(path: Path) -> list[ClientResult]:
        results: list[ClientResult] = []
        for number, document in enumerate(FileContent(path).documents):
            name = path.stem if number == 0 else f"{path.stem}:{number + 1}"
            try:
                results += read(name, document)
            except KeyError as error:
                raise InputError(f"{path}: {name} lacks {error}", "was the run interrupted?") from None
            except (TypeError, AttributeError) as error:
                message = f"{path}: {name} has a value of another kind than the client writes: {error}"
                raise InputError(message, "has it been edited? the client's own file is needed") from None
            except (ValueError, ZeroDivisionError) as error:
                raise InputError(f"{path}: {name} misstates {error}") from None
        return results

    return read_file


def has(test: Callable[[dict[str, Any]], bool]) -> Callable[[FileContent], bool]:
    """Return a test of files: whether they hold JSON objects that all pass `test`."""

    def passes(file: FileContent) -> bool:
        documents = file.documents if file.is_json else []
        return bool(documents) and all(isinstance(document, dict) and test(document) for document in documents)

    return passes


def _bench_serving(name: str, document: dict[str, Any]) -> Iterator[ClientResult]:
    """Read vLLM's `vllm bench serve` (0.6 to 0.24) and SGLang's `sglang.bench_serving` (0.4 and 0.5)."""
    num_requests = int(document["completed"])
    if num_requests == 0:
        return
    rate = float(document.get("request_rate") or math.inf)
    has_rate = rate not in (math.inf, -1.0)
    # Without a rate and a limit, as both clients run by default, everything is sent at once.
    concurrency = document.get("max_concurrency") or (None if has_rate else document.get("num_prompts", num_requests))
    is_sglang = "random_range_ratio" in document or "mean_e2e_latency_ms" in document
    is_chat = "openai-chat" in (document.get("backend"), document.get("endpoint_type"))
    ends = (("ttft", "_ttft_ms"), ("tpot", "_tpot_ms"), ("e2e", "_e2el_ms"), ("e2e", "_e2e_latency_ms"))
    # SGLang records the option whatever the data set was.
    is_random = str(document.get("dataset_name", "random")).startswith("random")
    yield ClientResult(
        id=name,
        client="sglang" if is_sglang else "vllm-chat" if is_chat else "vllm",
        input_tokens=document["total_input_tokens"] / num_requests,
        output_tokens=document["total_output_tokens"] / num_requests,
        num_requests=num_requests,
        concurrency=int(concurrency) if concurrency else None,
        rate_per_s=rate if has_rate else None,
        measured=_known(
            tpot=document["mean_tpot_ms"] * MS,
            ttft=document["mean_ttft_ms"] * MS,
            e2e=(document.get("mean_e2el_ms") or document.get("mean_e2e_latency_ms") or 0.0) * MS,
            throughput=float(document["output_throughput"]),
        ),
        range_ratio=document.get("random_range_ratio") if is_random else None,
        gap_cv=1 / math.sqrt(float(document.get("burstiness") or 1.0)),
        model=document.get("model_id"),
        num_failed=max(int(document.get("failed") or document.get("num_prompts", num_requests) - num_requests), 0),
        engine=_BACKENDS.get(str(document.get("backend")).partition("-")[0]),
        percentiles=_percentiles(*((latency, _flat(document, "", end), MS) for latency, end in ends)),
    )


def _known(**measured: float) -> dict[str, float]:
    """Return the known metrics; clients write 0 where every answer has one token, and NaN where nothing was measured.
    ValueError for a negative time, or nothing at all."""
    for name, value in measured.items():
        if value < 0:
            raise ValueError(f"{name}, which is below zero")
    known = {name: value for name, value in measured.items() if 0 < value < math.inf}
    if not known:
        raise ValueError("every latency and throughput")
    return known


def _percentiles(*known: tuple[str, Mapping[str, Any] | None, float]) -> dict[str, float]:
    """Return `ttft_p99` -> seconds, from latencies with their statistics (`p99`, `median`) and the unit in seconds."""
    return {
        f"{latency}_p{float(found[1] or 50):g}": float(value) * unit_s
        for latency, statistics, unit_s in known
        for name, value in (statistics or {}).items()
        if (found := _PERCENTILE.fullmatch(name)) and 0 < (value or 0) < math.inf
    }


def latencies(mean: str, throughput: float, **known: tuple[Mapping[str, Any] | None, float]) -> dict[str, Any]:
    """Return the fields of a result from latencies with their statistics, of which `mean` is one, and the unit in
    seconds.
    """
    measured = {name: float((values or {}).get(mean) or 0.0) * unit_s for name, (values, unit_s) in known.items()}
    percentiles = _percentiles(*((name, *each) for name, each in known.items()))
    return {"measured": _known(**measured, throughput=throughput), "percentiles": percentiles}


def _flat(document: Mapping[str, Any], begin: str, end: str) -> dict[str, Any]:
    """Return what is between `begin` and `end` in the keys that have both -> value."""
    keys = (key for key in document if key.startswith(begin) and key.endswith(end))
    return {key.removeprefix(begin).removesuffix(end): document[key] for key in keys}


def _aiperf(name: str, document: dict[str, Any]) -> Iterator[ClientResult]:
    """Read AIPerf's `profile_export_aiperf.json` (0.1 to 0.13) and GenAI-Perf's `profile_export_genai_perf.json`."""

    def mean(key: str) -> float:
        return float(document[key]["avg"])

    def mean_or_none(key: str) -> float:
        return mean(key) if document.get(key, {}).get("avg") is not None else 0.0

    times = {"tpot": "inter_token_latency", "ttft": "time_to_first_token", "e2e": "request_latency"}
    units = {latency: str(document.get(key, {}).get("unit", "ms")) for latency, key in times.items()}
    if unknown := next((unit for unit in units.values() if unit not in UNITS_S), None):
        raise ValueError(f"a unit of time, which is {unknown!r}")
    load = _aiperf_load(name, document.get("input_config", {}))
    concurrency, rate, per_s = load.get("concurrency"), load.get("request_rate"), mean("request_throughput")
    num_requests = document.get("request_count", {}).get("avg") or load.get("request_count")
    # AIPerf's default is Poisson, GenAI-Perf's perf_analyzer has equal gaps.
    pattern = load.get("arrival_pattern") or load.get("request_rate_mode") or "poisson"
    smoothness = load.get("arrival_smoothness") or 1.0
    yield ClientResult(
        id=name,
        client="aiperf",
        input_tokens=mean("input_sequence_length"),
        output_tokens=mean("output_sequence_length"),
        num_requests=int(num_requests or 10 * int(concurrency or per_s * 60)),
        concurrency=int(concurrency) if concurrency else None,
        rate_per_s=float(rate) if rate else None,
        gap_cv={"constant": 0.0, "gamma": 1 / math.sqrt(smoothness)}.get(pattern, 1.0),
        num_failed=int(mean_or_none("error_request_count")),
        **latencies(
            "avg",
            mean_or_none("output_token_throughput"),
            **{latency: (document.get(key), UNITS_S[units[latency]]) for latency, key in times.items()},
        ),
    )


def _aiperf_load(name: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the load under the names of AIPerf's `loadgen`.

    Newer versions configure phases, of which the measured one counts; GenAI-Perf configures perf_analyzer.

    Source: https://github.com/ai-dynamo/aiperf, `src/aiperf/config/phases.py`, at commit 0205ea1.
    """
    phases = settings.get("phases") or settings.get("benchmark", {}).get("phases")
    if phases:
        measured = [phase for phase in phases if "warmup" not in (phase.get("kind"), phase.get("name"))]
        phase = measured[-1]
        kind = phase.get("type", "concurrency")
        if len(measured) > 1 or kind not in ("concurrency", "poisson", "gamma", "constant") or "rate_series" in phase:
            raise InputError(
                f"{name}: AIPerf's load is no constant concurrency or rate",
                "replay its trace with `windtunnel simulate`",
            )
        return {
            "concurrency": phase.get("concurrency", 1 if kind == "concurrency" else None),
            "request_rate": phase.get("rate"),
            "request_count": phase.get("requests"),
            "arrival_pattern": kind,
            "arrival_smoothness": phase.get("smoothness"),
        }
    load: Mapping[str, Any] = settings.get("loadgen", {})
    if load:
        return load
    stimulus = settings.get("perf_analyzer", {}).get("stimulus", {})
    load = {key: stimulus.get(key) or settings.get(key) for key in ("concurrency", "request_rate")}
    return {**load, "arrival_pattern": "constant"}


def _guidellm(name: str, document: dict[str, Any]) -> list[ClientResult]:
    """Read guidellm's `benchmarks.json` (0.2 to 0.5): one run for each rate or concurrency."""
    runs = enumerate(document["benchmarks"], 1)
    return [_guidellm_run(f"{name}:{number}", run) for number, run in runs if _num_successful(run)]


def _guidellm_run(name: str, run: dict[str, Any]) -> ClientResult:
    def statistics(key: str) -> dict[str, Any]:
        known = (run["metrics"][key] or {}).get("successful") or {}
        return {**known, **(known.get("percentiles") or {})}

    def mean(key: str) -> float:
        return float(statistics(key).get("mean") or 0.0)

    places = (run.get("args", {}), run.get("config", {}), run.get("scheduler", {}))
    strategy: dict[str, Any] = next((place["strategy"] for place in places if place.get("strategy")), {})
    kind, rate = strategy.get("type_") or strategy.get("type"), strategy.get("rate")
    streams = strategy.get("streams") or strategy.get("max_concurrency")
    if kind == "synchronous":
        streams = 1
    elif kind == "throughput" and streams is None:
        streams = _num_successful(run)
    return ClientResult(
        id=name,
        client="guidellm",
        input_tokens=mean("prompt_token_count"),
        output_tokens=mean("output_token_count"),
        num_requests=int(_num_successful(run)),
        concurrency=int(streams) if streams else None,
        rate_per_s=float(rate) if rate else None,
        gap_cv=0.0 if kind == "constant" else 1.0,
        num_failed=int(_totals(run).get("errored") or 0),
        **latencies(
            "mean",
            mean("output_tokens_per_second"),
            tpot=(statistics("inter_token_latency_ms"), MS),
            ttft=(statistics("time_to_first_token_ms"), MS),
            e2e=(statistics("request_latency"), 1.0),
        ),
    )


def _totals(run: dict[str, Any]) -> dict[str, Any]:
    return dict(run.get("request_totals") or run["metrics"]["request_totals"])


def _num_successful(run: dict[str, Any]) -> float:
    return float(_totals(run)["successful"])


def _inference_perf(name: str, document: dict[str, Any]) -> Iterator[ClientResult]:
    """Read inference-perf's `stage_N_lifecycle_metrics.json` (0.2 to 0.4).

    Its gaps are equal by default (`load.type`, which the file does not say).

    Source: https://github.com/kubernetes-sigs/inference-perf, `inference_perf/reportgen/base.py`.
    """
    load, answered = document["load_summary"], document["successes"]
    concurrency, rate = load.get("concurrency"), load.get("requested_rate")
    if not answered["count"]:
        return
    if not concurrency and not rate:
        raise InputError(f"{name} is inference-perf's summary of all its stages", "give stage_0_lifecycle_metrics.json")

    def mean(values: dict[str, Any], key: str) -> float:
        return float((values.get(key) or {}).get("mean") or 0.0)

    latency = answered["latency"]
    yield ClientResult(
        id=name,
        client="inference-perf",
        input_tokens=mean(answered, "prompt_len"),
        output_tokens=mean(answered, "output_len"),
        num_requests=int(answered["count"]),
        concurrency=int(concurrency) if concurrency else None,
        rate_per_s=None if concurrency else float(rate),
        gap_cv=0.0,
        num_failed=int(document["failures"]["count"]),
        **latencies(
            "mean",
            float(answered["throughput"]["output_tokens_per_sec"]),
            tpot=(latency.get("time_per_output_token"), 1.0),
            ttft=(latency.get("time_to_first_token"), 1.0),
            e2e=(latency.get("request_latency"), 1.0),
        ),
    )


def _llmperf(name: str, document: dict[str, Any]) -> Iterator[ClientResult]:
    """Read LLMPerf's `..._summary.json`.

    Its inter-token latency is a request's whole time over its tokens, so TPOT is taken from the other two means.

    Source: https://github.com/ray-project/llmperf, `token_benchmark_ray.py` at commit f1d6bed.
    """
    e2e_s, ttft_s, input_tokens, output_tokens = (
        float(document[f"results_{key}_mean"])
        for key in ("end_to_end_latency_s", "ttft_s", "number_input_tokens", "number_output_tokens")
    )
    if not document["results_num_completed_requests"]:
        return
    yield ClientResult(
        id=name,
        client="llmperf",
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        num_requests=int(document["results_num_completed_requests"]),
        concurrency=int(document["num_concurrent_requests"]),
        rate_per_s=None,
        measured=_known(
            tpot=(e2e_s - ttft_s) / (output_tokens - 1) if output_tokens > 1 else 0.0,
            ttft=ttft_s,
            e2e=e2e_s,
            throughput=float(document["results_mean_output_throughput_token_per_s"]),
        ),
        range_ratio=None if document["stddev_input_tokens"] or document["stddev_output_tokens"] else 1.0,
        model=document.get("model"),
        num_failed=int(document["results_number_errors"]),
        percentiles=_percentiles(
            ("ttft", _flat(document, "results_ttft_s_quantiles_", ""), 1.0),
            ("e2e", _flat(document, "results_end_to_end_latency_s_quantiles_", ""), 1.0),
        ),
    )


def _genai_bench(name: str, document: dict[str, Any]) -> Iterator[ClientResult]:
    """Read the file of one scenario and load of genai-bench.

    Source: https://github.com/sgl-project/genai-bench, `genai_bench/metrics/metrics.py` at commit 025cf1c.
    """
    whole = document["aggregated_metrics"]
    stats, has_rate = whole["stats"], whole["iteration_type"] == "request_rate"
    if not whole["num_completed_requests"]:
        return
    lengths = [stats[key] for key in ("num_input_tokens", "num_output_tokens")]
    yield ClientResult(
        id=name,
        client="genai-bench",
        input_tokens=float(lengths[0]["mean"] or 0.0),
        output_tokens=float(lengths[1]["mean"] or 0.0),
        num_requests=int(whole["num_completed_requests"]),
        concurrency=None if has_rate else int(whole["num_concurrency"]),
        rate_per_s=float(whole["request_rate"]) if has_rate else None,
        range_ratio=1.0 if all(each["min"] == each["max"] for each in lengths) else None,
        num_failed=int(whole["num_error_requests"]),
        **latencies(
            "mean",
            float(whole["mean_output_throughput_tokens_per_s"]),
            tpot=(stats["tpot"], 1.0),
            ttft=(stats["ttft"], 1.0),
            e2e=(stats["e2e_latency"], 1.0),
        ),
    )


def _trtllm_bench(name: str, document: dict[str, Any]) -> Iterator[ClientResult]:
    """Read `trtllm-bench throughput --report_json`, which does not say its load.

    Source: https://github.com/NVIDIA/TensorRT-LLM, `tensorrt_llm/bench/dataclasses/reporting.py`.
    """
    sent, answered, streamed = (document.get(key) or {} for key in ("request_info", "performance", "streaming_metrics"))
    yield ClientResult(
        id=name,
        client="trtllm-bench",
        input_tokens=float(sent["avg_input_length"]),
        output_tokens=float(sent["avg_output_length"]),
        num_requests=int(sent["num_requests"]),
        concurrency=None,
        rate_per_s=None,
        model=document["engine"].get("model"),
        engine="trtllm",
        **latencies(
            "average",
            float(answered["system_output_throughput_tok_s"]),
            tpot=(streamed.get("tpot_percentiles"), MS),
            ttft=(streamed.get("ttft_percentiles"), MS),
            e2e=(answered["request_latency_percentiles_ms"], MS),
        ),
    )


FORMATS = tuple(
    FileFormat(name, "client result", has(test), of_documents(read))
    for name, test, read in (
        (
            "vLLM's `bench serve` or SGLang's `bench_serving`",
            lambda document: "mean_ttft_ms" in document,
            _bench_serving,
        ),
        ("AIPerf or GenAI-Perf", lambda document: isinstance(document.get("time_to_first_token"), dict), _aiperf),
        ("inference-perf", lambda document: {"load_summary", "successes"} <= document.keys(), _inference_perf),
        ("LLMPerf", lambda document: "results_ttft_s_mean" in document, _llmperf),
        ("genai-bench", lambda document: "individual_request_metrics" in document, _genai_bench),
        ("guidellm", lambda document: "benchmarks" in document, _guidellm),
        ("trtllm-bench", lambda document: {"request_info", "performance"} <= document.keys(), _trtllm_bench),
    )
)
