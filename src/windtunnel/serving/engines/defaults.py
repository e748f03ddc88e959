"""Defaults of engines: settings by version and device memory, from the `defaults.yaml` of each engine's folder.

A setting that a scheduler never reads is refused, so that nobody relies on a setting without effect. One without effect
only for the model, the workload or a degree of 1 is accepted: a search passes through it.
"""

from collections import ChainMap
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec

from windtunnel import catalog
from windtunnel.errors import InputError, check_known, check_number, listed
from windtunnel.hardware import Device
from windtunnel.model.parallelism import Parallelism
from windtunnel.plugins import Registry
from windtunnel.schema import Schema, read_yaml
from windtunnel.serving import codes
from windtunnel.serving.deployment import EngineSettings, HostOverheads, is_own_order
from windtunnel.serving.engines.contract import Scheduler, behaviour_of, owners_of, scheduler_of, schedulers
from windtunnel.units import version_key

ENGINE_SCHEDULERS = codes.SCHEDULERS
"""Schedulers that engines have by default."""
OTHER_SCHEDULERS = codes.PER_REQUEST_SCHEDULERS[:-1]
"""Schedulers that may be chosen instead and bring settings of their own."""
SCHEDULERS = (*ENGINE_SCHEDULERS, *OTHER_SCHEDULERS)


NEEDED = ("scheduler", "max_num_seqs", "max_num_batched_tokens", "block_size", "gpu_memory_utilization")
"""Settings without which no engine can be simulated."""
WIDE_TP = 4
"""Tensor-parallel devices from which SGLang captures more graphs (`server_args.py`)."""


class Case(Schema):
    """Settings on the devices and shapes of a replica that it names; they replace those of the cases before."""

    settings: EngineSettings
    wide_settings: EngineSettings = EngineSettings()
    """Settings over `WIDE_TP` or more ranks."""
    from_bytes: float = 0.0
    """Least memory of the device."""
    from_ranks: int = 1
    """Least number of ranks that share each layer."""
    devices: tuple[str, ...] = ("",)
    """Architectures, and starts of names."""
    except_devices: tuple[str, ...] = ()
    """Starts of the names of devices that are left out."""
    tp: tuple[int, ...] = ()
    """Degrees of tensor parallelism; empty: any."""
    without: tuple[str, ...] = ()
    """Degrees of parallelism that must be 1: `pp`, `attention_dp`."""

    def applies_to(self, device: str, architecture: str, memory_bytes: float, shape: Parallelism) -> bool:
        """Whether the settings hold for a device that runs a replica of this `shape`."""
        is_named = architecture in self.devices or device.startswith(self.devices)
        is_large = memory_bytes >= self.from_bytes and shape.tp * shape.attention_dp >= self.from_ranks
        is_split = (not self.tp or shape.tp in self.tp) and all(getattr(shape, name) == 1 for name in self.without)
        return is_named and is_large and is_split and not device.startswith(self.except_devices)


class Profiling(Schema):
    """The profiling run of an engine version; one without it has the neutral values."""

    sampler_bytes: float = 8.0
    """Bytes of the sampler's temporaries for each logit, at their peak, beside the logits themselves."""
    sampler_rows_by_sm: bool = False
    """Whether the sampler keeps a row of fp32 logits for each streaming multiprocessor."""
    samples_prompts: bool = False
    """Whether the run samples the longest prompts that the token budget holds, and not `max_num_seqs` requests."""
    keeps_experts_workspace: bool = False
    """Whether the workspace of experts stays allocated between layers and steps."""
    first_graph_bytes: float = 0.0
    """Memory set aside for the largest CUDA graph; 0: graphs are captured outside the engine's share of the memory."""
    graph_bytes: float = 0.0
    """Memory set aside for each further CUDA graph."""


class VersionDefaults(Schema, eq=False):
    """Settings from version `since` on; they replace those of older entries one by one. Its hash is by identity."""

    since: str
    settings: EngineSettings
    by_memory: tuple[Case, ...] = ()
    """Ascending."""
    by_ranks: tuple[Case, ...] = ()
    """Ascending; by tensor-parallel and attention data-parallel ranks."""
    by_device: tuple[Case, ...] = ()
    """Later ones replace earlier ones."""
    fused_architectures: tuple[str, ...] | None = None
    """Model types whose all-reduces are fused, others' are not; None: those of the version before, and at first all."""
    unfused_architectures: tuple[str, ...] | None = None
    """Model types none of whose all-reduces is fused, whatever the settings; None: those of the version before."""
    whole_kv_architectures: tuple[str, ...] | None = None
    """Model types whose KV is kept in full, whatever `window_kv`; None: those of the version before."""
    stage_settings: EngineSettings = EngineSettings()
    """Settings of a pipeline stage of one device."""
    by_backend: dict[str, EngineSettings] = {}
    """`EngineSettings.backend` -> settings that also replace those of a calibration, which is of another one."""
    profiling: Profiling | None = None
    """None: that of the version before."""
    kernels: dict[str, int] = {}
    """As `Launches.kernels`; each stays for newer versions."""
    serial_products: tuple[str, ...] | None = None
    """Architectures on which block-scaled products go through k in one piece; None: those of the version before."""
    shared_expert_routed: tuple[str, ...] | None = None
    """Architectures on which the shared expert is one more routed one; None: those of the version before."""
    caches_states: bool | None = None
    """Whether prefixes of models with recurrences are cached by default; None: as the version before, at first yes."""
    captured_tokens: dict[str, int] = {}
    """Model type -> its default of `max_cudagraph_capture_size`; each stays for newer versions."""
    static_memory: bool = False
    """True: `gpu_memory_utilization` is what the engine's reserves leave, `Engine.memory_share`."""


class EngineDefaults(Schema):
    """One engine of the catalog; `versions` ascend."""

    title: str
    default_version: str
    versions: tuple[VersionDefaults, ...]
    newest_version: str | None = None
    """Newest version whose sources the entries were checked against; None: not said."""
    sources: dict[str, str] = {}
    vendors: tuple[str, ...] | None = None
    """Vendors of the devices it runs on; None: any."""
    window_architectures: tuple[str, ...] | None = None
    """Model types to which `window_kv` applies, the KV of others is kept in full; None: all."""
    untemplated_architectures: tuple[str, ...] = ()
    """Model types whose chats become prompts without a template, so that `host.chat_s` is 0."""

    def check(self) -> None:
        first = self.versions[0].settings if self.versions else EngineSettings()
        if absent := [name for name in NEEDED if getattr(first, name) is None]:
            raise ValueError(f"settings of the first of versions lack {', '.join(absent)}, which have no other default")


OWN_SCHEDULERS = Registry("windtunnel.schedulers", None, "scheduler", taken=SCHEDULERS)
"""Policies in Python that installed packages offer by name."""


def is_own_scheduler(scheduler: str) -> bool:
    """Whether `scheduler` is a policy in Python: `module:function`, or one that an installed package offers."""
    return ":" in scheduler or scheduler in OWN_SCHEDULERS


def engine_defaults(name: str) -> EngineDefaults:
    """Return the catalog's entry of the engine `name`; InputError where there is no such engine."""
    return catalog.entry(catalog.find("engines", name), EngineDefaults)


def newer_than_known(settings: EngineSettings) -> str:
    """Return a sentence for a version beyond all whose defaults are known, empty for others; the newest are taken."""
    defaults = engine_defaults(settings.name)
    newest, version = defaults.newest_version, settings.version or defaults.default_version
    if newest is None or version_key(version) <= version_key(newest):
        return ""
    return f"{defaults.title} {version} is newer than {newest}, whose defaults are the newest known and are taken"


def with_defaults(
    settings: EngineSettings, device: Device, calibrated: EngineSettings | None = None, shape: Parallelism | None = None
) -> EngineSettings:
    """Replace every `None` in `settings` by the default of that engine and version on `device`.

    Fields that have no default anywhere (`max_model_len`, `num_gpu_blocks`, `max_kv_tokens`, `kv_cache_memory_bytes`,
    `cudagraph_sizes`, `attention_backend`, `moe_backend`, `kv_tiers`, `window_pool_ratio`) stay `None`, and `backend`
    of the engines that have one. InputError for an unknown engine or scheduler, a version older than any that the
    catalog describes, or a setting that the scheduler does not read.

    Args:
        calibrated: overheads and settings that replace the defaults.
        shape: the replica's parallelism; None: one device.
    """
    shape, calibrated = shape or Parallelism(), calibrated or EngineSettings()
    version, entries = _entries(settings, device)
    known = device.name, device.architecture, device.memory_bytes
    merged = dict(_catalog_settings(settings.name, tuple(entries), known, shape))
    overlay(merged, msgspec.structs.replace(calibrated, name=settings.name))
    backend = settings.backend or merged.get("backend", "")
    for entry in (entry for entry in entries if backend in entry.by_backend):
        overlay(merged, entry.by_backend[backend])
    if settings.scheduler in OTHER_SCHEDULERS:
        overlay(merged, schedulers()[settings.scheduler].settings)
    default = EngineSettings(**merged)
    overlay(merged, settings)
    merged["version"] = version
    if (spelled := catalog.spelling("engines", settings.name)) != settings.name:
        merged["name"] = spelled
    resolved = EngineSettings(**merged)
    is_open = (settings.gpu_memory_utilization, calibrated.gpu_memory_utilization) == (None, None)
    for owner in owners_of(resolved.scheduler, settings.name):
        limited: Any = owner.limited(settings, resolved)
        if not isinstance(limited, EngineSettings):
            raise InputError(f"limited of the engine {settings.name!r} returned {limited!r:.60}, not EngineSettings")
        resolved = limited
        if is_open and owner.memory_share is not None and any(entry.static_memory for entry in entries):
            share = owner.memory_share(resolved, device, shape)
            check_number(share, f"memory_share of the engine {settings.name}")
            resolved = msgspec.structs.replace(resolved, gpu_memory_utilization=share)
    _check_scheduler(settings, resolved, default)
    return resolved


def profiling_of(settings: EngineSettings) -> Profiling:
    """Return the profiling run of an engine version."""
    _, entries = _entries(settings, None)
    return next((entry.profiling for entry in reversed(entries) if entry.profiling is not None), Profiling())


def kernels_of(settings: EngineSettings) -> Mapping[str, int]:
    """Return the launches whose kernels an engine version counts otherwise than a compiled model does."""
    _, entries = _entries(settings, None)
    return dict(ChainMap(*(entry.kernels for entry in reversed(entries)), behaviour_of(settings.name).launches.kernels))


def applies_on(settings: EngineSettings, architecture: str, name: str) -> bool:
    """Whether an engine version's list of architectures of that `name` (`VersionDefaults`) has this one."""
    lists = (getattr(entry, name) for entry in reversed(_entries(settings, None)[1]))
    return architecture in next((found for found in lists if found is not None), ())


def _entries(settings: EngineSettings, device: Device | None) -> tuple[str, list[VersionDefaults]]:
    """Return the engine's version and the catalog's entries up to it; refuse a device of another vendor."""
    defaults = engine_defaults(settings.name)
    if device is not None and defaults.vendors is not None and device.vendor not in defaults.vendors:
        raise InputError(
            f"{defaults.title} does not run on {device.title}",
            f"it runs on devices of {' and '.join(defaults.vendors)}; other engines run on this one",
        )
    version = settings.version or defaults.default_version
    entries = [entry for entry in defaults.versions if version_key(entry.since) <= version_key(version)]
    if not entries:
        oldest = defaults.versions[0].since
        raise InputError(f"{defaults.title} {version} is older than {oldest}, the first version that is known")
    return version, entries


@lru_cache(1000)
def _catalog_settings(
    name: str, entries: tuple[VersionDefaults, ...], device: tuple[str, str, float], shape: Parallelism
) -> Mapping[str, Any]:
    """Merge the entries of a version, the newest over the oldest, with what they say about a device and `shape`; once,
    since a search asks for the same thousands of times."""
    merged: dict[str, Any] = {}
    ranks = shape.tp * shape.attention_dp
    for entry in entries:
        overlay(merged, entry.settings)
        for case in (*entry.by_memory, *entry.by_ranks, *entry.by_device):
            if case.applies_to(*device, shape):
                overlay(merged, case.settings)
                overlay(merged, case.wide_settings if ranks >= WIDE_TP else EngineSettings())
        overlay(merged, entry.stage_settings if ranks == 1 < shape.pp else EngineSettings())
    for owner in owners_of(merged["scheduler"], name):
        owner.split_over_ranks(merged, shape.attention_dp)
    return merged


def _check_scheduler(given: EngineSettings, resolved: EngineSettings, default: EngineSettings) -> None:
    """Raise InputError for a scheduler that does not exist, or a setting that it does not read."""
    scheduler = str(resolved.scheduler)
    if not is_own_scheduler(scheduler):
        known = (*SCHEDULERS, *OWN_SCHEDULERS.names(), "module:function")
        check_known(scheduler, known, f"there is no scheduler {scheduler!r}")
        check_effects(given, resolved, default)
    orders = scheduler_of(resolved).orders
    order = resolved.scheduling_policy
    if order not in (None, *orders) and not is_own_order(str(order)):
        raise InputError(f"the scheduler {scheduler} has no scheduling_policy {order}", f"it has {', '.join(orders)}")


def for_another_engine(given: EngineSettings, other: EngineSettings) -> EngineSettings:
    """Return the settings `given` to one engine that hold for `other`, an engine of another name, too.

    Left out are the version, an engine's own scheduler, and settings that the scheduler reads and the other's does not.
    """
    scheduler = None if given.scheduler in ENGINE_SCHEDULERS else given.scheduler
    other_scheduler = other.scheduler or scheduler or _scheduler_of(other)
    left_out = ["version", *read_by_one_only(given, _scheduler_of(given), other_scheduler)]
    if scheduler is None:
        left_out.append("scheduler")
    return msgspec.structs.replace(given, name=other.name, **dict.fromkeys(left_out))


def _scheduler_of(settings: EngineSettings) -> str:
    """Return the scheduler in force: the given one, or the engine's own."""
    defaults = (entry.settings.scheduler for entry in engine_defaults(settings.name).versions)
    return settings.scheduler or next(name for name in defaults if name is not None)


def for_architecture(
    given: EngineSettings, resolved: EngineSettings, architecture: str, is_recurrent: bool = False
) -> EngineSettings:
    """Set `window_kv`, `fused_all_reduce`, `enable_prefix_caching`, `max_cudagraph_capture_size` and `host.chat_s` as
    the engine has them for models of that `architecture`, with recurrent layers or without, unless `given`.

    Schedulers other than the engines' own keep every token of every layer. InputError where the scheduler has no such
    pool.
    """
    only, versions = engine_defaults(resolved.name).window_architectures, _entries(resolved, None)[1][::-1]
    fused, unfused, whole = (
        next((types for types in lists if types is not None), None)
        for lists in zip(
            *((each.fused_architectures, each.unfused_architectures, each.whole_kv_architectures) for each in versions),
            strict=True,
        )
    )
    possible, is_whole = scheduler_of(resolved).window_kv, architecture in (whole or ())
    kept = given.window_kv or resolved.window_kv
    if given.window_kv is None and (possible == ("full",) or is_whole or (only and architecture not in only)):
        kept = "full"
    if kept not in (None, *possible):
        raise InputError(
            f"the scheduler {resolved.scheduler} has no window_kv {kept}",
            f"it has {', '.join(possible)}; or leave engine.window_kv out",
        )
    fuses = resolved.fused_all_reduce
    if fuses:
        is_possible = unfused is None or architecture not in unfused
        fuses = is_possible and (bool(given.fused_all_reduce) or fused is None or architecture in fused)
    caches = next((entry.caches_states for entry in versions if entry.caches_states is not None), True)
    if is_recurrent and not caches and given.enable_prefix_caching is None:
        resolved = msgspec.structs.replace(resolved, enable_prefix_caching=False)
    captured = next((size for each in versions if (size := each.captured_tokens.get(architecture))), None)
    if captured and (given.max_cudagraph_capture_size, given.cudagraph_sizes) == (None, None):
        captured = min(captured, resolved.max_num_batched_tokens or captured)
        resolved = msgspec.structs.replace(resolved, max_cudagraph_capture_size=captured)
    host = resolved.host
    if architecture in engine_defaults(resolved.name).untemplated_architectures and given.host.chat_s is None:
        host = msgspec.structs.replace(host, chat_s=0.0)
    return msgspec.structs.replace(resolved, window_kv=kept, fused_all_reduce=fuses, host=host)


def whole_prompt_tokens(given: EngineSettings, resolved: EngineSettings, max_model_len: int) -> EngineSettings:
    """Set the default token budget of a scheduler that runs prompts whole, into which the longest one fits."""
    least = scheduler_of(resolved).least_whole_prompt_tokens
    if least is None or given.max_num_batched_tokens is not None:
        return resolved
    return msgspec.structs.replace(resolved, max_num_batched_tokens=max(max_model_len, least))


def overlay(merged: dict[str, Any], layer: EngineSettings) -> None:
    """Set in `merged` the fields that `layer` gives."""
    for name in layer.__struct_fields__:
        value = getattr(layer, name)
        if isinstance(value, HostOverheads):
            merged[name] = value.over(merged.get(name, HostOverheads()))
        elif value is not None:
            merged[name] = value


@cache
def read_by() -> Mapping[str, tuple[str, ...]]:
    """Return setting -> the schedulers that read it; all read any other setting, or refuse it for another reason."""
    readers: dict[str, tuple[str, ...]] = {}
    for name in SCHEDULERS:
        for setting in schedulers()[name].reads:
            readers[setting] = (*readers.get(setting, ()), name)
    return readers


OFF: Mapping[str, Any] = read_yaml(Path(__file__).with_name("off.yaml"))
"""Values that mean the same as leaving the setting out."""


def check_effects(given: EngineSettings, resolved: EngineSettings, default: EngineSettings) -> None:
    """Raise InputError where `given` has a setting that has no effect with the scheduler of `resolved`.

    `default`: the settings without `given`; to repeat them is no error, since a resolved scenario does.
    """
    for name, readers in read_by().items():
        if _is_said(given, default, name) and resolved.scheduler not in readers:
            raise InputError(
                f"engine.{name} = {_shown(given, name)} changes nothing: the scheduler {resolved.scheduler} does not "
                f"read it; {listed(readers)} {'does' if len(readers) == 1 else 'do'}",
                f"leave engine.{name} out",
            )
    if _is_said(given, default, "kv_load_overlaps") and not resolved.kv_tiers:
        raise InputError(
            f"engine.kv_load_overlaps = {_shown(given, 'kv_load_overlaps')} changes nothing: it needs engine.kv_tiers, "
            "which blocks are loaded from",
            "leave engine.kv_load_overlaps out, or give engine.kv_tiers",
        )
    if _is_said(given, default, "window_pool_ratio") and resolved.window_kv != "own_pool":
        raise InputError(
            f"engine.window_pool_ratio = {given.window_pool_ratio:g} changes nothing: it needs engine.window_kv "
            f"own_pool, and that is {resolved.window_kv}",
            "leave engine.window_pool_ratio out",
        )


def read_by_one_only(given: EngineSettings, scheduler: str, other: str) -> list[str]:
    """List the settings in `given` that `scheduler` reads and the scheduler `other` does not."""
    only = [name for name, readers in read_by().items() if scheduler in readers and other not in readers]
    has, lacks = (schedulers().get(name, Scheduler()) for name in (scheduler, other))
    if given.scheduling_policy in has.orders and given.scheduling_policy not in lacks.orders:
        only.append("scheduling_policy")
    if given.window_kv in has.window_kv and given.window_kv not in lacks.window_kv:
        only += ["window_kv", "window_pool_ratio"]
    return [name for name in only if getattr(given, name) is not None]


def _is_said(given: EngineSettings, default: EngineSettings, name: str) -> bool:
    """Whether `given` has a value that is neither the default nor means leaving it out."""
    return getattr(given, name) not in (None, getattr(default, name), OFF.get(name))


def _shown(given: EngineSettings, name: str) -> str:
    return str(getattr(given, name)).lower()
