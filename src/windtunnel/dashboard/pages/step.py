"""A step of a run, operator by operator."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windtunnel.dashboard.pages.run import result_view
from windtunnel.dashboard.view import Dashboard, Query, View
from windtunnel.errors import InputError
from windtunnel.report.layout import layouts_beside
from windtunnel.report.results import records
from windtunnel.report.serving.step import batch_line, step_document, step_report
from windtunnel.schema import decode
from windtunnel.serving.explain import Explanation, explain_step, pool_of_step, step_batch
from windtunnel.serving.scenario import Scenario, pool_scenario, resolve

FIELDS: Mapping[str, str] = layouts_beside(__file__)
"""Field of the form -> its label."""


def page(dashboard: Dashboard, name: str, query: Query) -> View:
    """Show the step, and a form for another."""
    entry, _ = dashboard.results.read(name)
    given = _given(dashboard, name, query)
    step = _explained(dashboard, name, given)
    pool = f", in the pool {step.pool}" if step.pool else ""
    report = replace(step_report(step), lead=[batch_line(step) + pool])
    return result_view(entry, report, "step", template="step.html", values={"given": given, "fields": FIELDS})


def document(dashboard: Dashboard, name: str, query: Query) -> Any:
    """Return what `windtunnel explain --json` prints of the step."""
    return step_document(_explained(dashboard, name, _given(dashboard, name, query)))


def _explained(dashboard: Dashboard, name: str, given: dict[str, int]) -> Explanation:
    _, document = dashboard.results.read(name)
    if "scenario" not in document:
        raise InputError(f"{name} has no scenario: no step of it can be explained")
    scenario = decode(document["scenario"], Scenario, name)
    batch = step_batch(given["batch"], given["context"], given["prefill_tokens"], given["prefill_context"])
    pool = pool_of_step(scenario.deployment, None, is_decode=batch.decode_requests > 0)
    return replace(explain_step(resolve(pool_scenario(scenario, pool)), batch), pool=pool.name)


def _given(dashboard: Dashboard, name: str, query: Query) -> dict[str, int]:
    """Return the batch of the form's fields, or without any the run's mean decode step."""
    if not any(field in query for field in FIELDS):
        path = dashboard.results.path(name) / "steps.parquet"
        steps = records(path, ["decode_tokens", "prefill_tokens", "context_tokens", "duration_s"])
        decodes = (steps["decode_tokens"] > 0) & (steps["prefill_tokens"] == 0)
        weights = steps["duration_s"] * (decodes if decodes.any() else steps["decode_tokens"] > 0)
        tokens = float((steps["decode_tokens"] * weights).sum())
        context = float((steps["context_tokens"] * weights).sum())
        total_s = float(weights.sum())
        batch = max(round(tokens / total_s), 1) if total_s else 0
        mean = {"batch": batch, "context": max(round(context / tokens), 1) if tokens else 0}
        return {"prefill_tokens": 0 if batch else 1024, "prefill_context": 0, **mean}
    return {field: _count(field, query.get(field) or "0") for field in FIELDS}


def _count(field: str, text: str) -> int:
    plain = text.replace(",", "")
    if not plain.isdecimal() or len(plain) > 9:
        raise InputError(f"{FIELDS[field]}: {text!r} is not a number of at least 0")
    return int(plain)
