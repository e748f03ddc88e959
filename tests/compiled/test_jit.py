"""How kernels are compiled and kept."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from windtunnel.compiled import jit
from windtunnel.compiled.calendar import Clock, new_clock, schedule, take_next
from windtunnel.compiled.jit import ON_COMPILE, Call, Entry, described, entry
from windtunnel.compiled.machine_code import load

needs_compiler = pytest.mark.skipif(jit.IS_INTERPRETED, reason="nothing is compiled")


class Tables(NamedTuple):
    """Arguments of `weigh`, some optional."""

    records: Any
    grid: Any
    weight: Any
    extra: Any


@entry
def weigh(tables: Tables, is_negative: bool, count: int) -> tuple[int, int]:
    """Write sums that show the place of each argument; return two counts."""
    total = tables.weight
    if tables.extra is not None:
        total += tables.extra[0]
    for i in range(len(tables.records)):
        tables.records[i].seconds = total + np.log(tables.records[i].tokens + 1.0)
    for row in range(tables.grid.shape[0]):
        for column in range(tables.grid.shape[1]):
            tables.records[0].seconds += tables.grid[row, column] * (10 * row + column)
    if is_negative:
        count = -count
    return count, len(tables.records)


@entry
def fail(values: npt.NDArray[np.int64]) -> int:
    """Raise an error where the first value is 0."""
    if values[0] == 0:
        raise ValueError
    return values[0]


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


@pytest.mark.full
def test_what_an_entry_calls_can_be_called_by_others() -> None:
    """As an entry's own it has fewer arguments, and whoever took it for the other would read wild addresses."""
    clock = new_clock(16, 8, 2)
    for what in range(5):
        schedule_one(clock, 5 + what, what)
    taken = np.zeros(4, dtype=np.int64)
    take_several(clock, taken)
    assert taken.tolist() == [0, 1, 2, 3]
    assert take_one(clock) == 4


def new_tables(grid: Any, weight: float = 0.5, extra: Any = None) -> Tables:
    records = np.zeros(3, [("tokens", "i4"), ("seconds", "f8")]).view(np.recarray)
    records.tokens = [0, 5, 7]
    return Tables(records, grid, weight, extra)


@pytest.mark.parametrize("extra", [None, np.array([2.25])])
@pytest.mark.parametrize("layout", ["C", "F", "A", "read-only"])
def test_code_and_function_agree_on_every_kind_of_argument(layout: str, extra: Any) -> None:
    grid = np.arange(24.0).reshape(4, 6)
    grid = {"C": grid, "F": np.asfortranarray(grid), "A": grid[::2, 1::2], "read-only": grid.copy()}[layout]
    grid.flags.writeable = layout != "read-only"
    compiled, interpreted = (new_tables(grid, extra=extra) for _ in range(2))
    function = weigh.py_func if isinstance(weigh, Entry) else weigh
    assert weigh(compiled, True, 4) == function(interpreted, True, 4) == (-4, 3)
    assert compiled.records.tolist() == interpreted.records.tolist()


@pytest.mark.full
@needs_compiler
def test_code_is_found_on_disk_and_a_damaged_file_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "cache_dir", lambda: tmp_path)
    names: list[str] = []
    monkeypatch.setattr(jit, "ON_COMPILE", [names.append])

    def seconds() -> list[Any]:
        tables = new_tables(np.ones((1, 2)))
        assert Entry(weigh.py_func)(tables, False, 1) == (1, 3)
        return list(tables.records.tolist())

    first = seconds()
    (kept,) = tmp_path.iterdir()
    assert (seconds(), names) == (first, ["weigh"])
    content = kept.read_bytes()
    for damaged in (b"", content[:100], content[:200] + b"?" + content[201:]):
        names.clear()
        kept.write_bytes(damaged)
        assert load(kept) is None
        assert (seconds(), names, load(kept) is not None) == (first, ["weigh"], True)


@needs_compiler
def test_code_on_disk_needs_no_numba() -> None:
    """The second process finds what the first one compiled."""
    program = f"""
import sys
import numpy as np
from windtunnel.network.routing import RoutingGraph
from windtunnel.network.packet.kernel.groups import measure_distances
graph = RoutingGraph(*(np.zeros(2, np.int64),) * 4, {True})
measure_distances(np.zeros(0, np.int64), graph, np.zeros(2, np.int64), np.zeros((0, 2), np.int16))
print("numba" in sys.modules)
"""
    answers = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert answers[-1] == "False\n"


@needs_compiler
def test_repeated_calls_see_what_has_changed() -> None:
    call, tables = Call(weigh), new_tables(np.zeros((1, 1)))
    others = [
        tables,
        tables,
        tables._replace(weight=1.5),
        tables._replace(extra=np.array([3.0])),
        tables._replace(grid=np.ones((2, 2))),
        tables._replace(grid=np.ones((2, 2), np.float32)),
    ]
    for other in others:
        assert call(other, False, 9) == (9, 3)
        expected = new_tables(other.grid, other.weight, other.extra)
        weigh.py_func(expected, False, 9)
        assert other.records.tolist() == expected.records.tolist()


@needs_compiler
def test_an_error_inside_a_kernel_and_a_strange_argument_are_told() -> None:
    assert fail(np.array([3])) == 3
    with pytest.raises(RuntimeError, match="fail stopped with status 1"):
        fail(np.array([0]))
    for strange in ("text", [1], (1, 2), np.float32(1), np.zeros(1)[0:0].dtype):
        with pytest.raises(TypeError, match="no kernel takes"):
            described(strange)
    assert not ON_COMPILE
