"""How a type checker sees record arrays and whole numbers in kernels.

Each record layout (a numpy dtype) has a `Protocol` with the same fields, so that an editor completes
`links[i].free_ps`, and mypy finds an unknown field and a swapped table. Numba never reads these annotations.
"""

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np

Record = TypeVar("Record")


class Records(Protocol[Record]):
    """A record array with one record per index."""

    @property
    def size(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Record: ...
    def __setitem__(self, index: int, record: Record, /) -> None: ...


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
