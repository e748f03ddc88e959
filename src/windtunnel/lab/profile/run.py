"""Run `windtunnel profile compute`: measure steps for every tensor-parallel size and write one profile."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windtunnel import catalog
from windtunnel.errors import InputError, check_known
from windtunnel.files import write_text
from windtunnel.hardware import ANY_DEVICE, Device
from windtunnel.lab.engines.vllm import version as vllm_version
from windtunnel.lab.profile import machine
from windtunnel.lab.profile.attention import attention_version, check_attention
from windtunnel.lab.profile.collectives import CollectivesPlan, TimedCollective, collective_tables
from windtunnel.lab.profile.compute import ComputePlan, Stepper, measure_steps, operator_tables
from windtunnel.lab.profile.samples import Journal, MeasuredStep, read_journal, without_event_cost
from windtunnel.lab.profile.torch_steps import require_torch, torch_steppers
from windtunnel.lab.profile.vllm_steps import vllm_steppers
from windtunnel.lab.servers import engines_with
from windtunnel.lab.stepped import EngineStep, SteppedEngine, decode_steps
from windtunnel.lab.timing import clock_for, measure_pressure
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Precision
from windtunnel.model.shape import ModelSpec, Shard, operator_types
from windtunnel.pricing.profile import profile_provenance, write_profile
from windtunnel.pricing.table import MeasurementTable
from windtunnel.schema import yaml_text
from windtunnel.serving.calibration import Calibration, Provenance
from windtunnel.serving.deployment import HostOverheads
from windtunnel.serving.scenario import check_parallelism

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


OVERHEAD_CONTEXT = 128
"""Tokens of each request where the host alone is measured; its work does not depend on the context."""

JOURNALS = "steps"
"""Folder of a profile that holds every measured step, so that a profile can go on or grow."""

Notify = Callable[[int, int, float | None, float], None]
"""Called with the tensor-parallel size and the progress (`lab.profile.compute.Notify`)."""


@dataclass(frozen=True)
class ComputeProfile:
    """The measured steps and operators of one device."""

    folder: Path
    device: Device
    steps: tuple[MeasuredStep, ...]
    tables: tuple[MeasurementTable, ...]
    pressure: float | None
    """Share of the time in which another task waited for a CPU."""

    @property
    def closure_errors(self) -> np.ndarray:
        """For every step: the operators' sum over the whole forward, minus one."""
        return np.array([step.closure_error for step in self.steps])


def profile_compute(
    model: ModelSpec,
    precision: Precision,
    device_name: str,
    folder: Path,
    plan: ComputePlan,
    notify: Notify = lambda *_: None,
) -> ComputeProfile:
    """Measure the operators of `model` under each tensor-parallel split, on one device, and write them to `folder`.

    What the folder holds of the same measurement is kept and not measured again; other models' operators stay too.
    InputError where torch, the device, the split or the model cannot be measured, or the folder holds something else.

    Args:
        device_name: a device of the catalog, or a new name for this machine.
    """
    check_known(plan.engine, ENGINES, f"operators of {plan.engine!r} cannot be measured", "torch or vllm")
    torch_device = require_torch(plan.torch_device)
    import torch

    clock = clock_for(torch_device, torch.get_num_threads(), plan.clock)
    plan = replace(plan, torch_device=torch_device, clock=clock)
    check_attention(plan.attention, torch_device)
    any_node = msgspec.structs.replace(catalog.node("pcie"), device=ANY_DEVICE, num_devices=1024)
    for degree in plan.tp:
        check_parallelism(model, Parallelism(tp=degree), any_node)
    device = machine.device_of(device_name, torch_device, clock)
    versions, steppers = ENGINES[plan.engine]
    about = machine.provenance_of(device, torch_device, clock) | {"engine": plan.engine} | versions(plan)
    pressure = measure_pressure()
    host: list[EngineStep] = []
    for degree in plan.tp:
        shard = Shard(model, precision, Parallelism(tp=degree))
        _measure_shard(shard, folder, plan, about, steppers(shard, plan, host), notify)
    paths = sorted((folder / JOURNALS).glob("*.jsonl"))
    steps = [step for path in paths for step in read_journal(path)]
    if torch_device == "cuda":
        steps = without_event_cost(steps)
    tables = write_steps(folder, device, about, steps)
    if host:
        write_overheads(folder, about, model.name, host)
    return ComputeProfile(folder, device, tuple(steps), tuple(tables), pressure())


def _torch_steppers(shard: Shard, plan: ComputePlan, _host: list[EngineStep]) -> Iterator[Stepper]:
    device = str(plan.torch_device)
    cache_bytes, memory_bytes = machine.last_level_cache_bytes(device), machine.free_memory_bytes(device)
    return torch_steppers(shard, plan, cache_bytes, memory_bytes)


Steppers = Callable[[Shard, ComputePlan, list[EngineStep]], Iterator[Stepper]]
"""Yields the steppers of a shard's kinds of layer, one at a time; an engine's steps are added to the list."""
ENGINES: Mapping[str, tuple[Callable[[ComputePlan], dict[str, str]], Steppers]] = {
    "torch": (lambda plan: {"attention": attention_version(plan.attention)}, _torch_steppers),
    "vllm": (lambda _: {"engine_version": vllm_version()}, vllm_steppers),
}
"""Owner of kernels, torch or vLLM's model -> their provenance, and the steppers that measure them."""


def _measure_shard(
    shard: Shard, folder: Path, plan: ComputePlan, about: dict[str, str], steppers: Iterator[Stepper], notify: Notify
) -> None:
    """Measure the steps of one rank's shard and add them to the journals in `folder`."""
    name, num_layers = shard.model.name, len(shard.model.layers)
    part = replace(plan, budget_s=plan.budget_s and plan.budget_s / len(plan.tp) / num_layers)
    slug = re.sub(r"[^A-Za-z0-9.-]+", "_", name)
    for index, stepper in enumerate(steppers):
        path = folder / JOURNALS / f"{slug}_{plan.engine}_tp{shard.tp}_{index}.jsonl"
        if plan.overwrite:
            path.unlink(missing_ok=True)
        digest = hashlib.sha256(msgspec.json.encode([shard.model, shard.precision, shard.tp, index]))
        journal = Journal(path, about | {"model": name, "shard": digest.hexdigest()[:16]})
        for step in measure_steps(stepper, part, journal.steps, partial(notify, shard.tp)):
            journal.add(step)
        del stepper  # its weights and caches go before the next one's come


def write_steps(
    folder: Path, device: Device, about: dict[str, str], steps: Sequence[MeasuredStep]
) -> list[MeasurementTable]:
    """Write measured steps as a profile with its device; returns its tables."""
    measured = ((operator.op, operator.statistics) for step in steps for operator in step.operators)
    source = f"{device.name}, {about['engine']} {about.get('engine_version', about['torch'])}, {about['clock']}"
    tables = operator_tables(measured, source)
    write_profile(folder, tables, about | {"date": str(datetime.now(UTC).date())})
    write_text(folder / "device.yaml", yaml_text(device))
    return tables


def profile_overheads(
    model: ModelSpec,
    config: Mapping[str, Any] | None,
    engine: str,
    device_name: str,
    folder: Path,
    batches: Sequence[int],
) -> list[EngineStep]:
    """Measure the host's share of an engine's decode steps; writes `calibration.yaml`. InputError where the engine is
    unknown or not installed, or the model has no config.json."""
    known = engines_with("start_stepped")
    check_known(engine, known, f"overheads of {engine!r} cannot be measured")
    if config is None:
        raise InputError(f"{engine} needs the config.json of {model.name}", "give its path as --model")
    stepped: SteppedEngine = known[engine].start_stepped(config, max(batches))
    host = decode_steps(stepped, batches, OVERHEAD_CONTEXT, model.vocab_size)
    stepped.close()
    folder.mkdir(parents=True, exist_ok=True)
    about = {"engine": engine, "engine_version": known[engine].version(), "device": device_name}
    write_overheads(folder, about, model.name, host)
    return host


def write_collectives(folder: Path, device_name: str, plan: CollectivesPlan, timed: Sequence[TimedCollective]) -> None:
    """Add timed collectives to a profile; InputError where it is another device's, or no two workers were timed."""
    import torch

    about = {"backend": plan.backend, "torch": torch.__version__, "date": str(datetime.now(UTC).date())}
    how = ", replayed as a CUDA graph" if plan.backend == "nccl" else ""
    about["method"] = f"wall time of executions in a row{how}, slowest rank"
    add_collectives(folder, device_name, f"{device_name}, {plan.backend}, torch {torch.__version__}", timed, about)


def add_collectives(
    folder: Path, device_name: str, source: str, timed: Sequence[TimedCollective], about: Mapping[str, str]
) -> None:
    """Add timed collectives, of whatever source, to a profile; errors as `write_collectives`."""
    if any((folder / f"{kind}.parquet").is_file() for kind in operator_types()):
        other = profile_provenance(folder).get("device")
        if other != device_name:
            raise InputError(f"{folder} is a profile of {other}, not of {device_name}", "choose another folder")
    write_profile(folder, collective_tables(timed, source), {"device": device_name, **about})


def parse_degrees(text: str) -> tuple[int, ...]:
    """Parse `1,2,4` as numbers; InputError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"{text!r} is not a list of sizes", "for instance 1,2,4,8")
    return tuple(dict.fromkeys(int(part) for part in parts))
