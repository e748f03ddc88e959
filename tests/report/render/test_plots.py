"""Figures are well-formed SVG whose marks lie where their values belong."""

import xml.etree.ElementTree as ET

import pytest

from windtunnel.report.render.plots import Axis, Series, figure, histogram, tick

SVG = "{http://www.w3.org/2000/svg}"


def circles(svg: str) -> list[tuple[float, float]]:
    return [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in ET.fromstring(svg).iter(f"{SVG}circle")]


def test_a_logarithmic_axis_spaces_decades_equally_and_larger_values_lie_higher() -> None:
    svg = figure([Series("runs", [1, 10, 100], [1, 10, 100])], Axis("x", is_log=True), Axis("y", is_log=True))
    (x0, y0), (x1, y1), (x2, y2) = circles(svg)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 > y1 > y2


def test_points_that_cannot_be_drawn_are_left_out_with_their_tooltips() -> None:
    points = Series("", [1, 0, float("nan"), 4], [1, 2, 3, 4], tooltips=["a", "b", "c", "<d>"])
    root = ET.fromstring(figure([points], Axis("x", is_log=True), Axis("y")))
    assert [title.text for title in root.iter(f"{SVG}title")] == ["a", "<d>"]


def test_a_histogram_counts_what_lies_outside_in_its_last_bins() -> None:
    root = ET.fromstring(histogram("", [-9, 0.1, 0.2, 1.5, 99, float("nan")], [0, 1, 2], Axis("error")))
    heights = [float(bar.get("height", "")) for bar in root.iter(f"{SVG}rect")]
    assert len(heights) == 2
    assert heights[0] / heights[1] == pytest.approx(3 / 2, rel=0.02)


@pytest.mark.parametrize(("value", "shown"), [(0.5, "0.5"), (20, "20"), (5000, "5k"), (2e6, "2M"), (0, "0")])
def test_ticks_are_short(value: float, shown: str) -> None:
    assert tick(value) == shown


def test_an_empty_figure_still_has_axes() -> None:
    ET.fromstring(figure([], Axis("x", is_log=True), Axis("y")))


def test_ticks_of_a_narrow_range_are_told_apart() -> None:
    drawn = figure([Series("", [12.1101, 12.1109], [0.0, 1.0], "line")], Axis("s"), Axis("share"))
    assert ">12.1102<" in drawn
    assert ">12.1104<" in drawn


def test_counts_are_marked_by_whole_numbers() -> None:
    drawn = histogram("", [0.1, 0.1, 0.9], [0.0, 0.5, 1.0], Axis("error"))
    assert ">1<" in drawn
    assert ">1.5<" not in drawn
