"""AICB's training arguments as a job: the training run that they name, not the one that AICB writes for it."""

from typing import Any

from windtunnel.errors import InputError
from windtunnel.formats.aicb.arguments import WORDS, TrainingArguments
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.shape import Attention, FeedForward, LayerGroup, ModelSpec
from windtunnel.schema import decode, encode
from windtunnel.training.job import TrainingJob


def job_of(arguments: TrainingArguments, device: str) -> TrainingJob:
    """Return the training run that AICB's arguments describe.

    Raises:
        InputError: they do not add up: a batch or layers that do not divide, where AICB rounds down.
    """
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
        "sharding": _sharding(arguments),
        "framework": "deepspeed" if arguments.frame == "DeepSpeed" else "megatron",
        "learned_positions": arguments.frame == "Megatron",
    }
    if arguments.recompute_activations:
        fields["recompute"] = {"granularity": "selective"}
    if arguments.frame == "DeepSeek":
        fields["precision"] = {"experts_dispatch": "fp8"}
    return decode(fields, TrainingJob, "AICB's arguments")


def _sharding(arguments: TrainingArguments) -> dict[str, Any]:
    if arguments.frame != "DeepSpeed":
        return {"zero": 1 if arguments.use_distributed_optimizer else 0}
    sizes = WORDS["sharding"]["below_3" if arguments.stage < 3 else "at_3"]
    return {"zero": arguments.stage, **{ours: getattr(arguments, theirs) for theirs, ours in sizes.items()}}


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
