"""Columns of a request trace: times, dates and counts, every value checked."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError
from windtunnel.workload.lengths import MAX_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A column without missing values: numbers, dates or objects, with its file and its name."""

    path: Path
    name: str
    values: NDArray[Any]
    rows: Ints
    """Number of each value's row in the file, from 1."""

    @property
    def is_numeric(self) -> bool:
        return self.values.dtype.kind in "iuf"

    def refuse(self, wrong: Any, reason: str, hint: str | None = None) -> None:
        """Raise InputError for the first row where `wrong` is true."""
        if np.any(wrong):
            row = int(np.argmax(wrong))
            message = f"{self.path} row {self.rows[row]}: {self.name} {reason}: {shown(self.values[row])}"
            raise InputError(message, hint)


def column_of(path: Path, name: str, column: Any, rows: Ints) -> Column:
    """Return a block of a column as read, its rows numbered `rows` in the file; InputError for none or a list."""
    if isinstance(column, list):
        raise InputError(f"{path} row {rows[0]}: {name} is not a number: {shown(column[0])}")
    if column.null_count:
        row = rows[np.argmax(np.asarray(column.is_null()))]
        what = "is missing" if column.type == "string" else "is missing or not a number"
        raise InputError(f"{path} row {row}: {name} {what}", f"fill in {name}, or remove the row")
    return Column(path, name, np.asarray(column), rows)


def dates_s(column: Column, origin: Any) -> tuple[Floats, Any]:
    """Return seconds since `origin` (None: the first date), and the origin; dates are datetime64 or ISO 8601 (UTC)."""
    dates = column.values
    if dates.dtype.kind != "M":
        parsed = [_date(value) for value in dates]
        wrong = [date is None for date in parsed]
        unreadable = [bad and not _is_number(value) for bad, value in zip(wrong, dates, strict=True)]
        column.refuse(unreadable, "is not a time", "write numbers, or dates as 2026-03-01T10:00:00 (ISO 8601)")
        column.refuse(wrong, "is text, not a number" if all(wrong) else "is not a date, but others are")
        dates = np.array(parsed, "datetime64[us]")
    origin = dates[0] if origin is None else origin
    return np.asarray((dates - origin) / np.timedelta64(1, "s"), np.float64), origin


def tokens_of(column: Column) -> Ints:
    """Return positive token counts; InputError names the row of one that is none."""
    tokens = integers(column)
    column.refuse(tokens < 1, "is not positive", "leave out requests that failed or generated nothing")
    column.refuse(tokens > MAX_TOKENS, f"is above {MAX_TOKENS}")
    return tokens


def integers(column: Column) -> Ints:
    """Return whole numbers, which a CSV file may hold as text; InputError names the row of one that is none."""
    if not column.is_numeric:
        column.refuse([not _is_number(value) for value in column.values], "is not a number")
        if ".csv" not in column.path.name.lower():
            column.refuse(np.ones(column.values.size, bool), "is text, not a number")
        # Text of a CSV file, read so because a later row is wrong.
        column = replace(column, values=column.values.astype(np.float64))
    if column.values.dtype.kind == "f":
        column.refuse(column.values != np.rint(column.values), "is not a whole number")
        column.refuse(~(np.abs(column.values) < 2.0**62), "is out of range")
    return column.values.astype(np.int64)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _date(text: Any) -> datetime | None:
    """Return the time in UTC, to which a date without a zone belongs, or None for other values."""
    try:
        date = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return date.astimezone(UTC).replace(tzinfo=None) if date.tzinfo else date


def shown(value: Any) -> str:
    """Return a value of a file as text, short and on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
