"""A question about a point of a search space, and its answer."""

from windtunnel.schema import Schema
from windtunnel.search.capacity.capacity import TOLERANCE


class Evaluation(Schema):
    """What was found of one point under one workload."""

    load: float = 0.0
    """Sustained, or given; 0: the limits are held at no load."""
    limited_by: str = ""
    """The limit that the next higher load breaks; with a given load, the one that is broken, or nearest."""
    figures: dict[str, float] = {}
    """At that load, by the names in `figures.FIGURES`; empty where no load is sustained."""
    holds: bool = False
    """Whether the limits are held at `load`."""
    beaten_by: float = 0.0
    """Of a point that is not worth its while: the logarithm of the figure that broke its limit at the load that it
    should have sustained, over that limit. Nothing else is known of it."""
    num_runs: int = 0
    num_requests: int = 0
    """Simulated in all runs together."""
    refused: str = ""
    """Why the point cannot be; nothing was simulated then."""


class Question(Schema):
    """What is asked of every point."""

    num_requests: int | None = None
    """Of the workload, the first so many; None: all."""
    seed: int = 0
    """Which stream of requests; of all points the same."""
    tolerance: float = TOLERANCE
    worth: float | None = None
    """The score above which a point is worth its while: where it does not sustain the load that this takes, no other is
    tried. It counts for objectives that follow from the load alone; None asks every point for its own."""
