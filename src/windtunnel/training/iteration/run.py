"""A training iteration given layer by layer, run on a fabric at any depth."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.network.collectives.run import groups_seconds, run_collective
from windtunnel.network.fabric import Fabric
from windtunnel.network.settings import NetworkSettings
from windtunnel.training.iteration.layers import (
    Communication,
    Iteration,
    LayerPhase,
    LayerTimes,
    LayerWorkload,
    PhaseTimes,
    RankGroup,
    bubble_ns,
    exposed_by_group,
)

SIMAI_LEAST_BYTES = 4096


def run_layers(workload: LayerWorkload, fabric: Fabric, settings: NetworkSettings) -> Iteration:
    """Return an iteration on a fabric: every kind of collective is timed once, with all its groups at work.

    Forward and input-gradient collectives block; weight-gradient collectives queue behind each other and are hidden by
    what is computed meanwhile. Transfers between pipeline stages block.

    Raises:
        InputError: the workload does not fit the fabric.
    """
    if workload.num_gpus != fabric.num_gpus:
        raise InputError(
            f"{workload.name} is for {workload.num_gpus} GPUs; {fabric.name} has {fabric.num_gpus}",
            "all_gpus of the workload and the GPUs of the topology must be equal",
        )
    known: dict[Communication, int] = {}
    simai = settings.compat == "simai"

    def nanoseconds(call: Communication) -> int:
        if call not in known:
            size_bytes = max(call.size_bytes, SIMAI_LEAST_BYTES) if simai else call.size_bytes
            groups = groups_of(workload, call.group)
            known[call] = round(groups_seconds(fabric, call.op, size_bytes, groups, settings) * 1e9)
        return known[call]

    layers = _timeline(workload, nanoseconds)
    return Iteration(
        workload,
        layers,
        exposed_by_group(layers),
        pp_ns=0.0 if simai else _pipeline_ns(workload, fabric, settings),
        bubble_ns=0.0 if simai else bubble_ns(workload, layers),
    )


def groups_of(workload: LayerWorkload, group: RankGroup) -> NDArray[np.int32]:
    """Return (num_groups, size) the ranks of a kind's groups, in Megatron's order: tp, ep, other dp, pp outermost."""
    tp, ep, dp, pp = workload.tp, workload.ep, workload.dp, workload.pp
    ids = np.arange(workload.num_gpus, dtype=np.int32).reshape(pp, dp // ep, ep, tp)
    match group:
        case RankGroup.TP:
            return ids.reshape(-1, tp)
        case RankGroup.DP:
            return ids.reshape(pp, dp, tp).swapaxes(1, 2).reshape(-1, dp)
        case RankGroup.EP:
            return ids.transpose(0, 1, 3, 2).reshape(-1, ep)
        case RankGroup.DP_EP:
            return ids.transpose(0, 2, 3, 1).reshape(-1, dp // ep)


def _pipeline_ns(workload: LayerWorkload, fabric: Fabric, settings: NetworkSettings) -> float:
    """Time a stage's sends and receives: one each way for every micro-batch and virtual stage."""
    if workload.pp == 1 or workload.pp_bytes == 0:
        return 0.0
    ends = (0, workload.num_gpus // workload.pp)
    send = run_collective(fabric, "send_recv", workload.pp_bytes, ends, settings.backend, settings)
    return 2 * workload.num_micro_batches * workload.vpp * send.seconds * 1e9


def _timeline(workload: LayerWorkload, nanoseconds: Callable[[Communication], int]) -> tuple[LayerTimes, ...]:
    """Time every layer forward, then backward in reverse; gradients queue and are sent beside the computation."""

    def blocking(phase: LayerPhase) -> PhaseTimes:
        total_ns = nanoseconds(phase.communication) if phase.communication else 0
        return PhaseTimes(round(phase.compute_s * 1e9), total_ns, total_ns)

    forward = [blocking(layer.forward) for layer in workload.layers]
    inputs = [blocking(layer.input_gradient) for layer in workload.layers]
    now = sum(times.compute_ns + times.total_ns for times in forward)
    free = 0
    sent: list[tuple[int, int]] = []
    weights = []
    for layer, times in zip(reversed(workload.layers), reversed(inputs), strict=True):
        weight = blocking(layer.weight_gradient)
        now += times.compute_ns + times.total_ns + weight.compute_ns
        begin = max(now, free)
        free = begin + weight.total_ns
        sent.append((begin, free))
        weights.append(weight)
    shown = [
        replace(weight, exposed_ns=max(0, end - max(begin, now)))
        for weight, (begin, end) in zip(weights, sent, strict=True)
    ]
    rows = zip(workload.layers, forward, reversed(shown), inputs, strict=True)
    return tuple(LayerTimes(*row) for row in rows)
