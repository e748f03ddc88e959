"""Seconds that a vision tower takes for the images and videos of one step."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from inspect import unwrap

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.model.launches.encoder import encoder_launches
from windtunnel.model.operators import BF16_BYTES, Launch
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.model.towers import VisionTower
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving import codes
from windtunnel.serving.deployment import EngineSettings, Pool
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.schedulers.step_cost import launched_s
from windtunnel.serving.setup.fleet_plan import comes_and_goes
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.serving.setup.step_prices import PricedLaunch, price_launch
from windtunnel.units import format_bytes
from windtunnel.workload.generate.requests import RequestArrays
from windtunnel.workload.media import MAX_SIDE, media_patches
from windtunnel.workload.schema import Workload

MAX_PRICED = 8
"""Images of one step that are priced; more cost as much each as the last of these."""


def encoder_prices(
    estimator: Estimator,
    shard: Shard,
    engine: EngineSettings,
    workload: Workload,
    requests: RequestArrays | None = None,
) -> Floats:
    """Return `[kind, MAX_PRICED + 1]` the seconds of the encoder in a step with n images of each size, and n videos.

    Those of a trace are those of `requests`, and priced up to the number of images that there are of a kind. InputError
    where the model has no vision tower.
    """
    tower = _tower(shard)
    if requests is not None and requests.media_patches:
        assert requests.media is not None
        kinds, patches = requests.media[..., 0], requests.media_patches
        most = np.minimum(np.bincount(kinds[kinds >= 0], minlength=len(patches)), MAX_PRICED)
    else:
        patches = media_patches(shard.model, workload.images, workload.videos)
        most = np.full(len(patches), MAX_PRICED)
    prices = np.zeros((len(patches), MAX_PRICED + 1))
    for kind, each in enumerate(patches):
        for count in range(1, int(most[kind]) + 1) if each.tokens else ():
            launches = encoder_launches(shard, tower, each, count)
            prices[kind, count] = encoder_s([price_launch(estimator, launch) for launch in launches], engine)
    return prices


def _tower(shard: Shard) -> VisionTower:
    tower = shard.model.vision
    assert tower is not None, "models without one are refused before"
    return tower


def encoder_s(launches: Sequence[PricedLaunch], engine: EngineSettings) -> float:
    """Return the seconds of one call of the tower. No CUDA graph holds it: the host launches every kernel."""
    launch_s = (engine.host.launch_s or 0.0) * sum(launch.count for launch in launches)
    return float(unwrap(launched_s)(sum(launch.total_s for launch in launches), launch_s))


def media_launches(shard: Shard, workload: Workload, kind: int, count: int) -> list[Launch]:
    """Return the launches that encode `count` images or videos of a kind of `workload.media_tokens` in one call.
    InputError where the model has no vision tower."""
    patches = media_patches(shard.model, workload.images, workload.videos)[kind]
    return encoder_launches(shard, _tower(shard), patches, count)


def encoder_limits(scenario: Scenario, setup: Setup, requests: RequestArrays) -> tuple[int, int]:
    """Return the tokens of a rank's encoder cache, and those that a step encodes at most; (0, 0) without a cache.

    vLLM has as many of either as `max_num_batched_tokens`, or as the largest item that the model accepts
    (`compute_mm_encoder_budget`, vllm/v1/core/encoder_cache_manager.py, 0.11 to 0.24); here the largest square image,
    or the largest of the workload. InputError for another engine's scheduler, a cache that is too small, or replicas
    that come and go.
    """
    engine, workload = setup.engine, scenario.workload
    given = engine.encoder_cache_tokens or engine.max_num_encoder_input_tokens
    is_vllm = engine.scheduler == codes.SCHEDULERS[codes.VLLM_V1]
    if not is_vllm and given:
        raise InputError(
            f"engine.encoder_cache_tokens and max_num_encoder_input_tokens are vLLM's; the scheduler is "
            f"{engine.scheduler}",
            "leave both out, or take engine.name: vllm; SGLang's cache is of encoder_cache_bytes",
        )
    if requests.media is None or not is_vllm or not (given or images_repeat(workload, requests)):
        return 0, 0
    _refuse_lost_caches(scenario)
    needed = max(requests.media_tokens)
    largest = max(needed, _largest_image_tokens(setup.model))
    most = max(engine.max_num_batched_tokens or 0, largest)
    budget = engine.max_num_encoder_input_tokens or most
    cache = engine.encoder_cache_tokens or max(budget, most)
    if min(budget, cache) < needed:
        name = "encoder_cache_tokens" if cache < needed else "max_num_encoder_input_tokens"
        raise InputError(
            f"engine.{name} is {min(budget, cache):,}, and an image or video of the workload has {needed:,} tokens",
            f"raise it to {needed} at least",
        )
    return cache, budget


def _refuse_lost_caches(scenario: Scenario) -> None:
    if comes_and_goes(scenario.deployment):
        raise InputError(
            "an encoder cache is lost with its replica, and replicas that come and go are simulated without one",
            "leave out autoscaling and faults, or images that come again and the size of the engine's encoder cache",
        )


def encoder_cache(scenario: Scenario, setup: Setup, given: EngineSettings, requests: RequestArrays) -> dict[str, int]:
    """Return the kernel's settings of a pool's encoder cache, vLLM's or SGLang's; `given`: the pool's before defaults.

    SGLang's is of bytes: an embedding has the width of the language model, in bf16, and with DeepStack as many of them
    as the tower has mergers. InputError for settings of another engine, a cache that is too small, or replicas that
    come and go.
    """
    cache_tokens, budget_tokens = encoder_limits(scenario, setup, requests)
    engine, is_given = setup.engine, given.encoder_cache_bytes is not None or given.encoder_cache_unit is not None
    if engine.scheduler != codes.SCHEDULERS[codes.SGLANG]:
        if is_given:
            raise InputError(
                f"engine.encoder_cache_bytes and encoder_cache_unit are SGLang's; the scheduler is {engine.scheduler}",
                "leave both out, or take engine.name: sglang",
            )
    elif requests.media is not None and (is_given or images_repeat(scenario.workload, requests)):
        _refuse_lost_caches(scenario)
        tower = setup.model.vision
        assert tower is not None, "models without one are refused before"
        tokens = (engine.encoder_cache_bytes or 0) // (tower.output_size * tower.num_mergers * BF16_BYTES)
        by_request = int(engine.encoder_cache_unit == "request")
        return {"embedding_cache_tokens": int(tokens), "embeddings_by_request": by_request}
    return {"encoder_cache_tokens": cache_tokens, "encoder_budget_tokens": budget_tokens}


def images_repeat(workload: Workload, requests: RequestArrays) -> bool:
    """Whether an image may come again."""
    if workload.draws_media:
        return workload.images is not None and workload.images.distinct is not None
    if requests.media is None:
        return False
    numbers = requests.media[requests.num_warmup :, :, 1]
    return np.unique(numbers[numbers >= 0]).size < int((numbers >= 0).sum())


def _largest_image_tokens(model: ModelSpec) -> int:
    """Return the tokens of the largest square image; 0 where the rule is not known."""
    if model.vision is None or model.vision.rule == "other":
        return 0
    return model.vision.image(MAX_SIDE, MAX_SIDE).tokens


@dataclass(frozen=True, eq=False)
class EncodeRun:
    """What a pool of encoders did with all requests."""

    ready_s: Floats
    """[request] When the embeddings of all its images have come; its arrival where it has none."""
    busy_s: Floats
    """[replica] Time of its steps."""
    num_encoded: int
    """Images and videos that the tower encoded."""
    num_sent: int
    """Images and videos whose embeddings were sent: also those that a cache had."""
    sent_bytes: float


@dataclass(frozen=True, eq=False)
class EncodePool:
    """Equal encoders: each takes images in the order of their arrival, and encodes those of a step together.

    Images of a request go to the replicas in turn, each as a request of its own, and the prompt follows when all have
    been encoded, as vLLM's proxy for disaggregated encoders does (examples/online_serving/disaggregated_encoder, 0.12
    to 0.24) and SGLang's language server with several encoders (`--encoder-only`, 0.5.8).
    """

    pool: Pool
    setup: Setup
    memory: MemoryPlan
    encode_s: Floats
    """[kind, n + 1] Time of n images; beyond the end in proportion."""
    cache_tokens: int
    """Embeddings that a replica keeps; 0: none."""
    budget_tokens: int
    """Embeddings of one step."""
    bytes_per_token: float
    link_bytes_per_s: float
    latency_s: float

    def run(self, requests: RequestArrays) -> EncodeRun:
        assert requests.media is not None
        request, item = np.nonzero(requests.media[..., 0] >= 0)
        kinds, numbers, _ = requests.media[request, item].T
        ready_s, busy_s, num_encoded = requests.arrival_s.copy(), np.zeros(self.pool.replicas), 0
        tokens = np.array(requests.media_tokens)[kinds]
        for replica in range(self.pool.replicas):
            here = slice(replica, None, self.pool.replicas)
            queue = zip(*(column[here].tolist() for column in (kinds, numbers, tokens)), strict=True)
            encoder = _Encoder(self, requests.arrival_s[request[here]].tolist(), [*queue])
            np.maximum.at(ready_s, request[here], encoder.run())
            busy_s[replica], num_encoded = encoder.busy_s, num_encoded + encoder.num_encoded
        return EncodeRun(ready_s, busy_s, num_encoded, kinds.size, float(tokens.sum()) * self.bytes_per_token)

    def step_s(self, kinds: list[int], num_items: int) -> float:
        """Price a step that encodes images of these kinds, for `num_items` with those that a cache has."""
        device_s, last = 0.0, self.encode_s.shape[1] - 1
        for kind in sorted(set(kinds)):
            count = kinds.count(kind)
            device_s += float(self.encode_s[kind, min(count, last)]) * max(count / last, 1.0)
        engine = self.setup.engine
        host_s = (engine.host.step_s or 0.0) + (engine.host.request_s or 0.0) * num_items
        return max(device_s, host_s) if engine.async_scheduling else device_s + host_s


@dataclass(eq=False)
class _Encoder:
    """One replica, and the images that it is sent."""

    pool: EncodePool
    arrival_s: list[float]
    queue: list[tuple[int, int, int]]
    """(kind, number, tokens) in order of arrival."""
    kept: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Number of a cached image -> tokens, the least recently used first."""
    busy_s: float = 0.0
    num_encoded: int = 0

    def run(self) -> list[float]:
        """Return when each image's embeddings have come to the next pool."""
        first, free_s, link_s, ready_s = 0, 0.0, 0.0, list[float]()
        most = self.pool.setup.engine.max_num_seqs or 1
        while first < len(self.queue):
            start_s = max(free_s, self.arrival_s[first])
            kinds, end, left, batch = list[int](), first, self.pool.budget_tokens, set[int]()
            while end < len(self.queue) and self.arrival_s[end] <= start_s and end - first < most:
                kind, number, tokens = self.queue[end]
                if number not in self.kept and number not in batch:
                    if tokens > left and end > first:
                        break
                    left -= tokens
                    kinds.append(kind)
                batch.add(number)
                end += 1
            step_s = self.pool.step_s(kinds, end - first)
            free_s = start_s + step_s
            self.busy_s, self.num_encoded = self.busy_s + step_s, self.num_encoded + len(kinds)
            self._keep(self.queue[first:end])
            for _, _, tokens in self.queue[first:end]:
                link_s = max(link_s, free_s) + tokens * self.pool.bytes_per_token / self.pool.link_bytes_per_s
                ready_s.append(link_s + self.pool.latency_s)
            first = end
        return ready_s

    def _keep(self, batch: Iterable[tuple[int, int, int]]) -> None:
        """Keep the embeddings of a step as long as there is room, the latest longest."""
        for _, number, tokens in batch if self.pool.cache_tokens else ():
            self.kept[number] = tokens
            self.kept.move_to_end(number)
        total = sum(self.kept.values())
        while total > self.pool.cache_tokens:
            total -= self.kept.popitem(last=False)[1]


def encode_pool_of(
    scenario: Scenario,
    pool: Pool,
    deployed: tuple[Setup, Shard],
    requests: RequestArrays,
    prices: Floats,
    link: tuple[float, float],
) -> EncodePool:
    """Return the pool of encoders of a deployment; `deployed` is its setup, and the model on one replica.

    `prices` are of `serving.setup.encoder.encoder_prices`; `link` is bytes per second from a replica to the next pool,
    and the latency of a transfer. InputError where there is nothing to encode, requests wait for others, or the tower
    does not fit.
    """
    setup, shard = deployed
    _check(scenario, pool, requests)
    tower, device = shard.model.vision, setup.device
    assert tower is not None
    memory = MemoryPlan(
        device_bytes=device.memory_bytes,
        weight_bytes=shard.model.tower_parameters * BF16_BYTES / shard.tp,
        activation_bytes=0.0,
        reserved_bytes=float(setup.engine.reserved_bytes or 0),
        usable_bytes=device.memory_bytes if device.usable_bytes is None else device.usable_bytes,
    )
    if memory.weight_bytes + memory.reserved_bytes > memory.usable_bytes:
        raise InputError(
            f"pool {pool.name}: the vision tower of {setup.model.name}, {format_bytes(memory.weight_bytes)}, does not "
            f"fit {device.title}",
            "use a larger device, or more of them (parallelism.tp)",
        )
    cache_tokens, budget_tokens = encoder_limits(scenario, setup, requests)
    return EncodePool(
        pool=pool,
        setup=setup,
        memory=memory,
        encode_s=prices,
        cache_tokens=cache_tokens,
        budget_tokens=budget_tokens or max(*requests.media_tokens, setup.engine.max_num_batched_tokens or 0),
        bytes_per_token=tower.output_size * tower.num_mergers * BF16_BYTES,
        link_bytes_per_s=link[0],
        latency_s=link[1],
    )


def _check(scenario: Scenario, pool: Pool, requests: RequestArrays) -> None:
    """Raise InputError where requests cannot pass a pool of encoders before the loop."""
    if requests.media is None:
        raise InputError(
            f"pool {pool.name} encodes images, and the workload has none",
            "give workload.images or workload.videos, or leave the pool out",
        )
    if not requests.is_open_loop:
        raise InputError(
            f"pool {pool.name}: a closed loop and sessions send requests when answers come, and the encoders' queue is "
            "simulated before the answers are known",
            "give arrivals with times of their own (poisson, static, a trace), or let the other pools encode",
        )
    if scenario.deployment.faults is not None or pool.autoscaling is not None:
        raise InputError(
            f"pool {pool.name}: encoders that fail, or come and go, are not simulated",
            "leave out deployment.faults and the pool's autoscaling, or the pool",
        )
