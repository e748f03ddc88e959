"""Behaviour of an engine: data in the `behaviour.yaml` of its folder, functions in the `ENGINE` of its module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from windtunnel import catalog
from windtunnel.catalog import ENGINES
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Format
from windtunnel.schema import NonNegative, Schema, Whole
from windtunnel.serving.codes import QUEUE_ORDERS
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.command_line import PLAIN, CommandLine

if TYPE_CHECKING:
    from windtunnel.model.shape import ModelSpec, Shard


class Scheduler(Schema):
    """Behaviour that goes with a scheduler, whatever engine runs it."""

    reads: tuple[str, ...] = ()
    """Settings that this scheduler reads, of those that some schedulers do not."""
    title: str | None = None
    """None: its name says enough."""
    settings: EngineSettings = EngineSettings()
    """Settings that it brings where it is chosen in place of an engine's own."""
    source: str = ""
    """Source of these settings."""
    further_orders: tuple[str, ...] = ()
    """Values of `scheduling_policy` beside the queue orders."""
    window_kv: tuple[str, ...] = ("full",)
    """Possible values of `window_kv`."""
    least_whole_prompt_tokens: int | None = None
    """Prompts run whole, and the default token budget fits the longest request and at least so many tokens."""
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

    @property
    def orders(self) -> tuple[str, ...]:
        """Possible values of `scheduling_policy`."""
        return (*QUEUE_ORDERS, *self.further_orders)


class Launches(Schema):
    """Kernels that the host launches in a step with prefill, and the part of them that CUDA graphs cover."""

    fuses_experts: bool = False
    """One call launches all kernels of experts, whatever their format."""
    of_flashinfer_experts: int = 0
    """Launches that take the host as long as its call of FlashInfer's experts, in NVFP4 or, where their backend is
    named, in blocks of fp8; 0: as other experts."""
    kernels: dict[str, int] = {}
    """Launch -> its kernels, where they are not those of a compiled model."""
    quantises_apart: tuple[Format, ...] = ()
    """Formats of GEMMs whose input a kernel of its own quantises."""
    of_draft: int = 0
    """Launches that take the host as long as a draft token of a model in a step with prefill."""
    of_shared_gate: int = 0
    """Kernels of the gate of shared experts."""
    outside_pieces: tuple[str, ...] = ()
    """Launches beside attention's that no piecewise graph covers."""
    chunked_attention_in_pieces: bool = False
    """Steps that decode with attention in chunks run in pieces, whatever graphs of whole steps there are."""
    chunked_attention_s: NonNegative = 0.0
    """Seconds of a step in which such attention's batches are prepared and the device waits."""
    of_collective_in_pieces: int = 0
    """Launches for each collective of a step in piecewise graphs."""
    graphs_count_requests: bool = False
    """Captured sizes count requests, however many tokens each verifies, and not tokens."""


class LoraBehaviour(Schema):
    """How an engine serves LoRA adapters."""

    ranks: tuple[int, ...] = ()
    """Ranks that its kernels have; empty: any."""
    max_loras: int = 1
    """Default of adapters of one batch."""
    holds_all: bool = False
    """Whether host memory holds every adapter by default, and not just as many as a batch may have."""
    counts_base: bool = False
    """Whether requests to the base model take one of the batch's adapters."""
    decodes_any: bool = False
    """Whether a decode side takes requests whatever their adapter, and fails with more than a batch may have."""


class Behaviour(Schema):
    """An engine's `behaviour.yaml`."""

    schedulers: dict[str, Scheduler] = {}
    """Its own, by the names of `serving.codes`; an installed engine has none, and names a shipped one or a policy."""
    launches: Launches = Launches()
    pooling: EngineSettings | None = None
    """Settings that it takes for embeddings and scores; None: serving these with it is not modelled."""
    lora: LoraBehaviour | None = None
    """None: serving adapters with it is not modelled."""
    gathers_quantised: tuple[Format, ...] = ()
    """Formats of experts for which ranks quantise their tokens before they gather those of all ranks; else bf16."""
    exchanges_without_attention_dp: bool = False
    """Tokens are exchanged by the kernels of `all2all_backend` where attention is split by heads alone too: each rank
    sends its share of them. Others compute the experts of all tokens and sum over ranks."""
    low_latency_tokens: int = 0
    """Tokens of a rank that DeepEP's low-latency buffers have room for; 0: their memory is not counted."""
    normal_buffer_bytes: Whole | None = None
    """Buffer of DeepEP's normal kernels for the links of a node, and as much for those between nodes; None: as DeepEP
    recommends for the ranks."""
    holds_whole_blocks: bool = False
    """Does not start where a rank holds a part of a block of an expert's weights, in FP8 with a scale for each."""
    holds_longest: bool = False
    """Does not start where its KV cache cannot hold one request of the greatest length that it takes."""
    lengthened_by: tuple[str, ...] = ()
    """Options, and a variable of the environment, without which it does not start where the greatest length is beyond
    the model's own; empty: it lowers that length."""
    decode_streams_first: bool = False
    """The decode side streams the prefill side's first output, when the request enters a batch there."""
    decode_samples_first: bool = False
    """Behind its proxies the decode side computes the last prompt token again, and so the first output."""


def sizes_by_8_and_16(engine: EngineSettings) -> Sequence[int]:
    """Return vLLM's captured sizes: 1, 2, 4, by 8 to 256, and by 16 beyond (`vllm/config/vllm.py`, 0.10 to 0.24)."""
    largest = engine.max_cudagraph_capture_size or 0
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if size <= largest]


@dataclass(frozen=True)
class Engine:
    """Functions of an engine; the first three go with its schedulers, whatever engine runs them. Those of an installed
    engine, whose scheduler is a shipped one or a function, are called behind the scheduler's."""

    limited: Callable[[EngineSettings, EngineSettings], EngineSettings] = lambda _given, resolved: resolved
    """(given, resolved) -> settings within the limits that the engine sets itself."""
    split_over_ranks: Callable[[dict[str, Any], int], None] = lambda _settings, _attention_dp: None
    """Divides the defaults, in place, over the attention data-parallel ranks."""
    memory_share: Callable[[EngineSettings, Device, Parallelism], float] | None = None
    """Default of `gpu_memory_utilization`, for versions whose entry says `static_memory`."""
    most_tokens_in_pieces: Callable[[Shard, EngineSettings, float], float] = lambda _shard, _engine, largest: largest
    """(shard, engine, largest captured size) -> tokens up to which a step with prefill runs in piecewise graphs."""
    captured_sizes: Callable[[EngineSettings], Sequence[int]] = sizes_by_8_and_16
    """Sizes up to `max_cudagraph_capture_size`, 1 or more, that have a CUDA graph, ascending."""
    command_line: CommandLine = PLAIN


def engine_of(name: str) -> Engine:
    """Return the functions of an engine; neutral ones where it is only data. InputError where there is no such engine,
    or its package's `ENGINE` is something else."""
    spelled = catalog.spelling("engines", name)
    engine = getattr(ENGINES.get(spelled), "ENGINE", Engine()) if spelled in ENGINES.names() else Engine()
    if not isinstance(engine, Engine):
        raise InputError(
            f"ENGINE of the package of the engine {spelled!r} is no {Engine.__module__}.Engine",
            "see the recipe in CONTRIBUTING.md",
        )
    return engine


def behaviour_of(name: str) -> Behaviour:
    """Return an engine's behaviour, neutral for one of a user's catalog; InputError where there is no such engine."""
    path = catalog.engine_file(catalog.spelling("engines", name), "behaviour.yaml")
    behaviour = Behaviour() if path is None else catalog.entry(path, Behaviour)
    if behaviour.schedulers and catalog.spelling("engines", name) not in ENGINES.shipped:
        hint = "name a shipped scheduler, or a policy in Python, in defaults.yaml"
        raise InputError(f"behaviour.yaml of the installed engine {name!r} describes schedulers", hint)
    return behaviour


def split_columns(name: str, model: ModelSpec, experts: Format, experts_tp: int) -> int | None:
    """Return the columns of an expert on a rank, where they end within a block of 128 and the engine does not start."""
    if experts is not Format.FP8_BLOCK or not behaviour_of(name).holds_whole_blocks:
        return None
    widths = (getattr(part, "intermediate_size", 0) for _, part in model.feed_forwards if part.num_experts)
    return next((width // experts_tp for width in widths if width // experts_tp % 128), None)


def scheduler_of(settings: EngineSettings) -> Scheduler:
    """Return the behaviour of the scheduler in force; the neutral one for a user's own."""
    return schedulers().get(str(settings.scheduler), Scheduler())


def owners_of(scheduler: str | None, engine: str) -> list[Engine]:
    """Return the functions that go with a scheduler: those of the engine whose own it is, and behind them those of the
    `engine` that runs it, where it is an installed one."""
    names = [name for name in ENGINES.shipped if scheduler in _shipped_behaviour(name).schedulers]
    owners = [getattr(ENGINES.get(name), "ENGINE", Engine()) for name in names]
    return owners if catalog.spelling("engines", engine) in ENGINES.shipped else [*owners, engine_of(engine)]


@cache
def schedulers() -> dict[str, Scheduler]:
    """Return the schedulers of all shipped engines by name."""
    owners = map(_shipped_behaviour, ENGINES.shipped)
    return {name: scheduler for owner in owners for name, scheduler in owner.schedulers.items()}


@cache
def _shipped_behaviour(engine: str) -> Behaviour:
    path = catalog.engine_file(engine, "behaviour.yaml")
    assert path is not None
    return catalog.entry(path, Behaviour)
