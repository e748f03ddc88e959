"""Host overheads of a real engine: its work in a step beside the forward, and how that grows with the batch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from windtunnel.files import write_text
from windtunnel.lab.stepped import EngineStep
from windtunnel.schema import yaml_text
from windtunnel.serving.calibration import Calibration, Provenance
from windtunnel.serving.deployment import HostOverheads

CALIBRATION = "calibration.yaml"


def fit_overheads(steps: Sequence[EngineStep]) -> HostOverheads:
    """Fit seconds per step and per request: a line through the medians by batch size, neither term below zero.

    With a single batch size, all of the time counts as time per step.
    """
    by_batch = _by_batch(steps)
    sizes = np.array([*by_batch])
    medians = np.array([np.median([step.host_s for step in here]) for here in by_batch.values()])
    terms = np.column_stack([np.ones(sizes.size), sizes]) / medians[:, None]
    step_s, request_s = np.linalg.lstsq(terms, np.ones(sizes.size), rcond=None)[0] if sizes.size > 1 else (0.0, -1.0)
    if request_s < 0:
        step_s, request_s = np.median(medians), 0.0
    elif step_s < 0:
        step_s, request_s = 0.0, np.median(medians / sizes)
    return HostOverheads(step_s=float(step_s), request_s=float(request_s), first_token_s=0.0)


def _by_batch(steps: Sequence[EngineStep]) -> dict[int, list[EngineStep]]:
    """Return batch size -> its steps, smallest first."""
    sizes = sorted({len(step.scheduled) for step in steps})
    return {size: [step for step in steps if len(step.scheduled) == size] for size in sizes}


def medians_by_batch(steps: Sequence[EngineStep]) -> list[tuple[float, ...]]:
    """Return (requests, steps, schedule, prepare, process) for every batch size: medians in seconds."""
    parts = ("schedule_s", "prepare_s", "process_s")
    return [
        (size, len(here), *(float(np.median([getattr(step, part) for step in here])) for part in parts))
        for size, here in _by_batch(steps).items()
    ]


def write_overheads(folder: Path, about: Mapping[str, str], model: str, steps: Sequence[EngineStep]) -> None:
    """Write the overheads of an engine as a calibration that `--calibration` takes."""
    calibration = Calibration(
        engine=about["engine"],
        device=about["device"],
        host=fit_overheads(steps),
        provenance=Provenance(
            fitted_on=f"{len(steps)} steps of {about['engine']} {about['engine_version']} on this machine",
            num_runs=1,
            num_configurations=1,
            models=(model,),
            versions=(about["engine_version"],),
            devices=(about["device"],),
        ),
    )
    write_text(folder / CALIBRATION, yaml_text(calibration))
