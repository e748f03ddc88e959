"""Results that a notebook shows as their reports."""

from importlib import import_module
from typing import ClassVar


class Shown:
    """A result with a report."""

    REPORT: ClassVar[str]
    """`module:function` of its report below `windtunnel.report`, which is imported when a notebook shows the result."""

    def _repr_html_(self) -> str:
        """Return the report's texts and tables as HTML."""
        module, _, function = self.REPORT.partition(":")
        report = getattr(import_module(f"windtunnel.report.{module}"), function)(self)
        return str(import_module("windtunnel.report.render.templates").template("notebook.html").render(report=report))
