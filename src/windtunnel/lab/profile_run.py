"""`windtunnel profile compute`: steps measured for every tensor-parallel size, written as one profile."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from windtunnel.errors import InputError
from windtunnel.estimate.profile import write_profile
from windtunnel.lab.profile_compute import (
    Budget,
    Extent,
    Journal,
    MeasuredStep,
    Pressure,
    Progress,
    measure_steps,
    read_journals,
    require_torch,
    tables_of,
    torch_steppers,
)
from windtunnel.lab.profile_machine import (
    device_of,
    last_level_cache_bytes,
    provenance_of,
    today,
    write_device,
)
from windtunnel.lab.profile_timing import clock_for
from windtunnel.ops.forward import Shard
from windtunnel.spec.deployment import Parallelism
from windtunnel.spec.hardware import Device
from windtunnel.spec.model import ModelSpec
from windtunnel.spec.precision import Precision
from windtunnel.spec.scenario import ANY_DEVICE, check_parallelism

JOURNALS = "steps"
"""Folder of a profile that holds every measured step, so that a profile can go on or grow."""

Notify = Callable[[int, Progress], None]
"""Called with the tensor-parallel size and what was done of it."""


@dataclass(frozen=True)
class Profile:
    """What was measured."""

    folder: Path
    device: Device
    steps: tuple[MeasuredStep, ...]
    files: tuple[Path, ...]
    pressure: float | None
    """Share of the time in which another task waited for a CPU."""

    @property
    def closure_errors(self) -> np.ndarray:
        """Of every step: the operators' sum over the whole forward, minus one."""
        return np.array([step.closure_error for step in self.steps])


def profile_compute(
    model: ModelSpec,
    precision: Precision,
    device_name: str,
    folder: Path,
    *,
    tp: Sequence[int] = (1,),
    torch_device: str = "cpu",
    clock: str | None = None,
    extent: Extent = Extent(),
    budget: Budget = Budget(),
    notify: Notify | None = None,
) -> Profile:
    """Measure the operators of `model` under each tensor-parallel split, on one device, and write them to `folder`.

    What the folder holds of the same measurement is kept and not measured again; other models' operators stay too.

    Args:
        model, precision: what to measure.
        device_name: a device of the catalog, or a new name for this machine.
        folder: of the profile.
        tp: the splits; each rank's shard is measured alone, without collectives.
        torch_device: `cpu` or `cuda`.
        clock: one of `profile_timing.CLOCKS`; None takes the steadiest.
        extent: how far.
        budget: how long; shared evenly by the splits.
        notify: told of every step.

    Raises:
        InputError: torch, the device, the split or the model cannot be measured, or the folder holds something else.
    """
    require_torch(torch_device)
    import torch

    clock = clock_for(torch_device, torch.get_num_threads(), clock)
    for degree in tp:
        check_parallelism(model, Parallelism(tp=degree), _any_node())
    device = device_of(device_name, torch_device, clock)
    about = provenance_of(device, torch_device, clock) | {"engine": "torch"}
    pressure = Pressure.start()
    folder.mkdir(parents=True, exist_ok=True)
    write_device(device, folder / "device.yaml")
    cache_bytes = last_level_cache_bytes(torch_device)
    for degree in tp:
        shard = Shard(model, precision, Parallelism(tp=degree))
        for index, (_, stepper) in enumerate(torch_steppers(shard, torch_device, clock, extent, cache_bytes)):
            part = replace(budget, seconds=budget.seconds and budget.seconds / len(tp) / len(model.layers))
            named = about | {"model": model.name, "shard": _digest(model, precision, degree, index)}
            journal = Journal(folder / JOURNALS / f"{_slug(model.name)}_tp{degree}_{index}.jsonl", named)
            say = (lambda degree: lambda done: notify and notify(degree, done))(degree)
            for step in measure_steps(stepper, extent, part, journal.steps, say):
                journal.add(step)
    steps = read_journals(folder / JOURNALS)
    files = write_profile(folder, tables_of(steps, source_of(device, about)), about | {"date": today()})
    return Profile(folder, device, tuple(steps), tuple(files), pressure.fraction())


def source_of(device: Device, about: dict[str, str]) -> str:
    """A line for people: which device, kernels and clock."""
    return f"{device.name}, {about['engine']} {about.get('engine_version', about['torch'])}, {about['clock']}"


def _any_node() -> object:
    from windtunnel.spec import catalog

    return msgspec.structs.replace(catalog.node("pcie"), device=ANY_DEVICE, num_devices=1024)


def _digest(model: ModelSpec, precision: Precision, degree: int, index: int) -> str:
    text = msgspec.json.encode([model, precision, degree, index])
    return hashlib.sha256(text).hexdigest()[:16]


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)


def parse_degrees(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers.

    Raises:
        InputError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"{text!r} is not a list of sizes", "for instance 1,2,4,8")
    return tuple(dict.fromkeys(int(part) for part in parts))
