"""AICB's own command lines, read as AICB reads them: its generators' arguments and its scripts' preset models.

Names are AICB's, so that a command can be read off (aliyun/aicb, utils/utils.py, scripts/*.sh at 23eec3c). What AICB
does silently, a preset over an argument or a division rounded down, it does here too, and is told in `remarks`.
"""

import argparse
import dataclasses
import itertools
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from windtunnel.errors import InputError, did_you_mean

FRAMES = ("Megatron", "DeepSpeed", "collective_test", "DeepSeek")


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Arguments of AICB's training generators, `get_params` in utils/utils.py; its defaults."""

    frame: str = "Megatron"
    gpu_type: str | None = None
    model_name: str | None = None
    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel: int = 1
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
        if self.frame not in FRAMES:
            raise InputError(
                f"--frame is {self.frame!r}", did_you_mean(self.frame, FRAMES, f"it is one of {', '.join(FRAMES)}")
            )
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
        """Rounded down, to 0 where the batch is too small."""
        return self.global_batch // (self.data_parallel * self.micro_batch)

    @property
    def layers_per_stage(self) -> int:
        """Rounded down."""
        return self.num_layers // self.pipeline_model_parallel

    @property
    def heads(self) -> int:
        """AICB takes the number of layers where none is given."""
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
    """Arguments of AICB's inference generators, SimAI_inference_workload_generator.py; its defaults."""

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
    """The module of workload_generator that it runs."""
    arguments: Arguments
    remarks: tuple[str, ...] = field(default=())
    """What AICB does with it that the one who typed it may not expect."""


TRAINING_GENERATORS = (
    "SimAI_training_workload_generator",
    "generate_megatron_workload",
    "generate_deepspeed_stage1_2_workload",
    "generate_deepspeed_stage3_workload",
    "generate_collective_test",
)
INFERENCE_GENERATORS = ("SimAI_inference_workload_generator", "Vidur_workload_generator")
GENERATORS = (*TRAINING_GENERATORS, *INFERENCE_GENERATORS)

DEVICES = {"A100": "a100_sxm", "A800": "a100_sxm", "H100": "h100_sxm", "H800": "h800_sxm", "H20": "h20"}
"""`--gpu_type` -> a device of the catalog; AICB only puts it into the name of its file."""

FORMER_NAMES = {"AIOB_simAI_workload_generator": "SimAI_training_workload_generator"}

IGNORED_VALUES = (
    "context-parallel-size",
    "dtype",
    "max_position_embeddings",
    "gated_linear_unit",
    "activation_func",
)
IGNORED_FLAGS = (
    "workload_only",
    "enable_visual",
    "bias_gelu_fusion",
    "openai_gelu",
    "onnx_safe",
    "squared_relu",
    "overlap_grad_reduce",
    "overlap_version",
)
"""Arguments that change nothing in a generated file."""

OTHER_SPELLINGS = {
    "use_distributed_optimizer": ("--use-distributed-optimizer",),
    "pipeline_model_parallel": ("--pipeline_model_parallel_size",),
}
"""Field -> spellings beside `--field`."""


def read_command(text: str) -> Command:
    """A command that runs one of AICB's generators, as typed in a shell; variables are not known.

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
        known = dict(variable.split("=", 1) for variable in variables)
        return _read_script(words[1].rsplit("/", 1)[-1], words[2:], known.get("WORLD_SIZE", "1"))
    if len(words) < 3 or not words[0].startswith("python") or words[1] != "-m":
        raise InputError(
            f"{' '.join(words[:3])!r} does not run a generator of AICB", "it is python -m workload_generator.NAME ..."
        )
    name = words[2].rsplit(".", 1)[-1]
    name = FORMER_NAMES.get(name, name)
    if name not in GENERATORS:
        raise InputError(
            f"{name!r} is no generator of AICB", did_you_mean(name, GENERATORS, f"it has {', '.join(GENERATORS)}")
        )
    return Command(name, _training(words[3:]) if name in TRAINING_GENERATORS else _inference(words[3:]))


class _Parser(argparse.ArgumentParser):
    """AICB's own parser is argparse too: unique beginnings of a name are understood."""

    def __init__(self) -> None:
        super().__init__(add_help=False)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"AICB refuses the command: {message}")


def _add_arguments(parser: argparse.ArgumentParser, noun: type[Any], left_out: tuple[str, ...] = ()) -> None:
    for one in dataclasses.fields(noun):
        if one.name in left_out:
            continue
        names = (f"--{one.name}", *OTHER_SPELLINGS.get(one.name, ()))
        if one.type is bool:
            parser.add_argument(*names, action="store_true", dest=one.name)
        else:
            kind: Callable[[str], Any] = str if "str" in str(one.type) else int
            parser.add_argument(*names, type=kind, default=one.default, dest=one.name)


def _training(words: list[str]) -> TrainingArguments:
    parser = _Parser()
    _add_arguments(parser, TrainingArguments)
    for name in IGNORED_VALUES:
        parser.add_argument(f"--{name}", dest="ignored")
    for name in IGNORED_FLAGS:
        parser.add_argument(f"--{name}", action="store_true", dest="ignored")
    parsed = vars(parser.parse_args(words))
    parsed.pop("ignored", None)
    return TrainingArguments(**parsed)


def _inference(words: list[str]) -> InferenceArguments:
    parser = _Parser()
    parser.add_argument("model_name")
    parser.add_argument("config_file", nargs="?")
    _add_arguments(parser, InferenceArguments, left_out=("model_name", "config_file"))
    for name in ("aiob_forward_loops", "result_dir", "moe_routing_strategy"):
        parser.add_argument(f"--{name}", dest="ignored")
    for name in ("aiob_enable", "moe_enable"):
        parser.add_argument(f"--{name}", action="store_true", dest="ignored")
    parsed = vars(parser.parse_args(words))
    parsed.pop("ignored", None)
    return InferenceArguments(**parsed)


TRAINING_SCRIPT = "megatron_workload_with_aiob.sh"
LIST_SCRIPT = "megatron_gpt.sh"
INFERENCE_SCRIPT = "inference_workload_with_aiob.sh"

SCRIPT_DEFAULTS: dict[str, Any] = {
    "world_size": 32,
    "tensor_model_parallel_size": 8,
    "global_batch": 1024,
    "num_layers": 40,
    "seq_length": 4096,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "vocab_size": 50257,
    "use_distributed_optimizer": True,
}

_DEEPSEEK = {
    "tensor_model_parallel_size": 1,
    "kv_lora_rank": 512,
    "qk_nope_dim": 128,
    "qk_rope_dim": 64,
    "v_head_dim": 128,
}

PRESETS: dict[str, dict[str, Any]] = {
    "7": {
        "model_name": "gpt_7B",
        "num_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "tensor_model_parallel_size": 4,
    },
    "13": {"model_name": "gpt_13B", "num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40},
    "22": {
        "model_name": "gpt_22B",
        "num_layers": 48,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "tensor_model_parallel_size": 8,
    },
    "175": {
        "model_name": "gpt_175B",
        "num_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "tensor_model_parallel_size": 8,
    },
    "405": {
        "model_name": "llama_405B",
        "num_layers": 128,
        "hidden_size": 16384,
        "ffn_hidden_size": 53248,
        "num_attention_heads": 128,
    },
    "moe": {
        "model_name": "Mixtral_8*7B",
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "ffn_hidden_size": 14336,
        "tensor_model_parallel_size": 4,
        "moe_enable": True,
        "moe_grouped_gemm": True,
    },
    "deepseek671": {
        "model_name": "DeepSeek_671B",
        "num_layers": 61,
        "hidden_size": 18432,
        "num_attention_heads": 128,
        "ffn_hidden_size": 2048,
        "n_dense_layers": 3,
        "n_shared_expert": 1,
        "num_experts": 256,
        "q_lora_rank": 1536,
        **_DEEPSEEK,
    },
    "deepseek236": {
        "model_name": "DeepSeek_236B",
        "num_layers": 60,
        "hidden_size": 12288,
        "num_attention_heads": 128,
        "ffn_hidden_size": 1536,
        "n_dense_layers": 1,
        "n_shared_expert": 2,
        "num_experts": 160,
        "q_lora_rank": 1536,
        **_DEEPSEEK,
    },
    "deepseek16": {
        "model_name": "DeepSeek_16B",
        "num_layers": 27,
        "hidden_size": 10944,
        "num_attention_heads": 16,
        "ffn_hidden_size": 1408,
        "n_dense_layers": 1,
        "n_shared_expert": 2,
        "num_experts": 64,
        "q_lora_rank": 0,
        **_DEEPSEEK,
    },
}
"""What `-m` sets in the training script, over what was typed."""

LIST_SCRIPT_DEFAULTS = {**SCRIPT_DEFAULTS, "seq_length": 2048}
LIST_PRESETS: dict[str, dict[str, Any]] = {
    **PRESETS,
    "7": {name: value for name, value in PRESETS["7"].items() if name != "tensor_model_parallel_size"},
    "65": {
        "model_name": "llama_65B",
        "num_layers": 80,
        "hidden_size": 8192,
        "ffn_hidden_size": 28672,
        "num_attention_heads": 64,
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel": 2,
    },
    "405": {**PRESETS["405"], "tensor_model_parallel_size": 8, "pipeline_model_parallel": 16},
    "moe": {**PRESETS["moe"], "tensor_model_parallel_size": 2},
}
"""The same of the script of lists."""

SCRIPT_SPELLINGS = {
    "tp": "tensor_model_parallel_size",
    "tp_num": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel",
    "pp_num": "pipeline_model_parallel",
    "ep": "expert_model_parallel_size",
    "sp": "enable_sequence_parallel",
    "sp-enable": "enable_sequence_parallel",
    "topk": "moe_router_topk",
    "experts": "num_experts",
    "aiob": "aiob_enable",
    "flash_attn": "use_flash_attn",
    "recompute": "recompute_activations",
    "grouped_gemm": "moe_grouped_gemm",
}
"""What the training script calls an argument -> its name."""

INFERENCE_SCRIPT_DEFAULTS: dict[str, Any] = {
    "phase": "decode",
    "seq_length": 1024,
    "micro_batch": 32,
    "world_size": 8,
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 8,
    "pipeline_model_parallel": 1,
}
INFERENCE_SCRIPT_MODELS = {
    "deepseek-671B": ("DeepSeek-671B", "deepseek_default.json"),
    "qwen3-235B": ("Qwen3-Moe-235B", "qwen3_moe_default.json"),
    "qwen3-next-80B": ("Qwen3-Next-80B", "qwen3_next_default.json"),
}
"""`-m` -> model and its configuration."""
INFERENCE_SCRIPT_LETTERS = {
    "m": "model_size",
    "c": "config",
    "p": "phase",
    "s": "seq_length",
    "b": "micro_batch",
    "w": "world_size",
    "t": "tensor_model_parallel_size",
    "e": "expert_model_parallel_size",
    "l": "pipeline_model_parallel",
    "M": "moe_enable",
    "r": "result_dir",
    "a": "aiob_enable",
    "f": "aiob_forward_loops",
}


def _read_script(name: str, words: list[str], num_nodes: str) -> Command:
    if name == TRAINING_SCRIPT:
        typed = _script_options(words, TrainingArguments, SCRIPT_SPELLINGS, {"m": "model_size"}, ("model_size",))
        arguments, remarks = _with_preset(typed, SCRIPT_DEFAULTS, PRESETS)
        return Command("SimAI_training_workload_generator", arguments, tuple(remarks))
    if name == LIST_SCRIPT:
        return _read_list_script(words, _script_value(num_nodes, int, "WORLD_SIZE"))
    if name == INFERENCE_SCRIPT:
        return Command("SimAI_inference_workload_generator", _inference_script_arguments(words))
    hint = "give the command that it runs, python -m workload_generator.NAME ..."
    raise InputError(f"the script {name} is not read: it asks the machine it runs on for its GPUs", hint)


def _read_list_script(words: list[str], num_nodes: int) -> Command:
    """The script sets its world to nodes times GPUs, and the batch to `ga_num` micro-batches, over what was typed."""
    extra = ("model_size", "nproc_per_node", "ga_num", "workload_only")
    typed = _script_options(words, TrainingArguments, SCRIPT_SPELLINGS, {"m": "model_size"}, extra, ("workload_only",))
    per_node, ga_num = (
        None if name not in typed else _script_value(typed.pop(name), int, f"--{name}")
        for name in ("nproc_per_node", "ga_num")
    )
    if per_node is None:
        raise InputError(f"{LIST_SCRIPT} asks the machine it runs on for its GPUs", "add --nproc_per_node N")
    if not typed.pop("workload_only", False):
        raise InputError(f"without --workload_only {LIST_SCRIPT} runs a list on GPUs and writes none of its own")
    asked = {name: typed.pop(name) for name in ("world_size", "global_batch") if name in typed}
    world = {"world_size": num_nodes * per_node, "use_distributed_optimizer": True}
    arguments, remarks = _with_preset(typed, {**LIST_SCRIPT_DEFAULTS, **world}, LIST_PRESETS)
    batch = (2 if ga_num is None else ga_num) * arguments.data_parallel * arguments.micro_batch
    arguments = dataclasses.replace(arguments, global_batch=batch)
    remarks += [
        f"the script sets --{name} {getattr(arguments, name)} over {value}"
        for name, value in asked.items()
        if value != getattr(arguments, name)
    ]
    return Command("generate_megatron_workload", arguments, tuple(remarks))


def _with_preset(
    typed: dict[str, Any], defaults: dict[str, Any], presets: dict[str, dict[str, Any]]
) -> tuple[TrainingArguments, list[str]]:
    """Arguments of a script with its preset model, and what that sets over what was typed."""
    size = typed.pop("model_size", "13")
    if size != "deepseek" and size not in presets:
        raise InputError(
            f"the script has no model {size!r}", did_you_mean(size, presets, f"-m is {', '.join(presets)}")
        )
    preset = presets.get(size, {"model_name": "DeepSeek"})
    remarks = [
        f"the script's model {size} sets --{name} {preset[name]} over {value}"
        for name, value in typed.items()
        if name in preset and preset[name] != value
    ]
    return TrainingArguments(**{**defaults, **typed, **preset}), remarks


def _inference_script_arguments(words: list[str]) -> InferenceArguments:
    extra = ("model_size", "config", "result_dir", "aiob_forward_loops", "moe_enable", "aiob_enable")
    typed = _script_options(
        words, InferenceArguments, {}, INFERENCE_SCRIPT_LETTERS, extra, ("moe_enable", "aiob_enable")
    )
    size = typed.pop("model_size", "deepseek-671B")
    if size not in INFERENCE_SCRIPT_MODELS:
        hint = did_you_mean(size, INFERENCE_SCRIPT_MODELS, f"-m is {', '.join(INFERENCE_SCRIPT_MODELS)}")
        raise InputError(f"the script has no model {size!r}", hint)
    model, config = INFERENCE_SCRIPT_MODELS[size]
    typed.setdefault("config", config)
    wanted = {name: value for name, value in typed.items() if name not in extra}
    return InferenceArguments(
        **{**INFERENCE_SCRIPT_DEFAULTS, **wanted, "model_name": model, "config_file": typed["config"]}
    )


def _script_options(
    words: list[str],
    noun: type[Any],
    spellings: dict[str, str],
    letters: dict[str, str],
    extra: tuple[str, ...],
    extra_flags: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The options of a script, which reads `--name value` only and drops everything after one that it does not know."""
    kinds = {one.name: one.type for one in dataclasses.fields(noun)}
    ignored = dict.fromkeys(IGNORED_VALUES, 1) | dict.fromkeys(IGNORED_FLAGS, 0)
    found: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        name = word.lstrip("-")
        name = spellings.get(name, name) if word.startswith("--") else letters.get(name, name)
        if word.startswith("-") and name in ignored and name not in extra:
            position += 1 + ignored[name]
            continue
        if not word.startswith("-") or (name not in kinds and name not in extra):
            raise InputError(
                f"AICB's script stops reading at {word!r} and drops everything after it",
                "it reads --name value, not --name=value" if "=" in word else did_you_mean(name, [*kinds, *spellings]),
            )
        if kinds.get(name) is bool or name in extra_flags:
            found[name] = True
            position += 1
            continue
        if position + 1 == len(words):
            raise InputError(f"a value is missing after {word}")
        found[name] = _script_value(words[position + 1], kinds.get(name, str), word)
        position += 2
    return found


def _script_value(text: str, kind: Any, word: str) -> Any:
    if "int" not in str(kind):
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{word} is {text!r}; a whole number is needed") from None
