"""Windtunnel predicts how large language models perform before anyone rents the hardware.

    scenario -> setup -> prices -> compiled loop -> records -> summary -> report

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

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.api import (
        capacity,
        collective,
        compare,
        diagnose,
        diffusion,
        explain,
        recommend,
        save,
        search,
        train,
        validate,
        whatif,
    )
    from windtunnel.catalog import device, model, node
    from windtunnel.errors import InputError, WindtunnelError
    from windtunnel.metrics.summary import Summary
    from windtunnel.model.launches.forward import StepBatch
    from windtunnel.model.shape import Shard
    from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
    from windtunnel.pricing.estimator import Coverage, Estimate, Estimator
    from windtunnel.serving.explain import explain_step, step_batch
    from windtunnel.serving.results import Result
    from windtunnel.serving.scenario import Scenario, load, resolve
    from windtunnel.serving.setup.step_prices import price_step
    from windtunnel.serving.shorthand import scenario
    from windtunnel.serving.simulate import simulate
    from windtunnel.training.job import TrainingJob
    from windtunnel.training.step import simulate_training

    __version__: str

_HOME = {
    name: module
    for module, names in {
        "api": (
            *("capacity", "collective", "compare", "diagnose", "diffusion", "explain"),
            *("recommend", "save", "search", "train", "validate", "whatif"),
        ),
        "catalog": ("device", "model", "node"),
        "errors": ("InputError", "WindtunnelError"),
        "metrics.summary": ("Summary",),
        "model.launches.forward": ("StepBatch",),
        "model.shape": ("Shard",),
        "pricing.aiconfigurator.estimator": ("measured_estimator",),
        "pricing.estimator": ("Coverage", "Estimate", "Estimator"),
        "serving.explain": ("explain_step", "step_batch"),
        "serving.results": ("Result",),
        "serving.scenario": ("Scenario", "load", "resolve"),
        "serving.setup.step_prices": ("price_step",),
        "serving.shorthand": ("scenario",),
        "serving.simulate": ("simulate",),
        "training.job": ("TrainingJob",),
        "training.step": ("simulate_training",),
    }.items()
    for name in names
}
"""Public name -> its module."""

__all__ = [
    "Coverage", "Estimate", "Estimator", "InputError", "Result", "Scenario", "Shard", "StepBatch", "Summary",
    "TrainingJob", "WindtunnelError", "capacity", "collective", "compare", "device", "diagnose", "diffusion",
    "explain", "explain_step", "load", "measured_estimator", "model", "node", "price_step", "recommend",
    "resolve", "save", "scenario", "search", "simulate", "simulate_training", "step_batch", "train", "validate",
    "whatif",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `windtunnel --help` is instant."""
    if name == "__version__":
        return import_module("windtunnel.report.render.json").version()
    if name not in _HOME:
        raise AttributeError(f"module 'windtunnel' has no attribute {name!r}")
    return getattr(import_module(f"windtunnel.{_HOME[name]}"), name)


class _Package(ModuleType):
    """This package, whose subpackages `model` and `search` can be called like the functions of the same names."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Bind a name; importing a subpackage binds it to its own."""
        if name in _HOME and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


class _CallablePackage(ModuleType):
    _public: Any = property(lambda self: __getattr__(self.__name__.rpartition(".")[2]))
    __doc__: Any = property(lambda self: self._public.__doc__)
    __signature__: Any = property(lambda self: import_module("inspect").signature(self._public))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the public function of the package's name."""
        return self._public(*arguments, **named)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """Return the public names, for completion in a notebook; they are not attributes before their first use."""
    return __all__
