"""Actions of a pipeline schedule: their codes, and their tables as the replay reads them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
"""Kinds of actions. Where a schedule has no weight actions, its backward actions compute both gradients."""

PAIRED = 4
"""Added to the kind of a forward pass that runs interleaved with the backward pass (and weight gradient) after it."""


class ScheduleTables(NamedTuple):
    """Actions of all devices, and how forward passes go on from chunk to chunk."""

    actions: NDArray[np.int64]  # (num_actions, 3) kind (`PAIRED` or not), chunk, micro-batch; by device, in order
    offsets: NDArray[np.int64]  # (num_devices + 1,) where each device's actions begin
    device_of_chunk: NDArray[np.int64]  # (num_chunks,) the device that holds each chunk
    next_chunk: NDArray[np.int64]  # (num_chunks,) the chunk that a forward pass continues with; -1: it ends
    num_microbatches: int
    is_split: bool  # whether weight gradients are actions of their own
