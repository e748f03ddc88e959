"""Why recorded steps, or series of measured runs, are slow."""

from dataclasses import asdict
from typing import Any

from windtunnel.production.causes import TEXTS
from windtunnel.production.slow_steps import SlowSteps, StepDiagnosis
from windtunnel.report.numbers import percent
from windtunnel.report.render.json import version
from windtunnel.report.report import Report, Section, Table
from windtunnel.schema import fields_of
from windtunnel.units import format_count, format_seconds


def title(finding: SlowSteps) -> str:
    """Return a cause in words."""
    return str(TEXTS[finding.cause]["title"])


def verdict(diagnosis: StepDiagnosis) -> str:
    """Name the largest cause, and how many there are."""
    runs = format_count(diagnosis.num_runs, "run")
    if not diagnosis.findings:
        return f"Healthy: no step of {runs} is slower than the prices leave open."
    first = diagnosis.findings[0]
    others = f"; {len(diagnosis.findings) - 1} more below" if len(diagnosis.findings) > 1 else ""
    change = str(TEXTS[first.cause]["change"])
    where = f"{percent(first.share)} of its {'time' if diagnosis.num_steps else 'step'}"
    evidence = f"{first.evidence[0].upper()}{first.evidence[1:]}"
    return f"{title(first).capitalize()} in {first.run}: {where}. {evidence}. {change.capitalize()}{others}."


def steps_report(diagnosis: StepDiagnosis) -> Report:
    """Return the report of a diagnosis of steps or runs."""
    heads = ("run", "cause", "share", "lost", "evidence")
    rows = [
        [each.run, title(each), percent(each.share), format_seconds(each.lost_s), each.evidence]
        for each in diagnosis.findings
    ]
    refused = [Section("Refused", [Table(("run", "reason"), diagnosis.refused, right=1)])] if diagnosis.refused else []
    about = format_count(diagnosis.num_runs, "run")
    return Report(
        about if not diagnosis.num_steps else f"{diagnosis.num_steps:,} recorded steps of {about}",
        [],
        [*([Section("Causes", [Table(heads, rows, left=2, right=1)], is_open=True)] if rows else []), *refused],
        verdict=verdict(diagnosis),
        is_good=not diagnosis.findings,
    )


def steps_document(diagnosis: StepDiagnosis) -> dict[str, Any]:
    """Document a diagnosis of steps or runs."""
    causes = [
        {**asdict(each), "title": title(each), "change": TEXTS[each.cause]["change"]} for each in diagnosis.findings
    ]
    return {
        "windtunnel": version(),
        "verdict": verdict(diagnosis),
        "is_slow": bool(diagnosis.findings),
        "causes": causes,
        **fields_of(diagnosis, "num_runs", "num_steps"),
        "refused": [{"run": run, "reason": reason} for run, reason in diagnosis.refused],
    }
