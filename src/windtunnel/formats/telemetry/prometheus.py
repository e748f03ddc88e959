"""Read Prometheus metrics of an engine: its own text, a scrape a file, answers to a range query, Grafana's tables."""

import csv
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.formats.recognise import FileContent, documents_of, find_format
from windtunnel.formats.telemetry.logs import speculates
from windtunnel.formats.telemetry.record import INTERVAL, Buckets, ServerRecord
from windtunnel.schema import read_yaml
from windtunnel.units import format_count

TEXT = "Prometheus text"
SOURCE = "Prometheus metrics"
DECLARED: Mapping[str, Any] = read_yaml(Path(__file__).with_name("metrics.yaml"))
"""Engine -> measure -> its name, help and buckets; buckets by name."""
_SAMPLE = re.compile(
    r'^([A-Za-z_:][\w:]*|(?=\{))(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+(-?\d[\d.eE+]*))?\s*(?:#.*)?$'
)
"""Name, labels, value and time; OpenMetrics may have an exemplar behind them."""
_RENAMED = re.compile(r"(?:ray_)?(vllm|sglang)[:_]")
"""Beginning of an engine's names, also as Ray exports them (`ray_vllm_`), and where no colon may be in a name."""
_ENGINES = re.compile(r"^(?:\{.*?__name__=\")?(?:ray_)?(?:vllm|sglang)[:_]\w+[{\" ]", re.MULTILINE)
_GRAFANA = re.compile(rb'(?:\xef\xbb\xbf)?(?:sep=,\r?\n)?(?:"Time",|Time,.*(?:vllm|sglang)[:_])')
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_COUNTERS = ("prompt_tokens", "generation_tokens", "itl", "ttft")
_LENGTHS = {"input_tokens": "request_prompt", "output_tokens": "request_generation"}
LONGEST_ANSWER_BYTES = 1 << 28
LATEST_S = 1e11
"""The year 5138: larger times are in milliseconds, as Prometheus's text has them; OpenMetrics has seconds."""

Sample = tuple[str, Mapping[str, str], float]


@cache
def _measures() -> dict[str, str]:
    """Return name of a metric, present or former -> measure."""
    names: dict[str, str] = {}
    for engine in ("vllm", "sglang", "twin"):
        for measure, about in DECLARED[engine].items():
            names |= dict.fromkeys([about["name"], *about.get("former", ())], measure)
    names["process_start_time_seconds"] = "started_s"
    # Both names of the time between tokens are exported in some versions, with the same values.
    return names | {name: "itl" for name, measure in names.items() if measure == "itl_before"}


@dataclass
class Scrape:
    """The metrics of one moment, all engines together."""

    time_s: float
    values: dict[str, float] = field(default_factory=dict)
    """Measure -> value; of a histogram its count as `MEASURE.count` and its sum as `MEASURE.sum`."""
    buckets: dict[str, dict[float, float]] = field(default_factory=lambda: defaultdict(dict))
    """Measure -> bound -> values up to it."""
    num_engines: int = 1
    capacity_tokens: float = math.nan
    """Tokens that the KV caches hold."""
    is_sglang: bool = False
    model: str = ""
    other: str = ""
    """Name of a metric of something else that is known."""
    counters: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Measure and labels -> value of what only a restart lets fall."""


def scrape_of(samples: Iterable[Sample], time_s: float) -> Scrape:
    """Return the sums over all engines of the measures that are known; InputError for metrics of two models."""
    scrape, seen = Scrape(time_s), dict[str, tuple[str, bool]]()
    engines, models = set(), set()
    capacity_tokens = 0.0
    every = list(samples)
    scrape.other = next((name for name, *_ in every if _other(name)), "")
    # The router of vLLM's production stack repeats its engines' under their names.
    every = [(name, labels, value) for name, labels, value in every if "server" not in labels or "model_name" in labels]
    has_engine = any(_RENAMED.match(name) for name, *_ in every)
    for exported, labels, value in every:
        name = _RENAMED.sub(r"\1:", exported)
        # NIM 1 has vLLM's names without their beginning.
        base, measure, part = _measure_of(name) if has_engine else _measure_of(f"vllm:{name}", name)
        origin = base, exported.startswith("ray_")
        if measure is None or not math.isfinite(value) or seen.setdefault(measure, origin) != origin:
            continue
        if measure == "cache":
            sizes = [labels.get(key, "") for key in ("num_gpu_blocks", "block_size")]
            capacity_tokens += math.prod(float(size) if size.isdecimal() else math.nan for size in sizes)
            continue
        models.add(labels.get("model_name", ""))
        scrape.is_sglang |= name.startswith("sglang:")
        if measure == "running":
            engines.add(tuple(sorted(labels.items())))
        if measure in _COUNTERS and part in ("", "count"):
            scrape.counters[measure, *map("=".join, sorted(labels.items()))] = value
        if part == "bucket":
            bound = float(labels.get("le", "nan"))
            scrape.buckets[measure][bound] = scrape.buckets[measure].get(bound, 0.0) + value
        else:
            key = f"{measure}.{part}" if part else measure
            scrape.values[key] = scrape.values.get(key, 0.0) + value
    if len(models - {""}) > 1:
        raise InputError(f"metrics of two models: {' and '.join(sorted(models - {''})[:2])}", "scrape one server")
    scrape.model = next(iter(models - {""}), "")
    scrape.num_engines, scrape.capacity_tokens = max(len(engines), 1), capacity_tokens or math.nan
    return scrape


def _measure_of(*names: str) -> tuple[str, str | None, str]:
    """Return a metric's name without the part of a histogram, its measure, None where it is not known, and the part."""
    for name in names:
        base, _, part = name.rpartition("_")
        if (measure := _measures().get(name)) is not None:
            return name, measure, ""
        if (measure := _measures().get(base)) is not None:
            return base, measure, part
    return names[-1], None, ""


@cache
def _other(name: str) -> Mapping[str, str] | None:
    """Return what is known of a metric that is not read: whose it is, and what to give in its place."""
    return next((other for other in DECLARED["others"] if re.match(other["names"], name)), None)


def parse_text(text: str) -> Iterator[tuple[str, dict[str, str], float, float]]:
    """Yield name, labels, value and time in seconds, NaN where there is none, of every sample of a text."""
    for line in text.splitlines():
        if line and not line.startswith("#") and (found := _SAMPLE.match(line)):
            name, inner, value, stamp = found.groups()
            try:
                number, time_s = float(value), float(stamp or "nan")
            except ValueError:
                continue
            labels = dict(_LABEL.findall(inner or ""))
            # `promtool tsdb dump` writes the name as a label.
            yield name or labels.pop("__name__", ""), labels, number, time_s * (1e-3 if time_s > LATEST_S else 1.0)


def scrape_text(text: str, time_s: float) -> Scrape:
    """Return the scrape that a text holds, at its own time or that of a twin, and else at `time_s`."""
    samples = list(parse_text(text))
    scrape = scrape_of(((name, labels, value) for name, labels, value, _ in samples), time_s)
    stamps = [stamp for *_, stamp in samples if not math.isnan(stamp)]
    scrape.time_s = scrape.values.get("seconds", max(stamps, default=time_s))
    return scrape


def scrapes_of(series: Mapping[Any, Sequence[tuple[float, float]]]) -> list[Scrape]:
    """Return scrapes at the moments of the engines' longest series.

    Targets are scraped at moments of their own: every series counts with its last value that is younger than its usual
    time between two.

    Args:
        series: name and labels, as pairs -> times in seconds and values.
    """
    engines = [points for (name, *_), points in series.items() if _RENAMED.match(name)]
    longest = max(engines or series.values(), key=len)
    moments: dict[float, list[Sample]] = {time_s: [] for time_s in sorted({time_s for time_s, _ in longest})}
    for (name, *labels), points in series.items():
        times_s, values = np.array(sorted(points)).T
        gaps_s = np.diff(times_s if times_s.size > 1 else [*moments])
        usual_s = float(np.median(gaps_s)) if gaps_s.size else math.inf
        places = np.searchsorted(times_s, list(moments), "right") - 1
        for (moment_s, samples), place in zip(moments.items(), places, strict=True):
            if place >= 0 and moment_s - times_s[place] < usual_s:
                samples.append((name, dict(labels), float(values[place])))
    return [scrape_of(samples, time_s) for time_s, samples in moments.items()]


def record_of(scrapes: Sequence[Scrape]) -> ServerRecord:
    """Return what happened between scrapes; of a single one, since the server's start.

    Intervals in which a server was restarted, came or went are left out, and a note says so. InputError for no time
    between scrapes, or none of an engine's metrics.
    """
    ordered = sorted(scrapes, key=lambda scrape: scrape.time_s)
    last = ordered[-1]
    if not any(scrape.values.keys() - {"started_s"} for scrape in ordered):
        if (other := _other(next((scrape.other for scrape in ordered if scrape.other), ""))) is not None:
            raise InputError(f"these metrics are {other['of']}, and {other['lack']}", other["hint"])
        raise InputError("these metrics are of no engine that is known", "its names begin with vllm: or sglang:")
    if len(ordered) == 1:
        ordered.insert(0, Scrape(last.values.get("started_s", 0.0 if "seconds" in last.values else math.nan)))
    timed = [(one, two) for one, two in pairwise(ordered) if two.time_s > one.time_s]
    pairs = [pair for pair in timed if not _restarted(*pair)]
    if not timed:
        raise InputError("no time passes between these metrics", "give scrapes of several moments, or a range query")
    if not pairs:
        raise InputError("a server was restarted, came or went between any two of these metrics", "scrape more often")
    if any(last.values.get(measure, 0.0) > 0 for measure in ("drafts", "accept_length")):
        raise speculates(SOURCE)
    lengths = {name: known for name, measure in _LENGTHS.items() if (known := _lengths(pairs, measure)) is not None}
    rows = np.array([_interval(*pair) for pair in pairs], INTERVAL)

    def histograms(measure: str) -> tuple[Floats, Floats] | None:
        bounds = sorted(last.buckets.get(measure, ()))
        counts = np.array([_bucket_counts(*pair, measure, bounds) for pair in pairs])
        return (np.array(bounds), counts) if bounds else None

    left_out = format_count(len(timed) - len(pairs), "interval")
    notes = [f"{left_out} left out: a server was restarted, came or went"] if len(pairs) < len(timed) else []
    steps, gaps = histograms("iteration"), histograms("itl")
    record = ServerRecord(SOURCE, rows, last.num_engines, steps, gaps, lengths, prompts_apart=last.is_sglang)
    return replace(record, notes=notes, engine="sglang" if last.is_sglang else "vllm", model=last.model)


def _restarted(before: Scrape, after: Scrape) -> bool:
    """Whether a server was restarted, came or went: sums over several servers would count what others did before."""
    if not before.counters:
        return False
    is_other = before.counters.keys() != after.counters.keys()
    is_later = "started_s" in before.values and before.values["started_s"] != after.values.get("started_s")
    return is_other or is_later or any(after.counters[key] < value for key, value in before.counters.items())


def _interval(before: Scrape, after: Scrape) -> tuple[float, ...]:
    """Return the values of `INTERVAL` between two scrapes."""

    def more(name: str, missing: float = 0.0) -> float:
        return after.values[name] - before.values.get(name, 0.0) if name in after.values else missing

    def mean(name: str) -> float:
        ends = [scrape.values[name] for scrape in (before, after) if name in scrape.values]
        return sum(ends) / len(ends) if ends else math.nan

    kv_use = mean("kv_use") / after.num_engines
    running = mean("running")
    context = kv_use * after.capacity_tokens / running if running else math.nan
    return (
        before.time_s, after.time_s - before.time_s, more("ttft.count"), more("prompt_tokens"), more("cache_hits"),
        more("generation_tokens"), more("itl.count"), more("itl.sum"), more("iteration.count", math.nan), running,
        mean("waiting"), context, math.nan,
    )  # fmt: skip


def _lengths(pairs: Sequence[tuple[Scrape, Scrape]], measure: str) -> Buckets | None:
    """Return the histogram of lengths over intervals; None where no request ended."""
    bounds = sorted({bound for _, after in pairs for bound in after.buckets.get(measure, ())})
    counts = sum((_bucket_counts(*pair, measure, bounds) for pair in pairs), np.zeros(len(bounds)))
    count, tokens = (
        sum(after.values.get(name, 0.0) - before.values.get(name, 0.0) for before, after in pairs)
        for name in (f"{measure}.count", f"{measure}.sum")
    )
    return Buckets(tuple(bounds), tuple(counts.tolist()), tokens / count) if count and counts.any() else None


def _bucket_counts(before: Scrape, after: Scrape, measure: str, bounds: Sequence[float]) -> Floats:
    ends = [[scrape.buckets.get(measure, {}).get(bound, 0.0) for bound in bounds] for scrape in (before, after)]
    return np.maximum(np.diff(np.subtract(ends[1], ends[0]), prepend=0.0), 0.0)


def is_text(file: FileContent) -> bool:
    """Whether a file holds metrics as text, of an engine where no help says that they are metrics."""
    head = file.start.decode("utf-8", "replace")
    if head.startswith(("# HELP ", "# TYPE ")):
        return True
    sample = _SAMPLE.match(head.partition("\n")[0])
    if sample is not None and (_measure_of(f"vllm:{sample[1]}")[1] or _other(sample[1])):
        return True
    return (head.startswith("# ") or sample is not None) and _ENGINES.search(file.text) is not None


def read_scrape(path: Path) -> Scrape:
    """Read one scrape; without a time in it, the file's last change is its time; InputError for several in one file."""
    text = FileContent(path).text
    names = [(name, *sorted(labels.items())) for name, labels, *_ in parse_text(text)]
    if len(set(names)) < len(names):
        raise InputError(f"{path} holds several scrapes", "a folder with a file for each is read")
    return scrape_text(text, path.stat().st_mtime)


def read_text_file(path: Path) -> ServerRecord:
    """Read one scrape, as counted since the server's start, or a dump of many moments, in which series repeat."""
    series: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for name, labels, value, time_s in parse_text(FileContent(path).text):
        series[name, *sorted(labels.items())].append((time_s, value))
    is_dump = any(len(points) > 1 and not math.isnan(points[0][0]) for points in series.values())
    return record_of(scrapes_of(series) if is_dump else [read_scrape(path)])


def read_scrapes(folder: Path) -> ServerRecord:
    """Read the scrapes of a folder; a note names what is none, as where a scrape has failed. InputError for no scrape,
    or a file of another kind that is known."""
    scrapes, failed = list[Scrape](), list[InputError]()
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")):
        try:
            known = find_format(path, "server telemetry").name
        except InputError as error:
            failed.append(error)
            continue
        if known != TEXT:
            raise InputError(f"{path} is no scrape", f"a folder holds files of {TEXT}; give other files alone")
        scrapes.append(read_scrape(path))
    if not scrapes:
        empty = InputError(f"{folder} is empty", "a folder of scrapes, or of runs with runs.csv, is needed")
        raise failed[0] if failed else empty
    record, num_files = record_of(scrapes), format_count(len(scrapes) + len(failed), "file")
    notes = [f"{len(failed)} of {num_files} left out: {failed[0].message}"] if failed else []
    return replace(record, notes=[*notes, *record.notes])


def is_series(file: FileContent) -> bool:
    """Whether a file is an answer of Prometheus, or of VictoriaMetrics's `/api/v1/export`, a series a line."""
    return file.is_json and _are_series(file.documents)


def _are_series(documents: Sequence[Any]) -> bool:
    first = documents[0] if documents and isinstance(documents[0], dict) else {}
    data = first.get("data")
    is_answer = "errorType" in first or (isinstance(data, dict) and "resultType" in data)
    return (is_answer and len(documents) == 1) or {"metric", "values", "timestamps"} <= first.keys()


def read_series(path: Path) -> ServerRecord:
    """Read the saved answer of `/api/v1/query_range`, or of `/api/v1/export`."""
    return _record_of_series(FileContent(path).documents, str(path))


def _record_of_series(documents: Sequence[Any], where: str) -> ServerRecord:
    if "metric" not in (document := documents[0]):
        if "errorType" in document:
            raise InputError(f"{where} is an error of Prometheus: {document.get('error')}", "mend the query")
        if (kind := document["data"]["resultType"]) != "matrix":
            raise InputError(f"{where} holds a {kind} and no range", "give .../api/v1/query_range?query=...")
        documents = document["data"]["result"]
    series: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    try:
        for each in documents:
            labels = dict(each["metric"])
            name, values = labels.pop("__name__"), each["values"]
            if (stamps_ms := each.get("timestamps")) is not None:
                values = [(stamp * 1e-3, value) for stamp, value in zip(stamps_ms, values, strict=True)]
            # VictoriaMetrics writes null for NaN.
            points = [(float(time_s), float(value)) for time_s, value in values if value is not None]
            series[name, *sorted(labels.items())] += points
    except (KeyError, TypeError, ValueError) as error:
        hint = 'query the metrics themselves, for instance {__name__=~"vllm:.*"}, not a rate of them'
        raise InputError(f"{where} lacks or misstates {error}", hint) from None
    if not any(series.values()):
        raise InputError(f"{where} has no series", "no metric matched the query in that time")
    return record_of(scrapes_of({each: points for each, points in series.items() if points}))


def is_grafana(file: FileContent) -> bool:
    """Whether a file is a table as Grafana's inspector saves it."""
    return _GRAFANA.match(file.start) is not None


def read_grafana(path: Path) -> ServerRecord:
    """Read a table of metrics themselves, a series a column, as "Series joined by time" has them.

    Source: https://grafana.com/docs/grafana/latest/explore/explore-inspector. InputError where its columns are derived
    from metrics, or its values have units.
    """
    hint = 'query {__name__=~"vllm:.*"} itself in Explore, and save "Series joined by time" without "Formatted data"'
    lines = FileContent(path).text.removeprefix("\ufeff").removeprefix("sep=,").splitlines()
    moments, *columns = zip(*csv.reader(line for line in lines if line.strip()), strict=False)
    series: dict[Any, list[tuple[float, float]]] = {}
    try:
        times_s = [float(at) * 1e-3 if at.isdecimal() else datetime.fromisoformat(at).timestamp() for at in moments[1:]]
        for column, *texts in columns:
            name, labels, *_ = next(parse_text(f"{column} 0"), ("", {}))
            if _measure_of(f"vllm:{name}", _RENAMED.sub(r"\1:", name))[1] is not None:
                points = zip(times_s, texts, strict=False)
                known = [(time_s, float(text)) for time_s, text in points if text not in ("", "null", "undefined")]
                series |= {(name, *sorted(labels.items())): known} if known else {}
    except ValueError as error:
        raise InputError(f"{path} misstates a time or value: {error}", hint) from None
    if not series:
        names = ", ".join(column[0] for column in columns[:2])
        raise InputError(f"{path} has no metric of an engine itself: its columns are {names}", hint)
    return record_of(scrapes_of(series))


def poll(url: str, seconds: float, every_s: float, progress: Callable[[int, int], None] | None = None) -> ServerRecord:
    """Scrape a live server for some time, or ask a Prometheus server once, if `url` is a range query or an export.

    Scrapes that fail later than the first one, and Ctrl-C once there are two, cost nothing of what was read; notes of
    the record tell of them. `progress` is called after each scrape with the seconds so far and those in all. InputError
    for no answer, or one that holds no metrics of an engine.
    """
    text = answer_of(url)
    if text.lstrip().startswith("{"):
        return _record_of_answer(text, url)
    started_s, notes = time.monotonic(), list[str]()
    scrapes, failures = [_scrape_of_answer(text, url)], list[str]()
    try:
        while (left_s := started_s + seconds - time.monotonic()) > 0 or not (failures or scrapes[1:]):
            time.sleep(min(every_s, max(left_s, 0.05)))
            try:
                scrapes.append(_scrape_of_answer(answer_of(url), url))
            except InputError as error:
                failures.append(error.message)
            if progress is not None:
                progress(int(min(time.monotonic() - started_s, seconds)), int(seconds))
    except KeyboardInterrupt:
        if not scrapes[1:]:
            raise
        notes.append(f"ended after {time.monotonic() - started_s:.0f} of {seconds:g} s")
    num_scrapes = format_count(len(scrapes) + len(failures), "scrape")
    if not scrapes[1:]:
        raise InputError(f"only the first of {num_scrapes} was answered: {failures[-1]}", "is the server still there?")
    if failures:
        notes.append(f"{len(failures)} of {num_scrapes} failed, the last one as {failures[-1]}")
    record = record_of(scrapes)
    return replace(record, notes=[*notes, *record.notes])


def _scrape_of_answer(text: str, url: str) -> Scrape:
    if next(parse_text(text), None) is None:
        raise InputError(f"{url} answers no Prometheus metrics", "is it http://HOST:PORT/metrics?")
    return scrape_text(text, time.time())


def _record_of_answer(text: str, url: str) -> ServerRecord:
    documents = documents_of(text)
    if not _are_series(documents):
        raise InputError(f"{url} answers JSON that is no range query", "give .../api/v1/query_range?query=...")
    return _record_of_series(documents, url)


def answer_of(url: str) -> str:
    """Return the text of a URL; raises InputError where there is none."""
    # Loading urllib.request takes 30 ms, and few runs need it.
    from http.client import HTTPException
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=10) as answer:
            return str(answer.read(LONGEST_ANSWER_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError, HTTPException) as error:
        raise InputError(
            f"{url} does not answer: {getattr(error, 'reason', error)}", "is it http://HOST:PORT/metrics?"
        ) from None
