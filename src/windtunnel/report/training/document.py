"""The JSON document of a training job's prediction: SI numbers, units in the names."""

from dataclasses import asdict
from typing import Any

from windtunnel.report.documents import fields_of
from windtunnel.report.version import version
from windtunnel.schema import encode
from windtunnel.training.campaign import Campaign
from windtunnel.training.costs import ExplainedTask
from windtunnel.training.intervals import step_interval
from windtunnel.training.step import TrainingResult


def training_document(result: TrainingResult, run: Campaign | None, tasks: list[ExplainedTask]) -> dict[str, Any]:
    """Document a step, its breakdown, the memory of every stage, the whole run, and the job with its defaults."""
    document: dict[str, Any] = {
        "windtunnel": version(),
        "job": encode(result.setup.job),
        "degrees": asdict(result.setup.degrees),
        "layers_per_chunk": list(result.setup.layers_per_chunk),
        **fields_of(result, "num_parameters", "step_s"),
        "interval_80": {"step_s": asdict(step_interval(result))},
        **fields_of(result, "breakdown_s", "bubble_fraction", "tokens_per_s", "tokens_per_s_per_device"),
        "model_flops_per_s_per_device": result.flops_per_s_per_device,
        **fields_of(result, "mfu", "hfu", "relative_error", "fits"),
        "device_memory_bytes": result.setup.device.memory_bytes,
        "memory": [asdict(stage) | {"total_bytes": stage.total_bytes} for stage in result.memory],
        "coverage_s": {how.value: seconds for how, seconds in result.by_coverage.items()},
    }
    if run is not None:
        document["run"] = asdict(run)
    if tasks:
        document["tasks"] = [asdict(task) for task in tasks]
    return document
