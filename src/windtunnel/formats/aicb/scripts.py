"""AICB's shell scripts: their names of arguments, and the preset models that override what is typed."""

import dataclasses
from typing import Any

from windtunnel.errors import InputError, did_you_mean
from windtunnel.formats.aicb.arguments import (
    IGNORED_FLAGS,
    IGNORED_VALUES,
    Command,
    InferenceArguments,
    TrainingArguments,
)

TRAINING_SCRIPT = "megatron_workload_with_aiob.sh"

LIST_SCRIPT = "megatron_gpt.sh"

ZERO_SCRIPT = "deepspeed_llama.sh"
INFERENCE_SCRIPT = "inference_workload_with_aiob.sh"

GPUS_OF_A_NODE = 8
FLAGS = ("workload_only",)

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

ZERO_SCRIPT_DEFAULTS: dict[str, Any] = {"frame": "DeepSpeed", "stage": 3, "micro_batch": 4, "epoch_num": 10}
ZERO_PRESETS: dict[str, dict[str, Any]] = {
    size: {
        "model_name": f"llama_{size}b",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": feed_forward,
        "num_attention_heads": heads,
    }
    for size, layers, hidden, feed_forward, heads in (
        ("7", 32, 4096, 11008, 32),
        ("13", 40, 5120, 13824, 40),
        ("30", 60, 6656, 17920, 52),
        ("65", 80, 8192, 22016, 64),
    )
}
ZERO_SPELLINGS = {
    "zero_stage": "stage",
    "zero-stage": "stage",
    "epoch-num": "epoch_num",
    "batch_size": "micro_batch",
    "batch-size": "micro_batch",
    "model-size": "model_size",
    "model-name": "model_name",
    "seq_len": "seq_length",
    "seq-len": "seq_length",
    "reduce-bucket-size": "reduce_bucket_size",
    "allgather-bucket-size": "allgather_bucket_size",
    "max-live-parameters": "max_live_parameters",
    "param-persistence-threshold": "param_persistence_threshold",
    "contiguous-gradients": "contiguous_gradients",
}
"""What the ZeRO script calls an argument -> its name."""

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


def read_script(name: str, words: list[str], num_nodes: str) -> Command:
    """The command that a script runs.

    Args:
        name: the script's file.
        words: what is typed after it.
        num_nodes: its environment's WORLD_SIZE.

    Raises:
        InputError: the script is not known, or would drop a part of what is typed.
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
    """The script sets its world to nodes times GPUs, and the batch to `ga_num` micro-batches, over what was typed.

    The data parallelism of that batch is that of the world which was typed, none if none was.
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
    asked = {name: typed.pop(name) for name in ("world_size", "global_batch") if name in typed}
    writes_nothing = None
    if not typed.pop("workload_only", False):
        writes_nothing = (f"without --workload_only {LIST_SCRIPT} runs a list on GPUs and writes none", "add it")
    if per_node is None:
        per_node = max(asked.get("world_size", GPUS_OF_A_NODE) // num_nodes, 1)
        writes_nothing = (f"{LIST_SCRIPT} asks the machine it runs on for its GPUs", "add --nproc_per_node N")
    world = {"world_size": num_nodes * per_node, "use_distributed_optimizer": True}
    arguments, remarks = _with_preset(typed, {**LIST_SCRIPT_DEFAULTS, **world}, LIST_PRESETS)
    data_parallel = asked.get("world_size", 0) // (arguments.world_size // arguments.data_parallel)
    batch = (2 if ga_num is None else ga_num) * data_parallel * arguments.micro_batch
    arguments = dataclasses.replace(arguments, global_batch=batch)
    remarks += [
        f"the script sets --{name} {getattr(arguments, name)} over {value}"
        for name, value in asked.items()
        if value != getattr(arguments, name)
    ]
    return Command("generate_megatron_workload", arguments, tuple(remarks), writes_nothing)


def _read_zero_script(words: list[str], num_nodes: int) -> Command:
    """The script always runs on GPUs, eight a node, with one micro-batch for each."""
    letters = {"m": "model_size"}
    typed = _script_options(words, TrainingArguments, ZERO_SPELLINGS, letters, ("model_size", "workload_only"), FLAGS)
    typed.pop("workload_only", None)
    size = typed.pop("model_size", "7")
    if size not in ZERO_PRESETS:
        hint = did_you_mean(size, ZERO_PRESETS, f"-m is {', '.join(ZERO_PRESETS)}")
        raise InputError(f"the script has no model {size!r}", hint)
    arguments = TrainingArguments(**{**ZERO_SCRIPT_DEFAULTS, **typed, **ZERO_PRESETS[size]})
    world = num_nodes * GPUS_OF_A_NODE
    arguments = dataclasses.replace(arguments, world_size=world, global_batch=world * arguments.micro_batch)
    hint = "give the command python -m workload_generator.generate_deepspeed_stage3_workload ..."
    writes_nothing = (f"{ZERO_SCRIPT} asks the machine it runs on for its GPUs", hint)
    generator = "generate_deepspeed_stage3_workload" if arguments.stage == 3 else "generate_deepspeed_stage1_2_workload"
    return Command(generator, arguments, (), writes_nothing)


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
