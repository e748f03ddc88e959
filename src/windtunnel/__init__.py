"""Windtunnel predicts how large language models perform before anyone rents the hardware.

    spec (what) -> ops (work) -> estimate (cost) -> kernels (loop) -> engine (run) -> metrics

A scenario names a model, devices, an engine and a workload. Its forward step is a list of operators; an estimator
prices them from times that were measured on that device, or by a calibrated roofline; the prices are lowered to arrays;
a compiled loop forms the engine's batches step by step; records and a summary come out.

    >>> import windtunnel as wt
    >>> scenario = wt.scenario(model="meta-llama/Llama-3.1-8B", device="h100_sxm", concurrency=8,
    ...                        input_tokens=512, output_tokens=128, num_requests=80)
    >>> result = wt.simulate(scenario)
    >>> result.summary.num_requests
    80
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.engine.explain import explain_step, step_batch
    from windtunnel.engine.run import simulate
    from windtunnel.engine.serving import Result
    from windtunnel.engine.training import simulate_training
    from windtunnel.errors import InputError, WindtunnelError
    from windtunnel.estimate.estimator import Coverage, Estimate, Estimator
    from windtunnel.estimate.steps import price_step
    from windtunnel.interop.aiconfigurator import measured_estimator
    from windtunnel.metrics.summary import Summary
    from windtunnel.ops.forward import Shard, StepBatch
    from windtunnel.spec.catalog import device, model, node
    from windtunnel.spec.scenario import Scenario, load, resolve, save
    from windtunnel.spec.shorthand import scenario
    from windtunnel.spec.training import TrainingJob

_HOME = {
    "Coverage": "estimate.estimator",
    "Estimate": "estimate.estimator",
    "Estimator": "estimate.estimator",
    "InputError": "errors",
    "Result": "engine.serving",
    "Scenario": "spec.scenario",
    "Shard": "ops.forward",
    "StepBatch": "ops.forward",
    "Summary": "metrics.summary",
    "TrainingJob": "spec.training",
    "WindtunnelError": "errors",
    "device": "spec.catalog",
    "explain_step": "engine.explain",
    "load": "spec.scenario",
    "measured_estimator": "interop.aiconfigurator",
    "model": "spec.catalog",
    "node": "spec.catalog",
    "price_step": "estimate.steps",
    "resolve": "spec.scenario",
    "save": "spec.scenario",
    "scenario": "spec.shorthand",
    "simulate": "engine.run",
    "simulate_training": "engine.training",
    "step_batch": "engine.explain",
}

__all__ = [
    "Coverage",
    "Estimate",
    "Estimator",
    "InputError",
    "Result",
    "Scenario",
    "Shard",
    "StepBatch",
    "Summary",
    "TrainingJob",
    "WindtunnelError",
    "device",
    "explain_step",
    "load",
    "measured_estimator",
    "model",
    "node",
    "price_step",
    "resolve",
    "save",
    "scenario",
    "simulate",
    "simulate_training",
    "step_batch",
]


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `windtunnel --help` is instant."""
    if name not in _HOME:
        raise AttributeError(f"module 'windtunnel' has no attribute {name!r}")
    return getattr(import_module(f"windtunnel.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """The public names, for completion in a notebook; they are not attributes before their first use."""
    return __all__
