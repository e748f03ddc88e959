"""How many random cases a test tries."""

import os


def cases_to_try(compiled: int) -> int:
    """So many, or a third of them where the loops are interpreted: that run takes a hundred times as long."""
    return compiled // 3 if os.environ.get("NUMBA_DISABLE_JIT") == "1" else compiled
