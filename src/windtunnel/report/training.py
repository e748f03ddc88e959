"""A training job's prediction: the step and its parts, memory, the whole run, and the pipeline drawn."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

import numpy as np

from windtunnel.network.topology import assumed_kinds
from windtunnel.report.chart import Axis, Bar, Chart
from windtunnel.report.layout import cards_of, facts_of, filled, layouts_beside, table_of
from windtunnel.report.numbers import billions, dollars, duration, percent
from windtunnel.report.render.json import version
from windtunnel.report.report import Bars, Block, Figures, OnPage, OnTerminal, Report, Section, Table
from windtunnel.report.serving.setup import network_lines
from windtunnel.schema import encode, fields_of
from windtunnel.serving.shorthand import JOB_PATHS
from windtunnel.training.campaign import Campaign, campaign
from windtunnel.training.costs import PHASES
from windtunnel.training.figures import FIGURES
from windtunnel.training.fitting_changes import fitting_changes
from windtunnel.training.job import TrainingJob
from windtunnel.training.pipeline.actions import BACKWARD, FORWARD, PAIRED, WEIGHT
from windtunnel.training.setup import TrainingSetup, has_whole_layers
from windtunnel.training.step import Timeline, TrainingResult, step_interval, training_prices
from windtunnel.units import format_bytes, format_seconds, format_si

LAYOUT = layouts_beside(__file__)

Changes = list[tuple[str, TrainingResult]]
"""Changes that make a job fit its devices, each with its step."""
PASSES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradients"}
MAX_PASSES = 20_000
"""Most passes in a figure; of more, the first are drawn."""


def training_document(result: TrainingResult, run: Campaign | None, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Document a step, its breakdown, the memory of every stage, the whole run, and the job with its defaults."""
    busy = result.timeline.busy_s
    document: dict[str, Any] = {
        "windtunnel": version(),
        "job": encode(result.setup.job),
        "degrees": asdict(result.setup.degrees),
        "layers_per_chunk": list(result.setup.layers_per_chunk),
        **fields_of(result, "num_parameters", "num_trained", "step_s"),
        "interval_80": {"step_s": asdict(step_interval(result))},
        **fields_of(result, "breakdown_s", "bubble_fraction", "tokens_per_s", "tokens_per_s_per_device"),
        # The busiest device waits for the schedule alone.
        "schedule_bubble_fraction": float(1.0 - np.max(busy) / np.max(result.timeline.spans_s)),
        "slowest_stage": int(np.argmax(busy)),
        "model_flops_per_s_per_device": result.flops_per_s_per_device,
        **fields_of(result, "mfu", "hfu", "relative_error", "fits"),
        "device_memory_bytes": result.setup.device.memory_bytes,
        "host_bytes": result.host_bytes,
        "host_memory_bytes": result.setup.node.host_memory_bytes,
        "fits_devices": result.fits_devices,
        "memory": [asdict(stage) | fields_of(stage, "needed_bytes", "total_bytes") for stage in result.memory],
        "coverage_s": {how.value: seconds for how, seconds in result.by_coverage.items()},
    }
    if result.collectives:
        document["collectives"] = [asdict(each) for each in result.collectives]
    if notes := assumed_kinds(result.setup.job.network, result.setup.node, result.setup.degrees.num_devices):
        document["notes"] = notes
    if run is not None:
        document["run"] = asdict(run)
    if tasks:
        document["tasks"] = tasks
    return document


def result_report(result: TrainingResult) -> Report:
    """Return the report of a job, with the whole run where its tokens are given, and the changes that make it fit."""
    changes = [] if result.fits else fitting_changes(result, training_prices(result.setup))
    return training_report(result, campaign(result), changes, [])


def training_report(
    result: TrainingResult, run: Campaign | None, changes: Changes, tasks: list[dict[str, Any]]
) -> Report:
    """Return the report of a job.

    Args:
        run: the whole run; None: its tokens are not given.
        changes: of a job that does not fit its devices.
    """
    document = training_document(result, run, tasks)
    network = network_lines(result.setup.job.network)
    rates, step, memory = training_sections(document)
    pipeline = Section("Pipeline", [OnPage(lambda: [_pipeline(result.timeline)])])
    sections = [rates, step, pipeline, memory] if result.fits else [_fitting_changes(result, changes), memory]
    if run is not None and result.fits:
        faults = result.setup.job.faults
        unset = (text for name, text in LAYOUT["faults"].items() if getattr(faults, name) is None)
        facts = facts_of(asdict(run) | {"price": _price(document), "unset": ", ".join(unset) or None}, LAYOUT["run"])
        sections.append(Section(f"To {billions(run.total_tokens)} tokens", [facts]))
    if result.collectives:
        sections.append(
            Section("Collectives on the network", [table_of(result.collectives, LAYOUT["collectives"], left=2)])
        )
    total_s = sum(result.by_coverage.values())
    known = ", ".join(
        f"{how.value} {percent(seconds / total_s)}" for how, seconds in sorted(result.by_coverage.items())
    )
    sections += [Section("Where the operator times come from", [known]), *_task_sections(tasks)]
    lead = [devices_line(result.setup), filled(LAYOUT["batch"], result.setup), *_uneven_layers(result.setup), *network]
    if result.host_s:
        lead.append(LAYOUT["offload"].format(seconds=format_seconds(result.host_s)))
    verdict = verdict_of(document)
    if changes and not result.fits:
        change, fitting = changes[0]
        took = format_seconds(fitting.step_s)
        verdict = f"{verdict[:-1]}; with {_options(change, result.setup.given)} it fits, at {took} a step."
    if not result.fits and result.setup.degrees.num_devices > 1:
        verdict += " --search tries every layout."
    notes = document.get("notes", ())
    return Report(model_line(result), lead, sections, notes, verdict=verdict, is_good=document["fits"])


def training_sections(document: Mapping[str, Any]) -> tuple[Section, Section, Section]:
    """Return the rates of a step, its parts, and the memory of its stages, from the document of `training_document`."""
    shares = {name: seconds / document["step_s"] for name, seconds in document["breakdown_s"].items()}
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    shown = {name: share for name, share in ordered.items() if share >= 0.0005}
    device_bytes = document["device_memory_bytes"]
    stages = [{**stage, "share_fraction": stage["needed_bytes"] / device_bytes} for stage in document["memory"]]
    idle, own = document["bubble_fraction"], document["schedule_bubble_fraction"]
    waits_for = f"stage {document['slowest_stage']}, the slowest" if idle > 2 * own else "slower stages"
    known = {**document, "price": _price(document), "waits_for": waits_for}
    rates: list[Block] = [OnPage(lambda: [cards_of(known, LAYOUT["cards"])]), facts_of(known, LAYOUT["rates"])]
    memory: list[Block] = [
        OnTerminal(lambda: [_memory_table(document)]),
        OnPage(lambda: [table_of(stages, LAYOUT["stages"])]),
    ]
    if document.get("host_bytes"):
        text = f"Offloaded, in a host's memory: {format_bytes(document['host_bytes'])}, {_share_of_host(document)}."
        memory.append(OnPage(lambda: [text]))
    return (
        Section("", rates, "Step"),
        Section("Where the step goes", [Bars(shown, "Parts of a step", document["step_s"])]),
        Section("Memory of the fullest device", memory, "Memory of each stage's device"),
    )


def verdict_of(document: Mapping[str, Any]) -> str:
    """Say how long a step takes, or that it does not fit, from the document of `training_document`."""
    needed, has = _fullest(document)["needed_bytes"], document["device_memory_bytes"]
    if document["fits"]:
        step = format_seconds(document["step_s"])
        run = document.get("run") or {}
        cost = f" and costs {dollars(run['usd'])} at {_price(document)}" if run.get("usd") else ""
        whole = f" The run takes {duration(run['elapsed_s'])}{cost}." if run else ""
        return f"A step takes {step}; the fullest device uses {percent(needed / has)} of its memory.{whole}"
    if document.get("fits_devices"):
        host = f"{format_bytes(document['host_bytes'])} of {format_bytes(document['host_memory_bytes'])}"
        return f"Does not fit: what is offloaded takes {host} of a host's memory."
    usable, text = FIGURES.usable_fraction * has, format_bytes(needed)
    least = f", {format_bytes(needed - usable)} less" if format_bytes(usable) == text else ""
    has_to_use = f"has {format_bytes(usable)} to use{least}, of {format_bytes(has)}"
    return f"Does not fit: the fullest device needs {text} and {has_to_use}."


def _price(document: Mapping[str, Any]) -> str:
    given = document["job"].get("price_usd_per_hour")
    return "list price" if given is None else f"${given:,.2f} an hour"


def model_line(result: TrainingResult) -> str:
    """Return the model, and the formats that it is trained in."""
    job = result.setup.job
    trained = f"{format_si(result.num_trained, '').strip()} trained"
    kind = f"LoRA rank {job.lora.rank} ({trained})" if job.lora else job.optimizer
    kind += f" with moments in {job.precision.moments}" if job.precision.moments != "fp32" else ""
    if job.lora and job.precision.frozen_weights != "bf16":
        kind += f" beside weights in {job.precision.frozen_weights}"
    parameters = format_si(result.num_parameters, "").replace("G", "B").strip()
    if job.mtp_layers:
        kind += f", with multi-token prediction of depth {job.mtp_layers}"
    elif result.setup.model.prediction_layers and job.lora is None and has_whole_layers(result.setup.model):
        kind += "; without its multi-token prediction (--set mtp_layers=1)"
    return f"{result.setup.model.name}, {parameters} parameters, {job.precision.compute}, {kind}"


def devices_line(setup: TrainingSetup) -> str:
    """Return the devices, and how the job is split over them."""
    known, job = setup.degrees, setup.job
    degrees = {"TP": known.tp, "CP": known.cp, "PP": known.pp, "VPP": known.virtual_stages, "DP": known.dp}
    if known.ep > 1:
        degrees |= {"EP": known.ep, "expert TP": known.experts_tp, "expert DP": known.experts_dp}
    shown = ", ".join(f"{name} {value}" for name, value in degrees.items() if value > 1 or name == "DP")
    zero = f", ZeRO-{job.sharding.zero}" if job.sharding.zero else ""
    zero += f", {job.sharding.offload} offloaded" if job.sharding.offload != "none" else ""
    return f"{known.num_devices:,} x {setup.device.title} ({shown}{zero}); {job.framework}, {job.schedule}"


def _uneven_layers(setup: TrainingSetup) -> list[str]:
    """Return the layers of each chunk of the pipeline, where they are not the same: `62 x 2, 1`."""
    if len(set(setup.layers_per_chunk)) == 1:
        return []
    counts = [(len(list(same)), layers) for layers, same in groupby(setup.layers_per_chunk)]
    text = ", ".join(f"{count} x {layers}" if count > 1 else str(layers) for count, layers in counts)
    return [f"layers of the {setup.degrees.num_chunks} chunks: {text}"]


def _memory_table(document: Mapping[str, Any]) -> Table:
    """Return the memory of the fullest stage's device by part."""
    fullest, device_bytes = _fullest(document), document["device_memory_bytes"]
    known = {**fullest, "verdict": "fits" if document["fits"] else "does not fit"}
    rows = [
        (filled(label, known), format_bytes(fullest[part]), percent(fullest[part] / device_bytes))
        for label, part in LAYOUT["fullest"].items()
    ]
    if document.get("host_bytes"):
        rows.append(("offloaded, in a host's memory", format_bytes(document["host_bytes"]), _share_of_host(document)))
    return Table(("", "bytes", "share of the device"), rows)


def _share_of_host(document: Mapping[str, Any]) -> str:
    has = document["host_memory_bytes"]
    return f"{percent(document['host_bytes'] / has)} of the host" if has else "the host's size is not known"


def _fullest(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return max(document["memory"], key=lambda stage: float(stage["needed_bytes"]))


def _fitting_changes(result: TrainingResult, changes: Changes) -> Section:
    title = result.setup.device.title
    if not changes:
        text = f"It does not fit {title}, and no change or pair of changes tried makes it fit: "
        return Section("", [f"{text}let --search try every layout, or use more devices."])
    rows = [{"name": _options(name, result.setup.given), "result": changed} for name, changed in changes]
    return Section(f"It would fit {title} with one of", [table_of(rows, LAYOUT["changes"])], is_open=True)


def _options(change: str, job: TrainingJob) -> str:
    """Return a change as what is typed."""
    words: list[str] = []
    for part in re.split(r", (?=[a-z_.]+=)", change):
        path, _, value = part.partition("=")
        if part == "recompute={granularity: full}" and job.recompute.granularity == "none":
            path, value = "recompute.granularity", "full"
        words.append(option_text(path, value))
    return " ".join(words)


def option_text(path: str, value: str) -> str:
    """Return a field of a job as what is typed: its own option, or else `--set` with its path."""
    own = next((name for name, to in JOB_PATHS.items() if to == path), None)
    if own is None or value == "null":
        return f"--set {shlex.quote(f'{path}={value}')}"
    return f"--{own.replace('_', '-')} {value}"


def _task_sections(tasks: list[dict[str, Any]]) -> Iterator[Section]:
    """Yield one layer of a middle chunk and the ends of the model, task by task."""
    for phase in PHASES:
        runs = dict.fromkeys((task["where"], task["times"]) for task in tasks if task["phase"] == phase)
        for where, times in runs:
            these = [
                task | {"flops_per_s": task["flops"] / task["seconds"] if task["flops"] else None}
                for task in tasks
                if (task["phase"], task["where"], task["times"]) == (phase, where, times)
            ]
            often = f", {times:g} times" if times > 1 else ""
            yield Section(f"{phase}: {where}{often}", [table_of(these, LAYOUT["tasks"], left=3)])


def _pipeline(timeline: Timeline) -> Figures:
    """Draw the passes of every pipeline device."""
    schedule = timeline.schedule
    first = np.argsort(timeline.starts, kind="stable")[:MAX_PASSES].tolist()
    columns = zip(schedule.actions.tolist(), timeline.starts.tolist(), timeline.ends.tolist(), strict=True)
    passes, of_device = list(columns), timeline.device_of_action.tolist()
    bars = []
    for index in first:
        (kind, chunk, microbatch), begin_s, end_s = passes[index]
        title = f"microbatch {microbatch}, chunk {chunk}"
        bars.append(Bar(int(of_device[index]), begin_s, end_s, PASSES[kind % PAIRED], title))
    labels = [f"device {number_of}" for number_of in range(schedule.num_devices)]
    name = f"{schedule.name}, {schedule.num_microbatches:,} microbatches"
    name += f": the first {len(first):,} of {len(passes):,} passes" if len(passes) > len(first) else ""
    return Figures([(Chart(Axis("time", "s"), Axis(""), tracks=labels, bars=bars), name)])
