"""Parallelism: the devices of one replica of a model."""

from windtunnel.schema import AtLeastOne, Schema


class FeedForwardSide(Schema):
    """Devices of a replica that compute feed-forwards alone, for attention on others (attention-FFN disaggregation).

    Source: Step-3 (arXiv:2507.19427), sections 4 and 5; MegaScale-Infer (arXiv:2504.02263), section 4.
    """

    devices: AtLeastOne
    """They share the experts of every layer, or split a dense model's matrices."""
    ep: AtLeastOne | None = None
    """Groups that hold different experts; None: as many as there are devices. A dense feed-forward before or between
    layers with experts is repeated on every device."""
    microbatches: AtLeastOne = 3
    """Parts of a decode step's batch that are on their way between the sides at a time."""

    def check(self) -> None:
        if self.devices % self.groups:
            raise ValueError(f"ep = {self.ep} does not divide the {self.devices} devices of ffn")

    @property
    def groups(self) -> int:
        """Groups that hold different experts."""
        return self.ep or self.devices


class Parallelism(Schema):
    """Degrees of parallelism of one replica on `tp * pp * attention_dp` devices.

    `tp` shards attention and dense layers. With `attention_dp` > 1 every group of `tp` devices serves its own
    requests and all groups share the experts. `ep` groups hold different experts; inside an expert-parallel group each
    expert is sharded `tp * attention_dp / ep` ways.
    """

    tp: AtLeastOne = 1
    pp: AtLeastOne = 1
    ep: AtLeastOne = 1
    attention_dp: AtLeastOne = 1
    dcp: AtLeastOne = 1
    """Ranks of `tp` that hold parts of each context, where they would hold equal keys and values (decode context
    parallelism) [decode-context-parallel-size]."""
    ffn: FeedForwardSide | None = None
    """Devices beside these that compute the feed-forwards; None: each device computes both."""

    def check(self) -> None:
        if (self.tp * self.attention_dp) % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide tp x attention_dp = {self.tp * self.attention_dp}")
        if self.tp % self.dcp:
            raise ValueError(f"dcp = {self.dcp} does not divide tp = {self.tp}, among whose ranks it divides contexts")
        if self.ffn is not None and (self.ep > 1 or self.pp > 1):
            raise ValueError("with ffn, experts are on its devices and there are no stages: leave ep and pp at 1")

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.attention_dp + (0 if self.ffn is None else self.ffn.devices)

    @property
    def experts_tp(self) -> int:
        """Ways that one expert is sharded."""
        return self.tp * self.attention_dp // self.ep
