"""An estimator from an installed package: one file, found by its entry point."""

from pathlib import Path

import numpy as np
import pytest

from plugin_package import installed_plugin
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.pricing.choices import estimators
from windtunnel.pricing.regress import cached, fitted
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import MeasurementTable
from windtunnel.serving.deployment import Profile

MOST_FILES = 2

SOURCE = """
import numpy as np

RISES = False


def fit(features, roofline_s, seconds):
    ratio = np.median(seconds / roofline_s)
    return lambda points, floor_s: {factor} * ratio * floor_s
"""


def measured_table() -> MeasurementTable:
    m = np.array([1.0, 16, 64, 256, 1024])
    sites = {"n": np.full(m.size, 4096.0), "k": np.full(m.size, 4096.0)}
    table = MeasurementTable("gemm", sites, {"m": m}, np.ones(m.size), "test", {"format": "bf16"})
    return MeasurementTable("gemm", sites, {"m": m}, 2.0 * roofline_seconds(table), "test", {"format": "bf16"})


def roofline_seconds(table: MeasurementTable) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    (site,) = table.rows_by_site
    return np.asarray(ROOFLINE.seconds(table.operator(site, table.axes)))


ROOFLINE = Roofline(catalog.device("h100_sxm"))


def test_an_estimator_is_at_most_two_files(tmp_path: Path) -> None:
    table = measured_table()
    with installed_plugin(tmp_path, "windtunnel.estimators", "ratio", SOURCE.format(factor=1.0)) as files:
        assert len(files) <= MOST_FILES
        assert Profile(folder="x", estimator="ratio").estimator == "ratio"
        regressed = fitted(table, ROOFLINE, "ratio")
    assert regressed.seconds == pytest.approx(2.0 * roofline_seconds(regressed))
    assert regressed.source == "test, ratio"
    assert "ratio" not in estimators()
    with pytest.raises(ValueError, match="estimator is 'ratio'; known: interpolation, auto, "):
        Profile(folder="x", estimator="ratio")


def test_a_fit_that_is_kept_is_of_the_estimators_present_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table, seconds = measured_table(), []
    for factor in (1.0, 3.0):
        folder = tmp_path / str(factor)
        folder.mkdir()
        with installed_plugin(folder, "windtunnel.estimators", "ratio", SOURCE.format(factor=factor)):
            seconds.append(cached(table, ROOFLINE, "ratio").seconds)
    assert seconds[1] == pytest.approx(3.0 * seconds[0])


@pytest.mark.parametrize("answer", ["-floor_s", "floor_s[:1]", "floor_s * np.nan", "'soon'"])
def test_times_that_are_none_are_refused(tmp_path: Path, answer: str) -> None:
    source = SOURCE.format(factor=1.0).replace("1.0 * ratio * floor_s", answer)
    assert answer in source
    with (
        installed_plugin(tmp_path, "windtunnel.estimators", "ratio", source),
        pytest.raises(InputError, match=r"the estimator 'ratio' answered with .*which are no times"),
    ):
        fitted(measured_table(), ROOFLINE, "ratio")


@pytest.mark.parametrize("name", ["auto", "forest"])
def test_a_taken_name_is_refused(tmp_path: Path, name: str) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.estimators", name, SOURCE.format(factor=1.0)),
        pytest.raises(InputError, match="has the name of a shipped one"),
    ):
        fitted(measured_table(), ROOFLINE, name)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (SOURCE.replace("RISES = False", ""), "defines no RISES"),
        ("RISES = False\ndef fit(features, roofline_s, seconds):\n    return None\n", "returned None from fit"),
        ("RISES = False\ndef fit(features):\n    return None\n", "cannot be called: fit"),
    ],
)
def test_a_fit_that_is_none_is_named(tmp_path: Path, source: str, problem: str) -> None:
    with (
        installed_plugin(tmp_path, "windtunnel.estimators", "ratio", source.format(factor=1.0)),
        pytest.raises(InputError, match=rf"the estimator 'ratio' \(plugin_ratio\) {problem}"),
    ):
        fitted(measured_table(), ROOFLINE, "ratio")
