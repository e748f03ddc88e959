"""Files of measured runs of any kind: tables of serving or training runs, files of runs, results of clients."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from windtunnel.calibration.measured_runs import (
    Measurement,
    is_run_file,
    read_client_files,
    read_run_file,
    read_table,
    text_rows,
)
from windtunnel.calibration.training_runs import TELLING_COLUMN, read_training_rows
from windtunnel.errors import InputError, missing_file
from windtunnel.formats.clients.read import read_client_results
from windtunnel.serving.shorthand import raw_scenario

_KINDS = "a .csv or .parquet table, a .jsonl file of runs, or a benchmark client's .json file"


def read_measurements(
    paths: Sequence[Path], options: Mapping[str, Any], server: Mapping[str, Any] | None = None
) -> list[Measurement]:
    """Read the runs of all files; `options` describe the deployment behind clients' files, and win over `server`, a
    scenario in builtins that describes it too.

    Raises:
        InputError: a file that is missing or malformed, or a client's file without a model and a device.
    """
    if not paths:
        raise InputError("there are no runs", f"give {_KINDS}")
    check_paths(paths)
    runs: list[Measurement] = []
    for path in paths:
        if not path.exists():
            raise missing_file(path)
        if path.suffix == ".jsonl" and is_run_file(path):
            _check_alone(path, "the scenario of each run", server)
            runs += read_run_file(path)
        elif path.suffix in (".json", ".jsonl"):
            runs += read_client_files(path, _deployment(path, options, server or {}))
        elif path.suffix in (".csv", ".parquet"):
            rows = list(text_rows(path))
            if rows and TELLING_COLUMN in rows[0]:
                _check_alone(path, "training runs", server)
                runs += read_training_rows(path, rows)
            else:
                runs += read_table(path, rows, _with_options(server, options) if server else None)
        else:
            raise InputError(f"{path} is of no known kind", f"give {_KINDS}")
    return runs


def check_paths(paths: Sequence[Path]) -> None:
    """Raise InputError for a file that is given twice, or a folder."""
    for number, path in enumerate(paths):
        if path.resolve() in (other.resolve() for other in paths[:number]):
            raise InputError(f"{path} is given twice", "its runs would count twice")
        if path.is_dir():
            kind = next((kind for kind in ("csv", "parquet", "jsonl", "json") if any(path.glob(f"*.{kind}"))), None)
            hint = f"give {_KINDS}" if kind is None else f"for instance {path}/*.{kind}"
            if (path / "requests.parquet").is_file():
                hint = "measure with `bench --save-result FILE`, and name that file"
            raise InputError(f"{path} is a folder; files are needed", hint)


def _deployment(path: Path, options: Mapping[str, Any], server: Mapping[str, Any]) -> dict[str, Any]:
    result = read_client_results(path)[0]
    said = {"model": server.get("model"), "device": server.get("deployment", {}).get("device")}
    recorded = {"model": result.model} if result.model and not said["model"] else {}
    given = recorded | {name: value for name, value in options.items() if value is not None}
    for name in ("model", "device"):
        if name not in given and not said[name]:
            raise InputError(
                f"{path.name} does not say what served it: --{name} is missing",
                "for instance --model llama-3.1-8b --device h100_sxm --tp 1 --engine vllm",
            )
    return _with_options(server, given)


def _with_options(server: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    return raw_scenario(deepcopy(dict(server)), given, None, None, None, {}, {}, allow_download=False)


def _check_alone(path: Path, holds: str, server: Mapping[str, Any] | None) -> None:
    if server:
        raise InputError(f"{path.name} holds {holds}, which --from-command cannot describe", "leave --from-command out")
