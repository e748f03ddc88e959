"""AICB's communication lists (`.csv`): every collective and matrix product of one rank, in order.

Written by AICB's Megatron, DeepSpeed and collective-test generators (log_analyzer/log.py), with times filled in by a
run (`*_log.csv`). Files of 2024 begin with a line that names the ranks, `[rank0 ~ rank127]`, and hold one list for each
pipeline stage. Sizes are bytes of the whole logical tensor, as NCCL counts.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from windtunnel.errors import InputError, check_known
from windtunnel.files import parse_number, read_text

COLUMNS = "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,_elapsed_time,algbw,busbw,count"
KINDS = (
    *("all_reduce", "isend", "irecv", "broadcast", "all_gather", "reduce_scatter", "barrier", "reduce"),
    *("reduce_scatter_tensor", "all_gather_into_tensor", "computation", "epoch_end", "all_to_all"),
)
GROUPS = ("dp_group", "pp_group", "tp_group", "ep_group", "ep_dp_group", "ep_tp_group", "embedding_group", "all")

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of the two factors of a matrix product."""


class Record(NamedTuple):
    """One line."""

    kind: str
    """One of `KINDS`; `epoch_end` ends the initialisation and every iteration."""
    group: str | None = None
    """One of `GROUPS`."""
    group_size: int | None = None
    size: int | float | Shapes = 0
    """Bytes, or the shapes of a matrix product."""
    stage: str = ""
    """Place in the program, such as forward.MegatronRowLinear."""
    destination: int | None = None
    source: int | None = None
    additional: str = ""
    elapsed_ms: float | None = None
    """Measured, in files that AICB writes after a run."""
    algorithm_bandwidth: float | None = None
    bus_bandwidth: float | None = None
    num_calls: int = 1


EPOCH_END = Record("epoch_end")


class Stretch(NamedTuple):
    """Records that are repeated `repeats` times."""

    records: tuple[Record, ...]
    repeats: int = 1


@dataclass(frozen=True)
class RecordList:
    """The list of one rank, or of the ranks that a file's title names."""

    stretches: tuple[Stretch, ...]
    title: str = ""
    """Line with the ranks in files of 2024; empty in others."""

    @property
    def num_records(self) -> int:
        """Number of lines, repeats counted."""
        return sum(len(stretch.records) * stretch.repeats for stretch in self.stretches)

    def records(self) -> Iterator[Record]:
        """Yield every line in order, repeats written out."""
        return chain.from_iterable(chain.from_iterable([s.records] * s.repeats for s in self.stretches))


def records_text(lists: Iterable[RecordList]) -> str:
    """Return the file that holds `lists`, byte for byte as AICB writes it."""
    text_of, parts = cache(_line), []
    for records in lists:
        parts += [f"{records.title}\n" if records.title else "", f"{COLUMNS}\n"]
        parts += ["".join(map(text_of, stretch.records)) * stretch.repeats for stretch in records.stretches]
    return "".join(parts)


def _line(record: Record) -> str:
    # The shapes of a matrix product stand without their commas, which would add columns.
    size = str(record.size).replace(",", "")
    group = None if record.group is None else f"CommGroup.{record.group}"
    fields = (f"CommType.{record.kind}", group, record.group_size, size, *record[4:])
    return ",".join(map(str, fields)) + "\n"


def read_records(path: Path) -> list[RecordList]:
    """Read the lists in a file of AICB, also gzipped: one, or in files of 2024 one for each pipeline stage. InputError
    where the file is missing, is another file, or a line of it is wrong; names the line."""
    lists: list[RecordList] = []
    known: dict[str, Record] = {}
    title, records, has_header = "", list[Record](), False
    lines = read_text(path).splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("["):
            if has_header:
                lists.append(RecordList((Stretch(tuple(records)),), title))
            title, records, has_header = line.strip(), [], False
        elif not has_header:
            if line.strip() != COLUMNS:
                raise InputError(
                    f"{path}, line {number} is not the header of an AICB list: {line[:60]!r}", f"it is {COLUMNS}"
                )
            has_header = True
        elif line.strip():
            record = known.get(line)
            if record is None:
                record = known[line] = _record(line, f"{path}, line {number}")
            records.append(record)
    if not has_header:
        raise InputError(f"{path} holds no AICB list", f"its header is {COLUMNS}")
    return [*lists, RecordList((Stretch(tuple(records)),), title)]


_SHAPES = re.compile(r"\(\((\d+(?: \d+)*) ?\) \((\d+(?: \d+)*) ?\)\)$")


def _record(line: str, where: str) -> Record:
    words = line.split(",")
    if len(words) != 12:
        raise InputError(f"{where} has {len(words)} columns; an AICB list has 12")
    shapes = _SHAPES.match(words[3])
    size: int | float | Shapes | None
    size = (_shape(shapes[1]), _shape(shapes[2])) if shapes else _number(words[3], f"{where}: msg_size")
    if size is None:
        raise InputError(f"{where}: msg_size is None; a number of bytes is needed")
    return Record(
        _word(words[0], "CommType", KINDS, where),
        None if words[1] == "None" else _word(words[1], "CommGroup", GROUPS, where),
        _optional_whole(words[2], f"{where}: comm_group_size"),
        size,
        stage=words[4],
        destination=_optional_whole(words[5], f"{where}: dst"),
        source=_optional_whole(words[6], f"{where}: src"),
        additional=words[7],
        elapsed_ms=_number(words[8], f"{where}: _elapsed_time"),
        algorithm_bandwidth=_number(words[9], f"{where}: algbw"),
        bus_bandwidth=_number(words[10], f"{where}: busbw"),
        num_calls=_optional_whole(words[11], f"{where}: count") or 0,
    )


def _word(text: str, prefix: str, allowed: tuple[str, ...], where: str) -> str:
    word = text.removeprefix(f"{prefix}.")
    check_known(word, allowed, f"{where}: {text!r} is no {prefix} of AICB", f"one of {', '.join(allowed)}")
    return word


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _number(text: str, what: str) -> int | float | None:
    if text == "None":
        return None
    number = parse_number(text, what)
    return int(text) if text.isdigit() else number


def _optional_whole(text: str, what: str) -> int | None:
    number = _number(text, what)
    if isinstance(number, float):
        raise InputError(f"{what} is {text}; a whole number is needed")
    return number
