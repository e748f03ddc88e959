"""How kernels are compiled: without the interpreter lock, with C arithmetic (no checks for division by zero).

`_nrt=False` leaves out numba's reference counting, which kernels do not need, since they only borrow arrays and never
make any. Measured on the serving loop at batch 128: 0.79 us a row with it, 73% of that in atomic increments and
decrements, 0.24 us without.
"""

from typing import Any

import numpy as np
from numba import config, njit

entry = njit(_nrt=False, cache=True, nogil=True, error_model="numpy")
"""A function that Python calls; its machine code, callees included, is cached on disk."""

inner = njit(_nrt=False, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""A function that only kernels call: called from Python it would crash, for it has no wrapper (use `.py_func`). Leaving
out the wrappers cuts the compile time of the serving loop by a quarter.
"""


inlined = njit(_nrt=False, nogil=True, error_model="numpy", inline="always")
"""A function that returns parts of arrays, which numba without reference counting allows only inside the caller."""


def passed(*tables: Any) -> tuple[Any, ...]:
    """Record arrays in the form that a call takes fastest.

    Measured on the walking loop, with seven of them: 25 us a call as `np.recarray`, which numba takes apart attribute
    by attribute, 3 us as plain arrays. Without a compiler their fields can be read as attributes only as `np.recarray`.
    """
    return tables if config.DISABLE_JIT else tuple(table.view(np.ndarray) for table in tables)
