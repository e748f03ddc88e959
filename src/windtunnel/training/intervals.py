"""Intervals of a training step's time, from the errors of published runs and the coverage of operator times."""

from collections.abc import Mapping
from functools import cache

from windtunnel import catalog
from windtunnel.metrics.uncertainty import Interval, Spread, interval
from windtunnel.schema import decode, read_yaml
from windtunnel.training.job import TrainingJob
from windtunnel.training.step import TrainingResult

SPREADS_FILE = catalog.shipped("training_spreads.yaml")
"""Written by `benchmarks/training_accuracy.py --write`."""
MEASURED_ARCHITECTURES = ("volta", "ampere", "hopper", "blackwell")
"""Architectures of the published runs' devices."""


def kind_of_job(job: TrainingJob) -> str:
    """Return the class of jobs with equal errors: `experts`, `lora` or `dense`."""
    if job.lora is not None:
        return "lora"
    return "experts" if job.parallelism.ep > 1 else "dense"


@cache
def spreads() -> Mapping[str, Spread]:
    """Return, by class of jobs, measured over predicted step times; a data set weighs the root of its runs."""
    return {kind: decode(raw, Spread) for kind, raw in read_yaml(SPREADS_FILE).items()}


def step_interval(result: TrainingResult, known: Mapping[str, Spread] | None = None) -> Interval:
    """Return the 80% interval of a step's seconds; `known` replaces the shipped spreads."""
    total = sum(result.by_coverage.values())
    coverage = {how.value: seconds / total for how, seconds in result.by_coverage.items()} if total else {}
    num_outside = int(result.setup.device.architecture not in MEASURED_ARCHITECTURES)
    return interval(result.step_s, (known or spreads())[kind_of_job(result.setup.job)], num_outside, coverage)
