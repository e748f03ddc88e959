"""Files of measured runs, as `validate` and `calibrate` take them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.errors import InputError

if TYPE_CHECKING:
    from windtunnel.interop.measured_runs import Measurement


def read_measurements(paths: Sequence[Path], options: dict[str, Any]) -> "list[Measurement]":
    """The runs of all files; `options` describe the deployment behind clients' files.

    Raises:
        InputError: a file that is missing or malformed, or a client's file without a model and a device.
    """
    from windtunnel.interop.measured_runs import read_client_files, read_table
    from windtunnel.interop.silicon import is_silicon, measurement_of, read_runs

    if not paths:
        raise InputError("there are no runs", "give a .csv or .parquet table, or a benchmark client's .json file")
    found: list[Measurement] = []
    for path in paths:
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        if path.suffix in (".json", ".jsonl"):
            found += read_client_files(path, _deployment(path, options))
        elif path.suffix in (".csv", ".parquet"):
            found += [measurement_of(run) for run in read_runs(path)] if is_silicon(path) else read_table(path)
        else:
            raise InputError(f"{path} is of no known kind", "runs are .csv or .parquet tables, or clients' .json files")
    return found


def _deployment(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    from windtunnel.spec.shorthand import raw_scenario

    given = {name: value for name, value in options.items() if value is not None}
    for name in ("model", "device"):
        if name not in given:
            raise InputError(f"{path.name} does not say what served it: --{name} is missing")
    return raw_scenario({}, given, None, None, None, {}, {}, allow_download=False)
