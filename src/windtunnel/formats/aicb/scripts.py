"""AICB's shell scripts: their names of arguments, and the preset models that override what is typed."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.formats.aicb.arguments import (
    IGNORED_FLAGS,
    IGNORED_VALUES,
    Command,
    InferenceArguments,
    TrainingArguments,
)
from windtunnel.formats.parsing import parse_whole
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
    ignored = dict.fromkeys(IGNORED_VALUES, 1) | dict.fromkeys(IGNORED_FLAGS, 0)
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
