"""A training step as operators: what one rank of every pipeline chunk computes and sends, forward and backward.

A layer is a list of `Part`s in the order of the forward pass. Each part knows its forward tasks, the tasks that give
the gradient of its input and those that give the gradient of its weights, and the bytes that it keeps between the two.
Everything else follows from the parts: step time, recomputation, bytes on each link, activation memory. A chunk is
described once, whatever the number of micro-batches or ranks.

Sources: Megatron-LM (arXiv:2104.04473) for tensor parallelism, arXiv:2205.05198 for sequence parallelism and kept
activations, arXiv:1910.02054 for ZeRO, arXiv:2310.01889 for ring attention.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from windtunnel.ops import op as ops
from windtunnel.ops.parameters import (
    attention_parameters,
    dense_parameters,
    expert_parameters,
    inner_norm_parameters,
    router_parameters,
    shared_expert_parameters,
)
from windtunnel.spec.model import (
    DenseFeedForward,
    ExpertsFeedForward,
    GatedDeltaAttention,
    GroupedQueryAttention,
    LatentAttention,
    LayerGroup,
)
from windtunnel.spec.precision import ACTIVATION_BITS, Format
from windtunnel.spec.training import GEMM_FORMATS, V_SCHEDULES, TrainingSetup

BF16_BYTES = 2.0
WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}

ATTENTION_BACKWARD_FLOPS = 2.5
"""Backward FLOPs of attention's core against forward: five products for two (arXiv:2307.08691, section 3.2)."""
ATTENTION_BACKWARD_EFFICIENCY = 0.86
"""Rate of flash attention's backward kernel against its forward one: 63% for 73% of an A100's peak (arXiv:2307.08691,
section 1), 550 for 640 TFLOP/s on an H100, causal, 16k tokens (arXiv:2407.08608, figures 5 and 6)."""


FLASH2_SLOWDOWN = {"hopper": 1.75}
"""Time of FlashAttention-2 against FlashAttention-3, by architecture: 1.5 to 2.0 on H100 (arXiv:2407.08608, abstract).
On others it is what was measured, or nothing was published."""

GROUPED_EFFICIENCY = 0.7
"""Rate of grouped GEMMs against dense ones of the same rows: median over four models' experts, 65,536 tokens, bf16 and
fp8, on H100, B200 and GB200 in the tables of aiconfigurator-core 0.12 (0.53 to 0.93)."""


UNALIGNED_SLOWDOWN = 4.0
"""Batched products of 16-bit values whose head size is no multiple of 8 (16 bytes): the tensor cores' rate against that
of the CUDA cores, 312 and 78 TFLOP/s on an A100."""


class Group(StrEnum):
    """The ranks that a collective joins."""

    TENSOR = "tp"
    CONTEXT = "cp"
    EXPERTS = "ep"
    EXPERTS_TENSOR = "experts_tp"
    DATA = "dp"
    """`dp x cp` ranks, or the shard group inside them."""
    REPLICAS = "replicas"
    """Shard groups of one job (HSDP)."""
    EXPERTS_DATA = "experts_dp"
    PIPELINE = "pp"
    EMBEDDING = "embedding"
    """First and last stage, where they share the embedding."""


@dataclass(frozen=True)
class Task:
    """An operator at its place in a layer. One rank's, for one micro-batch."""

    name: str
    op: ops.Op
    count: float = 1.0
    group: Group | None = None
    """Of a collective; None: computation."""
    beside: str | None = None
    """The computation, by name, that a collective runs next to; None: everything waits for it."""
    pieces: int = 1
    """Pieces in which the collective and that computation are cut (1: whole, with nothing depending on it)."""
    flops_factor: float = 1.0
    """FLOPs against `op.flops`, where `count` stands for time only."""

    @property
    def flops(self) -> float:
        return float(self.op.flops) * self.flops_factor

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends."""
        return float(self.op.num_bytes) * self.count if self.group else 0.0


@dataclass(frozen=True)
class Part:
    """A piece of a layer: its tasks in each phase, and what it keeps."""

    name: str
    forward: tuple[Task, ...]
    backward_input: tuple[Task, ...]
    backward_weight: tuple[Task, ...] = ()
    kept_bytes: float = 0.0
    """Activations kept from forward to backward."""
    module: str | None = None
    """What selective recomputation calls it."""


@dataclass(frozen=True)
class Work:
    """One micro-batch through one chunk of one rank."""

    forward: tuple[Task, ...]
    backward_input: tuple[Task, ...]
    """Recomputation included, at its head."""
    backward_weight: tuple[Task, ...]
    recomputed: tuple[Task, ...]
    kept_bytes: float
    """Of one micro-batch, between its forward and its backward pass."""
    transient_bytes: float
    """Beside that while one layer is recomputed and differentiated."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank."""

    dense: float = 0.0
    experts: float = 0.0

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    def __mul__(self, count: float) -> "Parameters":
        return Parameters(self.dense * count, self.experts * count)

    @property
    def total(self) -> float:
        return self.dense + self.experts


@dataclass(frozen=True)
class Chunk:
    """Neighbouring layers that one device runs together. `layers` are groups with how many of each it holds."""

    index: int
    """In the order of the forward pass."""
    stage: int
    """The device of the pipeline that holds it."""
    layers: tuple[tuple[LayerGroup, float], ...]
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> float:
        return sum(count for _, count in self.layers)

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides a chunk's work: equal chunks of a pipeline are priced once."""
        return (self.layers, self.has_embedding, self.has_head)


def chunks(setup: TrainingSetup) -> tuple[Chunk, ...]:
    """Every chunk of the pipeline, in the order of the forward pass.

    Groups of layers that differ in their feed-forward come one after the other, as the model lists them (DeepSeek's
    dense layers first); groups that differ in attention alone alternate, so that every chunk has its share.
    """
    known = setup.degrees
    runs: list[tuple[float, list[LayerGroup]]] = []
    for group in setup.model.layers:
        if runs and runs[-1][1][0].feed_forward == group.feed_forward:
            runs[-1] = (runs[-1][0] + group.num_layers, [*runs[-1][1], group])
        else:
            runs.append((float(group.num_layers), [group]))
    found = []
    for index, wanted in enumerate(setup.layers_per_chunk):
        held: list[tuple[LayerGroup, float]] = []
        left = float(wanted)
        while left > 0:
            num_layers, groups = runs[0]
            taken = min(left, num_layers)
            total = sum(group.num_layers for group in groups)
            held += [(group, taken * group.num_layers / total) for group in groups]
            left -= taken
            if taken == num_layers:
                runs.pop(0)
            else:
                runs[0] = (num_layers - taken, groups)
        last = index == known.num_chunks - 1
        found.append(Chunk(index, stage_of(setup, index), tuple(held), index == 0, last))
    return tuple(found)


def stage_of(setup: TrainingSetup, chunk: int) -> int:
    """The device of the pipeline that holds a chunk (of DualPipe's two, the one whose direction is forward)."""
    pp = setup.degrees.pp
    if setup.job.schedule in V_SCHEDULES:
        return chunk if chunk < pp else 2 * pp - 1 - chunk
    return chunk % pp


@dataclass(frozen=True)
class Rank:
    """One rank of a job, as the operators of its layers need to know it."""

    setup: TrainingSetup

    @property
    def width(self) -> int:
        return self.setup.model.hidden_size

    @property
    def tp(self) -> int:
        return self.setup.degrees.tp

    @property
    def tokens(self) -> float:
        """Of one micro-batch on one rank, after context parallelism."""
        job = self.setup.job
        return job.micro_batch * job.sequence_tokens / self.setup.degrees.cp

    @property
    def split(self) -> bool:
        """Whether norms and residuals are split along the sequence."""
        return bool(self.setup.job.parallelism.sequence_parallel) and self.tp > 1

    @property
    def rows(self) -> float:
        """Tokens of the parts that sequence parallelism splits."""
        return self.tokens / self.tp if self.split else self.tokens

    @property
    def format(self) -> Format:
        return GEMM_FORMATS[self.setup.job.precision.compute]

    @property
    def kept_input_bytes(self) -> float:
        """Bytes of one value of a linear layer's kept input."""
        return ACTIVATION_BITS[self.format] / 8

    @property
    def passes(self) -> float:
        """Times that a value moves in an unfused chain of kernels against a fused one.

        Eager PyTorch runs norms, activations and residuals as kernels of one operation each. A SwiGLU moves 8 values
        for 3, an RMSNorm in fp32 about 9 for 4 (counted in the operations of torch 2.4's modules).
        """
        return 1.0 if self.setup.job.kernels.fused else 2.5

    def spread(self, num_ranks: int, stride: int) -> int:
        """Nodes over which `num_ranks` ranks that lie `stride` apart are spread."""
        per_node = max(self.setup.node.num_devices // stride, 1)
        return -(-num_ranks // per_node)

    def collective(self, group: Group, op: str, message_bytes: float) -> ops.Collective:
        """A collective over one of the job's groups; ranks are numbered tp, cp, ep, dp, pp, the first fastest."""
        num_ranks, stride = self.layout(group)
        return ops.Collective(op, message_bytes, num_ranks, self.spread(num_ranks, stride))

    def layout(self, group: Group) -> tuple[int, int]:
        """Ranks of a group, and how far apart neighbours are."""
        known = self.setup.degrees
        experts = known.experts_tp * known.ep
        return {
            Group.TENSOR: (known.tp, 1),
            Group.CONTEXT: (known.cp, known.tp),
            Group.EXPERTS: (known.ep, known.experts_tp),
            Group.EXPERTS_TENSOR: (known.experts_tp, 1),
            Group.DATA: (known.shard_group, known.tp),
            Group.REPLICAS: (known.replicas, known.tp * known.shard_group),
            Group.EXPERTS_DATA: (known.experts_dp, experts),
            Group.PIPELINE: (2, known.num_devices // known.pp),
            Group.EMBEDDING: (2, known.num_devices // known.pp),
        }[group]


def layer_parts(rank: Rank, group: LayerGroup) -> tuple[Part, ...]:
    """One layer, part by part, in the order of the forward pass."""
    return tuple(
        part
        for part in (
            _norm(rank, "input_norm"),
            *_attention_parts(rank, group),
            _residual(rank, "attention_residual"),
            *([_norm(rank, "post_attention_norm", group.num_norms - 1)] if group.num_norms > 1 else []),
            *_feed_forward_parts(rank, group),
            _residual(rank, "feed_forward_residual"),
        )
    )


def embedding_parts(rank: Rank) -> tuple[Part, ...]:
    """The look-up of the (vocabulary-parallel) embedding table."""
    look_up = ops.Elementwise("embedding", rank.tokens, 2 * rank.width * BF16_BYTES)
    scatter = ops.Elementwise("embedding_gradient", rank.tokens, 3 * rank.width * BF16_BYTES)
    masked = rank.rows * rank.width * (1.0 if rank.setup.job.dropout else 0.0)
    table = Part(
        "embedding", (Task("embedding", look_up),), (), (Task("embedding_gradient", scatter),), kept_bytes=masked
    )
    return (table, *_leave_tensor_parallel(rank, "embedding", rank.width))


def head_parts(rank: Rank) -> tuple[Part, ...]:
    """Final norm, head in 16 bit and cross entropy over a split vocabulary."""
    model = rank.setup.model
    vocabulary = -(-model.vocab_size // rank.tp)
    fused = bool(rank.setup.job.kernels.fused)
    # bf16 logits become fp32 once; max, sum of exponentials and the gradient read them. Eager PyTorch keeps the fp32
    # logits, their log-softmax and the gradient.
    passes, kept = (2.0 + 3 * 4.0, 2.0 + 4.0) if fused else (2.0 + 6 * 4.0, 2.0 + 2 * 4.0)
    loss = ops.Elementwise("cross_entropy", rank.tokens, vocabulary * passes)
    gradient = ops.Elementwise("cross_entropy_gradient", rank.tokens, vocabulary * (4.0 + 2.0))
    reductions: tuple[Task, ...] = ()
    if rank.tp > 1:
        reduce = rank.collective(Group.TENSOR, "all_reduce", rank.tokens * 4.0)
        reductions = (Task("cross_entropy_all_reduce", reduce, 3.0, Group.TENSOR),)
    entropy = Part(
        "cross_entropy",
        (Task("cross_entropy", loss), *reductions),
        (Task("cross_entropy_gradient", gradient),),
        kept_bytes=rank.tokens * vocabulary * kept,
    )
    return (
        _norm(rank, "final_norm"),
        *_enter_tensor_parallel(rank, "lm_head", rank.width),
        _linear(rank, "lm_head", rank.tokens, vocabulary, rank.width, Format.BF16, rank.rows * rank.width * BF16_BYTES),
        entropy,
    )


def _norm(rank: Rank, name: str, count: int = 1) -> Part:
    """Reads and writes the hidden states; its gradient reads input and gradient and writes one."""
    width, passes = rank.width, rank.passes
    forward = ops.Elementwise("norm", rank.rows, 2 * width * BF16_BYTES * passes)
    backward = ops.Elementwise("norm_gradient", rank.rows, 3 * width * BF16_BYTES * passes)
    return Part(
        name,
        (Task(name, forward, count),),
        (Task(f"{name}_gradient", backward, count),),
        kept_bytes=rank.rows * width * BF16_BYTES * count,
        module="norms",
    )


def _residual(rank: Rank, name: str) -> Part:
    """Residual addition, with the bias and dropout where there are any."""
    width = rank.width
    mask = 1.0 if rank.setup.job.dropout else 0.0
    passes = (rank.passes + 1.5) / 2.5 if mask == 0 else rank.passes
    forward = ops.Elementwise("residual", rank.rows, width * (3 * BF16_BYTES + mask) * passes)
    backward = ops.Elementwise("residual_gradient", rank.rows, width * (2 * BF16_BYTES + mask) * passes)
    return Part(
        name, (Task(name, forward),), (Task(f"{name}_gradient", backward),), kept_bytes=rank.rows * width * mask
    )


def _linear(
    rank: Rank,
    name: str,
    rows: float,
    num_outputs: int,
    num_inputs: int,
    number_format: Format | None = None,
    kept_bytes: float | None = None,
    module: str | None = None,
) -> Part:
    """A linear layer: `[rows, in] x [in, out]`, the gradient of its input and that of its weights."""
    wanted = rank.format if number_format is None else number_format
    kept = rows * num_inputs * rank.kept_input_bytes if kept_bytes is None else kept_bytes
    forward = (
        *_quantised(rank, f"{name}_input", rows, num_inputs, wanted),
        Task(name, ops.Gemm(rows, num_outputs, num_inputs, wanted)),
    )
    backward = (
        *_quantised(rank, f"{name}_gradient", rows, num_outputs, wanted),
        Task(f"{name}_dgrad", ops.Gemm(rows, num_inputs, num_outputs, wanted)),
    )
    weight = (
        Task(f"{name}_wgrad", ops.Gemm(num_outputs, num_inputs, int(rows), wanted)),
        *_accumulated(rank, name, num_outputs * num_inputs),
    )
    lora = rank.setup.job.lora
    if lora is not None:
        down = Task(f"{name}_adapter", ops.Gemm(rows, lora.rank, num_inputs))
        up = Task(f"{name}_adapter_up", ops.Gemm(rows, num_outputs, lora.rank))
        adapts = lora.all_linear or name in ("qkv_proj", "o_proj")
        if name in ("lm_head", "router") or not adapts:
            down, up = (replace(task, count=0.0, flops_factor=0.0) for task in (down, up))
        # A frozen layer keeps no input; its adapter keeps the 16-bit one.
        return Part(name, (*forward, down, up), (*backward, down, up), (down, up), kept if adapts else 0.0, module)
    return Part(name, forward, backward, weight, kept, module)


def _accumulated(rank: Rank, name: str, num_values: float) -> tuple[Task, ...]:
    """Adds a micro-batch's gradient of weights to the sum of those before it.

    Megatron-Core's GEMM does so in its epilogue (`gradient_accumulation_fusion`): the sum is read and written, in its
    own format, in place of 16-bit results. Autograd writes those, reads them again and then does the same. FSDP
    reduces every micro-batch's gradients and adds shards.
    """
    job = rank.setup.job
    if job.sharding.zero == 3 or job.lora is not None:
        return ()
    each = WIRE_BYTES[job.precision.gradients or "fp32"]
    is_fused = job.framework in ("megatron", "deepseek") and job.overlap.tensor_gradient
    num_bytes = 2 * each - BF16_BYTES if is_fused else 2 * each + BF16_BYTES
    return (Task(f"{name}_accumulate", ops.Elementwise("accumulate", num_values, num_bytes)),)


def _quantised(rank: Rank, name: str, rows: float, width: float, wanted: Format) -> tuple[Task, ...]:
    """Casts a tensor for two products, once as it is and once transposed: read in 16 bit, written twice.

    Transformer Engine does so for inputs and for gradients; GEMMs read both along their inner dimension.
    """
    if ACTIVATION_BITS[wanted] >= 16:
        return ()
    num_bytes = width * (BF16_BYTES + 2 * ACTIVATION_BITS[wanted] / 8)
    return (Task(f"quantise_{name}", ops.Elementwise("quantise", rows, num_bytes * rank.passes)),)


def _enter_tensor_parallel(rank: Rank, linear: str, width: int) -> Iterator[Part]:
    """What stands before a column-parallel linear layer.

    Split sequences are gathered forward; backward the kept input is gathered again beside the input's gradient and
    the gradient scattered beside the weights' (Megatron-Core `LinearWithGradAccumulationAndAsyncCommunication`). Else
    the gradient is all-reduced beside the weights'.
    """
    if rank.tp == 1:
        return
    message = rank.tokens * width * BF16_BYTES
    pieces = rank.tp if rank.setup.job.overlap.tensor_parallel else 1
    beside = linear if pieces > 1 else None
    is_beside = bool(rank.setup.job.overlap.tensor_gradient) or pieces > 1
    dgrad, wgrad = (f"{linear}_dgrad", f"{linear}_wgrad") if is_beside else (None, None)
    if rank.split:
        gather = rank.collective(Group.TENSOR, "all_gather", message)
        scatter = rank.collective(Group.TENSOR, "reduce_scatter", message)
        yield Part(
            f"{linear}_gather",
            (Task(f"{linear}_all_gather", gather, 1.0, Group.TENSOR, beside, pieces),),
            (
                Task(f"{linear}_input_all_gather", gather, 1.0, Group.TENSOR, dgrad),
                Task(f"{linear}_reduce_scatter", scatter, 1.0, Group.TENSOR, wgrad),
            ),
        )
    else:
        reduce = rank.collective(Group.TENSOR, "all_reduce", message)
        task = Task(f"{linear}_all_reduce_gradient", reduce, 1.0, Group.TENSOR, wgrad)
        yield Part(f"{linear}_copy", (), (task,))


def _leave_tensor_parallel(rank: Rank, linear: str, width: int) -> Iterator[Part]:
    """What stands after a row-parallel linear layer: sums are scattered along the sequence, or all-reduced."""
    if rank.tp == 1:
        return
    message = rank.tokens * width * BF16_BYTES
    pieces = rank.tp if rank.setup.job.overlap.tensor_parallel and linear != "embedding" else 1
    if rank.split:
        scatter = rank.collective(Group.TENSOR, "reduce_scatter", message)
        gather = rank.collective(Group.TENSOR, "all_gather", message)
        forward = Task(f"{linear}_reduce_scatter", scatter, 1.0, Group.TENSOR, linear if pieces > 1 else None, pieces)
        backward = Task(
            f"{linear}_all_gather_gradient",
            gather,
            1.0,
            Group.TENSOR,
            f"{linear}_dgrad" if pieces > 1 else None,
            pieces,
        )
        yield Part(f"{linear}_scatter", (forward,), (backward,))
    else:
        reduce = rank.collective(Group.TENSOR, "all_reduce", message)
        yield Part(f"{linear}_reduce", (Task(f"{linear}_all_reduce", reduce, 1.0, Group.TENSOR),), ())


def _attention_parts(rank: Rank, group: LayerGroup) -> Iterator[Part]:
    attention = group.attention
    if isinstance(attention, GroupedQueryAttention):
        yield from _grouped_query_parts(rank, attention)
    elif isinstance(attention, LatentAttention):
        yield from _latent_parts(rank, attention)
    else:
        yield from _gated_delta_parts(rank, attention)


def _pointwise(
    name: str,
    rows: float,
    forward_bytes: float,
    backward_bytes: float,
    kept_bytes: float = 0.0,
    module: str | None = None,
) -> Part:
    return Part(
        name,
        (Task(name, ops.Elementwise(name, rows, forward_bytes)),),
        (Task(f"{name}_gradient", ops.Elementwise(f"{name}_gradient", rows, backward_bytes)),),
        kept_bytes=kept_bytes,
        module=module,
    )


def _grouped_query_parts(rank: Rank, attention: GroupedQueryAttention) -> Iterator[Part]:
    tp, tokens = rank.tp, rank.tokens
    query = attention.query_size // tp
    kv = max(attention.num_kv_heads // tp, 1) * attention.head_dim
    gate = query if attention.output_gate else 0
    input_bytes = rank.rows * rank.width * rank.kept_input_bytes
    yield from _enter_tensor_parallel(rank, "qkv_proj", rank.width)
    yield _linear(rank, "qkv_proj", tokens, query + gate + 2 * kv, rank.width, kept_bytes=input_bytes)
    if attention.qk_norm:
        moved = (query + kv) * BF16_BYTES * rank.passes
        yield _pointwise("qk_norm", tokens, 2 * moved, 3 * moved, tokens * (query + kv) * BF16_BYTES, "norms")
    if not rank.setup.job.learned_positions:
        rotated = 2 * (query + kv) * BF16_BYTES * rank.passes
        yield _pointwise("rope", tokens, rotated, rotated)
    yield from _core_parts(rank, attention)
    if gate:
        yield _pointwise("attention_gate", tokens, 3 * query * BF16_BYTES, 5 * query * BF16_BYTES)
    yield _linear(rank, "o_proj", tokens, rank.width, query)
    yield from _leave_tensor_parallel(rank, "o_proj", rank.width)


def _core_parts(rank: Rank, attention: GroupedQueryAttention) -> Iterator[Part]:
    """Attention's core and what context parallelism sends around it."""
    heads = attention.num_heads // rank.tp
    kv_heads = max(attention.num_kv_heads // rank.tp, 1)
    kept = rank.tokens * (heads + 2 * kv_heads) * attention.head_dim * BF16_BYTES
    yield from _context_parts(rank, 2 * kv_heads * attention.head_dim, heads * attention.head_dim)
    if rank.setup.job.kernels.attention == "unfused":
        yield from _unfused_core(rank, heads, attention.head_dim, kept)
        return
    core = ops.PrefillAttention(
        rank.setup.job.micro_batch / rank.setup.degrees.cp,
        rank.setup.job.sequence_tokens,
        heads,
        kv_heads,
        attention.head_dim,
        attention.window_tokens if _is_narrower(attention, rank) else 0,  # type: ignore[arg-type]
    )
    yield _flash_part(rank, core, kept + rank.tokens * heads * 4.0)


def _is_narrower(attention: GroupedQueryAttention, rank: Rank) -> bool:
    return attention.window_tokens is not None and attention.window_tokens < rank.setup.job.sequence_tokens


def _flash_part(rank: Rank, core: ops.PrefillAttention | ops.LatentPrefillAttention, kept_bytes: float) -> Part:
    is_older = rank.setup.job.kernels.attention == "flash2"
    slower = FLASH2_SLOWDOWN.get(rank.setup.device.architecture, 1.0) if is_older else 1.0
    backward = Task(
        "attention_gradient",
        core,
        slower * ATTENTION_BACKWARD_FLOPS / ATTENTION_BACKWARD_EFFICIENCY,
        flops_factor=ATTENTION_BACKWARD_FLOPS,
    )
    forward = Task("attention", core, slower)
    return Part("attention", (forward,), (backward,), kept_bytes=kept_bytes, module="core_attention")


def _unfused_core(rank: Rank, heads: int, head_dim: int, qkv_bytes: float) -> Iterator[Part]:
    """Scores, softmax, dropout and the weighted sum as kernels of their own, without skipping masked pairs.

    Each head's product is priced as one tall GEMM of the same FLOPs and output.
    """
    job, cp = rank.setup.job, rank.setup.degrees.cp
    keys = job.sequence_tokens
    rows = job.micro_batch * heads * keys / cp
    masks = 1.0 if job.dropout else 0.0
    scores = ops.Gemm(rows, keys, head_dim)
    values = ops.Gemm(rows, head_dim, keys)
    slower = UNALIGNED_SLOWDOWN if head_dim % 8 else 1.0
    yield Part(
        "attention_scores",
        (Task("attention_scores", scores, slower),),
        (Task("attention_scores_gradient", values, 2.0 * slower, flops_factor=2.0),),
        kept_bytes=qkv_bytes,
        module=None,
    )
    # Scale, mask and softmax in one kernel; dropout reads, writes and keeps a mask (arXiv:2205.05198, section 4.1:
    # 5 a s bytes for each token).
    yield _pointwise(
        "softmax",
        rows,
        keys * (2 * BF16_BYTES + masks * (2 * BF16_BYTES + 1)),
        keys * (3 * BF16_BYTES + masks * (2 * BF16_BYTES + 1)),
        rows * keys * (BF16_BYTES + masks * (1 + BF16_BYTES)),
        "core_attention",
    )
    yield Part(
        "attention_values",
        (Task("attention_values", values, slower),),
        (
            Task("attention_values_gradient", scores, slower),
            Task("attention_keys_gradient", values, slower),
        ),
        module="core_attention",
    )


def _context_parts(rank: Rank, kv_width: int, query_width: int) -> Iterator[Part]:
    """What context-parallel ranks send each other around attention's core.

    ring: keys and values pass round beside the core (arXiv:2310.01889), with their gradients on the way back; gather:
    all keys first (Llama 3, arXiv:2407.21783, section 3.3.2); ulysses: heads for sequence, four times
    (arXiv:2309.14509).
    """
    cp = rank.setup.degrees.cp
    if cp == 1:
        return
    held = rank.tokens * kv_width * BF16_BYTES
    method = rank.setup.job.parallelism.cp_method
    if method == "ring":
        send = rank.collective(Group.CONTEXT, "send_recv", held)
        forward = Task("context_send_recv", send, cp - 1.0, Group.CONTEXT, "attention")
        backward = Task("context_send_recv_gradient", send, 2 * (cp - 1.0), Group.CONTEXT, "attention_gradient")
        yield Part("context_ring", (forward,), (backward,))
    elif method == "all_gather":
        gather = rank.collective(Group.CONTEXT, "all_gather", held * cp)
        scatter = rank.collective(Group.CONTEXT, "reduce_scatter", held * cp)
        yield Part(
            "context_gather",
            (Task("context_all_gather", gather, 1.0, Group.CONTEXT),),
            (
                Task("context_all_gather", gather, 1.0, Group.CONTEXT),
                Task("context_reduce_scatter", scatter, 1.0, Group.CONTEXT),
            ),
        )
    else:
        exchange = rank.collective(Group.CONTEXT, "all_to_all", rank.tokens * (kv_width + query_width) * BF16_BYTES)
        give_back = rank.collective(Group.CONTEXT, "all_to_all", rank.tokens * query_width * BF16_BYTES)
        both = (
            Task("context_all_to_all", exchange, 1.0, Group.CONTEXT),
            Task("context_all_to_all_back", give_back, 1.0, Group.CONTEXT),
        )
        yield Part("context_exchange", both, both)


def _latent_parts(rank: Rank, attention: LatentAttention) -> Iterator[Part]:
    tp, tokens, width = rank.tp, rank.tokens, rank.width
    heads = attention.num_heads // tp
    query_head = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    latent = attention.kv_lora_rank + attention.qk_rope_head_dim
    rank_q = attention.q_lora_rank
    input_bytes = rank.rows * width * rank.kept_input_bytes
    # The down-projections are whole on every tensor-parallel rank and work on its part of the sequence.
    if rank_q is None:
        yield from _enter_tensor_parallel(rank, "q_proj", width)
        yield _linear(rank, "q_proj", tokens, heads * query_head, width, kept_bytes=input_bytes)
        yield _linear(rank, "kv_a_proj", rank.rows, latent, width, kept_bytes=0.0)
        normed = attention.kv_lora_rank
    else:
        yield _linear(rank, "q_kv_a_proj", rank.rows, rank_q + latent, width, kept_bytes=input_bytes)
        normed = rank_q + attention.kv_lora_rank
    moved = normed * BF16_BYTES * rank.passes
    yield _pointwise("latent_norm", rank.rows, 2 * moved, 3 * moved, rank.rows * normed * BF16_BYTES, "norms")
    if rank_q is not None:
        yield from _enter_tensor_parallel(rank, "q_b_proj", rank_q)
        yield _linear(rank, "q_b_proj", tokens, heads * query_head, rank_q, module="latent_up_projection")
    yield from _enter_tensor_parallel(rank, "kv_b_proj", latent)
    up = heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    yield _linear(rank, "kv_b_proj", tokens, up, attention.kv_lora_rank, module="latent_up_projection")
    # Rotated halves are concatenated with the others, for queries and keys of every head.
    rotated = 2 * 2 * heads * query_head * BF16_BYTES
    yield _pointwise("rope", tokens, rotated, rotated)
    kept = tokens * heads * (2 * query_head + attention.v_head_dim) * BF16_BYTES
    yield from _context_parts(rank, heads * (query_head + attention.v_head_dim), heads * query_head)
    core = ops.LatentPrefillAttention(
        rank.setup.job.micro_batch / rank.setup.degrees.cp,
        rank.setup.job.sequence_tokens,
        heads,
        query_head,
        attention.v_head_dim,
    )
    yield _flash_part(rank, core, kept + tokens * heads * 4.0)
    yield _linear(rank, "o_proj", tokens, width, heads * attention.v_head_dim)
    yield from _leave_tensor_parallel(rank, "o_proj", width)


def _gated_delta_parts(rank: Rank, attention: GatedDeltaAttention) -> Iterator[Part]:
    tp, tokens, width = rank.tp, rank.tokens, rank.width
    keys = attention.num_key_heads * attention.key_head_dim // tp
    heads = attention.num_value_heads // tp
    values = heads * attention.value_head_dim
    projected = 2 * keys + 2 * values
    yield from _enter_tensor_parallel(rank, "qkvz_proj", width)
    input_bytes = rank.rows * width * rank.kept_input_bytes
    yield _linear(rank, "qkvz_proj", tokens, projected, width, kept_bytes=input_bytes)
    yield _linear(rank, "ba_proj", tokens, 2 * heads, width, Format.BF16, kept_bytes=0.0)
    core = ops.GatedDelta(
        batch=rank.setup.job.micro_batch / rank.setup.degrees.cp,
        num_tokens=rank.setup.job.sequence_tokens,
        num_key_heads=max(attention.num_key_heads // tp, 1),
        num_value_heads=heads,
        key_head_dim=attention.key_head_dim,
        value_head_dim=attention.value_head_dim,
        conv_kernel_size=attention.conv_kernel_size,
        hidden_size=width,
    )
    yield Part(
        "gated_delta",
        (Task("gated_delta", core),),
        (Task("gated_delta_gradient", core, 2.0, flops_factor=2.0),),
        kept_bytes=tokens * projected * BF16_BYTES,
        module="core_attention",
    )
    moved = values * BF16_BYTES
    yield _pointwise("gated_norm", tokens, 3 * moved, 5 * moved, tokens * 2 * moved, "norms")
    yield _linear(rank, "o_proj", tokens, width, values)
    yield from _leave_tensor_parallel(rank, "o_proj", width)


def _feed_forward_parts(rank: Rank, group: LayerGroup) -> Iterator[Part]:
    feed_forward = group.feed_forward
    if isinstance(feed_forward, DenseFeedForward):
        yield from _dense_parts(rank, "", feed_forward.intermediate_size, feed_forward.gated, "feed_forward")
    else:
        yield from _experts_parts(rank, feed_forward)


def _dense_parts(rank: Rank, prefix: str, intermediate_size: int, gated: bool, module: str) -> Iterator[Part]:
    inner = intermediate_size // rank.tp
    up = 2 * inner if gated else inner
    first = f"{prefix}gate_up_proj" if gated else f"{prefix}up_proj"
    yield from _enter_tensor_parallel(rank, first, rank.width)
    input_bytes = rank.rows * rank.width * rank.kept_input_bytes
    yield _linear(rank, first, rank.tokens, up, rank.width, kept_bytes=input_bytes, module=module)
    yield _activation(rank, f"{prefix}activation", rank.tokens, up, inner)
    yield _linear(rank, f"{prefix}down_proj", rank.tokens, rank.width, inner, module=module)
    yield from _leave_tensor_parallel(rank, f"{prefix}down_proj", rank.width)


def _activation(rank: Rank, name: str, rows: float, up: int, inner: int) -> Part:
    """Keeps its input; its output is the next linear layer's."""
    forward = (up + inner) * BF16_BYTES * rank.passes
    backward = (2 * up + inner) * BF16_BYTES * rank.passes
    return _pointwise(name, rows, forward, backward, rows * up * BF16_BYTES, "activation")


def _experts_parts(rank: Rank, feed_forward: ExpertsFeedForward) -> Iterator[Part]:
    """Router, exchange, experts and exchange back; the load of ranks is balanced."""
    known, rows, width = rank.setup.degrees, rank.rows, rank.width
    per_token = feed_forward.experts_per_token
    yield _linear(rank, "router", rows, feed_forward.num_experts, width, Format.BF16, kept_bytes=0.0)
    top_k = 3 * 4.0 * feed_forward.num_experts * rank.passes
    yield _pointwise("top_k", rows, top_k, top_k, rows * feed_forward.num_experts * 4.0)
    moved = 2 * per_token * width * BF16_BYTES
    yield _pointwise("permute", rows, moved, moved)
    yield from _exchange(rank, "dispatch", rows * per_token * width, True, per_token)
    # Tokens of the ranks that shard an expert meet in each of them.
    pairs = rows * per_token * known.experts_tp
    held = feed_forward.num_experts // known.ep
    inner = feed_forward.intermediate_size // known.experts_tp
    up = 2 * inner if feed_forward.gated else inner
    # What arrives is ordered by sender, and grouped GEMMs need it by expert (Megatron-Core token_dispatcher.py,
    # `sort_chunks_by_idxs`); on the way back likewise.
    sorted_bytes = 2 * width * BF16_BYTES
    if known.ep > 1:
        yield _pointwise("sort_by_expert", pairs, sorted_bytes, sorted_bytes)
    yield _grouped_linear(rank, "experts_up_proj", pairs, held, up, width)
    yield _activation(rank, "experts_activation", pairs, up, inner)
    yield _grouped_linear(rank, "experts_down_proj", pairs, held, width, inner)
    if known.ep > 1:
        yield _pointwise("sort_by_sender", pairs, sorted_bytes, sorted_bytes)
    yield from _exchange(rank, "combine", rows * per_token * width, False, per_token)
    yield _pointwise("unpermute", rows, moved, moved)
    if feed_forward.shared_intermediate_size:
        yield from _dense_parts(
            rank, "shared_", feed_forward.shared_intermediate_size, feed_forward.gated, "feed_forward"
        )


def _grouped_linear(rank: Rank, name: str, pairs: float, num_groups: int, num_outputs: int, num_inputs: int) -> Part:
    """The same linear layer for each of a rank's experts, tokens evenly spread: as many GEMMs of fewer rows."""
    rows = max(pairs / num_groups, 1.0)
    wanted = rank.format
    frozen = rank.setup.job.lora is not None

    def each(suffix: str, gemm: ops.Gemm) -> Task:
        return Task(f"{name}{suffix}", gemm, num_groups / GROUPED_EFFICIENCY, flops_factor=num_groups)

    return Part(
        name,
        (
            *_quantised(rank, f"{name}_input", pairs, num_inputs, wanted),
            each("", ops.Gemm(rows, num_outputs, num_inputs, wanted)),
        ),
        (
            *_quantised(rank, f"{name}_gradient", pairs, num_outputs, wanted),
            each("_dgrad", ops.Gemm(rows, num_inputs, num_outputs, wanted)),
        ),
        ()
        if frozen
        else (
            each("_wgrad", ops.Gemm(num_outputs, num_inputs, int(rows), wanted)),
            *_accumulated(rank, name, num_groups * num_outputs * num_inputs),
        ),
        0.0 if frozen else pairs * num_inputs * rank.kept_input_bytes,
        "experts",
    )


def _exchange_op(rank: Rank, message_bytes: float, per_token: int) -> ops.Collective:
    """All-to-all of tokens with their experts' ranks.

    By node (DeepEP, DeepSeek-V3 section 3.2.2): a token crosses to each node once and is copied there; k experts on n
    nodes meet n (1 - (1 - 1/n)^k) of them. What goes on inside a node overlaps it.
    """
    plain = rank.collective(Group.EXPERTS, "all_to_all", message_bytes)
    nodes = plain.span_nodes
    if nodes == 1 or rank.setup.job.parallelism.experts_exchange != "by_node":
        return plain
    met = nodes * (1 - (1 - 1 / nodes) ** per_token)
    return ops.Collective("all_to_all", message_bytes * met / per_token, plain.num_ranks, nodes)


def _exchange(rank: Rank, name: str, num_values: float, is_dispatch: bool, per_token: int) -> Iterator[Part]:
    """All-to-all between expert-parallel ranks, and the gather or sum between ranks that share an expert."""
    known, job = rank.setup.degrees, rank.setup.job
    beside = "experts_beside" if job.overlap.experts else None
    if known.ep > 1:
        sent = WIRE_BYTES[job.precision.experts_dispatch or "bf16"] if is_dispatch else BF16_BYTES
        there = _exchange_op(rank, num_values * sent, per_token)
        back = _exchange_op(rank, num_values * BF16_BYTES, per_token)
        yield Part(
            name,
            (Task(f"{name}_all_to_all", there, 1.0, Group.EXPERTS, beside),),
            (Task(f"{name}_all_to_all_gradient", back, 1.0, Group.EXPERTS, beside),),
        )
    if known.experts_tp > 1:
        message = num_values * BF16_BYTES * known.experts_tp
        gather = rank.collective(Group.EXPERTS_TENSOR, "all_gather", message)
        scatter = rank.collective(Group.EXPERTS_TENSOR, "reduce_scatter", message)
        there, back = (gather, scatter) if is_dispatch else (scatter, gather)
        yield Part(
            f"{name}_shards",
            (Task(f"{name}_{there.op}", there, 1.0, Group.EXPERTS_TENSOR),),
            (Task(f"{name}_{back.op}_gradient", back, 1.0, Group.EXPERTS_TENSOR),),
        )


def trained(rank: Rank, held: Parameters) -> Parameters:
    """Of the parameters that a rank holds, those that are trained.

    Adapters of rank r beside an `[h, n]` matrix have r (h + n); counted as 2 r / h of every dense matrix.
    """
    lora = rank.setup.job.lora
    return held if lora is None else Parameters(held.dense * 2.0 * lora.rank / rank.width, 0.0)


def layer_parameters(rank: Rank, group: LayerGroup) -> Parameters:
    """Parameters of one layer on one rank; norms, routers and latent down-projections are on every tensor rank."""
    tp, width = rank.tp, rank.width
    attention = group.attention
    total = float(attention_parameters(attention, width))
    repeated, copies = 0.0, 1.0
    if isinstance(attention, LatentAttention):
        repeated = width * ((attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.qk_rope_head_dim)
        copies = tp
    elif isinstance(attention, GroupedQueryAttention):
        repeated, copies = 2.0 * width * attention.kv_size, max(tp / attention.num_kv_heads, 1.0)
    dense = (total - repeated + repeated * copies) / tp
    dense += group.num_norms * width * (2 if rank.setup.model.norm_bias else 1) + inner_norm_parameters(attention)
    feed_forward = group.feed_forward
    if isinstance(feed_forward, DenseFeedForward):
        return Parameters(dense + dense_parameters(feed_forward, width) / tp)
    known = rank.setup.degrees
    routed = feed_forward.num_experts * expert_parameters(feed_forward, width) / (known.ep * known.experts_tp)
    dense += shared_expert_parameters(feed_forward, width) / tp + router_parameters(feed_forward, width)
    return Parameters(dense, routed)


def chunk_parameters(rank: Rank, chunk: Chunk) -> Parameters:
    """Parameters of a chunk on one rank: its layers, the embedding and the head where it has them.

    A tied head on another device than the embedding is a copy of it.
    """
    model = rank.setup.model
    table = -(-model.vocab_size // rank.tp) * model.hidden_size
    found = Parameters()
    for group, count in chunk.layers:
        found = found + layer_parameters(rank, group) * count
    if chunk.has_embedding:
        job = rank.setup.job
        positions = model.learned_positions or (job.sequence_tokens if job.learned_positions else 0)
        found = found + Parameters(float(table + positions * model.hidden_size))
    if chunk.has_head:
        norm = model.hidden_size * (2 if model.norm_bias else 1)
        own = not model.tie_word_embeddings or rank.setup.degrees.pp > 1
        found = found + Parameters(float(norm + (table if own else 0)))
    return found


def layer_work(rank: Rank, group: LayerGroup, recompute: str | None = None) -> Work:
    """One micro-batch through one layer, with what is recomputed; `recompute` overrides the job's granularity."""
    job = rank.setup.job
    parts = layer_parts(rank, group)
    granularity = recompute or job.recompute.granularity
    every_kept = sum(part.kept_bytes for part in parts)
    if granularity == "full":
        again = [task for part in parts for task in part.forward]
        split = rank.tp if job.recompute.distribute and not rank.split else 1
        kept = rank.rows * rank.width * BF16_BYTES / split
        return _work(parts, tuple(_renamed(again)), kept, every_kept)
    if granularity == "selective":
        dropped = [part for part in parts if part.module in job.recompute.modules]
        again = [task for part in dropped for task in part.forward]
        # Flash attention's inputs are not the core's own: they stay.
        lost = sum(part.kept_bytes for part in dropped if part.name != "attention")
        if "every_second_product" in job.recompute.modules:
            products = [part for part in parts if part.backward_weight and part not in dropped]
            again += [_half(task) for part in products for task in part.forward]
            lost += sum(part.kept_bytes for part in products) / 2
        return _work(parts, tuple(_renamed(again)), every_kept - lost, lost)
    return _work(parts, (), every_kept, 0.0)


def ends_work(rank: Rank, chunk: Chunk) -> Work:
    """The embedding and the head, where a chunk has them."""
    parts = (embedding_parts(rank) if chunk.has_embedding else ()) + (head_parts(rank) if chunk.has_head else ())
    return _work(parts, (), sum(part.kept_bytes for part in parts), 0.0)


def _work(parts: Iterable[Part], recomputed: tuple[Task, ...], kept_bytes: float, transient_bytes: float) -> Work:
    backward = tuple(reversed(tuple(parts)))
    return Work(
        tuple(task for part in reversed(backward) for task in part.forward),
        recomputed + tuple(task for part in backward for task in part.backward_input),
        tuple(task for part in backward for task in part.backward_weight),
        recomputed,
        kept_bytes,
        transient_bytes,
    )


def _half(task: Task) -> Task:
    return replace(task, count=task.count / 2, flops_factor=task.flops_factor / 2)


def _renamed(tasks: Iterable[Task]) -> Iterator[Task]:
    """Forward tasks as they run again in the backward pass."""
    for task in tasks:
        beside = f"recompute_{task.beside}" if task.beside else None
        yield replace(task, name=f"recompute_{task.name}", beside=beside)
