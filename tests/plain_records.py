"""Records of numpy that are read quickly where loops are interpreted, which spend most of their time on it."""

import os
from typing import Any

import numpy as np


def read_by_name() -> None:
    """Let `record.name` take the field at once: numpy looks for a method first, which takes four times as long.

    A field that has a method's name is read, as compiled code reads it.
    """
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        np.record.__getattribute__ = _attribute  # type: ignore[method-assign]
        np.record.__setattr__ = _set_attribute  # type: ignore[method-assign, assignment]


_field, _set_field = np.void.__getitem__, np.void.__setitem__
_usual, _set_usual = np.record.__getattribute__, np.record.__setattr__


def _attribute(record: np.record, name: str) -> Any:
    try:
        value = _field(record, name)
    except ValueError:
        return _usual(record, name)
    return _usual(record, name) if isinstance(value, np.void) else value


def _set_attribute(record: np.record, name: str, value: Any) -> None:
    try:
        _set_field(record, name, value)
    except ValueError:
        _set_usual(record, name, value)
