"""Prometheus metrics of a twin, under the names that its engine exports. Times are simulated ones."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.formats.telemetry.prometheus import DECLARED
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Answer, Twin

OF_PROCESS = tuple(about["name"] for about in DECLARED["twin"].values())
"""Metrics of the process that serves, whatever its replicas; at the ports of all."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = [float(bound) for bound in bounds]
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


def token_bounds(longest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... up to the longest request, as vLLM's `build_1_2_5_buckets` does."""
    steps = (mantissa * 10.0**power for power in range(10) for mantissa in (1, 2, 5))
    return [step for step in steps if step <= longest]


class Metrics:
    """What a twin has done, for each replica.

    Args:
        engine: name of the engine; one that has no names of its own in `metrics.yaml` gets vLLM's.
        model: name that the model is served under.
        num_replicas: of all pools.
        longest: tokens of the longest request.
    """

    def __init__(self, engine: str, model: str, num_replicas: int, longest: int) -> None:
        model = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.labels = [f'model_name="{model}",engine="{replica}"' for replica in range(num_replicas)]
        self._generated = [0] * num_replicas
        self.values: dict[str, dict[str, float]] = {}
        """Measure -> labels -> value."""
        self.histograms: dict[str, list[Histogram]] = {}
        known = {**DECLARED.get(engine, DECLARED["vllm"]), **DECLARED["twin"]}
        self.measures: Mapping[str, Mapping[str, str]] = known
        for measure, about in known.items():
            if "buckets" in about:
                kind = about["buckets"]
                bounds = token_bounds(longest) if kind == "tokens" else DECLARED["buckets"][kind]
                self.histograms[measure] = [Histogram(bounds) for _ in range(num_replicas)]
            else:
                self.values[measure] = {}

    def count(self, measure: str, replica: int, amount: float, more: str = "") -> None:
        """Add to a counter, if the engine has it."""
        if measure in self.values:
            labels = self.labels[replica] + more
            self.values[measure][labels] = self.values[measure].get(labels, 0) + amount

    def add(self, measure: str, replica: int, value: float, times: int = 1) -> None:
        """Add to a histogram, if the engine has it and the value is known."""
        if measure in self.histograms and not math.isnan(value):
            self.histograms[measure][replica].add(value, times)

    def began(self, answer: Answer, time_s: float) -> None:
        """Count a request whose first token has left."""
        replica = answer.prefill_replica
        self.add("ttft", answer.replica, time_s - answer.arrival_s)
        self.count("prompt_tokens", replica, answer.input_tokens)
        self.count("cache_queries", replica, answer.input_tokens)
        self.count("cache_hits", replica, answer.cached_tokens)

    def gave(self, replica: int, tokens: int) -> None:
        """Count output tokens that have left."""
        self._generated[replica] += tokens

    def waited(self, replica: int, gap_s: float, times: int) -> None:
        """Count the gaps of one length between tokens: one for all tokens of a request in a step, as engines do."""
        self.add("itl", replica, gap_s, times)
        self.add("itl_before", replica, gap_s, times)

    def ended(self, answer: Answer, time_s: float) -> None:
        """Count a request that has ended."""
        replica, reason = answer.replica, answer.finish_reason
        reason = reason if reason in ("abort", "length") else "stop"
        self.count("success", replica, 1, f',finished_reason="{reason}"')
        self.count("requests", replica, 1)
        self.count("preemptions", replica, answer.num_preemptions)
        if answer.is_cancelled:
            self.count("aborted", replica, 1)
            return
        first_s, tokens = answer.first_token_s, answer.output_tokens
        times = {
            "e2e": time_s - answer.arrival_s,
            "queue": answer.scheduled_s - answer.arrival_s,
            "inference": answer.finish_s - answer.scheduled_s,
            "prefill": first_s - answer.scheduled_s,
            "decode": answer.finish_s - first_s,
            "tpot": (answer.finish_s - first_s) / (tokens - 1) if tokens > 1 else math.nan,
            "request_prompt": answer.input_tokens,
            "request_generation": tokens,
            "request_longest": tokens,
        }
        for measure, value in times.items():
            self.add(measure, replica, value)

    def sent(self, late_s: float, tokens: int) -> None:
        """Count how much later than due tokens left, in seconds of the wall's clock."""
        self.histograms["late"][0].add(late_s, tokens)

    def steps(self, rows: NDArray[np.void]) -> None:
        """Count the tokens of steps, `Step` records of the loop."""
        if "iteration" in self.histograms:
            for replica, num_steps, decodes, prefills in zip(
                *(rows[name].tolist() for name in ("replica", "num_steps", "decode_tokens", "prefill_tokens")),
                strict=True,
            ):
                self.histograms["iteration"][replica].add(decodes + prefills, num_steps)

    def look(self, twin: Twin, clock: TwinClock) -> None:
        """Set the gauges to what they are now."""
        self.values["generation_tokens"] = dict(zip(self.labels, self._generated, strict=True))
        for measure, values in twin.live.gauges().items():
            if measure in self.values:
                self.values[measure] = dict(zip(self.labels, values.tolist(), strict=True))
        if "hit_rate" in self.values:
            for labels, asked in self.values["prompt_tokens"].items():
                self.values["hit_rate"][labels] = self.values["cache_hits"].get(labels, 0) / max(asked, 1)
        self.values["seconds"][self.labels[0]] = clock.now_s()

    def text(self, twin: Twin, clock: TwinClock, replica: int | None = None) -> str:
        """Return all metrics in Prometheus' text format; those of one `replica` as a server of its own exports them."""
        self.look(twin, clock)
        lines = [line for measure in self.measures if measure != "cache" for line in self._lines(measure)]
        if "cache" in self.measures:
            lines += _cache_lines(twin, self.measures["cache"])
        if replica is not None:
            own = f'engine="{replica}"'
            is_own = [line.startswith(("#", *OF_PROCESS)) or own in line for line in lines]
            lines = [line.replace(own, 'engine="0"') for line, stays in zip(lines, is_own, strict=True) if stays]
        return "\n".join(lines) + "\n"

    def _labels_of(self, name: str) -> Sequence[str]:
        """Return the labels of a metric: of all replicas, or of the first where it is of the whole process."""
        return self.labels[:1] if name in OF_PROCESS else self.labels

    def _lines(self, measure: str) -> Iterator[str]:
        about = self.measures[measure]
        name, is_counter = about["name"], about["name"].endswith("_total") and "buckets" not in about
        kind = "histogram" if "buckets" in about else "counter" if is_counter else "gauge"
        yield f"# HELP {name} {about['help']}"
        yield f"# TYPE {name} {kind}"
        if kind != "histogram":
            values = self.values[measure]
            more = [f',{about["label"]}="{value}"' for value in about["values"]] if "label" in about else [""]
            values = dict.fromkeys((labels + each for labels in self._labels_of(name) for each in more), 0) | values
            for labels, value in values.items():
                yield f"{name}{{{labels}}} {_number(value)}"
            return
        for labels, histogram in zip(self._labels_of(name), self.histograms[measure], strict=False):
            seen = 0
            for bound, count in zip([*histogram.bounds, math.inf], histogram.counts, strict=True):
                seen += count
                limit = "+Inf" if math.isinf(bound) else repr(bound)
                yield f'{name}_bucket{{{labels},le="{limit}"}} {seen}'
            yield f"{name}_count{{{labels}}} {seen}"
            yield f"{name}_sum{{{labels}}} {_number(histogram.total)}"


def _number(value: float) -> str:
    return repr(float(value))


def _cache_lines(twin: Twin, about: Mapping[str, str]) -> Iterator[str]:
    """Yield vLLM's `cache_config_info`, by which routers learn the size of the KV cache."""
    name, replica = about["name"], 0
    yield f"# HELP {name} {about['help']}"
    yield f"# TYPE {name} gauge"
    for pool in twin.deployment.prepared.pools:
        engine = pool.setup.engine
        facts = {
            "block_size": pool.memory.block_size,
            "num_gpu_blocks": pool.memory.num_blocks,
            "enable_prefix_caching": bool(engine.enable_prefix_caching),
            "gpu_memory_utilization": engine.gpu_memory_utilization,
        }
        labels = ",".join(f'{key}="{value}"' for key, value in facts.items())
        for _ in range(pool.settings.num_replicas):
            yield f'{name}{{{labels},engine="{replica}"}} 1.0'
            replica += 1
