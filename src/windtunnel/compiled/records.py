"""How a type checker sees record arrays and whole numbers in kernels.

A `Protocol` declares the fields of a record and how each is stored; `layout` makes the numpy dtype of it. So an editor
completes `links[i].free_ps`, and mypy finds unknown fields and swapped tables. Numba never reads these annotations.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias, TypeVar, get_args, get_type_hints, overload

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.jit import inner

Ints: TypeAlias = NDArray[np.int64] | NDArray[np.int32]

Record = TypeVar("Record")


class Records(Protocol[Record]):
    """A record array with one record per index."""

    @property
    def size(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Record]: ...
    @overload
    def __getitem__(self, index: int, /) -> Record: ...
    @overload
    def __getitem__(self, rows: slice, /) -> "Records[Record]": ...
    @overload
    def __getitem__(self, field: str, /) -> NDArray[Any]: ...
    @overload
    def __setitem__(self, index: int, record: Record, /) -> None: ...
    @overload
    def __setitem__(self, field: str, values: Any, /) -> None: ...
    def view(self, kind: type[Any], /) -> NDArray[Any]: ...
    def copy(self) -> NDArray[Any]: ...


class RecordGrid(Protocol[Record]):
    """A record array of two dimensions."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: tuple[int, int], /) -> Record: ...
    @overload
    def __getitem__(self, index: int, /) -> Records[Record]: ...


if TYPE_CHECKING:

    def int64(value: float | np.integer[Any]) -> int:
        """Convert to a 64-bit whole number; mypy treats every whole number of a kernel as an `int`."""
else:
    int64 = np.int64

F8 = Annotated[float, "f8"]
I8 = Annotated[int, "i8"]
I4 = Annotated[int, "i4"]
I2 = Annotated[int, "i2"]
"""The type of a record's field, and how it is stored."""


def layout(record: type) -> np.dtype[Any]:
    """Return the dtype of a record that a `Protocol` declares: its fields in their order, without padding."""
    hints = get_type_hints(record, include_extras=True)
    return np.dtype([(name, get_args(hint)[1]) for name, hint in hints.items()])


@inner
def is_unset(value: float) -> bool:
    """Whether a time is NaN, which stands for "not yet"."""
    return bool(np.isnan(value))
