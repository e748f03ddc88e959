"""The tables of a training job's prediction."""

from collections.abc import Iterator

from rich.console import RenderableType

from windtunnel.report.render.tables import bars, columns, duration, grid, number, percent, title
from windtunnel.report.serving.setup import network_lines
from windtunnel.training.campaign import Campaign
from windtunnel.training.costs import PHASES, ExplainedTask
from windtunnel.training.intervals import step_interval
from windtunnel.training.memory import StageMemory
from windtunnel.training.setup import TrainingSetup
from windtunnel.training.step import TrainingResult
from windtunnel.units import format_bytes, format_count, format_seconds, format_si


def training_report(
    result: TrainingResult, run: Campaign | None, fitting_changes: list[tuple[str, TrainingResult]]
) -> list[RenderableType]:
    """Return step time and its parts, rates, memory, the whole run, and the sources of operator times."""
    shares = {name: seconds / result.step_s for name, seconds in result.breakdown_s.items()}
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    total = sum(result.by_coverage.values())
    parts: list[RenderableType] = [
        title(model_line(result)),
        devices_line(result.setup),
        batch_line(result.setup),
        *network_lines(result.setup.job.network),
        "",
        grid(_rate_rows(result)),
        "",
        title("Where the step goes"),
        bars({name: share for name, share in ordered.items() if share >= 0.0005}),
        "",
        title("Memory of the fullest device"),
        columns(("", "bytes", "share of the device"), list(_memory_rows(result))),
    ]
    if not result.fits:
        parts += ["", *_fitting_change_lines(result, fitting_changes)]
    if run is not None:
        parts += ["", title(f"To {number(run.total_tokens / 1e9)} billion tokens"), grid(run_rows(run))]
    known = ", ".join(f"{how.value} {percent(seconds / total)}" for how, seconds in sorted(result.by_coverage.items()))
    return [*parts, "", title("Where the operator times come from"), known]


def model_line(result: TrainingResult) -> str:
    """Return the model, and the formats that it is trained in."""
    job = result.setup.job
    kind = f"LoRA rank {job.lora.rank}" if job.lora else job.optimizer
    parameters = format_si(result.num_parameters, "").replace("G", "B").strip()
    return f"{result.setup.model.name}, {parameters} parameters, {job.precision.compute}, {kind}"


def devices_line(setup: TrainingSetup) -> str:
    """Return the devices, and how the job is split over them."""
    known, job = setup.degrees, setup.job
    degrees = {"TP": known.tp, "CP": known.cp, "PP": known.pp, "VPP": known.virtual_stages, "DP": known.dp}
    if known.ep > 1:
        degrees |= {"EP": known.ep, "expert TP": known.experts_tp, "expert DP": known.experts_dp}
    shown = ", ".join(f"{name} {value}" for name, value in degrees.items() if value > 1 or name == "DP")
    zero = f", ZeRO-{job.sharding.zero}" if job.sharding.zero else ""
    return f"{known.num_devices:,} x {setup.device.title} ({shown}{zero}); {job.framework}, {job.schedule}"


def batch_line(setup: TrainingSetup) -> str:
    """Return the batch, and how it is split."""
    job, known = setup.job, setup.degrees
    packed = f", packed from documents of {job.document_tokens:,}," if job.document_tokens else ""
    return (
        f"{format_count(job.global_batch, 'sequence')} of {format_count(job.sequence_tokens, 'token')}{packed} a step; "
        f"{format_count(known.num_microbatches, 'micro-batch', 'micro-batches')} of {job.micro_batch} on each rank; "
        f"recompute {job.recompute.granularity}"
    )


def _rate_rows(result: TrainingResult) -> list[tuple[str, str]]:
    per_device = format_si(result.flops_per_s_per_device, "FLOP/s")
    expected = step_interval(result)
    bounds = f"{format_seconds(expected.low)} to {format_seconds(expected.high)}"
    rate = f"{number(result.tokens_per_s)} tokens/s; {number(result.tokens_per_s_per_device)} per device"
    return [
        ("step", f"{format_seconds(result.step_s)}; 80% interval {bounds}"),
        ("throughput", rate),
        ("rate", f"{per_device} per device; MFU {percent(result.mfu)}, HFU {percent(result.hfu)}"),
        ("bubble", f"{percent(result.bubble_fraction)} of the pipeline's time, mean over its devices"),
    ]


def _memory_rows(result: TrainingResult) -> Iterator[tuple[str, str, str]]:
    worst, device = result.worst_memory, result.setup.device.memory_bytes
    for name, num_bytes in memory_parts(worst).items():
        yield name, format_bytes(num_bytes), percent(num_bytes / device)
    verdict = "fits" if result.fits else "does not fit"
    yield f"stage {worst.stage}: {verdict}", format_bytes(worst.total_bytes), percent(worst.total_bytes / device)


def memory_parts(memory: StageMemory) -> dict[str, float]:
    """Return the parts of a device's memory by name."""
    return {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        f"activations ({number(memory.num_in_flight)} micro-batches)": memory.activations_bytes,
        "temporaries": memory.transient_bytes,
        "context, NCCL, fragmentation": memory.reserve_bytes,
    }


def _fitting_change_lines(
    result: TrainingResult, fitting_changes: list[tuple[str, TrainingResult]]
) -> list[RenderableType]:
    device = result.setup.device
    if not fitting_changes:
        return [
            f"It does not fit {device.title}, and no change or pair of changes tried makes it fit: use more devices."
        ]
    rows = [
        (name, format_seconds(changed.step_s), format_bytes(changed.worst_memory.total_bytes))
        for name, changed in fitting_changes
    ]
    return [title(f"It would fit {device.title} with one of"), columns(("change", "step", "memory"), rows)]


def run_rows(run: Campaign) -> list[tuple[str, str]]:
    """Return the totals of a whole run: time, checkpoints, energy, money."""
    rows = [("steps", f"{run.num_steps:,}"), ("time", f"{duration(run.elapsed_s)}, of it {_goodput(run)}")]
    if run.checkpoint_interval_s:
        each = f"{format_bytes(run.checkpoint_bytes)} every {duration(run.checkpoint_interval_s)}"
        rows.append(("checkpoints", f"{each}, holding up training {duration(run.checkpoint_s)} each"))
    if run.energy_j is not None:
        rows.append(("energy", f"{number(run.energy_j / 3.6e9)} MWh at the devices' rated power"))
    if run.usd is not None:
        rows.append(("cost", f"${run.usd:,.0f} at list price"))
    return rows


def _goodput(run: Campaign) -> str:
    failures = f"; {number(run.num_failures)} failures expected" if run.num_failures else ""
    return f"{percent(run.goodput_fraction)} in steps{failures}"


def tasks_report(tasks: list[ExplainedTask]) -> list[RenderableType]:
    """Return one layer of a middle chunk and the ends of the model, task by task."""
    parts: list[RenderableType] = []
    for phase in PHASES:
        runs = dict.fromkeys((task.where, task.times) for task in tasks if task.phase == phase)
        for where, times in runs:
            rows = [_task_row(task) for task in tasks if (task.phase, task.where, task.times) == (phase, where, times)]
            headers = ("task", "group", "found", "each", "TFLOP/s", "bytes")
            often = f", {times:g} times" if times > 1 else ""
            parts += ["", title(f"{phase}: {where}{often}"), columns(headers, rows, left=3)]
    return parts


def _task_row(task: ExplainedTask) -> tuple[str, ...]:
    return (
        task.name,
        task.group or "",
        task.coverage,
        format_seconds(task.seconds),
        number(task.flops / task.seconds / 1e12) if task.flops else "",
        format_bytes(task.num_bytes),
    )
