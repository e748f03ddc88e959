"""How a type checker sees record arrays and whole numbers in kernels.

A `Protocol` declares the fields of a record and how each is stored; `new_table` makes an array of them. So an editor
completes `links[i].free_ps`, and mypy finds unknown fields and swapped tables. Numba never reads these annotations.
"""

from collections.abc import Iterator
from functools import cache
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


STORED = {float: "f8", int: "i8"}
"""How numbers are stored whose annotation does not say it."""


@cache
def layout(*owners: type) -> np.dtype[Any]:
    """Return the dtype of a record with the fields of all `owners`, in their order and without padding: one that a
    `Protocol` declares, or the numbers of a named tuple.
    """
    hints = {name: hint for owner in owners for name, hint in get_type_hints(owner, include_extras=True).items()}
    return np.dtype([(name, STORED.get(hint) or get_args(hint)[1]) for name, hint in hints.items()])


def new_table(owner: type | tuple[type, ...], shape: int | tuple[int, int], **columns: Any) -> Any:
    """Make records with the fields of `owner`, or of several: zeros, but for the values of some `columns`."""
    owners = owner if isinstance(owner, tuple) else (owner,)
    table = np.zeros(shape, layout(*owners)).view(np.recarray)
    for name, value in columns.items():
        table[name] = value
    return table


@inner
def is_unset(value: float) -> bool:
    """Whether a time is NaN, which stands for "not yet"."""
    return bool(np.isnan(value))
