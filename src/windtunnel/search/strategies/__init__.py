"""Search strategies by name: each decides which points of a space are evaluated, in which order."""

from collections.abc import Callable

from windtunnel.search.asker import Asker
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.search.strategies.exhaustive import exhaustive
from windtunnel.search.strategies.halving import halving
from windtunnel.search.strategies.tpe import tpe

STRATEGIES: dict[str, Callable[[Asker, str | None], dict[int, Evaluation]]] = {
    "exhaustive": exhaustive,
    "halving": halving,
    "tpe": tpe,
}
"""Strategy name -> function of an asker and a workload's name, which returns the evaluations by point."""
