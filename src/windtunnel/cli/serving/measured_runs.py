"""Files of measured runs, as `validate` and `calibrate` take them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.calibration import measured_runs as files
from windtunnel.calibration.measured_runs import SCORED, Measurement
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, check_known, did_you_mean, missing_file
from windtunnel.formats.clients.read import read_client_results
from windtunnel.serving.shorthand import raw_scenario

Run = TypeVar("Run")
_SHOWN_IDS = 5
_KINDS = "a .csv or .parquet table, a .jsonl file of runs, or a benchmark client's .json file"


def measurements_of(options: Options, deployment: Mapping[str, Any]) -> tuple[list[Measurement], dict[str, int]]:
    """Return the runs of all files that `--use` and `--only` choose, and the number of runs left out by their use.

    Args:
        options: of the group `run_choice`, and the argument `runs`.
        deployment: of the runs of clients' files.

    Raises:
        InputError: a file that is missing or malformed, a use that no run has, or no run is left.
    """
    runs = with_id(read_measurements(options.runs, deployment), options.only, lambda run: run.id)
    counts = Counter(run.use for run in runs)
    uses = SCORED if options.use is None else tuple(name.strip() for name in options.use.split(","))
    for name in uses if options.use is not None else ():
        check_known(name, counts, f"--use: no run is {name!r}", f"they are {', '.join(counts)}")
    chosen = [run for run in runs if run.use in uses]
    if not chosen:
        raise InputError(
            f"every run is left out: {', '.join(f'{count:,} {name}' for name, count in counts.items())}",
            f"--use {next(iter(counts))} takes them all the same",
        )
    return chosen, {name: count for name, count in counts.items() if name not in uses}


def with_id(runs: Sequence[Run], only: str | None, id_of: Callable[[Run], str]) -> list[Run]:
    """Return the runs whose id contains `only`."""
    chosen = [run for run in runs if only is None or only in id_of(run)]
    if not chosen:
        ids = list(map(id_of, runs))
        hint = f"they are {', '.join(ids[:_SHOWN_IDS])}{', ...' if len(ids) > _SHOWN_IDS else ''}"
        raise InputError(f"--only: no run's id contains {only!r}", did_you_mean(str(only), ids, hint))
    return chosen


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
        if path.suffix == ".jsonl" and files.is_run_file(path):
            runs += files.read_run_file(path)
        elif path.suffix in (".json", ".jsonl"):
            runs += files.read_client_files(path, _deployment(path, options))
        elif path.suffix in (".csv", ".parquet"):
            runs += files.read_table(path)
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
