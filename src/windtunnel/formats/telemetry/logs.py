"""Read engines' logs: vLLM's line every ten seconds, and SGLang's of each prompt batch and of 40 decode steps."""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from windtunnel.errors import InputError
from windtunnel.files import read_bytes
from windtunnel.formats.recognise import FileContent
from windtunnel.formats.telemetry.record import INTERVAL, ServerRecord

_TIME = re.compile(r"(\d{4}-)?\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
"""Of vLLM, which leaves out the year, of SGLang, or of what wraps their lines: JSON, Dynamo, `kubectl logs`."""
_LINE = re.compile(
    r"(?:Engine (?P<engine>\d+): |(?P<engines>\d+) Engines Aggregated: )?"
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs,.*? (?:Waiting|Pending): (?P<waiting>\d+) reqs,"
    r".*?GPU KV cache usage: (?P<kv>[\d.]+)%(?:.*?Prefix cache hit rate: (?P<hits>[\d.]+)%)?"
)
"""vllm/v1/metrics/loggers.py (0.8 to 0.24), and vllm/engine/metrics.py before it, which calls waiting requests pending.
A line of `--aggregate-engine-logging` has the sums of requests and tokens, and the mean of the KV caches."""
_DRAFTED = re.compile(r"Drafted: [1-9]|Number of draft tokens: [1-9]")
_MODEL = re.compile(r"\bmodel(?:_path)?='([^'\n]+)'")
"""Of vLLM's line on its configuration, and SGLang's `server_args=`."""
_CAPACITY = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_BATCH = re.compile(r"(?P<kind>Prefill|Decode) batch(?: \[\d+\])?[.,] (?P<values>#[^\n]*)")
"""sglang/srt/managers/scheduler.py (0.4), sglang/srt/managers/scheduler_metrics_mixin.py (0.5) and
sglang/srt/observability/scheduler_metrics_mixin.py."""
_VALUE = re.compile(r"([#\w][\w ()/-]*): ([\d.]+)")
_PROCESS = re.compile(r"^\[pod/\S+\]|^\S+ +\||\bpid=\d+|\b[DTPE]P\d+\b")
"""Pod of `kubectl logs --prefix`, container of `docker compose logs`, process and rank: one log may have several."""
_DECODE_STEPS = re.compile(r"decode_log_interval['\"]?[=:] ?(\d+)")
DECODE_STEPS = 40
"""SGLang's default of `--decode-log-interval`: decode steps between two lines."""


def text_of(path: Path) -> str:
    """Return a log's text; bytes that are no text, as a request may bring them in, are replaced."""
    return read_bytes(path).decode("utf-8", "replace")


def is_log(pattern: str) -> Callable[[FileContent], bool]:
    """Return a test of files: whether they are text in which a line matches."""
    return lambda file: b"\0" not in file.start and bool(re.search(pattern, file.text or text_of(file.path)))


def read_log(path: Path) -> ServerRecord:
    """Read intervals between lines; the time between tokens is that of the running requests over what they gave.

    The logged hit rate is of the last thousand queries, and holds for the interval here. InputError for fewer than two
    lines.
    """
    text = text_of(path)
    if _DRAFTED.search(text):
        raise speculates(path)
    engines: dict[str, list[tuple[float, dict[str, str]]]] = {}
    for time_s, process, line in _lines(_LINE, text):
        engines.setdefault(f"{process} {line['engine']}", []).append((time_s, line))
    capacity = _CAPACITY.search(text)
    tokens = float(capacity[1].replace(",", "")) if capacity else np.nan
    rows = [
        _interval(begin_s, end_s - begin_s, before, after, tokens)
        for lines in engines.values()
        for (begin_s, before), (end_s, after) in pairwise(lines)
        if end_s > begin_s
    ]
    if not rows:
        hint = "it logs every 10 s, with a date and a time; --disable-log-stats leaves these lines out"
        raise InputError(f"{path} has fewer than two lines on throughput of one engine", hint)
    # Engines log apart, and their intervals are not added up, unless one line has all of them.
    together = max(int(line["engines"] or 1) for lines in engines.values() for _, line in lines)
    intervals = np.sort(np.array(rows, INTERVAL), order="start_s")
    model = (_MODEL.findall(text) or [""])[0]
    return ServerRecord("vLLM log", intervals, together, is_estimated=True, engine="vllm", model=model)


def speculates(where: Path | str) -> InputError:
    """Return the refusal of what a server that decodes speculatively has emitted."""
    hint = "start it without; `windtunnel diagnose` takes requests of one that speculates, as bench records them"
    return InputError(f"{where} is of a server that speculates: steps of drafts are not priced", hint)


def _lines(pattern: re.Pattern[str], text: str) -> Iterator[tuple[float, str, dict[str, str]]]:
    """Yield time in seconds, process, and groups of a pattern of lines; lines without a time are passed over."""
    for found in pattern.finditer(text):
        end = text.find("\n", found.end())
        line = text[text.rfind("\n", 0, found.start()) + 1 : None if end < 0 else end]
        if at := _TIME.search(line):
            # A date without its year is one of 2000, which has all days.
            date = at[0].replace(",", ".") if at[1] else f"2000-{at[0]}"
            yield datetime.fromisoformat(date).timestamp(), " ".join(_PROCESS.findall(line)), found.groupdict()


def _interval(
    start_s: float, duration_s: float, before: dict[str, str], after: dict[str, str], capacity_tokens: float
) -> tuple[float, ...]:
    """Return the values of `INTERVAL`; gauges are means of both ends."""
    running, waiting, kv = ((float(before[name]) + float(after[name])) / 2 for name in ("running", "waiting", "kv"))
    prompt_tokens, generation = (float(after[name]) * duration_s for name in ("prompt", "generation"))
    cached = prompt_tokens * float(after["hits"] or 0) / 100
    context = kv / 100 * capacity_tokens * int(after["engines"] or 1) / running if running else np.nan
    return (
        start_s, duration_s, np.nan, prompt_tokens, cached, generation, generation, running * duration_s, np.nan,
        running, waiting, context, np.nan,
    )  # fmt: skip


def read_sglang_log(path: Path) -> ServerRecord:
    """Read intervals between lines on decoding, one or more a second, with the prompt batches logged in each.

    Times in the log are whole seconds, so that an interval's length follows from its steps: each gives a token to every
    running request. Where a prompt batch found no request running, the server was idle before it, and the interval
    tells nothing of the time between tokens. InputError for fewer than two lines on decoding, or a server that
    speculates.
    """
    text = text_of(path)
    steps = int(found[1]) if (found := _DECODE_STEPS.search(text)) else DECODE_STEPS
    ranks: dict[str, list[tuple[float, str, dict[str, str]]]] = {}
    for time_s, rank, batch in _lines(_BATCH, text):
        values = {name.replace("full token", "token"): value for name, value in _VALUE.findall(batch["values"])}
        if "accept len" in values:
            raise speculates(path)
        ranks.setdefault(rank, []).append((time_s, batch["kind"], values))
    try:
        rows = [row for lines in ranks.values() for row in _decode_intervals(lines, steps)]
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: a line lacks or misstates {error}", "is the log cut off or edited?") from None
    if not rows:
        hint = f"SGLang logs one every {steps} decode steps; give the log of one that decodes"
        raise InputError(f"{path} has fewer than two lines on decoding", hint)
    intervals = np.sort(np.array(rows, INTERVAL), order="start_s")
    model = (_MODEL.findall(text) or [""])[0]
    return ServerRecord("SGLang log", intervals, prompts_apart=True, is_estimated=True, engine="sglang", model=model)


def _decode_intervals(lines: Sequence[tuple[float, str, dict[str, str]]], steps: int) -> Iterator[tuple[float, ...]]:
    """Yield the values of `INTERVAL` between two lines on decoding of one rank; gauges are means of both ends."""
    before_s, before, batches = np.nan, dict[str, str](), list[dict[str, str]]()
    for time_s, kind, values in lines:
        if kind == "Prefill":
            batches.append(values)
            continue
        if before:
            running, waiting, tokens = (
                (float(before[name]) + float(values[name])) / 2 for name in ("#running-req", "#queue-req", "#token")
            )
            rate = float(values["gen throughput (token/s)"])
            prompts, computed, cached = (
                sum(float(batch[name]) for batch in batches) for name in ("#new-seq", "#new-token", "#cached-token")
            )
            is_busy = running > 0 < rate and all(float(batch["#running-req"]) > 0 for batch in batches)
            duration_s = steps * running / rate if is_busy else time_s - before_s
            gaps = rate * duration_s
            yield (
                before_s, duration_s, prompts, computed + cached, cached, gaps + prompts, gaps if is_busy else 0.0,
                running * duration_s if is_busy else 0.0, np.nan, running, waiting,
                tokens / running if running else np.nan, np.nan,
            )  # fmt: skip
        before_s, before, batches = time_s, values, []
