"""Settings of an engine that some schedulers never read.

Given to such a scheduler, a setting is refused, so that nobody relies on a setting without effect. One without effect
only for the model, the workload or a degree of 1 is accepted: a search passes through it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from windtunnel.errors import InputError
from windtunnel.serving import codes
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.contract import Scheduler, schedulers


@cache
def read_by() -> Mapping[str, tuple[str, ...]]:
    """Return setting -> the schedulers that read it; all read any other setting, or refuse it for another reason."""
    readers: dict[str, tuple[str, ...]] = {}
    for name in (*codes.SCHEDULERS, *codes.PER_REQUEST_SCHEDULERS[:-1]):
        for setting in schedulers()[name].reads:
            readers[setting] = (*readers.get(setting, ()), name)
    return readers


OFF: Mapping[str, Any] = {
    "long_prefill_token_threshold": 0,
    "receive_interval_steps": 1,
    "batch_wait_timeout_iters": 0,
    "batch_wait_max_tokens_ratio": 0.0,
    "attention_dp_timeout_iters": 0,
    "attention_dp_batching_wait_iters": 0,
    "watermark_fraction": 0.0,
    "max_waiting_steps": 0,
}
"""Values that mean the same as leaving the setting out."""


def check_effects(given: EngineSettings, resolved: EngineSettings, default: EngineSettings) -> None:
    """Raise InputError where `given` has a setting that has no effect with the scheduler of `resolved`.

    `default`: the settings without `given`; to repeat them is no error, since a resolved scenario does.
    """
    for name, readers in read_by().items():
        if _is_said(given, default, name) and resolved.scheduler not in readers:
            raise InputError(
                f"engine.{name} = {_shown(given, name)} changes nothing: the scheduler {resolved.scheduler} does not "
                f"read it; {_listed(readers)}",
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


def _listed(readers: tuple[str, ...]) -> str:
    if len(readers) == 1:
        return f"{readers[0]} does"
    return f"{', '.join(readers[:-1])} and {readers[-1]} do"
