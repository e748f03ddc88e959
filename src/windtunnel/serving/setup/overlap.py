"""Two halves of a step's batch: one computes while the tokens of the other go to their experts and back."""

import math
from typing import NamedTuple

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.hardware import Device
from windtunnel.model.exchange import DEEPEP_NORMAL, SMS_OF_NORMAL_KERNELS, TokenExchange
from windtunnel.model.feed_forward.experts import Experts
from windtunnel.model.operators import Launch
from windtunnel.model.shape import Shard

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
