"""Autoscalers of Kubernetes, KEDA and Ray Serve, as `deployment.autoscaling` of a scenario."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from windtunnel.formats.launch.containers import Command, table

METRICS = {
    r"(num_)?requests?_waiting|num_queue_reqs|waiting_requests?": "waiting",
    r"(num_)?requests?_running|num_running_reqs|running_requests?": "running",
    r"(gpu_|kv_)?cache_usage(_perc)?|token_usage|kv_cache_utilization": "kv_use",
}
"""Names of servers' metrics after the engine's prefix, as adapters of Prometheus write them too -> those of a scenario
(`/metrics` of vLLM, SGLang and TensorRT-LLM)."""
BOUNDS = {
    "min_replicas": ("minReplicas", "minReplicaCount", "min_replicas"),
    "max_replicas": ("maxReplicas", "maxReplicaCount", "max_replicas"),
}
OF_ONE = ("AverageValue", "Utilization")
"""Types of targets of Kubernetes that are those of one replica."""


def scaling_remark(command: Command) -> str:
    """Return how many replicas of an autoscaled server are taken, and what simulates the fleet that it has."""
    rule, scaler = rule_of(command.scaler), command.scaler
    ends = {end: [scaler.get(key) for key in keys if scaler.get(key) is not None] for end, keys in BOUNDS.items()}
    if not rule.settings or not ends["max_replicas"]:
        another = (
            "--set deployment.replicas=... gives another number, deployment.autoscaling and start_s simulate a fleet"
        )
        return "; ".join([command.scaling, *([rule.why_not] if scaler and rule.why_not else []), another])
    given = {"type": "target", **rule.settings, **{end: counts[0] or 1 for end, counts in ends.items() if counts}}
    text = ", ".join(f"{key}: {f'{value:g}' if isinstance(value, float) else value}" for key, value in given.items())
    fleet = f"--set deployment.start_s=90s --set 'deployment.autoscaling={{{text}}}'"
    return f"{command.scaling}; {fleet} simulates the fleet, with the time that a replica takes to start"


class Rule(NamedTuple):
    """What an autoscaler keeps at which target."""

    settings: dict[str, Any]
    """Keys of `TargetScaling`; empty where no scenario can say them."""
    why_not: str = ""
    """Why none can."""


def rule_of(scaler: Mapping[str, Any]) -> Rule:
    """Return the rule of an autoscaler: the spec of a HorizontalPodAutoscaler or a ScaledObject, the same of a Helm
    chart, or Ray Serve's `autoscaling_config`."""
    rule: dict[str, Any]
    if "max_replicas" in scaler:  # and their defaults: Ray 2.40 `serve/config.py`, AutoscalingConfig
        up_s, down_s = scaler.get("upscale_delay_s", 30), scaler.get("downscale_delay_s", 600)
        rule = {"metric": "outstanding", "target": scaler.get("target_ongoing_requests", 2), "tolerance_fraction": 0}
        return Rule(rule | {"interval_s": 10, "scale_up_after_s": up_s, "scale_down_after_s": down_s})
    given = [*_triggers(scaler.get("triggers")), *_metrics(scaler.get("metrics"))]
    if len(given) != 1:
        return Rule({}, f"it scales by {len(given)} metrics, a scenario by one" if given else "its metric is not said")
    name, target, is_of_one = given[0]
    metric = next((known for pattern, known in METRICS.items() if re.search(rf"[:_]({pattern})\b", name)), None)
    if metric is None or not is_of_one:
        what = name if metric is None else f"the value of {name} over all replicas"
        return Rule({}, f"it scales by {what}, which no scenario has")
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", str(target))
    value = float(number[1]) / (1000 if number[2] else 1) if number else 0.0
    if not 0.0 < value <= (1.0 if metric == "kv_use" else math.inf):
        return Rule({}, f"the target of {name} is {target!r:.30}")
    rule = {"metric": metric, "target": value}
    advanced = table(table(scaler.get("advanced")).get("horizontalPodAutoscalerConfig"))
    behavior = table(scaler.get("behavior") or advanced.get("behavior"))
    for direction, key in (("scaleUp", "scale_up_after_s"), ("scaleDown", "scale_down_after_s")):
        window = table(behavior.get(direction)).get("stabilizationWindowSeconds")
        rule |= {} if window is None else {key: window}
    return Rule(rule)


def _triggers(triggers: Any) -> Iterable[tuple[str, Any, bool]]:
    """Yield the name, the target, and whether it is one replica's, of each trigger of KEDA, which divides what a query
    returns by the replicas unless `metricType` is Value."""
    for trigger in map(table, triggers if isinstance(triggers, list) else []):
        given = table(trigger.get("metadata"))
        query = str(given.get("query") or given.get("metricName") or trigger.get("type"))
        is_sum = not re.search(r"\b(avg|max|min|quantile)\b", query)
        yield query, given.get("threshold"), is_sum and trigger.get("metricType") != "Value"


def _metrics(metrics: Any) -> Iterable[tuple[str, Any, bool]]:
    """Yield the same of each metric of a HorizontalPodAutoscaler (autoscaling/v2)."""
    for metric in map(table, metrics if isinstance(metrics, list) else []):
        own = table(metric.get(str(metric.get("type")).lower()))
        target = table(own.get("target"))
        name = str(own.get("name") or table(own.get("metric")).get("name") or metric.get("type"))
        yield name, target.get("averageValue"), target.get("type", OF_ONE[0]) in OF_ONE
