"""Write the file that AICB writes for a command line, byte for byte, with its name.

AICB generates workloads from simplified models. This module is for comparisons with results that were made with AICB's
files; `windtunnel.formats.simai` writes correct ones.

Of inference it writes `.txt` for SimAI, and tables for the Vidur that AICB's authors changed: one forward pass of
DeepSeek, Qwen3-MoE or Qwen3-Next, without embedding, head and, in Qwen3-Next, the shared expert
(SimAI_inference_workload_generator.py, Vidur_workload_generator.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError
from windtunnel.files import decode_json
from windtunnel.formats.aicb.aiob_times import AiobTimes, inference_ns, read_aiob_times, training_ns
from windtunnel.formats.aicb.arguments import WORDS, Command, InferenceArguments, TrainingArguments
from windtunnel.formats.aicb.csv_records import EPOCH_END, KINDS, Record, RecordList, Stretch, records_text
from windtunnel.formats.aicb.deepspeed import zero_records
from windtunnel.formats.aicb.megatron import megatron_records
from windtunnel.formats.aicb.simai import FP8_SHARE, NOTHING, UNIT, simai_training
from windtunnel.formats.simai.workload import Block, FilePhase, Header, SimaiWorkload, WorkloadLayer, workload_text


@dataclass(frozen=True)
class InferenceModel:
    """The parts of a model that a workload depends on."""

    name: str
    frame: str
    hidden_size: int
    topk: int
    layers: tuple[tuple[str, ...], ...]
    """The modules of each layer."""


def inference_model(arguments: InferenceArguments) -> InferenceModel:
    """Return the model of a command. InputError for an unknown family, or a configuration that is missing, broken or
    lacks a key."""
    families: Mapping[str, str] = WORDS["families"]
    family = next((name for name in families if name in arguments.model_name), None)
    if family is None:
        names = ", ".join(families)
        raise InputError(f"AICB has no inference model {arguments.model_name!r}", f"its name holds one of {names}")
    if arguments.config_file is None:
        shipped = ", ".join(WORDS["configurations"])
        raise InputError("AICB fails without a configuration file", f"shipped are {shipped}")
    path = Path(arguments.config_file)
    config: dict[str, Any] | None = WORDS["configurations"].get(path.name)
    if config is None or path.exists():
        config = decode_json(path, dict[str, Any], "a configuration of AICB's")
    try:
        layers = tuple(_deepseek_layers(config) if family == "DeepSeek" else _qwen_layers(config, family))
        topk = config["moe_router_topk"] if "moe_router_topk" in config else config["num_experts_per_tok"]
        name, frame = config.get("model_name", families[family]), config.get("frame", family)
        return InferenceModel(name, frame, config["hidden_size"], topk, layers)
    except KeyError as error:
        raise InputError(f"{arguments.config_file} has no {error.args[0]!r}, which AICB needs") from None


def _deepseek_layers(config: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    for position in range(config["num_layers"]):
        if position < config["dense_layer"]:
            yield ("attention_layer", "dense_mlp")
        else:
            yield ("attention_layer", *["shared_experts"] * config["shared_experts"], "moe_expert")


def _qwen_layers(config: Mapping[str, Any], family: str) -> Iterable[tuple[str, ...]]:
    for position in range(config["num_hidden_layers"]):
        is_full = family == "Qwen3-Moe" or (position + 1) % config["full_attention_interval"] == 0
        attention = "attention_layer" if is_full else "attention_gdn"
        yield ("attention_norm", attention, "moe_norm", "moe_route", "moe_expert")


@dataclass(frozen=True)
class _Sizes:
    tensor_parallel: int
    dispatch: int
    combine: int


def _sizes(arguments: InferenceArguments, model: InferenceModel) -> _Sizes:
    """Return message sizes in bytes; a prefill is one sequence, whatever the batch.

    Tokens are sent to the experts of DeepSeek and Qwen3 in fp8, with their scales.
    """
    tokens = arguments.micro_batch if arguments.phase == "decode" else arguments.seq_length
    hidden_states = 2 * tokens * model.hidden_size
    combine = hidden_states * model.topk // arguments.tensor_model_parallel_size
    sends_fp8 = "DeepSeek" in model.frame or "Qwen3" in model.frame
    return _Sizes(hidden_states, int(combine * FP8_SHARE) if sends_fp8 else combine, combine)


def _compute_ns(name: str, times_ns: Mapping[str, int]) -> int:
    return times_ns.get("mlp" if name in ("shared_experts", "dense_mlp") else name, 1)


def simai_inference(arguments: InferenceArguments, times_ns: Mapping[str, int]) -> SimaiWorkload:
    """Return the `.txt` workload that AICB generates; modules without a time in `times_ns` take a nanosecond."""
    model = inference_model(arguments)
    sizes = _sizes(arguments, model)
    lines = [
        line for layer in model.layers for name in layer for line in _lines(name, arguments, model, sizes, times_ns)
    ]
    between_stages = 2 * arguments.micro_batch * arguments.seq_length * model.hidden_size
    header = Header(
        tp=arguments.tensor_model_parallel_size,
        ep=arguments.expert_model_parallel_size,
        pp=arguments.pipeline_model_parallel,
        vpp=1,
        num_microbatches=1,
        num_devices=arguments.world_size,
        pp_comm_bytes=between_stages if arguments.pipeline_model_parallel > 1 else 0,
        inference=True,
    )
    return SimaiWorkload(header, (Block(tuple(lines)),))


def _lines(
    name: str, arguments: InferenceArguments, model: InferenceModel, sizes: _Sizes, times_ns: Mapping[str, int]
) -> Iterable[WorkloadLayer]:
    compute_ns = _compute_ns(name, times_ns)
    if "norm" in name or name == "shared_experts":
        yield WorkloadLayer(name, FilePhase(compute_ns), NOTHING, NOTHING)
    elif name in ("moe_route", "moe_expert"):
        if name == "moe_expert" and model.frame == "DeepSeek":
            yield WorkloadLayer("moe_route", FilePhase(1, "ALLTOALL_EP", sizes.dispatch), UNIT, UNIT)
        size = sizes.dispatch if name == "moe_route" else sizes.combine
        yield WorkloadLayer(name, FilePhase(compute_ns, "ALLTOALL_EP", size), UNIT, UNIT)
    else:
        is_split = arguments.tensor_model_parallel_size > 1
        forward = FilePhase(compute_ns, "ALLREDUCE", sizes.tensor_parallel) if is_split else FilePhase(compute_ns)
        yield WorkloadLayer(name, forward, NOTHING, NOTHING)


def vidur_table(arguments: InferenceArguments, times_ns: Mapping[str, int]) -> str:
    """Return a tab-separated table: nanoseconds and bytes of each layer's attention, feed-forward and experts."""
    model = inference_model(arguments)
    sizes = _sizes(arguments, model)
    split = sizes.tensor_parallel if arguments.tensor_model_parallel_size > 1 else 0
    rows = ["layer_id\tlayer_name\tcomp_time\tcomm_size"]
    for position, layer in enumerate(model.layers):
        compute_ns: dict[str, int] = {}
        for name in layer:
            part = "attention" if "attention" in name else "mlp" if "mlp" in name else "moe"
            compute_ns[part] = compute_ns.get(part, 0) + _compute_ns(name, times_ns)
        for part, total_ns in compute_ns.items():
            size = sizes.dispatch + sizes.combine if part == "moe" else split
            rows.append(f"{position}\t{part}\t{total_ns}\t{size}")
    return "\n".join(rows) + "\n"


@dataclass(frozen=True)
class GeneratedFile:
    """A file as AICB would write it."""

    name: str
    text: str
    remarks: tuple[str, ...] = ()
    """Changes that AICB made to the command in silence."""


NAMES: Mapping[str, str] = WORDS["file_names"]


def generate(command: Command, times: Path | None = None) -> GeneratedFile:
    """Return the file that AICB writes for `command`.

    `times` is an AIOB file in place of the one that the command names, whose path is AICB's. InputError where AICB
    would fail on the command, or its times are missing or broken.
    """
    arguments, generator = command.arguments, command.generator
    if command.writes_nothing is not None:
        raise InputError(*command.writes_nothing)
    if isinstance(arguments, InferenceArguments):
        times_ns = inference_ns(read_aiob_times(times)) if times else {}
        stem = NAMES["inference"].format(model=inference_model(arguments).name, **vars(arguments))
        if generator == "Vidur_workload_generator":
            return GeneratedFile(f"vidur-{stem}.csv", vidur_table(arguments, times_ns))
        return GeneratedFile(f"{stem}.txt", workload_text(simai_inference(arguments, times_ns)))
    remarks = (*command.remarks, *_remarks(arguments))
    if generator == "SimAI_training_workload_generator":
        measured = _times(arguments, times)
        training_times = training_ns(measured, arguments.recompute_activations) if measured else None
        if measured and arguments.frame == "DeepSeek" and not set(WORDS["latent_modules"]) & set(measured.modules):
            remarks += ("the AIOB file times none of DeepSeek's attention: AICB gives it 0 ns",)
        text = workload_text(simai_training(arguments, training_times))
        return GeneratedFile(NAMES["simai"].format(**vars(arguments)), text, remarks)
    if generator == "generate_collective_test":
        return GeneratedFile("multi_all_reduce_workload.csv", records_text([_collectives(arguments)]), remarks)
    if generator == "generate_megatron_workload":
        name, records = "megatron", megatron_records(arguments)
    else:
        stage = 3 if generator == "generate_deepspeed_stage3_workload" else min(arguments.stage, 2)
        name, records = f"deepspeed_stage{stage}", zero_records(arguments, generator)
    computes = arguments.computation_enable or arguments.aiob_enable
    stem = NAMES["list"].format(generator=name, computes=computes, **vars(arguments)).split(".", maxsplit=1)[0]
    return GeneratedFile(f"{stem}_workload.csv", records_text([records]), remarks)


def _times(arguments: TrainingArguments, times: Path | None) -> AiobTimes | None:
    if not arguments.aiob_enable:
        return None
    if times is None and arguments.comp_filepath is None:
        raise InputError("AICB would measure times on a GPU of its own for --aiob_enable", "give it --comp_filepath")
    return read_aiob_times(times or Path(arguments.comp_filepath or ""))


def _remarks(arguments: TrainingArguments) -> tuple[str, ...]:
    remarks = []
    ranks = arguments.data_parallel * arguments.micro_batch
    if arguments.frame != "collective_test" and arguments.global_batch % ranks:
        remarks.append(
            f"--global_batch {arguments.global_batch} is not a multiple of dp x micro_batch = {ranks}: AICB makes "
            f"{arguments.num_microbatches} microbatches of it"
        )
    if arguments.frame != "collective_test" and arguments.num_layers % arguments.pipeline_model_parallel:
        remarks.append(
            f"--num_layers {arguments.num_layers} is not a multiple of --pipeline_model_parallel "
            f"{arguments.pipeline_model_parallel}: AICB gives every stage {arguments.layers_per_stage}"
        )
    return tuple(remarks)


def _collectives(arguments: TrainingArguments) -> RecordList:
    """Return AICB's test of one collective: sizes that double, each `iter_num` times."""
    kind, begin_size, dp = arguments.test_comm, arguments.begin_size, arguments.data_parallel
    if kind not in KINDS:
        raise InputError(f"--test_comm is {kind!r}", f"it is one of {', '.join(KINDS)}")
    if begin_size < 1:
        raise InputError(f"--begin_size is {begin_size}; AICB would double it for ever", "take at least 1")
    warmup = Record(kind, "dp_group", dp, begin_size, "warmup")
    stretches = [Stretch((warmup,), arguments.iter_num), Stretch((EPOCH_END,))]
    pp = arguments.pipeline_model_parallel
    group = ("pp_group", pp) if arguments.multi_all_reduce_enable else ("dp_group", dp)
    steps = 2 if pp > 1 and arguments.frame != "collective_test" else 1
    sizes = takewhile(lambda size: size <= arguments.end_size, (begin_size << doubling for doubling in count()))
    test = [Stretch((Record(kind, *group, size, "test_step"),), arguments.iter_num) for size in sizes]
    for _ in range(arguments.epoch_num):
        stretches += [*test * steps, Stretch((EPOCH_END,))]
    return RecordList(tuple(stretches))
