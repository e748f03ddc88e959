"""A model gets a name in the user's own catalog; what was not understood of it is said, then and in every result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from windtunnel import catalog
from windtunnel.catalog.add import add_model
from windtunnel.errors import InputError
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format

if TYPE_CHECKING:
    from cli.conftest import Command


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "windtunnel" / "catalog" / "models"


def config(folder: Path, **changes: Any) -> Path:
    keys = {**catalog.model_config("Qwen/Qwen3-8B"), **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))
    return folder / "config.json"


def test_a_config_gets_a_name_everywhere(tmp_path: Path, data: Path) -> None:
    added = add_model(str(config(tmp_path / "nova-8b", brand="nova")), name="acme/nova-8b")
    assert (added.file, added.replaced) == (data / "acme--nova-8b.json", False)
    assert {"brand"} <= set(added.unread)
    assert not {"hidden_size", "model_type", "num_key_value_heads", "rope_scaling"} & set(added.unread)
    assert catalog.model("acme/nova-8b") == added.model
    assert "acme/nova-8b" in catalog.names("models")
    assert add_model(str(tmp_path / "nova-8b"), name="acme/nova-8b").replaced


def test_formats_beside_the_config_are_kept(tmp_path: Path) -> None:
    config(tmp_path / "nova")
    (tmp_path / "nova" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert add_model(str(tmp_path / "nova")).model.precision.weights == Format.FP8
    assert catalog.model("nova").precision.weights == Format.FP8


@pytest.mark.parametrize("like", ["qwen3", "Qwen/Qwen3-8B"])
def test_an_unknown_type_is_taken_as_asked_and_said(tmp_path: Path, windtunnel: Command, like: str) -> None:
    file = config(tmp_path / "nova", model_type="nova")
    with pytest.raises(InputError, match="model_type 'nova' is not known") as refused:
        add_model(str(file))
    assert f"catalog add {file} --like qwen3" in str(refused.value.hint)
    assert not catalog.users_folder().exists()

    done = windtunnel("catalog", "add", str(file), "--like", like, "--as", "acme/nova")
    assert "8.19 G parameters in 36 layers of GQA, taken to be those of qwen3" in done.stdout

    read, known = catalog.model("acme/nova"), catalog.model("Qwen/Qwen3-8B")
    assert (read.architecture, read.unknown_type, read.layers) == ("qwen3", "nova", known.layers)
    assert count_parameters(read).total == count_parameters(known).total
    said = windtunnel("explain", "--model", "acme/nova", "--device", "h100_sxm", "--batch", "8")
    assert "acme/nova (read like qwen3)" in said.stdout
    note = "acme/nova is taken to have the layers of 'qwen3': its model_type 'nova' is not known"
    assert f"note: {note}" in said.stderr
    said = windtunnel("explain", "--model", "acme/nova", "--device", "h100_sxm", "--batch", "8", "--json")
    assert json.loads(said.stdout)["notes"] == [note]


def test_a_class_of_an_unknown_type_says_nothing(tmp_path: Path) -> None:
    """MiniCPM-V's and LLaDA's classes have names of their own."""
    file = config(tmp_path / "nova", model_type="nova", architectures=["NovaModelLM"])
    with pytest.raises(InputError, match="model_type 'nova' is not known"):
        add_model(str(file))
    assert add_model(str(file), "qwen3", "acme/nova").model.layers == catalog.model("Qwen/Qwen3-8B").layers


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model_type": "nova"}, {"like": "qwen33"}, "'qwen33' is neither a known model_type nor a model"),
        ({}, {"like": "llama"}, "model_type 'qwen3' is known"),
        ({"model_type": "nova", "num_attention_heads": None}, {"like": "qwen3"}, "has no num_attention_heads"),
        ({}, {"name": "Qwen/Qwen3-8B"}, "the catalog has a model 'Qwen/Qwen3-8B' already"),
        ({}, {"name": "../nova"}, "'../nova' is no name of a model"),
        ({}, {"name": "nova 8b"}, "'nova 8b' is no name of a model"),
        ({}, {"name": "nova.json"}, "'nova.json' is no name of a model"),
    ],
)
def test_nothing_is_written_of_what_is_refused(
    tmp_path: Path, data: Path, changes: dict[str, Any], options: dict[str, str], message: str
) -> None:
    file = config(tmp_path / "nova", **changes)
    with pytest.raises(InputError, match=message):
        add_model(str(file), **options)
    assert not data.exists()


def test_options_of_adding_are_of_nothing_else(windtunnel: Command) -> None:
    done = windtunnel("catalog", "models", "--like", "llama")
    assert (done.code, "--like and --as are of a model that is added" in done.stderr) == (2, True)
    done = windtunnel("catalog", "add")
    assert (done.code, "catalog add needs a model" in done.stderr) == (2, True)
