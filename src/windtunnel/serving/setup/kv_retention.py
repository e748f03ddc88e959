"""KV blocks that no running request uses: where each pool keeps them, on its devices and in lower tiers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from windtunnel.serving.setup.prefix_cache import NO_TIERS, prefix_cache
from windtunnel.serving.state import records as state
from windtunnel.workload.generate.requests import RequestArrays


@dataclass(frozen=True, eq=False)
class KvRetention:
    """Where a pool keeps KV blocks that no running request uses."""

    on_device: bool
    """Whether it has prefix caches."""
    tiers: state.Table = field(default_factory=lambda: NO_TIERS)
    """`Tier` records of memory below the device's."""
    load_overlaps: bool = False

    @property
    def anywhere(self) -> bool:
        return self.on_device or self.tiers.size > 0


def shares_prefixes(retention: Sequence[KvRetention], requests: RequestArrays) -> bool:
    """Whether prompts share beginnings, and any pool has prefix caches for them."""
    return requests.prefixes is not None and any(pool.on_device for pool in retention)


def caches_of(settings: state.KernelSettings, retention: KvRetention, requests: RequestArrays) -> state.Cache:
    """Return empty prefix caches of a pool; where it keeps nothing, caches of segments that no block fits into."""
    cache = prefix_cache(settings, requests, retention.tiers, retention.load_overlaps)
    if not retention.anywhere:
        cache.nodes["first_block"] = cache.nodes["end_block"] = 0
    return cache


def has_one_group(settings: state.KernelSettings) -> bool:
    """Whether one group of layers keeps every token, which is all that the caches can count."""
    return settings.num_groups - settings.num_window_groups == 1
