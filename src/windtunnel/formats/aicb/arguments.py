"""Arguments of AICB's generators, under AICB's names (utils/utils.py).

Command lines are read as AICB reads them: its generators' arguments, and its scripts (scripts/*.sh) with their preset
models. Silent changes that AICB makes, a preset over an argument or a division rounded down, are made here too and
reported in `remarks`.
"""

import argparse
import dataclasses
import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.files import parse_whole
from windtunnel.schema import Schema, read_yaml

FRAMES = ("Megatron", "DeepSpeed", "collective_test", "DeepSeek")


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Arguments of AICB's training generators with their defaults (`get_params` in utils/utils.py)."""

    frame: str = "Megatron"
    gpu_type: str | None = None
    model_name: str | None = None
    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel: int = 1
    context_parallel_size: int = 1
    """Changes nothing in a generated file."""
    pp_rank: int = -1
    global_batch: int = 4
    micro_batch: int = 1
    epoch_num: int = 1
    computation_enable: bool = False
    hidden_size: int = 1024
    num_layers: int = 24
    seq_length: int = 2048
    num_attention_heads: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int = 32000
    make_vocab_size_divisible_by: int = 128
    add_bias_linear: bool = False
    use_flash_attn: bool = False
    swiglu: bool = False
    enable_sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    recompute_activations: bool = False
    aiob_enable: bool = False
    comp_filepath: str | None = None
    # Experts
    moe_enable: bool = False
    expert_model_parallel_size: int = 1
    num_experts: int = 1
    moe_router_topk: int = 1
    moe_grouped_gemm: bool = False
    # DeepSeek
    n_dense_layers: int = 3
    n_shared_expert: int = 2
    qk_rope_dim: int = 64
    qk_nope_dim: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    v_head_dim: int = 128
    # DeepSpeed; sizes in elements
    stage: int = 3
    amp_enabled: bool = False
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    contiguous_gradients: bool = False
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    prefetch_bucket_size: int = 1_000_000_000
    # Collective tests
    begin_size: int = 1048576
    end_size: int = 1048576
    test_comm: str = "all_reduce"
    iter_num: int = 500
    multi_all_reduce_enable: int = 0

    def __post_init__(self) -> None:
        check_known(self.frame, FRAMES, f"--frame is {self.frame!r}", f"it is one of {', '.join(FRAMES)}")
        if self.stage not in (1, 2, 3):
            raise InputError(f"--stage is {self.stage}; it is 1, 2 or 3")
        for name in ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel", "micro_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} is {getattr(self, name)}; at least 1 is needed")
        ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel
        if self.world_size % ranks:
            raise InputError(
                f"--world_size {self.world_size} is not a multiple of tensor_model_parallel_size x "
                f"pipeline_model_parallel = {self.tensor_model_parallel_size} x {self.pipeline_model_parallel}"
            )
        if self.moe_enable and not self.enable_sequence_parallel:
            raise InputError("--moe_enable needs --enable_sequence_parallel")
        if self.expert_model_parallel_size > 1 and self.num_experts % self.expert_model_parallel_size:
            raise InputError(
                f"--num_experts {self.num_experts} is not a multiple of --expert_model_parallel_size "
                f"{self.expert_model_parallel_size}"
            )

    @property
    def data_parallel(self) -> int:
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step, rounded down, to 0 where the batch is too small."""
        return self.global_batch // (self.data_parallel * self.micro_batch)

    @property
    def layers_per_stage(self) -> int:
        """Layers of each stage, rounded down."""
        return self.num_layers // self.pipeline_model_parallel

    @property
    def heads(self) -> int:
        """Attention heads; AICB takes the number of layers where none is given."""
        return self.num_attention_heads or self.num_layers

    @property
    def padded_vocab_size(self) -> int:
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def feed_forward_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int((4 * self.hidden_size * 2 / 3) / 64) * 64 if self.swiglu else 4 * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class InferenceArguments:
    """Arguments of AICB's inference generators with their defaults (SimAI_inference_workload_generator.py)."""

    model_name: str
    config_file: str | None = None
    phase: str = "decode"
    seq_length: int = 1
    micro_batch: int = 1
    world_size: int = 1
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    pipeline_model_parallel: int = 1

    def __post_init__(self) -> None:
        least = max(1, self.tensor_model_parallel_size, self.expert_model_parallel_size)
        if self.world_size < least:
            raise InputError(f"--world_size is {self.world_size}; tensor and expert parallelism need at least {least}")
        if self.phase not in ("decode", "prefill"):
            raise InputError(f"--phase is {self.phase!r}; it is decode or prefill")


Arguments = TrainingArguments | InferenceArguments


@dataclass(frozen=True)
class Command:
    """One command line of AICB."""

    generator: str
    """Module of workload_generator that it runs."""
    arguments: Arguments
    remarks: tuple[str, ...] = ()
    """Changes that AICB makes to the command in silence."""
    writes_nothing: tuple[str, str] | None = None
    """Why AICB writes no file for it without a GPU, and what to type instead; the command still describes a job."""


WORDS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("words.yaml"))
"""Names that AICB's generators and files use, by subject."""


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
    InputError where the script is unknown, or would drop a part of what is typed."""
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

    `python -m workload_generator.NAME ...`, `sh scripts/megatron_workload_with_aiob.sh ...`, `sh
    scripts/megatron_gpt.sh ... --nproc_per_node N --workload_only` and `sh scripts/inference_workload_with_aiob.sh ...`
    are understood. InputError where it runs something else, or AICB would refuse its arguments or fail on them.
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
