"""Write the file that AICB writes for a command line, byte for byte, with its name.

AICB generates workloads from simplified models. This module is for comparisons with results that were made with AICB's
files; `windtunnel.formats.simai` writes correct ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.formats.aicb.aiob_times import AiobTimes, inference_ns, read_aiob_times, training_ns
from windtunnel.formats.aicb.arguments import WORDS, Command, InferenceArguments, TrainingArguments
from windtunnel.formats.aicb.csv_records import EPOCH_END, KINDS, Record, RecordList, Stretch, records_text
from windtunnel.formats.aicb.deepspeed import zero_records
from windtunnel.formats.aicb.inference import inference_model, simai_inference, vidur_table
from windtunnel.formats.aicb.megatron import megatron_records
from windtunnel.formats.aicb.simai import simai_training
from windtunnel.formats.simai.workload import workload_text


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

    `times` is an AIOB file in place of the one that the command names, whose path is AICB's.

    Raises:
        InputError: AICB would fail on the command, or its times are missing or broken.
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
