"""Files of measured runs of any kind: tables of serving or training runs, files of runs, results of clients."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.calibration import measured_runs
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.training_runs import are_training_runs, read_training_rows
from windtunnel.errors import InputError, missing_file
from windtunnel.formats.clients.read import read_client_results
from windtunnel.formats.recognise import find_format
from windtunnel.serving.shorthand import raw_scenario

_KINDS = "a .csv or .parquet table, a .jsonl file of runs, or a benchmark client's .json file"


def read_measurements(
    paths: Sequence[Path], options: Mapping[str, Any], server: Mapping[str, Any] | None = None
) -> list[Measurement]:
    """Read the runs of all files; `options` describe the deployment behind clients' files, and win over `server`, a
    scenario in builtins that describes it too. InputError for a file that is missing or malformed, or a client's file
    without a model and a device."""
    if not paths:
        raise InputError("there are no runs", f"give {_KINDS}")
    check_paths(paths)
    of_clients = [path for path in paths if _is_of_client(path)]
    alone = {} if of_clients else options
    runs: list[Measurement] = []
    for path in paths:
        if not path.exists():
            raise missing_file(path)
        if path.suffix == ".jsonl" and measured_runs.is_run_file(path):
            _check_alone(path, "the scenario of each run", server, alone)
            runs += measured_runs.read_run_file(path)
        elif path in of_clients:
            runs += measured_runs.read_client_files(path, _deployment(path, options, server or {}))
        elif path.suffix in (".csv", ".parquet"):
            rows = list(measured_runs.text_rows(path))
            if rows and are_training_runs(rows[0]):
                _check_alone(path, "training runs", server, alone)
                runs += read_training_rows(path, rows)
            else:
                header = measured_runs.with_our_columns(path, rows[:1], measured_runs.COLUMNS)[0] if rows else {}
                _check_columns(path, header, server, alone)
                of_table = {name: value for name, value in options.items() if name not in header}
                runs += measured_runs.read_table(path, rows, _with_options(server or {}, of_table))
        else:
            raise InputError(f"{path} is of no known kind", f"give {_KINDS}")
    return runs


def _is_of_client(path: Path) -> bool:
    """Whether a file is read as a benchmark client's result: Locust writes a table, and k6 what it is told to."""
    if path.suffix in (".json", ".jsonl"):
        return not measured_runs.is_run_file(path)
    with suppress(InputError):
        return find_format(path, "client result").is_certain
    return False


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
    recorded = {"model": result.model} if _is_known(result.model) and not said["model"] else {}
    given = recorded | {name: value for name, value in options.items() if value is not None}
    for name in ("model", "device"):
        if name not in given and not said[name]:
            instance = {"model": "--model llama-3.1-8b", "device": "--device h100_sxm"}[name]
            named = f" ({result.model!r} is the server's name for it)" if result.model and name == "model" else ""
            raise InputError(
                f"{path.name} does not say what served it{named}: --{name} is missing", f"for instance {instance}"
            )
    return _with_options(server, given)


def _is_known(name: str | None) -> bool:
    """Whether a client's name of a model is one of the catalog, or may be one of a hub; others are the server's own."""
    with suppress(InputError):
        return name is not None and ("/" in name or bool(catalog.known_name("models", name)))
    return False


def _with_options(server: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    return raw_scenario(deepcopy(dict(server)), given, None, None, None, {}, {}, allow_download=False)


def _check_alone(path: Path, holds: str, server: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
    given = ["from-command"] if server else [name for name, value in options.items() if value is not None]
    if given:
        name = f"--{given[0].replace('_', '-')}"
        raise InputError(f"{path.name} holds {holds}, which {name} cannot describe", f"leave {name} out")


def _check_columns(
    path: Path, row: Mapping[str, str], server: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> None:
    """Raise InputError for an option that a column of a table says too."""
    given = {name for name, value in options.items() if value is not None}
    twice = next((name for name in row if name in given), None)
    if twice is None and "command" in row and (server or given - {"device", "node"}):
        twice = "command"
    if twice is not None:
        option = twice if twice in given else "from-command" if server else min(given)
        said = f"{path.name} has a column {twice!r}, and --{option.replace('_', '-')} is given too"
        raise InputError(said, "leave one of them out")
