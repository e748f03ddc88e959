"""AICB's shell scripts: their names of arguments, and the preset models that override what is typed."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from windtunnel.errors import InputError, did_you_mean
from windtunnel.formats.aicb.arguments import (
    IGNORED_FLAGS,
    IGNORED_VALUES,
    Command,
    InferenceArguments,
    TrainingArguments,
)
from windtunnel.formats.parsing import parse_whole

T = TypeVar("T")

TRAINING_SCRIPT = "megatron_workload_with_aiob.sh"
LIST_SCRIPT = "megatron_gpt.sh"
ZERO_SCRIPT = "deepspeed_llama.sh"
INFERENCE_SCRIPT = "inference_workload_with_aiob.sh"

GPUS_OF_A_NODE = 8

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


def _preset(name: str, layers: int, hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    """Return a model's arguments: its name, number of layers, hidden size, number of heads, and others."""
    return {
        "model_name": name,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        **({"tensor_model_parallel_size": others.pop("tp")} if "tp" in others else {}),
        **others,
    }


def _deepseek(size: str, layers: int, hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    attention = {"kv_lora_rank": 512, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_head_dim": 128}
    return _preset(f"DeepSeek_{size}", layers, hidden, heads, tp=1, **attention, **others)


_V3 = {"ffn_hidden_size": 2048, "n_dense_layers": 3, "n_shared_expert": 1, "num_experts": 256, "q_lora_rank": 1536}
_V2 = {"ffn_hidden_size": 1536, "n_dense_layers": 1, "n_shared_expert": 2, "num_experts": 160, "q_lora_rank": 1536}
_LITE = {"ffn_hidden_size": 1408, "n_dense_layers": 1, "n_shared_expert": 2, "num_experts": 64, "q_lora_rank": 0}
_MOE = {"ffn_hidden_size": 14336, "moe_enable": True, "moe_grouped_gemm": True}

PRESETS: dict[str, dict[str, Any]] = {
    "7": _preset("gpt_7B", 36, 4096, 32, tp=4),
    "13": _preset("gpt_13B", 40, 5120, 40),
    "22": _preset("gpt_22B", 48, 6144, 64, tp=8),
    "175": _preset("gpt_175B", 96, 12288, 96, tp=8),
    "405": _preset("llama_405B", 128, 16384, 128, ffn_hidden_size=53248),
    "moe": _preset("Mixtral_8*7B", 32, 4096, 32, tp=4, **_MOE),
    "deepseek671": _deepseek("671B", 61, 18432, 128, **_V3),
    "deepseek236": _deepseek("236B", 60, 12288, 128, **_V2),
    "deepseek16": _deepseek("16B", 27, 10944, 16, **_LITE),
}
"""Model of `-m` -> arguments that the training script sets over what was typed."""

LIST_SCRIPT_DEFAULTS = {**SCRIPT_DEFAULTS, "seq_length": 2048}

LIST_PRESETS: dict[str, dict[str, Any]] = {
    **PRESETS,
    "7": _preset("gpt_7B", 36, 4096, 32),
    "65": _preset("llama_65B", 80, 8192, 64, tp=8, ffn_hidden_size=28672, pipeline_model_parallel=2),
    "405": _preset("llama_405B", 128, 16384, 128, tp=8, ffn_hidden_size=53248, pipeline_model_parallel=16),
    "moe": _preset("Mixtral_8*7B", 32, 4096, 32, tp=2, **_MOE),
}
"""The same for the script of lists."""

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
"""Name of an argument in the training script -> AICB's name."""

ZERO_SCRIPT_DEFAULTS: dict[str, Any] = {"frame": "DeepSpeed", "stage": 3, "micro_batch": 4, "epoch_num": 10}
ZERO_PRESETS: dict[str, dict[str, Any]] = {
    "7": _preset("llama_7b", 32, 4096, 32, ffn_hidden_size=11008),
    "13": _preset("llama_13b", 40, 5120, 40, ffn_hidden_size=13824),
    "30": _preset("llama_30b", 60, 6656, 52, ffn_hidden_size=17920),
    "65": _preset("llama_65b", 80, 8192, 64, ffn_hidden_size=22016),
}
_RENAMED = {"zero_stage": "stage", "batch_size": "micro_batch", "seq_len": "seq_length"}
_HYPHENATED = (
    *("epoch_num", "model_size", "model_name", "reduce_bucket_size", "allgather_bucket_size"),
    *("max_live_parameters", "param_persistence_threshold", "contiguous_gradients", *_RENAMED),
)
ZERO_SPELLINGS = _RENAMED | {name.replace("_", "-"): _RENAMED.get(name, name) for name in _HYPHENATED}
"""Name of an argument in the ZeRO script -> AICB's name."""
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
"""Model of `-m` -> name and configuration file."""

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


def read_script(name: str, words: list[str], num_nodes: str) -> Command:
    """Return the command that a script runs.

    Args:
        name: file name of the script.
        words: the words typed after it.
        num_nodes: WORLD_SIZE of its environment.

    Raises:
        InputError: the script is unknown, or would drop a part of what is typed.
    """
    if name == TRAINING_SCRIPT:
        typed = _script_options(words, TrainingArguments, SCRIPT_SPELLINGS, {"m": "model_size"}, ("model_size",))
        arguments, remarks = _with_preset(typed, SCRIPT_DEFAULTS, PRESETS)
        return Command("SimAI_training_workload_generator", arguments, tuple(remarks))
    if name == LIST_SCRIPT:
        return _read_list_script(words, _script_value(num_nodes, int, "WORLD_SIZE"))
    if name == INFERENCE_SCRIPT:
        return Command("SimAI_inference_workload_generator", _inference_script_arguments(words))
    if name == ZERO_SCRIPT:
        return _read_zero_script(words, _script_value(num_nodes, int, "WORLD_SIZE"))
    hint = "give the command that it runs, python -m workload_generator.NAME ..."
    raise InputError(f"the script {name} is not read", hint)


def _read_list_script(words: list[str], num_nodes: int) -> Command:
    """Read the script of lists, which sets its world to nodes times GPUs, and the batch to `ga_num` micro-batches.

    The data parallelism of that batch is that of the typed world, 0 if no world was typed.
    """
    launch = ("nnodes", "node_rank", "master_addr", "master_port")
    extra = ("model_size", "nproc_per_node", "ga_num", "workload_only", *launch)
    typed = _script_options(words, TrainingArguments, SCRIPT_SPELLINGS, {"m": "model_size"}, extra, ("workload_only",))
    per_node, ga_num = (
        None if name not in typed else _script_value(typed.pop(name), int, f"--{name}")
        for name in ("nproc_per_node", "ga_num")
    )
    launched = {name: typed.pop(name) for name in launch if name in typed}
    num_nodes = _script_value(launched.get("nnodes", str(num_nodes)), int, "--nnodes")
    overridden = {name: typed.pop(name) for name in ("world_size", "global_batch") if name in typed}
    writes_nothing = None
    if not typed.pop("workload_only", False):
        writes_nothing = (f"without --workload_only {LIST_SCRIPT} runs a list on GPUs and writes none", "add it")
    if per_node is None:
        per_node = max(overridden.get("world_size", GPUS_OF_A_NODE) // num_nodes, 1)
        writes_nothing = (f"{LIST_SCRIPT} asks the machine it runs on for its GPUs", "add --nproc_per_node N")
    world = {"world_size": num_nodes * per_node, "use_distributed_optimizer": True}
    arguments, remarks = _with_preset(typed, {**LIST_SCRIPT_DEFAULTS, **world}, LIST_PRESETS)
    data_parallel = overridden.get("world_size", 0) // (arguments.world_size // arguments.data_parallel)
    batch = (2 if ga_num is None else ga_num) * data_parallel * arguments.micro_batch
    arguments = dataclasses.replace(arguments, global_batch=batch)
    remarks += [
        f"the script sets --{name} {getattr(arguments, name)} over {value}"
        for name, value in overridden.items()
        if value != getattr(arguments, name)
    ]
    return Command("generate_megatron_workload", arguments, tuple(remarks), writes_nothing)


def _read_zero_script(words: list[str], num_nodes: int) -> Command:
    """Read the ZeRO script, which always runs on GPUs, eight a node, with one micro-batch for each."""
    extra = ("model_size", "workload_only")
    typed = _script_options(
        words, TrainingArguments, ZERO_SPELLINGS, {"m": "model_size"}, extra, extra_flags=("workload_only",)
    )
    typed.pop("workload_only", None)
    preset = _model_of(typed.pop("model_size", "7"), ZERO_PRESETS)
    arguments = TrainingArguments(**{**ZERO_SCRIPT_DEFAULTS, **typed, **preset})
    world = num_nodes * GPUS_OF_A_NODE
    arguments = dataclasses.replace(arguments, world_size=world, global_batch=world * arguments.micro_batch)
    hint = "give the command python -m workload_generator.generate_deepspeed_stage3_workload ..."
    writes_nothing = (f"{ZERO_SCRIPT} asks the machine it runs on for its GPUs", hint)
    generator = "generate_deepspeed_stage3_workload" if arguments.stage == 3 else "generate_deepspeed_stage1_2_workload"
    return Command(generator, arguments, (), writes_nothing)


def _model_of(size: str, models: Mapping[str, T]) -> T:
    if size not in models:
        raise InputError(f"the script has no model {size!r}", did_you_mean(size, models, f"-m is {', '.join(models)}"))
    return models[size]


def _with_preset(
    typed: dict[str, Any], defaults: dict[str, Any], presets: dict[str, dict[str, Any]]
) -> tuple[TrainingArguments, list[str]]:
    """Return a script's arguments with its preset model, and remarks on the arguments that this overrides."""
    size = typed.pop("model_size", "13")
    preset = {"model_name": "DeepSeek"} if size == "deepseek" else _model_of(size, presets)
    remarks = [
        f"the script's model {size} sets --{name} {preset[name]} over {value}"
        for name, value in typed.items()
        if name in preset and preset[name] != value
    ]
    return TrainingArguments(**{**defaults, **typed, **preset}), remarks


def _inference_script_arguments(words: list[str]) -> InferenceArguments:
    flags = ("moe_enable", "aiob_enable")
    extra = ("model_size", "config", "result_dir", "aiob_forward_loops", *flags)
    typed = _script_options(words, InferenceArguments, {}, INFERENCE_SCRIPT_LETTERS, extra, flags)
    model, config = _model_of(typed.pop("model_size", "deepseek-671B"), INFERENCE_SCRIPT_MODELS)
    names = {"model_name": model, "config_file": typed.pop("config", config)}
    arguments = {name: value for name, value in typed.items() if name not in extra}
    return InferenceArguments(**{**INFERENCE_SCRIPT_DEFAULTS, **arguments, **names})


def _script_options(
    words: list[str],
    schema: type[Any],
    spellings: dict[str, str],
    letters: dict[str, str],
    extra: tuple[str, ...],
    extra_flags: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return a script's options; a script reads `--name value` only and drops everything after an unknown option."""
    kinds = {field.name: field.type for field in dataclasses.fields(schema)}
    ignored = dict.fromkeys(IGNORED_VALUES, 1) | dict.fromkeys(IGNORED_FLAGS, 0)
    options: dict[str, Any] = {}
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
            options[name] = True
            position += 1
            continue
        if position + 1 == len(words):
            raise InputError(f"a value is missing after {word}")
        options[name] = _script_value(words[position + 1], kinds.get(name, str), word)
        position += 2
    return options


def _script_value(text: str, kind: Any, word: str) -> Any:
    return parse_whole(text, word, least=None) if "int" in str(kind) else text
