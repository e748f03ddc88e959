"""Machine code of kernels, kept on disk, linked and called without numba, which takes 0.8 s to import and get ready.

The code of an entry has one function, which takes the address of an array of 64-bit words: first room for the result,
then the arguments as numba's functions take them.
"""

import ctypes
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel.disk_cache import keep, recall

SYMBOL = "words"
"""Name of the function."""

RESULT_WORDS = 4

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class MachineCode:
    """An object file and what its function returns."""

    code: bytes
    num_results: int
    """0 for None, 1 for a whole number, more for a tuple of whole numbers."""
    symbols: Mapping[str, int] = field(default_factory=dict)
    """Address of each function that it calls and that numba alone provides; such code is of use to one process."""

    def save(self, path: Path) -> None:
        if not self.symbols:
            keep(path, bytes([self.num_results]) + self.code)

    def link(self) -> Callable[[int], int]:
        """Link the code into this process; RuntimeError where LLVM cannot link it."""
        from llvmlite.binding import JITLibraryBuilder

        builder = JITLibraryBuilder().add_object_img(self.code).add_current_process().export_symbol(SYMBOL)
        for symbol, address in self.symbols.items():
            builder.import_symbol(symbol, address)
        library = builder.link(_linker(), str(next(_NUMBERS)))
        function: Any = _FUNCTION(library[SYMBOL])
        function.library = library  # the code lives as long as this
        return function


def load(path: Path) -> MachineCode | None:
    """Return code that `save` has kept; None where there is none, or it is damaged."""
    content = recall(path)
    return None if content is None else MachineCode(content[1:], content[0])


@cache
def _linker() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.create_lljit_compiler()


@cache
def target() -> str:
    """Return the processor that code is compiled for, and the settings of numba that change it."""
    from llvmlite import binding

    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    name, features = (os.environ.get(f"NUMBA_CPU_{part}") for part in ("NAME", "FEATURES"))
    processor = (
        name or binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten() if features is None else features,
    )
    return repr((processor, [item for item in settings if item[0] != "NUMBA_CACHE_DIR"]))
