"""Progress on stderr, where it is a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

QUIET_S = 0.3
"""A run shorter than this shows nothing."""


@contextmanager
def counted(doing: str, things: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback that draws a line, `simulating  ━━━   120 of 1,000 requests`; None where stderr is no terminal.

    The line is gone afterwards.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from windtunnel.compiled.jit import ON_COMPILE

    ON_COMPILE.append(_draw_compiling)
    started_s = time.monotonic()

    def show(finished: int, total: int) -> None:
        if time.monotonic() - started_s > QUIET_S:
            done = 30 * finished // max(total, 1)
            _draw(f"{doing}  {'━' * done}{' ' * (30 - done)}  {finished:,} of {total:,} {things}")

    try:
        yield show
    finally:
        ON_COMPILE.remove(_draw_compiling)
        _draw("")


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows a line on stderr, gone afterwards; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    try:
        yield _draw
    finally:
        _draw("")


def _draw_compiling(name: str) -> None:
    what = "the serving loop, about ten seconds" if name == "serve" else f"{name}, a few seconds"
    _draw(f"compiling {what}, once")


def _draw(text: str) -> None:
    click.echo(f"\r\x1b[2K{text}", nl=False, err=True)
