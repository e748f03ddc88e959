"""A question about a point of a search space, and its answer."""

from msgspec.structs import force_setattr

from windtunnel.schema import Schema
from windtunnel.search.capacity.capacity import TOLERANCE

_NOTHING = 0.0


class Evaluation(Schema):
    """The answer of one point under one workload."""

    load: float = _NOTHING
    """Load sustained, or given; 0: the point fails at every load."""
    limited_by: str = ""
    """The limit that the next higher load breaks; with a given load, the broken or nearest limit."""
    figures: dict[str, float] = {}
    """Figures at that load, by the names in `figures.FIGURES`; empty where no load is sustained."""
    holds: bool = False
    """Whether the point stays within the limits at `load`."""
    reached_s: float = _NOTHING
    """For a point that fails at every load: the latency of `limited_by` at the least load, where it is known."""
    beaten_by: float = _NOTHING
    """For a dropped point, whose load at the mark fails: the logarithm of the broken figure over its limit there.
    Nothing else is known about the point."""
    num_runs: int = 0
    num_requests: int = 0
    """Requests simulated in all runs together."""
    stream_requests: int = 0
    """Requests of the stream that sustains `load`: more than the workload has, where these are over too soon."""
    is_lengthened: bool = False
    """Whether the stream was lengthened until the load is steady, as far as it can be (`Question.lengthens`)."""
    drift: float = _NOTHING
    """Relative change of the load when the stream was last lengthened, where it is not steady yet; else 0."""
    refused: str = ""
    """Reason why the point cannot be deployed; nothing was simulated then."""

    def check(self) -> None:
        # Encoding leaves out a default that is the same object, which a decoded 0.0 is not.
        for name in ("load", "reached_s", "beaten_by", "drift"):
            if getattr(self, name) == 0.0:
                force_setattr(self, name, _NOTHING)


class Question(Schema):
    """The question that every point is evaluated for."""

    num_requests: int | None = None
    """First requests of the workload to serve; None: all."""
    lengthens: bool = False
    """Whether a drawn stream is lengthened until the load is steady; else only where it is a burst."""
    drops: bool = False
    """Whether a point is dropped where another of its family, evaluated before, reaches a better score: it is tried at
    the load for that score, and with the requests that the other needed."""
    seed: int = 0
    """Seed of the stream of requests, the same for all points."""
    tolerance: float = TOLERANCE
    worth: float | None = None
    """Score of the mark: a point that does not sustain the load for this score is dropped after one run. It applies to
    objectives that follow from the load alone; None finds every point's own load."""
