"""Names of settings in messages: the options that decide them, of a server's command or of windtunnel's own."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from windtunnel.errors import InputError
from windtunnel.formats.launch.read import name_options
from windtunnel.serving.shorthand import PATHS

PATHS_OF_OPTIONS = {**PATHS, "rate": "workload.arrivals.rate_per_s", "concurrency": "workload.arrivals.concurrency"}
"""Option -> the path in a scenario that it sets."""
DEGREES = ("tp", "pp", "ep", "dcp")


def name_settings(error: InputError, values: Mapping[str, Any]) -> None:
    """Name settings, in an error, by the options that decide them.

    Args:
        error: its message and hint are changed.
        values: of a command's options by name. Beside a scenario's file, only options that are given are named.
    """
    if command := values.get("from_command"):
        name_options(error, command)
        return
    names = [name for name, value in values.items() if value is not None or not values.get("scenario")]
    error.message = _with_flags(error.message, names)
    error.hint = error.hint and _with_flags(error.hint, names)


def _with_flags(text: str, names: Iterable[str]) -> str:
    """Return a message with the options `names` in place of settings of a deployment: `tp = 3` is `--tp 3`."""
    for name in names:
        path = PATHS_OF_OPTIONS.get(name, "")
        if path.startswith(("deployment.", "precision.")) and ("_" in name or name in DEGREES):
            table, _, key = path.removeprefix("deployment.").rpartition(".")
            dotted = rf"(?:deployment\.)?{re.escape(table)}\.{key}"
            # Not in a list of names or a product, nor as the key of a table.
            setting = rf"(?<![\w.$'-])(?<! x )(?:{dotted}{f'|{key}' if key == name else ''})(?!\w|\.\w|[=:]|, \w+,| x )"
            option = f"--{name.replace('_', '-')}"
            named = re.sub(setting, option, text).replace(f"{option} = ", f"{option} ")
            text = text if named == text else re.sub(r" at \$\.deployment\.\w+$", "", named)
    return text
