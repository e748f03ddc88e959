"""Closed forms: collectives as NCCL's model and its measured tables have them, flows with every link to themselves."""

from dataclasses import replace
from math import ceil, isclose

import numpy as np

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.operators import COLLECTIVES, Collective
from windtunnel.network.collectives.algorithms import torus
from windtunnel.network.collectives.algorithms.ring import ROUNDS
from windtunnel.network.collectives.call import CollectiveCall, CollectiveRun, Ranks
from windtunnel.network.collectives.closed_forms import PROTOCOL_SHARE, closed_form, device_of, is_pcie
from windtunnel.network.fabric import Fabric
from windtunnel.network.flow.run import FlowOptions, run_flow_level
from windtunnel.network.flows import Flows
from windtunnel.network.paths import FlowTimes
from windtunnel.network.settings import NetworkSettings
from windtunnel.pricing.aiconfigurator.estimator import nccl_estimator
from windtunnel.pricing.estimator import Coverage, Estimate, Estimator

MOST_MEASURED_RANKS = 8
"""Most ranks with which a device's collectives were measured."""
MOST_MEASURED_BYTES = 2**29
"""Most bytes with which they were."""
_SIZES = 2.0 ** np.arange(8, 35)
"""Bytes with which collectives were measured."""


def run_flows(fabric: Fabric, flows: Flows, settings: NetworkSettings) -> FlowTimes:
    """Time flows that do not share links."""
    return run_flow_level(fabric, flows, settings, options=FlowOptions(shared=False))


def run_collective(call: CollectiveCall) -> CollectiveRun:
    """Time a collective by measured tables inside a server where NCCL may choose, by closed forms elsewhere."""
    fabric, op, size_bytes, ranks, choices = call.fabric, call.op, call.size_bytes, call.ranks, call.choices
    if fabric.gpus_forward and ranks.switched:
        return _run_on_torus(call)
    seconds, algorithm, protocol = closed_form(op, size_bytes, ranks, choices.algorithm, choices.protocol)
    device, source = device_of(fabric), "closed form"
    may_choose = choices.algorithm == choices.protocol == "auto"
    may_choose &= ranks.num_servers == 1 or (is_pcie(ranks) and op in ROUNDS)
    if (
        device is not None
        and device.measured_as
        and may_choose
        and op in COLLECTIVES
        and _has_usual_links(ranks, device)
    ):
        num_ranks = min(ranks.per_server, MOST_MEASURED_RANKS)
        estimator = nccl_estimator(device, catalog.default_node(device))
        estimate = _rising(estimator, Collective(op, size_bytes, num_ranks))
        # Over NVLink the closed form has the rates of nccl-tests up to 16 GiB, where tables end at 512 MiB: 441 of
        # 480 GB/s on eight H100, 684 of 846 on eight B200.
        if size_bytes > MOST_MEASURED_BYTES and estimate.coverage is Coverage.SCALED and not is_pcie(ranks):
            largest = _rising(estimator, Collective(op, MOST_MEASURED_BYTES, num_ranks)).seconds
            estimate = replace(estimate, seconds=largest + seconds - closed_form(op, MOST_MEASURED_BYTES, ranks)[0])
        # More ranks take no less time than those that were measured, but where the switch adds, for any number of them.
        if num_ranks == ranks.num_ranks or (not (ranks.nvls and op == "all_reduce") and estimate.seconds > seconds):
            of = f" of {num_ranks} ranks" if num_ranks < ranks.num_ranks else ""
            seconds, source = float(estimate.seconds), f"{estimate.coverage.value}: {estimate.source}{of}"
    return CollectiveRun(call, seconds + choices.launch_s, algorithm, protocol, "analytic", source)


def _has_usual_links(ranks: Ranks, device: Device) -> bool:
    """Return whether the links inside a server are those of the usual node of the device that was measured."""
    usual = catalog.default_node(catalog.measured_device(device)).scale_up
    return isclose(ranks.scale_up_bytes_per_s, usual.bytes_per_s, rel_tol=0.05)


def _rising(estimator: Estimator, collective: Collective) -> Estimate:
    """Return an estimate of a collective that never falls with its size, where single measurements do.

    It lies half way between the longest of smaller ones and the shortest of larger ones.
    """
    size_bytes = float(collective.message_bytes)
    sizes = np.append(_SIZES, size_bytes)
    seconds = np.asarray(estimator.estimate(replace(collective, message_bytes=sizes)).seconds)
    middle = (seconds[sizes <= size_bytes].max() + seconds[sizes >= size_bytes].min()) / 2
    return replace(estimator.estimate(collective), seconds=float(middle))


def _run_on_torus(call: CollectiveCall) -> CollectiveRun:
    """Time a collective over whole rings of a torus, where a rank's own links say when it ends."""
    fabric, op, choices = call.fabric, call.op, call.choices
    protocol = "simple" if choices.protocol == "auto" else choices.protocol
    sent = replace(call, size_bytes=ceil(call.size_bytes / PROTOCOL_SHARE[protocol]))
    fits = op in torus.OPERATIONS and choices.algorithm in ("auto", "torus")
    seconds = torus.seconds_by_links(sent) if fits else None
    if seconds is None:
        needs = f"closed forms without them are of {', '.join(torus.OPERATIONS)} over whole rings of a torus"
        raise InputError(f"{fabric.name} has no switches, and {needs}", "use the flow backend")
    return CollectiveRun(call, seconds + choices.launch_s, "torus", protocol, "analytic", "closed form")
