"""Files of measured runs of any kind: tables of serving or training runs, files of runs, results of clients."""

from collections.abc import Mapping, Sequence
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


def read_measurements(paths: Sequence[Path], options: Mapping[str, Any]) -> list[Measurement]:
    """Read the runs of all files; `options` describe the deployment behind clients' files.

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
            runs += read_run_file(path)
        elif path.suffix in (".json", ".jsonl"):
            runs += read_client_files(path, _deployment(path, options))
        elif path.suffix in (".csv", ".parquet"):
            rows = list(text_rows(path))
            is_training = bool(rows) and TELLING_COLUMN in rows[0]
            runs += read_training_rows(path, rows) if is_training else read_table(path, rows)
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


def _deployment(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    result = read_client_results(path)[0]
    recorded = {"model": result.model} if result.model else {}
    given = recorded | {name: value for name, value in options.items() if value is not None}
    for name in ("model", "device"):
        if name not in given:
            raise InputError(
                f"{path.name} does not say what served it: --{name} is missing",
                "for instance --model llama-3.1-8b --device h100_sxm --tp 1 --engine vllm",
            )
    return raw_scenario({}, given, None, None, None, {}, {}, allow_download=False)
