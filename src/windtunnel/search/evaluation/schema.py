"""A question about a point of a search space, and its answer."""

from windtunnel.schema import Schema
from windtunnel.search.capacity.capacity import TOLERANCE


class Evaluation(Schema):
    """The answer of one point under one workload."""

    load: float = 0.0
    """Load sustained, or given; 0: the point fails at every load."""
    limited_by: str = ""
    """The limit that the next higher load breaks; with a given load, the one that is broken, or nearest."""
    figures: dict[str, float] = {}
    """At that load, by the names in `figures.FIGURES`; empty where no load is sustained."""
    holds: bool = False
    """Whether the point stays within the limits at `load`."""
    beaten_by: float = 0.0
    """For a dropped point, whose load at the mark fails: the logarithm of the broken figure over its limit there.
    Nothing else is known of it."""
    num_runs: int = 0
    num_requests: int = 0
    """Simulated in all runs together."""
    refused: str = ""
    """Why the point cannot be; nothing was simulated then."""


class Question(Schema):
    """The question that every point is evaluated for."""

    num_requests: int | None = None
    """First requests of the workload to serve; None: all."""
    seed: int = 0
    """Seed of the stream of requests, the same for all points."""
    tolerance: float = TOLERANCE
    worth: float | None = None
    """The score above which a point is worth its while: where it does not sustain the load that this takes, no other is
    tried. It counts for objectives that follow from the load alone; None asks every point for its own."""
