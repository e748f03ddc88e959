"""Files of measured runs, as `validate` and `calibrate` take them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.errors import InputError, missing_file

if TYPE_CHECKING:
    from windtunnel.calibration.measured_runs import Measurement


_SHOWN_IDS = 5
_KINDS = "a .csv or .parquet table, a .jsonl file of runs, or a benchmark client's .json file"


def chosen_measurements(
    paths: Sequence[Path], options: dict[str, Any], use: str | None, only: str | None
) -> "tuple[list[Measurement], dict[str, int]]":
    """The runs of all files that `--use` and `--only` name, and of how many another use was left out, by that use.

    Raises:
        InputError: a file that is missing or malformed, a use that no run has, or no run is left.
    """
    from windtunnel.calibration.measured_runs import SCORED
    from windtunnel.errors import did_you_mean

    every = read_measurements(paths, options)
    found = [one for one in every if only is None or only in one.id]
    if not found:
        ids = [one.id for one in every]
        some = f"they are {', '.join(ids[:_SHOWN_IDS])}{', ...' if len(ids) > _SHOWN_IDS else ''}"
        raise InputError(f"--only: no run's id contains {only!r}", did_you_mean(str(only), ids, some))
    uses = Counter(one.use for one in found)
    wanted = SCORED if use is None else tuple(name.strip() for name in use.split(","))
    for name in wanted if use is not None else ():
        if name not in uses:
            raise InputError(f"--use: no run is {name!r}", did_you_mean(name, uses, f"they are {', '.join(uses)}"))
    kept = [one for one in found if one.use in wanted]
    if not kept:
        raise InputError(
            f"every run is left out: {_counts(uses)}", f"--use {next(iter(uses))} takes them in spite of their use"
        )
    return kept, {name: count for name, count in uses.items() if name not in wanted}


def _counts(uses: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in uses.items())


def read_measurements(paths: Sequence[Path], options: dict[str, Any]) -> "list[Measurement]":
    """The runs of all files; `options` describe the deployment behind clients' files.

    Raises:
        InputError: a file that is missing or malformed, or a client's file without a model and a device.
    """
    from windtunnel.calibration.measured_runs import read_client_files, read_table
    from windtunnel.calibration.run_file import is_run_file, read_run_file

    if not paths:
        raise InputError(
            "there are no runs",
            "give a .csv or .parquet table, a .jsonl file of runs, or a benchmark client's .json file",
        )
    found: list[Measurement] = []
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise InputError(f"{path} is given twice", "its runs would count twice")
        if path.is_dir():
            raise InputError(f"{path} is a folder; files are needed", f"for instance {path}/*.csv")
        if not path.exists():
            raise missing_file(path)
        if path.suffix == ".jsonl" and is_run_file(path):
            found += read_run_file(path)
        elif path.suffix in (".json", ".jsonl"):
            found += read_client_files(path, _deployment(path, options))
        elif path.suffix in (".csv", ".parquet"):
            found += read_table(path)
        else:
            raise InputError(
                f"{path} is of no known kind",
                "runs are .csv or .parquet tables, .jsonl files of runs, or clients' .json files",
            )
    return found


def _deployment(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    from windtunnel.serving.shorthand import raw_scenario

    given = {name: value for name, value in options.items() if value is not None}
    for name in ("model", "device"):
        if name not in given:
            raise InputError(
                f"{path.name} does not say what served it: --{name} is missing",
                "for instance --model llama-3.1-8b --device h100_sxm --tp 1 --engine vllm",
            )
    return raw_scenario({}, given, None, None, None, {}, {}, allow_download=False)
