"""Experiments and sweeps: strict decoding, names of folders, and points of a sweep."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.lab.experiments.schema import PRESETS, Experiment, load_experiment, load_sweep, parse_sweep
from windtunnel.schema import save


def test_a_file_is_read_with_changes_over_it_and_written_back(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("model: m\nmode: nsys_ncu\nncu_options: {kernel_name: gemm.*}\nbatch_size: 2\n")
    found = load_experiment(path, {"batch_size": 4, "ncu_options.launch_count": 3})
    assert (found.mode, found.batch_size) == ("nsys_ncu", 4)
    assert (found.ncu_options.kernel_name, found.ncu_options.launch_count) == ("gemm.*", 3)
    save(found, path)
    assert load_experiment(path, {}) == found


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model": "m", "batchsize": 2}, r"unknown key \$.batchsize"),
        ({"model": "m", "mode": "nvprof"}, "is 'nvprof', which is not known|nvprof"),
        ({"model": "m", "batch_size": 0}, "batch_size is 0; at least 1 is needed"),
        ({"model": "m", "max_tokens": "many"}, r"\$.max_tokens is 'many'; a whole number is needed"),
        ({"model": "m", "temperature": -1}, "temperature is -1"),
        ({"model": "m", "prompt": ""}, "prompt is empty"),
        ({"model": "m", "prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"batch_size": 2}, "no model is given"),
        ({"model": "m", "nsys_options": {"sampling": "none"}}, r"unknown key \$.nsys_options.sampling"),
    ],
)
def test_wrong_experiments_are_refused(raw: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_experiment(None, raw)


@pytest.mark.parametrize(
    ("model", "name", "label"),
    [
        ("meta-llama/Llama-3.1-8B", None, "Llama-3.1-8B"),
        ("models/tiny/config.json", None, "tiny"),
        ("models/tiny/", "my run: 3/4", "my-run-3-4"),
        ("..", None, "experiment"),
    ],
)
def test_labels_are_fit_for_files(model: str, name: str | None, label: str) -> None:
    assert Experiment(model=model, name=name).label == label


def test_a_sweep_is_every_combination_in_order() -> None:
    sweep = parse_sweep("batch_size:1,2; temperature:0.1,1")
    found = load_sweep(None, {"model": "m"}, sweep)
    pairs = [(point.batch_size, point.temperature) for point in found]
    assert pairs == [(1, 0.1), (1, 1), (2, 0.1), (2, 1)]


def test_presets_have_the_sizes_that_they_promise() -> None:
    sizes = {name: len(load_sweep(None, {"model": "m"}, sweep)) for name, sweep in PRESETS.items()}
    assert sizes == {"quick": 4, "comprehensive": 64, "scaling": 15}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size", "is not of the form field:value,value"),
        ("batch_size:", "is not of the form"),
        ("batchsize:1", "there is no field 'batchsize'"),
        ("batch_size:1;batch-size:2", "batch_size stands twice"),
        (" ; ", "is empty"),
        ("nsys_options:1", "there is no field"),
    ],
)
def test_wrong_sweeps_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_sweep(text)


def test_a_value_that_a_field_cannot_have_is_named() -> None:
    with pytest.raises(InputError, match="batch_size is 0"):
        load_sweep(None, {"model": "m"}, parse_sweep("batch_size:1,0"))
