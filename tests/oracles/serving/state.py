"""The oracle's objects: a request, what it computes in a step, the scheduler and memory that it runs on, a step."""

import math
from dataclasses import dataclass, field
from typing import Any

from oracles.serving.cache import RankCache, Segment
from oracles.serving.encoder import EmbeddingCache, EncoderCache, Item


@dataclass(eq=False)
class Request:
    """A request and what became of it."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    priority: int = 0
    segments: tuple[Segment, ...] = ()
    """Of its prompt and output, root first, as far as they can be cached."""
    previous: int = -1
    """Its predecessor in a session."""
    think_s: float = 0.0
    session: int = -1
    sequence: int = -1
    """Requests sent before it."""
    sent_s: float = math.nan
    """By the client; `arrival_s` is when it was last sent to a replica."""
    media: tuple[Item, ...] = ()
    """Images and videos, in the order of the prompt."""
    tenant: int = 0
    ttft_limit_s: float = math.inf
    queue_key: int = 0
    """What it is ordered by while it waits, before `sequence`."""
    key_order: int = -1
    """The queue order of the pool that it was at last."""
    order: tuple[int, int] = (0, 0)
    """Its place in the queue."""
    shared_blocks: int = 0
    """Of those that it holds, in the prefix cache."""
    num_used_segments: int = 0
    loading_blocks: int = 0
    """Of those that it was found to have, in lower tiers."""
    load_s: float = 0.0
    cached_tokens: int = -1
    """Found when it was first admitted."""
    computed_tokens: int = 0
    num_outputs: int = 0
    num_blocks: int = 0
    num_window_blocks: int = 0
    """Of the windows' own pool."""
    passed: int = 0
    """Blocks of its tokens, from the first on, that no window sees any more and that were given back."""
    passed_before: int = 0
    """The step that is being formed."""
    lost_prompt: int = 0
    """Prompt tokens that a restart made a per-request scheduler take for outputs."""
    slides: bool = False
    num_preemptions: int = 0
    adapter: int = -1
    """LoRA adapter, or -1: the base model."""
    is_decoding: bool = False
    """Its prefill, or the prefill after its latest preemption, is complete."""
    slot: int = -1
    """While decoding: the one of the replica's batches in flight that it belongs to."""
    scheduled_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    finish_s: float = math.nan

    @property
    def known_tokens(self) -> int:
        return self.input_tokens + self.num_outputs - self.lost_prompt

    @property
    def wanted_tokens(self) -> int:
        return self.known_tokens - self.computed_tokens

    @property
    def remaining_outputs(self) -> int:
        return self.output_tokens + self.lost_prompt - self.num_outputs


@dataclass(frozen=True)
class Chunk:
    """What a request computes in one step."""

    tokens: int
    computed_before: int
    emits_token: bool
    decodes: bool
    gained: int = 1
    """Output tokens, where it decodes."""


@dataclass(eq=False)
class Rank:
    """A scheduler and its KV pool."""

    free_blocks: int
    free_window_blocks: int
    batches: list[dict[int, Chunk]]
    """Per slot, request index -> its part of the step under way."""
    encoder: EncoderCache | None = None
    embeddings: EmbeddingCache | None = None
    cache: RankCache = field(default_factory=RankCache)
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    handed: list[Any] = field(default_factory=list)
    """Handoffs, `engine.KvTransfer`, whose KV waits on the prefill side for blocks here."""
    pulled: list[Any] = field(default_factory=list)
    """They hold blocks: their KV is under way."""
    ready: list[Any] = field(default_factory=list)
    """It has come, and the request is in no batch yet."""
    load_s: float = 0.0
    """To load for the batch that is being formed."""
    adapters: Any = None
    """`adapters.RankAdapters`; None where no request has a LoRA adapter."""
    new_token_ratio: float = 0.0
    steps_to_receive: int = 0
    waited_steps: int = 0
    balance_waited: int = 0
    balance_ready: int = 0
    holds_back: bool = False
    fair_tag: int = 0
    """The most service that an admitted request's tenant had had when it was sent."""

    @property
    def num_outstanding(self) -> int:
        return len(self.running) + len(self.waiting)

    def is_in_flight(self, request: Request, slot: int) -> bool:
        if request.is_decoding:
            return request.slot != slot and any(chunk.decodes for chunk in self.batches[request.slot].values())
        return any(request.index in batch for other, batch in enumerate(self.batches) if other != slot)


@dataclass(frozen=True)
class Step:
    """One step of one replica."""

    start_s: float
    duration_s: float
    replica: int
    chunks: dict[int, Chunk]
    """Request index -> what it computes; empty where a failure cuts the step short."""
    used_blocks: int
    num_running: int
    num_waiting: int
    gaps_s: list[float]
    """Time since the request's previous token, for every token of the step that is not a first one."""

    @property
    def scheduled(self) -> dict[int, int]:
        """Request index -> tokens."""
        return {index: chunk.tokens for index, chunk in self.chunks.items()}
