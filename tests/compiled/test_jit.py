"""How kernels are compiled and kept."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from numba import config, njit
from numba.core.compiler import Flags

from windtunnel.compiled.calendar import Clock, new_clock, schedule, take_next
from windtunnel.compiled.jit import KernelFlags, NamedApart, entry
from windtunnel.serving.loop.serve import serve


@entry
def take_several(clock: Clock, taken: npt.NDArray[np.int64]) -> None:
    taken[0] = take_next(clock)
    taken[1] = take_next(clock)
    for place in range(2, len(taken)):
        taken[place] = take_next(clock)


@njit  # type: ignore[untyped-decorator]
def schedule_one(clock: Clock, due_ps: int, what: int) -> None:
    schedule(clock, due_ps, what)


@njit  # type: ignore[untyped-decorator]
def take_one(clock: Clock) -> int:
    return take_next(clock)


def test_what_an_entry_calls_can_be_called_by_others() -> None:
    """As an entry's own it has fewer arguments, and whoever took it for the other would read wild addresses."""
    clock = new_clock(16, 8, 2)
    for what in range(5):
        schedule_one(clock, 5 + what, what)
    taken = np.zeros(4, dtype=np.int64)
    take_several(clock, taken)
    assert taken.tolist() == [0, 1, 2, 3]
    assert take_one(clock) == 4


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")
def test_processes_that_compile_at_once_keep_their_code_apart(tmp_path: Path) -> None:
    """Both read an index that is still empty; the index of the second then names the file that the first wrote last."""
    assert isinstance(serve._cache._cache_file, NamedApart)
    first, second = (NamedApart(str(tmp_path), "run", 0) for _ in range(2))
    names = [one._data_name(1) for one in (first, second)]
    first._save_index({"few arguments": names[0]})
    second._save_index({"many arguments": names[1]})
    second._save_data(names[1], "code for many")
    first._save_data(names[0], "code for few")
    assert second.load("many arguments") == "code for many"
    assert first.load("few arguments") is None


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")
def test_flags_are_equal_where_they_set_the_same() -> None:
    first, second = (take_several._compiler._customize_flags(Flags()) for _ in range(2))
    assert isinstance(first, KernelFlags)
    first.error_model = second.error_model = "numpy"
    assert (first, hash(first)) == (second, hash(second))
    second.error_model = "python"
    assert first != second
