"""A SimAI workload: a header and blocks of layers, read, written and summed up. Equal blocks are kept once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.files import parse_number, parse_whole, read_text
from windtunnel.formats.collective_calls import CollectiveCall, Contents, totals
from windtunnel.formats.recognise import FileContent
from windtunnel.schema import read_yaml

TRANSFORMER = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
"""The policy of AICB's files: the backward pass repeats the forward layers in reverse."""
MICRO = "MICRO"
_WORDS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("workload.yaml"))
POLICIES: Sequence[str] = _WORDS["policies"]
OPERATIONS: Mapping[str, str] = _WORDS["operations"]
GROUPS: Mapping[str, str] = _WORDS["groups"]
HEADER_KEYS: dict[str, str] = _WORDS["header"]


class FilePhase(NamedTuple):
    """One phase of a layer: computation, then communication."""

    compute_ns: int = 0
    collective: str = "NONE"
    """The file's word: NONE, ALLREDUCE, ALLGATHER_DP_EP, ...; see `meaning`."""
    size_bytes: int = 0


class WorkloadLayer(NamedTuple):
    """One line."""

    name: str
    forward: FilePhase = FilePhase()
    input_gradient: FilePhase = FilePhase()
    weight_gradient: FilePhase = FilePhase()
    update_ns: int = 100
    """Time of the update, which SimAI adds to the end of every collective."""

    @property
    def phases(self) -> tuple[tuple[FilePhase, bool], ...]:
        """Phases in their order, and whether each is of the gradient of the weights."""
        return (self.forward, False), (self.input_gradient, False), (self.weight_gradient, True)


class Block(NamedTuple):
    """Lines that are repeated `repeats` times."""

    layers: tuple[WorkloadLayer, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Header:
    """The first line; None for missing settings, as in files of 2024."""

    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    vpp: int | None = None
    """Chunks of layers on each stage. AICB writes its layers per stage here."""
    num_microbatches: int | None = None
    num_devices: int | None = None
    pp_comm_bytes: int | float | None = None
    """Bytes between two stages for each micro-batch and direction."""
    inference: bool = False


@dataclass(frozen=True)
class SimaiWorkload:
    """A whole file."""

    header: Header
    blocks: tuple[Block, ...]
    policy: str = TRANSFORMER

    @property
    def num_layers(self) -> int:
        """Number of lines, repeats counted."""
        return sum(len(block.layers) * block.repeats for block in self.blocks)

    def layers(self) -> Iterator[WorkloadLayer]:
        """Yield every line in order, repeats written out."""
        for block in self.blocks:
            for _ in range(block.repeats):
                yield from block.layers


def meaning(collective: str, is_weight_gradient: bool) -> tuple[str, str] | None:
    """Return (operation, group) of a file's word, or None for NONE.

    Operations are `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and `broadcast`; groups `tp`, `dp`, `ep`
    and `dp_ep`. Without a suffix the group is data-parallel for gradients of weights, else tensor-parallel. KeyError
    for an unknown word.
    """
    if collective == "NONE":
        return None
    for suffix, group in GROUPS.items():
        if collective.endswith(suffix):
            return OPERATIONS[collective.removesuffix(suffix)], group
    return OPERATIONS[collective], "dp" if is_weight_gradient else "tp"


def read_workload(path: Path) -> SimaiWorkload:
    """Read a workload file of SimAI or AICB, also gzipped. InputError where the file is missing, or a line of it is
    wrong; names the line."""
    head, *body = read_text(path).rstrip().splitlines() or [""]
    policy, *words = head.split() or [""]
    if not head and not body:
        raise InputError(f"{path} is empty; a SimAI workload begins with {TRANSFORMER} or {MICRO}")
    message = f"{path} is not a SimAI workload: it begins with {policy[:40]!r}"
    others = "`windtunnel workload` shows what other tools wrote"
    check_known(policy, POLICIES, message, f"its first word is one of {', '.join(POLICIES)}; {others}")
    header = _header(words, f"{path}, line 1")
    known: dict[str, WorkloadLayer] = {}
    layers = []
    for number, line in enumerate(body[1:], 3):
        layer = known.get(line)
        if layer is None:
            layer = known[line] = _layer(line.split(), f"{path}, line {number}")
        layers.append(layer)
    count = parse_whole(body[0].strip() if body else "", f"{path}, line 2: the number of layers")
    if count != len(layers):
        raise InputError(
            f"{path}, line 2 says that {count} layers follow; there are {len(layers)}", "is the file cut off?"
        )
    return SimaiWorkload(header, (Block(tuple(layers)),), policy)


def _header(words: list[str], where: str) -> Header:
    values: dict[str, Any] = {}
    remaining = iter(words)
    for word in remaining:
        key = word.rstrip(":")
        if key not in HEADER_KEYS:
            raise InputError(f"{where}: {key!r} is no setting of a workload", did_you_mean(key, HEADER_KEYS))
        text, field = next(remaining, None), HEADER_KEYS[key]
        if text is None:
            raise InputError(f"{where} ends after {key!r}; a number is missing")
        what = f"{where}: {key}"
        if field == "pp_comm_bytes":
            size = parse_number(text, what)
            values[field] = size if "." in text else int(text)
        elif not field:
            for _ in zip(range(parse_whole(text, what)), remaining, strict=False):
                pass
        elif field == "inference":
            values[field] = bool(parse_whole(text, what))
        else:
            values[field] = parse_whole(text, what, least=1)
    return Header(**values)


def _layer(words: list[str], where: str) -> WorkloadLayer:
    if len(words) != 12:
        raise InputError(f"{where} has {len(words)} columns; a layer has 12")
    forward, inputs, weights = (_phase(words[start : start + 3], where) for start in (2, 5, 8))
    return WorkloadLayer(words[0], forward, inputs, weights, parse_whole(words[11], f"{where}: the update time"))


def _phase(words: list[str], where: str) -> FilePhase:
    compute, collective, size = words
    try:
        meaning(collective, is_weight_gradient=False)
    except KeyError:
        all_words = ("NONE", *(word + suffix for word in OPERATIONS for suffix in ("", *GROUPS)))
        raise InputError(
            f"{where}: {collective!r} is no collective of a workload",
            did_you_mean(collective, all_words, f"NONE, or one of {', '.join(OPERATIONS)}, with _EP or _DP_EP"),
        ) from None
    compute_ns = parse_whole(compute, f"{where}: a compute time")
    return FilePhase(compute_ns, collective, parse_whole(size, f"{where}: a size"))


def workload_text(workload: SimaiWorkload) -> str:
    """Return the file that holds `workload`, byte for byte as AICB's generators write it."""
    text_of = cache(_layer_line)
    body = ["".join(map(text_of, block.layers)) * block.repeats for block in workload.blocks]
    return "".join([f"{_header_line(workload)}\n{workload.num_layers}\n", *body])


def _header_line(workload: SimaiWorkload) -> str:
    header = workload.header
    if workload.policy == MICRO:
        return MICRO
    degrees = f"{workload.policy} model_parallel_NPU_group: {header.tp}"
    checkpoints = "checkpoints: 0 checkpoint_initiates: 0"
    if header.num_devices is None:
        return f"{degrees} {checkpoints}"
    degrees = f"{degrees} ep: {header.ep} pp: {header.pp}"
    loops = f"vpp: {header.vpp} ga: {header.num_microbatches}"
    devices = f"all_gpus: {header.num_devices}"
    tail = f"{checkpoints} pp_comm: {header.pp_comm_bytes or 0}"
    if header.inference:
        return f"{degrees} {devices} mode: 1 {loops} {tail}"
    return f"{degrees} {loops} {devices} {tail}"


def _layer_line(layer: WorkloadLayer) -> str:
    phases = (*layer.forward, *layer.input_gradient, *layer.weight_gradient)
    return "\t".join(map(str, (layer.name, -1, *phases, layer.update_ns))) + "\n"


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
        phase.compute_ns * block.repeats
        for block in workload.blocks
        for layer in block.layers
        for phase, _ in layer.phases
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
            for phase, is_weight in layer.phases:
                collective = meaning(phase.collective, is_weight)
                if collective:
                    operation, group = collective
                    yield CollectiveCall(operation, group, sizes[group], phase.size_bytes, block.repeats)
