"""How kernels are compiled: without the interpreter lock, with C arithmetic (no checks for division by zero)."""

from numba import njit

entry = njit(cache=True, nogil=True, error_model="numpy")
"""A function that Python calls; its machine code, callees included, is cached on disk."""

inner = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""A function that only kernels call. Leaving out the wrappers cuts the compile time of the serving loop by a quarter."""
