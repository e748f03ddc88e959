"""Results on stdout, as tables or JSON, and remarks on stderr."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.model.shape import ModelSpec


def answer(as_json: bool, document: Callable[..., Any], report: Callable[..., Iterable[Any]], *result: Any) -> None:
    """Print a result to stdout: `document(*result)` as JSON, or the tables and texts of `report(*result)`."""
    if as_json:
        from windtunnel.report.documents import as_text

        click.echo(as_text(document(*result)))
    else:
        from windtunnel.report.render.tables import show

        show(*report(*result))


def remark(text: str) -> None:
    """Print a line to stderr, where it does not mix with the result."""
    click.echo(text, err=True)


def remark_left_out(model: "ModelSpec") -> None:
    """Say on stderr which parts of a published model the predictions leave out."""
    if model.left_out:
        remark(f"note: {model.name} is predicted without its {' and '.join(model.left_out)}: text only")


def write_page(file: Path | None, page: Callable[..., str], *result: Any) -> None:
    """Write `page(*result)`, a text, to `file`, and say so; do nothing without a file."""
    if file is not None:
        from windtunnel.files import write_text

        write_text(file, page(*result))
        remark(f"wrote {file}")


def check_replaceable(file: Path | None, overwrite: bool) -> None:
    """Raise InputError where `file` is there already and `overwrite` does not allow to replace it."""
    if file is not None and file.exists() and not overwrite:
        raise InputError(f"{file} exists already", "choose another name, or replace it with --overwrite")
