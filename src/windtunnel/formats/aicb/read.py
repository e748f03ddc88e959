"""Read AICB's command lines as AICB reads them: its generators' arguments and its scripts.

Names are AICB's, so that a command can be read off (utils/utils.py, scripts/*.sh). Silent changes that AICB makes, a
preset over an argument or a division rounded down, are made here too and reported in `remarks`.
"""

import argparse
import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from windtunnel.errors import InputError, check_known
from windtunnel.formats.aicb.arguments import (
    IGNORED_FLAGS,
    IGNORED_VALUES,
    Command,
    InferenceArguments,
    TrainingArguments,
)
from windtunnel.formats.aicb.scripts import read_script

TRAINING_GENERATORS = (
    "SimAI_training_workload_generator",
    "generate_megatron_workload",
    "generate_deepspeed_stage1_2_workload",
    "generate_deepspeed_stage3_workload",
    "generate_collective_test",
)

INFERENCE_GENERATORS = ("SimAI_inference_workload_generator", "Vidur_workload_generator")

GENERATORS = (*TRAINING_GENERATORS, *INFERENCE_GENERATORS)

FORMER_NAMES = {"AIOB_simAI_workload_generator": "SimAI_training_workload_generator"}

OTHER_SPELLINGS = {
    "use_distributed_optimizer": ("--use-distributed-optimizer",),
    "pipeline_model_parallel": ("--pipeline_model_parallel_size",),
    "context_parallel_size": ("--context-parallel-size",),
}
"""Field -> spellings beside `--field`."""


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
    name = FORMER_NAMES.get(name, name)
    check_known(name, GENERATORS, f"{name!r} is no generator of AICB", f"it has {', '.join(GENERATORS)}")
    if name in TRAINING_GENERATORS:
        return Command(name, _parsed(words[3:], TrainingArguments, IGNORED_VALUES, IGNORED_FLAGS))
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
        names = (f"--{field.name}", *OTHER_SPELLINGS.get(field.name, ()))
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
