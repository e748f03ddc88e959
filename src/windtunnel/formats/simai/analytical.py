"""A SimAI workload as an iteration, and SimAI-Analytical's closed forms, number for number, for `compat: simai`.

Source: SimAI 1.6, `Layer::compute_time` and `calbusbw.cc`. They differ from the default model
(`network/collectives/closed_forms.py`) on purpose:

- below 1 MiB every collective takes 10 to 320 us by its number of ranks only, and none for other counts;
- every rank of a data-parallel group counts as a server;
- efficiency falls with size only for some collectives in some groups, and stops falling below 16 MiB;
- transfers between pipeline stages take no time;
- gigabytes are GiB, efficiencies and overlaps are single-precision, times are cut to whole nanoseconds.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from windtunnel import catalog
from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError, check_known
from windtunnel.formats.simai.workload import HEADER_KEYS, TRANSFORMER, FilePhase, WorkloadLayer, meaning, read_workload
from windtunnel.schema import Positive, Schema, check_fraction, check_positive, decode, read_yaml
from windtunnel.training.iteration import layers as iteration
from windtunnel.units import GIB, parse_quantity

NVLINK_GIB_PER_S = {"A100": 12 * 20.0, "A800": 8 * 20.0, "H100": 18 * 20.6, "H800": 8 * 20.6, "H20": 18 * 20.6}
"""GPU type -> links x bandwidth of one link (`calbusbw.h`)."""
NIC_GIB_PER_S = {"cx6": 23.5, "cx7": 48.5, "bf3": 48.5}
_SMALL_BYTES = 1048576
_SMALL_US = {2: 10, 4: 12, 8: 15, 16: 66, 32: 135, 64: 200, 128: 320}
_RATIOS = catalog.shipped("network/simai_ratios.yaml")
_LARGEST_BYTES = 16 * 2**30

Fraction = Annotated[float, check_fraction]


class SimaiOptions(Schema):
    """Servers, and the share of communication that computation hides, as SimAI-Analytical's flags describe them."""

    nvlink_gib_per_s: Positive = 360.0
    """`-nv`: bus bandwidth inside a server."""
    nic_gib_per_s: Positive = 48.5
    """`-nic`: bus bandwidth of one NIC."""
    nics_per_server: Annotated[int, check_positive] = 8
    """`-n_p_s`"""
    gpus_per_server: Annotated[int, check_positive] = 8
    """`-g_p_s`"""
    dp_fraction: Fraction = 0.0
    """`-dp_o`, and `-ep_o` and `-tp_o` for the next two."""
    ep_fraction: Fraction = 0.0
    tp_fraction: Fraction = 0.0
    pp_fraction: Fraction = 1.0
    """`-pp_o`. SimAI reads it as a bandwidth too, so that 1 makes transfers between stages free."""


def simai_options(options: Mapping[str, Any]) -> SimaiOptions:
    """Return SimAI-Analytical's options from those of a command by name; types give bandwidths that are None.
    InputError where a type is unknown, a number not above zero, or a ratio not from 0 to 1."""
    values = {name: options[name] for name in ("nics_per_server", "gpus_per_server")}
    values |= {f"{kind}_fraction": options[f"{kind}_overlap"] for kind in ("dp", "ep", "tp", "pp")}
    for field, given, what, name, table in (
        ("nvlink_gib_per_s", "nvlink_busbw", "GPU type", (options["gpu_type"] or "").upper(), NVLINK_GIB_PER_S),
        ("nic_gib_per_s", "nic_busbw", "NIC type", (options["nic_type"] or "").lower(), NIC_GIB_PER_S),
    ):
        values[field] = options[given]
        if values[field] is None and name:
            check_known(name, table, f"SimAI knows no {what} {name!r}")
            values[field] = table[name]
    return decode({name: value for name, value in values.items() if value is not None}, SimaiOptions)


class _Span(NamedTuple):
    """Position of a group on servers, in SimAI's integer divisions."""

    num_servers: int
    gpus_of_server: int
    nics: int


def _span(workload: iteration.LayerWorkload, group: iteration.RankGroup, options: SimaiOptions) -> _Span:
    tp, size = workload.tp, workload.group_size(group)
    per_server, nics = options.gpus_per_server, options.nics_per_server
    match group:
        case iteration.RankGroup.TP if tp <= per_server:
            return _Span(1, tp, nics)
        case iteration.RankGroup.TP:
            return _Span(tp // per_server, per_server, nics)
        case iteration.RankGroup.EP if tp * size <= per_server:
            return _Span(1, per_server // tp, nics)
        case iteration.RankGroup.EP:
            shared = nics // per_server if tp > per_server else nics // tp
            return _Span(tp * size // per_server, max(per_server // tp, 1), shared)
        case iteration.RankGroup.DP if tp <= per_server:
            return _Span(size, per_server // tp, nics // tp)
        case iteration.RankGroup.DP_EP if tp * workload.ep <= per_server:
            return _Span(size, per_server // (tp * workload.ep), nics // (tp * workload.ep))
        case _:
            return _Span(size, 1, nics // per_server)


def _bus_bandwidth(op: str, span: _Span, options: SimaiOptions) -> tuple[float, bool]:
    """Return GiB/s of a collective with the algorithm "ring", and whether NVLink limits it."""
    nvlink, nic = options.nvlink_gib_per_s, options.nic_gib_per_s
    per_server, wire = span.gpus_of_server, span.nics * nic
    if span.num_servers == 1:
        return nvlink, True
    if op == "all_to_all":
        ranks = span.num_servers * per_server
        return wire / per_server * (ranks - 1) / ((span.num_servers - 1) * per_server), False
    if per_server == 1:
        return wire, False
    inside = nvlink * per_server / (per_server - 1) if wire > nvlink else nvlink
    return min(inside, wire), inside < wire


@cache
def _ratios() -> tuple[Floats, Mapping[str, Floats]]:
    raw: dict[str, Any] = read_yaml(_RATIOS)
    tables = {name: np.array(raw[name]) for name in ("nic", "nvlink", "all_to_all")}
    smallest_bytes = parse_quantity("smallest_bytes", raw["smallest_bytes"])
    sizes = np.array([smallest_bytes * 2.0**row for row in range(len(tables["nic"]))])
    return sizes, tables


def _efficiency(
    call: iteration.Communication, workload: iteration.LayerWorkload, options: SimaiOptions, by_nvlink: bool
) -> float:
    """Return the bandwidth of a collective of this size as a share of the bandwidth at 16 GiB."""
    tp, per_server = workload.tp, options.gpus_per_server
    if call.group is iteration.RankGroup.TP and call.op != "all_reduce":
        num_servers = 1 if tp < per_server else tp // per_server
        table = "all_to_all" if call.op == "all_to_all" else ("nvlink" if by_nvlink else "nic")
    elif call.group is iteration.RankGroup.EP and call.op == "all_to_all":
        table = "all_to_all"
        num_servers = 1 if tp * workload.ep <= per_server else tp * workload.ep // per_server
        if tp >= per_server and num_servers > 1:
            num_servers = 9
    else:
        return 1.0
    if call.size_bytes > _LARGEST_BYTES:
        raise InputError(
            f"a collective of {call.size_bytes} bytes is beyond SimAI's efficiency tables, which end at 16 GiB",
            "leave out `compat: simai`",
        )
    sizes, tables = _ratios()
    column = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4, 32: 5, 64: 6, 128: 7, 9: 8}.get(num_servers, 4)
    curve = tables[table][:, column]
    return float(np.float32(np.interp(call.size_bytes, sizes, curve)) / np.float32(curve[-1]))


def collective_ns(call: iteration.Communication, workload: iteration.LayerWorkload, options: SimaiOptions) -> int:
    """Return the nanoseconds of one collective, as SimAI-Analytical counts them. InputError where the group does not
    fit whole servers, or the size is beyond its tables."""
    ranks = workload.group_size(call.group)
    if ranks <= 1 or call.size_bytes <= 1:
        return 0
    if call.size_bytes < _SMALL_BYTES:
        return _SMALL_US.get(ranks, 0) * 1000
    span = _span(workload, call.group, options)
    bandwidth, by_nvlink = _bus_bandwidth(call.op, span, options)
    if bandwidth <= 0:
        raise InputError(
            f"{options.nics_per_server} NICs shared by {options.gpus_per_server} GPUs leave none for a rank of "
            f"the {call.group} group",
            "SimAI divides whole numbers; give nics_per_server as a multiple of gpus_per_server",
        )
    bandwidth *= _efficiency(call, workload, options, by_nvlink)
    rounds = 2 if call.op == "all_reduce" else 1
    return int(call.size_bytes / GIB / bandwidth * 1e9 * rounds * (ranks - 1) / ranks)


FIRST_LAYER_LINE = 3
"""Line of a workload file: a header and the number of layers come before."""


def run_simai_analytical(workload: iteration.LayerWorkload, options: SimaiOptions | None = None) -> iteration.Iteration:
    """Price one iteration with SimAI-Analytical's formulas, which know no topology. InputError where a group does not
    fit whole servers, or a size is beyond SimAI's tables."""
    options = options or SimaiOptions()
    per_server = options.gpus_per_server
    if workload.tp % per_server and per_server % workload.tp:
        raise InputError(f"{workload.name}, line 1: tp = {workload.tp} does not fill servers of {per_server} GPUs")
    hidden = {iteration.RankGroup.TP: options.tp_fraction, iteration.RankGroup.EP: options.ep_fraction}
    total_ns_of = cache(lambda call: collective_ns(call, workload, options))

    def times(phase: iteration.LayerPhase, group_of_overlap: iteration.RankGroup) -> iteration.PhaseTimes:
        call = phase.communication
        compute_ns = round(phase.compute_s * 1e9)
        if call is None:
            return iteration.PhaseTimes(compute_ns, 0, 0)
        total_ns = total_ns_of(call)
        shown = np.float32(1) - np.float32(hidden.get(group_of_overlap, options.dp_fraction))
        return iteration.PhaseTimes(compute_ns, total_ns, int(np.float32(total_ns) * shown))

    def row(line: int, layer: iteration.IterationLayer) -> iteration.LayerTimes:
        forward = layer.forward.communication
        group = forward.group if forward else iteration.RankGroup.TP
        try:
            return iteration.LayerTimes(
                layer,
                times(layer.forward, group),
                times(layer.weight_gradient, iteration.RankGroup.DP),
                times(layer.input_gradient, group),
            )
        except InputError as error:
            raise InputError(f"{workload.name}, line {line}: {error.message}", error.hint) from None

    layers = tuple(row(line, layer) for line, layer in enumerate(workload.layers, FIRST_LAYER_LINE))
    return iteration.Iteration(
        workload,
        layers,
        iteration.exposed_by_group(layers),
        _pipeline_ns(workload, options),
        iteration.bubble_ns(workload, layers),
    )


def _pipeline_ns(workload: iteration.LayerWorkload, options: SimaiOptions) -> float:
    if options.pp_fraction in (0.0, 1.0) or workload.pp_bytes == 0:
        return 0.0
    each_ns = workload.pp_bytes / GIB / options.pp_fraction * 1e9
    return int(2 * workload.vpp * workload.num_micro_batches * each_ns / 1000 * (1 - options.pp_fraction)) * 1000


_NEEDED = ("tp", "ep", "pp", "vpp", "num_microbatches", "num_devices")


def read_layers(path: Path) -> iteration.LayerWorkload:
    """Read the iteration in a workload file. InputError where the file is missing or wrong, or lacks what a network
    needs; names the line."""
    workload = read_workload(path)
    if workload.policy != TRANSFORMER:
        raise InputError(f"{path}, line 1: the policy {workload.policy} is not run", f"{TRANSFORMER} is")
    header = workload.header
    words = {field: key for key, field in reversed(HEADER_KEYS.items())}
    if missing := [field for field in _NEEDED if getattr(header, field) is None]:
        raise InputError(f"{path}, line 1: {words[missing[0]]} is missing")
    known: dict[WorkloadLayer, iteration.IterationLayer] = {}
    for line, row in enumerate(workload.layers(), FIRST_LAYER_LINE):
        if row not in known:
            known[row] = iteration.IterationLayer(
                row.name, *(_phase(*phase, f"{path}, line {line}") for phase in row.phases)
            )
    try:
        return iteration.LayerWorkload(
            name=path.name,
            tp=header.tp or 1,
            ep=header.ep or 1,
            pp=header.pp or 1,
            vpp=header.vpp or 1,
            num_micro_batches=header.num_microbatches or 1,
            num_gpus=header.num_devices or 1,
            pp_bytes=int(header.pp_comm_bytes or 0),
            layers=tuple(known[row] for row in workload.layers()),
        )
    except InputError as error:
        raise InputError(f"{path}, line 1: {error.message.removeprefix(f'{path.name}: ')}", error.hint) from None


def _phase(phase: FilePhase, is_weight_gradient: bool, where: str) -> iteration.LayerPhase:
    collective = meaning(phase.collective, is_weight_gradient)
    largest = max(phase.compute_ns, phase.size_bytes)
    if largest >= 2**63:
        raise InputError(f"{where}: {largest} is too large; below 2^63 is possible")
    if collective is None:
        return iteration.LayerPhase(phase.compute_ns * 1e-9)
    operation, group = collective
    if operation == "broadcast":
        raise InputError(f"{where}: BROADCAST has no time in SimAI, which ignores it, nor here", "take it out")
    return iteration.LayerPhase(
        phase.compute_ns * 1e-9, iteration.Communication(operation, iteration.RankGroup(group), phase.size_bytes)
    )
