"""A table of recorded steps that take a multiple of their price, some of them far longer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.calibration.steps.price import price_run
from windtunnel.calibration.steps.read import StepRun, read_step_runs
from windtunnel.serving.setup.estimators import estimator_for

HEADER = "counter,prefill_tokens,prefill_requests,decode_requests,decode_kv_tokens,wall_time_ms"
OPTIONS = {"model": "qwen3-8b", "device": "h100_sxm", "calibration": "none"}


def recorded(
    folder: Path,
    num_steps: int,
    scale: float = 1.0,
    late_ms: float = 0.0,
    noise: float = 0.0,
    slow_ms: Mapping[int, float] | None = None,
    **options: Any,
) -> StepRun:
    """Return a run of decode and prefill steps.

    Args:
        folder: gets the table.
        num_steps: steps in all, each sixth with a prompt.
        scale: time over price.
        late_ms: on top of every step.
        noise: standard deviation of the logarithm of a step's time.
        slow_ms: place of a step -> its time in place of these.
        options: of the deployment, in place of those of `OPTIONS`.
    """
    path, random_ = folder / "steps.csv", np.random.default_rng(0)
    batches = random_.integers(16, 128, num_steps)
    prompts = np.where(np.arange(num_steps) % 6 == 0, random_.integers(64, 400, num_steps), 0)
    pairs = enumerate(zip(prompts, batches, strict=True))
    rows = [f"{number},{prompt},{int(prompt > 0)},{batch},{batch * 700}," for number, (prompt, batch) in pairs]

    def read(times_ms: list[float]) -> StepRun:
        path.write_text("\n".join([HEADER, *(f"{row}{ms}" for row, ms in zip(rows, times_ms, strict=True))]))
        (run,) = read_step_runs(path, {}, {**OPTIONS, **options})
        return run

    priced = price_run(read([8.0] * num_steps), estimator_for)
    assert priced.kind.size == num_steps
    times_ms = (priced.predicted_s * 1e3 * scale + late_ms) * np.exp(noise * random_.standard_normal(num_steps))
    for place, ms in (slow_ms or {}).items():
        times_ms[place] = ms
    return read(times_ms.tolist())
