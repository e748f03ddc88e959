"""Names of settings in messages: the options that decide them, of a server's command or of windtunnel's own."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from windtunnel.errors import InputError
from windtunnel.formats.launch.read import name_options
from windtunnel.serving.shorthand import JOB_PATHS, PATHS

PATHS_OF_OPTIONS = {**PATHS, "rate": "workload.arrivals.rate_per_s", "concurrency": "workload.arrivals.concurrency"}
"""Option -> the path in a scenario that it sets."""
DEGREES = ("tp", "pp", "ep", "dcp")
FILES_OF_SETTINGS = ("scenario", "space", "job", "experiment")


def name_settings(error: InputError, values: Mapping[str, Any]) -> None:
    """Name settings, in an error, by the options that decide them.

    Args:
        error: its message and hint are changed.
        values: of a command's options by name. Beside a file of settings, only options that are given are named.
    """
    if values.get("slo"):
        error.message = re.sub(r"^slo\b", "--slo", error.message)
    if command := values.get("from_command"):
        name_options(error, command)
        return
    has_file = any(values.get(name) for name in FILES_OF_SETTINGS)
    names = [name for name, value in values.items() if value is not None or not has_file]
    error.message = _as_options(_with_flags(error.message, names), names)
    error.hint = error.hint and _as_options(_with_flags(error.hint, names), names)


def _as_options(text: str, names: Collection[str]) -> str:
    """Return a message with options for their names: where it begins, tells to give or leave one out, or multiplies.

    `seed is -1`, `leave node out`, `give batch, prefill_tokens, or both` and `tp x attention_dp = 2` name options.
    """
    listed = r"\w+(?:(?:, (?:or )?| or | x )\w+)*"
    product = r"\b\w+ x \w+(?= = \d| of \d)"
    placed = rf"^(?:\S+: )?(?:\$\.)?[\w.]+(?= is | = \d)|(?<=leave ){listed}(?= out)|(?<=give ){listed}|{product}"
    own = {f"$.{path}": name for name, path in JOB_PATHS.items()}

    def option(name: re.Match[str]) -> str:
        typed = own.get(name[0], name[0].removeprefix("$."))
        return f"--{typed.replace('_', '-')}" if typed in names else name[0]

    below = re.fullmatch(r"(\w+)( is .*) at (\$\.[\w.]+)", text)
    # `rank is 0 at $.lora` is the field `$.lora.rank`.
    if below and (path := f"{below[3]}.{below[1]}") in own:
        text = path + below[2]
    named = re.sub(placed, lambda part: re.sub(r"(?<![\w.$-])[\w.$]+", option, part[0]), text)
    for name, path in JOB_PATHS.items():
        if "." in path and name in names:
            setting = rf"(?<![\w.$'-]){re.escape(path)}(?![\w.:])(?: =(?= ))?"
            named = re.sub(setting, f"--{name.replace('_', '-')}", named)
    # An option is no field of the file.
    return re.sub(r"^(?:\S+: )?(--[\w-]+) (?:= (?=\d))?", r"\1 ", named)


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
