"""AICB's training arguments as a job, and a job as AICB's communication list, which its replayer and reports read.

The job is the training run that the arguments name, not the one that AICB writes for it. The list is one pipeline
device's step along the job's own schedule, forward and backward, with the loss, the optimizer's collectives and every
message between stages. Attention's core and memory-bound kernels are no matrix product of two shapes: AICB's format has
no line for them.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from windtunnel.errors import InputError
from windtunnel.formats.aicb.arguments import WORDS, TrainingArguments
from windtunnel.formats.aicb.csv_records import EPOCH_END, Record, RecordList, Stretch
from windtunnel.model import operators as ops
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import Experts, ExpertsFeedForward
from windtunnel.model.shape import Attention, FeedForward, LayerGroup, ModelSpec
from windtunnel.schema import decode, encode
from windtunnel.training.job import TrainingJob
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Group, Rank
from windtunnel.training.program import Action, Exchange, device_program
from windtunnel.training.setup import TrainingSetup


def job_of(arguments: TrainingArguments, device: str) -> TrainingJob:
    """Return the training run that AICB's arguments describe. InputError where they do not add up: a batch or layers
    that do not divide, where AICB rounds down."""
    if arguments.frame == "collective_test":
        raise InputError("a test of one collective is no training job", "--compat aicb writes AICB's file")
    if arguments.global_batch < 1:
        # From a script that computes with the typed world; --compat aicb writes AICB's file for it.
        raise InputError(f"AICB's global batch is {arguments.global_batch}", "add --world_size N, or a larger one")
    fields: dict[str, Any] = {
        "model": encode(_model(arguments)),
        "device": device,
        **{ours: getattr(arguments, theirs) for theirs, ours in WORDS["job"].items()},
        "num_devices": arguments.world_size,
        "parallelism": {
            "tp": arguments.tensor_model_parallel_size,
            "pp": arguments.pipeline_model_parallel,
            "cp": arguments.context_parallel_size,
            "ep": arguments.expert_model_parallel_size,
            "sequence_parallel": arguments.enable_sequence_parallel,
            # AICB splits every expert over the tensor-parallel ranks, as Megatron-Core did before expert-TP.
            "experts_tp": arguments.tensor_model_parallel_size if arguments.moe_enable else None,
        },
        "sharding": {"zero": int(arguments.use_distributed_optimizer)},
        "framework": "deepspeed" if arguments.frame == "DeepSpeed" else "megatron",
        "learned_positions": arguments.frame == "Megatron",
    }
    if arguments.recompute_activations:
        fields["recompute"] = {"granularity": "selective"}
    if arguments.frame == "DeepSeek":
        fields["precision"] = {"experts_dispatch": "fp8"}
    if arguments.frame == "DeepSpeed":
        sizes = WORDS["sharding"]["below_3" if arguments.stage < 3 else "at_3"].items()
        fields["sharding"] = {"zero": arguments.stage, **{ours: getattr(arguments, theirs) for theirs, ours in sizes}}
    return decode(fields, TrainingJob, "AICB's arguments")


def _model(arguments: TrainingArguments) -> ModelSpec:
    attention: Attention
    if arguments.frame == "DeepSeek":
        attention = LatentAttention(
            num_heads=arguments.heads,
            q_lora_rank=arguments.q_lora_rank or None,
            **{ours: getattr(arguments, theirs) for theirs, ours in WORDS["latent_attention"].items()},
        )
    else:
        attention = GroupedQueryAttention(
            num_heads=arguments.heads,
            num_kv_heads=arguments.heads,
            head_dim=arguments.hidden_size // arguments.heads,
            qkv_bias=arguments.add_bias_linear,
            output_bias=arguments.add_bias_linear,
        )
    is_deepseek = arguments.frame == "DeepSeek"
    gated = arguments.swiglu or arguments.frame in ("DeepSeek", "DeepSpeed")
    width = arguments.feed_forward_size
    dense = DenseFeedForward(intermediate_size=width, gated=gated, bias=arguments.add_bias_linear)
    num_dense = arguments.num_layers
    if arguments.moe_enable:
        num_dense = min(arguments.n_dense_layers, arguments.num_layers) if is_deepseek else 0
    groups: list[tuple[int, FeedForward]] = [(num_dense, dense)]
    if num_dense < arguments.num_layers:
        experts = ExpertsFeedForward(
            num_experts=arguments.num_experts,
            experts_per_token=arguments.moe_router_topk,
            intermediate_size=width,
            shared_intermediate_size=arguments.n_shared_expert * width if is_deepseek else 0,
            gated=gated,
        )
        groups.append((arguments.num_layers - num_dense, experts))
    return ModelSpec(
        name=arguments.model_name or "aicb",
        hidden_size=arguments.hidden_size,
        vocab_size=arguments.vocab_size if arguments.frame == "DeepSpeed" else arguments.padded_vocab_size,
        max_context_tokens=arguments.seq_length,
        layers=tuple(
            LayerGroup(num_layers=count, attention=attention, feed_forward=part) for count, part in groups if count
        ),
    )


GROUPS = {
    Group.TENSOR: "tp_group",
    Group.DATA: "dp_group",
    Group.EXPERTS: "ep_group",
    Group.EXPERTS_DATA: "ep_dp_group",
    Group.EMBEDDING: "embedding_group",
    Group.PIPELINE: "pp_group",
}


def training_records(setup: TrainingSetup, device: int = 0) -> RecordList:
    """Return the list of the ranks of one pipeline device. InputError where there is no such device, or the job sends
    over groups that AICB has no name for."""
    rank = Rank(setup)

    @cache
    def records_of(kind: str, tasks: tuple[Task, ...]) -> tuple[Record, ...]:
        return tuple(record for task in tasks for record in _records(rank, task, kind))

    stretches = []
    for action in device_program(setup, device):
        records = (*_message(action, action.receives), *records_of(action.kind, action.tasks))
        stretches.append(Stretch((*records, *_message(action, action.sends))))
    return RecordList((*stretches, Stretch((EPOCH_END,))))


def _message(action: Action, exchange: Exchange | None) -> Iterator[Record]:
    if exchange is not None:
        kind, verb = ("isend", "send") if exchange.is_send else ("irecv", "recv")
        direction = f"{verb}_{'next' if exchange.is_send != exchange.is_gradient else 'prev'}"
        size = round(exchange.size_bytes)
        yield Record(kind, "pp_group", 1, size, f"{action.kind}_step", additional=direction)


def _records(rank: Rank, task: Task, kind: str) -> Iterator[Record]:
    stage = f"{kind}.{task.name}"
    if task.group is None:
        for left, right in _products(rank, task.op):
            yield Record("computation", size=(left, right), stage=stage)
        return
    assert isinstance(task.op, ops.Collective)
    group = _group(rank, task, task.op)
    for _ in range(round(task.count)):
        yield Record(task.op.op, group, task.op.num_ranks, round(float(task.op.message_bytes)), stage)


def _group(rank: Rank, task: Task, op: ops.Collective) -> str:
    degrees = rank.setup.degrees
    if op.num_ranks == degrees.num_devices and rank.layout(task.group or Group.DATA)[0] != op.num_ranks:
        return "all"
    if task.group is Group.EXPERTS_TENSOR and degrees.experts_tp == degrees.tp:
        return "tp_group"
    if task.group not in GROUPS:
        raise InputError(f"AICB's lists have no name for the group {task.group}", "write a Chakra trace")
    return GROUPS[task.group]


def _products(rank: Rank, op: ops.Op) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """Yield shapes of two factors; experts are products of all tokens that this rank computes."""
    if isinstance(op, ops.Gemm):
        yield (round(float(op.m)), round(op.k)), (round(op.k), round(op.n))
    elif isinstance(op, Experts):
        rows = round(float(op.num_tokens) * op.experts_per_token / rank.setup.degrees.ep)
        width = op.intermediate_size // op.tp
        yield (rows, op.hidden_size), (op.hidden_size, width * (2 if op.gated else 1))
        yield (rows, width), (width, op.hidden_size)
