"""Long messages from shorter ones: once windows and queues are in a steady state, packets add the same time."""

from collections.abc import Callable

ROUND_PACKETS = 168
"""Flows that take turns repeat what they do after some packets; this is a multiple of 1 to 8 flows' turns, but of 5."""
SHORT_ROUNDS = (3, 4, 5)
"""Rounds of the messages that are simulated instead: several round trips (a window at 400 Gb/s is about 120 packets).
"""
LONG_PACKETS = 3072
"""Messages of fewer packets are simulated as they are."""
_PS_PER_S = 1e12


def long_seconds(seconds: Callable[[int], float | None], size_bytes: int, payload_bytes: int) -> float | None:
    """Return `seconds(size_bytes)`, for a long message from three shorter ones if one more round adds the same twice.

    Where it does not, because rates or queues still change, all of the message is simulated.

    Args:
        seconds: when flows of a number of bytes are complete; None, which is passed on, where that cannot be told.
    """
    num_packets = -(-size_bytes // payload_bytes)
    if num_packets < LONG_PACKETS:
        return seconds(size_bytes)
    num_rounds, ends_ps = num_packets // ROUND_PACKETS, []
    for rounds in SHORT_ROUNDS:
        end_s = seconds(size_bytes - (num_rounds - rounds) * ROUND_PACKETS * payload_bytes)
        if end_s is None:
            return None
        ends_ps.append(round(end_s * _PS_PER_S))
    round_ps, former_ps = ends_ps[2] - ends_ps[1], ends_ps[1] - ends_ps[0]
    if round_ps != former_ps:
        return seconds(size_bytes)
    return (ends_ps[2] + (num_rounds - SHORT_ROUNDS[2]) * round_ps) / _PS_PER_S
