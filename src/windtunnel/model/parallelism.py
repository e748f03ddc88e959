"""Parallelism: the devices of one replica of a model."""

from windtunnel.schema import Schema, check_at_least


class Parallelism(Schema):
    """Degrees of parallelism of one replica on `tp * pp * attention_dp` devices.

    `tp` shards attention and dense layers. With `attention_dp` > 1 every group of `tp` devices serves its own
    requests and all groups share the experts. `ep` groups hold different experts; inside an expert-parallel group each
    expert is sharded `tp * attention_dp / ep` ways.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1

    def __post_init__(self) -> None:
        check_at_least(1, tp=self.tp, pp=self.pp, ep=self.ep, attention_dp=self.attention_dp)
        if (self.tp * self.attention_dp) % self.ep:
            raise ValueError(f"ep = {self.ep} does not divide tp x attention_dp = {self.tp * self.attention_dp}")

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.attention_dp

    @property
    def experts_tp(self) -> int:
        """Ways that one expert is sharded."""
        return self.tp * self.attention_dp // self.ep
