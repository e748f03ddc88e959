"""Rows of the table of measured serving runs, and the words that its cells hold for numbers and switches."""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windtunnel.errors import InputError, did_you_mean, unreadable
from windtunnel.units import format_count

_DEFAULT = re.compile(r"not set\b|engine default\b|default\b|(auto|none|nan)$", re.IGNORECASE)

_PART = re.compile(r"(?:^|;)\s*c(\d+)(?:-(\d+))?: ")


def is_default(text: str) -> bool:
    """Whether a cell says that nothing was set: empty, `not set (default 2048)`, `engine default`, `auto`."""
    return not text or _DEFAULT.match(text) is not None


def at_load(text: str, concurrency: int | None) -> str:
    """Return the part of `c4-8: 0.85; c16-64: padding on; piecewise on` for a client of that concurrency, "" without
    one; anything else as it is.
    """
    parts = list(_PART.finditer(text))
    if not parts or parts[0].start() != 0:
        return text
    ends = [part.start() for part in parts[1:]] + [len(text)]
    for part, end in zip(parts, ends, strict=True):
        if int(part[1]) <= (concurrency or 0) <= int(part[2] or part[1]):
            return text[part.end() : end].strip()
    return ""


def image_version(image: str) -> str | None:
    """Return the release in an image's tag: `vllm/vllm-openai:v0.19.0-cu130` -> `0.19.0`; None for other builds."""
    tag = image.partition(" ")[0].rpartition(":")[2]
    release = re.match(r"v?(\d+\.\d+(?:\.\d+)*(?:\.?(?:rc|post)\d+)*)", tag)
    return release[1] if release else None


@dataclass(frozen=True)
class Row:
    """One line of a file; its getters name file, line and column when a value is wrong."""

    values: Mapping[str, str]
    where: str

    def text(self, column: str) -> str:
        """Return the value, "" where it was left out."""
        if column not in self.values:
            raise InputError(f"{self.where}: there is no column {column!r}", did_you_mean(column, self.values))
        return self.values[column].strip()

    def required(self, column: str) -> str:
        """Return the value.

        Raises:
            InputError: it was left out.
        """
        value = self.text(column)
        if not value:
            raise InputError(f"{self.where}: {column} is empty")
        return value

    def number(self, column: str) -> float:
        """Return a number above zero."""
        value = self.required(column)
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise InputError(f"{self.where}: {column} is {value!r}; a number above zero is needed")
        return number

    def count(self, column: str) -> int:
        """Return a whole number above zero, maybe written as `8.0`."""
        number = self.number(column)
        if number != int(number):
            raise InputError(f"{self.where}: {column} is {self.text(column)!r}; a whole number is needed")
        return int(number)

    def count_or_none(self, column: str) -> int | None:
        """Return a whole number above zero, None where it was left out, is 0, or the engine's default was in force."""
        value = self.text(column)
        if is_default(value) or re.match(r"0(\.0*)?$", value):
            return None
        return self.count(column)

    def graph_limit(self, column: str) -> int | None:
        """Return a batch size, 0 where graphs are off, None where the engine's default was in force."""
        off = re.match(r"off\b|disabled\b|eager\b|0(\.0*)?$", self.text(column), re.IGNORECASE)
        return 0 if off else self.count_or_none(column)

    def share(self, column: str) -> float | None:
        """Return a number above zero, maybe with a remark, as `0.9 (default)`; None for the engine's default."""
        share = re.match(r"([\d.]+)( \(|$)", self.text(column))
        if share is None and is_default(self.text(column)):
            return None
        return Row({column: share[1] if share else self.text(column)}, self.where).number(column)

    def truth(self, column: str) -> bool:
        """Read `True` or `False`; a missing value is False."""
        value = self.text(column).lower()
        if value not in ("true", "false", ""):
            raise InputError(f"{self.where}: {column} is {self.text(column)!r}; True or False is needed")
        return value == "true"

    def at_load(self, concurrency: int | None) -> "Row":
        """Return the row with every `c4-8: on; c16-64: off` read for a client of this concurrency."""
        return Row({name: at_load(value, concurrency) for name, value in self.values.items()}, self.where)


def rows(path: Path) -> Iterator[Row]:
    """Read the rows of a CSV file.

    Raises:
        InputError: there is no such file, it has no header, or a row is longer or shorter than it.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}", "the three files of the layout lie in one folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None
    lines = csv.reader(text.splitlines())
    header = next(lines, [])
    if not header:
        raise InputError(f"{path} is empty")
    for line in lines:
        if not line:
            continue
        where = f"{path.name} line {lines.line_num}"
        if len(line) != len(header):
            raise InputError(
                f"{where} has {format_count(len(line), 'value')} for {format_count(len(header), 'column')}"
            )
        yield Row(dict(zip(header, line, strict=True)), where)
