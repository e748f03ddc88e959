"""Exceptions that a user can meet. Each says what is wrong in one sentence and, where it helps, how to mend it.

A message follows one order: what was asked, what was found, what is allowed. The hint is the next thing to try.
"""

import difflib
import errno
import math
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any, Self

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk, or of a limit of files, that holds no more."""


class WindtunnelError(Exception):
    """A failure that is not the caller's mistake: a broken file, an engine that died.

    Args:
        message: one sentence, without a trailing full stop.
        hint: what to do about it; shown on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint: str | None = None
        if hint:
            self.or_hint(hint)

    def or_hint(self, hint: str) -> Self:
        """Return the same error, with this hint where it has none; Python prints it below a traceback too."""
        if not self.hint:
            self.hint = hint
            self.add_note(f"hint: {hint}")
        return self


class InputError(WindtunnelError):
    """The caller asked for something impossible: a wrong key, an impossible value, a missing file."""

    exit_code = 2


class MissingExtraError(InputError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", f"pip install 'windtunnel[{extra}]'")


def import_extra(package: str, extra: str) -> Any:
    """Import an optional package; MissingExtraError names the extra that brings it where it is not installed."""
    try:
        return import_module(package)
    except ImportError:
        raise MissingExtraError(package, extra) from None


@contextmanager
def needing(extra: str, *packages: str) -> Iterator[None]:
    """Import, within the block, modules that need the packages of an extra; MissingExtraError where one is lacking."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in packages:
            raise
        raise MissingExtraError(package, extra) from None


def missing_file(path: Path) -> InputError:
    """Return the error for a file that does not exist; the hint names near files in its folder."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return InputError(f"there is no file {path}", f"there is no folder {folder} either")
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        # A folder may be entered and not listed.
        names = []
    return InputError(f"there is no file {path}", did_you_mean(path.name, names, f"it was looked for in {folder}"))


def unreadable(path: Path, error: OSError | UnicodeDecodeError) -> InputError:
    """Return the error for a file that is missing, a folder, forbidden, broken or not text."""
    if isinstance(error, FileNotFoundError):
        return missing_file(path)
    if isinstance(error, IsADirectoryError):
        return InputError(f"{path} is a folder; a file is needed", "name a file in it")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return _too_long(path)
    if isinstance(error, UnicodeDecodeError):
        return InputError(f"{path} is not a text file", "is it compressed, or a different file from the one you meant?")
    return InputError(f"{path} cannot be read: {error.strerror or error}", "check that it is readable and complete")


def unwritable(path: Path, error: OSError) -> InputError:
    """Return the error for a file or folder that cannot be written."""
    if error.errno == errno.ENAMETOOLONG:
        return _too_long(path)
    full = error.errno in FULL
    # pyarrow's own text repeats the error's.
    reason = os.strerror(error.errno) if error.errno else error
    hint = "free some space, or choose another place" if full else "choose another place"
    return InputError(f"{path} cannot be written: {reason}", hint)


def _too_long(path: Path) -> InputError:
    return InputError(f"{str(path)[:60]}... is too long for the name of a file", "check that it is one, or shorten it")


def did_you_mean(word: str, known: Iterable[str], fallback: str | None = None) -> str | None:
    """Return a hint that names the known words nearest to `word`, or `fallback` where none is near."""
    names, asked = list(known), word.lower()
    behind = asked.rsplit("/", 1)[-1]
    wholes, parts = {name.lower(): name for name in names}, {name.lower().rsplit("/", 1)[-1]: name for name in names}
    longer = [name for name in names if len(asked) > 2 and name.lower().startswith(asked)]
    longer += [name for part, name in parts.items() if len(behind) > 2 and part.startswith(behind)]
    # Where no whole name is near, what is behind the last slash may be.
    for of, what in ((wholes, asked), (parts, behind)):
        near = [of[each] for each in difflib.get_close_matches(what, of, n=3, cutoff=0.55)]
        if near or longer:
            return f"did you mean {listed(list(dict.fromkeys([*longer, *near]))[:3], 'or')}?"
    return fallback


def check_known(word: str, known: Iterable[str], message: str, otherwise: str | None = None) -> None:
    """Raise InputError with `message` unless `word` is known; its hint names near words, else `otherwise`, else all."""
    names = list(known)
    if word not in names:
        raise InputError(message, did_you_mean(word, names, otherwise or f"known: {', '.join(names)}"))


def is_number(value: Any, least: float = 0.0) -> bool:
    """Whether a value is a finite number of at least `least`."""
    return isinstance(value, Real) and least <= float(value) < math.inf


def check_number(number: Any, what: str, least: float = 0.0) -> None:
    """Raise InputError with `what` it is unless it is a finite number of at least `least`."""
    if not is_number(number, least):
        raise InputError(f"{what} is {number!r:.60}; a number of at least {least:g} is needed")


def listed(words: Sequence[str], joint: str = "and") -> str:
    """Return words as a list in a sentence: `a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {joint} {words[-1]}"


def place(error: Exception) -> str | None:
    """Return the place in the user's code that raised `error`; None where our call of it failed."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals.get("__name__", "").startswith("windtunnel.")
    return None if is_ours else f"{Path(frame.f_code.co_filename).name}, line {line}"
