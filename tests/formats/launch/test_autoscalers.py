"""Autoscalers of manifests, as a scenario says them."""

from typing import Any

import msgspec
import pytest
import yaml

from windtunnel.errors import InputError
from windtunnel.formats.launch.autoscalers import rule_of
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.serving.deployment import TargetScaling

RUNNING = "metric: {name: 'sglang:num_running_reqs'}, target: {type: AverageValue, averageValue: 1500m}"
DOWN = "{scaleDown: {stabilizationWindowSeconds: 60}}"
UP = "{scaleUp: {stabilizationWindowSeconds: 30}}"
SUM = "metadata: {query: 'sum(vllm:kv_cache_usage_perc)', threshold: '0.8'}"


@pytest.mark.parametrize(
    ("scaler", "rule"),
    [
        (
            "metrics: [{type: Pods, pods: {metric: {name: vllm_num_requests_waiting}, target: {averageValue: '5'}}}]",
            {"metric": "waiting", "target": 5.0},
        ),
        (
            f"{{metrics: [{{type: External, external: {{{RUNNING}}}}}], behavior: {DOWN}}}",
            {"metric": "running", "target": 1.5, "scale_down_after_s": 60},
        ),
        (
            f"{{triggers: [{{{SUM}}}], advanced: {{horizontalPodAutoscalerConfig: {{behavior: {UP}}}}}}}",
            {"metric": "kv_use", "target": 0.8, "scale_up_after_s": 30},
        ),
        (
            "{min_replicas: 1, max_replicas: 4, target_ongoing_requests: 64, downscale_delay_s: 120}",
            {"metric": "outstanding", "target": 64, "tolerance_fraction": 0, "interval_s": 10, "scale_up_after_s": 30}
            | {"scale_down_after_s": 120},
        ),
    ],
)
def test_a_rule_is_read(scaler: str, rule: dict[str, Any]) -> None:
    found = rule_of(yaml.safe_load(scaler))
    assert found.settings == rule
    msgspec.convert({"type": "target", "max_replicas": 4, **found.settings}, TargetScaling)


@pytest.mark.parametrize(
    ("scaler", "why_not"),
    [
        ("metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization}}}]", "cpu"),
        ("triggers: [{metadata: {query: 'avg(vllm:num_requests_waiting)', threshold: 5}}]", "the value of"),
        (
            "triggers: [{metricType: Value, metadata: {query: 'vllm:num_requests_waiting', threshold: 5}}]",
            "the value of",
        ),
        ("triggers: [{metadata: {query: 'vllm:num_requests_waiting', threshold: many}}]", "is 'many'"),
        ("triggers: [{metadata: {query: 'sum(vllm:kv_cache_usage_perc)', threshold: 80}}]", "is 80"),
        ("triggers: [{type: cron}, {type: cpu}]", "2 metrics"),
        ("{minReplicas: 2, maxReplicas: 3}", "its metric is not said"),
    ],
)
def test_what_no_scenario_has_is_said(scaler: str, why_not: str) -> None:
    found = rule_of(yaml.safe_load(scaler))
    assert found.settings == {}
    assert why_not in found.why_not


def test_the_remark_names_what_simulates_the_fleet() -> None:
    pod = "containers: [{image: 'vllm/vllm-openai:v0.19.1', args: [--model, Qwen/Qwen3-8B]}]"
    server = f"kind: Deployment\nmetadata: {{name: chat}}\nspec: {{template: {{spec: {{{pod}}}}}}}"
    triggers = "triggers: [{type: prometheus, metadata: {query: 'sum(vllm:num_requests_waiting)', threshold: '5'}}]"
    bounds = "scaleTargetRef: {name: chat}, minReplicaCount: 0, maxReplicaCount: 9"
    (remark,) = read_launch_command(f"{server}\n---\nkind: ScaledObject\nspec: {{{bounds}, {triggers}}}\n").remarks
    assert remark.startswith("minReplicas 0, maxReplicas 9: 1 replica taken; --set deployment.start_s=90s --set ")
    _, given, _ = remark.split("'")
    scaling = msgspec.convert(yaml.safe_load(given.removeprefix("deployment.autoscaling=")), TargetScaling)
    assert (scaling.metric, scaling.target, scaling.min_replicas, scaling.max_replicas) == ("waiting", 5, 1, 9)
    (remark,) = read_launch_command(f"{server}\n---\nkind: ScaledObject\nspec: {{{bounds}}}\n").remarks
    assert "; its metric is not said; --set deployment.replicas" in remark


def test_bounds_of_replicas_are_numbers() -> None:
    pod = "spec: {containers: [{image: 'vllm/vllm-openai:v0.19.1', args: [--model, Qwen/Qwen3-8B]}]}"
    with pytest.raises(InputError, match="maxReplicas is 'eight'"):
        read_launch_command(f"spec: {{minReplicas: 1, maxReplicas: eight, template: {{{pod}}}}}")
