"""Compare the arithmetic and memory traffic of every step of a run with the device's published peaks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.hardware import Device
from windtunnel.metrics.power import PowerModel, curve_of
from windtunnel.metrics.records import Table
from windtunnel.metrics.summary import SideUse, StageUse
from windtunnel.model.launches.forward import (
    decode_launches,
    head_launches,
    num_tail_tokens,
    prefill_launches,
    token_launches,
)
from windtunnel.model.operators import Launch
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import Shard
from windtunnel.pricing.roofline import machine
from windtunnel.serving.deployment import Deployment
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.step_prices import LoweredSteps

ROWS_AT_ONCE = 1 << 15
"""Arrays of a block stay in the cache: 28 million rows take 3 s and not 12."""


@dataclass(frozen=True, eq=False)
class StepWork:
    """Seconds of one device of a replica at its published peaks, for all steps of each row: `[num_rows]`.

    `compute` are FLOPs over the peak rate of each operator's format, `memory` bytes over the memory bandwidth;
    collectives count as neither. The head runs on the last stage of a pipeline.
    """

    body_compute_s: Floats
    body_memory_s: Floats
    head_compute_s: Floats
    head_memory_s: Floats


def step_work(device: Device, shard: Shard, steps: Table) -> StepWork:
    """Return the work in each row of the step table.

    Ranks of attention data parallelism share the row's counts evenly, as in `batch_of`.
    """
    parts = list(_parts(device, shard, steps))
    return StepWork(*(np.concatenate([part[index] for part in parts]) for index in range(4)))


def total_work(device: Device, shard: Shard, steps: Table) -> StepWork:
    """Return the work of all rows together: arrays of one element."""
    sums = np.sum([[part.sum() for part in parts] for parts in _parts(device, shard, steps)], axis=0)
    return StepWork(*(np.array([total]) for total in sums))


def _parts(device: Device, shard: Shard, steps: Table) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
    """Yield the work of one block of rows after the other."""
    for first in range(0, max(len(steps), 1), ROWS_AT_ONCE):
        yield _work_of(device, shard, steps, slice(first, first + ROWS_AT_ONCE))


def _work_of(device: Device, shard: Shard, steps: Table, rows: slice) -> tuple[Floats, Floats, Floats, Floats]:
    """Return seconds of arithmetic and memory traffic of the body, then of the head, for each row of a block."""
    ranks = shard.parallelism.attention_dp
    columns = ("decode_tokens", "prefill_tokens", "num_sampled", "context_tokens", "prefill_pairs", "num_steps")
    decode, prefill, sampled, context, pairs, count = (steps[name][rows].astype(np.float64) for name in columns)
    # A row's context grows by a token for each request and step: its mean is half the way on.
    context = (context + decode * (count - 1) / 2) / ranks
    decode, prefill, sampled, pairs = decode / ranks, prefill / ranks, sampled / ranks, pairs / ranks
    length = np.maximum(2 * pairs / np.maximum(prefill, 1.0), 1.0)
    read = decode + num_tail_tokens(shard, prefill, length)
    body_compute_s, body_memory_s = _ideal_s(device, token_launches(shard, decode + prefill, read))
    parts = [(body_compute_s, body_memory_s, np.ones(count.size, bool))]
    some = np.maximum(decode, 1.0)
    parts.append((*_ideal_s(device, decode_launches(shard, some, np.maximum(context / some, 0.0) + 1)), decode > 0))
    parts.append((*_ideal_s(device, prefill_launches(shard, np.maximum(prefill, 1.0) / length, length)), prefill > 0))
    compute_s = sum((np.where(has, compute, 0.0) for compute, _, has in parts), np.zeros(count.size))
    memory_s = sum((np.where(has, memory, 0.0) for _, memory, has in parts), np.zeros(count.size))
    head_compute_s, head_memory_s = _ideal_s(device, head_launches(shard, np.maximum(sampled, 1.0)))
    has_head = sampled > 0
    return (
        compute_s * count,
        memory_s * count,
        np.where(has_head, head_compute_s, 0.0) * count,
        np.where(has_head, head_memory_s, 0.0) * count,
    )


def _ideal_s(device: Device, launches: Iterable[Launch]) -> tuple[Floats, Floats]:
    """Return seconds of arithmetic and of memory traffic at the published peaks."""
    compute_s: Floats = np.zeros(1)
    memory_s: Floats = np.zeros(1)
    for launch in launches:
        if launch.op.is_communication:
            continue
        peak = machine(device, launch.op.compute_format)
        compute_s = compute_s + np.asarray(launch.op.flops) / peak.flops_per_s * launch.count
        memory_s = memory_s + np.asarray(launch.op.num_bytes) / peak.bytes_per_s * launch.count
    return compute_s, memory_s


def stage_uses(work: StepWork, steps: Table, num_stages: int, num_replicas: float, span_s: float) -> list[StageUse]:
    """Return the use of each stage; layers are split evenly, the head is on the last one, which
    is busy with it for at least as long as the device's peaks let it.

    MFU as in Chowdhery et al., PaLM (2022), appendix B, with the FLOPs of the step's operators; MBU is the same for
    bytes (Databricks, LLM Inference Performance Engineering, 2023).
    """
    total_s = span_s * num_replicas
    head_s = float(np.maximum(work.head_compute_s, work.head_memory_s).sum())
    body_busy_s = (float(steps["duration_s"].sum()) - head_s) / num_stages
    uses = []
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        busy_s = body_busy_s + is_last * head_s
        compute_s = float(work.body_compute_s.sum()) / num_stages + is_last * float(work.head_compute_s.sum())
        memory_s = float(work.body_memory_s.sum()) / num_stages + is_last * float(work.head_memory_s.sum())
        uses.append(
            StageUse(
                mfu_fraction=compute_s / total_s,
                mbu_fraction=memory_s / total_s,
                busy_mfu_fraction=compute_s / busy_s,
                busy_mbu_fraction=memory_s / busy_s,
            )
        )
    return uses


def side_uses(
    lowered: LoweredSteps, steps: Table, parallelism: Parallelism, num_replicas: int, held_s: float
) -> list[SideUse]:
    """Return the use of attention and feed-forward devices; nothing where each device computes both.

    `held_s` is the time that replicas hold their devices, summed. Ranks share a row's counts evenly. In a step with
    prompts what is neither feed-forward nor communication is attention's.
    """
    if lowered.sides is None or lowered.mixed_ffn_s is None or parallelism.ffn is None:
        return []
    ranks, count = parallelism.attention_dp, steps["num_steps"]
    decodes = -(-steps["decode_tokens"] // ranks)
    tokens = -(-(steps["decode_tokens"] + steps["prefill_tokens"]) // ranks)
    # A row's contexts grow by a token a step: their mean is half the way on.
    contexts = steps["context_tokens"] / np.maximum(steps["decode_tokens"], 1) + (count + 1) / 2
    nodes = lowered.cost.context_nodes
    cell = np.clip(np.searchsorted(nodes, contexts, side="right") - 1, 0, nodes.size - 2)
    share = (contexts - nodes[cell]) / (nodes[cell + 1] - nodes[cell])
    attention_s, ffn_s = (
        grid[decodes, cell] + (grid[decodes, cell + 1] - grid[decodes, cell]) * share for grid in lowered.sides.busy_s
    )
    mixed_s = steps["duration_s"] / count - lowered.mixed_ffn_s[tokens] - lowered.mixed_communication_s[tokens]
    has_prompts = steps["prefill_tokens"] > 0
    busy_s = (
        np.where(has_prompts, np.maximum(mixed_s, 0.0), attention_s),
        np.where(has_prompts, lowered.mixed_ffn_s[tokens], ffn_s),
    )
    devices = (parallelism.tp * ranks * num_replicas, parallelism.ffn.devices * num_replicas)
    return [
        SideUse(name=name, num_devices=num, busy_fraction=float((side_s * count).sum()) / held_s)
        for name, num, side_s in zip(("attention", "feed-forward"), devices, busy_s, strict=True)
    ]


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
