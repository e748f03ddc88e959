"""The limits that a request must keep."""

from windtunnel.schema import Schema


class Slo(Schema):
    """What a request must keep to count as goodput; `None` does not matter."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; more than 0 is needed")
