"""`windtunnel calibrate`: fit a calibration to measured runs."""

from pathlib import Path

from windtunnel.calibration.fit import FITTED, PricedServer, priced_servers
from windtunnel.calibration.measured_runs import Measurement
from windtunnel.calibration.profiles import profiles
from windtunnel.calibration.settings_inference import with_acceptances
from windtunnel.calibration.transfers import tells_of_transfers, with_transfers
from windtunnel.cli.options import launched
from windtunnel.cli.output import answer, status
from windtunnel.cli.serving.measured_runs import measurements_of
from windtunnel.cli.verbs import Options
from windtunnel.errors import InputError
from windtunnel.files import check_writable
from windtunnel.report.calibration.calibration import calibration_report, write_calibration
from windtunnel.schema import encode
from windtunnel.serving.calibration import Calibration
from windtunnel.units import format_count


def command(options: Options) -> None:
    """Fit calibrations to measured runs, write and print them."""
    out = options.out
    check_writable(out / "profile.yaml" if _is_folder(out) else out)
    source = options.source or ", ".join(path.name for path in options.runs)
    launch = launched(options)
    runs, _ = measurements_of(options, options.of("deployment"), launch.raw)
    calibrations, num_runs, num_priced = _fitted(runs, source)
    chosen = _chosen(calibrations, out)
    for name, calibration in chosen.items():
        write_calibration(calibration, out / f"{name}.yaml" if _is_folder(out) else out)
    answer(
        options,
        lambda: {name: encode(calibration) for name, calibration in chosen.items()},
        lambda: calibration_report(chosen, num_runs, num_priced, out),
        launch=launch,
    )


def _fitted(measurements: list[Measurement], source: str) -> tuple[dict[str, Calibration], int, int]:
    """Fit calibrations to the runs: overheads and factors, acceptance of draft tokens, KV transfers.

    Returns:
        Calibrations by name, the number of runs to fit, and how many of them could be simulated.
    """
    usable = [run for run in measurements if run.weight > 0]
    if not usable:
        raise InputError("no run is left to fit: the record flags all as odd", "choose others with --use, --only")
    speculating = [run for run in usable if run.lacks_acceptance]
    pooled = [run for run in usable if tells_of_transfers(run)]
    plain = [run for run in usable if not run.lacks_acceptance and not tells_of_transfers(run)]
    with status() as say:
        say(f"simulating {format_count(len(plain), 'run')}")
        priced = [server for _, server in priced_servers(plain)]
    ready = [server for server in priced if not isinstance(server, str)]
    if not pooled:
        _check_teaches(ready, next((refusal for refusal in priced if isinstance(refusal, str)), None))
    with status() as say:
        say(f"fitting {format_count(len(ready), 'run')}, then again without each configuration")
        calibrations = with_acceptances(profiles(ready, source) if ready else {}, speculating)
        calibrations = with_transfers(calibrations, pooled, source)
    if not calibrations:
        raise InputError(
            "the runs of separate pools say nothing about their transfers",
            "at least two configurations are needed, and each must be predicted better with what the others show",
        )
    return calibrations, len(plain), len(ready)


def _check_teaches(ready: list[PricedServer], refusal: str | None) -> None:
    """Raise InputError where no run could be simulated, or none has a metric to fit."""
    if not ready:
        reason = refusal or "they decode speculatively, which shows the acceptance only"
        raise InputError(
            f"no run could be simulated; the first: {reason}", "`windtunnel validate` gives the reason for every run"
        )
    if not any(metric in server.measurement.measured for server in ready for metric in FITTED):
        raise InputError(
            "no run has a TTFT or TPOT, and a fit learns from nothing else", "`windtunnel validate` scores such runs"
        )


def _is_folder(out: Path) -> bool:
    return out.is_dir() or out.suffix not in (".yaml", ".yml")


def _chosen(calibrations: dict[str, Calibration], out: Path) -> dict[str, Calibration]:
    """Return all calibrations for a folder; for a file the one of the runs' only engine and device."""
    if _is_folder(out):
        return calibrations
    places = sorted(
        {
            f"{calibration.engine}-{device}"
            for calibration in calibrations.values()
            for device in (calibration.provenance.devices if calibration.device is None else (calibration.device,))
        }
    )
    if len(places) > 1:
        raise InputError(
            f"the runs are of {len(places)} engines and devices: {', '.join(places)}",
            "give --out a folder, for a profile each, or choose runs with --only",
        )
    return {name: calibration for name, calibration in calibrations.items() if calibration.device is not None}
