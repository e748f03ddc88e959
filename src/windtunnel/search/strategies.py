"""Which points of a space are asked: all, those that do well on a part of the requests, or those that a model of former
answers suggests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from windtunnel.search.evaluate import Evaluation, Question

if TYPE_CHECKING:
    from windtunnel.search.optimize import Asker

Strategy = Callable[["Asker", str | None], dict[int, Evaluation]]


def exhaustive(asker: Asker, workload: str | None) -> dict[int, Evaluation]:
    """Every point, with all requests."""
    return asker.ask(workload, range(asker.space.num_points), Question())


STRATEGIES: dict[str, Strategy] = {"exhaustive": exhaustive}
