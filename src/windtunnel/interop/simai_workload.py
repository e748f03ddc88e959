"""SimAI's workload files: a header, a count, and twelve columns per layer.

The grammar is that of ASTRA-sim's `Workload.cc` as SimAI 1.6 has it. Sizes count as in NCCL. A collective without
suffix joins the tensor-parallel group forward and for input gradients, the data-parallel group for weight gradients;
`_EP` and `_DP_EP` name the other two.
"""

from pathlib import Path

from windtunnel.errors import InputError, did_you_mean
from windtunnel.spec.layers import Communication, Group, Layer, LayerWorkload, Phase

POLICY = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
OPS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
}
"""SimAI's word -> ours."""

_HEADER = {
    "model_parallel_NPU_group": "tp",
    "ep": "ep",
    "pp": "pp",
    "vpp": "vpp",
    "ga": "num_micro_batches",
    "all_gpus": "num_gpus",
    "pp_comm": "pp_bytes",
}
_NEEDED = ("model_parallel_NPU_group", "ep", "pp", "vpp", "ga", "all_gpus")
_COLUMNS = (
    "name, dependency, forward ns, forward collective, bytes, input-gradient ns, collective, bytes, "
    "weight-gradient ns, collective, bytes, update ns"
)
_LARGEST = 2**63


def read_workload(path: Path) -> LayerWorkload:
    """The workload in a file.

    Raises:
        InputError: the file is missing or wrong; names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        near = did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else [])
        raise InputError(f"there is no file {path}", near) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InputError(f"{path} is empty; a workload starts with a line {POLICY} ...")
    header = _header(lines[0], f"{path}, line 1")
    num_layers = _num_layers(lines, path)
    layers = tuple(_layer(line, f"{path}, line {number}") for number, line in enumerate(lines[2:], 3))
    if len(layers) != num_layers:
        raise InputError(f"{path}, line 2: it announces {num_layers} layers; {len(layers)} follow")
    try:
        return LayerWorkload(name=path.name, layers=layers, **header)
    except InputError as error:
        raise InputError(f"{path}, line 1: {error.message.removeprefix(f'{path.name}: ')}", error.hint) from None


def _header(line: str, where: str) -> dict[str, int]:
    policy, *words = line.split() or [""]
    if policy != POLICY:
        raise InputError(f"{where}: the policy {policy!r} is not known", f"known: {POLICY}")
    found: dict[str, int] = {}
    for key, value in zip(words[::2], words[1::2], strict=False):
        name = key.rstrip(":")
        if name in _HEADER:
            found[_HEADER[name]] = _whole(value, name, where)
        elif name not in ("checkpoints", "checkpoint_initiates"):
            known = [*_HEADER, "checkpoints", "checkpoint_initiates"]
            raise InputError(f"{where}: the key {name!r} is not known", did_you_mean(name, known))
        elif value != "0":
            raise InputError(f"{where}: {name} is {value!r}; recomputation is given as layers, so 0 is needed")
    missing = [name for name in _NEEDED if _HEADER[name] not in found]
    if missing:
        raise InputError(f"{where}: {missing[0]} is missing")
    if len(words) % 2:
        raise InputError(f"{where}: {words[-1]!r} has no value")
    return {"pp_bytes": 0} | found


def _num_layers(lines: list[str], path: Path) -> int:
    if len(lines) < 2:
        raise InputError(f"{path} ends after line 1; the number of layers and the layers are missing")
    number = _whole(lines[1].strip(), "the number of layers", f"{path}, line 2")
    if number < 1:
        raise InputError(f"{path}, line 2: it announces no layers")
    return number


def _layer(line: str, where: str) -> Layer:
    words = line.split()
    if len(words) != 12:
        raise InputError(f"{where}: it has {len(words)} columns; 12 are needed", _COLUMNS)
    return Layer(
        name=words[0],
        forward=_phase(words[2:5], Group.TP, where),
        input_gradient=_phase(words[5:8], Group.TP, where),
        weight_gradient=_phase(words[8:11], Group.DP, where),
        update_s=_whole(words[11], "update ns", where) * 1e-9,
    )


def _phase(words: list[str], default_group: Group, where: str) -> Phase:
    compute_s = _whole(words[0], "compute ns", where) * 1e-9
    size_bytes = _whole(words[2], "bytes", where)
    if words[1] == "NONE":
        return Phase(compute_s)
    op, _, suffix = words[1].partition("_")
    groups = {"": default_group, "EP": Group.EP, "DP_EP": Group.DP_EP}
    if op not in OPS or suffix not in groups:
        known = ["NONE", *OPS, *(f"{name}_{end}" for name in OPS for end in ("EP", "DP_EP"))]
        raise InputError(
            f"{where}: the collective {words[1]!r} is not known",
            did_you_mean(words[1], known, f"known: NONE, {', '.join(OPS)}, each also with _EP or _DP_EP"),
        )
    return Phase(compute_s, Communication(OPS[op], groups[suffix], size_bytes))


def _whole(word: str, what: str, where: str) -> int:
    try:
        value = int(word)
    except ValueError:
        raise InputError(f"{where}: {what} is {word!r}; a whole number is needed") from None
    if not 0 <= value < _LARGEST:
        raise InputError(f"{where}: {what} is {value}; 0 or more is needed, below 2^63")
    return value
