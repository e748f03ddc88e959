"""Write a training job as a shell script with Megatron-LM's arguments; `read` reads it back as the same job."""

import math
import shlex
from collections.abc import Iterator
from typing import Any

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

Option = tuple[str, Any]
"""A name and its value: True for a flag; several words in a tuple; None or False where the option is left out."""


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


def megatron_arguments(setup: TrainingSetup) -> list[tuple[str, ...]]:
    """Return every argument of `setup` that Megatron has, as an option with its values."""
    options = [*_model(setup), *_parallelism(setup), *_arithmetic(setup), *_overlap(setup)]
    return [_words(name, value) for name, value in options if value is not None and value is not False]


def changed_arguments(before: TrainingSetup, after: TrainingSetup) -> tuple[list[str], list[str]]:
    """Return the arguments of `after` that `before` has not, as they are typed, and the names of those it lacks."""
    old, new = megatron_arguments(before), megatron_arguments(after)
    names = {option[0] for option in new}
    return [shlex.join(option) for option in new if option not in old], [one[0] for one in old if one[0] not in names]


def _words(name: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, tuple) else () if value is True else (str(value),)
    return (f"--{name}", *values)


def _wrapped(options: list[tuple[str, ...]]) -> Iterator[str]:
    line = ""
    for option in options:
        text = shlex.join(option)
        if line and len(line) + len(text) > WORDS_OF_A_LINE:
            yield line
            line = ""
        line = f"{line} {text}".strip()
    if line:
        yield line


def _model(setup: TrainingSetup) -> list[Option]:
    model, job = setup.model, setup.job
    attention = model.layers[0].attention
    has_bias = any(getattr(feed_forward, "bias", False) for _, feed_forward in model.feed_forwards)
    qkv_bias = isinstance(attention, GroupedQueryAttention) and attention.qkv_bias
    padded = math.gcd(model.vocab_size // math.gcd(model.vocab_size, setup.degrees.tp), PADDED_TO)
    return [
        ("num-layers", model.num_layers),
        ("hidden-size", model.hidden_size),
        *_attention(model),
        *_feed_forward(model),
        ("seq-length", job.sequence_tokens),
        ("max-position-embeddings", max(job.sequence_tokens, model.max_context_tokens)),
        ("position-embedding-type", "learned_absolute" if job.learned_positions else "rope"),
        ("vocab-size", model.vocab_size),
        ("make-vocab-size-divisible-by", padded if padded != PADDED_TO else None),
        ("normalization", None if model.norm_bias else "RMSNorm"),
        ("untie-embeddings-and-output-weights", not model.tie_word_embeddings),
        ("disable-bias-linear", not has_bias),
        ("add-qkv-bias", qkv_bias and not has_bias),
        *((f"{kind}-dropout", None if job.dropout else "0.0") for kind in ("attention", "hidden")),
        ("mtp-num-layers", job.mtp_layers or None),
        ("micro-batch-size", job.micro_batch),
        ("global-batch-size", job.global_batch),
        ("train-samples", math.ceil(job.total_tokens / job.sequence_tokens) if job.total_tokens is not None else None),
    ]


def _attention(model: ModelSpec) -> list[Option]:
    attention = model.layers[0].attention
    if isinstance(attention, LatentAttention):
        return [
            ("num-attention-heads", attention.num_heads),
            ("multi-latent-attention", True),
            ("q-lora-rank", attention.q_lora_rank),
            *((name, getattr(attention, field)) for field, (name, _) in WORDS["latent_sizes"].items()),
        ]
    if not isinstance(attention, GroupedQueryAttention):
        return []
    is_grouped = attention.num_kv_heads != attention.num_heads
    return [
        ("num-attention-heads", attention.num_heads),
        ("kv-channels", attention.head_dim),
        ("group-query-attention", is_grouped),
        ("num-query-groups", attention.num_kv_heads if is_grouped else None),
        ("qk-layernorm", attention.qk_norm),
    ]


def _feed_forward(model: ModelSpec) -> list[Option]:
    dense = [(num, part) for num, part in model.feed_forwards if isinstance(part, DenseFeedForward)]
    experts = next((part for _, part in model.feed_forwards if isinstance(part, ExpertsFeedForward)), None)
    num_dense = sum(num for num, _ in dense)
    options: list[Option] = [
        ("ffn-hidden-size", dense[0][1].intermediate_size if dense else None),
        ("swiglu", getattr(model.layers[0].feed_forward, "gated", False)),
    ]
    if experts is None:
        return options
    return [
        *options,
        ("ffn-hidden-size", None if dense else experts.intermediate_size),
        ("moe-layer-freq", f"([0]*{num_dense}+[1]*{model.num_layers - num_dense})" if dense else None),
        ("num-experts", experts.num_experts),
        ("moe-router-topk", experts.experts_per_token),
        ("moe-ffn-hidden-size", experts.intermediate_size),
        ("moe-shared-expert-intermediate-size", experts.shared_intermediate_size or None),
        ("moe-latent-size", experts.latent_size or None),
    ]


def _parallelism(setup: TrainingSetup) -> list[Option]:
    degrees, parallelism, has_experts = setup.degrees, setup.job.parallelism, setup.model.has_experts
    zero = setup.job.sharding.zero or 0
    strategy = _word("sharding_strategies", str(zero))
    return [
        ("tensor-model-parallel-size", degrees.tp),
        ("pipeline-model-parallel-size", degrees.pp),
        *_stages(setup),
        ("context-parallel-size", degrees.cp),
        ("cp-comm-type", _word("context_methods", parallelism.cp_method) if degrees.cp > 1 else None),
        ("sequence-parallel", parallelism.sequence_parallel),
        ("expert-model-parallel-size", degrees.ep if has_experts else None),
        ("expert-tensor-parallel-size", degrees.experts_tp if has_experts else None),
        *(_exchange(parallelism.experts_exchange or "all_to_all") if has_experts else ()),
        ("moe-expert-capacity-factor", parallelism.experts_capacity),
        ("moe-pad-expert-input-to-capacity", parallelism.experts_capacity is not None),
        *(("use-megatron-fsdp", zero > 1), ("data-parallel-sharding-strategy", strategy if zero > 1 else None)),
        ("use-distributed-optimizer", bool(zero)),
        ("optimizer-cpu-offload", setup.job.sharding.offload != "none"),
    ]


def _exchange(ours: str) -> list[Option]:
    plain, backend = _word("dispatchers", ours), _word("flex_dispatchers", ours)
    return [("moe-token-dispatcher-type", plain or "flex"), ("moe-flex-dispatcher-backend", backend)]


def _stages(setup: TrainingSetup) -> list[Option]:
    """Return the virtual stages, and the layers of stages that differ from others."""
    layers, virtual_stages = setup.layers_per_chunk, setup.job.parallelism.virtual_stages
    if len(set(layers)) > 1 and not (_counts_ends(layers) if virtual_stages > 1 else len(set(layers[1:-1])) <= 1):
        predicted = "m" * setup.job.mtp_layers
        return [("pipeline-model-parallel-layout", f"E{'|'.join('t' * each for each in layers)}{predicted}L")]
    if virtual_stages > 1:
        return [
            ("num-virtual-stages-per-pipeline-rank", setup.degrees.virtual_stages),
            *((f"account-for-{end}-in-pipeline-split", _counts_ends(layers)) for end in ("embedding", "loss")),
        ]
    if len(set(layers)) > 1:
        ends = {"first": layers[0], "last": layers[-1]}
        return [(f"decoder-{end}-pipeline-num-layers", num_layers) for end, num_layers in ends.items()]
    return []


def _counts_ends(layers: tuple[int, ...]) -> bool:
    """Whether embedding and head count as a layer each: both ends have one fewer than all others."""
    return len(layers) > 2 and set(layers[1:-1]) == {layers[0] + 1} and layers[0] == layers[-1]


def _arithmetic(setup: TrainingSetup) -> list[Option]:
    job, precision, recompute = setup.job, setup.job.precision, setup.job.recompute
    compute, is_full = precision.compute, recompute.granularity == "full"
    is_fp8 = compute != "nvfp4" and compute in WORDS["fp8_recipes"].values()
    modules = tuple(name for name, ours in RECOMPUTED.items() if ours in (recompute.modules or ()))
    return [
        ("fp16", compute == "fp16"),
        ("bf16", compute not in ("fp16", "fp32")),
        ("fp4-format", "e2m1" if compute == "nvfp4" else None),
        ("fp8-format", "hybrid" if is_fp8 else None),
        ("fp8-recipe", _word("fp8_recipes", compute) if is_fp8 else None),
        ("fp8-param-gather", precision.parameter_gather == "fp8"),
        ("grad-reduce-in-bf16", precision.gradients == "bf16"),
        ("accumulate-allreduce-grads-in-fp32", compute == "fp16" and precision.gradients != "bf16"),
        ("optimizer", _word("optimizers", job.optimizer)),
        *_state_formats(setup),
        ("recompute-granularity", None if recompute.granularity == "none" else recompute.granularity),
        ("recompute-modules", modules if recompute.granularity == "selective" else None),
        ("recompute-method", ("uniform" if recompute.num_layers is None else "block") if is_full else None),
        ("recompute-num-layers", recompute.num_layers or 1 if is_full else None),
        ("distribute-saved-activations", recompute.distribute),
        ("attention-backend", str(job.kernels.attention)),
    ]


def _state_formats(setup: TrainingSetup) -> list[Option]:
    precision = setup.job.precision
    if precision.master_weights != "remainder" or precision.moments == "int8":
        return []
    moments = {f"{name}-dtype": precision.moments for name in ("exp-avg", "exp-avg-sq")}
    return [("use-precision-aware-optimizer", True), *moments.items(), ("main-grads-dtype", precision.gradients)]


def _overlap(setup: TrainingSetup) -> list[Option]:
    overlap, sharding = setup.job.overlap, setup.job.sharding
    return [
        *(
            (name, bool(getattr(overlap, field) and (field != "parameter_gather" or sharding.zero)))
            for field, name in WORDS["overlaps"].items()
        ),
        ("no-overlap-p2p-communication", setup.job.parallelism.virtual_stages > 1 and not overlap.pipeline),
    ]


def _unsaid(setup: TrainingSetup) -> Iterator[str]:
    """Yield the parts of the simulated job that no argument says."""
    job, model = setup.job, setup.model
    if job.schedule not in ("1f1b", "interleaved"):
        yield f"the schedule {job.schedule}"
    if job.lora is not None:
        yield f"LoRA of rank {job.lora.rank}"
    if job.optimizer not in WORDS["optimizers"].values():
        yield f"the optimizer {job.optimizer}"
    if job.precision.moments != "fp32" and (job.precision.moments == "int8" or not _state_formats(setup)):
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


def _word(subject: str, ours: str) -> str | None:
    return next((name for name, value in WORDS[subject].items() if value == ours), None)
