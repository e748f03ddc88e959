"""LoRA adapters of one rank in plain Python: two least-recently-used caches, of slots and of host memory."""

from collections import Counter, OrderedDict
from typing import Any


class RankAdapters:
    """What lies in slots and in host memory; `limits` are `serving.state.adapters.AdapterLimits` by shape."""

    def __init__(self, limits: Any, num_adapters: int) -> None:
        self.limits, self.max_loras = limits, int(limits.max_loras)
        cached = range(min(int(limits.max_cpu_loras), num_adapters))
        self.host: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(cached))
        self.slots: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(cached[: self.max_loras]))
        self.users: Counter[int] = Counter()
        self.load_s = 0.0
        self.num_loads = self.num_disk_loads = 0
        self.num_steps: Counter[int] = Counter()

    def may_run(self, adapter: int) -> bool:
        """It runs already, or one more may."""
        running = {each for each, count in self.users.items() if count}
        return adapter in (-1, *running) or len(running) < self.max_loras

    def admit(self, adapter: int) -> None:
        if adapter < 0:
            return
        self.users[adapter] += 1
        if adapter not in self.host:
            self.load_s += self.limits.disk_load_s
            self.num_disk_loads += 1
            if len(self.host) == self.limits.max_cpu_loras:
                oldest = self.oldest(self.host)
                del self.host[oldest]
                self.slots.pop(oldest, None)
        if adapter not in self.slots:
            self.load_s += self.limits.host_load_s
            self.num_loads += 1
            if len(self.slots) == self.max_loras:
                del self.slots[self.oldest(self.slots)]
        self.touch(adapter)

    def leave(self, adapter: int) -> None:
        if adapter >= 0:
            self.users[adapter] -= 1
            self.touch(adapter)

    def touch(self, adapter: int) -> None:
        for cache in (self.host, self.slots):
            cache[adapter] = None
            cache.move_to_end(adapter)

    def oldest(self, cache: OrderedDict[int, None]) -> int:
        """The least recently used one; those of running requests are used in every step."""
        return next(adapter for adapter in cache if not self.users[adapter])

    def take_load_s(self) -> float:
        load_s, self.load_s = self.load_s, 0.0
        return load_s
