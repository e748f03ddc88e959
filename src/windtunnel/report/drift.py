"""Whether a server has drifted from its calibration: the sentence, and each change."""

from dataclasses import asdict
from typing import Any

from windtunnel.production.drift import LEAST_BETWEEN, Watch
from windtunnel.report.render.json import version
from windtunnel.report.report import Facts, Report, Section, Table


def verdict(watch: Watch) -> str:
    """Say whether the server has drifted, since when and how far."""
    if watch.is_off:
        return f"Off its calibration from the start: times are {_change(watch.level)}. Observe it again."
    if watch.drifts:
        first = watch.drifts[0]
        where = f"{watch.unit} {first.begins:,} of {watch.num_rows:,}"
        if not watch.is_sure:
            reasons = "times of this server change by as much", "ranks that are not recorded may be busier"
            return f"Unclear: from {where} on, times are {_change(first.change)}, but {reasons[watch.is_partial]}."
        return f"Drifted: from {where} on, times are {_change(first.change)}. Observe it again."
    return f"As calibrated: no lasting change in {watch.num_rows:,} {watch.unit}s."


def _change(share: float) -> str:
    return f"{abs(share):.1%} {'longer' if share > 0 else 'shorter'}"


def drift_report(watch: Watch) -> Report:
    """Return the report of a watch."""
    rows = [[f"{each.begins:,}", f"{each.noticed:,}", f"{each.change:+z.1%}"] for each in watch.drifts]
    facts = [("at the beginning", f"{_change(watch.level)} than calibrated")]
    if (between := watch.rows_between_false_alarms) is not None:
        bound = f"fewer than one in {min(between, 1e9):,.0f} {watch.unit}s"
        facts.append(("false alarms", bound if between >= LEAST_BETWEEN else "not bounded: times vary too much"))
    changes = [Section("Changes", [Table((f"from {watch.unit}", "noticed", "times"), rows)], is_open=True)]
    return Report(
        watch.run,
        [],
        [*(changes if rows else []), Section("", [Facts(facts, width=18)])],
        watch.remarks,
        verdict=verdict(watch),
        is_good=not watch.has_drifted and (None if watch.drifts else True),
    )


def drift_document(watch: Watch) -> dict[str, Any]:
    """Document a watch."""
    known = {name: value for name, value in asdict(watch).items() if name not in ("drifts", "remarks")}
    return {
        "windtunnel": version(),
        "verdict": verdict(watch),
        **known,
        "has_drifted": watch.has_drifted,
        "drifts": [asdict(each) for each in watch.drifts],
        "remarks": list(watch.remarks),
    }
