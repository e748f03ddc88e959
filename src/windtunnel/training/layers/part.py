"""What layers are made of: tasks, parts that know their backward pass and what they keep, and the parts of every layer.

Sources: arXiv:2104.04473 for tensor parallelism, arXiv:2205.05198 for sequence parallelism and kept activations.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from windtunnel.model import operators as ops
from windtunnel.model.precision import ACTIVATION_BITS, Format
from windtunnel.training.figures import FIGURES
from windtunnel.training.layers.rank import BF16_BYTES, FP32_BYTES, PACKED_BYTES, WIRE_BYTES, Group, Rank

NEVER_PACKED = ("lm_head", "router")
"""Linear layers that quantisation leaves as they are, and that have no adapters."""
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "q_kv_a_proj": ("q_a_proj", "kv_a_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Linear layer -> those of Hugging Face's models that are fused into it."""


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
    repeated_factor: float = 0.0
    """Of these, what the kernel computes a second time, as FlashAttention its scores: no FLOPs of the model."""

    @property
    def flops(self) -> float:
        return float(self.op.flops) * self.flops_factor

    @property
    def repeated_flops(self) -> float:
        return float(self.op.flops) * self.repeated_factor

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends."""
        return float(self.op.num_bytes) * self.count if self.group else 0.0


def collective(
    rank: Rank,
    name: str,
    group: Group,
    op: str,
    num_bytes: float,
    count: float = 1.0,
    beside: str | None = None,
    pieces: int = 1,
) -> Task:
    """Return a collective over one of the rank's groups as a task."""
    return Task(name, rank.collective(group, op, num_bytes), count, group, beside, pieces)


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
    dropped_bytes: float | None = None
    """What recomputing it frees: its output, which the part after it keeps. None: `kept_bytes`."""
    gradient_bytes: float = 0.0
    """Gradients that its backward pass holds, beyond what it has already freed."""
    adapters: float = 0.0
    """Parameters of its adapters."""


def norm(rank: Rank, name: str, count: int = 1) -> Part:
    """Reads and writes the hidden states; its gradient reads input and gradient and writes one."""
    moved = rank.width * BF16_BYTES
    there, back = 2 * moved * rank.passes("norm"), 3 * moved * rank.passes("norm", "backward")
    kept = rank.rows * rank.width * rank.kept_norm_bytes
    part = pointwise(name, rank.rows, there, back, kept * count, "norms", "norm", count)
    dropped = rank.kept_input_bytes + rank.kept_norm_bytes - BF16_BYTES
    return replace(part, dropped_bytes=rank.rows * rank.width * dropped)


def residual(rank: Rank, name: str) -> Part:
    """Residual addition, with the bias and dropout where there are any."""
    width = rank.width
    mask = 1.0 if rank.setup.job.dropout else 0.0
    passes = rank.passes("dropout") if mask else 1.0
    there, back = width * (3 * BF16_BYTES + mask) * passes, width * (2 * BF16_BYTES + mask) * passes
    return pointwise(name, rank.rows, there, back, rank.rows * width * mask, kernel="residual")


def pointwise(
    name: str,
    rows: float,
    forward_bytes: float,
    backward_bytes: float,
    kept_bytes: float = 0.0,
    module: str | None = None,
    kernel: str | None = None,
    count: float = 1.0,
) -> Part:
    """Return a kernel that is bound by memory, one way and back: bytes for each of `rows` in either direction."""
    forward = Task(name, ops.Elementwise(kernel or name, rows, forward_bytes), count)
    backward = Task(f"{name}_gradient", ops.Elementwise(f"{kernel or name}_gradient", rows, backward_bytes), count)
    return Part(name, (forward,), (backward,), kept_bytes=kept_bytes, module=module)


def activation(rank: Rank, name: str, rows: float, up: int, inner: int) -> Part:
    """Keeps its input, and in eager PyTorch a gate's own activation; its output is the next linear layer's."""
    forward = (up + inner) * BF16_BYTES * rank.passes("activation")
    backward = (2 * up + inner) * BF16_BYTES * rank.passes("activation", "backward")
    kept = rows * up * WIRE_BYTES[rank.setup.job.precision.activation_input or "bf16"]
    gate = rows * inner * BF16_BYTES if up > inner and not rank.setup.job.kernels.fused else 0.0
    part = pointwise(name, rows, forward, backward, kept + gate, "activation")
    freed = rows * inner * rank.kept_input_bytes
    return replace(part, dropped_bytes=freed + gate, gradient_bytes=max(rows * (up + inner) * BF16_BYTES - freed, 0.0))


def linear(
    rank: Rank,
    name: str,
    rows: float,
    num_outputs: int | tuple[int, ...],
    num_inputs: int,
    number_format: Format | None = None,
    kept_bytes: float | None = None,
    module: str | None = None,
) -> Part:
    """Return a linear layer: `[rows, in] x [in, out]`, the gradient of its input and that of its weights.

    A tuple of outputs: those of the layers that are fused into it (`FUSED`).
    """
    each = num_outputs if isinstance(num_outputs, tuple) else (num_outputs,)
    num_outputs = sum(each)
    gemm_format = rank.format if number_format is None else number_format
    kept = rows * num_inputs * rank.kept_input_bytes if kept_bytes is None else kept_bytes
    forward, backward, weight = products(rank, name, rows, (num_outputs, num_inputs), gemm_format)
    part = Part(name, forward, backward, weight, kept, module)
    return part if rank.setup.job.lora is None else adapted(rank, part, rows, each, num_inputs)


def adapted(rank: Rank, part: Part, rows: float, outputs: tuple[int, ...], num_inputs: int, groups: int = 1) -> Part:
    """Return a frozen linear layer, or `groups` of them that share the rows, with the adapters that the job gives it.

    A frozen layer keeps no input; its adapters keep one, each its own behind dropout, which is a kernel of its own. A
    fused layer has one adapter by Megatron-Core, else one for each of the layers in it.
    """
    lora, name = rank.setup.job.lora, part.name
    outputs = _adapted_outputs(rank, name, outputs)
    if lora is None or not outputs:
        return replace(part, backward_weight=(), kept_bytes=0.0)
    forward, backward, kept = part.forward, part.backward_input, part.kept_bytes
    count = next(task.count for task in forward if task.name == name)

    def gemm(suffix: str, num_out: int, num_in: int, times: int) -> Task:
        each = ops.Gemm(max(rows / groups, 1.0), num_out, num_in)
        return Task(f"{name}_adapter{suffix}", each, count * times, flops_factor=groups * times)

    own = gemm("", lora.rank, num_inputs, len(outputs))
    pair = (own, *(gemm(f"_up_{width}", width, lora.rank, outputs.count(width)) for width in dict.fromkeys(outputs)))
    if lora.dropout:
        moved = len(outputs) * num_inputs * (2 * BF16_BYTES + 1) + sum(outputs) * 3 * BF16_BYTES
        beside = Task(f"{name}_adapter_dropout", ops.Elementwise("adapter", rows, moved))
        forward, backward = (*forward, beside), (*backward, beside)
        kept = len(outputs) * rows * num_inputs * (BF16_BYTES + 1)
    size = float(groups * lora.rank * sum(num_inputs + width for width in outputs))
    return Part(name, (*forward, *pair), (*backward, *pair), pair, kept, part.module, adapters=size)


def _adapted_outputs(rank: Rank, name: str, outputs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the outputs of each adapter of a linear layer."""
    job, own = rank.setup.job, name.removeprefix("shared_").removeprefix("experts_")
    own = "gate_up_proj" if own == "up_proj" and len(outputs) == 2 else own
    is_of_attention = name == own and own not in ("gate_up_proj", "up_proj", "down_proj")
    if job.lora is None or name in NEVER_PACKED:
        return ()
    named, fused = job.lora.target_modules, FUSED.get(own, (own,))
    if named is None and not (job.lora.all_linear or is_of_attention):
        return ()
    if own in named if named is not None else job.framework in ("megatron", "deepseek"):
        return (sum(outputs),)
    pairs = zip(fused, outputs, strict=True)
    return tuple(width for each, width in pairs if width and (named is None or each in named))


def products(
    rank: Rank, name: str, rows: float, shape: tuple[int, int], gemm_format: Format, num_groups: int | None = None
) -> tuple[tuple[Task, ...], tuple[Task, ...], tuple[Task, ...]]:
    """Return the tasks of a weight of `shape` (outputs, inputs): forward, and the gradients of its input and of itself.

    With `num_groups` it is as many weights, over which the rows are spread evenly: as many GEMMs of fewer rows.
    """
    num_outputs, num_inputs = shape
    count, factor, each = 1.0, 1.0, rows
    if num_groups is not None:
        efficiency = FIGURES.grouped_efficiency.get(rank.setup.job.framework, FIGURES.other_grouped_efficiency)
        count, factor, each = num_groups / efficiency, num_groups, max(rows / num_groups, 1.0)

    def gemm(suffix: str, m: float, n: int, k: int) -> Task:
        return Task(f"{name}{suffix}", ops.Gemm(m, n, k, gemm_format), count, flops_factor=factor)

    forward = quantised(rank, f"{name}_input", rows, num_inputs, gemm_format)
    backward = quantised(rank, f"{name}_gradient", rows, num_outputs, gemm_format)
    weight = accumulated(rank, name, (num_groups or 1) * num_outputs * num_inputs)
    packed = unpacked(rank, name, (num_groups or 1) * num_outputs * num_inputs)
    if packed and rank.setup.job.precision.frozen_weights == "int8":
        # bitsandbytes functional.py: rows are scaled and cast, products summed in 32 bits and scaled back to 16. These
        # are taken to be no faster than in 16 bits: a forward pass was measured 15 to 23% slower (huggingface.co/blog/
        # hf-bitsandbytes-integration of 2022, BLOOM-176B).
        cast = Task(f"quantise_{name}_input", ops.Elementwise("quantise", rows, num_inputs * (2 * BF16_BYTES + 1)))
        scaled = Task(f"{name}_unscale", ops.Elementwise("unpack", rows, num_outputs * (FP32_BYTES + BF16_BYTES)))
        whole = gemm("", each, num_outputs, num_inputs)
        return (cast, whole, scaled), (*packed, gemm("_dgrad", each, num_inputs, num_outputs)), ()
    return (
        (*forward, *packed, gemm("", each, num_outputs, num_inputs)),
        (*backward, *packed, gemm("_dgrad", each, num_inputs, num_outputs)),
        (gemm("_wgrad", num_outputs, num_inputs, int(each)), *weight),
    )


def unpacked(rank: Rank, name: str, num_values: float) -> tuple[Task, ...]:
    """Write frozen weights of 4 or 8 bits in 16 for a product: bitsandbytes does so for every product of a layer, but
    for forward ones in 8 bits.
    """
    bytes_of = PACKED_BYTES.get(rank.setup.job.precision.frozen_weights)
    if rank.setup.job.lora is None or bytes_of is None or name in NEVER_PACKED:
        return ()
    return (Task(f"{name}_unpack", ops.Elementwise("unpack", num_values, bytes_of + BF16_BYTES)),)


def accumulated(rank: Rank, name: str, num_values: float) -> tuple[Task, ...]:
    """Adds a micro-batch's gradient of weights to the sum of those before it.

    Megatron-Core's GEMM does so in its epilogue: the sum is read and written, in its
    own format, in place of 16-bit results. Autograd writes those, reads them again and then does the same. FSDP
    reduces every micro-batch's gradients and adds shards.
    """
    job = rank.setup.job
    if job.sharding.zero == 3 or job.lora is not None:
        return ()
    each = WIRE_BYTES[job.precision.gradients or "fp32"]
    num_bytes = 2 * each - BF16_BYTES if rank.sums_in_gemms else 2 * each + BF16_BYTES
    return (Task(f"{name}_accumulate", ops.Elementwise("accumulate", num_values, num_bytes)),)


def quantised(rank: Rank, name: str, rows: float, width: float, gemm_format: Format) -> tuple[Task, ...]:
    """Casts a tensor for two products, once as it is and once transposed: read in 16 bit, written twice.

    Transformer Engine does so for inputs and for gradients; GEMMs read both along their inner dimension. The transposed
    copy is for the weights' gradient, which frozen weights do not have.
    """
    in_kernel = bool(rank.setup.job.kernels.fused_experts) and name.startswith("experts_")
    if ACTIVATION_BITS[gemm_format] >= 16 or in_kernel:
        return ()
    copies = 1 if rank.setup.job.lora else 2
    num_bytes = width * (BF16_BYTES + copies * ACTIVATION_BITS[gemm_format] / 8 + _scaling_bytes(rank, name))
    return (Task(f"quantise_{name}", ops.Elementwise("quantise", rows, num_bytes * rank.passes("quantise"))),)


def _scaling_bytes(rank: Rank, name: str) -> float:
    """Bytes that finding a tensor's scale moves for each of its values.

    Norms and activations find the largest value of what they write, also backward (Transformer Engine pull requests
    2004 and 2013); attention, the exchange of tokens and residuals do not.
    """
    recipe = rank.setup.job.precision.compute
    is_known = (
        "up_proj" in name if name.endswith("_gradient") else name not in ("o_proj_input", "experts_up_proj_input")
    )
    return 0.0 if recipe == "fp8_current" and is_known else FIGURES.scaling_bytes.get(recipe, 0.0)


def enter_tensor_parallel(rank: Rank, linear: str, width: int) -> Iterator[Part]:
    """What stands before a column-parallel linear layer.

    Split sequences are gathered forward; backward the kept input is gathered again beside the input's gradient and
    the gradient scattered beside the weights' (Megatron-Core `LinearWithGradAccumulationAndAsyncCommunication`). Else
    the gradient is all-reduced beside the weights'. Where a tensor's scale is known before, its 8 bits travel
    (Transformer Engine distributed.py, `gather_along_first_dim`; torchao `Float8ColwiseParallel`).
    """
    if rank.tp == 1:
        return
    message = rank.tokens * width * BF16_BYTES
    in_8_bits = linear != "lm_head" and rank.setup.job.precision.compute in ("fp8", "fp8_current", "mxfp8")
    gathered = rank.tokens * width * (1.0 if in_8_bits else BF16_BYTES)
    pieces, overlap = rank.tensor_pieces, rank.setup.job.overlap
    beside = linear if pieces > 1 else None
    # Megatron-Core gathers the input again beside one product and scatters beside the other. PyTorch's asynchronous
    # tensor parallelism cuts products whose rows are gathered or scattered (torch/_inductor/fx_passes/
    # micro_pipeline_tp.py), not those that sum over gathered rows.
    dgrad, wgrad = (f"{linear}_dgrad", f"{linear}_wgrad") if overlap.tensor_gradient else (None, None)
    tensor = partial(collective, rank, group=Group.TENSOR)
    if rank.split:
        gather = tensor(f"{linear}_all_gather", op="all_gather", num_bytes=gathered, beside=beside, pieces=pieces)
        again = tensor(f"{linear}_input_all_gather", op="all_gather", num_bytes=gathered, beside=dgrad)
        scatter = tensor(f"{linear}_reduce_scatter", op="reduce_scatter", num_bytes=message, beside=wgrad)
        if pieces > 1 and wgrad is None:
            scatter = replace(scatter, beside=f"{linear}_dgrad", pieces=pieces)
        copy = _sequence_copy(rank, f"{linear}_input", width)
        copies = () if pieces > 1 else copy
        yield Part(f"{linear}_gather", (gather, *copies), (again, *copy, *copies, scatter))
    else:
        reduce = tensor(f"{linear}_all_reduce_gradient", op="all_reduce", num_bytes=message, beside=wgrad)
        yield Part(f"{linear}_copy", (), (reduce,))


def _sequence_copy(rank: Rank, name: str, width: int) -> tuple[Task, ...]:
    """Return the copy beside a collective along the sequence of several sequences.

    Collectives join whole pieces, so that PyTorch cuts and joins a tensor of which the sequence is not the first
    dimension (torch/distributed/_functional_collectives.py, `all_gather_tensor` and `reduce_scatter_tensor`);
    Megatron's hidden states have the sequence first.
    """
    if rank.setup.job.framework != "fsdp2" or rank.setup.job.micro_batch == 1:
        return ()
    return (Task(f"{name}_copy", ops.Elementwise("sequence_copy", rank.tokens, 2 * width * BF16_BYTES)),)


def leave_tensor_parallel(rank: Rank, linear: str, width: int) -> Iterator[Part]:
    """What stands after a row-parallel linear layer: sums are scattered along the sequence, or all-reduced."""
    if rank.tp == 1:
        return
    message = rank.tokens * width * BF16_BYTES
    pieces = 1 if linear == "embedding" else rank.tensor_pieces
    tensor = partial(collective, rank, group=Group.TENSOR, num_bytes=message)
    if rank.split:
        forward, backward = (linear, f"{linear}_dgrad") if pieces > 1 else (None, None)
        scatter = tensor(f"{linear}_reduce_scatter", op="reduce_scatter", beside=forward, pieces=pieces)
        gather = tensor(f"{linear}_all_gather_gradient", op="all_gather", beside=backward, pieces=pieces)
        copies = () if pieces > 1 else _sequence_copy(rank, f"{linear}_output", width)
        yield Part(f"{linear}_scatter", (*copies, scatter), (gather, *copies))
    else:
        yield Part(f"{linear}_reduce", (tensor(f"{linear}_all_reduce", op="all_reduce"),), ())
