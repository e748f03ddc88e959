"""Files of measured runs (`.jsonl`): one run a line, with its whole scenario and the measured values.

This is the neutral form that `windtunnel validate` and `windtunnel calibrate` read: whatever a run's source was, a
converter writes it once as `MeasuredRun`, and nothing downstream needs to know the source.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from windtunnel.calibration.measured_runs import Measurement, check_ids
from windtunnel.errors import InputError
from windtunnel.files import read_bytes, read_text, write_text
from windtunnel.schema import Schema, decode, encode
from windtunnel.serving.scenario import scenario_from

MARK = '{"windtunnel":"measured_run"'
"""First bytes of each line, which tell the file from a benchmark client's."""


class Measured(Schema):
    """Measured values of a run; unmeasured ones are left out."""

    ttft_s: float | None = None
    """Time to the first token."""
    tpot_s: float | None = None
    """Time per output token after the first."""
    e2e_s: float | None = None
    """Latency of a request."""
    output_tokens_per_s: float | None = None
    """Output tokens per second of the whole deployment."""


_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "throughput": "output_tokens_per_s"}
"""Metric of a `Measurement` -> field of `Measured`."""

_SHARED = ("id", "refused", "statistic", "use", "weight", "labels", "unknown", "lacks_acceptance")
"""Fields that a `Measurement` and a `MeasuredRun` share."""


class MeasuredRun(Schema):
    """A line of a file of measured runs."""

    windtunnel: Literal["measured_run"]
    """Tag of the line."""
    id: str
    measured: Measured = Measured()
    scenario: dict[str, Any] | None = None
    """The scenario that was run, as in a scenario file; absent where it is unknown, and then `refused` says why."""
    refused: str = ""
    """Why the run has no scenario."""
    statistic: Literal["mean", "p50"] = "mean"
    """Statistic of the three latencies over requests."""
    use: str = "primary"
    """`primary` or `secondary` runs are scored; anything else leaves the run out unless `--use` names it."""
    weight: float = 1.0
    """Weight in a calibration; 0 leaves the run out of the fit."""
    labels: dict[str, str] = {}
    """Name -> value to group results by: engine, version, device, model, format, parallelism, ..."""
    unknown: tuple[str, ...] = ()
    """Engine settings that nobody recorded; a calibration may infer them."""
    lacks_acceptance: bool = False
    """The run used speculative decoding, and the number of accepted draft tokens was not recorded."""

    def __post_init__(self) -> None:
        if (self.scenario is None) != bool(self.refused):
            raise ValueError("a run has either a scenario or a reason why it is refused")


def is_run_file(path: Path) -> bool:
    """Whether a file begins as a file of measured runs does.

    Raises:
        InputError: the file cannot be read.
    """
    return read_bytes(path, len(MARK)) == MARK.encode()


def read_run_file(path: Path) -> list[Measurement]:
    """Read every run of a file of measured runs.

    Raises:
        InputError: a line is not JSON, has an unknown key or a wrong value, or two runs have one id; names the line.
    """
    lines = read_text(path).splitlines()
    runs = [_measurement(f"{path.name} line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    check_ids(runs, path, "give each run an id of its own")
    return runs


def write_run_file(runs: Iterable[Measurement], path: Path) -> None:
    """Write runs so that `read_run_file` gives equal ones.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, "".join(f"{_line(run)}\n" for run in runs))


def _measurement(where: str, line: str) -> Measurement:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}", "is the file cut off?") from None
    run: MeasuredRun = decode(raw, MeasuredRun, where)
    values = {metric: getattr(run.measured, field) for metric, field in _FIELDS.items()}
    return Measurement(
        scenario=None if run.scenario is None else scenario_from(run.scenario, where),
        measured={metric: value for metric, value in values.items() if value is not None},
        **{name: getattr(run, name) for name in _SHARED},
    )


def _line(run: Measurement) -> str:
    measured = Measured(**{_FIELDS[metric]: value for metric, value in run.measured.items()})
    row = MeasuredRun(
        windtunnel="measured_run",
        measured=measured,
        scenario=None if run.scenario is None else encode(run.scenario),
        **{name: getattr(run, name) for name in _SHARED},
    )
    return msgspec.json.encode(row).decode()
