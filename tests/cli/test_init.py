"""The reference of keys and the JSON Schemas say what the schemas decode, and the files to begin with run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from windtunnel.diffusion.job import job_from, resolve
from windtunnel.keys import field_meanings, json_schema, space_schema
from windtunnel.schema import decode
from windtunnel.search.space.space import Space, load_space
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.training.job import TrainingJob

if TYPE_CHECKING:
    from cli.conftest import Command

ROOT = Path(__file__).parents[2]
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if "workload" in path.read_text()]


@pytest.mark.full
def test_the_page_of_keys_is_current() -> None:
    command = [sys.executable, ROOT / "docs/write_keys.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def rows_of(table: str) -> dict[str, list[str]]:
    """Key -> its value, default and meaning, as the page of keys has them."""
    section = (ROOT / "docs/reference/keys.md").read_text().partition(f"\n## {table}\n")[2].partition("\n## ")[0]
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "`" in line)
    return {cell[0].strip(" `"): cell[1:] for cell in cells if len(cell) == 4}


def test_every_key_of_an_engine_is_listed_with_its_meaning() -> None:
    rows = rows_of("EngineSettings")
    assert list(rows) == list(EngineSettings.__struct_fields__)
    assert rows["block_size"][2] == field_meanings(EngineSettings)["block_size"]


def test_units_and_defaults_are_told() -> None:
    rows = rows_of("Deployment")
    assert rows["price_usd_per_hour"][0] == "USD an hour"
    assert rows["replicas"][1] == "`1`"
    assert rows["device"][1] == "*needed*"


@pytest.mark.full
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(file: Path) -> None:
    jsonschema.validate(yaml.safe_load(file.read_text()), json_schema(Scenario))


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": "x"}, "'modle' was unexpected"),
        ({"seed": "one"}, "'one' is not of type 'integer'"),
        ({"workload": {"arrivals": {"type": "sometimes"}}}, "is not valid"),
    ],
)
def test_wrong_keys_are_invalid(changes: dict[str, Any], message: str) -> None:
    raw = yaml.safe_load(EXAMPLES[0].read_text()) | changes
    with pytest.raises(jsonschema.ValidationError, match=message):
        jsonschema.validate(raw, json_schema(Scenario))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["serving", "search", "training", "diffusion"])
def test_what_is_begun_is_valid_and_loads(windtunnel: "Command", tmp_path: Path, kind: str) -> None:
    file = tmp_path / "begun.yaml"
    assert windtunnel("init", kind, str(file)).code == 0
    text = file.read_text()
    schema = json.loads((tmp_path / text.splitlines()[0].partition("$schema=")[2]).read_text())
    raw = yaml.safe_load(text)
    jsonschema.validate(raw, schema)
    match kind:
        case "serving":
            assert scenario_from(raw, "").model == raw["model"]
        case "search":
            assert load_space(file).num_points == 16
        case "diffusion":
            assert resolve(job_from(raw)).job.parallelism.num_devices == 2
        case _:
            assert decode(raw, TrainingJob).num_devices == raw["num_devices"]
    assert "exists already" in windtunnel("init", kind, str(file)).stderr


def test_only_known_files_are_begun(windtunnel: "Command") -> None:
    done = windtunnel("init", "cooking")
    assert done.code == 2
    assert "serving" in done.stderr


@pytest.mark.full
def test_a_space_has_the_keys_of_a_scenario() -> None:
    table = space_schema(Scenario, Space)["$defs"]["Space"]["properties"]
    assert {"model", "workload", "vary", "limits"} <= set(table)
    assert "scenario" not in table
    assert json_schema(TrainingJob)["$defs"]["TrainingJob"]["properties"]["num_devices"]["description"]
