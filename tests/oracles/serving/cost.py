"""What a step costs, in plain Python: look-ups in the arrays of a `StepCost`, batch by batch."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oracles.serving.state import Chunk


@dataclass(frozen=True)
class Prices:
    """Of steps; `cost` and `speculation` are `serving.state.records.StepCost` and `Speculation` by shape."""

    cost: Any
    speculation: Any = None

    @property
    def num_queries(self) -> int:
        return 1 if self.speculation is None else int(self.speculation.num_queries)

    def adapters_s(self, plan: Any, num_adapters: int, num_tokens: int) -> float:
        return _interpolate(plan.token_nodes, plan.step_s[num_adapters], num_tokens) if num_adapters else 0.0

    def device_s(
        self, batches: list[dict[int, Chunk]], adapters_s: Sequence[float] = (), repeated_tokens: Sequence[int] = ()
    ) -> float:
        c = self.cost
        attention_s, nothing = 0.0, [0] * len(batches)
        for batch, more_s, repeated in zip(batches, adapters_s or nothing, repeated_tokens or nothing, strict=True):
            decodes = [chunk for chunk in batch.values() if chunk.decodes]
            prefills = [chunk for chunk in batch.values() if not chunk.decodes]
            context = sum(chunk.computed_before for chunk in decodes) + len(decodes)
            tokens = sum(chunk.tokens for chunk in prefills)
            pairs = sum(chunk.tokens * (chunk.computed_before + 0.5 * chunk.tokens) for chunk in prefills)
            contexts = [chunk.computed_before for chunk in decodes]
            decode_s = self.decode_attention_s(len(decodes), context, bool(prefills), deviation(contexts), repeated)
            attention_s = max(attention_s, decode_s + self.prefill_attention_s(tokens, pairs) + more_s)
        if any(not chunk.decodes for batch in batches for chunk in batch.values()):
            q = self.num_queries
            num_tokens = [sum(q if chunk.decodes else chunk.tokens for chunk in batch.values()) for batch in batches]
            most_tokens = max(num_tokens)
            sampled = max(
                sum(q if chunk.decodes else chunk.emits_token for chunk in batch.values()) for batch in batches
            )
            group_s = float(c.group_token_s[sum(num_tokens)]) if len(batches) > 1 else 0.0
            device_s = float(c.mixed_token_s[most_tokens] + c.sample_s[sampled] + attention_s)
            if self.speculation is not None:
                device_s += float(c.draft_s[max(sum(chunk.decodes for chunk in batch.values()) for batch in batches)])
            launch_s = float(c.launch_s[min(most_tokens, len(c.launch_s) - 1)])
            return launched_s(device_s + group_s, launch_s) + c.unhidden_step_s
        most = max(len(batch) for batch in batches)
        return launched_s(float(c.decode_token_s[most] + attention_s), self.decode_launch_s(most)) + c.unhidden_step_s

    def encode_s(self, kind: int, count: int) -> float:
        priced = self.cost.encode_s[kind]
        last = len(priced) - 1
        return float(priced[min(count, last)]) * (count / last if count > last > 0 else 1)

    def decode_launch_s(self, num_decodes: int) -> float:
        launch_s = self.cost.decode_launch_s
        return float(launch_s[min(num_decodes, len(launch_s) - 1)])

    def decode_attention_s(
        self,
        num_decodes: int,
        context_tokens: int,
        is_mixed: bool = False,
        deviation_tokens: float = 0.0,
        repeated_tokens: int = 0,
    ) -> float:
        if num_decodes == 0:
            return 0.0
        mean = context_tokens / num_decodes
        grid = self.cost.decode_attention_s
        if is_mixed and len(self.cost.mixed_decode_attention_s):
            grid = self.cost.mixed_decode_attention_s
        read = mean
        if repeated_tokens > 0 and self.cost.repeated_share < 1:
            read *= max(1 - repeated_tokens / context_tokens, self.cost.repeated_share)
        attention_s = _interpolate(self.cost.context_nodes, grid[num_decodes], read)
        if deviation_tokens > 0 and self.cost.longest_share > 0:
            nodes, waiting = self.cost.context_nodes, self.cost.waiting_attention_s
            above = deviation_tokens * min(math.sqrt(2 * math.log(num_decodes)), math.sqrt(num_decodes - 1))
            longest = read * (1 + above / mean)
            row = num_decodes if is_mixed else int(self.cost.padded_requests[num_decodes])
            last_s = self.cost.longest_share * _interpolate(nodes, waiting[row], longest)
            attention_s += max(last_s - _interpolate(nodes, waiting[num_decodes], read), 0.0)
        return attention_s

    def prefill_attention_s(self, num_tokens: int, num_pairs: float) -> float:
        if num_tokens == 0:
            return 0.0
        nodes, grid = self.cost.chunk_nodes, self.cost.prefill_attention_s
        j = _cell(nodes, num_tokens)
        length = 2.0 * num_pairs / num_tokens
        low = _interpolate(self.cost.length_nodes, grid[j], length)
        high = _interpolate(self.cost.length_nodes, grid[j + 1], length)
        return low + (high - low) * ((num_tokens - float(nodes[j])) / (float(nodes[j + 1]) - float(nodes[j])))


def launched_s(device_s: float, launch_s: float) -> float:
    """Return the eighth root of the sum of eighth powers, by products and square roots that round as the loop's do."""
    if not launch_s:
        return device_s
    power = min(device_s, launch_s) / max(device_s, launch_s)
    for _ in range(3):
        power *= power
    return max(device_s, launch_s) * math.sqrt(math.sqrt(math.sqrt(1 + power)))


def deviation(contexts: Sequence[int]) -> float:
    """Standard deviation of the contexts of decoding requests, by the exact sum of their squared differences."""
    num = len(contexts)
    pairs = sum((one - other) ** 2 for one in contexts for other in contexts) // 2
    return math.sqrt(pairs) / num if num > 1 else 0.0


def _cell(nodes: Sequence[float], value: float) -> int:
    return min(max(bisect.bisect_right(nodes, value) - 1, 0), len(nodes) - 2)


def _interpolate(nodes: Sequence[float], row: Sequence[float], value: float) -> float:
    j = _cell(nodes, value)
    share = (value - float(nodes[j])) / (float(nodes[j + 1]) - float(nodes[j]))
    return float(row[j]) + (float(row[j + 1]) - float(row[j])) * share
