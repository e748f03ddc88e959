"""Electric power of a device."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Share = TypeVar("Share", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Power that is linear in the share of time u in which the device runs steps: idle + (busy - idle) u.

    Every step draws `busy_w`, an upper estimate: decode alone draws less than the power limit.
    Source: Fan, Weber and Barroso, Power Provisioning for a Warehouse-sized Computer (ISCA 2007), section 4.
    """

    idle_w: float
    busy_w: float

    def at(self, busy_fraction: Share) -> Share:
        """Return the watts at one share of busy time, or at each of several."""
        return self.idle_w + (self.busy_w - self.idle_w) * busy_fraction
