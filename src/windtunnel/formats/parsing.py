"""Parse numbers and JSON of other tools, with errors that name the place."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from windtunnel.errors import InputError
from windtunnel.files import read_bytes

T = TypeVar("T")


def parse_number(text: Any, what: str) -> float:
    """Return a finite number of at least 0; `what` names it and its place.

    Raises:
        InputError: it is not a number, is below 0, or is not finite.
    """
    try:
        number = float(text)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{what} is {text!r}; a number is needed") from None
    if not 0 <= number < float("inf"):
        raise InputError(f"{what} is {text}; at least 0 is needed")
    return number


def parse_whole(text: Any, what: str, least: int | None = 0) -> int:
    """Return a whole number of at least `least`; `what` names it and its place.

    Raises:
        InputError: it is not a whole number, or is below `least`.
    """
    try:
        number = int(text)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{what} is {text!r:.60}; a whole number is needed") from None
    if least is not None and number < least:
        raise InputError(f"{what} is {number}; at least {least} is needed")
    return number


def decode_json(path: Path, kind: type[T], what: str, hint: str | None = None) -> T:
    """Decode a JSON file, plain or gzipped; keys that `kind` does not have are ignored.

    Raises:
        InputError: the file is missing, is not JSON, or is not `what`.
    """
    content = read_bytes(path)
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not {what}: {error}", hint) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"{path} is not {what}: it cannot be read as JSON: {error}"
        raise InputError(text, "is the file cut off?") from None
