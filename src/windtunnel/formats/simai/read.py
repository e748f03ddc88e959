"""Read SimAI workloads of both vintages."""

from pathlib import Path
from typing import Any

from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.files import read_text
from windtunnel.formats.parsing import parse_number, parse_whole
from windtunnel.formats.simai.schema import (
    GROUPS,
    HEADER_KEYS,
    MICRO,
    OPERATIONS,
    POLICIES,
    TRANSFORMER,
    Block,
    FilePhase,
    Header,
    SimaiWorkload,
    WorkloadLayer,
    meaning,
)


def read_workload(path: Path) -> SimaiWorkload:
    """Read a workload file of SimAI or AICB, also gzipped.

    Raises:
        InputError: the file is missing, or a line of it is wrong; names the line.
    """
    head, *body = read_text(path).rstrip().splitlines() or [""]
    policy, *words = head.split() or [""]
    if not head and not body:
        raise InputError(f"{path} is empty; a SimAI workload begins with {TRANSFORMER} or {MICRO}")
    message = f"{path} is not a SimAI workload: it begins with {policy[:40]!r}"
    check_known(policy, POLICIES, message, f"its first word is one of {', '.join(POLICIES)}")
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
