"""Files of measured runs, as `validate` and `calibrate` take them."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from windtunnel.errors import InputError, check_known, did_you_mean, missing_file

if TYPE_CHECKING:
    from windtunnel.calibration.measured_runs import Measurement


Run = TypeVar("Run")
_SHOWN_IDS = 5
_KINDS = "a .csv or .parquet table, a .jsonl file of runs, or a benchmark client's .json file"


class RunChoice(NamedTuple):
    """Options that choose among measured runs."""

    use: str | None
    only: str | None

    def measurements(
        self, paths: Sequence[Path], deployment: dict[str, Any]
    ) -> "tuple[list[Measurement], dict[str, int]]":
        """Return the chosen runs of all files, and the number of runs left out by their use.

        Raises:
            InputError: a file that is missing or malformed, a use that no run has, or no run is left.
        """
        from windtunnel.calibration.measured_runs import SCORED

        runs = self.with_id(read_measurements(paths, deployment), lambda run: run.id)
        counts = Counter(run.use for run in runs)
        uses = SCORED if self.use is None else tuple(name.strip() for name in self.use.split(","))
        for name in uses if self.use is not None else ():
            check_known(name, counts, f"--use: no run is {name!r}", f"they are {', '.join(counts)}")
        chosen = [run for run in runs if run.use in uses]
        if not chosen:
            raise InputError(
                f"every run is left out: {', '.join(f'{count:,} {name}' for name, count in counts.items())}",
                f"--use {next(iter(counts))} takes them all the same",
            )
        return chosen, {name: count for name, count in counts.items() if name not in uses}

    def with_id(self, runs: "Sequence[Run]", id_of: "Callable[[Run], str]") -> "list[Run]":
        """Return the runs whose id contains `--only`."""
        chosen = [run for run in runs if self.only is None or self.only in id_of(run)]
        if not chosen:
            ids = list(map(id_of, runs))
            hint = f"they are {', '.join(ids[:_SHOWN_IDS])}{', ...' if len(ids) > _SHOWN_IDS else ''}"
            raise InputError(f"--only: no run's id contains {self.only!r}", did_you_mean(str(self.only), ids, hint))
        return chosen


def read_measurements(paths: Sequence[Path], options: dict[str, Any]) -> "list[Measurement]":
    """Read the runs of all files; `options` describe the deployment behind clients' files.

    Raises:
        InputError: a file that is missing or malformed, or a client's file without a model and a device.
    """
    from windtunnel.calibration.measured_runs import read_client_files, read_table
    from windtunnel.calibration.run_file import is_run_file, read_run_file

    if not paths:
        raise InputError("there are no runs", f"give {_KINDS}")
    runs: list[Measurement] = []
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise InputError(f"{path} is given twice", "its runs would count twice")
        if path.is_dir():
            raise InputError(f"{path} is a folder; files are needed", f"for instance {path}/*.csv")
        if not path.exists():
            raise missing_file(path)
        if path.suffix == ".jsonl" and is_run_file(path):
            runs += read_run_file(path)
        elif path.suffix in (".json", ".jsonl"):
            runs += read_client_files(path, _deployment(path, options))
        elif path.suffix in (".csv", ".parquet"):
            runs += read_table(path)
        else:
            raise InputError(f"{path} is of no known kind", f"give {_KINDS}")
    return runs


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
