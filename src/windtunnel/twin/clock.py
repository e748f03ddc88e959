"""The clock of a twin: simulated seconds, as fast as the wall's, so many times as fast, or as fast as they can be."""

import math
import time
from dataclasses import dataclass

from windtunnel.errors import InputError


@dataclass(eq=False)
class TwinClock:
    """Simulated time since the start, at `speed` simulated seconds in a second; None: from event to event."""

    speed: float | None = 1.0
    reached_s: float = 0.0
    """Simulated time of the latest event."""
    _started_s: float = math.nan

    def now_s(self) -> float:
        """Return the simulated time, which begins with the first call."""
        if self.speed is None:
            return self.reached_s
        if math.isnan(self._started_s):
            self._started_s = time.perf_counter()
        return (time.perf_counter() - self._started_s) * self.speed

    def wait_s(self, until_s: float) -> float:
        """Return the seconds of the wall's clock until a simulated time."""
        return 0.0 if self.speed is None else (until_s - self.now_s()) / self.speed


def speed_of(text: str) -> float | None:
    """Parse `--speed`: a factor, or `max`, which is None; InputError where it is neither."""
    if text == "max":
        return None
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise InputError(
            f"--speed is {text}; a factor above 0, or max, is needed", "give 1, another factor such as 20, or max"
        )
    return speed
