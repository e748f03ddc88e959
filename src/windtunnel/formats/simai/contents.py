"""Summarise the communication of a SimAI workload."""

from collections.abc import Iterator
from pathlib import Path

from windtunnel.formats.collective_calls import CollectiveCall, Contents, totals
from windtunnel.formats.recognise import FileContent
from windtunnel.formats.simai.read import read_workload
from windtunnel.formats.simai.schema import POLICIES, SimaiWorkload, meaning

WORKLOAD = "SimAI workload"


def is_workload(file: FileContent) -> bool:
    """Whether a file begins with a policy."""
    return file.first_word in POLICIES or file.first_word.startswith("HYBRID_")


def read_contents(path: Path) -> Contents:
    """Read a workload and sum up its computation and communication."""
    workload = read_workload(path)
    header = workload.header
    facts = [("policy", workload.policy), ("lines", f"{workload.num_layers:,}")]
    values = (header.tp, header.ep, header.pp, header.vpp, header.num_microbatches, header.num_devices)
    labels = ("tp", "ep", "pp", "vpp", "ga", "gpus")
    degrees = [f"{label} {value}" for label, value in zip(labels, values, strict=True) if value is not None]
    if degrees:
        facts.append(("degrees", ", ".join(degrees)))
    compute_ns = sum(
        (layer.forward.compute_ns + layer.input_gradient.compute_ns + layer.weight_gradient.compute_ns) * block.repeats
        for block in workload.blocks
        for layer in block.layers
    )
    return Contents(WORKLOAD, tuple(facts), tuple(totals(_calls(workload))), compute_ns * 1e-9)


def _calls(workload: SimaiWorkload) -> Iterator[CollectiveCall]:
    header = workload.header
    sizes: dict[str, int | None] = {"tp": header.tp, "ep": header.ep, "dp": None, "dp_ep": None}
    if header.num_devices and header.tp and header.pp:
        data_parallel = header.num_devices // (header.tp * header.pp)
        sizes |= {"dp": data_parallel, "dp_ep": data_parallel // (header.ep or 1)}
    for block in workload.blocks:
        for layer in block.layers:
            phases = ((layer.forward, False), (layer.input_gradient, False), (layer.weight_gradient, True))
            for phase, is_weight in phases:
                collective = meaning(phase.collective, is_weight)
                if collective:
                    operation, group = collective
                    yield CollectiveCall(operation, group, sizes[group], phase.size_bytes, block.repeats)
