"""What an engine's folder says of its behaviour: one `Engine`, with its schedulers, launches and command line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.catalog import ENGINES
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.forward import Shard
from windtunnel.model.parallelism import Parallelism
from windtunnel.serving.codes import QUEUE_ORDERS
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.command_line import CommandLine

LAUNCHES_OF_GATED_DELTA = 10
"""Kernels of Gated DeltaNet: the convolution, two norms, gating, and the six of `chunk_gated_delta_rule_fwd`
(flash-linear-attention 0.3, which vLLM and SGLang carry)."""


def _as_resolved(_given: EngineSettings, resolved: EngineSettings) -> EngineSettings:
    """Return the resolved settings: nothing limits them further."""
    return resolved


def _undivided(_settings: dict[str, Any], _attention_dp: int) -> None:
    """Leave the limits as they are: they are those of one rank."""


@dataclass(frozen=True)
class Scheduler:
    """Behaviour that goes with a scheduler, whatever engine runs it."""

    reads: tuple[str, ...] = ()
    """Settings that this scheduler reads, of those that some schedulers do not."""
    title: str | None = None
    """None: its name says enough."""
    settings: Path | None = None
    """File of the settings that it brings where it is chosen in place of an engine's own, by scheduler."""
    orders: tuple[str, ...] = QUEUE_ORDERS
    """Possible values of `scheduling_policy`."""
    window_kv: tuple[str, ...] = ("full",)
    """Possible values of `window_kv`."""
    limited: Callable[[EngineSettings, EngineSettings], EngineSettings] = _as_resolved
    """(given, resolved) -> settings within the limits that the engine sets itself."""
    split_over_ranks: Callable[[dict[str, Any], int], None] = _undivided
    """Divides the defaults, in place, over the attention data-parallel ranks."""
    least_whole_prompt_tokens: int | None = None
    """Prompts run whole, and the default token budget fits the longest request and at least so many tokens."""
    sampler_bytes: float | None = None
    """Bytes of one logit while the engine profiles its memory; None: a rank's share in bf16 and twice in fp32."""
    memory_share: Callable[[EngineSettings, Device, Parallelism], float] | None = None
    """Default of `gpu_memory_utilization`, for versions whose entry says `static_memory`."""
    share_has_activations: bool = True
    """Whether `gpu_memory_utilization` counts activations too, beside weights and KV blocks."""
    never_preempts: bool = False
    """Admits a request only with blocks for its whole output."""
    reserves_longest: bool = False
    """Reserves blocks for the longest possible request, whatever the request's own length."""
    counts_free_blocks: bool = False
    """Admits by the free and the expected blocks, so that limits beyond a load's reach still decide."""
    decode_computes_first_token: bool = True
    """Whether its decode side can compute the first output, from the last prompt token."""


@dataclass(frozen=True)
class Launches:
    """Kernels that the host launches in a step with prefill, and the part of them that CUDA graphs cover."""

    fuses_experts: bool = False
    """One call launches all kernels of experts, whatever their format."""
    kernels: Mapping[str, int] = field(default_factory=lambda: {"gated_delta_prefill": LAUNCHES_OF_GATED_DELTA})
    """Launch -> its kernels, where they are not one."""
    quantises_apart: bool = False
    """A kernel of its own quantises the input of a GEMM of less than 16 bits."""
    of_shared_experts: int = 0
    """Further kernels of shared experts."""
    of_shared_gate: int = 0
    """Further kernels of their gate."""
    of_collective_in_pieces: int = 0
    """Launches for each collective of a step in piecewise graphs."""
    most_tokens_in_pieces: Callable[[Shard, EngineSettings, float], float] = lambda _shard, _engine, largest: largest
    """(shard, engine, largest captured size) -> tokens up to which a step with prefill runs in piecewise graphs."""


@dataclass(frozen=True)
class Engine:
    """Everything of an engine that is not a default; the neutral one stands for an engine that is only data."""

    schedulers: Mapping[str, Scheduler] = field(default_factory=dict)
    """Its own, by the names of `serving.codes`; an installed engine has none and names a shipped one."""
    launches: Launches = Launches()
    command_line: CommandLine | None = None
    """None: commands of its server are neither read nor written."""
    decode_streams_first: bool = False
    """The decode side streams the prefill side's first output, when the request enters a batch there."""
    decode_samples_first: bool = False
    """Behind its proxies the decode side computes the last prompt token again, and so the first output."""


def engine_of(name: str) -> Engine:
    """Return the behaviour of an engine; the neutral one for an engine that a user's catalog adds as data alone.

    Raises:
        InputError: there is no such engine, or its package does not say what it is.
    """
    spelled = catalog.spelling("engines", name)
    if spelled not in ENGINES.names():
        return Engine()
    engine = getattr(ENGINES.get(spelled), "ENGINE", None)
    if not isinstance(engine, Engine):
        raise InputError(
            f"the package of the engine {spelled!r} has no ENGINE of type {Engine.__module__}.Engine",
            "see the recipe in CONTRIBUTING.md",
        )
    return engine


def scheduler_of(settings: EngineSettings) -> Scheduler:
    """Return the behaviour of the scheduler in force; the neutral one for a user's own."""
    return schedulers().get(str(settings.scheduler), Scheduler())


@cache
def schedulers() -> dict[str, Scheduler]:
    """Return the schedulers of all shipped engines by name."""
    return {
        name: scheduler
        for engine in ENGINES.shipped
        for name, scheduler in ENGINES.get(engine).ENGINE.schedulers.items()
    }
