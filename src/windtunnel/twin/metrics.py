"""Prometheus metrics of a twin, under the names that its engine exports. Times are simulated ones."""

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.formats.telemetry.prometheus import DECLARED
from windtunnel.serving.deployment import Speculative
from windtunnel.serving.prepared import PreparedPool
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Answer, Twin

OF_PROCESS = tuple(about["name"] for about in DECLARED["twin"].values())
"""Metrics of the process that serves, whatever its replicas; at the ports of all."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
THROUGHPUT_STEPS = 40
"""Decode steps over which SGLang takes its throughput (`decode_log_interval`)."""


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = [float(bound) for bound in bounds]
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
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
        longest: tokens of the longest request.
    """

    def __init__(self, engine: str, model: str, num_replicas: int, longest: int) -> None:
        model = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self.labels = [f'model_name="{model}",engine="{replica}"' for replica in range(num_replicas)]
        self._generated, self._cached = [0] * num_replicas, [0] * num_replicas
        self._recent = np.zeros((num_replicas, 3))
        """[replica, 3] steps, seconds and tokens since the throughput was taken."""
        self._pools: list[PreparedPool] = []
        """Of each replica, where they are known."""
        self._drafts: list[Speculative | None] = [None] * num_replicas
        self.has_adapters = False
        self.values: dict[str, dict[str, float]] = {}
        """Measure -> labels -> value."""
        self.histograms: dict[str, list[Histogram]] = {}
        known = {**DECLARED.get(engine, DECLARED["vllm"]), **DECLARED["twin"]}
        self.measures: Mapping[str, Mapping[str, Any]] = known
        for measure, about in known.items():
            if "buckets" in about:
                kind = about["buckets"]
                bounds = token_bounds(longest) if kind == "tokens" else DECLARED["buckets"][kind]
                self.histograms[measure] = [Histogram(bounds) for _ in range(num_replicas)]
            else:
                self.values[measure] = {}

    def describe(self, pools: Sequence[PreparedPool], has_adapters: bool) -> None:
        """Take what the metrics of a deployment depend on beside its requests."""
        self._pools = [pool for pool in pools for _ in range(pool.settings.num_replicas)]
        self.has_adapters = has_adapters or any(pool.setup.engine.lora is not None for pool in pools)
        for replica, pool in enumerate(self._pools):
            size, count = pool.memory.block_size, pool.memory.num_blocks
            facts = {
                "kv_most": size * count,
                "page_size": size,
                "num_pages": count,
                "context": pool.setup.max_model_len,
            }
            for measure, value in facts.items():
                self._set(measure, replica, value)
            self._drafts[replica] = drafts = pool.setup.engine.speculative
            if drafts is not None:
                gained = drafts.tokens_per_step
                self._set("accept_length", replica, gained)
                self._set("accept_rate", replica, (gained - 1) / drafts.num_draft_tokens)
                self._set("num_drafted", replica, drafts.num_draft_tokens + 1)

    def count(self, measure: str, replica: int, amount: float, value: str = "") -> None:
        """Add to a counter, if the engine has it, under the `value` of its label, if it has one."""
        if measure in self.values:
            labels = self.labels[replica] + _label(self.measures[measure], value)
            self.values[measure][labels] = self.values[measure].get(labels, 0) + amount

    def _set(self, measure: str, replica: int, amount: float, value: str = "") -> None:
        """Set a gauge, if the engine has it."""
        if measure in self.values:
            self.values[measure][self.labels[replica] + _label(self.measures[measure], value)] = amount

    def add(self, measure: str, replica: int, value: float, times: int = 1) -> None:
        """Add to a histogram, if the engine has it and the value is known."""
        if measure in self.histograms and not math.isnan(value):
            self.histograms[measure][replica].add(value, times)

    def began(self, answer: Answer, time_s: float) -> None:
        """Count a request whose first token has left."""
        replica, tokens, loaded = answer.prefill_replica, answer.input_tokens, answer.loaded_tokens
        found = answer.cached_tokens - loaded
        self.add("ttft", answer.replica, time_s - answer.arrival_s)
        self.count("prompt_tokens", replica, tokens)
        self.count("prompt_cached", replica, answer.cached_tokens)
        self.count("prompt_by_source", replica, tokens - answer.cached_tokens, "local_compute")
        self.count("prompt_by_source", replica, found, "local_cache_hit")
        self.count("prompt_by_source", replica, loaded, "external_kv_transfer")
        self.count("cache_queries", replica, tokens)
        self.count("cache_hits", replica, found, "device")
        self._cached[replica] += answer.cached_tokens
        if self._pools and self._pools[replica].setup.engine.kv_tiers:
            self.count("external_queries", replica, tokens - found)
            self.count("external_hits", replica, loaded)
            if "external_hits" not in self.values:
                self.count("cache_hits", replica, loaded, "host")

    def gave(self, replica: int, tokens: int) -> None:
        """Count output tokens that have left."""
        self._generated[replica] += tokens

    def waited(self, replica: int, gap_s: float, times: int) -> None:
        """Count the gaps of one length between tokens: one for all tokens of a request in a step, as engines do."""
        self.add("itl", replica, gap_s, times)
        self.add("itl_before", replica, gap_s, times)

    def ended(self, answer: Answer, time_s: float) -> None:
        replica, reason = answer.replica, answer.finish_reason
        reason = reason if reason in ("abort", "length") else "stop"
        self.count("success", replica, 1, reason)
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
            "tpot": (answer.finish_s - first_s) / max(tokens - 1, 1),
            "request_prompt": answer.input_tokens,
            "prefill_computed": answer.input_tokens - answer.cached_tokens,
            "request_generation": tokens,
            "params_tokens": answer.most_tokens or math.nan,
        }
        others = answer.siblings or (answer,)
        if all(other.has_ended for other in others):
            times |= {"params_n": len(others), "request_longest": max(other.output_tokens for other in others)}
        for measure, value in times.items():
            self.add(measure, replica, value)

    def sent(self, late_s: float, tokens: int) -> None:
        """Count how much later than due tokens left, in seconds of the wall's clock."""
        self.histograms["late"][0].add(late_s, tokens)

    def steps(self, rows: NDArray[np.void]) -> None:
        """Count the tokens of steps, `Step` records of the loop."""
        names = ("replica", "num_steps", "duration_s", "decode_tokens", "prefill_tokens")
        for replica, num_steps, duration_s, decodes, prefills in zip(
            *(rows[name].tolist() for name in names), strict=True
        ):
            given = decodes
            if (drafts := self._drafts[replica]) is not None and decodes:
                given = decodes * drafts.tokens_per_step
                self._count_drafts(replica, num_steps * decodes, drafts)
            self.add("iteration", replica, prefills + given, num_steps)
            if "throughput" in self.values:
                recent = self._recent[replica]
                recent += (num_steps, duration_s, given * num_steps)
                if recent[0] >= THROUGHPUT_STEPS:
                    self._set("throughput", replica, float(recent[2] / recent[1]))
                    recent[:] = 0

    def _count_drafts(self, replica: int, times: int, drafts: Speculative) -> None:
        """Count so many verifications; of all drafts until now those are right that are in the mean, whole ones."""
        self.count("drafts", replica, times)
        self.count("draft_tokens", replica, times * drafts.num_draft_tokens)
        total = self.values["drafts"].get(self.labels[replica], 0) if "drafts" in self.values else 0
        accepted = [math.floor(total * share) for share in accumulate(drafts.acceptance_by_position, mul)]
        self._set("accepted", replica, sum(accepted))
        for position, count in enumerate(accepted):
            self._set("accepted_at", replica, count, str(position))

    def look(self, twin: Twin, clock: TwinClock) -> None:
        """Set the gauges to what they are now."""
        self.values["generation_tokens"] = dict(zip(self.labels, self._generated, strict=True))
        gauges = twin.live.gauges()
        for measure, values in gauges.items():
            if measure in self.values:
                self.values[measure] = dict(zip(self.labels, values.tolist(), strict=True))
        for replica, labels in enumerate(self.labels):
            self._set("waiting_by_reason", replica, int(gauges["waiting"][replica]), "capacity")
            self._set("hit_rate", replica, self._cached[replica] / max(self.values["prompt_tokens"].get(labels, 0), 1))
            if not gauges["running"][replica]:
                self._set("throughput", replica, 0.0)
        self.values["seconds"][self.labels[0]] = clock.now_s()

    def text(self, twin: Twin, clock: TwinClock, replica: int | None = None) -> str:
        """Return all metrics in Prometheus' text format; those of one `replica` as a server of its own exports them."""
        self.look(twin, clock)
        has = {"drafts": any(drafts is not None for drafts in self._drafts), "adapters": self.has_adapters}
        shown = [name for name, about in self.measures.items() if has.get(about.get("where", ""), True)]
        lines = [line for measure in shown if measure not in ("adapters", "cache") for line in self._lines(measure)]
        if "cache" in shown:
            lines += _cache_lines(twin, self.measures["cache"])
        if replica is not None:
            own = f'engine="{replica}"'
            is_own = [line.startswith(("#", *OF_PROCESS)) or own in line for line in lines]
            lines = [line.replace(own, 'engine="0"') for line, stays in zip(lines, is_own, strict=True) if stays]
        if "adapters" in shown:
            lines += _adapter_lines(twin, self.measures["adapters"], replica)
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
            more = {_label(about, value): start for value, start in about.get("values", {"": 0}).items()}
            values = {labels + each: more[each] for labels in self._labels_of(name) for each in more} | values
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


def _label(about: Mapping[str, Any], value: str) -> str:
    return f',{about["label"]}="{value}"' if "label" in about else ""


def _adapter_lines(twin: Twin, about: Mapping[str, str], replica: int | None) -> Iterator[str]:
    """Yield vLLM's `lora_requests_info`, whose labels are the news and whose value is the time."""
    engine, name = twin.deployment.first.setup.engine, about["name"]
    waiting, running = (",".join(names) for names in twin.adapters(replica))
    most = (engine.lora and engine.lora.max_loras) or 1
    labels = f'max_lora="{most}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    yield f"# HELP {name} {about['help']}"
    yield f"# TYPE {name} gauge"
    yield f"{name}{{{labels}}} {_number(time.time())}"


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
