"""Files of measured runs, as `validate` and `calibrate` take them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from windtunnel.calibration.measured_runs import SCORED, Measurement
from windtunnel.calibration.releases import with_inferred_versions
from windtunnel.calibration.run_files import read_measurements
from windtunnel.cli.output import counted
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError, check_known, did_you_mean

Run = TypeVar("Run")
_SHOWN_IDS = 5


def measurements_of(
    options: Options, deployment: Mapping[str, Any], server: Mapping[str, Any] | None = None
) -> tuple[list[Measurement], dict[str, int]]:
    """Return the runs of all files that `--use` and `--only` choose, and the number of runs left out by their use.
    InputError for a file that is missing or malformed, a use that no run has, or where no run is left.

    Args:
        deployment: of the runs of clients' files.
        server: what a command says of the deployment of all runs, as a scenario in builtins.
    """
    runs = with_id(read_measurements(options.runs, deployment, server), options.only, lambda run: run.id)
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
    with counted("inferring the engine's version", "trials") as progress:
        processes, calibration = (getattr(options, name, None) for name in ("processes", "calibration"))
        chosen = with_inferred_versions(chosen, calibration, processes or 1, progress)
    return chosen, {name: count for name, count in counts.items() if name not in uses}


def with_id(runs: Sequence[Run], only: str | None, id_of: Callable[[Run], str]) -> list[Run]:
    """Return the runs whose id contains `only`."""
    chosen = [run for run in runs if only is None or only in id_of(run)]
    if not chosen:
        ids = list(map(id_of, runs))
        hint = f"they are {', '.join(ids[:_SHOWN_IDS])}{', ...' if len(ids) > _SHOWN_IDS else ''}"
        raise InputError(f"--only: no run's id contains {only!r}", did_you_mean(str(only), ids, hint))
    return chosen
