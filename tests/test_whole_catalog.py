"""Every model of the catalogue is served somewhere: one tiny run, one step, its memory and its command line."""

from functools import cache
from typing import Any

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.formats.launch.scripts import write_launch_command
from windtunnel.model.parameters import count_parameters
from windtunnel.serving.explain import Explanation, explain_step, step_batch
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import Scenario, Setup, resolve
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate

SPLITS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4))
"""Tensor and pipeline parallelism, the least first."""


@cache
def priced() -> PricedDeployments:
    return PricedDeployments()


def distinct_models() -> list[str]:
    """Return the first name of every shape and precision."""
    found = {}
    for name in catalog.names("models"):
        model = catalog.model(name)
        found.setdefault((model.hidden_size, model.vocab_size, model.layers, model.precision), name)
    return list(found.values())


def least(name: str) -> tuple[Scenario, Setup, Explanation]:
    """Return the narrowest deployment on B200 that holds a model, and a step of two decoding requests, or of a prompt
    where the model only encodes."""
    for tp, pp in SPLITS:
        raw: dict[str, Any] = {"input_tokens": 32, "output_tokens": 3, "concurrency": 1, "num_requests": 2}
        batch = step_batch(decode_requests=2, context_tokens=100.0)
        if catalog.model(name).is_encoder:
            raw = {"task": "embed", "input_tokens": 32, "concurrency": 1, "num_requests": 2}
            batch = step_batch(prefill_tokens=100)
        tiny = scenario(model=name, device="b200_sxm", tp=tp, pp=pp, **raw)
        try:
            setup = resolve(tiny)
            step = explain_step(setup, batch, priced().estimator(setup))
        except InputError as error:
            if (tp, pp) == SPLITS[-1] or not any(reason in error.message for reason in ("not fit", "divide")):
                raise
            continue
        return tiny, setup, step
    raise AssertionError(name)


@pytest.mark.parametrize("name", distinct_models())
def test_a_model_simulates_explains_plans_memory_and_writes_its_command(name: str) -> None:
    tiny, setup, step = least(name)
    # Of the fullest stage; from four bits to 32, and a rank's copies of what cannot be split.
    bits = 8 * step.memory.weight_bytes * setup.parallelism.num_devices / count_parameters(setup.model).total
    assert 4 < bits < 34
    assert (step.memory.kv_cache_bytes > 0) is not setup.model.is_encoder
    assert step.step_s > 0
    result = simulate(tiny, priced().estimator(setup))
    assert result.summary.throughput.requests_per_s > 0
    assert result.summary.num_requests == 2
    command = write_launch_command(name, tiny.deployment.parallelism, tiny.deployment.engine)
    assert read_launch_command(" ".join(command)).raw["model"] == name
