"""What the host of a real engine does in a step beside the forward, and how it grows with the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from windtunnel.spec.calibration import Calibration, Provenance
from windtunnel.spec.deployment import HostOverheads
from windtunnel.spec.noun import encode

CALIBRATION = "calibration.yaml"


@dataclass(frozen=True)
class HostSample:
    """One step's time outside the forward."""

    num_requests: int
    schedule_s: float
    prepare_s: float
    """Inputs prepared, outputs handed on: what is neither of the others."""
    process_s: float
    """The scheduler takes in what was sampled."""

    @property
    def total_s(self) -> float:
        return self.schedule_s + self.prepare_s + self.process_s


def fit_overheads(samples: Sequence[HostSample]) -> HostOverheads:
    """Seconds a step and a request: a line through the medians by batch size, neither term below zero.

    With one batch size alone all of it is the step's.
    """
    sizes = np.unique([sample.num_requests for sample in samples])
    medians = np.array([np.median([s.total_s for s in samples if s.num_requests == size]) for size in sizes])
    terms = np.column_stack([np.ones(sizes.size), sizes]) / medians[:, None]
    step_s, request_s = np.linalg.lstsq(terms, np.ones(sizes.size), rcond=None)[0] if sizes.size > 1 else (0.0, -1.0)
    if request_s < 0:
        step_s, request_s = np.median(medians), 0.0
    elif step_s < 0:
        step_s, request_s = 0.0, np.median(medians / sizes)
    return HostOverheads(step_s=float(step_s), request_s=float(request_s), first_token_s=0.0)


def write_overheads(folder: Path, about: Mapping[str, str], model: str, samples: Sequence[HostSample]) -> Path:
    """Write the overheads of an engine as a calibration that `--calibration` takes; returns its file."""
    host = fit_overheads(samples)
    calibration = Calibration(
        engine=about["engine"],
        device=about["device"],
        host=host,
        provenance=Provenance(
            fitted_on=f"{len(samples)} steps of {about['engine']} {about['engine_version']} on this machine",
            num_runs=1,
            num_configurations=1,
            models=(model,),
            versions=(about["engine_version"],),
            devices=(about["device"],),
        ),
    )
    path = folder / CALIBRATION
    path.write_text(yaml.safe_dump(encode(calibration), sort_keys=False, width=120), encoding="utf-8")
    return path
