"""Write a training job as a shell script with Megatron-LM's arguments; `read` reads it back as the same job."""

import math
import shlex
from collections.abc import Iterator

from windtunnel.formats.megatron.read import RECOMPUTED, WORDS
from windtunnel.model.attention.grouped_query import GroupedQueryAttention
from windtunnel.model.attention.latent import LatentAttention
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.feed_forward.experts import ExpertsFeedForward
from windtunnel.model.shape import ModelSpec
from windtunnel.training.setup import TrainingSetup

PADDED_TO = 128
"""Default of `--make-vocab-size-divisible-by`."""
WORDS_OF_A_LINE = 110

Option = tuple[str, ...]


def megatron_script(setup: TrainingSetup) -> str:
    """Return a script that starts a job of the framework `megatron` on one node; comments name the remaining work."""
    num_devices = setup.degrees.num_devices
    per_node = min(setup.node.num_devices, num_devices)
    lines = [
        "#!/bin/sh",
        f"# {setup.model.name} on {num_devices} x {setup.device.title}, for Megatron-LM core_v0.13.",
        "# Set NODE_RANK and MASTER_ADDR on every node; add data, tokenizer, learning rate and checkpoints.",
        *(f"# No argument says: {text}" for text in _unsaid(setup)),
    ]
    command = (
        f"torchrun --nnodes {num_devices // per_node} --nproc_per_node {per_node}"
        ' --node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-localhost}" pretrain_gpt.py'
    )
    return "\n".join([*lines, " \\\n    ".join([command, *_wrapped(megatron_arguments(setup)), '"$@"'])]) + "\n"


def megatron_arguments(setup: TrainingSetup) -> list[Option]:
    """Return every argument of `setup` that Megatron has, as an option with its values."""
    return [*_model(setup), *_batch(setup), *_parallelism(setup), *_arithmetic(setup), *_overlap(setup)]


def _wrapped(options: list[Option]) -> Iterator[str]:
    line = ""
    for option in options:
        text = shlex.join(option)
        if line and len(line) + len(text) > WORDS_OF_A_LINE:
            yield line
            line = ""
        line = f"{line} {text}".strip()
    if line:
        yield line


def _model(setup: TrainingSetup) -> Iterator[Option]:
    model, job = setup.model, setup.job
    attention = model.layers[0].attention
    yield "--num-layers", str(model.num_layers)
    yield "--hidden-size", str(model.hidden_size)
    yield from _attention(model)
    yield from _feed_forward(model)
    yield "--seq-length", str(job.sequence_tokens)
    yield "--max-position-embeddings", str(max(job.sequence_tokens, model.max_context_tokens))
    yield "--position-embedding-type", "learned_absolute" if job.learned_positions else "rope"
    yield "--vocab-size", str(model.vocab_size)
    padded = math.gcd(model.vocab_size // math.gcd(model.vocab_size, setup.degrees.tp), PADDED_TO)
    if padded != PADDED_TO:
        yield "--make-vocab-size-divisible-by", str(padded)
    if not model.norm_bias:
        yield "--normalization", "RMSNorm"
    if not model.tie_word_embeddings:
        yield ("--untie-embeddings-and-output-weights",)
    if not _has_bias(model):
        yield ("--disable-bias-linear",)
        if isinstance(attention, GroupedQueryAttention) and attention.qkv_bias:
            yield ("--add-qkv-bias",)
    if not job.dropout:
        yield "--attention-dropout", "0.0"
        yield "--hidden-dropout", "0.0"


def _has_bias(model: ModelSpec) -> bool:
    return any(getattr(feed_forward, "bias", False) for _, feed_forward in model.feed_forwards)


def _attention(model: ModelSpec) -> Iterator[Option]:
    attention = model.layers[0].attention
    if isinstance(attention, LatentAttention):
        yield "--num-attention-heads", str(attention.num_heads)
        yield ("--multi-latent-attention",)
        if attention.q_lora_rank is not None:
            yield "--q-lora-rank", str(attention.q_lora_rank)
        for field, (name, _) in WORDS["latent_sizes"].items():
            yield f"--{name}", str(getattr(attention, field))
    elif isinstance(attention, GroupedQueryAttention):
        yield "--num-attention-heads", str(attention.num_heads)
        yield "--kv-channels", str(attention.head_dim)
        if attention.num_kv_heads != attention.num_heads:
            yield ("--group-query-attention",)
            yield "--num-query-groups", str(attention.num_kv_heads)
        if attention.qk_norm:
            yield ("--qk-layernorm",)


def _feed_forward(model: ModelSpec) -> Iterator[Option]:
    dense = [(num, part) for num, part in model.feed_forwards if isinstance(part, DenseFeedForward)]
    experts = next((part for _, part in model.feed_forwards if isinstance(part, ExpertsFeedForward)), None)
    if dense:
        yield "--ffn-hidden-size", str(dense[0][1].intermediate_size)
    if getattr(model.layers[0].feed_forward, "gated", False):
        yield ("--swiglu",)
    if experts is None:
        return
    if not dense:
        yield "--ffn-hidden-size", str(experts.intermediate_size)
    else:
        count = sum(num for num, _ in dense)
        yield "--moe-layer-freq", f"([0]*{count}+[1]*{model.num_layers - count})"
    yield "--num-experts", str(experts.num_experts)
    yield "--moe-router-topk", str(experts.experts_per_token)
    yield "--moe-ffn-hidden-size", str(experts.intermediate_size)
    if experts.shared_intermediate_size:
        yield "--moe-shared-expert-intermediate-size", str(experts.shared_intermediate_size)


def _batch(setup: TrainingSetup) -> Iterator[Option]:
    job = setup.job
    yield "--micro-batch-size", str(job.micro_batch)
    yield "--global-batch-size", str(job.global_batch)
    if job.total_tokens is not None:
        yield "--train-samples", str(math.ceil(job.total_tokens / job.sequence_tokens))


def _parallelism(setup: TrainingSetup) -> Iterator[Option]:
    degrees, parallelism = setup.degrees, setup.job.parallelism
    yield "--tensor-model-parallel-size", str(degrees.tp)
    yield "--pipeline-model-parallel-size", str(degrees.pp)
    yield from _stages(setup)
    yield "--context-parallel-size", str(degrees.cp)
    if degrees.cp > 1:
        yield "--cp-comm-type", _word("context_methods", parallelism.cp_method)
    if parallelism.sequence_parallel:
        yield ("--sequence-parallel",)
    if setup.model.has_experts:
        yield "--expert-model-parallel-size", str(degrees.ep)
        yield "--expert-tensor-parallel-size", str(degrees.experts_tp)
    if setup.job.sharding.zero:
        yield ("--use-distributed-optimizer",)


def _stages(setup: TrainingSetup) -> Iterator[Option]:
    """Yield the virtual stages, and the layers of stages that differ from others."""
    layers = setup.layers_per_chunk
    if setup.job.parallelism.virtual_stages > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(setup.degrees.virtual_stages)
        if _counts_ends(layers):
            yield ("--account-for-embedding-in-pipeline-split",)
            yield ("--account-for-loss-in-pipeline-split",)
    elif len(set(layers)) > 1 and len(set(layers[1:-1])) <= 1:
        yield "--decoder-first-pipeline-num-layers", str(layers[0])
        yield "--decoder-last-pipeline-num-layers", str(layers[-1])


def _counts_ends(layers: tuple[int, ...]) -> bool:
    """Whether embedding and head count as a layer each: both ends have one fewer than all others."""
    return len(layers) > 2 and set(layers[1:-1]) == {layers[0] + 1} and layers[0] == layers[-1]


def _arithmetic(setup: TrainingSetup) -> Iterator[Option]:
    job, precision, recompute = setup.job, setup.job.precision, setup.job.recompute
    if precision.compute == "fp16":
        yield ("--fp16",)
    elif precision.compute != "fp32":
        yield ("--bf16",)
    if precision.compute == "nvfp4":
        yield "--fp4-format", "e2m1"
    elif precision.compute in WORDS["fp8_recipes"].values():
        yield "--fp8-format", "hybrid"
        yield "--fp8-recipe", _word("fp8_recipes", precision.compute)
    if precision.parameter_gather == "fp8":
        yield ("--fp8-param-gather",)
    if precision.gradients == "bf16":
        yield ("--grad-reduce-in-bf16",)
    elif precision.compute == "fp16":
        yield ("--accumulate-allreduce-grads-in-fp32",)
    if job.optimizer in WORDS["optimizers"].values():
        yield "--optimizer", _word("optimizers", job.optimizer)
    if recompute.granularity == "selective":
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", *(name for name, ours in RECOMPUTED.items() if ours in (recompute.modules or ()))
    elif recompute.granularity == "full":
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "uniform" if recompute.num_layers is None else "block"
        yield "--recompute-num-layers", str(recompute.num_layers or 1)
    if recompute.distribute:
        yield ("--distribute-saved-activations",)
    yield "--attention-backend", str(job.kernels.attention)


def _overlap(setup: TrainingSetup) -> Iterator[Option]:
    overlap = setup.job.overlap
    for field, name in WORDS["overlaps"].items():
        if getattr(overlap, field) and (field != "parameter_gather" or setup.job.sharding.zero):
            yield (f"--{name}",)
    if setup.job.parallelism.virtual_stages > 1 and not overlap.pipeline:
        yield ("--no-overlap-p2p-communication",)


def _unsaid(setup: TrainingSetup) -> Iterator[str]:
    """Yield the parts of the simulated job that no argument says."""
    job, model = setup.job, setup.model
    if job.schedule not in ("1f1b", "interleaved"):
        yield f"the schedule {job.schedule}"
    layers = setup.layers_per_chunk
    can_say = _counts_ends(layers) if job.parallelism.virtual_stages > 1 else len(set(layers[1:-1])) <= 1
    if len(set(layers)) > 1 and not can_say:
        yield f"layers of the stages: {list(layers)}"
    if (job.sharding.zero or 0) > 1:
        yield f"ZeRO {job.sharding.zero}: Megatron shards the optimizer's state"
    if job.lora is not None:
        yield f"LoRA of rank {job.lora.rank}"
    if job.optimizer not in WORDS["optimizers"].values():
        yield f"the optimizer {job.optimizer}"
    if job.precision.moments != "fp32":
        yield f"moments in {job.precision.moments}"
    if job.recompute.granularity == "selective":
        for module in job.recompute.modules or ():
            if module not in RECOMPUTED.values() or (module == "activation" and not model.has_experts):
                yield f"recomputation of {module.replace('_', ' ')}"
    kinds = {type(group.attention) for group in model.layers}
    if len(kinds) > 1 or not kinds <= {GroupedQueryAttention, LatentAttention}:
        yield "linear attention, as some of the model's layers have it"
    if any(attention.window_tokens for _, attention in model.attentions):
        yield "the sliding window of some of the model's layers"


def _word(subject: str, ours: str) -> str:
    """Return Megatron's first word for ours."""
    return next(name for name, value in WORDS[subject].items() if value == ours)
