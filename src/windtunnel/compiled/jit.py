"""Decorators of kernels, and how Python calls them: by machine code for the types of the arguments.

The code comes from disk, or is compiled by numba, which is imported only then: the decorators compile nothing. With
`NUMBA_DISABLE_JIT=1` they return the functions as they are.
"""

import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, update_wrapper
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from windtunnel.compiled import SHIPPED, cache_dir, shipped_name
from windtunnel.compiled.machine_code import RESULT_WORDS, MachineCode, load, target

Function = TypeVar("Function", bound=Callable[..., Any])
"""Compiling keeps a function's signature, so that a type checker finds swapped arguments in calls between kernels."""

IS_INTERPRETED = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")

ON_COMPILE: list[Callable[[str], None]] = []
"""Who is told the name of an entry before it is compiled."""

SHIP_TO: list[Path] = []
"""Folders that machine code for any processor is written to, as a wheel has it."""

_LOCK = threading.RLock()

_Leaf = tuple[Any, Sequence[int]]


class Kernel:
    """A function to be compiled by numba, which finds it among the globals of other kernels by its `_numba_type_`."""

    def __init__(self, function: Callable[..., Any], **targetoptions: Any) -> None:
        update_wrapper(self, function)
        self.py_func, self.targetoptions = function, targetoptions

    @cached_property
    def dispatcher(self) -> Any:
        """Numba's own object for this function."""
        from windtunnel.compiled.compiler import dispatcher_of

        return dispatcher_of(self.py_func, isinstance(self, Entry), self.targetoptions)

    @property
    def _numba_type_(self) -> Any:
        return self.dispatcher._numba_type_


class Variant(NamedTuple):
    """Machine code for arguments of certain types."""

    function: Callable[[int], int]
    num_results: int


class Entry(Kernel):
    """A kernel that Python calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.variants: dict[Sequence[Any], Variant] = {}

    def __call__(self, *arguments: Any) -> Any:
        return Call(self)(*arguments)

    def variant(self, types: Sequence[Any], arguments: Sequence[Any]) -> Variant:
        """Return the machine code for arguments of these types: this process's, that on disk, or numba's."""
        found = self.variants.get(types)
        if found is None:
            with _LOCK:
                found = self.variants.get(types) or self._variant(types, arguments)
                self.variants[types] = found
        return found

    def _variant(self, types: Sequence[Any], arguments: Sequence[Any]) -> Variant:
        function = self.py_func
        facts = function.__module__, function.__code__.co_code, function.__code__.co_names, types, target()
        path = cache_dir() / f"{function.__qualname__}-{_digest(facts)}"
        shipped = self._shipped_path(types)
        for place in (path, *([SHIPPED / shipped] if shipped else [])):
            kept = load(place)
            if kept is not None:
                with suppress(RuntimeError):  # it calls a function that is not there
                    return self._ready(kept, shipped)
        for announce in ON_COMPILE:
            announce(function.__name__)
        from windtunnel.compiled.compiler import compile_entry

        compiled: MachineCode = compile_entry(self.dispatcher, arguments)
        variant = self._ready(compiled, shipped)
        compiled.save(path)
        return variant

    def _shipped_path(self, types: Sequence[Any]) -> Path | None:
        """Return where a wheel has the code, below its folder of machine code; None for a user's function."""
        function = self.py_func
        if not function.__module__.startswith("windtunnel.") or "<locals>" in function.__qualname__:
            return None
        return Path(shipped_name()) / f"{function.__qualname__}-{_digest((function.__module__, types))}"

    def _ready(self, code: MachineCode, shipped: Path | None) -> Variant:
        for folder in SHIP_TO if shipped else ():
            code.save(folder / str(shipped))
        return Variant(code.link(), code.num_results)


def _digest(facts: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


class Call:
    """Calls an entry again and again with arguments most of which are the same objects as before.

    They are laid out as words once; only another object is looked at.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.arguments: tuple[Any, ...] = ()
        self.leaves: list[Any] = []
        self.types: list[Any] = []
        self.first_words: list[int] = []

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) != len(self.arguments) or not self._refresh(arguments):
            self._lay_out(arguments)
        function, num_results = self.variant
        status = function(self.address)
        if status != 0:
            raise RuntimeError(f"{self.entry.py_func.__qualname__} stopped with status {status}")
        if num_results > 1:
            return tuple(self.words[:num_results].tolist())
        return int(self.words[0]) if num_results else None

    def _lay_out(self, arguments: tuple[Any, ...]) -> None:
        """Lay out all arguments, and find the code for their types."""
        self.leaves = list(leaves_of(arguments))
        words = [0] * RESULT_WORDS
        self.types, self.first_words = [], []
        for leaf in self.leaves:
            kind, own = described(leaf)
            self.types.append(kind)
            self.first_words.append(len(words))
            words += own
        self.words = np.array(words, np.int64)
        self.address = self.words.ctypes.data
        self.variant = self.entry.variant(tuple(self.types), arguments)
        self.arguments = arguments

    def _refresh(self, arguments: tuple[Any, ...]) -> bool:
        """Lay out the objects that differ from those of the call before; whether their types are the same."""
        if all(map(is_, arguments, self.arguments)):
            return True
        leaves = list(leaves_of(arguments))
        if len(leaves) != len(self.leaves):
            return False
        for index, leaf in enumerate(leaves):
            if leaf is not self.leaves[index]:
                kind, words = described(leaf)
                if kind != self.types[index]:
                    return False
                first = self.first_words[index]
                self.words[first : first + len(words)] = words
        self.arguments, self.leaves = arguments, leaves
        return True


def leaves_of(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Yield all that is in named tuples at any depth, in its order, and their classes."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield type(argument)
            yield from leaves_of(argument)
        else:
            yield argument


def described(leaf: Any) -> _Leaf:
    """Return the type of an argument, and the words that numba's function takes it as.

    Those of an array are its address and shape, and its strides where it has gaps.

    Raises:
        TypeError: no kernel takes such an argument.
    """
    if isinstance(leaf, np.ndarray):
        flags, address = leaf.flags, leaf.ctypes.data  # the array interface describes every field of a record, 50 us
        layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        kind = _dtype_name(leaf.dtype), leaf.ndim, layout, flags.aligned, flags.writeable
        return kind, (address, *leaf.shape, *(() if layout == "C" else leaf.strides))
    if leaf is None:
        return None, (0,)
    if isinstance(leaf, bool | np.bool_):
        return "bool", (int(leaf),)
    if isinstance(leaf, float):
        return "float64", struct.unpack("q", struct.pack("d", leaf))
    if type(leaf) is int or isinstance(leaf, np.int64):
        return "int64", (int(leaf),)
    if isinstance(leaf, type) and leaf is not tuple:
        return f"{leaf.__module__}.{leaf.__qualname__}", ()
    raise TypeError(f"no kernel takes a {type(leaf).__name__}: {leaf!r}")


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """Return what a dtype is known by; that of an `np.recarray` has the same name as an array's."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = repr(np.dtype((np.void, dtype)) if dtype.names else dtype)
    return name


_DTYPE_NAMES: dict[np.dtype[Any], str] = {}


def entry(function: Callable[..., Any]) -> Any:
    """Let Python call a kernel; its machine code, callees included, is kept on disk."""
    return function if IS_INTERPRETED else Entry(function)


def inner(function: Function) -> Function:
    """Make a kernel of a function that only kernels call (Python may call its `.py_func`)."""
    return function if IS_INTERPRETED else cast(Function, Kernel(function))


def inlined(function: Function) -> Function:
    """Compile a function into its callers: it may return parts of arrays, which numba without reference counting
    allows only inside the caller.
    """
    return function if IS_INTERPRETED else cast(Function, Kernel(function, inline="always"))


def repeated(entry: Any) -> Any:
    """Return a function that calls an entry, quickly where most arguments are those of the call before."""
    return Call(entry) if isinstance(entry, Entry) else entry
