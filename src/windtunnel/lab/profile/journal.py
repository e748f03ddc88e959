"""Journal of measured steps."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.lab.profile.model import StepShape
from windtunnel.lab.profile.samples import MeasuredOperator, MeasuredStep, TimeStatistics
from windtunnel.model.shape import operator_types


class Journal:
    """The steps measured so far, a line of JSON each, so that an interrupted profile goes on where it stopped.

    Args:
        about: the measured model and method; a journal of something else is refused.

    Raises:
        InputError: the file belongs to another measurement, or is broken.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self.path, self.about = path, dict(about)
        self.steps: dict[StepShape, MeasuredStep] = {}
        if path.exists():
            header, *lines = _json_lines(path)
            for key in sorted(self.about):
                if header.get(key) != self.about[key]:
                    raise InputError(
                        f"{path} was measured with {key} {header.get(key)}, now it is {self.about[key]}",
                        "choose another folder, or start anew with --overwrite",
                    )
            self.steps = {step.shape: step for step in map(_step_from, lines)}
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.about) + "\n", encoding="utf-8")

    def add(self, step: MeasuredStep) -> None:
        """Add a step."""
        self.steps[step.shape] = step
        document = asdict(step)
        for row, operator in zip(document["operators"], step.operators, strict=True):
            row["kind"] = operator.op.kind
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(document, default=float) + "\n")


def read_journal(path: Path) -> list[MeasuredStep]:
    """Read the steps of one journal.

    Raises:
        InputError: it is broken.
    """
    return [_step_from(line) for line in _json_lines(path)[1:]]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a journal; a last line that an interruption cut off is left out, and removed from the file."""
    text = path.read_text(encoding="utf-8")
    complete, _, rest = text.rpartition("\n")
    if rest:
        path.write_text(complete + "\n" if complete else "", encoding="utf-8")
    try:
        lines = [json.loads(line) for line in complete.splitlines()]
    except ValueError as error:
        raise InputError(f"{path} is not a journal of a profile: {error}") from None
    if not lines:
        raise InputError(f"{path} is empty", "start anew with --overwrite")
    return lines


def _step_from(line: Mapping[str, Any]) -> MeasuredStep:
    try:
        operators = []
        for row in line["operators"]:
            op, statistics = operator_types()[row["kind"]](**row["op"]), TimeStatistics(**row["statistics"])
            operators.append(MeasuredOperator(row["name"], op, int(row["count"]), statistics))
        return MeasuredStep(StepShape(**line["shape"]), tuple(operators), float(line["whole_s"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a journal of a profile is broken: {error!r}", "start anew with --overwrite") from None
