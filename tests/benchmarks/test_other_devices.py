"""Published runs on AMD, Google and Intel devices as scenarios, and how far dense models there are predicted."""

import csv

import numpy as np
import pytest

from other_devices import FILE, Scored, measured_of, scenario_of, scored
from windtunnel.model.precision import Format
from windtunnel.serving.scenario import resolve

with FILE.open(newline="", encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))


def test_every_row_is_a_scenario_with_something_measured() -> None:
    for row in ROWS:
        assert resolve(scenario_of(row)).parallelism.num_devices in (1, 4, 8)
        assert min(measured_of(row).values()) > 0


def test_a_row_has_the_settings_of_its_source() -> None:
    row = next(row for row in ROWS if row["set"] == "inferencex" and row["weights"] == "fp4" and row["version"])
    setup = resolve(scenario_of(row))
    assert (setup.device.name, setup.engine.name, setup.engine.version) == ("mi355x", "sglang", "0.5.9")
    assert (setup.precision.weights, setup.precision.attention) == (Format.MXFP4A4, Format.BF16)
    assert setup.precision.kv_cache is Format.FP8
    assert setup.engine.gpu_memory_utilization == 0.8


def test_a_chip_counts_once_however_many_cores_it_has() -> None:
    row = next(row for row in ROWS if row["set"] == "tpu_recipes" and row["model"] == "Qwen/Qwen3-32B")
    assert resolve(scenario_of(row)).parallelism.num_devices == 1


@pytest.mark.compiled
def test_dense_models_on_mi300x_are_predicted() -> None:
    """Every fourth row of Llama 3.1 with vLLM 0.10.0; nothing is fitted to them."""
    rows = [row for row in ROWS if row["set"] == "rocm_latency" and row["version"] == "0.10.0"][::4]
    done = [row for row in scored(rows) if isinstance(row, Scored)]
    errors = np.array([abs(row.error("batch")) for row in done])
    assert len(done) == 8
    assert np.median(errors) < 0.1
    assert all(row.is_inside("batch") for row in done)
