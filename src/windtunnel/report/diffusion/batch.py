"""A diffusion job's prediction: time, energy, cost and memory of a batch of images or videos; and a table of jobs."""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.diffusion.search import Point
from windtunnel.diffusion.simulate import DiffusionResult
from windtunnel.report.layout import facts_of, filled, layouts_beside, table_of
from windtunnel.report.numbers import number, percent
from windtunnel.report.render.json import version
from windtunnel.report.report import Bars, Report, Section, Table
from windtunnel.schema import encode, fields_of
from windtunnel.units import format_bytes, format_count, format_seconds

LAYOUT = layouts_beside(__file__)


def diffusion_document(result: DiffusionResult) -> dict[str, Any]:
    """Document a batch: its time by part, energy, cost and memory, and the job with its defaults."""
    setup, job = result.setup, result.setup.job
    num_devices = job.parallelism.num_devices
    peak = setup.device.peak_flops_per_s.get("bf16")
    return {
        "windtunnel": version(),
        "job": {"batch": job.batch, "frames": job.frames, **encode(job)},
        "model": setup.model.name,
        "device": setup.device.title,
        "num_devices": num_devices,
        "tokens": setup.image_tokens,
        **fields_of(result, "batch_s", "step_s", "output_s", "output_j", "output_usd", "energy_j", "flops"),
        "outputs_per_hour": 3600 / result.output_s,
        "mean_w": None if result.energy_j is None else result.energy_j / result.batch_s,
        "mfu": None if peak is None else result.flops / result.batch_s / num_devices / peak,
        "parts_s": dict(result.busy_s),
        "memory": dict(result.memory),
        **fields_of(result, "memory_bytes", "device_bytes", "fits", "is_measured"),
    }


def diffusion_report(result: DiffusionResult) -> Report:
    """Return the report of a batch."""
    document = diffusion_document(result)
    split = document["job"].get("parallelism", {})
    degrees = [f"{name} {split[name]}" for name in ("ulysses", "ring", "cfg") if split.get(name, 1) > 1]
    divided = f" ({', '.join(degrees)})" if degrees else ""
    lead = [f"{document['num_devices']} x {document['device']}{divided}; {document['tokens']:,} latent tokens"]
    if not result.is_measured:
        lead.append(LAYOUT["not_measured"])
    frames = result.setup.job.frames
    is_good = None if result.fits and result.setup.job.limit_s is None else result.is_good
    title = filled(LAYOUT["title"], {**document, "num_frames": None if frames == 1 else frames})
    return Report(title, lead, batch_sections(document), verdict=verdict_of(document), is_good=is_good)


def batch_sections(document: Mapping[str, Any]) -> list[Section]:
    """Return the facts, the parts and the memory of a batch, from a document of `diffusion_document`."""
    price = "list price" if document["job"].get("price_usd_per_hour") is None else "the given price"
    shares = {part: seconds / document["batch_s"] for part, seconds in document["parts_s"].items()}
    shown = {part: share for part, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 0.0005}
    whole = document["device_bytes"]
    memory = [(part, format_bytes(used), percent(used / whole)) for part, used in document["memory"].items()]
    sections = [Section("Memory of a device", [Table(("", "bytes", "share of the device"), memory)])]
    if document["fits"]:
        sections[:0] = [
            Section("", [facts_of({**document, "price": price}, LAYOUT["facts"])], "Batch"),
            Section("Where the batch goes", [Bars(shown, "Parts of a batch", document["batch_s"])]),
        ]
    return sections


def verdict_of(document: Mapping[str, Any]) -> str:
    """Say how long an image or video takes and what it costs in energy, or that the job does not fit."""
    if not document["fits"]:
        needed, has = format_bytes(document["memory_bytes"]), format_bytes(document["device_bytes"])
        return f"Does not fit: a device needs {needed} and has {has}."
    job, batch_s = document["job"], document["batch_s"]
    thing = "A video" if (job["frames"] or 1) > 1 else "An image"
    energy = "" if document["output_j"] is None else f" and {number(document['output_j'])} J"
    together = "" if job["batch"] == 1 else f"; {job['batch']} together take {format_seconds(batch_s)}"
    answer = f"{thing} takes {format_seconds(document['output_s'])}{energy}{together}."
    if (limit_s := job.get("limit_s")) is None:
        return answer
    kept = "Within" if batch_s <= limit_s else "Breaks"
    return f"{kept} the limit of {format_seconds(limit_s)}. {answer}"


def points_document(points: Sequence[Point], top: int) -> dict[str, Any]:
    """Document the best `top` points of a search, and those that are refused."""
    best = [point for point in points if point.result is not None][:top]
    return {
        "windtunnel": version(),
        "points": [{"settings": point.settings, **diffusion_document(point.result)} for point in best if point.result],
        "refused": [{"settings": point.settings, "reason": point.reason} for point in points if point.result is None],
    }


def points_report(points: Sequence[Point], top: int) -> Report:
    """Return the table of a search's best points."""
    document = points_document(points, top)
    rows = [{**row, "settings": settings_text(row["settings"])} for row in document["points"]]
    refused = [f"{settings_text(row['settings'])}: {row['reason']}" for row in document["refused"]]
    sections = (
        [Section("Points", [table_of(rows, {"settings": "settings", **LAYOUT["points"]}, winner=0)], is_open=True)]
        if rows
        else []
    )
    if refused:
        sections.append(Section(f"{format_count(len(refused), 'point')} refused", refused))
    best = points[0]
    verdict, is_good = "No point fits the memory and the limit.", False if best.result is None else None
    if best.result is not None:
        price = filled("${output_usd:.4f} each", document["points"][0])
        is_good = True if best.result.setup.job.limit_s is not None else None
        verdict = f"Cheapest, at {price}: {settings_text(best.settings)}. {verdict_of(document['points'][0])}"
    title = f"{format_count(len(points), 'point')} of a diffusion job"
    return Report(title, [], sections, verdict=verdict, is_good=is_good)


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return the settings of a point for people."""
    return ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in settings.items())
