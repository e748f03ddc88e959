"""Write the file that AICB writes for a command line, byte for byte, with its name.

AICB generates workloads from simplified models. This module is for comparisons with results that were made with AICB's
files; `windtunnel.formats.simai` writes correct ones.
"""

from dataclasses import dataclass
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.formats.aicb.aiob_times import MLA_MODULES, AiobTimes, inference_ns, read_aiob_times, training_ns
from windtunnel.formats.aicb.arguments import Command, InferenceArguments, TrainingArguments
from windtunnel.formats.aicb.csv_records import KINDS, Record, RecordList, Stretch, records_text
from windtunnel.formats.aicb.deepspeed import zero_records
from windtunnel.formats.aicb.inference import inference_model, simai_inference, vidur_table
from windtunnel.formats.aicb.megatron import EPOCH_END, megatron_records
from windtunnel.formats.aicb.simai import simai_training
from windtunnel.formats.simai.write import workload_text


@dataclass(frozen=True)
class GeneratedFile:
    """A file as AICB would write it."""

    name: str
    text: str
    remarks: tuple[str, ...] = ()
    """What AICB did with the command that the one who typed it may not expect."""


def generate(command: Command, times: Path | None = None) -> GeneratedFile:
    """What AICB writes for `command`.

    Args:
        command: of `aicb_command.read_command`.
        times: an AIOB file in place of the one that the command names, whose path is AICB's.

    Raises:
        InputError: AICB would fail on the command, or its times are missing or broken.
    """
    arguments = command.arguments
    if command.writes_nothing is not None:
        raise InputError(*command.writes_nothing)
    if isinstance(arguments, InferenceArguments):
        return _inference(command.generator, arguments, times)
    remarks = (*command.remarks, *_remarks(arguments))
    if command.generator == "SimAI_training_workload_generator":
        measured = _times(arguments, times)
        times_ns = training_ns(measured, arguments.recompute_activations) if measured else None
        if measured and arguments.frame == "DeepSeek" and not set(MLA_MODULES) & set(measured.modules):
            remarks += ("the AIOB file times none of DeepSeek's attention: AICB gives it 0 ns",)
        text = workload_text(simai_training(arguments, times_ns))
        return GeneratedFile(_simai_name(arguments), text, remarks)
    if command.generator == "generate_collective_test":
        return GeneratedFile("multi_all_reduce_workload.csv", records_text([_collectives(arguments)]), remarks)
    if command.generator == "generate_megatron_workload":
        name, records = "megatron", megatron_records(arguments)
    else:
        name, records = _zero_name(command.generator, arguments), zero_records(arguments, command.generator)
    return GeneratedFile(_csv_name(name, arguments), records_text([records]), remarks)


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
            f"{arguments.num_microbatches} micro-batches of it"
        )
    if arguments.frame != "collective_test" and arguments.num_layers % arguments.pipeline_model_parallel:
        remarks.append(
            f"--num_layers {arguments.num_layers} is not a multiple of --pipeline_model_parallel "
            f"{arguments.pipeline_model_parallel}: AICB gives every stage {arguments.layers_per_stage}"
        )
    return tuple(remarks)


def _inference(generator: str, arguments: InferenceArguments, times: Path | None) -> GeneratedFile:
    times_ns = inference_ns(read_aiob_times(times)) if times else {}
    at = arguments
    stem = (
        f"{inference_model(at).name}-world_size{at.world_size}-tp{at.tensor_model_parallel_size}"
        f"-pp{at.pipeline_model_parallel}-ep{at.expert_model_parallel_size}-bs{at.micro_batch}-seq{at.seq_length}-{at.phase}"
    )
    if generator == "Vidur_workload_generator":
        return GeneratedFile(f"vidur-{stem}.csv", vidur_table(arguments, times_ns))
    return GeneratedFile(f"{stem}.txt", workload_text(simai_inference(arguments, times_ns)))


def _simai_name(at: TrainingArguments) -> str:
    return (
        f"{at.gpu_type}-{at.model_name}-world_size{at.world_size}-tp{at.tensor_model_parallel_size}"
        f"-pp{at.pipeline_model_parallel}-ep{at.expert_model_parallel_size}-gbs{at.global_batch}-mbs{at.micro_batch}"
        f"-seq{at.seq_length}-MOE-{at.moe_enable}-GEMM-{at.moe_grouped_gemm}-flash_attn-{at.use_flash_attn}.txt"
    )


def _csv_name(generator: str, at: TrainingArguments) -> str:
    computes = at.computation_enable or at.aiob_enable
    name = (
        f"{generator}_{at.model_name}_sp_{at.enable_sequence_parallel}_iteration_{at.epoch_num}"
        f"_computationEnable_{computes}_{at.world_size}n.csv"
    )
    return f"{name.split('.', maxsplit=1)[0]}_workload.csv"


def _zero_name(generator: str, at: TrainingArguments) -> str:
    if generator == "generate_deepspeed_stage3_workload":
        return "deepspeed_stage3"
    return "deepspeed_stage1" if at.stage == 1 else "deepspeed_stage2"


def _collectives(at: TrainingArguments) -> RecordList:
    """AICB's test of one collective: sizes that double, each so many times."""
    if at.test_comm not in KINDS:
        raise InputError(f"--test_comm is {at.test_comm!r}", f"it is one of {', '.join(KINDS)}")
    if at.begin_size < 1:
        raise InputError(f"--begin_size is {at.begin_size}; AICB would double it for ever", "take at least 1")
    warmup = Record(at.test_comm, "dp_group", at.data_parallel, at.begin_size, "warmup")
    stretches = [Stretch((warmup,), at.iter_num), Stretch((EPOCH_END,))]
    group = ("pp_group", at.pipeline_model_parallel) if at.multi_all_reduce_enable else ("dp_group", at.data_parallel)
    steps = 2 if at.pipeline_model_parallel > 1 and at.frame != "collective_test" else 1
    for _ in range(at.epoch_num):
        size = at.begin_size
        test = []
        while size <= at.end_size:
            test.append(Stretch((Record(at.test_comm, *group, size, "test_step"),), at.iter_num))
            size *= 2
        stretches += [*test * steps, Stretch((EPOCH_END,))]
    return RecordList(tuple(stretches))
