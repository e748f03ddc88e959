"""The exceptions that a user can meet. Each says what is wrong in one sentence and, where it helps, how to mend it.

A message follows one order: what was asked, what was found, what is allowed. The hint is the next thing to try.
"""

import difflib
from collections.abc import Iterable


class WindtunnelError(Exception):
    """Something failed that is not the caller's mistake: a broken file, an engine that died.

    Args:
        message: one sentence, without a trailing full stop.
        hint: what to do about it; shown on a line of its own.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(WindtunnelError):
    """The caller asked for something that cannot be: a wrong key, an impossible value, a missing file."""

    exit_code = 2


class MissingExtraError(InputError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", f"pip install 'windtunnel[{extra}]'")


def did_you_mean(asked: str, known: Iterable[str], fallback: str | None = None) -> str | None:
    """A hint that names the known words nearest to `asked`, or `fallback` where none is near."""
    names = list(known)
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(asked.lower(), by_lower, n=3, cutoff=0.55)
    if not near:
        tails = {name.lower().rsplit("/", 1)[-1]: name for name in names}
        near_tails = difflib.get_close_matches(asked.lower().rsplit("/", 1)[-1], tails, n=3, cutoff=0.55)
        return f"did you mean {_either(tails[tail] for tail in near_tails)}?" if near_tails else fallback
    return f"did you mean {_either(by_lower[name] for name in near)}?"


def _either(names: Iterable[str]) -> str:
    words = list(names)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
