"""Read server command lines as deployments.

Every option is one of four: it decides a field of the deployment; it has no effect on time (addresses, names, logs); it
has one that is not modelled; or it is unknown. All four are reported.
"""

import re
import shlex
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.files import is_file, read_text
from windtunnel.schema import Schema, decode, read_yaml, set_path
from windtunnel.serving.engines.command_line import Options, Reading
from windtunnel.serving.engines.contract import engine_of


class OtherOptions(Schema):
    """Options that decide no setting, by kind (`catalog/launch_options.yaml`)."""

    sources: dict[str, str]
    without_effect: frozenset[str]
    not_modelled: frozenset[str]
    switches: frozenset[str]


@cache
def other_options() -> OtherOptions:
    """Return the options that are reported and not taken."""
    path = catalog.shipped("launch_options.yaml")
    return decode(read_yaml(path), OtherOptions, path.name)


def read_launch_command(text: str) -> Reading:
    """Read a server's command line as a deployment.

    Args:
        text: `vllm serve ...`, `python -m vllm.entrypoints.openai.api_server ...`, `python -m sglang.launch_server ...`
            or `trtllm-serve ...`; words before it (`VAR=1`, `docker run ...`) are ignored. Or the path of a file with
            such a command.

    Raises:
        InputError: no such command, no model, or a value that its option does not take.
    """
    engine, server, words = _engine_of(_words(text))
    reading = Reading()
    for name, value in _options_of(server, words):
        _take(reading, server, name, value)
    if "model" not in reading.raw:
        raise InputError("--from-command: the command names no model")
    reading.set_engine(name=engine)
    engine_of(engine).command_line.read(reading)
    return reading


def servers() -> dict[str, Options]:
    """Return the options of the engines whose commands are read and written, by name."""
    files = {name: catalog.engine_file(name, "command_line.yaml") for name in catalog.names("engines")}
    return {name: catalog.entry(file, Options) for name, file in files.items() if file is not None}


def _words(text: str) -> list[str]:
    if "\n" not in text and is_file(Path(text)):
        text = read_text(Path(text))
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"--from-command: {error} in the command line") from None


def _engine_of(words: list[str]) -> tuple[str, Options, list[str]]:
    """Return the engine that the command starts, and the words behind its program."""
    known = servers()
    for i, word in enumerate(words):
        for engine, server in known.items():
            for start in server.starts:
                program, *subcommand = start.split()
                rest = words[i + 1 :]
                if fnmatchcase(word.rsplit("/", 1)[-1], program) and rest[: len(subcommand)] == subcommand:
                    return engine, server, rest[len(subcommand) :]
    shown = " ".join(words[:4])
    commands = [f"{' '.join(server.command)} MODEL ..." for server in known.values()]
    raise InputError(
        f"--from-command: {shown!r} starts no server that is known", f"{', '.join(commands[:-1])}, or {commands[-1]}"
    )


def _options_of(server: Options, words: list[str]) -> list[tuple[str, Any]]:
    """Return (name, value) of every option; True for a switch. A word alone is the model."""
    options: list[tuple[str, Any]] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            options.append((server.model_option, word))
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        name = _name(server, name)
        if has_value:
            options.append((name, value))
            continue
        flag = server.flag(name)
        is_switch = flag.value is not None if flag else name in other_options().switches
        values: list[str] = []
        several = flag is not None and flag.type == "sizes"
        while not is_switch and position < len(words) and not _is_option(words[position]) and (several or not values):
            values.append(words[position])
            position += 1
        options.append((name, " ".join(values) if values else True))
    return [pair for name, value in options for pair in _with_file(server, name, value)]


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _name(server: Options, name: str) -> str:
    name = name.replace("_", "-")
    return server.other_names.get(name, name)


def _with_file(server: Options, name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the option, or the options of the YAML file that it names."""
    if name not in server.config_options:
        return [(name, value)]
    content = read_yaml(Path(str(value)))
    if not isinstance(content, dict):
        raise InputError(f"{value} holds no options: keys and values are needed")
    return list(_flattened(server, content, ""))


def _flattened(server: Options, content: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = _name(server, f"{prefix}{key}")
        if isinstance(value, dict):
            options += _flattened(server, value, f"{name}.")
        elif value is False or value is None:
            opposite = f"disable-{name.removeprefix('enable-')}" if value is False else ""
            options += [(negation, True) for negation in (f"no-{name}", opposite) if negation in server.flags]
        else:
            options.append((name, ",".join(map(str, value)) if isinstance(value, list) else value))
    return options


def _take(reading: Reading, server: Options, name: str, value: Any) -> None:
    """Take an option, or note why it is not; the value of a switch is True.

    Raises:
        InputError: it has no value, or none that it takes.
    """
    option, _, key = name.partition(".")
    flag, of_json = server.flag(name), server.flag(option)
    if key and of_json is not None and of_json.type == "json":
        reading.later.setdefault(of_json.word, {})[key.replace("-", "_")] = value
    elif flag is None:
        known = other_options()
        lists = ((known.without_effect, reading.without_effect), (known.not_modelled, reading.not_modelled))
        dashes = "-" if len(option) == 1 or name[0].isupper() else "--"
        next((into for names, into in lists if {name, option} & names), reading.unknown).append(f"{dashes}{name}")
        return
    else:
        converted: Any = flag.value
        if converted is None:
            if value is True:
                raise InputError(f"--from-command: --{name} has no value")
            try:
                converted = flag.read(str(value))
            except ValueError as error:
                if flag.is_lenient:
                    reading.not_modelled.append(f"--{name} {value}")
                    return
                raise InputError(
                    f"--from-command: --{name} is {value}; {error}", "mend it in the command line"
                ) from None
        if not flag.path:
            reading.later[flag.word] = converted
        elif converted is not None:
            set_path(reading.raw, flag.path, converted)
    reading.taken[f"--{name}"] = "" if value is True and flag is not None else str(value)
