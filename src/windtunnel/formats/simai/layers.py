"""Read a SimAI workload file as the iteration that a network runs."""

from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.formats.simai.analytical import FIRST_LAYER_LINE
from windtunnel.formats.simai.workload import HEADER_KEYS, TRANSFORMER, FilePhase, WorkloadLayer, meaning, read_workload
from windtunnel.training.iteration.layers import Communication, IterationLayer, LayerPhase, LayerWorkload, RankGroup

_NEEDED = ("tp", "ep", "pp", "vpp", "num_microbatches", "num_devices")


def read_layers(path: Path) -> LayerWorkload:
    """Read the iteration in a workload file.

    Raises:
        InputError: the file is missing or wrong, or lacks what a network needs; names the line.
    """
    workload = read_workload(path)
    if workload.policy != TRANSFORMER:
        raise InputError(f"{path}, line 1: the policy {workload.policy} is not run", f"{TRANSFORMER} is")
    header = workload.header
    words = {field: key for key, field in reversed(HEADER_KEYS.items())}
    if missing := [field for field in _NEEDED if getattr(header, field) is None]:
        raise InputError(f"{path}, line 1: {words[missing[0]]} is missing")
    known: dict[WorkloadLayer, IterationLayer] = {}
    for line, row in enumerate(workload.layers(), FIRST_LAYER_LINE):
        if row not in known:
            phases = ((row.forward, False), (row.input_gradient, False), (row.weight_gradient, True))
            known[row] = IterationLayer(row.name, *(_phase(*phase, f"{path}, line {line}") for phase in phases))
    try:
        return LayerWorkload(
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


def _phase(phase: FilePhase, is_weight_gradient: bool, where: str) -> LayerPhase:
    collective = meaning(phase.collective, is_weight_gradient)
    largest = max(phase.compute_ns, phase.size_bytes)
    if largest >= 2**63:
        raise InputError(f"{where}: {largest} is too large; below 2^63 is possible")
    if collective is None:
        return LayerPhase(phase.compute_ns * 1e-9)
    operation, group = collective
    if operation == "broadcast":
        raise InputError(f"{where}: BROADCAST has no time in SimAI, which ignores it, nor here", "take it out")
    return LayerPhase(phase.compute_ns * 1e-9, Communication(operation, RankGroup(group), phase.size_bytes))
