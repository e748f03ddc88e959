"""Explain one forward step: every operator with its seconds, its work, what bounds it and where its time comes from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import unwrap

import numpy as np

from windtunnel.arguments import checked
from windtunnel.errors import InputError, check_known
from windtunnel.model.launches import forward
from windtunnel.model.launches.lora import lora_launches
from windtunnel.model.operators import Elementwise, Launch, Op
from windtunnel.model.sampling import SAMPLING_LAUNCHES, TokenFilter, mask_s
from windtunnel.model.shape import Shard
from windtunnel.notebook import Shown
from windtunnel.pricing.estimator import Estimator, users_estimator
from windtunnel.pricing.roofline import machine
from windtunnel.serving.deployment import Deployment, Pool
from windtunnel.serving.engines.launches import decode_tokens, num_batches, num_launches, unhidden_s
from windtunnel.serving.scenario import Setup
from windtunnel.serving.schedulers.step_cost import launched_s
from windtunnel.serving.setup.encoder import encoder_s, media_launches
from windtunnel.serving.setup.estimators import estimator_for, shard_of
from windtunnel.serving.setup.memory import MemoryPlan, adapter_slots, plan_memory
from windtunnel.serving.setup.overlap import PingPong, expert_layers_share, plan_two_sides
from windtunnel.serving.setup.speculation import drafter_of, speculation_of, with_drafter
from windtunnel.serving.setup.step_prices import (
    PricedLaunch,
    is_compute_bound,
    price_beside,
    price_halves,
    price_launch,
    price_sides,
)
from windtunnel.serving.state.pools import NO_SPECULATION
from windtunnel.units import format_count
from windtunnel.workload.schema import Workload


@dataclass(frozen=True, kw_only=True)
class ExplainedLaunch(PricedLaunch):
    """One operator of a step on one rank; FLOPs and bytes are those of all its executions."""

    flops: float
    num_bytes: float
    """Moved to and from memory; of a collective, sent over the link (bus-bandwidth convention of nccl-tests)."""
    flops_over_peak: float
    """Rate at which its FLOPs are computed over the device's peak for this format."""
    bytes_over_peak: float
    """Rate at which its bytes move over the memory's bandwidth, or the link's; above 1 where a cache holds some."""
    bound_by: str
    """`compute` or `memory`, whichever takes longer at the device's peak rates, or `communication`."""

    @property
    def flops_fraction(self) -> float:
        """Share of the device's peak that is achieved."""
        return min(self.flops_over_peak, 1.0)

    @property
    def bandwidth_fraction(self) -> float:
        """Share of the memory's bandwidth, or the link's, that is achieved: what is faster comes from a cache."""
        return min(self.bytes_over_peak, 1.0)

    @property
    def family(self) -> str:
        """Family of operators that it belongs to: its kind, or `sampling`."""
        return "sampling" if self.name in SAMPLING_LAUNCHES else self.op.kind


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """A step, priced as the simulator prices it."""

    REPORT = "serving.step:step_report"

    setup: Setup
    batch: forward.StepBatch
    num_computed_tokens: int
    """Tokens that the device computes: the batch's, with drafts to verify, padded to a CUDA graph where the step only
    decodes."""
    launches: tuple[ExplainedLaunch, ...]
    memory: MemoryPlan
    host_s: float
    """Scheduling and input preparation of the step."""
    host_overlaps: bool
    """True: the host works beside the device, and the longer of the two decides."""
    launch_s: float
    """Host time to launch the step, which the device waits for in parts; 0 where one CUDA graph holds it."""
    unhidden_s: float
    """Host time that is not hidden even where it overlaps, and gaps between kernels."""
    encoder: tuple[ExplainedLaunch, ...] = ()
    """Operators that encode one image of the workload, or one video where it has no images; not in the step, and empty
    where all requests are text."""
    sides: PingPong | None = None
    """Of a decode step whose attention and feed-forwards run on different devices: a layer of a micro-batch; operators
    are then those of both sides. None elsewhere."""
    pool: str = ""
    """Name of the pool whose replica computes the step; empty for a deployment without pools."""
    hidden_s: float = 0.0
    """Time for which tokens are exchanged beside computing: one half of a step in two halves beside the other, or
    single-batch overlap. Operators add up to so much more than the device takes."""

    @property
    def encoder_s(self) -> float:
        """Seconds that the image or video adds to the step that begins it."""
        return encoder_s(self.encoder, self.setup.engine)

    @property
    def device_s(self) -> float:
        return sum(launch.total_s for launch in self.launches)

    @property
    def step_s(self) -> float:
        """The step's duration."""
        unhidden_step_s = float(self.setup.engine.host.unhidden_step_s or 0.0)
        device_s = self.device_s - self.hidden_s
        if self.sides is not None:
            head_s = sum(launch.total_s for launch in self.launches if launch.name in HEAD_LAUNCHES)
            device_s = float(self.sides.step_s) + head_s
        busy_s = float(unwrap(launched_s)(device_s + self.unhidden_s - unhidden_step_s, self.launch_s))
        busy_s += unhidden_step_s
        return max(busy_s, self.host_s) if self.host_overlaps else busy_s + self.host_s

    @property
    def bound_by(self) -> str:
        """`host` where the device waits for it, else the bound with the most device time."""
        if (self.host_overlaps and self.host_s > self.device_s + self.unhidden_s) or self.launch_s > self.device_s:
            return "host"
        if self.sides is not None:
            return self.sides.bound_by
        return next(iter(self.seconds_by(lambda launch: launch.bound_by)))

    def seconds_by(self, key: Callable[[ExplainedLaunch], str]) -> dict[str, float]:
        """Sum device seconds over the launches of equal `key`, the largest first."""
        sums: dict[str, float] = {}
        for launch in self.launches:
            sums[key(launch)] = sums.get(key(launch), 0.0) + launch.total_s
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


@checked
def explain_step(
    setup: Setup, batch: forward.StepBatch, estimator: Estimator | None = None, workload: Workload | None = None
) -> Explanation:
    """Price one step of `setup`, operator by operator.

    Args:
        setup: what is served, on what (`resolve` makes it from a scenario).
        batch: what one rank computes in the step (`step_batch` makes it from counts).
        estimator: prices operators; None reads the tables measured on the device, or its calibrated roofline.
        workload: says how large images and videos are; None: all requests are text.

    Raises:
        InputError: the model does not fit, or the engine would never form such a step.
    """
    shard = shard_of(setup)
    drafter, (queries, _) = drafter_of(setup, shard), speculation_of(setup) or NO_SPECULATION
    planned = plan_memory if setup.parallelism.ffn is None else plan_two_sides
    memory = planned(shard, setup.device, with_drafter(setup, drafter).engine, setup.max_model_len)
    given_tokens = queries * batch.decode_requests + batch.prefill_tokens
    _check_batch(setup, memory, batch, given_tokens)
    estimator = users_estimator(estimator) if estimator else estimator_for(setup)
    padded_tokens = int(decode_tokens(setup.engine, batch.decode_requests, queries)[-1])
    num_tokens = given_tokens if batch.prefill_tokens else padded_tokens
    sides, microbatches = None, 1
    if setup.parallelism.ffn is not None and not batch.prefill_tokens:
        nodes = np.array([float(batch.decode_requests)]), np.array([batch.decode_context_tokens])
        each = price_sides(estimator, setup.device, shard, setup.engine, nodes)
        microbatches = min(setup.parallelism.ffn.microbatches, batch.decode_requests)
        sides = each.mapped(lambda grid: grid.reshape(-1)[0])
        num_tokens = int(decode_tokens(setup.engine, -(-batch.decode_requests // microbatches))[-1])
    engine, part_tokens = setup.engine, float(num_tokens)
    least = engine.overlap_prefill_tokens if batch.prefill_tokens else engine.overlap_decode_tokens
    if is_split := bool(num_batches(engine, num_tokens, least) > 1):
        microbatches, part_tokens = 2, num_tokens / 2
    positions = batch.sampled + (queries - 1) * batch.decode_requests
    num_sampled = positions if batch.prefill_tokens or microbatches > 1 else num_tokens
    launches = _step_launches(shard, batch, part_tokens, num_sampled, microbatches)
    launches += _draft_launches(drafter, batch, queries - 1)
    host, num_running = engine.host, batch.decode_requests + (batch.prefill_tokens > 0)
    num_launched = num_launches(shard, engine, given_tokens, 0 if batch.prefill_tokens else queries)
    if shard.lora is not None:  # as many adapters as may run together
        launches += lora_launches(shard, given_tokens, min(adapter_slots(setup.engine), num_running))
    encoder: list[Launch] = []
    if workload is not None and workload.draws_media:
        encoder = media_launches(shard, workload, 0 if workload.images is not None else 1, 1)
    return Explanation(
        setup=setup,
        batch=batch,
        num_computed_tokens=num_tokens,
        launches=tuple(_verified([_explain(launch, estimator, setup) for launch in launches], shard, queries)),
        memory=memory,
        host_s=float(host.step_s or 0.0) + (float(host.request_s or 0.0) + mask_s(shard.sampler)) * num_running,
        host_overlaps=bool(setup.engine.async_scheduling),
        launch_s=float((host.launch_s or 0.0) * num_launched),
        unhidden_s=unhidden_s(shard, setup.engine, positions // queries),
        encoder=tuple(_explain(launch, estimator, setup) for launch in encoder),
        sides=sides,
        hidden_s=_hidden_s(setup, batch, num_tokens, estimator, queries if is_split else 0),
    )


def pool_of_step(deployment: Deployment, name: str | None, is_decode: bool | None) -> Pool:
    """Return the pool to explain a step of: the named one, else the first whose role the step has. InputError where
    there is no such pool, or a pool that prefills alone would decode.

    Args:
        name: of a pool; None chooses.
        is_decode: whether the step decodes; None: whatever the pool's role is.
    """
    pools = deployment.groups
    if name is None:
        role = "prefill" if is_decode is False else "decode"
        return next((pool for pool in pools if pool.role in (role, "both")), pools[0])
    if not deployment.pools:
        raise InputError(f"there is no pool {name!r}: the deployment has no pools", "leave --pool out")
    known = [pool.name for pool in pools]
    check_known(name, known, f"there is no pool {name!r}", f"pools that serve tokens: {', '.join(known)}")
    pool = next(pool for pool in pools if pool.name == name)
    if is_decode and pool.role == "prefill":
        raise InputError(
            f"the pool {name} computes prompts and decodes nothing", "give --prefill-tokens, and no --batch"
        )
    return pool


def _hidden_s(setup: Setup, batch: forward.StepBatch, num_tokens: int, estimator: Estimator, queries: int) -> float:
    """Return what a step hides in two halves, where attention of steps with prompts is left out as in the simulator, or
    by single-batch overlap; `queries` of a request, 0 where the step is not split."""
    shard, cores_s, tokens = shard_of(setup), 0.0, np.array([float(num_tokens)])
    if setup.engine.single_batch_overlap:
        return float(price_beside(estimator, setup.device, shard, tokens).hidden_s()[0])
    if not queries:
        return 0.0
    if not batch.prefill_tokens:
        cores = forward.decode_launches(shard, batch.decode_requests / 2, batch.decode_context_tokens)
        priced = _verified([_explain(launch, estimator, setup) for launch in cores], shard, queries)
        cores_s = sum(launch.total_s for launch in priced)
        if (drafter := drafter_of(setup, shard)) is not None:
            drafting = forward.decode_launches(drafter, batch.decode_requests, batch.decode_context_tokens)
            cores_s += (queries - 1) / 2 * sum(price_launch(estimator, launch).total_s for launch in drafting)
    halves = price_halves(estimator, setup.device, shard, tokens, np.zeros((1, 1)))
    return float(halves.hidden_s(expert_layers_share(shard) * cores_s)[0])


@checked
def step_batch(
    decode_requests: int = 0, context_tokens: float = 0.0, prefill_tokens: int = 0, prefill_context_tokens: int = 0
) -> forward.StepBatch:
    """Return a step that decodes equal requests and computes one prompt chunk, its prompt's last.

    Args:
        decode_requests: requests that decode one token.
        context_tokens: tokens that each of them attends to, the one being computed included.
        prefill_tokens: tokens of the chunk.
        prefill_context_tokens: tokens of its prompt that are in the KV cache already.

    Raises:
        InputError: an empty step, or a negative count.
    """
    counts = {
        "batch": decode_requests,
        "context": context_tokens,
        "prefill_tokens": prefill_tokens,
        "prefill context": prefill_context_tokens,
    }
    for name, count in counts.items():
        if not count >= 0:
            raise InputError(f"{name} is {count}; at least 0 is needed", "leave it out for none")
    if decode_requests + prefill_tokens == 0:
        raise InputError("the step is empty", "give batch, prefill_tokens, or both")
    if decode_requests and context_tokens < 1:
        raise InputError(
            f"context is {context_tokens:g}; a decoding request attends to one token at least", "raise context"
        )
    if prefill_context_tokens and not prefill_tokens:
        raise InputError(
            f"prefill context is {prefill_context_tokens:,}, but no prompt is computed", "give prefill tokens too"
        )
    return forward.StepBatch(
        decode_requests=decode_requests,
        decode_context_tokens=float(context_tokens) if decode_requests else 0.0,
        prefill_tokens=prefill_tokens,
        prefill_pairs=prefill_tokens * (prefill_context_tokens + 0.5 * prefill_tokens),
        sampled=decode_requests + (prefill_tokens > 0),
    )


def _check_batch(setup: Setup, memory: MemoryPlan, batch: forward.StepBatch, given_tokens: int) -> None:
    """Raise InputError where the engine's limits or the KV pool rule such a step out."""
    engine = setup.engine
    assert engine.max_num_seqs is not None
    assert engine.max_num_batched_tokens is not None
    if batch.decode_requests > engine.max_num_seqs:
        raise InputError(
            f"a batch of {batch.decode_requests:,} is above max_num_seqs = {engine.max_num_seqs:,} of {engine.name}",
            "raise --max-num-seqs, or decode fewer requests",
        )
    limit = max(engine.max_num_batched_tokens, engine.max_prefill_tokens or 0)
    if given_tokens > limit:
        raise InputError(
            f"a step of {format_count(given_tokens, 'token')} is above max_num_batched_tokens = {limit:,} "
            f"of {engine.name}",
            "raise --max-num-batched-tokens, or compute fewer tokens",
        )
    prompt = batch.prefill_pairs / batch.prefill_tokens + 0.5 * batch.prefill_tokens if batch.prefill_tokens else 0.0
    longest = max(batch.decode_context_tokens, prompt)
    if longest > setup.max_model_len:
        is_whole = setup.max_model_len >= setup.model.max_context_tokens
        limit_text = f"{setup.model.name} accepts" if is_whole else "this run's max_model_len is"
        raise InputError(
            f"a request of {longest:,.0f} tokens is too long: {limit_text} {setup.max_model_len:,}",
            f"use a shorter context or prompt{'' if is_whole else ', or raise --max-model-len'}",
        )
    if setup.model.is_encoder:
        if batch.decode_requests:
            raise InputError(
                f"{setup.model.name} is an encoder, which computes prompts and decodes nothing",
                "give --prefill-tokens, and no --batch",
            )
        return
    fixed = memory.blocks_per_request * memory.block_size / memory.num_groups
    needed = batch.decode_requests * (_kept_tokens(memory, batch.decode_context_tokens) + fixed) + prompt
    if needed > memory.kv_tokens:
        raise InputError(
            f"the batch needs {needed:,.0f} tokens of KV cache; one rank holds {memory.kv_tokens:,}",
            "use a smaller batch or context, more devices (--tp), or --kv-cache-dtype fp8",
        )


def _kept_tokens(memory: MemoryPlan, num_tokens: float) -> float:
    """Return the tokens that a request of `num_tokens` takes of `memory.kv_tokens`: fewer where windows passed some."""
    share = memory.num_window_groups / memory.num_groups
    return num_tokens - share * max(num_tokens - memory.window_tokens, 0.0)


HEAD_LAUNCHES = frozenset({"lm_head", "logits_all_gather", *SAMPLING_LAUNCHES})
"""Launches of a step's end, which all micro-batches share."""

_OUTPUTS = ("o_proj", "o_a_proj", "out_proj")
"""Ends of the names of the first product after the core of attention or of a recurrence."""


def _step_launches(
    shard: Shard, batch: forward.StepBatch, num_tokens: float, num_sampled: int, microbatches: int = 1
) -> list[Launch]:
    """List the launches of a step as the simulator adds them up: `num_tokens` computed, attention over the batch alone.

    With `microbatches` each computes `num_tokens`, and in a step that only decodes its part of attention. In the order
    of execution of a layer; launches that several layer groups share are one, with the sum of the counts.
    """
    left_out = batch.num_tokens - batch.tail_tokens(shard)
    tokens = forward.token_launches(shard, num_tokens, num_tokens - left_out)
    after_cores = next(place for place, launch in enumerate(tokens) if launch.name.endswith(_OUTPUTS))
    tokens = [replace(launch, count=launch.count * microbatches) for launch in tokens]
    cores = forward.attention_launches(shard, batch)
    if microbatches > 1 and not batch.prefill_tokens:
        cores = forward.decode_launches(shard, batch.decode_requests / microbatches, batch.decode_context_tokens)
        cores = [replace(launch, count=launch.count * microbatches) for launch in cores]
    head = forward.head_launches(shard, num_sampled)
    merged: dict[tuple[str, Op], Launch] = {}
    for launch in [*tokens[:after_cores], *cores, *tokens[after_cores:], *head]:
        before = merged.get((launch.name, launch.op))
        merged[launch.name, launch.op] = replace(launch, count=launch.count + (before.count if before else 0.0))
    return list(merged.values())


def _draft_launches(drafter: Shard | None, batch: forward.StepBatch, num_drafts: int) -> list[Launch]:
    """List a pass of the drafter for every draft token of the decoding requests; none without either."""
    requests = batch.decode_requests
    if drafter is None or not requests:
        return []
    decoding = replace(batch, prefill_tokens=0, prefill_pairs=0.0)
    launches = _step_launches(drafter, decoding, requests, requests)
    return [replace(each, name=f"draft_{each.name}", count=each.count * num_drafts) for each in launches]


def _verified(launches: list[ExplainedLaunch], shard: Shard, queries: int) -> list[ExplainedLaunch]:
    """Return launches with attention of `queries` tokens for each decoding request: it reads the cache once, or takes
    all their arithmetic at the device's peak where that is longer (`setup.step_prices.price_steps`)."""
    names = {launch.name for launch in forward.decode_launches(shard, 1.0, 1.0)} if queries > 1 else set()
    cores = [launch for launch in launches if launch.name in names]
    ideal_s = queries * sum(launch.flops_over_peak * launch.each_s * launch.count for launch in cores)
    longer = max(ideal_s / sum(launch.total_s for launch in cores), 1.0) if cores else 1.0
    return [
        replace(
            launch,
            estimate=replace(launch.estimate, seconds=np.asarray(launch.estimate.seconds) * longer),
            flops=queries * launch.flops,
            flops_over_peak=queries * launch.flops_over_peak / longer,
            bytes_over_peak=launch.bytes_over_peak / longer,
            bound_by="compute" if queries * launch.flops_over_peak > launch.bytes_over_peak else launch.bound_by,
        )
        if launch in cores
        else launch
        for launch in launches
    ]


def _explain(launch: Launch, estimator: Estimator, setup: Setup) -> ExplainedLaunch:
    """Price one launch and relate its rates to the device's."""
    op = launch.op
    priced = price_launch(estimator, launch)
    flops, num_bytes = float(np.asarray(op.flops)), float(np.asarray(op.num_bytes))
    peak = machine(setup.device, op.compute_format)
    bytes_per_s = _link_bytes_per_s(setup, op) if op.is_communication else peak.bytes_per_s
    each_s = priced.each_s
    return ExplainedLaunch(
        **vars(priced),
        flops=flops * launch.count,
        num_bytes=num_bytes * launch.count,
        flops_over_peak=flops / (each_s * peak.flops_per_s) if each_s else 0.0,
        bytes_over_peak=num_bytes / (each_s * bytes_per_s) if each_s else 0.0,
        bound_by=_bound_by(op, setup),
    )


def _bound_by(op: Op, setup: Setup) -> str:
    if op.is_communication:
        return "communication"
    if isinstance(op, Elementwise | TokenFilter):
        return "memory"
    return "compute" if bool(is_compute_bound(op, setup.device)) else "memory"


def _link_bytes_per_s(setup: Setup, op: Op) -> float:
    node = setup.node
    link = node.scale_out if getattr(op, "span_nodes", 1) > 1 and node.scale_out is not None else node.scale_up
    return link.bytes_per_s
