"""Time a training job's collectives on the network that its servers share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windtunnel.model import operators as ops
from windtunnel.network.cluster import FABRIC_ERROR, Network
from windtunnel.pricing.estimator import Coverage, Estimate
from windtunnel.training.layers.rank import Group, Rank


@dataclass(frozen=True)
class JobNetwork:
    """The network of a training job, and the layout of its groups on it."""

    network: Network
    rank: Rank

    def estimate(self, op: ops.Collective, group: Group) -> Estimate:
        """Return the seconds of a collective in every group of a kind at once; over all ranks there is one group."""
        num_ranks, stride = self.rank.layout(group)
        seconds = self.network.seconds(op, float(op.message_bytes), stride if op.num_ranks == num_ranks else 1)
        return Estimate(seconds, Coverage.ROOFLINE, self.network.source, FABRIC_ERROR)

    def of(self, rank: Rank) -> JobNetwork:
        """Return the same network under another layout of as many devices."""
        return replace(self, rank=rank)
