"""Results on stdout, as tables or JSON; remarks, and progress where it is a terminal, on stderr."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from windtunnel import catalog
from windtunnel.cli import INTERRUPTED
from windtunnel.cli.verbs import Options
from windtunnel.errors import WindtunnelError
from windtunnel.files import write_text
from windtunnel.hardware import Device, Node
from windtunnel.model.shape import ModelSpec
from windtunnel.report.report import Remarks, Report, noted
from windtunnel.schema import json_text

_NOTES = "windtunnel.notes"
"""Key of a command's context under which its notes on the model are kept."""


def interrupted(message: str, hint: str | None) -> WindtunnelError:
    """Return the error with which a run ends that was interrupted, after what it has so far is printed."""
    error = WindtunnelError(message, hint)
    error.exit_code = INTERRUPTED
    return error


def answer(
    options: Options,
    document: Callable[..., Any],
    report: Callable[..., Report],
    *result: Any,
    launch: Remarks | None = None,
) -> None:
    """Write the page of a result where `options` name one, and print the result to stdout.

    `document(*result)` is printed as JSON, or else the report `report(*result)`. All of them name what `launch`, the
    command line or file that was read, has beside what is in the prediction.
    """
    html = getattr(options, "html", None)
    if html is not None:
        from windtunnel.report.render.html import page

        write_text(html, page(noted(report(*result), launch)))
        remark(f"wrote {html}")
    if getattr(options, "json", False):
        written = document(*result)
        if notes := click.get_current_context().meta.get(_NOTES):
            written = {**written, "notes": [*written.get("notes", ()), *notes]}
        click.echo(json_text(written if launch is None else {**written, **launch.document}))
    else:
        # JSON needs nothing of rich, which takes 25 ms to load.
        from windtunnel.report.render.terminal import show

        show(noted(report(*result), launch))


def remark(text: str, is_noted: bool = False) -> None:
    """Print a line to stderr, where it does not mix with the result; JSON has it among its `notes` if `is_noted`."""
    click.echo(text, err=True)
    if is_noted and (context := click.get_current_context(silent=True)):
        context.meta.setdefault(_NOTES, {})[text.removeprefix("note: ")] = True


def remark_left_out(model: ModelSpec, has_images: bool = False) -> None:
    """Say on stderr what a model is taken for, by its name or by request, which JSON says too; and which parts of a
    published model the predictions leave out: its vision tower where no request has images or videos."""
    if model.named_after:
        remark(f"note: {model.name} is taken for {model.named_after}, in the formats that its name says", is_noted=True)
    if model.unknown_type:
        how = f"its model_type {model.unknown_type!r} is not known"
        remark(f"note: {model.name} is taken to have the layers of {model.architecture!r}: {how}", is_noted=True)
    left_out = [part for part in model.left_out if not (has_images and part == "vision tower")]
    if left_out:
        how = "text and images only" if has_images else "text only"
        counted = ("vision tower", "attention to images") if model.tower_parameters else ()
        uncounted = [part for part in left_out if part not in counted]
        memory = f"; the memory of its {' and '.join(uncounted)} is not counted" if uncounted else ""
        remark(f"note: {model.name} is predicted without its {' and '.join(left_out)}: {how}{memory}")


def remark_node(device: Device, node: str | Node | None, option: str = "--node") -> None:
    """Say on stderr that the links of a device, for which no node is named or known, are assumed.

    `option` names another.
    """
    links = {catalog.GENERIC_NODE: "on PCIe", catalog.SWITCHED_NODE: "behind a switch of their scale_up_bytes_per_s"}
    if node is None and (joined := links.get(catalog.default_node(device).name)):
        remark(
            f"note: no node of {device.name} is known, so eight devices {joined} are assumed; {option} names another"
        )


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
