"""Small spaces that the tests search, and a store for their answers."""

from pathlib import Path
from typing import Any

from windtunnel.search.space.space import Space, space_from
from windtunnel.search.store import Store

BASE: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "deployment": {"device": "h100_sxm"},
    "workload": {
        "arrivals": {"type": "poisson", "rate_per_s": 1.0},
        "input_tokens": {"type": "uniform", "min_tokens": 200, "max_tokens": 1800},
        "output_tokens": {"type": "uniform", "min_tokens": 20, "max_tokens": 200},
        "num_requests": 200,
    },
    "limits": {"ttft_p90": "1s", "tpot_p99": "50ms"},
    "finalist_seeds": 2,
    "finalists": 2,
}
VARY: dict[str, Any] = {"tp": [1, 2, 3], "max_num_batched_tokens": [512, 8192], "max_num_seqs": [16, 256, 512]}


def space(vary: dict[str, Any] | None = None, **changed: Any) -> Space:
    """The space of `BASE` with other keys, varied as in `VARY` or as told."""
    return space_from({**BASE, "vary": vary or VARY, **changed})


def quiet(path: Path | None = None) -> Store:
    """A store that must have nothing to warn of."""

    def refuse(text: str) -> None:
        raise AssertionError(text)

    return Store(path, refuse)
