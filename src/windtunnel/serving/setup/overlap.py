"""Two halves of a step's batch: one computes while the tokens of the other go to their experts and back."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.hardware import Device
from windtunnel.model.exchange import DEEPEP_LOW_LATENCY, DEEPEP_NORMAL, SMS_OF_NORMAL_KERNELS, TokenExchange
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.launches.forward import attention_side, feed_forward_side
from windtunnel.model.memory import value_bytes
from windtunnel.model.operators import Gemm, Launch
from windtunnel.model.precision import Format
from windtunnel.model.shape import Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.setup.memory import MemoryPlan, plan_memory
from windtunnel.units import format_bytes

OCCUPIED_BY_LOW_LATENCY = 0.06 / 0.173
"""Share of a low-latency exchange in which its kernels send or receive and take all multiprocessors; for the rest
messages are on their way. 0.06 ms of a dispatch (LMSYS, "Deploying DeepSeek with PD disaggregation and large-scale
expert parallelism on 96 H100 GPUs", 2025, its unit test) that takes 0.173 ms for 128 tokens on 64 ranks (DeepEP's
README); the same share is taken for a combine."""


class Halves(NamedTuple):
    """Prices of one half of a step's batch in seconds, all layers together; linear in the operators' times.

    Over the tokens of the whole step on a rank, but for `cores_s`.
    """

    token_s: Floats
    """Everything that depends on the tokens alone."""
    communication_s: Floats
    """The part of `token_s` that is collectives and exchanges."""
    compute_s: Floats
    """The part of `token_s` that arithmetic bounds."""
    group_s: Floats
    """As `StepPrices.group`."""
    rest_s: Floats
    """Of layers with experts: all that is neither experts nor their exchange."""
    experts_s: Floats
    dispatch_s: Floats
    """Computing that a dispatch has room for beside it."""
    combine_s: Floats
    """Likewise of a combine."""
    cores_s: Floats
    """Decode attention, over requests of the whole step x contexts."""

    def hidden_s(self, cores_s: Floats | float = 0.0) -> Floats:
        """Return what overlap saves of both halves one after the other; `cores_s`: of one half, in layers with experts.

        A layer goes through four phases, in each of which one half is exchanged and the other computes: dispatch beside
        attention, dispatch beside experts, combine beside experts, combine beside attention (vLLM's design document
        "Dual Batch Overlap"; SGLang 0.5 `two_batch_overlap.py`). The longer of the two decides; the shorter is hidden.
        """
        computes = self.rest_s + cores_s, self.experts_s
        exchanges = self.dispatch_s, self.combine_s
        return np.asarray(sum(np.minimum(computed, sent) for computed in computes for sent in exchanges))


class Beside(NamedTuple):
    """What single-batch overlap sets beside each other, in seconds of all layers, over the tokens of a step on a rank.

    SGLang 0.5.23 `batch_overlap/single_batch_overlap.py`: a combine starts with the first expert whose second product
    is done (experts of CuteDSL on Blackwell, of DeepGEMM elsewhere); shared experts run beside the combine on
    Blackwell, beside the dispatch elsewhere. Multiprocessors that combine compute nothing.
    """

    with_dispatch_s: Floats
    """Shared experts that run beside a dispatch."""
    dispatch_s: Floats
    """Computing that a dispatch has room for beside it."""
    with_combine_s: Floats
    """The experts' second product, and shared experts, beside a combine."""
    combine_s: Floats
    """Computing that a combine has room for beside it."""

    def hidden_s(self) -> Floats:
        """Return what of a step is hidden."""
        return np.minimum(self.with_dispatch_s, self.dispatch_s) + np.minimum(self.with_combine_s, self.combine_s)


BLACKWELLS_COMBINING_SMS, COMBINING_SMS = 32, 3
"""Multiprocessors that send what single-batch overlap combines (ibid., `compute_overlap_args`)."""


def launches_beside(launch: Launch, device: Device) -> tuple[float, ...]:
    """Return the shares of a launch's time that count for the parts of `Beside`."""
    is_blackwell = device.architecture == "blackwell"
    if isinstance(launch.op, TokenExchange) and launch.op.name == DEEPEP_LOW_LATENCY:
        if launch.op.op == "dispatch":
            return 0.0, room_beside(launch, device), 0.0, 0.0
        combining = BLACKWELLS_COMBINING_SMS if is_blackwell else COMBINING_SMS
        return 0.0, 0.0, 0.0, 1.0 - combining / (device.num_sms or math.inf)
    if launch.name.startswith("shared_") and isinstance(launch.op, Gemm):
        return (0.0, 0.0, 1.0, 0.0) if is_blackwell else (1.0, 0.0, 0.0, 0.0)
    if isinstance(launch.op, Experts) and launch.op.format is (Format.NVFP4 if is_blackwell else Format.FP8_BLOCK):
        return 0.0, 0.0, 1.0 / launch.op.num_matrices, 0.0
    return 0.0, 0.0, 0.0, 0.0


def expert_layers_share(shard: Shard) -> float:
    """Return the share of the layers that have experts."""
    spread = sum(num for num, feed_forward in shard.model.feed_forwards if feed_forward.num_experts)
    return spread / shard.model.num_layers


def room_beside(launch: Launch, device: Device) -> float:
    """Return the share of the time of an exchange that computing beside it gets; of any other launch, all."""
    if not isinstance(launch.op, TokenExchange):
        return 1.0
    if launch.op.name == DEEPEP_NORMAL:
        return 1.0 - SMS_OF_NORMAL_KERNELS / (device.num_sms or math.inf)
    return 1.0 - OCCUPIED_BY_LOW_LATENCY


def part_of(launch: Launch) -> str:
    """Return which of `Halves`' parts a launch of a layer belongs to: `dispatch`, `combine`, `experts` or `rest`."""
    if isinstance(launch.op, TokenExchange):
        return launch.op.op
    return "experts" if isinstance(launch.op, Experts) else "rest"


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
