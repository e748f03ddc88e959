"""The page of a training step, and its sections."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from windtunnel.report.render.html import Section, cards, facts, figures, page, table
from windtunnel.report.render.plots import Axis, Bar, bar_chart, tracks
from windtunnel.report.render.tables import duration, number, percent, span_text
from windtunnel.report.training.document import training_document
from windtunnel.report.training.step import batch_line, devices_line, model_line, run_rows
from windtunnel.training.campaign import Campaign
from windtunnel.training.pipeline.actions import BACKWARD, FORWARD, PAIRED, WEIGHT
from windtunnel.training.step import Timeline, TrainingResult
from windtunnel.units import format_bytes, format_seconds

PASSES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradients"}
MOST_PASSES = 160
"""Most passes of a device in one drawing, as bars of 6 pixels; of more, the first and last halves are drawn."""


def training_page(result: TrainingResult, run: Campaign | None) -> str:
    """Return a step as one HTML page that needs no network."""
    step, memory = training_sections(training_document(result, run, []))
    sections = [step, _pipeline(result.timeline), memory]
    if run is not None:
        sections.append(Section(f"To {number(run.total_tokens / 1e9)} billion tokens", facts(run_rows(run))))
    seconds = sorted(result.by_coverage.items(), key=lambda item: -item[1])
    known = [(how.value, percent(found_s / sum(result.by_coverage.values()))) for how, found_s in seconds]
    sections.append(Section("Where the operator times come from", facts(known)))
    lead = f"{devices_line(result.setup)}; {batch_line(result.setup)}"
    return page(model_line(result), lead, sections)


def training_sections(document: Mapping[str, Any]) -> list[Section]:
    """Return the step and the memory of its stages, from the document of `training_document`."""
    low, high = (document["interval_80"]["step_s"][end] for end in ("low", "high"))
    shown = [
        (format_seconds(document["step_s"]), f"a step, 80% {span_text(format_seconds(low), format_seconds(high))}"),
        (percent(document["mfu"]), "MFU"),
        (number(document["tokens_per_s"]), "tokens/s"),
        (number(document["tokens_per_s_per_device"]), "tokens/s per device"),
        (percent(document["bubble_fraction"]), "pipeline bubbles"),
        ("yes" if document["fits"] else "no", "fits the devices' memory"),
    ]
    run = document.get("run")
    if run is not None:
        shown.append((duration(run["elapsed_s"]), f"to {number(run['total_tokens'] / 1e9)} billion tokens"))
    largest = sorted(document["breakdown_s"].items(), key=lambda item: -item[1])
    chart = bar_chart([name for name, _ in largest], [seconds for _, seconds in largest], Axis("time (s)"), width=640)
    parts = [name for name in document["memory"][0] if name.endswith("_bytes")]
    heads = ("stage", *(name.removesuffix("_bytes").replace("_", " ") for name in parts), "of the device")
    shares = [stage["total_bytes"] / document["device_memory_bytes"] for stage in document["memory"]]
    rows = [
        [str(stage["stage"]), *(format_bytes(stage[name]) for name in parts), percent(share)]
        for stage, share in zip(document["memory"], shares, strict=True)
    ]
    return [
        Section("Step", cards(shown) + figures([(chart, "where the step goes")])),
        Section("Memory of a device", table(heads, rows)),
    ]


def _pipeline(timeline: Timeline) -> Section:
    """Draw the passes of every pipeline device: all of them, or the step's beginning and end."""
    schedule, step_s = timeline.schedule, float(timeline.ends.max())
    max_passes = int(np.diff(schedule.offsets).max())
    name = f"{schedule.name}, {schedule.num_microbatches:,} micro-batches"
    if max_passes <= MOST_PASSES:
        drawn = [(_drawn(timeline, 0.0, step_s), name)]
    else:
        stretch_s = step_s * (MOST_PASSES / 2) / max_passes
        drawn = [
            (_drawn(timeline, 0.0, stretch_s), f"{name}: how the step begins"),
            (_drawn(timeline, step_s - stretch_s, step_s), "how it ends"),
        ]
    return Section("Pipeline", figures(drawn))


def _drawn(timeline: Timeline, from_s: float, to_s: float) -> str:
    """Draw the passes between `from_s` and `to_s`."""
    of_device, actions = timeline.device_of_action, timeline.schedule.actions
    bars = []
    for index in np.flatnonzero((timeline.starts >= from_s) & (timeline.ends <= to_s)).tolist():
        kind, chunk, microbatch = actions[index].tolist()
        name = PASSES[kind % PAIRED]
        begin_s, end_s = float(timeline.starts[index]), float(timeline.ends[index])
        title = f"{name} of micro-batch {microbatch}, chunk {chunk}: {format_seconds(end_s - begin_s)}"
        bars.append(Bar(int(of_device[index]), begin_s, end_s, name, title))
    labels = [f"device {number_of}" for number_of in range(timeline.schedule.num_devices)]
    kinds = [PASSES[kind] for kind in np.unique(actions[:, 0] % PAIRED).tolist()]
    return tracks(labels, bars, Axis("time (s)", low=from_s, high=to_s), kinds=kinds)
