"""What the devices of a run draw, from what their steps compute and read."""

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.metrics.power import PowerModel, curve_of
from windtunnel.metrics.records import Table
from windtunnel.model.shape import Shard
from windtunnel.serving.analysis.device_use import StepWork, step_work
from windtunnel.serving.deployment import Deployment
from windtunnel.serving.scenario import Setup

MOST_ROWS = 1 << 14
"""Rows of the step table, evenly spaced, that stand for all: their mean draw is that of the 51,709 rows of 20,000
requests to Llama-3.1-8B within 0.06%."""


def step_draw_w(deployment: Deployment, setup: Setup, work: StepWork, duration_s: Floats) -> Floats | None:
    """Return the watts of one device in each row of the step table `[num_rows]`; None where its power is unknown."""
    if deployment.power.busy_w is not None:
        return np.full(duration_s.size, deployment.power.busy_w)
    if setup.device.tdp_w is None:
        return None
    mbu = (work.body_memory_s + work.head_memory_s) / duration_s
    mfu = (work.body_compute_s + work.head_compute_s) / duration_s
    draw_w = setup.device.tdp_w * curve_of(setup.device.architecture).fraction(mbu, mfu)
    limit_w = deployment.power.limit_w
    return draw_w if limit_w is None else np.minimum(draw_w, limit_w)


def power_model(
    deployment: Deployment, setup: Setup, shard: Shard | None = None, steps: Table | None = None
) -> PowerModel | None:
    """Return the power model of one device of a kind; None where its power is unknown.

    Args:
        shard: what a device holds; with attention and feed-forward apart, attention's, which stands for both.
        steps: of the pool; None takes a device that draws all it may while it is busy.
    """
    terms = deployment.power
    design_w = setup.device.tdp_w if terms.busy_w is None else terms.busy_w
    if design_w is None:
        return None
    busy_w = design_w if terms.limit_w is None else min(design_w, terms.limit_w)
    if shard is not None and steps is not None and len(steps):
        if len(steps) > MOST_ROWS:
            steps = steps.where(np.linspace(0, len(steps) - 1, MOST_ROWS).astype(np.int64))
        draw_w = step_draw_w(deployment, setup, step_work(setup.device, shard, steps), steps["duration_s"])
        assert draw_w is not None
        busy_w = float(np.average(draw_w, weights=steps["duration_s"]))
    return PowerModel(terms.idle_fraction * design_w, busy_w, terms)
