"""Settings of schedulers that may batch any subset of requests, and what they cannot run."""

import numpy as np

from windtunnel.errors import InputError
from windtunnel.serving import codes
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.contract import scheduler_of
from windtunnel.serving.engines.defaults import ENGINE_SCHEDULERS, is_own_scheduler
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.serving.state.records import KernelSettings
from windtunnel.workload.generate.requests import RequestArrays


def schedules_per_request(setup: Setup) -> bool:
    """Whether the engine's scheduler may batch any subset of its requests."""
    return setup.engine.scheduler not in ENGINE_SCHEDULERS


def per_request_settings(
    setup: Setup, memory: MemoryPlan, settings: KernelSettings, requests: RequestArrays
) -> KernelSettings:
    """Add to `settings` how such a scheduler forms batches."""
    engine = setup.engine
    longest = int((requests.input_tokens + requests.output_tokens).max())
    reserves = scheduler_of(engine).reserves_longest
    shares_stages = not reserves and settings.scheduler != codes.USER
    batch_seqs = settings.max_num_seqs // settings.num_stages if shares_stages else settings.max_num_seqs
    return settings._replace(
        max_batch_seqs=max(batch_seqs, 1),
        watermark_blocks=int((engine.watermark_fraction or 0.0) * memory.num_blocks),
        reserved_blocks=-(-max(longest, setup.max_model_len) // memory.block_size) if reserves else 0,
        max_waiting_steps=engine.max_waiting_steps or 0,
    )


def most_batch_tokens(settings: KernelSettings, requests: RequestArrays) -> int:
    """Return the most tokens of a batch; where prompts run whole and uncapped, all that memory admits.

    Requests that never arrive stand for any.
    """
    if not settings.reserved_blocks:
        return settings.max_num_batched_tokens
    batch_seqs = min(settings.max_batch_seqs, max(settings.num_blocks // settings.reserved_blocks, 1))
    longest = int(requests.input_tokens.max())
    if np.isinf(requests.arrival_s).all():
        longest = settings.reserved_blocks * settings.block_size
    return batch_seqs * longest


def refuse_features(
    given: EngineSettings, setup: Setup, memory: MemoryPlan, requests: RequestArrays, transfers_kv: bool
) -> None:
    """Raise InputError where a pool with the settings `given` has features that its scheduler does not have."""
    scheduler, is_own = setup.engine.scheduler, is_own_scheduler(str(setup.engine.scheduler))
    refused = [
        (bool(setup.engine.kv_tiers) and not is_own, "keeps no KV blocks in lower tiers", "engine.kv_tiers"),
        (
            bool(given.enable_prefix_caching) and requests.prefixes is not None and not is_own,
            "has no prefix cache, and these prompts share beginnings",
            "engine.enable_prefix_caching",
        ),
        (
            given.scheduling_policy not in (None, "fcfs"),
            f"knows no {given.scheduling_policy} order",
            "engine.scheduling_policy",
        ),
        (setup.model.is_pooled, "makes no vectors or scores", "workload.task"),
        (requests.media is not None, "has no vision tower in its steps", "workload.images and workload.videos"),
        (setup.parallelism.attention_dp > 1, "has no attention data parallelism", "parallelism.attention_dp"),
        (transfers_kv and not is_own, "has no connector that sends or reads KV caches", "pools' role"),
    ]
    for is_given, reason, name in refused:
        if is_given:
            raise InputError(
                f"the scheduler {scheduler} {reason}",
                f"leave {name} out, or take one of {', '.join(ENGINE_SCHEDULERS)}",
            )
    if memory.blocks_per_request:
        raise InputError(
            f"{setup.model.name} keeps a state of fixed size for every request, which {scheduler} cannot count",
            f"use one of {', '.join(ENGINE_SCHEDULERS)}",
        )


def check_per_request(settings: KernelSettings, requests: RequestArrays) -> None:
    """Raise InputError for the first request that could never be scheduled."""
    lengths = requests.input_tokens + requests.output_tokens - 1
    longest = int(np.argmax(lengths))
    name = codes.PER_REQUEST_SCHEDULERS[settings.scheduler - codes.VLLM_V0]
    if settings.reserved_blocks > settings.num_blocks:
        raise InputError(
            f"{name} reserves {settings.reserved_blocks:,} blocks for every request; {settings.num_blocks:,} fit",
            "lower engine.max_model_len, or use more devices",
        )
    blocks = -(-int(lengths[longest]) // settings.block_size) + settings.watermark_blocks
    if blocks > settings.num_blocks:
        raise InputError(
            f"request {longest} of {lengths[longest] + 1:,} tokens needs {blocks:,} blocks with the watermark; "
            f"{settings.num_blocks:,} fit",
            "lower engine.watermark_fraction, or use more devices",
        )
    caps = settings.scheduler in (codes.VLLM_V0, codes.LIGHTLLM)
    restarts = settings.scheduler == codes.VLLM_V0
    prompts = lengths if restarts else requests.input_tokens
    widest = int(np.argmax(prompts))
    if caps and prompts[widest] > settings.max_num_batched_tokens:
        raise InputError(
            f"request {widest} has {requests.input_tokens[widest]:,} input tokens"
            f"{f' ({prompts[widest]:,} if it is restarted at its end)' if restarts else ''}; "
            f"{name} runs a prompt whole, in a batch of {settings.max_num_batched_tokens:,}",
            "raise engine.max_num_batched_tokens, or use sarathi, which cuts prompts",
        )
