"""Read what nccl-tests and rccl-tests print (`all_reduce_perf`, ...): the time of a collective for every size.

Columns as in nccl-tests `src/common.cu`: size in bytes, count, type, operation, since 2.13 root; then out of place time
in microseconds, algorithm and bus bandwidth in GB/s, errors, and the same in place. Times out of place are taken.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.files import read_text
from windtunnel.model.operators import COLLECTIVES
from windtunnel.network.collectives.call import operation_named
from windtunnel.units import US

_NUMBER = r"[\d.]+(?:e[+-]?\d+)?"
_ROW = re.compile(
    rf"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+(?:-?\d+\s+)?({_NUMBER})\s+{_NUMBER}\s+{_NUMBER}\s+(\S+)(?:\s+\S+){{4}}\s*$"
)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[\S+\](.*)$")
_OWN_PROCESS = re.compile(r"#\s*nThread 1 nGpus 1\b")
_PROGRAM = re.compile(r"\b(\w+?)_perf")


@dataclass(frozen=True)
class NcclLog:
    """One run of a program of nccl-tests."""

    op: str
    """A name of `COLLECTIVES`."""
    num_ranks: int
    num_hosts: int
    gpu: str
    """As the driver names it."""
    seconds: dict[int, float]
    """Size in bytes, as nccl-tests counts -> time; the smallest where a size was repeated."""
    is_queued: bool = False
    """Whether each GPU had a process of its own, which queues its calls ahead and so hides the host's launch."""


def read_nccl_log(path: Path, op: str | None = None) -> NcclLog:
    """Read the output of one program; `op` says which it was, where the log does not. InputError where it is no such
    log, or cut off, it is of several kinds of GPU or programs, or its data were wrong."""
    lines = read_text(path).splitlines()
    ranks = [(int(match[1]), match[2], match[3].strip()) for line in lines if (match := _RANK.match(line))]
    if not ranks:
        raise InputError(f"{path} is no log of nccl-tests: no line says `# Rank 0 ... on HOST device 0 ...`")
    if sorted(rank for rank, *_ in ranks) != list(range(len(ranks))) or len(ranks) < 2:
        hint = "is it cut off? Processes that all call themselves rank 0 were built without MPI"
        raise InputError(f"{path} names {len(ranks)} ranks, which are not two or more from 0 on", hint)
    gpus = {gpu for *_, gpu in ranks}
    if len(gpus) > 1:
        raise InputError(f"{path} is of several kinds of GPU: {', '.join(sorted(gpus))}")
    seconds: dict[int, float] = {}
    for size_bytes, time_s in _rows(path, lines):
        seconds[size_bytes] = min(time_s, seconds.get(size_bytes, time_s))
    if not seconds:
        raise InputError(f"{path} has no row with a size above 0 and its times", "is it cut off?")
    is_queued, hosts = any(_OWN_PROCESS.match(line) for line in lines), {host for _, host, _ in ranks}
    named = {operation_named(name) for line in lines for name in _PROGRAM.findall(line)} & set(COLLECTIVES)
    if len(named) > 1 or (op and named - {op}):
        raise InputError(f"{path} is of {', '.join(sorted(named))}", "give the log of one program")
    if not named and op is None:
        raise InputError(
            f"{path} does not name its program", f"give --op: {', '.join(COLLECTIVES)}; its command line says which"
        )
    return NcclLog(op or named.pop(), len(ranks), len(hosts), gpus.pop(), seconds, is_queued)


def _rows(path: Path, lines: list[str]) -> Iterator[tuple[int, float]]:
    """Yield size and seconds of every row; sizes of 0 move nothing."""
    for number, line in enumerate(lines, 1):
        match = _ROW.match(line)
        if match is None:
            if re.match(r"\s*\d+\s+\d+\s+(float|double|half|bfloat16|u?int\d+|fp8\w*)\s", line):
                raise InputError(f"{path}, line {number}: the row has not all of its columns", "is it cut off?")
            continue
        size, time_us, wrong = match.groups()
        if re.fullmatch(r"[1-9]\d*", wrong):
            raise InputError(f"{path}, line {number}: {wrong} values were wrong, so that its time says nothing")
        if float(time_us) <= 0:
            raise InputError(f"{path}, line {number}: the time is {time_us} us")
        if int(size) > 0:
            yield int(size), float(time_us) * US
