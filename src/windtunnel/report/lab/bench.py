"""A client's measurements of a server: for people, as JSON, and under the names of `vllm bench serve`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.files import new_files
from windtunnel.metrics.client import ClientSummary, gaps_of
from windtunnel.metrics.records import Table as Records
from windtunnel.metrics.slo import Slo
from windtunnel.report.layout import cards_of, filled, layouts_beside, rows_of
from windtunnel.report.render.json import version
from windtunnel.report.report import Cards, Facts, Report, Section
from windtunnel.report.serving.run import latency_table, limit_cards
from windtunnel.schema import encode, json_text, save
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
