"""Read AICB's command lines as AICB reads them: its generators' arguments, and its scripts with their preset models.

Names are AICB's, so that a command can be read off (utils/utils.py, scripts/*.sh). Silent changes that AICB makes, a
preset over an argument or a division rounded down, are made here too and reported in `remarks`.
"""

import argparse
import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.files import parse_whole
from windtunnel.formats.aicb.arguments import WORDS, Command, InferenceArguments, TrainingArguments
from windtunnel.schema import Schema, read_yaml

LIST_SCRIPT = "megatron_gpt.sh"
ZERO_SCRIPT = "deepspeed_llama.sh"
INFERENCE_SCRIPT = "inference_workload_with_aiob.sh"

GPUS_OF_A_NODE = 8


class Script(Schema):
    """Spellings and values of one script; `scripts.yaml` describes the fields."""

    model: str
    letters: dict[str, str]
    values: tuple[str, ...]
    defaults: dict[str, Any]
    models: dict[str, dict[str, Any]]
    names: dict[str, str] = {}
    flags: tuple[str, ...] = ()


@cache
def scripts() -> dict[str, Script]:
    """Return the scripts that are read, by name."""
    return msgspec.convert(read_yaml(Path(__file__).with_name("scripts.yaml")), dict[str, Script])


def read_script(name: str, words: list[str], num_nodes: str) -> Command:
    """Return the command that a script runs, given the words behind its name and WORLD_SIZE of its environment.

    Raises:
        InputError: the script is unknown, or would drop a part of what is typed.
    """
    script = scripts().get(name)
    if script is None:
        hint = "give the command that it runs, python -m workload_generator.NAME ..."
        raise InputError(f"the script {name} is not read", hint)
    typed = _options(words, InferenceArguments if name == INFERENCE_SCRIPT else TrainingArguments, script)
    own = {argument: typed.pop(argument) for argument in (*script.values, *script.flags) if argument in typed}
    model = own.get("model_size", script.model)
    check_known(model, script.models, f"the script has no model {model!r}", f"-m is {', '.join(script.models)}")
    preset = script.models[model]
    arguments = {**script.defaults, **typed, **preset}
    if name == INFERENCE_SCRIPT:
        arguments["config_file"] = own.get("config", preset["config_file"])
        return Command("SimAI_inference_workload_generator", InferenceArguments(**arguments))
    if name == ZERO_SCRIPT:
        return _zero_command(arguments, parse_whole(num_nodes, "WORLD_SIZE", least=None))
    remarks = [
        f"the script's model {model} sets --{argument} {preset[argument]} over {value}"
        for argument, value in typed.items()
        if argument in preset and preset[argument] != value
    ]
    if name == LIST_SCRIPT:
        nodes = parse_whole(num_nodes, "WORLD_SIZE", least=None)
        return _list_command(arguments, typed, own, nodes, remarks)
    return Command("SimAI_training_workload_generator", TrainingArguments(**arguments), tuple(remarks))


def _list_command(
    arguments: dict[str, Any], typed: dict[str, Any], own: dict[str, Any], num_nodes: int, remarks: list[str]
) -> Command:
    """Return the command of the script of lists, which sets its world to nodes times GPUs.

    It sets the batch to `ga_num` micro-batches for the data parallelism of the typed world, 0 if no world was typed.
    """
    names = ("nnodes", "nproc_per_node", "ga_num")
    counts = {name: parse_whole(own[name], f"--{name}", least=None) for name in names if name in own}
    num_nodes, per_node = counts.get("nnodes", num_nodes), counts.get("nproc_per_node")
    writes_nothing = None
    if "workload_only" not in own:
        writes_nothing = (f"without --workload_only {LIST_SCRIPT} runs a list on GPUs and writes none", "add it")
    if per_node is None:
        per_node = max(typed.get("world_size", GPUS_OF_A_NODE) // num_nodes, 1)
        writes_nothing = (f"{LIST_SCRIPT} asks the machine it runs on for its GPUs", "add --nproc_per_node N")
    launched = TrainingArguments(**{**arguments, "world_size": num_nodes * per_node})
    data_parallel = typed.get("world_size", 0) // (launched.world_size // launched.data_parallel)
    launched = dataclasses.replace(
        launched, global_batch=counts.get("ga_num", 2) * data_parallel * launched.micro_batch
    )
    remarks += [
        f"the script sets --{name} {getattr(launched, name)} over {typed[name]}"
        for name in ("world_size", "global_batch")
        if name in typed and typed[name] != getattr(launched, name)
    ]
    return Command("generate_megatron_workload", launched, tuple(remarks), writes_nothing)


def _zero_command(arguments: dict[str, Any], num_nodes: int) -> Command:
    """Return the command of the ZeRO script, which always runs on GPUs, with one micro-batch for each."""
    launched = TrainingArguments(**{**arguments, "world_size": num_nodes * GPUS_OF_A_NODE})
    launched = dataclasses.replace(launched, global_batch=launched.world_size * launched.micro_batch)
    hint = "give the command python -m workload_generator.generate_deepspeed_stage3_workload ..."
    writes_nothing = (f"{ZERO_SCRIPT} asks the machine it runs on for its GPUs", hint)
    stages = "stage3" if launched.stage == 3 else "stage1_2"
    return Command(f"generate_deepspeed_{stages}_workload", launched, (), writes_nothing)


def _options(words: list[str], schema: type[Any], script: Script) -> dict[str, Any]:
    """Return a script's options; a script reads `--name value` only and drops everything after an unknown option."""
    kinds = {field.name: field.type for field in dataclasses.fields(schema)}
    kinds |= dict.fromkeys(script.values, str) | dict.fromkeys(script.flags, bool)
    ignored = dict.fromkeys(WORDS["ignored_values"], 1) | dict.fromkeys(WORDS["ignored_flags"], 0)
    options: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        name = word.lstrip("-")
        name = script.names.get(name, name) if word.startswith("--") else script.letters.get(name, name)
        if word.startswith("-") and name in ignored and name not in kinds:
            position += 1 + ignored[name]
            continue
        if not word.startswith("-") or name not in kinds:
            known = [*kinds, *script.names]
            raise InputError(
                f"AICB's script stops reading at {word!r} and drops everything after it",
                "it reads --name value, not --name=value" if "=" in word else did_you_mean(name, known),
            )
        if kinds[name] is bool:
            options[name] = True
            position += 1
            continue
        if position + 1 == len(words):
            raise InputError(f"a value is missing after {word}")
        text = words[position + 1]
        options[name] = parse_whole(text, word, least=None) if "int" in str(kinds[name]) else text
        position += 2
    return options


def read_command(text: str) -> Command:
    """Read a command that runs one of AICB's generators, as typed in a shell; variables are not known.

    `python -m workload_generator.NAME ...`, `sh scripts/megatron_workload_with_aiob.sh ...`,
    `sh scripts/megatron_gpt.sh ... --nproc_per_node N --workload_only` and
    `sh scripts/inference_workload_with_aiob.sh ...` are understood.

    Raises:
        InputError: it runs something else, or AICB would refuse its arguments or fail on them.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"this is no shell command: {error}") from None
    variables = list(itertools.takewhile(lambda word: "=" in word and not word.startswith("-"), words))
    words = words[len(variables) :]
    if words[:1] in (["sh"], ["bash"]) and len(words) > 1:
        values = dict(variable.split("=", 1) for variable in variables)
        return read_script(words[1].rsplit("/", 1)[-1], words[2:], values.get("WORLD_SIZE", "1"))
    if len(words) < 3 or not words[0].startswith("python") or words[1] != "-m":
        raise InputError(
            f"{' '.join(words[:3])!r} does not run a generator of AICB", "it is python -m workload_generator.NAME ..."
        )
    name = words[2].rsplit(".", 1)[-1]
    name = WORDS["former_generators"].get(name, name)
    known = [generator for generators in WORDS["generators"].values() for generator in generators]
    check_known(name, known, f"{name!r} is no generator of AICB", f"it has {', '.join(known)}")
    if name in WORDS["generators"]["training"]:
        return Command(name, _parsed(words[3:], TrainingArguments, WORDS["ignored_values"], WORDS["ignored_flags"]))
    ignored = ("aiob_forward_loops", "result_dir", "moe_routing_strategy"), ("aiob_enable", "moe_enable")
    return Command(name, _parsed(words[3:], InferenceArguments, *ignored))


class _Parser(argparse.ArgumentParser):
    """A parser as AICB's own: unique beginnings of a name are understood."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"AICB refuses the command: {message}")


def _parsed(words: list[str], schema: type[Any], ignored_values: Iterable[str], ignored_flags: Iterable[str]) -> Any:
    """Parse a command line; ignored arguments change nothing."""
    parser = _Parser(add_help=False)
    for field in dataclasses.fields(schema):
        names = (f"--{field.name}", *WORDS["spellings"].get(field.name, ()))
        if field.name in ("config_file", "model_name") and schema is InferenceArguments:
            parser.add_argument(field.name, nargs="?" if field.name == "config_file" else None)
        elif field.type is bool:
            parser.add_argument(*names, action="store_true", dest=field.name)
        else:
            kind: Callable[[str], Any] = str if "str" in str(field.type) else int
            parser.add_argument(*names, type=kind, default=field.default, dest=field.name)
    for name in ignored_values:
        parser.add_argument(f"--{name}", dest="ignored")
    for name in ignored_flags:
        parser.add_argument(f"--{name}", action="store_true", dest="ignored")
    values = vars(parser.parse_args(words))
    values.pop("ignored", None)
    return schema(**values)
