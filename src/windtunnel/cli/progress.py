"""Progress on stderr, where it is a terminal."""

import sys
import threading
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
def compiling(num_parts: int) -> Iterator[None]:
    """Say on stderr what is compiled meanwhile: each second on a terminal, elsewhere a line for each of the parts."""
    from windtunnel.compiled.jit import ON_COMPILE

    names: list[str] = []
    started_s, has_ended, is_terminal = 0.0, threading.Event(), sys.stderr.isatty()

    def announce(name: str) -> None:
        nonlocal started_s
        started_s = started_s or time.monotonic()
        names.append("the serving loop" if name == "serve" else name)
        if not is_terminal:
            click.echo(f"compiling {names[-1]}, part {len(names)} of {num_parts}, once", err=True)

    def tell() -> None:
        while not has_ended.wait(1.0):
            if names:
                spent_s = time.monotonic() - started_s
                _draw(f"compiling {names[-1]}, part {len(names)} of {num_parts}, once: {spent_s:.0f} s so far")

    teller = threading.Thread(target=tell, daemon=True)
    ON_COMPILE.append(announce)
    if is_terminal:
        teller.start()
    try:
        yield
    finally:
        ON_COMPILE.remove(announce)
        has_ended.set()
        if is_terminal:
            teller.join()
            _draw("")
    if names:
        click.echo(f"compiled in {time.monotonic() - started_s:.0f} s; the next start finds it", err=True)


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
