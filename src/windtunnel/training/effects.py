"""Find settings of a training job that its other settings turn off.

A setting that a person gives is refused, so that nobody relies on what has no effect; a setting from a framework's
defaults is left out. Settings that only a degree of 1 turns off are allowed: a search passes through it.
"""

from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec

from windtunnel.errors import InputError
from windtunnel.schema import Schema, read_yaml
from windtunnel.training.job import TrainingJob


class Condition(Schema):
    """The condition under which settings have an effect; `effects.yaml` describes the fields."""

    settings: tuple[str, ...]
    when: tuple[dict[str, list[Any] | Literal["given"]], ...]
    needs: str

    def holds(self, job: TrainingJob) -> bool:
        """Whether the settings have an effect in a job with its framework's defaults."""
        return any(all(_is_allowed(job, *item) for item in alternative.items()) for alternative in self.when)


def _is_allowed(job: TrainingJob, path: str, allowed: list[Any] | Literal["given"]) -> bool:
    value = attrgetter(path)(job)
    return value is not None if allowed == "given" else value in allowed


@cache
def conditions() -> tuple[Condition, ...]:
    """Return the conditions, in the order in which they are checked."""
    return msgspec.convert(read_yaml(Path(__file__).with_name("effects.yaml")), tuple[Condition, ...])


def without_idle_settings(given: TrainingJob, filled: TrainingJob) -> TrainingJob:
    """Return `filled`, which is `given` with its framework's defaults, without the defaults that change nothing.

    Raises:
        InputError: `given` itself has a setting that changes nothing.
    """
    for condition, path in ((each, path) for each in conditions() for path in each.settings):
        if condition.holds(filled):
            continue
        section, name = path.split(".")
        schema: Any = getattr(filled, section)
        unset = next(field.default for field in msgspec.structs.fields(schema) if field.name == name)
        off = False if isinstance(getattr(schema, name), bool) and unset is None else unset
        if getattr(getattr(given, section), name) not in (unset, off):
            raise InputError(
                f"{path} = {_shown(getattr(schema, name))} changes nothing here: it needs {condition.needs}",
                f"leave {path} out",
            )
        if getattr(schema, name) != off:
            filled = msgspec.structs.replace(filled, **{section: msgspec.structs.replace(schema, **{name: off})})
    return filled


def _shown(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value).lower()
