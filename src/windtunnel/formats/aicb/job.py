"""AICB's training arguments as a job, and a job as AICB's arguments.

A job says more than AICB can (query groups, uneven stages, schedules, formats); what AICB cannot say is refused, not
dropped. In the other direction, a job is the training run that the arguments name, not the one that AICB writes for
it.
"""

from typing import Any

from windtunnel.errors import InputError
from windtunnel.formats.aicb.arguments import TrainingArguments
from windtunnel.model.shape import (
    Attention,
    DenseFeedForward,
    ExpertsFeedForward,
    FeedForward,
    GroupedQueryAttention,
    LatentAttention,
    LayerGroup,
    ModelSpec,
)
from windtunnel.schema import decode, encode
from windtunnel.training.job import TrainingJob
from windtunnel.training.setup import TrainingSetup


def job_of(arguments: TrainingArguments, device: str) -> TrainingJob:
    """The training run that AICB's arguments describe.

    Raises:
        InputError: they describe none that adds up: a batch or layers that do not divide, where AICB rounds down.
    """
    at = arguments
    if at.frame == "collective_test":
        raise InputError("a test of one collective is no training job", "--compat aicb writes AICB's file")
    if at.global_batch < 1:
        # Of a script that reckons with the world that is typed; --compat aicb writes what AICB makes of it.
        raise InputError(f"AICB's global batch is {at.global_batch}", "add --world_size N, or a larger one")
    is_deepspeed = at.frame == "DeepSpeed"
    fields: dict[str, Any] = {
        "model": encode(_model(at)),
        "device": device,
        "sequence_tokens": at.seq_length,
        "global_batch": at.global_batch,
        "micro_batch": at.micro_batch,
        "num_devices": at.world_size,
        "parallelism": {
            "tp": at.tensor_model_parallel_size,
            "pp": at.pipeline_model_parallel,
            "cp": at.context_parallel_size,
            "ep": at.expert_model_parallel_size,
            "sequence_parallel": at.enable_sequence_parallel,
            # AICB splits every expert over the tensor-parallel ranks, as Megatron-Core did before expert-TP.
            "experts_tp": at.tensor_model_parallel_size if at.moe_enable else None,
        },
        "framework": "deepspeed" if is_deepspeed else "megatron",
        "learned_positions": at.frame == "Megatron",
    }
    if is_deepspeed:
        fields["sharding"] = {"zero": at.stage, "reduce_bucket_elements": at.reduce_bucket_size}
        if at.stage == 3:
            fields["sharding"] |= {
                "prefetch_bucket_elements": at.prefetch_bucket_size,
                "persistence_threshold_elements": at.param_persistence_threshold,
                "max_live_elements": at.max_live_parameters,
            }
        else:
            fields["sharding"]["gather_bucket_elements"] = at.allgather_bucket_size
    else:
        fields["sharding"] = {"zero": 1 if at.use_distributed_optimizer else 0}
    if at.recompute_activations:
        fields["recompute"] = {"granularity": "selective"}
    if at.frame == "DeepSeek":
        fields["precision"] = {"experts_dispatch": "fp8"}
    return decode(fields, TrainingJob, "AICB's arguments")


def _model(at: TrainingArguments) -> ModelSpec:
    attention: Attention
    if at.frame == "DeepSeek":
        attention = LatentAttention(
            num_heads=at.heads,
            q_lora_rank=at.q_lora_rank or None,
            kv_lora_rank=at.kv_lora_rank,
            qk_nope_head_dim=at.qk_nope_dim,
            qk_rope_head_dim=at.qk_rope_dim,
            v_head_dim=at.v_head_dim,
        )
    else:
        attention = GroupedQueryAttention(
            num_heads=at.heads,
            num_kv_heads=at.heads,
            head_dim=at.hidden_size // at.heads,
            qkv_bias=at.add_bias_linear,
            output_bias=at.add_bias_linear,
        )
    gated = at.swiglu or at.frame in ("DeepSeek", "DeepSpeed")
    width = at.feed_forward_size
    dense = DenseFeedForward(intermediate_size=width, gated=gated, bias=at.add_bias_linear)
    feed_forward: FeedForward = dense
    num_dense = 0
    if at.moe_enable:
        feed_forward = ExpertsFeedForward(
            num_experts=at.num_experts,
            experts_per_token=at.moe_router_topk,
            intermediate_size=width,
            shared_intermediate_size=at.n_shared_expert * width if at.frame == "DeepSeek" else 0,
            gated=gated,
        )
        num_dense = min(at.n_dense_layers, at.num_layers) if at.frame == "DeepSeek" else 0
    groups = [(num_dense, dense), (at.num_layers - num_dense, feed_forward)]
    padded = at.vocab_size if at.frame == "DeepSpeed" else at.padded_vocab_size
    return ModelSpec(
        name=at.model_name or "aicb",
        hidden_size=at.hidden_size,
        vocab_size=padded,
        max_context_tokens=at.seq_length,
        layers=tuple(
            LayerGroup(num_layers=count, attention=attention, feed_forward=part) for count, part in groups if count
        ),
    )


def arguments_of(setup: TrainingSetup) -> TrainingArguments:
    """AICB's arguments for a job.

    Raises:
        InputError: the job has something that AICB has no argument for.
    """
    job, known, model = setup.job, setup.degrees, setup.model
    _check(setup)
    attention, feed_forward = model.layers[-1].attention, model.layers[-1].feed_forward
    assert isinstance(attention, GroupedQueryAttention | LatentAttention)
    is_deepspeed = job.framework in ("deepspeed", "fsdp2")
    fields: dict[str, Any] = {
        "frame": "DeepSpeed" if is_deepspeed else "Megatron",
        "model_name": model.name.rsplit("/", 1)[-1],
        "world_size": known.num_devices,
        "tensor_model_parallel_size": known.tp,
        "pipeline_model_parallel": known.pp,
        "global_batch": job.global_batch,
        "micro_batch": job.micro_batch,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "seq_length": job.sequence_tokens,
        "num_attention_heads": attention.num_heads,
        "vocab_size": model.vocab_size,
        "ffn_hidden_size": feed_forward.intermediate_size,
        "swiglu": feed_forward.gated,
        "use_flash_attn": job.kernels.attention != "unfused",
        "enable_sequence_parallel": bool(job.parallelism.sequence_parallel),
        "use_distributed_optimizer": bool(job.sharding.zero),
        "recompute_activations": job.recompute.granularity == "selective",
        "stage": max(job.sharding.zero or 1, 1),
    }
    if isinstance(feed_forward, ExpertsFeedForward):
        fields |= {
            "moe_enable": True,
            "expert_model_parallel_size": known.ep,
            "num_experts": feed_forward.num_experts,
            "moe_router_topk": feed_forward.experts_per_token,
            "moe_grouped_gemm": True,
        }
    if isinstance(attention, LatentAttention):
        assert isinstance(feed_forward, ExpertsFeedForward)
        fields |= {
            "frame": "DeepSeek",
            "n_dense_layers": sum(g.num_layers for g in model.layers if isinstance(g.feed_forward, DenseFeedForward)),
            "n_shared_expert": feed_forward.shared_intermediate_size // feed_forward.intermediate_size,
            "q_lora_rank": attention.q_lora_rank or 0,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_nope_dim": attention.qk_nope_head_dim,
            "qk_rope_dim": attention.qk_rope_head_dim,
            "v_head_dim": attention.v_head_dim,
        }
    return TrainingArguments(**fields)


def _check(setup: TrainingSetup) -> None:
    """Raise InputError for what AICB has no argument for."""
    job, known, model = setup.job, setup.degrees, setup.model
    kinds = {type(group.attention) for group in model.layers}
    refusals = {
        "context parallelism": known.cp > 1,
        "virtual stages": known.virtual_stages > 1,
        "full recomputation": job.recompute.granularity == "full",
        "uneven stages": len(set(setup.layers_per_chunk)) > 1,
        "replicas (HSDP)": known.replicas > 1,
        "layers of this kind of attention": not kinds <= {GroupedQueryAttention, LatentAttention} or len(kinds) > 1,
        "latent attention without experts": kinds == {LatentAttention}
        and not isinstance(model.layers[-1].feed_forward, ExpertsFeedForward),
        "tensor parallelism with ZeRO-3": job.sharding.zero == 3 and known.tp > 1,
    }
    missing = [what for what, is_there in refusals.items() if is_there]
    if missing:
        raise InputError(f"AICB has no argument for {' and '.join(missing)}", "leave --compat out")
