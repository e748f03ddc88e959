"""Read vLLM's log: a line every ten seconds with throughput and requests under way."""

import re
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from windtunnel.errors import InputError
from windtunnel.formats.recognise import FileContent
from windtunnel.formats.telemetry.record import INTERVAL, ServerRecord

_LINE = re.compile(
    r"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d) .*?(?:Engine (?P<engine>\d+): )?"
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs,.*? Waiting: (?P<waiting>\d+) reqs,"
    r".*?GPU KV cache usage: (?P<kv>[\d.]+)%(?:.*?Prefix cache hit rate: (?P<hits>[\d.]+)%)?"
)
"""vllm/v1/metrics/loggers.py (0.8 to 0.24), and vllm/engine/metrics.py before it."""
_CAPACITY = re.compile(r"GPU KV cache size: ([\d,]+) tokens")


def read_log(path: Path) -> ServerRecord:
    """Read intervals between lines; the time between tokens is that of the running requests over what they gave.

    The logged hit rate is of the last thousand queries, and holds for the interval here.

    Raises:
        InputError: fewer than two lines.
    """
    text = FileContent(path).text
    lines = [found.groupdict() for found in _LINE.finditer(text)]
    engines = sorted({line["engine"] or "0" for line in lines})
    capacity = _CAPACITY.search(text)
    tokens = float(capacity[1].replace(",", "")) if capacity else np.nan
    rows = []
    for engine in engines:
        own = [line for line in lines if (line["engine"] or "0") == engine]
        # The log has no year; 2000 has all days.
        times_s = [datetime.strptime(f"2000-{line['time']}", "%Y-%m-%d %H:%M:%S").timestamp() for line in own]
        for (begin_s, end_s), (before, after) in zip(pairwise(times_s), pairwise(own), strict=True):
            if end_s > begin_s:
                rows.append(_interval(begin_s, end_s - begin_s, before, after, tokens))
    if not rows:
        raise InputError(f"{path} has fewer than two lines on throughput of one engine", "it logs every 10 s")
    # Engines log apart: their intervals are not added up.
    return ServerRecord("vLLM log", np.array(rows, INTERVAL), is_estimated=True)


def _interval(
    start_s: float, duration_s: float, before: dict[str, str], after: dict[str, str], capacity_tokens: float
) -> tuple[float, ...]:
    """Return the values of `INTERVAL`; gauges are means of both ends."""
    running, waiting, kv = ((float(before[name]) + float(after[name])) / 2 for name in ("running", "waiting", "kv"))
    prompt_tokens, generation = (float(after[name]) * duration_s for name in ("prompt", "generation"))
    cached = prompt_tokens * float(after["hits"] or 0) / 100
    context = kv / 100 * capacity_tokens / running if running else np.nan
    return (
        start_s, duration_s, np.nan, prompt_tokens, cached, generation, generation, running * duration_s, np.nan,
        running, waiting, context, np.nan,
    )  # fmt: skip
