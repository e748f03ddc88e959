"""Parallelism: the devices of one replica of a model."""

from windtunnel.schema import AtLeastOne, Schema


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tp * self.attention_dp) % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide tp x attention_dp = {self.tp * self.attention_dp}")

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.attention_dp

    @property
    def experts_tp(self) -> int:
        """Ways that one expert is sharded."""
        return self.tp * self.attention_dp // self.ep
