"""How many random cases a test tries."""

import os

FAST = "WINDTUNNEL_FAST_TESTS"
"""Environment variable: set by `pytest --fast`."""


def cases_to_try(compiled: int) -> int:
    """`compiled`, or two fifths of it where loops are interpreted, which takes twice as long; few with `--fast`.

    Four times as many with the profile `dev`, which draws others each time.
    """
    if os.environ.get("HYPOTHESIS_PROFILE") == "dev":
        compiled *= 4
    if os.environ.get(FAST) == "1":
        return min(compiled, 2)
    return max(compiled * 2 // 5, 1) if os.environ.get("NUMBA_DISABLE_JIT") == "1" else compiled
