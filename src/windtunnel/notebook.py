"""Results that a notebook shows as their reports."""

from importlib import import_module
from typing import Any, ClassVar


class Shown:
    """A result with a report."""

    REPORT: ClassVar[str]
    """`module:function` of its report below `windtunnel.report`, which is imported when a notebook shows the result."""

    def _report(self) -> Any:
        module, _, function = self.REPORT.partition(":")
        return getattr(import_module(f"windtunnel.report.{module}"), function)(self)

    def __repr__(self) -> str:
        """Return the report's title and answer: the fields may be thousands of numbers."""
        report = self._report()
        return f"{type(self).__name__}({report.title}{': ' if report.verdict else ''}{report.verdict})"

    def _repr_html_(self) -> str:
        """Return the report's texts and tables as HTML."""
        template = import_module("windtunnel.report.render.html").template("notebook.html")
        return str(template.render(report=self._report()))
