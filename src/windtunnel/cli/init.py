"""`windtunnel init`: write a file to begin with, and the schema that editors complete it by."""

from pathlib import Path

from windtunnel import catalog
from windtunnel.cli.output import remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import check_known
from windtunnel.files import check_replaceable, write_text
from windtunnel.keys import json_schema, space_schema
from windtunnel.schema import json_text

FILES = {"serving": "scenario", "search": "space", "training": "job", "diffusion": "diffusion"}
"""What is begun -> the usual name of its file."""


def command(options: Options) -> None:
    """Write an example with comments, and its JSON Schema beside it."""
    kind = str(options.kind)
    check_known(kind, tuple(FILES), f"there is nothing called {kind!r} to begin")
    file = options.file or Path(f"{FILES[kind]}.yaml")
    schema = file.with_name(f"{FILES[kind]}.schema.json")
    check_replaceable(file, options.overwrite)
    text = catalog.shipped(f"templates/{kind}.yaml").read_text(encoding="utf-8")
    write_text(schema, json_text(_schema(kind)) + "\n")
    write_text(file, f"# yaml-language-server: $schema={schema.name}\n{text}")
    remark(f"wrote {file} and {schema}; editors with a YAML language server complete keys by it")


def _schema(kind: str) -> dict[str, object]:
    from windtunnel.diffusion.job import DiffusionJob
    from windtunnel.search.space.space import Space
    from windtunnel.serving.scenario import Scenario
    from windtunnel.training.job import TrainingJob

    if kind == "search":
        return space_schema(Scenario, Space)
    if kind == "diffusion":
        return json_schema(DiffusionJob)
    return json_schema(TrainingJob if kind == "training" else Scenario)
