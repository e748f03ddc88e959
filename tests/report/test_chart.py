"""Figures as data: what a page's script draws of them."""

import json
import math

import numpy as np
import pytest

from windtunnel.metrics.records import Table
from windtunnel.report.chart import Axis, Chart, Series, as_json, histogram, lines_across
from windtunnel.report.serving.curves import client_over_time


def test_what_is_not_finite_is_left_to_the_script_as_null() -> None:
    data = json.loads(as_json(Chart(Axis("x"), Axis("y"), [Series("", [1.0, math.nan], [2.0, math.inf])])))
    assert data["series"][0]["x"] == [1.0, None]
    assert data["series"][0]["y"] == [2.0, None]


def test_numbers_keep_six_digits() -> None:
    data = json.loads(as_json(Chart(Axis("x"), Axis("y"), [Series("", [12.3456789], [1 / 3])])))
    assert (data["series"][0]["x"], data["series"][0]["y"]) == ([12.3457], [0.333333])


def test_a_histogram_counts_what_lies_outside_in_its_last_bins() -> None:
    (bars,) = histogram([-9, 0.1, 0.2, 1.5, 99, math.nan], [0, 1, 2], Axis("error"), "runs").series
    assert list(bars.x) == pytest.approx([0.5, 1.5])
    assert list(bars.y) == [3, 2]


def test_lines_are_sorted_and_keep_the_order_of_their_labels() -> None:
    lines = lines_across([({"x": 2, "tp": 4}, 20.0), ({"x": 1, "tp": 2}, 5.0), ({"x": 1, "tp": 4}, 10.0)], "x")
    found = [(line.label, list(line.x), list(line.y)) for line in lines]
    assert found == [("tp 4", [1, 2], [10, 20]), ("tp 2", [1], [5])]


def test_text_in_a_figure_cannot_end_its_script() -> None:
    text = as_json(Chart(Axis("</script><b>&"), Axis("y")))
    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text)["x"]["label"] == "</script><b>&"


def test_rates_are_smoothed_by_their_mean_as_most_intervals_may_have_no_request() -> None:
    times_s = np.arange(0.0, 11.0, 1 / 9)
    curves = client_over_time(Table({"arrival_s": times_s, "finish_s": times_s + 0.5}, {}))
    rates = next(chart for chart, _ in curves if chart.y.label == "requests/s")
    assert float(np.median(rates.series[0].y)) == 0.0
    assert [chart.smoothed_by for chart, _ in curves] == ["median", "mean"]
