"""SimAI's workload files (`.txt`): layer by layer, what the ranks of a job compute and send to each other.

A file is one line of settings, the number of layers, and a line of twelve columns for each layer: a name, an unused
dependency, three phases (forward, gradient of the input, gradient of the weights) of compute time in nanoseconds,
collective and bytes, and the time of the update. Gradient accumulation is written out: every micro-batch has its own
lines. In memory equal stretches are held once, with how often they repeat.

Both vintages are read: AICB's of 2025 with `ep: pp: vpp: ga: all_gpus:` in the first line, and older ones without them;
columns separated by tabs or blanks; and `MICRO` files, which have no settings. Sizes are those of the whole logical
tensor, as NCCL counts: the gathered tensor of an all-gather, the input of a reduce-scatter, all that one rank sends
in an all-to-all (aliyun/SimAI, astra-sim/workload/Workload.cc at 1.7).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from windtunnel.errors import InputError, did_you_mean
from windtunnel.files import read_text

TRANSFORMER = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
"""The policy of AICB's files: the backward pass repeats the forward layers in reverse."""
MICRO = "MICRO"
POLICIES = (
    TRANSFORMER,
    MICRO,
    "HYBRID_TRANSFORMER",
    "DATA",
    "MODEL",
    "HYBRID_DATA_MODEL",
    "HYBRID_MODEL_DATA",
    "HYBRID_DLRM",
    "HYBRID_DLRM_ENHANCED",
    "HYBRID_CUSTOMIZED",
    "DISTRIBUTED_INFERENCE",
)

OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "BROADCAST": "broadcast",
}
"""Word in the file -> operation. SimAI itself ignores BROADCAST, which only files of 2024 hold."""
GROUPS = {"_DP_EP": "dp_ep", "_EP": "ep"}
"""Suffix -> group: the same experts' data parallel ranks, and the ranks that share out the experts."""


class Phase(NamedTuple):
    """What a layer does in one phase: it computes, then communicates."""

    compute_ns: int = 0
    collective: str = "NONE"
    """The file's word: NONE, ALLREDUCE, ALLGATHER_DP_EP, ...; see `meaning`."""
    size_bytes: int = 0


class WorkloadLayer(NamedTuple):
    """One line."""

    name: str
    forward: Phase = Phase()
    input_gradient: Phase = Phase()
    weight_gradient: Phase = Phase()
    update_ns: int = 100
    """SimAI adds it to the end of every collective."""


class Block(NamedTuple):
    """Lines that stand `repeats` times one after another."""

    layers: tuple[WorkloadLayer, ...]
    repeats: int = 1


@dataclass(frozen=True)
class Header:
    """The first line; `None` where it does not say, as in files of 2024."""

    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    vpp: int | None = None
    """Chunks of layers on each stage. AICB writes its layers per stage here."""
    num_microbatches: int | None = None
    num_devices: int | None = None
    pp_comm_bytes: int | float | None = None
    """Between two stages, a micro-batch and direction."""
    inference: bool = False


HEADER_KEYS = {
    "model_parallel_NPU_group": "tp",
    "ep": "ep",
    "expert_parallel_npu_group": "ep",
    "pp": "pp",
    "vpp": "vpp",
    "ga": "num_microbatches",
    "all_gpus": "num_devices",
    "pp_comm": "pp_comm_bytes",
    "mode": "inference",
    "checkpoints": "",
    "checkpoint_initiates": "",
}
"""Key in the file -> field. Checkpoints are lists of layers that no file of AICB fills."""


@dataclass(frozen=True)
class SimaiWorkload:
    """A whole file."""

    header: Header
    blocks: tuple[Block, ...]
    policy: str = TRANSFORMER

    @property
    def num_layers(self) -> int:
        """Lines, repeats counted."""
        return sum(len(block.layers) * block.repeats for block in self.blocks)

    def layers(self) -> Iterator[WorkloadLayer]:
        """Every line in order, repeats written out."""
        for block in self.blocks:
            for _ in range(block.repeats):
                yield from block.layers


def meaning(collective: str, is_weight_gradient: bool) -> tuple[str, str] | None:
    """(operation, group) of a file's word, or None for NONE.

    Operations are `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and `broadcast`; groups `tp`, `dp`, `ep`
    and `dp_ep`. Without a suffix SimAI takes the data-parallel group for gradients of weights, else the
    tensor-parallel one.

    Raises:
        KeyError: an unknown word.
    """
    if collective == "NONE":
        return None
    for suffix, group in GROUPS.items():
        if collective.endswith(suffix):
            return OPERATIONS[collective.removesuffix(suffix)], group
    return OPERATIONS[collective], "dp" if is_weight_gradient else "tp"


def workload_text(workload: SimaiWorkload) -> str:
    """The file that holds `workload`, byte for byte as AICB's generators write it."""
    head = [_header_line(workload), str(workload.num_layers)]
    body = [_block_text(block.layers) * block.repeats for block in workload.blocks]
    return "\n".join(head) + "\n" + "".join(body)


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


def _block_text(layers: tuple[WorkloadLayer, ...]) -> str:
    lines = {layer: _layer_line(layer) for layer in set(layers)}
    return "".join([lines[layer] for layer in layers])


def _layer_line(layer: WorkloadLayer) -> str:
    phases = (*layer.forward, *layer.input_gradient, *layer.weight_gradient)
    return "\t".join(map(str, (layer.name, -1, *phases, layer.update_ns))) + "\n"


def read_workload(path: Path) -> SimaiWorkload:
    """The workload in a file of SimAI or AICB, also gzipped.

    Raises:
        InputError: the file is missing, or a line of it is wrong; names the line.
    """
    lines = read_text(path).splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InputError(f"{path} is empty; a SimAI workload begins with {TRANSFORMER} or {MICRO}")
    policy = lines[0].split()[0] if lines[0].split() else ""
    if policy not in POLICIES:
        raise InputError(
            f"{path} is not a SimAI workload: it begins with {policy[:40]!r}",
            did_you_mean(policy, POLICIES, f"its first word is one of {', '.join(POLICIES)}"),
        )
    header = _header(lines[0].split()[1:], f"{path}, line 1")
    known: dict[str, WorkloadLayer] = {}
    layers = []
    for number, line in enumerate(lines[2:], 3):
        layer = known.get(line)
        if layer is None:
            layer = known[line] = _layer(line.split(), f"{path}, line {number}")
        layers.append(layer)
    _check_count(lines, len(layers), path)
    return SimaiWorkload(header, (Block(tuple(layers)),), policy)


def _check_count(lines: list[str], found: int, path: Path) -> None:
    text = lines[1].strip() if len(lines) > 1 else ""
    count = _whole(text, f"{path}, line 2", "the number of layers")
    if count != found:
        raise InputError(f"{path}, line 2 says that {count} layers follow; there are {found}", "is the file cut off?")


def _header(words: list[str], where: str) -> Header:
    values: dict[str, int | float | bool] = {}
    position = 0
    while position < len(words):
        key = words[position].rstrip(":")
        if key not in HEADER_KEYS:
            raise InputError(f"{where}: {key!r} is no setting of a workload", did_you_mean(key, HEADER_KEYS))
        if position + 1 == len(words):
            raise InputError(f"{where} ends after {key!r}; a number is missing")
        text, field = words[position + 1], HEADER_KEYS[key]
        position += 2
        if field == "pp_comm_bytes":
            values[field] = _size(text, where, key)
            continue
        number = _whole(text, where, key)
        if not field:
            position += number
        elif field == "inference":
            values[field] = bool(number)
        elif number < 1:
            raise InputError(f"{where}: {key} is {number}; at least 1 is needed")
        else:
            values[field] = number
    return Header(**values)  # type: ignore[arg-type]


def _layer(words: list[str], where: str) -> WorkloadLayer:
    if len(words) != 12:
        raise InputError(f"{where} has {len(words)} columns; a layer has 12")
    forward, input_gradient, weight_gradient = (_phase(words[start : start + 3], where) for start in (2, 5, 8))
    return WorkloadLayer(
        words[0], forward, input_gradient, weight_gradient, _whole(words[11], where, "the update time")
    )


def _phase(words: list[str], where: str) -> Phase:
    compute, collective, size = words
    try:
        meaning(collective, is_weight_gradient=False)
    except KeyError:
        all_words = ("NONE", *(word + suffix for word in OPERATIONS for suffix in ("", *GROUPS)))
        raise InputError(
            f"{where}: {collective!r} is no collective of a workload",
            did_you_mean(collective, all_words, f"NONE, or one of {', '.join(OPERATIONS)}, with _EP or _DP_EP"),
        ) from None
    return Phase(_whole(compute, where, "a compute time"), collective, _whole(size, where, "a size"))


def _whole(text: str, where: str, what: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise InputError(f"{where}: {what} is {text!r}; a whole number is needed") from None
    if number < 0:
        raise InputError(f"{where}: {what} is {number}; at least 0 is needed")
    return number


def _size(text: str, where: str, what: str) -> int | float:
    try:
        number = float(text)
    except ValueError:
        raise InputError(f"{where}: {what} is {text!r}; a number is needed") from None
    if not 0 <= number < float("inf"):
        raise InputError(f"{where}: {what} is {text}; at least 0 is needed")
    return number if "." in text else int(text)
