"""Find the keys of a fine-tuning job: in a YAML file or a command, and in the files that these name."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import is_file, parse_whole, read_text
from windtunnel.formats.launch.containers import Command, commands_in_script
from windtunnel.schema import dotted, read_table, read_yaml

WORDS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("words.yaml"))
TRAINS = re.compile(
    r"--(?:model[_-]name[_-]or[_-]path|per[_-]device[_-]train[_-]batch[_-]size)\b|\b(?:llamafactory-cli|axolotl)\s+train\b"
    rf"|\baxolotl\.cli\.train\b|\b(?:trl|swift)\s+(?:{'|'.join((*WORDS['stages'], *WORDS['other_stages']))})\b"
    r"|\baccelerate\s+launch\b(?:\\\n|[^\n])*\.py\s(?:\\\n|[^\n])*\.ya?ml\b|\bsrc/train\.py\s+\S+\.ya?ml\b"
)
"""What a command has that starts a training."""
_HINT = "see docs/guides/first-training-job.md"


@dataclass(frozen=True)
class Source:
    """Keys of a job, tables as dotted names, and what else its file says."""

    path: Path
    keys: dict[str, Any]
    tool: str
    """Key of `tools` in `words.yaml`."""
    num_devices: int | None
    """Devices of the launcher, if it says."""
    dashes: str = ""
    """What stands before a key where a person reads it."""


def read_keys(path: Path) -> Source:
    """Read a YAML or JSON file of keys; InputError where it is none, or names a file that is missing or wrong."""
    keys = _completed(path, dotted(read_table(path, "a fine-tuning job", _HINT)))
    num_devices = _num_devices(keys, {})
    return Source(path, keys, _tool(keys, []), num_devices)


def read_command(path: Path) -> Source:
    """Read the one command of a script that trains; InputError for none, several, or one with a wrong file."""
    commands = commands_in_script(read_text(path), f"{path}: ")
    found = [command for command in commands if TRAINS.search(" ".join(command.words))]
    if len(found) != 1:
        raise InputError(
            f"{path} has {len(found)} commands that train; one is read", "give a file with the one to predict"
        )
    keys, alone = _options(found[0])
    files = [word for word in alone if Path(word).suffix in (".yaml", ".yml", ".json")]
    files += [str(keys.pop("config"))] if "config" in keys else []
    of_files = {key: value for file in files for key, value in dotted(_table(path, file)).items()}
    stems = [Path(word).stem.partition("_")[0] for word in alone if word.endswith(".py")]
    said = (
        alone[1:2] if alone[:1] in (["trl"], ["swift"]) else [each for each in stems if each in WORDS["other_stages"]]
    )
    keys = _completed(path, {**of_files, **({"stage": said[0]} if said else {}), **keys})
    num_devices = _num_devices(keys, found[0].environment) or found[0].gpus
    return Source(path, keys, _tool(keys, alone), num_devices, "--")


def _options(command: Command) -> tuple[dict[str, Any], list[str]]:
    """Return option -> its value, True without one, a list where it has several; and the words that belong to none."""
    options: dict[str, list[str]] = {}
    alone: list[str] = []
    values = alone
    for word in command.words:
        if word.startswith("-") and not re.match(r"-\d", word):
            name, has_value, value = word.lstrip("-").partition("=")
            values = options[name.replace("-", "_")] = [value] if has_value else []
            continue
        if word.endswith(".py"):
            values = alone
        values.append(word)
    alone += options.pop("m", [])
    named = dict(word.split("=", 1) for word in alone if re.match(r"\w+=", word))
    return {**{name: _value(values) for name, values in options.items()}, **named}, alone


def _value(values: list[str]) -> Any:
    return values if len(values) > 1 else values[0] if values else True


def _completed(path: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys, over those of the files of accelerate, DeepSpeed and FSDP that they name."""
    if "config_file" in keys:
        keys = {**dotted(_table(path, keys.pop("config_file"))), **keys}
    for prefix, names in (("deepspeed", WORDS["settings"]["deepspeed"]), ("fsdp_config", ["fsdp_config"])):
        file = next((keys[name] for name in names if keys.get(name)), None)
        if file is not None and str(file).lower() not in WORDS["switched_off"]:
            keys = {**dotted(_table(path, file), f"{prefix}."), **keys}
    keys = {re.sub(r"^(fsdp_config\.)?fsdp_(?!config)", "fsdp_config.", key): keys[key] for key in keys}
    return {key.removeprefix("parallelism_config."): value for key, value in keys.items()}


def _table(path: Path, name: Any) -> dict[str, Any]:
    """Return the table in a file that a job names: beside it, or below a folder around it; or known by its name, or
    written out as JSON. InputError where there is none."""
    text = str(name)
    if text.startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise InputError(f"{path}: {text[:60]!r} is not valid JSON: {error}") from None
    if text in WORDS["zero_by_name"]:
        return dict(WORDS["zero_by_name"][text])
    files = (*(folder / text for folder in (path.parent, *path.resolve().parents)), path.parent / Path(text).name)
    file = next(filter(is_file, files), None)
    if file is None:
        raise InputError(f"{path} names {text}, which is not there", f"put {Path(text).name} beside {path.name}")
    return read_table(file, "a table of settings", _HINT)


def _num_devices(keys: dict[str, Any], environment: Mapping[str, str]) -> int | None:
    """Take the launcher's number of devices out of the keys; None where it does not say."""

    def count(kind: str) -> int | None:
        given = [value for name in WORDS[kind] if (value := keys.pop(name, environment.get(name))) is not None]
        is_said = bool(given) and str(given[0]) not in ("auto", "gpu")
        return parse_whole(given[0], f"the launcher's {WORDS[kind][0]}", least=1) if is_said else None

    included = [part.partition(":")[2] for part in str(keys.pop("include", "")).split("@")]
    total, of_a_node, nodes = count("devices"), count("devices_of_a_node"), count("nodes")
    if total or of_a_node:
        return total or (of_a_node or 1) * (nodes or 1)
    return sum(len(ids.split(",")) for ids in included if ids) or None


def _tool(keys: Mapping[str, Any], alone: list[str]) -> str:
    """Return the tool that has one of the keys or programs."""
    for name, tool in WORDS["tools"].items():
        programs = [program for program in tool["programs"] if any(fnmatchcase(word, program) for word in alone)]
        if programs or any(key in keys for key in tool["keys"]):
            return str(name)
    return "trainer"
