"""What was learnt from a server's recorded steps: the sentence, errors before and after, and the factors."""

import math
from typing import Any

from windtunnel.production.observe import Observation
from windtunnel.production.workload import Load
from windtunnel.report.render.json import version
from windtunnel.report.report import Facts, Report, Section, Table
from windtunnel.schema import encode, fields_of
from windtunnel.units import format_count, format_seconds

FAR = 0.6
"""Median error from which a record is taken to be of something else than what is described."""


def verdict(observation: Observation) -> str:
    """Say whether later steps are predicted better with what was learnt, of which kinds, and by how much."""
    changes = ", ".join(
        f"{kind} {observation.before[kind].median:.1%} -> {scored.median:.1%}"
        for kind, scored in observation.after.items()
        if kind in observation.before
    )
    others = f"{observation.num_judged:,} later {observation.unit}s"
    if observation.learnt == "nothing" and min(scored.median for scored in observation.after.values()) > FAR:
        check = "Are the model, the device, the flags and the unit of times those of this server?"
        return f"Nothing learnt: {others} are far from their prices ({changes}). {check}"
    if observation.learnt == "nothing":
        return f"Nothing learnt: the calibration in force is as good on {others} ({changes})."
    learnt = f"Learnt {observation.learnt} from {format_count(observation.num_learnt, observation.unit)}"
    better, worse = (" and ".join(kinds) for kinds in _moved(observation))
    what = f"predicts later {better or worse} {observation.unit}s {'better' if better else 'worse'}"
    but = f" and {worse} {observation.unit}s worse" if better and worse else ""
    return f"{learnt}: {what}{but}. Median error on {others}: {changes}."


def _moved(observation: Observation) -> tuple[list[str], list[str]]:
    """Return the kinds of steps that are predicted better with what was learnt, or as well, and those worse."""
    known = [kind for kind in observation.after if kind in observation.before]
    worse = [kind for kind in known if observation.after[kind].median > observation.before[kind].median]
    return [kind for kind in known if kind not in worse], worse


def observation_report(observation: Observation) -> Report:
    """Return the report of an observation."""
    rows = [
        [kind, f"{after.num_runs:,}", *(f"{e:.1%}" for e in (before.median, after.median, before.p90, after.p90))]
        for kind, after in observation.after.items()
        for before in (observation.before.get(kind, after),)
    ]
    heads = (f"{observation.unit}s", "number", "median\nbefore", "after", "p90\nbefore", "after")
    calibration, load = observation.calibration, observation.load
    facts = [(name, f"x {value:.3g}") for name, value in calibration.factors.items() if name.count(".") < 2]
    known = encode(calibration.host)
    facts += [(name.removesuffix("_s"), format_seconds(float(value))) for name, value in known.items()]
    refused = ", ".join(f"{name} ({error:.1%})" for name, error in observation.refused.items())
    notes = [f"tried, with the mean error on {observation.unit}s held back: {refused}"] if refused else []
    if observation.unidentified:
        notes.append(f"the record does not tell of: {', '.join(observation.unidentified)}")
    return Report(
        observation.run,
        [],
        [
            Section("", [Table(heads, rows)], f"Errors on later {observation.unit}s", is_open=True),
            Section("The calibration", [Facts(facts, width=22)]),
            *([] if load is None else [Section("The load", [Facts(_load_facts(load), width=22)])]),
        ],
        notes,
        verdict=verdict(observation),
        is_good=None if observation.learnt == "nothing" or _moved(observation)[1] else True,
    )


def _load_facts(load: Load) -> list[tuple[str, str]]:
    """Return what the server was asked for, as far as it is known."""
    is_counted = not math.isnan(load.rate_per_s)
    facts = [("requests", f"{load.num_requests:,}, {load.rate_per_s:.3g} a second")] if is_counted else []
    if load.is_closed:
        facts.append(("arrivals", f"{load.concurrency:.0f} clients that wait for their answers"))
    elif not math.isnan(load.gap_cv):
        facts.append(("arrivals", f"gaps with a coefficient of variation of {load.gap_cv:.2g}"))
    facts.append(("under way", f"{load.concurrency:.3g}"))
    for name, tokens in (("prompt tokens", load.input_tokens), ("output tokens", load.output_tokens)):
        if not math.isnan(tokens):
            facts.append((name, f"{tokens:,.0f}"))
    return [*facts, ("from the prefix cache", f"{load.shared:.0%}")]


def observation_document(observation: Observation) -> dict[str, Any]:
    """Document an observation."""
    load = {} if observation.load is None else vars(observation.load)
    known = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in load.items()}
    return {
        "windtunnel": version(),
        "verdict": verdict(observation),
        **fields_of(observation, "run", "learnt"),
        f"{observation.unit}s": {"learnt_from": observation.num_learnt, "judged_on": observation.num_judged},
        **({"load": known} if known else {}),
        "before": {kind: vars(scored) for kind, scored in observation.before.items()},
        "after": {kind: vars(scored) for kind, scored in observation.after.items()},
        "refused": dict(observation.refused),
        "unidentified": list(observation.unidentified),
        "calibration": encode(observation.calibration),
    }
