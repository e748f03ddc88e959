"""Templates of reports: units by name, formats, parts that are left out, and tables of fields."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from windtunnel.report.layout import cards_of, facts_of, filled, table_of
from windtunnel.report.render.html import PACKAGE
from windtunnel.report.report import Card, Cell


@dataclass(frozen=True)
class Run:
    span_s: float = 0.0123
    num_runs: int = 1
    name: str = "one"
    energy_j: float = 7.2e6
    goodput_fraction: float | None = None
    inner: Any = None


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{name} in {span_s}", "one in 12.3 ms"),
        ("{num_runs:# run}", "1 run"),
        ("{inner.count:# leaf|leaves}, {inner.count}", "1,200 leaves, 1,200"),
        ("{energy_j:/3.6e6} kWh", "2.00 kWh"),
        ("{energy_j:/1e6 .1f} MJ", "7.2 MJ"),
        ("{span_s:duration}; {span_s:.3f}", "12.3 ms; 0.012"),
        ("{inner.low_name:words}", "a b"),
        ("{name}[, {goodput_fraction} good][, {inner.zero} lost]", "one"),
        ("{name}, {goodput_fraction} good", ""),
        ("{name}, {inner.nan_s}", ""),
        ("{name}, {inner.absent}", ""),
        (["{goodput_fraction}", "[{inner.zero}]", "unknown"], "unknown"),
    ],
)
def test_templates_show_fields_and_leave_out_what_is_unknown(template: str, text: str) -> None:
    inner = {"count": 1200, "low_name": "a_b", "zero": 0, "nan_s": float("nan")}
    assert filled(template, Run(inner=inner)) == text


def test_a_misspelt_field_of_an_object_is_an_error() -> None:
    with pytest.raises(AttributeError):
        filled("{spn_s}", Run())


def test_facts_and_cards_without_a_text_are_left_out() -> None:
    templates = {"span": "{span_s}", "goodput": "{goodput_fraction}", "of {name}": "{num_runs}"}
    assert facts_of(Run(), templates).rows == [("span", "12.3 ms"), ("of one", "1")]
    assert cards_of(Run(), templates).facts == [Card("12.3 ms", "span"), Card("1", "of one")]


def test_a_column_is_a_path_a_template_or_a_function() -> None:
    columns = {"name": "name", "span": "span_s", "good": "goodput_fraction", "runs": "{num_runs}", "x": lambda _: "y"}
    table = table_of([Run()], columns, left=2)
    assert table.rows == [["one", Cell("12.3 ms", 0.0123), "", "1", "y"]]
    assert (table.headers, table.left) == (list(columns), 2)
    assert table_of([Run()], [("p99", "name"), ("p99", "{name}")]).headers == ["p99", "p99"]


def parts_of(layout: Any) -> Iterator[Any]:
    """Every key and value in a layout."""
    if isinstance(layout, dict):
        yield from layout
    if isinstance(layout, dict | list):
        for part in layout.values() if isinstance(layout, dict) else layout:
            yield from parts_of(part)
    else:
        yield layout


@pytest.mark.parametrize("file", sorted((PACKAGE / "report").rglob("*.yaml")), ids=lambda file: file.stem)
def test_layouts_hold_whole_texts(file: Path) -> None:
    parts = list(parts_of(yaml.safe_load(file.read_text(encoding="utf-8"))))
    # YAML reads `off` as false and an empty value as nothing: such a header must be quoted.
    assert False not in [part for part in parts if isinstance(part, bool)]
    assert None not in parts
    assert all(text.count("[") == text.count("]") for text in parts if isinstance(text, str))
