"""Measurements of a server at one load or several: for people, as JSON, and under the names of `vllm bench serve`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.files import new_files
from windtunnel.metrics.client import ClientSummary, gaps_of
from windtunnel.metrics.limits import Slo
from windtunnel.metrics.records import Table as Records
from windtunnel.metrics.summary import queue_growth
from windtunnel.report.chart import Axis, Chart, Series
from windtunnel.report.comparison import ComparedRun
from windtunnel.report.layout import cards_of, filled, layouts_beside, rows_of
from windtunnel.report.numbers import number, quantity
from windtunnel.report.render.json import version
from windtunnel.report.report import Cards, Cell, Facts, Figures, Report, Section, Table
from windtunnel.report.serving.run import latency_table, limit_cards
from windtunnel.schema import encode, json_text, save
from windtunnel.search.capacity.probe import MOST_GROWTH
from windtunnel.serving.scenario import Scenario
from windtunnel.workload.arrivals import Arrivals, Static

LAYOUT = layouts_beside(__file__)


def bench_report(summary: ClientSummary, about: Mapping[str, str], slo: Slo | None = None) -> Report:
    """Return the report of a client's measurements: latencies and throughput, as of a simulation."""
    remarks = [(name, text) for name, text in about.items() if text and name not in ("model", "endpoint")]
    facts = Facts([*rows_of(summary, LAYOUT["facts"]), *remarks])
    cards = Cards([*limit_cards(summary, slo), *cards_of(summary, LAYOUT["cards"]).facts])
    section = Section("", [cards, latency_table(summary), facts], "Measured by the client")
    title = f"{about['model']} at {about['endpoint']}"
    text, is_held = filled(LAYOUT["headline"], summary), summary.goodput.is_held if summary.goodput else None
    if is_held and summary.num_failed:
        is_held = None
    if is_held is not None:
        text = f"{'Holds' if is_held else 'Breaks'} the SLO: {text.removeprefix('Measured: ')}"
    return Report(title, [], [section], verdict=text, is_good=is_held)


def bench_document(summary: ClientSummary, about: Mapping[str, str], scenario: Scenario) -> dict[str, Any]:
    """Document a client's measurements."""
    return {"windtunnel": version(), **about, "scenario": encode(scenario), "summary": encode(summary)}


def vllm_document(
    summary: ClientSummary, requests: Records, tokens: Records, arrivals: Arrivals | None, model: str
) -> dict[str, Any]:
    """Document a run as `vllm bench serve --save-result --save-detailed` (vLLM 0.10 to 0.32) does; milliseconds.

    Its percentiles are those of the requests' own times, its throughputs over the span from the first sending.
    """
    gap_cv = 0.0 if isinstance(arrivals, Static) else getattr(arrivals, "cv", 1.0)
    measured = ~requests["is_warmup"]
    rows = np.flatnonzero(measured)
    answered = requests.where(measured & ~requests["failed"])
    document: dict[str, Any] = {
        "model_id": model,
        "num_prompts": int(measured.sum()),
        "request_rate": getattr(arrivals, "rate_per_s", None) or "inf",
        "burstiness": "inf" if gap_cv == 0 else gap_cv**-2,
        "max_concurrency": getattr(arrivals, "concurrency", None),
        "duration": summary.span_s,
        "completed": summary.num_requests,
        "failed": summary.num_failed,
        "total_input_tokens": int(answered["input_tokens"].sum()),
        "total_output_tokens": int(answered["output_tokens"].sum()),
        "request_throughput": summary.requests_per_s,
        "output_throughput": summary.output_tokens_per_s,
        "total_token_throughput": summary.total_tokens_per_s,
    }
    values = {
        "ttft": answered["ttft_s"],
        "tpot": answered["tpot_s"][np.isfinite(answered["tpot_s"])],
        "itl": gaps_of(requests, tokens),
        "e2el": answered["e2e_s"],
    }
    for name, seconds in values.items():
        ms = seconds * 1e3 if seconds.size else np.zeros(1)
        document |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
        document |= {f"std_{name}_ms": float(ms.std())}
        document |= {f"p{share}_{name}_ms": float(np.percentile(ms, share)) for share in (90, 99)}
    starts, ends = (np.searchsorted(tokens["request"], rows, side=side) for side in ("left", "right"))
    document["input_lens"] = requests["input_tokens"][rows].tolist()
    document["output_lens"] = requests["output_tokens"][rows].tolist()
    document["ttfts"] = np.nan_to_num(requests["ttft_s"][rows]).tolist()
    parts = (tokens["time_s"][a:b] for a, b in zip(starts, ends, strict=True))
    document["itls"] = [np.diff(times).tolist() for times in parts]
    document["start_times"] = requests["arrival_s"][rows].tolist()
    return document


def write_bench(
    folder: Path, requests: Records, tokens: Records, document: Mapping[str, Any], scenario: Scenario
) -> None:
    """Write records, summary and scenario to `folder`, all or none; InputError where it cannot be written to."""
    with new_files(folder) as draft:
        requests.write_parquet(draft / "requests.parquet")
        tokens.write_parquet(draft / "tokens.parquet")
        (draft / "summary.json").write_text(json_text(document) + "\n", encoding="utf-8")
        save(scenario, draft / "scenario.yaml")


FIGURES: Mapping[str, str] = LAYOUT["figures"]
SATURATED = 0.95
"""Share of the largest output from which more clients are taken to add nothing."""


@dataclass(frozen=True, eq=False)
class Level:
    """One load, measured, and predicted where the deployment is described."""

    load: float
    measured: ComparedRun
    predicted: ComparedRun | None = None


@dataclass(frozen=True, eq=False)
class Sweep:
    """Loads of one server, ascending."""

    kind: str
    """`rate` in requests/s, or `concurrency`."""
    levels: Sequence[Level]

    @property
    def columns(self) -> tuple[list[float], list[ComparedRun], list[ComparedRun]]:
        """Return the loads, the measured and the predicted runs; the last are none or all."""
        predicted = [level.predicted for level in self.levels if level.predicted is not None]
        return [level.load for level in self.levels], [level.measured for level in self.levels], predicted


def saturation(kind: str, loads: Sequence[float], runs: Sequence[ComparedRun]) -> float | None:
    """Return the largest load that a server keeps up with; None where it keeps up with none, or with all.

    With a rate, the queue grows from the load on at which TTFT, fitted by a line, rises by more than `MOST_GROWTH` of
    the elapsed time, as in `windtunnel capacity`; nor does a server keep up with a load at which requests fail. With
    clients, the load is the first with `SATURATED` of the largest output.
    """
    if kind == "concurrency":
        outputs = [run.entry.figures["output_tokens_per_s"] for run in runs]
        first = next(place for place, output in enumerate(outputs) if output >= SATURATED * max(outputs))
        return loads[first] if first + 1 < len(loads) else None
    late = next((place for place, run in enumerate(runs) if _num_failed(run) or _grows(run)), None)
    return loads[late - 1] if late else None


def _num_failed(run: ComparedRun) -> int:
    return int(run.document.get("summary", {}).get("num_failed") or 0)


def _grows(run: ComparedRun) -> bool:
    assert run.requests is not None, "the records of every level are kept"
    requests = run.requests.where(~run.requests["is_warmup"] & np.isfinite(run.requests["ttft_s"]))
    return queue_growth(requests["arrival_s"], requests["ttft_s"]) > MOST_GROWTH


def sweep_report(sweep: Sweep) -> Report:
    """Return the report of a sweep: where the server saturates, a row a load, and curves over the load."""
    unit, measured = LAYOUT["units"][sweep.kind], sweep.levels[0].measured
    heads = [unit]
    for title in FIGURES.values():
        heads += [title, "predicted"] if sweep.columns[2] else [title]
    failed = [_num_failed(run) for run in sweep.columns[1]]
    rows = [[Cell(number(level.load), level.load), *_row(level)] for level in sweep.levels]
    if any(failed):
        heads.append("failed")
        rows = [[*row, Cell(f"{count:,}", count)] for row, count in zip(rows, failed, strict=True)]
    sections = [
        Section("", [Table(heads, rows, left=0)], "Measured at each load", is_open=True),
        Section("", [Figures([_curve(sweep, name, unit) for name in LAYOUT["drawn"]])], "Over the load"),
    ]
    title = f"{measured.document['model']} at {measured.document['endpoint']}"
    return Report(title, [], sections, verdict=_sentence(sweep))


def sweep_document(sweep: Sweep) -> dict[str, Any]:
    """Document a sweep."""
    loads, measured, predicted = sweep.columns
    return {
        "windtunnel": version(),
        "sweep": sweep.kind,
        "saturation": saturation(sweep.kind, loads, measured),
        "predicted_saturation": saturation(sweep.kind, loads, predicted) if predicted else None,
        "levels": [
            {
                "load": level.load,
                "num_failed": _num_failed(level.measured),
                "measured": dict(level.measured.entry.figures),
                "predicted": None if level.predicted is None else dict(level.predicted.entry.figures),
            }
            for level in sweep.levels
        ],
    }


def _sentence(sweep: Sweep) -> str:
    loads, measured, predicted = sweep.columns
    text = _saturation_text(sweep.kind, loads, measured)
    failed = [level.load for level in sweep.levels if _num_failed(level.measured)]
    if failed and sweep.kind == "concurrency":
        text += f" Requests failed at {', '.join(map(number, failed))}."
    if predicted:
        said = _saturation_text(sweep.kind, loads, predicted)
        text = f"{text} Predicted: {said[:1].lower()}{said[1:]}"
    held = [level.load for level in sweep.levels if level.measured.entry.figures.get("is_slo_held")]
    has_slo = any("is_slo_held" in run.entry.figures for run in measured)
    if has_slo:
        text += f" Holds the SLO up to {number(max(held))}." if held else " Breaks the SLO at every load."
    return text


def _saturation_text(kind: str, loads: Sequence[float], runs: Sequence[ComparedRun]) -> str:
    largest, unit = saturation(kind, loads, runs), LAYOUT["units"][kind]
    why = ["requests fail" if _num_failed(run) else "the queue grows" for run in runs]
    if kind == "concurrency":
        if largest is None:
            return f"Output still rises at {number(loads[-1])} {unit}."
        return f"Saturates at {number(largest)} {unit}: more add less than {1 - SATURATED:.0%} of output."
    if largest is not None:
        beyond = loads.index(largest) + 1
        return f"Keeps up with {number(largest)} {unit}; at {number(loads[beyond])} {why[beyond]}."
    if _num_failed(runs[0]) or _grows(runs[0]):
        return f"{why[0].capitalize()} at {number(loads[0])} {unit} already."
    return f"Keeps up with every load, to {number(loads[-1])} {unit}."


def _row(level: Level) -> Iterator[Cell]:
    for name in FIGURES:
        value = level.measured.entry.figures.get(name)
        yield Cell("" if value is None else quantity(name, value), value)
        if level.predicted is not None:
            other = level.predicted.entry.figures.get(name)
            off = f" ({other / value - 1:+z.1%})" if other is not None and value else ""
            yield Cell("" if other is None else f"{quantity(name, other)}{off}", other)


def _curve(sweep: Sweep, name: str, unit: str) -> tuple[Chart, str]:
    loads, measured, predicted = sweep.columns
    series = [
        Series(label, loads, [run.entry.figures.get(name, np.nan) for run in runs], "marked")
        for label, runs in (("measured", measured), ("predicted", predicted))
        if runs
    ]
    y = Axis(FIGURES[name], LAYOUT["drawn"][name], low=0.0)
    return Chart(Axis(unit, low=0.0), y, series), f"{FIGURES[name]} over the load"
