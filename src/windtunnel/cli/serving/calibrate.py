"""`windtunnel calibrate`: measured runs in, a profile out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from windtunnel.cli.options import Verb, all_of, deployment_options, option
from windtunnel.cli.progress import status
from windtunnel.cli.serving.measured_runs import chosen_measurements
from windtunnel.errors import InputError
from windtunnel.units import format_count

if TYPE_CHECKING:
    from windtunnel.serving.calibration import Calibration

_RUNS, _OUTPUT = "Runs", "Output"

calibration_options = all_of(
    option("--use", section=_RUNS, metavar="NAMES", help="Only runs of these uses.  [primary,secondary]"),
    option("--only", section=_RUNS, metavar="TEXT", help="Only runs whose id contains it."),
    option(
        "--out",
        section=_OUTPUT,
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="A YAML file; or a folder, for one file an engine and device.",
    ),
    option("--source", section=_OUTPUT, metavar="TEXT", help="What the runs are, for the record.  [the files' names]"),
    option("--json", "as_json", section=_OUTPUT, is_flag=True, help="Print JSON."),
)


@click.command(cls=Verb)
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="RUNS...")
@calibration_options
@deployment_options
def command(
    runs: tuple[Path, ...],
    use: str | None,
    only: str | None,
    out: Path | None,
    source: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Fit host overheads and operator factors to measured runs, and write them as a profile.

    RUNS are as for `windtunnel validate`. The profile says how it was made and how far off predictions were of runs
    that the fit did not see, whole configurations left out at a time. Use it with `windtunnel simulate --calibration`.

    \b
    windtunnel calibrate runs.csv --out profile.yaml
    windtunnel calibrate runs.csv --out profiles/
    """
    from windtunnel.calibration.acceptance import with_acceptances
    from windtunnel.calibration.fit import FITTED, priced_servers
    from windtunnel.calibration.profiles import profiles
    from windtunnel.calibration.transfers import tells_of_transfers, with_transfers
    from windtunnel.files import check_writable
    from windtunnel.report.calibration.calibration import calibration_report, write_calibration
    from windtunnel.report.documents import as_text
    from windtunnel.report.render.tables import show
    from windtunnel.schema import encode

    if out is None:
        raise InputError("--out is missing", "a YAML file, or a folder for a profile of each engine and device")
    check_writable(out / "profile.yaml" if _is_folder(out) else out)
    found = [one for one in chosen_measurements(runs, options, use, only)[0] if one.weight > 0]
    if not found:
        raise InputError("no run is left to fit: the record calls all of them odd", "choose others with --use, --only")
    speculating = [one for one in found if one.lacks_acceptance]
    pooled = [one for one in found if tells_of_transfers(one)]
    found = [one for one in found if not one.lacks_acceptance and not tells_of_transfers(one)]
    with status() as say:
        say(f"simulating {format_count(len(found), 'run')}")
        priced = list(priced_servers(found))
    ready = [priced for _, priced in priced if not isinstance(priced, str)]
    if not ready and not pooled:
        why = priced[0][1] if priced else "they decode speculatively, which tells nothing apart from the acceptance"
        raise InputError(f"no run could be simulated; the first: {why}", "`windtunnel validate` says it of every run")
    if not pooled and not any(metric in priced.measurement.measured for priced in ready for metric in FITTED):
        raise InputError(
            "no run has a TTFT or TPOT, and a fit learns from nothing else", "`windtunnel validate` scores such runs"
        )
    with status() as say:
        say(f"fitting {format_count(len(ready), 'run')}, then again without each configuration")
        named = source or ", ".join(path.name for path in runs)
        made = with_acceptances(profiles(ready, named) if ready else {}, speculating)
        made = with_transfers(made, pooled, named)
    if not made:
        raise InputError(
            "the runs of separate pools taught nothing of their transfers",
            "runs of two configurations at least are needed, each better predicted for what the others taught",
        )
    chosen = _chosen(made, out)
    for name, one in chosen.items():
        write_calibration(one, out / f"{name}.yaml" if _is_folder(out) else out)
    if as_json:
        click.echo(as_text({name: encode(one) for name, one in chosen.items()}))
    else:
        show(*calibration_report(chosen, len(found), len(ready), out))


def _is_folder(out: Path) -> bool:
    return out.is_dir() or out.suffix not in (".yaml", ".yml")


def _chosen(made: "dict[str, Calibration]", out: Path) -> "dict[str, Calibration]":
    """All for a folder; for a file the one of the runs' only engine and device."""
    if _is_folder(out):
        return made
    places = sorted({f"{one.engine}-{device}" for one in made.values() for device in _devices(one)})
    of_devices = {name: one for name, one in made.items() if one.device is not None}
    if len(places) > 1:
        raise InputError(
            f"the runs are of {len(places)} engines and devices: {', '.join(places)}",
            "give --out a folder, for a profile each, or choose runs with --only",
        )
    return of_devices


def _devices(one: "Calibration") -> "tuple[str, ...]":
    return one.provenance.devices if one.device is None else (one.device,)
