"""Read SimAI workloads of both vintages."""

from pathlib import Path

from windtunnel.errors import InputError, did_you_mean
from windtunnel.files import read_text
from windtunnel.formats.simai.schema import (
    GROUPS,
    HEADER_KEYS,
    MICRO,
    OPERATIONS,
    POLICIES,
    TRANSFORMER,
    Block,
    Header,
    Phase,
    SimaiWorkload,
    WorkloadLayer,
    meaning,
)


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
