"""Defaults of engines: settings by version and device memory, kept as data in `catalog/engines`."""

from collections.abc import Sequence
from typing import Any

import msgspec

from windtunnel import catalog
from windtunnel.errors import InputError, did_you_mean
from windtunnel.hardware import Device
from windtunnel.model.parallelism import Parallelism
from windtunnel.schema import Schema
from windtunnel.serving import codes
from windtunnel.serving.codes import QUEUE_ORDERS
from windtunnel.serving.deployment import EngineSettings, HostOverheads
from windtunnel.serving.engines.effects import check_effects, read_by_one_only
from windtunnel.units import GIB, MIB, format_bytes
from windtunnel.versions import version_key

ENGINE_SCHEDULERS = codes.SCHEDULERS
"""Schedulers of the engines in the catalog."""
OTHER_SCHEDULERS = codes.PER_REQUEST_SCHEDULERS[:-1]
"""Schedulers that may be chosen instead, with the settings of `catalog/schedulers.yaml`."""
SCHEDULERS = (*ENGINE_SCHEDULERS, *OTHER_SCHEDULERS)


WIDE_TP = 4
"""Tensor-parallel devices from which SGLang captures more graphs (`server_args.py`)."""


class MemoryDefaults(Schema):
    """Settings on devices of at least `from_bytes`; they replace those of smaller devices."""

    from_bytes: float
    settings: EngineSettings
    wide_settings: EngineSettings = EngineSettings()
    """Settings over `WIDE_TP` or more devices."""


class VersionDefaults(Schema):
    """Settings from version `since` on; they replace those of older entries one by one."""

    since: str
    settings: EngineSettings
    by_memory: tuple[MemoryDefaults, ...] = ()
    """Ascending."""
    static_memory: bool = False
    """True: `gpu_memory_utilization` is what SGLang's reserves leave, `static_memory_fraction`."""


class EngineDefaults(Schema):
    """One engine of the catalog; `versions` ascend."""

    title: str
    default_version: str
    versions: tuple[VersionDefaults, ...]
    sources: dict[str, str] = {}
    vendors: tuple[str, ...] | None = None
    """Vendors of the devices it runs on; None: any."""
    window_architectures: tuple[str, ...] | None = None
    """Model types to which `window_kv` applies, the KV of others is kept in full; None: all."""


class SchedulerDefaults(Schema):
    """Settings of a scheduler that is chosen instead of the engine's own."""

    source: str
    settings: EngineSettings


def scheduler_defaults(name: str) -> EngineSettings:
    """Return the settings of `catalog/schedulers.yaml` for the scheduler `name`."""
    path = catalog.shipped("schedulers.yaml")
    return catalog.entry(path, dict[str, SchedulerDefaults])[name].settings


def is_users_own(scheduler: str) -> bool:
    """Whether `scheduler` names a policy in Python, as `module:function`."""
    return ":" in scheduler


def engine_defaults(name: str) -> EngineDefaults:
    """Return the catalog's entry of the engine `name`.

    Raises:
        InputError: there is no such engine.
    """
    path = catalog.find("engines", name)
    return catalog.entry(path, EngineDefaults)


def with_defaults(
    settings: EngineSettings,
    device: Device,
    calibrated: EngineSettings | None = None,
    shape: Parallelism | None = None,
) -> EngineSettings:
    """Replace every `None` in `settings` by the default of that engine and version on `device`.

    Fields that have no default anywhere (`max_model_len`, `num_gpu_blocks`, `cudagraph_sizes`, `attention_backend`,
    `moe_backend`, `kv_tiers`, `window_pool_ratio`) stay `None`.

    Args:
        settings: as given; what they say stays.
        device: the engine runs on it.
        calibrated: overheads and settings that replace the defaults.
        shape: the replica's parallelism; None: one device.

    Raises:
        InputError: an unknown engine or scheduler, a version older than any that the catalog describes, or a setting
            that the scheduler does not read.
    """
    shape, calibrated = shape or Parallelism(), calibrated or EngineSettings()
    version, entries = _entries(settings, device)
    merged = _catalog_settings(entries, device, shape)
    overlay(merged, msgspec.structs.replace(calibrated, name=settings.name))
    if settings.scheduler in OTHER_SCHEDULERS:
        overlay(merged, scheduler_defaults(settings.scheduler))
    default = EngineSettings(**merged)
    overlay(merged, settings)
    merged["version"] = version
    resolved = _within_budget(settings, EngineSettings(**merged))
    if (
        (settings.gpu_memory_utilization, calibrated.gpu_memory_utilization) == (None, None)
        and any(entry.static_memory for entry in entries)
        and resolved.scheduler == "sglang"
    ):
        share = static_memory_fraction(resolved, device, shape)
        resolved = msgspec.structs.replace(resolved, gpu_memory_utilization=share)
    _check_scheduler(settings, resolved, default)
    return resolved


def _entries(settings: EngineSettings, device: Device) -> tuple[str, list[VersionDefaults]]:
    """Return the engine's version and the catalog's entries up to it; refuse a device of another vendor."""
    defaults = engine_defaults(settings.name)
    if defaults.vendors is not None and device.vendor not in defaults.vendors:
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


def _catalog_settings(entries: Sequence[VersionDefaults], device: Device, shape: Parallelism) -> dict[str, Any]:
    """Merge the entries of a version, the newest over the oldest, with what they say about `device` and `shape`."""
    merged: dict[str, Any] = {}
    for entry in entries:
        overlay(merged, entry.settings)
        for tier in entry.by_memory:
            if device.memory_bytes >= tier.from_bytes:
                overlay(merged, tier.settings)
                overlay(merged, tier.wide_settings if shape.tp * shape.attention_dp >= WIDE_TP else EngineSettings())
    if merged["scheduler"] == "sglang":
        _split_over_ranks(merged, shape.attention_dp)
    return merged


def _check_scheduler(given: EngineSettings, resolved: EngineSettings, default: EngineSettings) -> None:
    """Raise InputError for a scheduler that does not exist, or a setting that it does not read."""
    scheduler = str(resolved.scheduler)
    if not is_users_own(scheduler):
        if scheduler not in SCHEDULERS:
            raise InputError(
                f"there is no scheduler {scheduler!r}",
                did_you_mean(scheduler, SCHEDULERS, f"known: {', '.join(SCHEDULERS)}"),
            )
        check_effects(given, resolved, default)
    if resolved.scheduling_policy == "lpm" and scheduler != "sglang":
        raise InputError(
            f"scheduling_policy lpm is SGLang's; the scheduler is {scheduler}",
            f"others are {', '.join(order for order in QUEUE_ORDERS)}",
        )


def _split_over_ranks(merged: dict[str, Any], attention_dp: int) -> None:
    """Divide SGLang's limits over the attention data-parallel ranks; its admission is bolder with several.

    Source: `server_args.py` (`chunked_prefill_size // dp_size`, `schedule_conservativeness * 0.3`) and
    `model_executor/model_runner.py` (`max_running_requests // dp_size`), 0.5.
    """
    if attention_dp > 1:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            merged[name] = max(merged[name] // attention_dp, 1)
        merged["schedule_conservativeness"] *= SPLIT_CONSERVATIVENESS


SPLIT_CONSERVATIVENESS = 0.3

LEAST_STATIC_RESERVE = 10 * GIB
LARGE_STATIC_BYTES = 60 * GIB


def static_memory_fraction(engine: EngineSettings, device: Device, shape: Parallelism) -> float:
    """Return SGLang's default `mem_fraction_static`: memory less its reserves, as a share, to three digits.

    The reserves are for metadata, a chunk's activations, CUDA graphs, ranks and drafts.

    Source: SGLang `server_args.py`, `_handle_gpu_memory_settings` (pull request 10975, from 0.5.3 on). Its
    reserves for multimodal models, and for piecewise graphs (half a GiB from 0.5.10 on), are left out.
    """
    assert engine.max_num_batched_tokens is not None
    assert engine.max_cudagraph_capture_size is not None
    groups, graphs = shape.attention_dp, engine.max_cudagraph_capture_size
    reserve = 512 + 1.5 * max(engine.max_num_batched_tokens * groups, 2048) + 2.0 * graphs
    reserve += shape.tp * groups * shape.pp / 8 * 1024
    if groups > 1:
        reserve += (4.5 if graphs > 300 else 3.0) * graphs * groups
    reserve *= MIB
    if device.memory_bytes > LARGE_STATIC_BYTES:
        reserve = max(reserve, LEAST_STATIC_RESERVE)
    if engine.speculative is not None and engine.speculative.method != "ngram":
        reserve += (6 if engine.speculative.method == "draft_model" else 2) * GIB
    share = (device.memory_bytes - reserve) / device.memory_bytes
    if share <= 0:
        raise InputError(
            f"SGLang would keep {format_bytes(reserve)} of {device.title}'s {format_bytes(device.memory_bytes)} from "
            "weights and KV cache",
            "set engine.gpu_memory_utilization, or a smaller engine.max_num_batched_tokens",
        )
    return round(share, 3)


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


def _within_budget(given: EngineSettings, resolved: EngineSettings) -> EngineSettings:
    """Limit running requests to the tokens of a step, which vLLM demands: it lowers its own default.

    Source: vllm/engine/arg_utils.py, `_set_default_args`, and vllm/config/scheduler.py, `verify_max_model_len`, at
    commit 01230b40.

    Raises:
        InputError: more requests were asked for.
    """
    seqs, budget = resolved.max_num_seqs, resolved.max_num_batched_tokens
    if resolved.scheduler != "vllm_v1" or seqs is None or budget is None or seqs <= budget:
        return resolved
    if given.max_num_seqs is not None:
        raise InputError(
            f"max_num_seqs is {seqs:,}, more than max_num_batched_tokens, which is {budget:,}; vLLM refuses that",
            "a step must have a token for every running request: lower the one or raise the other",
        )
    return msgspec.structs.replace(resolved, max_num_seqs=budget)


def with_windows(given: EngineSettings, resolved: EngineSettings, architecture: str) -> EngineSettings:
    """Set `window_kv` as the engine has it for models of that `architecture`, unless it was `given`.

    Schedulers other than the engines' own keep every token of every layer.

    Raises:
        InputError: the scheduler has no such pool.
    """
    kept = resolved.window_kv
    only = engine_defaults(resolved.name).window_architectures
    if given.window_kv is None and only is not None and architecture not in only:
        kept = "full"
    if resolved.scheduler not in ENGINE_SCHEDULERS:
        if given.window_kv not in (None, "full"):
            raise InputError(
                f"the scheduler {resolved.scheduler} keeps every token of every layer; engine.window_kv is "
                f"{given.window_kv}",
                "leave engine.window_kv out",
            )
        kept = "full"
    elif kept == "shared_pool" and resolved.scheduler != "vllm_v1":
        raise InputError(
            f"window_kv shared_pool is vLLM's; the scheduler is {resolved.scheduler}", "known here: full, own_pool"
        )
    elif kept == "own_pool" and resolved.scheduler == "vllm_v1":
        raise InputError("window_kv own_pool is not vLLM's", "known here: full, shared_pool")
    return msgspec.structs.replace(resolved, window_kv=kept)


LEAST_WHOLE_PROMPT_TOKENS = 2048


def whole_prompt_tokens(given: EngineSettings, resolved: EngineSettings, max_model_len: int) -> EngineSettings:
    """Set vLLM V0's default token budget, into which the longest prompt fits, as prompts run whole.

    Source: vllm/config.py, `SchedulerConfig.__post_init__`, 0.4 to 0.7: max(max_model_len, 2048) without chunked
    prefill.
    """
    if resolved.scheduler != "vllm_v0" or given.max_num_batched_tokens is not None:
        return resolved
    budget = max(max_model_len, LEAST_WHOLE_PROMPT_TOKENS)
    return msgspec.structs.replace(resolved, max_num_batched_tokens=budget)


def overlay(merged: dict[str, Any], layer: EngineSettings) -> None:
    """Set in `merged` the fields that `layer` gives."""
    for name in layer.__struct_fields__:
        value = getattr(layer, name)
        if isinstance(value, HostOverheads):
            merged[name] = value.over(merged.get(name, HostOverheads()))
        elif value is not None:
            merged[name] = value
