"""Decode steps of a replica whose attention and feed-forwards run on different devices, in micro-batches."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.launches.forward import attention_side, feed_forward_side
from windtunnel.model.memory import value_bytes
from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.setup.memory import MemoryPlan, plan_memory
from windtunnel.units import format_bytes


class PingPong(NamedTuple):
    """Seconds of one layer for one micro-batch, arrays of equal shape, and how many there are of both."""

    attention_s: Floats
    """On the attention devices: norms, projections, attention."""
    ffn_s: Floats
    """On the feed-forward devices, for the tokens of all attention ranks."""
    hop_s: Floats
    """From either side to the other."""
    microbatches: Floats
    num_layers: int

    def mapped(self, change: Callable[[Floats], Floats]) -> "PingPong":
        """Return the same with all arrays changed."""
        changed = [change(part) for part in (self.attention_s, self.ffn_s, self.hop_s, self.microbatches)]
        return PingPong(changed[0], changed[1], changed[2], changed[3], self.num_layers)

    @property
    def step_s(self) -> Floats:
        """Time of all layers for all micro-batches.

        Micro-batches follow one another on both sides; each returns to attention after every layer. With a = attention,
        f = feed-forward, c = hop, T = a + f + 2c the last of m micro-batches is back after L layers at

            (m - 1) max(a, f) + T + (L - 1) max(m max(a, f), T)

        which is the longest path through the pipeline: a path enters a layer either behind the same micro-batch's
        former layer (T) or behind the other micro-batches on the busier side (m max(a, f)), and meets the m - 1 others
        once more. The steady state is that of MegaScale-Infer (arXiv:2504.02263, section 4.1, equations 4 and 5).
        """
        longest, round_s = np.maximum(self.attention_s, self.ffn_s), self.attention_s + self.ffn_s + 2 * self.hop_s
        period_s = np.maximum(self.microbatches * longest, round_s)
        return np.asarray((self.microbatches - 1) * longest + round_s + (self.num_layers - 1) * period_s)

    @property
    def busy_s(self) -> tuple[Floats, Floats]:
        """Time for which attention devices, and feed-forward devices, compute."""
        count = self.microbatches * self.num_layers
        return count * self.attention_s, count * self.ffn_s

    @property
    def bound_by(self) -> str:
        """`attention`, `feed-forward` or `transfers`: the longest part of the steady state, where all are numbers."""
        longest = self.microbatches * np.maximum(self.attention_s, self.ffn_s)
        if self.attention_s + self.ffn_s + 2 * self.hop_s > longest:
            return "transfers" if self.hop_s > 0 and 2 * self.hop_s > self.attention_s + self.ffn_s else "latency"
        return "attention" if self.attention_s >= self.ffn_s else "feed-forward"


def plan_two_sides(shard: Shard, device: Device, engine: EngineSettings, max_model_len: int) -> MemoryPlan:
    """Plan the memory of an attention device, with all KV, the others weights; InputError where one does not fit."""
    theirs = feed_forward_side(shard)
    bits = sum(num * part.weight_bits(theirs) for num, part in shard.model.feed_forwards)
    tokens = (engine.max_num_seqs or 1) * shard.parallelism.attention_dp
    needed = bits / 8 + tokens * shard.model.hidden_size * value_bytes(shard) + float(engine.reserved_bytes or 0)
    if needed > (device.usable_bytes or device.memory_bytes):
        raise InputError(
            f"the feed-forwards of {shard.model.name} take {format_bytes(bits / 8)} on each of "
            f"{theirs.parallelism.num_devices} feed-forward devices, which {device.title} does not have",
            "raise parallelism.ffn.devices",
        )
    return plan_memory(attention_side(shard), device, engine, max_model_len)
