"""Results that a notebook shows as their reports."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from windtunnel.errors import import_extra

if TYPE_CHECKING:
    import pandas as pd


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
        template = import_module("windtunnel.report.render.html").template("notebook.html")
        return str(template.render(report=self._report()))


class Tabular:
    """Rows that have `to_arrow()`, for pandas and for what reads Arrow streams: polars, DuckDB, pyarrow."""

    to_arrow: Any

    def to_pandas(self) -> "pd.DataFrame":
        """Return a pandas data frame; MissingExtraError where pandas is not installed."""
        import_extra("pandas", "pandas")
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return the Arrow stream from which polars, DuckDB and pyarrow read the rows."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)
