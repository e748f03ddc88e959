"""A replayed Vidur run: its latencies, and their differences from the recorded ones."""

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.formats.vidur.read import VidurConfig, request_metrics
from windtunnel.formats.vidur.write import columns_of
from windtunnel.metrics.records import Table as Records
from windtunnel.metrics.records import request_table
from windtunnel.report.layout import facts_of, filled, layouts_beside, table_of
from windtunnel.report.render.json import version
from windtunnel.report.report import Report, Section, Table
from windtunnel.serving.run import LoopRun

LAYOUT = layouts_beside(__file__)
COMPARED: Mapping[str, str] = LAYOUT["compared"]
"""Name in the table -> Vidur's column."""


def replay_metrics(run: LoopRun, host_s: float | Floats = 0.0, replicates_bugs: bool = True) -> dict[str, NDArray[Any]]:
    """Return Vidur's request metrics of a replayed run.

    Args:
        host_s: the part of each request's execution that the host took.
        replicates_bugs: normalise by what was prompt and output after the last restart, as Vidur does.
    """
    assert run.sequences is not None
    names = ("arrival_s", "scheduled_s", "first_token_s", "finish_s", "input_tokens", "output_tokens")
    arrays = {name: run.requests[name] for name in (*names, "priority", "num_preemptions")}
    sent: Records = request_table(arrays, run.requests["rank"], 0.0, 0).replaced(execution_s=run.execution_s)
    prompts = run.sequences["prompt_tokens"]
    remaining = sent.replaced(input_tokens=prompts, output_tokens=run.sequences["total_tokens"] - prompts)
    table = remaining if replicates_bugs else sent
    metrics = columns_of(table, run.execution_s - host_s)
    # A batch that waits for the first stage of a pipeline is scheduled and not preempted.
    served_s = run.execution_s + run.sequences["paused_s"]
    metrics |= {
        "request_preemption_time": run.sequences["paused_s"],
        "request_execution_plus_preemption_time": served_s,
        "request_execution_plus_preemption_time_normalized": served_s / table["output_tokens"],
        "request_num_prefill_tokens": sent["input_tokens"],
        "request_num_decode_tokens": sent["output_tokens"],
        "request_pd_ratio": sent["input_tokens"] / sent["output_tokens"],
    }
    finished = np.isfinite(run.requests["finish_s"])
    if finished.all():
        return metrics
    return {
        name: v if name in LAYOUT["known_at_arrival"] else np.where(finished, v, np.nan) for name, v in metrics.items()
    }


def replay_document(run: LoopRun, recorded: Path | None) -> dict[str, Any]:
    """Document a replayed run."""
    metrics = replay_metrics(run)
    document = {
        "windtunnel": version(),
        "num_requests": len(run.requests),
        "num_finished": int(np.isfinite(run.requests["finish_s"]).sum()),
        "num_batches": int(run.steps["num_steps"].sum()),
        "num_restarts": int(run.requests["num_preemptions"].sum()),
        "seconds": {column: _quantiles(metrics[column]) for column in COMPARED.values()},
    }
    if recorded is not None:
        document["against"] = {column: differences(metrics, recorded, column) for column in COMPARED.values()}
    return document


def replay_report(config: VidurConfig, run: LoopRun, recorded: Path | None) -> Report:
    """Return the report of a replayed run."""
    document = replay_document(run, recorded)

    def table(name: str) -> Table:
        return table_of(({"name": title, **document[name][column]} for title, column in COMPARED.items()), LAYOUT[name])

    sections = [Section("", [table("seconds"), facts_of(document, LAYOUT["facts"])])]
    sections += [Section(f"Against {recorded.name}", [table("against")])] if recorded is not None else []
    title = f"{config.model_name}, as Vidur runs it"
    verdict = filled(LAYOUT["verdict"], document | document["seconds"][COMPARED["end to end"]])
    if recorded is not None:
        worst = max(document["against"].values(), key=itemgetter("most_s"))
        verdict += f" {filled(LAYOUT['worst'], worst)}"
    return Report(title, [filled(LAYOUT["deployment"], config)], sections, verdict=verdict)


def _quantiles(seconds: Floats) -> dict[str, float]:
    known = seconds[np.isfinite(seconds)]
    if not known.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"), float("nan"))
    p50, p90, p99 = (float(q) for q in np.percentile(known, (50, 90, 99)))
    return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99, "max": float(known.max())}


def differences(metrics: dict[str, NDArray[Any]], recorded: Path, column: str) -> dict[str, float]:
    """Return a column's largest differences from the recorded one: in seconds, and relative to times above 1 us.
    InputError where the file has no such column, or another number of requests."""
    (theirs,), ours = request_metrics(recorded, [column]), metrics[column]
    if len(theirs) != len(ours):
        raise InputError(f"{recorded} has {len(theirs)} requests; {len(ours)} were run")
    known = np.isfinite(theirs) & np.isfinite(ours)
    off_s = np.abs(ours - theirs)[known]
    relative = off_s / np.maximum(np.abs(theirs[known]), 1e-6)
    return {"most_s": float(off_s.max(initial=0.0)), "most_fraction": float(relative.max(initial=0.0))}
