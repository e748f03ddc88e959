"""A pool of encoders: devices that hold the vision tower alone, and send embeddings to the pools that serve tokens.

Requests reach it in the order in which clients send them, whatever happens behind it, so that its queue is simulated
first and the loop gets each request when its embeddings have come.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.model.operators import BF16_BYTES
from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import Pool
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.setup.encoder import encoder_limits
from windtunnel.serving.setup.memory import MemoryPlan
from windtunnel.units import format_bytes
from windtunnel.workload.generate.requests import RequestArrays


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
    and the latency of a transfer.

    Raises:
        InputError: there is nothing to encode, requests wait for others, or the tower does not fit.
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
