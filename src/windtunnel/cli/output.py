"""Results on stdout, as tables or JSON, and remarks on stderr."""

from collections.abc import Callable
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
