"""Schema of a calibration: corrections of an engine on a device from measured runs, and their uncertainty.

It holds the host's overheads, factors on the time of classes of operators, the spread of errors that remained on runs
left out of the fit, and the record of how it was made. Shipped ones are files of the catalog, named after their engine
and device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from windtunnel import catalog, schema
from windtunnel.errors import InputError, did_you_mean
from windtunnel.metrics.uncertainty import Spread
from windtunnel.serving.deployment import EngineSettings, HostOverheads
from windtunnel.units import is_unreleased, version_key
from windtunnel.workload.client import Client

NONE = "none"
"""The name that turns calibration off."""

NOT_AMONG = "was not among the runs"

METRICS = ("tpot", "ttft", "e2e", "throughput")
"""Metrics that have a spread; throughput is that of output tokens."""


class Provenance(schema.Schema):
    """How a calibration was made."""

    fitted_on: str
    """The runs, by name."""
    num_runs: schema.Whole
    num_configurations: schema.Whole
    """Distinct models, formats, parallelisms and settings; cross-validation leaves out whole ones."""
    models: tuple[str, ...] = ()
    models_on: dict[str, tuple[str, ...]] = {}
    """Device -> those of `models` that ran on it."""
    versions: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    median_error: dict[str, float] = {}
    """Metric -> median |error| of runs left out."""
    median_error_before: dict[str, float] = {}
    """Metric -> median |error| without calibration."""
    median_error_fitted: dict[str, float] = {}
    """Metric -> median |error| of the runs that were fitted, where they are one configuration, which none can be left
    out of; else empty."""


class Inferred(schema.Schema):
    """Engine settings that were not recorded in runs of a model, inferred from their results."""

    device: str
    version: str
    model: str
    settings: dict[str, int | float]
    """Field of `EngineSettings` -> its value."""
    num_runs: schema.Whole
    num_configurations: schema.Whole
    median_error_before: dict[str, float] = {}
    """Metric -> median |error| with the engine's defaults."""
    median_error: dict[str, float] = {}
    """Metric -> median |error| with the settings inferred from runs of other configurations."""

    def check(self) -> None:
        unknown = [name for name in self.settings if name not in EngineSettings.__struct_fields__]
        if unknown:
            raise ValueError(f"settings.{unknown[0]} is no setting of an engine")
        for name, value in self.settings.items():
            try:
                msgspec.convert({name: value}, EngineSettings)
            except msgspec.ValidationError:
                raise ValueError(f"settings.{name} cannot be {value}") from None


class Reserve(schema.Schema):
    """Memory on every device that is neither KV cache nor weights nor activations."""

    reserved_bytes: schema.Whole
    num_runs: schema.Whole
    num_configurations: schema.Whole
    median_error_before: dict[str, float] = {}
    median_error: dict[str, float] = {}
    """As of `Inferred`."""


class TransferRecord(schema.Schema):
    """Median |error| of TTFT in disaggregated runs left out of the fit of `LearntTransfer`."""

    num_runs: schema.Whole
    num_configurations: schema.Whole
    median_error: float
    median_error_before: float
    """Median |error| with the defaults."""


OUTSIDE_SHARE = 0.5
"""Share of a factor, as a power of it, that holds for a release older than those of all runs, and of overheads for a
newer one, whose factors are 1: part of both is what their releases do, and tables were measured on newer releases.
Chosen among 0, 0.5 and 1 by what was recorded of vLLM 0.24 on an H200 (`benchmarks/h200.py`) and of 0.20.1 on B300
(`benchmarks/engine_steps.py`); `docs/decisions.md` has the errors of each.
"""


class LearntTransfer(schema.Schema):
    """KV transfers to this engine, fitted to measured runs: see `serving.deployment.Transfer`."""

    latency_s: schema.NonNegative
    link_efficiency: schema.PositiveFraction
    record: TransferRecord


class LearntAcceptance(schema.Schema):
    """The share of draft tokens that explains runs which did not record it."""

    model: str
    num_draft_tokens: schema.AtLeastOne
    fraction: schema.Fraction
    """Of draft tokens that are right if those before them are; see `Speculative.acceptance_fraction`."""
    num_runs: schema.AtLeastOne


class Calibration(schema.Schema):
    """Corrections of one engine, on one device or on any."""

    engine: str
    provenance: Provenance
    device: str | None = None
    """None: any device, from the runs of all."""
    host: HostOverheads = HostOverheads()
    releases: dict[str, HostOverheads] = {}
    """Release (`0.10`) -> overheads fitted to runs of its versions; `host` holds for all others."""
    clients: dict[str, Client] = {}
    """Name of a client -> its own times, which `host` does not hold; another client keeps those of the catalog."""
    factors: dict[str, float] = {}
    """Class of operators -> measured over priced time; see `pricing.calibrated`. Classes that are not listed
    have factor 1."""
    acceptance: tuple[LearntAcceptance, ...] = ()
    """Fitted to runs with speculative decoding that did not record it; one for a model and a number of draft tokens in
    all engines."""
    inferred: tuple[Inferred, ...] = ()
    """Settings for deployments whose settings are assumed."""
    reserve: Reserve | None = None
    """None: the engine's defaults."""
    transfer: LearntTransfer | None = None
    """None: the fit to runs of separate pools was no better than the defaults."""
    spread: dict[str, Spread] = {}
    """Metric -> the spread of errors that remained."""
    spread_assumed: dict[str, Spread] = {}
    """Metric -> the spread for runs with assumed settings; empty where there were none."""

    def host_of(self, version: str) -> HostOverheads:
        return self.releases.get(release_of(version), self.host)

    def settings_of(self, device: str, version: str, model: str) -> dict[str, int | float]:
        """Return the settings inferred for servers whose settings were not all recorded."""
        for inferred in self.inferred:
            if (inferred.device, inferred.version, inferred.model) == (device, version, model):
                return inferred.settings
        return {}

    def check(self) -> None:
        schema.check_positive(**{f"factors.{name}": value for name, value in self.factors.items()})
        unknown = [name for name in (*self.spread, *self.spread_assumed) if name not in METRICS]
        if unknown:
            raise ValueError(f"there is no spread of {unknown[0]!r}; known: {', '.join(METRICS)}")


def acceptance_of(learnt: Iterable[LearntAcceptance], model: str, num_draft_tokens: int) -> LearntAcceptance | None:
    """Return what was fitted for the model: for this number of draft tokens, or else for the nearest one."""
    kin = (one for one in learnt if one.model == model)
    return min(kin, key=lambda one: abs(one.num_draft_tokens - num_draft_tokens), default=None)


def release_of(version: str) -> str:
    """Return the release of a version: `0.10` of `0.10.2`, `1.2` of `1.2.0rc0.post1`; empty without a version number.
    InputError where it is not a version."""
    if not version or is_unreleased(version):
        return ""
    major, minor, *_ = version_key(version)
    return f"{major}.{minor}"


def load_calibration(name: str) -> Calibration:
    """Read a calibration from a file or the catalog (`vllm-h100_sxm`); InputError where it is missing or malformed."""
    path, known = Path(name), catalog.names("calibrations")
    # A folder `vllm`, as the engine's source is cloned into, is none.
    if path.suffix in (".yaml", ".yml", ".json") or (name not in known and path.exists()):
        try:
            return schema.decode(schema.read_yaml(path), Calibration, str(path))
        except InputError as error:
            raise error.or_hint("`windtunnel calibrate` writes such files") from None
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
    is_newer: bool = False
    """The engine's release is newer than those of all runs."""

    def host(self, version: str, default: HostOverheads) -> HostOverheads:
        """Return the overheads of a version: the calibration's, or between them and `default` where it is newer.
        ValueError where there is no calibration."""
        if self.calibration is None:
            raise ValueError("there is no calibration")
        learnt = self.calibration.host_of(version)
        if not self.is_newer:
            return learnt
        between = {}
        for name in HostOverheads.__struct_fields__:
            usual, found = getattr(default, name), getattr(learnt, name)
            between[name] = usual ** (1 - OUTSIDE_SHARE) * found**OUTSIDE_SHARE if usual and found else found
        return HostOverheads(**between)


def calibration_for(engine: str, device: str, version: str, name: str | None = None) -> Choice:
    """Choose a calibration: the named one, else the shipped one of the engine on the device, else on any device.

    One whose runs' versions enclose `version` goes first. For a version outside all of them, and for an unreleased one,
    that with the nearest version is taken, and `outside` says so. The median errors of 14 runs of vLLM and 6 of SGLang
    from images without a release fall from 26% to 14% and 39% to 18% (TTFT), from 3.3% to 3.0% and 6.0% to 2.7% (TPOT;
    `benchmarks/accuracy.py`). Of factors for an older release, and of overheads for a newer one, `OUTSIDE_SHARE` holds.
    InputError where it is another engine's, there is none of that name, or it is malformed.
    """
    if name == NONE:
        return Choice(reason="none was asked for")
    if name is not None:
        calibration = load_calibration(name)
        if calibration.engine != engine:
            raise InputError(
                f"the calibration {name} is of {calibration.engine}, and the engine is {engine}",
                "its overheads and factors are another program's",
            )
        return Choice(name, calibration)
    known = catalog.names("calibrations")
    shipped = {entry: load_calibration(entry) for entry in (f"{engine}-{device}", engine) if entry in known}
    if not shipped:
        return Choice(reason=f"no runs of {engine} were measured")
    chosen = min(shipped, key=lambda entry: _distance(shipped[entry], version))
    found = shipped[chosen]
    if not _distance(found, version) or is_unreleased(version):
        return Choice(chosen, found)
    is_newer = version_key(version) > max(map(version_key, found.provenance.versions))
    factors = {} if is_newer else {name: factor**OUTSIDE_SHARE for name, factor in found.factors.items()}
    return Choice(chosen, msgspec.structs.replace(found, factors=factors), is_newer=is_newer)


def _distance(calibration: Calibration, version: str) -> tuple[int, ...]:
    """Return a key that sorts calibrations by how far a version lies outside those of their runs; least within them."""
    measured = sorted(map(version_key, calibration.provenance.versions))
    if not measured or measured[0] <= version_key(version) <= measured[-1]:
        return ()
    return measured[0] if version_key(version) < measured[0] else tuple(-number for number in measured[-1])


def outside(
    calibration: Calibration, device: str, model: str, formats: tuple[str, ...], version: str, client: str = ""
) -> dict[str, str]:
    """Return how a deployment differs from all runs of `calibration`: phrase -> kind; no client: times are given."""
    seen = calibration.provenance
    remarks = {}
    if seen.devices and device not in seen.devices:
        remarks[f"fitted on other devices ({', '.join(seen.devices)})"] = "device"
    if seen.models and model not in seen.models:
        remarks[f"the model {NOT_AMONG}"] = "model"
    elif device in seen.models_on and model not in seen.models_on[device]:
        remarks[f"the model {NOT_AMONG} on this device"] = "model"
    unseen = [name for name in formats if seen.formats and name not in seen.formats]
    remarks |= {f"{name} was not among the formats": "format" for name in unseen}
    if client and calibration.clients and client not in calibration.clients:
        remarks[f"the client {NOT_AMONG}"] = "client"
    if seen.versions and version not in seen.versions:
        oldest, *_, newest = sorted(seen.versions, key=version_key) * 2
        is_between = version_key(oldest) <= version_key(version) <= version_key(newest)
        if is_between:
            remarks[f"version {version} {NOT_AMONG}"] = "version between"
        else:
            remarks[f"version {version} lies outside {oldest} to {newest}"] = "version"
    return remarks
