"""How much electric power a device draws."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Linear in the share of time that the device runs steps: idle + (busy - idle) u.

    A step draws `busy_w`, whatever it computes: an upper estimate, for decode alone draws less than the limit.
    Source: Fan, Weber and Barroso, Power Provisioning for a Warehouse-sized Computer (ISCA 2007), section 4.
    """

    idle_w: float
    busy_w: float

    def at(self, busy_fraction: float) -> float:
        """Watts at one share of time."""
        return self.idle_w + (self.busy_w - self.idle_w) * busy_fraction

    def over(self, busy_fraction: NDArray[np.float64]) -> NDArray[np.float64]:
        """Watts at each of several shares of time."""
        return np.asarray(self.idle_w + (self.busy_w - self.idle_w) * busy_fraction)
