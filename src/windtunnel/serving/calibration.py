"""A calibration: what measured runs say about an engine on a device that no operator table holds, and how sure it is.

It holds the host's overheads, factors on the time of classes of operators, the spread of errors that remained on runs
left out of the fit, and the record of how it was made. Shipped ones are files of the catalog, named after their engine
and device.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from windtunnel import catalog
from windtunnel.errors import InputError, did_you_mean
from windtunnel.metrics.uncertainty import Spread
from windtunnel.schema import (
    Schema,
    check_fraction,
    check_non_negative,
    check_positive,
    check_positive_fraction,
    decode,
    read_yaml,
)
from windtunnel.serving.deployment import EngineSettings, HostOverheads
from windtunnel.versions import is_unreleased, version_key

NONE = "none"
"""The name that turns calibration off."""

METRICS = ("tpot", "ttft", "e2e", "throughput")
"""What a spread is given for; throughput is that of output tokens."""


class Provenance(Schema):
    """How a calibration was made."""

    fitted_on: str
    """The runs, by name."""
    num_runs: int
    num_configurations: int
    """Distinct models, formats, parallelisms and settings; cross-validation leaves out whole ones."""
    models: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    median_error: dict[str, float] = {}
    """Metric -> median |error| of runs left out."""
    median_error_before: dict[str, float] = {}
    """The same without calibration."""


class Inferred(Schema):
    """Engine settings that nobody recorded of runs of a model, as these runs speak for them."""

    device: str
    version: str
    model: str
    settings: dict[str, int | float]
    """Of `EngineSettings`, by name."""
    num_runs: int
    num_configurations: int
    median_error_before: dict[str, float] = {}
    """Metric -> median |error| with the engine's defaults."""
    median_error: dict[str, float] = {}
    """The same with the settings that the runs of other configurations speak for."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.settings if name not in EngineSettings.__struct_fields__]
        if unknown:
            raise ValueError(f"settings.{unknown[0]} is no setting of an engine")
        for name, value in self.settings.items():
            try:
                msgspec.convert({name: value}, EngineSettings)
            except msgspec.ValidationError:
                raise ValueError(f"settings.{name} cannot be {value}") from None


class Reserve(Schema):
    """Memory that an engine keeps from its KV cache beside weights and activations, on every device."""

    reserved_bytes: int
    num_runs: int
    num_configurations: int
    median_error_before: dict[str, float] = {}
    median_error: dict[str, float] = {}
    """As of `Inferred`."""

    def __post_init__(self) -> None:
        check_non_negative(reserved_bytes=self.reserved_bytes)


class TransferRecord(Schema):
    """How far TTFT was off in disaggregated runs left out of the fit of `LearntTransfer`."""

    num_runs: int
    num_configurations: int
    median_error: float
    median_error_before: float
    """With the defaults."""


class LearntTransfer(Schema):
    """What measured runs say about handing KV caches over to this engine: see `serving.deployment.Transfer`."""

    latency_s: float
    link_efficiency: float
    record: TransferRecord

    def __post_init__(self) -> None:
        check_non_negative(latency_s=self.latency_s)
        check_positive_fraction(link_efficiency=self.link_efficiency)


class Calibration(Schema):
    """What was learnt about one engine, on one device or on any."""

    engine: str
    provenance: Provenance
    device: str | None = None
    """None: any device, from the runs of all."""
    host: HostOverheads = HostOverheads()
    releases: dict[str, HostOverheads] = {}
    """Release (`0.10`) -> the overheads of its versions, where runs of one were fitted; `host` is of all others."""
    factors: dict[str, float] = {}
    """Class of operators -> measured over priced time; see `pricing.calibrated`. What is not listed is 1."""
    acceptance: dict[str, float] = {}
    """Model -> share of draft tokens accepted, fitted to runs with speculative decoding that did not record it. One
    share of a model, of whatever engine."""
    inferred: tuple[Inferred, ...] = ()
    """For deployments whose settings are assumed."""
    reserve: Reserve | None = None
    """None: what the engine's defaults say."""
    transfer: LearntTransfer | None = None
    """None: runs of separate pools taught nothing better than the defaults."""
    spread: dict[str, Spread] = {}
    """Metric -> what remained."""
    spread_assumed: dict[str, Spread] = {}
    """The same of runs whose settings were not recorded but assumed; empty where there were none."""

    def host_of(self, version: str) -> HostOverheads:
        """The overheads of a version of the engine."""
        return self.releases.get(release_of(version), self.host)

    def settings_of(self, device: str, version: str, model: str) -> dict[str, int | float]:
        """Settings inferred for servers of whose settings nobody recorded all."""
        for one in self.inferred:
            if (one.device, one.version, one.model) == (device, version, model):
                return one.settings
        return {}

    def __post_init__(self) -> None:
        check_positive(**{f"factors.{name}": value for name, value in self.factors.items()})
        check_fraction(**{f"acceptance.{name}": value for name, value in self.acceptance.items()})
        unknown = [name for name in (*self.spread, *self.spread_assumed) if name not in METRICS]
        if unknown:
            raise ValueError(f"there is no spread of {unknown[0]!r}; known: {', '.join(METRICS)}")


def release_of(version: str) -> str:
    """The release that a version belongs to: `0.10` of `0.10.2`, `1.2` of `1.2.0rc0.post1`; nothing of a nightly
    build or where none is recorded.

    Raises:
        InputError: it is not a version.
    """
    if not version or is_unreleased(version):
        return ""
    major, minor, *_ = version_key(version)
    return f"{major}.{minor}"


def load_calibration(name: str) -> Calibration:
    """The calibration in a file, or of the catalog by name (`vllm-h100_sxm`).

    Raises:
        InputError: there is none, or it is malformed.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json") or path.exists():
        try:
            return decode(read_yaml(path), Calibration, str(path))
        except InputError as error:
            raise error.or_hint("`windtunnel calibrate` writes such files") from None
    known = catalog.names("calibrations")
    if name not in known:
        hint = did_you_mean(name, [*known, NONE], f"a YAML file, {NONE}, or one of: {', '.join(known)}")
        raise InputError(f"there is no calibration {name!r}", hint)
    return catalog.entry(catalog.find("calibrations", name), Calibration)


@dataclass(frozen=True)
class Choice:
    """The calibration in force, or why there is none."""

    name: str | None = None
    calibration: Calibration | None = None
    reason: str = ""


def calibration_for(engine: str, device: str, version: str, wanted: str | None = None) -> Choice:
    """The calibration to use: the one asked for, else the shipped one of the engine on the device, else on any device.

    A shipped one is taken for versions from the oldest to the newest of its runs. Tables of operators are measured on
    versions newer than those, and the further from the runs, the less of what they taught still holds: with versions
    held out (`benchmarks/accuracy.py`) calibrated predictions are the better ones but of the newest vLLM.

    Raises:
        InputError: it is another engine's, there is none of that name, or it is malformed.
    """
    if wanted == NONE:
        return Choice(reason="none was asked for")
    if wanted is not None:
        found = load_calibration(wanted)
        if found.engine != engine:
            raise InputError(
                f"the calibration {wanted} is of {found.engine}, and the engine is {engine}",
                "its overheads and factors are another program's",
            )
        return Choice(wanted, found)
    known = catalog.names("calibrations")
    shipped = {name: load_calibration(name) for name in (f"{engine}-{device}", engine) if name in known}
    for name, found in shipped.items():
        measured = sorted(found.provenance.versions, key=version_key)
        if measured and version_key(measured[0]) <= version_key(version) <= version_key(measured[-1]):
            return Choice(name, found)
    if not shipped:
        return Choice(reason=f"no runs of {engine} were measured")
    seen = sorted({version for found in shipped.values() for version in found.provenance.versions}, key=version_key)
    advice = f"--calibration {next(iter(shipped))} applies what they taught"
    return Choice(reason=f"version {version} lies outside those measured, {seen[0]} to {seen[-1]}; {advice}")


def outside(calibration: Calibration, device: str, model: str, formats: tuple[str, ...], version: str) -> list[str]:
    """In what a deployment differs from all runs that `calibration` was fitted on, as short phrases."""
    seen = calibration.provenance
    remarks = []
    if seen.devices and device not in seen.devices:
        remarks.append(f"fitted on other devices ({', '.join(seen.devices)})")
    if seen.models and model not in seen.models:
        remarks.append("the model was not among the runs")
    remarks += [f"{name} was not among the formats" for name in formats if seen.formats and name not in seen.formats]
    if seen.versions and version not in seen.versions:
        remarks.append(f"version {version} was not among the runs")
    return remarks
