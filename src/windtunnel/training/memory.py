"""Predict a device's memory in training: parameters, gradients, optimizer state, activations, reserves.

Rules: arXiv:1910.02054 (state and its sharding), arXiv:2205.05198 (activations); a layer keeps the sum over its parts
in `training/layers/parts.py`, so that memory and time cannot disagree about what is recomputed.
"""

from dataclasses import dataclass, replace

from windtunnel.model.operators import Gemm
from windtunnel.training.figures import FIGURES
from windtunnel.training.layers.chunks import LayerChunk, Parameters, chunk_parameters, layer_parameters, trained
from windtunnel.training.layers.host import host_bytes, offloads
from windtunnel.training.layers.parts import Work, ends_work, head_parts, layer_work
from windtunnel.training.layers.rank import BF16_BYTES, FP32_BYTES, PACKED_BYTES, WIRE_BYTES, Group, Rank
from windtunnel.training.layers.sharding import STATE_BYTES, gathered_layer, owned


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of one rank of a pipeline stage, in bytes."""

    stage: int
    parameters_bytes: float
    gradients_bytes: float
    """At the worst moment: FSDP2's gradients come into being in the last micro-batch's backward pass."""
    optimizer_bytes: float
    activations_bytes: float
    """Activations of all micro-batches in flight at the worst moment."""
    transient_bytes: float
    """Activations of one layer in its backward pass, gathered parameters and buckets, gradient of the logits."""
    reserve_bytes: float
    num_in_flight: float
    """Micro-batches whose activations are held at the worst moment, in whole passes through the stage."""
    host_bytes: float = 0.0
    """What the rank offloads to the memory of its host."""
    fragmentation_bytes: float = 0.0
    """Blocks that the allocator may hold without use: at most what the rest leaves, so that it never decides."""

    @property
    def state_bytes(self) -> float:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def allocated_bytes(self) -> float:
        """Return the peak of the tensors (`torch.cuda.max_memory_allocated`)."""
        return self.state_bytes + self.activations_bytes + self.transient_bytes

    @property
    def needed_bytes(self) -> float:
        return self.allocated_bytes + self.reserve_bytes

    @property
    def total_bytes(self) -> float:
        """Return what the device may be seen to hold, fragmentation included."""
        return self.needed_bytes + self.fragmentation_bytes


def state_bytes(
    rank: Rank, held: Parameters, num_in_ends: float = 0.0, num_in_table: float = 0.0
) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer state of one rank that holds `held`, so many of them in
    embedding and head, or in the embedding alone.
    """
    job = rank.setup.job
    precision, zero = job.precision, job.sharding.zero or 0
    learnt = trained(rank, held)
    num_owned = owned(rank, learnt)
    gradient = STATE_BYTES[precision.gradients or "fp32"]
    # A recipe in fp8 keeps 16-bit parameters beside what it multiplies; sharded fp32 parameters are their own master.
    # DeepSpeed keeps 16-bit partitions beside the fp32 ones that it updates (runtime/zero/stage3.py).
    parameters = BF16_BYTES * held.total if zero < 3 else 0.0
    if zero == 3 and job.framework == "deepspeed":
        parameters = BF16_BYTES * num_owned
    if job.lora is not None:
        num_here = owned(rank, held) if zero == 3 else held.total
        if precision.frozen_weights in PACKED_BYTES:
            packed = 1.0 - num_in_ends / held.total
            parameters = num_here * (packed * PACKED_BYTES[precision.frozen_weights] + (1.0 - packed) * BF16_BYTES)
        else:
            parameters = WIRE_BYTES[precision.frozen_weights] * num_here
        # PEFT's adapters are in fp32, as the optimizer has them (`autocast_adapter_dtype`).
        parameters += 0.0 if job.framework == "fsdp2" else BF16_BYTES * (num_owned if zero == 3 else learnt.total)
    gradients = gradient * (num_owned if zero >= 2 else learnt.total)
    if job.framework == "deepspeed" and precision.gradients == "fp32" and zero < 3:
        # DeepSpeed's bf16_optimizer.py lets autograd fill 16-bit gradients and adds them to its fp32 ones.
        gradients += BF16_BYTES * learnt.total
    moments = FIGURES.num_moments[job.optimizer] * STATE_BYTES[precision.moments]
    master = STATE_BYTES[precision.master_weights or "fp32"]
    keeps_master = precision.master_weights != "bf16" or zero >= 3
    optimizer = num_owned * (moments + (master if keeps_master else 0.0))
    if precision.moments == "int8" and job.lora is None:
        # transformers trainer.py registers the moments of every nn.Embedding with 32 bits.
        own_share = num_owned / learnt.total if learnt.total else 0.0
        optimizer += num_in_table * own_share * (FIGURES.num_moments[job.optimizer] * FP32_BYTES - moments)
    if offloads(rank):
        optimizer = 0.0
        gradients = gradients if job.framework == "megatron" or (zero == 1 and job.framework == "deepspeed") else 0.0
    elif zero == 3 and job.framework != "deepspeed" and job.lora is None:
        parameters, optimizer = num_owned * master, optimizer - num_owned * master
    return 0.0 if offloads(rank, "parameters") else parameters, gradients, optimizer


def chunk_work(rank: Rank, chunk: LayerChunk) -> list[tuple[Work, float]]:
    """Return the work of a chunk's layers, each with its number of layers; then the work of its ends.

    Full recomputation may cover some of a chunk's layers only.
    """
    recompute = rank.setup.job.recompute
    works = []
    for group, count in chunk.layers:
        covered = count
        if recompute.granularity == "full" and recompute.num_layers is not None:
            covered = min(count, recompute.num_layers * count / max(chunk.num_layers, 1.0))
            if count > covered:
                works.append((layer_work(rank, group, "none"), count - covered))
        if covered > 0:
            works.append((layer_work(rank, group), covered))
    if chunk.has_embedding or chunk.has_head:
        works.append((ends_work(rank, chunk.has_embedding, chunk.has_head), 1.0))
    return works


def kept_bytes(rank: Rank, chunk: LayerChunk) -> float:
    """Return the activations that one micro-batch keeps in a chunk from its forward to its backward pass.

    The head's exist only between its own two passes, which follow each other: they count as transient.
    """
    head = sum(part.kept_bytes for part in head_parts(rank)) if chunk.has_head else 0.0
    works = chunk_work(rank, chunk)
    ends = works.pop()[0].kept_bytes if chunk.has_embedding or chunk.has_head else 0.0
    kept_fraction = 1.0 - min(rank.setup.job.recompute.offload_layers / max(chunk.num_layers, 1.0), 1.0)
    return sum(work.kept_bytes * count for work, count in works) * kept_fraction + ends - head


def transient_bytes(rank: Rank, held_chunks: list[LayerChunk]) -> tuple[float, float]:
    """Return the memory beside parameters, state and kept activations in a backward pass: in the head, with the logits,
    and in the layer that recomputes or differentiates most.
    """
    job = rank.setup.job
    works = [work for chunk in held_chunks for work, _ in chunk_work(rank, chunk)]
    hidden = rank.tokens * rank.width * BF16_BYTES
    layer = max((work.transient_bytes for work in works), default=0.0) + hidden / (rank.tp if rank.split else 1)
    layer += 0.0 if job.kernels.fused else 3 * hidden
    head = 0.0
    if any(chunk.has_head for chunk in held_chunks):
        head = sum(part.kept_bytes for part in head_parts(rank)) + (2 if rank.split else 1) * hidden
        if rank.sums_in_gemms:
            head += -(-rank.setup.model.vocab_size // rank.tp) * rank.width * BF16_BYTES
    in_head, in_layer = _gathered_bytes(rank, held_chunks) if job.sharding.zero == 3 else (0.0, 0.0)
    sharding, beside = job.sharding, FIGURES.workspace_bytes
    if sharding.zero and job.framework == "deepspeed":
        # DeepSpeed copies gradients into two buckets in turn and gathers updated parameters through a third.
        gather_bucket = sharding.gather_bucket_elements or sharding.prefetch_bucket_elements or 0
        beside += BF16_BYTES * (2 * (sharding.reduce_bucket_elements or 0) + gather_bucket)
        if offloads(rank) and sharding.zero < 3:
            # Through which gradients go to the host (runtime/zero/stage_1_and_2.py,
            # `temp_grad_buffer_for_gpu_offload`): the largest tensor, which is the embedding.
            beside += BF16_BYTES * _table_parameters(rank)
    beside += _placeholder_bytes(works) if rank.sums_in_gemms else 0.0
    return head + in_head + beside, layer + in_layer + beside


def _placeholder_bytes(works: list[Work]) -> float:
    """Return the 16-bit gradients that autograd gets where GEMMs add to the sums themselves: one for each shape of a
    weight, without values (Transformer Engine pytorch/module/base.py, `get_dummy_wgrad`).
    """
    gemms = {
        (task.op.m, task.op.n)
        for work in works
        for task in work.backward_weight
        if isinstance(task.op, Gemm) and not task.name.endswith("lm_head_wgrad")
    }
    return BF16_BYTES * sum(float(m) * n for m, n in gemms)


def _largest_weight(rank: Rank, held_chunks: list[LayerChunk]) -> float:
    """Return the elements of the largest weight of the layers."""
    works = [work for chunk in held_chunks for work, _ in chunk_work(rank, replace(chunk, has_head=False))]
    ops = (task.op for work in works for task in work.backward_weight if isinstance(task.op, Gemm))
    return max((float(op.k if rank.setup.job.lora else op.m) * op.n for op in ops), default=0.0)


def _gathered_bytes(rank: Rank, held_chunks: list[LayerChunk]) -> tuple[float, float]:
    """Return ZeRO-3's parameters that are gathered at once or never sharded, and unscattered gradients: in the head,
    and in a layer.
    """
    job = rank.setup.job
    layers = [(group, count) for chunk in held_chunks for group, count in chunk.layers]
    sizes = [layer_parameters(rank, group).total for group, _ in layers]
    unsharded = sum(
        (size - gathered_layer(rank, group).total) * n for size, (group, n) in zip(sizes, layers, strict=True)
    )
    every = sum(size * count for size, (_, count) in zip(sizes, layers, strict=True))
    largest = max(sizes, default=0.0)
    # This layer's parameters and the next one's, or by XLA one weight's after another's, or as many as may be held;
    # gradients likewise, of what is trained.
    at_once = 1 if job.framework == "maxtext" else 2
    whole, held = at_once * largest, sum((chunk_parameters(rank, chunk) for chunk in held_chunks), Parameters())
    reduced = at_once * max((trained(rank, layer_parameters(rank, group)).total for group, _ in layers), default=0.0)
    limit = job.sharding.max_live_elements
    live = whole if limit is None else min(max(float(limit), largest), every)
    ends = held.total - every
    if rank.setup.degrees.pp > 1 and job.framework == "fsdp2":
        # Between the micro-batches of a pipeline, parameters stay gathered and gradients whole
        # (torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`).
        live, reduced = every, trained(rank, held).total
    gather, reduce = _wire_bytes(rank)
    if job.framework == "deepspeed":
        # Parameters that no backward pass needs soon are freed, those of the ends too, and each weight's gradient goes
        # into a bucket at once (runtime/zero/partitioned_param_coordinator.py and stage3.py).
        kept, weight = (min(live, every + ends) + unsharded) * gather, _largest_weight(rank, held_chunks)
        head = _table_parameters(rank) if ends and job.lora is None else 0.0
        return kept + max(head, weight) * reduce, kept + weight * reduce
    # Packed weights are gathered as they are.
    packed = PACKED_BYTES.get(job.precision.frozen_weights, gather) if job.lora is not None else gather
    in_layer = (live + unsharded) * packed + ends * gather + reduced * reduce
    # FSDP2 has freed every layer's parameters when the forward pass ends, and holds those of both ends.
    return ends * gather if _frees_gradients(rank) and job.sharding.reshard_after_forward else in_layer, in_layer


def _frees_gradients(rank: Rank) -> bool:
    """Whether no gradient exists when the only micro-batch's backward pass begins: PyTorch's `zero_grad` drops them."""
    setup = rank.setup
    return setup.job.framework == "fsdp2" and setup.degrees.pp == 1 and setup.degrees.num_microbatches == 1


def _late_moments(
    rank: Rank, chunks: list[LayerChunk], gradients: float, in_layer: float
) -> list[tuple[bool, float, float]]:
    """Return the moments (`HeldMemory`) in FSDP2's last layer, and when both ends are reduced.

    The ends are one unit, whose gradients autograd completes last, in 16 bit; one rank alone copies nothing to reduce.
    """
    ends = sum((chunk_parameters(rank, replace(chunk, layers=())) for chunk in chunks), Parameters())
    gather, reduce = _wire_bytes(rank)
    copies = gather + (reduce if rank.layout(Group.DATA)[0] > 1 else 0.0)
    in_ends = ends.total * gather + trained(rank, ends).total * copies + FIGURES.workspace_bytes
    return [(False, gradients - state_bytes(rank, ends)[1], in_layer), (False, gradients, in_ends)]


SUB_GROUP_ELEMENTS = 10**9
"""Parameters that DeepSpeed's ZeRO-3 updates at once (`sub_group_size` of its configuration)."""


def _stepping_bytes(rank: Rank, held: Parameters) -> float:
    """Return the memory beside state and gradients while DeepSpeed updates parameters: gradients in fp32, of a
    sub-group with ZeRO-3, else of all that a rank owns (runtime/zero/stage3.py and stage_1_and_2.py, `step`).
    """
    num_owned = owned(rank, trained(rank, held))
    at_once = min(num_owned, SUB_GROUP_ELEMENTS) if rank.setup.job.sharding.zero == 3 else num_owned
    return FP32_BYTES * at_once + FIGURES.workspace_bytes


def _wire_bytes(rank: Rank) -> tuple[float, float]:
    precision = rank.setup.job.precision
    return WIRE_BYTES[precision.parameter_gather or "bf16"], WIRE_BYTES[precision.gradient_reduce or "fp32"]


@dataclass(frozen=True)
class HeldMemory:
    """Memory of a rank that follows from the chunks that it holds, in bytes."""

    parameters_bytes: float
    optimizer_bytes: float
    host_bytes: float
    moments: tuple[tuple[bool, float, float], ...]
    """Moments of a step that may need most: whether activations of micro-batches are there, gradients, transients."""
    reserve_bytes: float


def held_memory(rank: Rank, held_chunks: list[LayerChunk]) -> HeldMemory:
    """Return the memory of a rank with these chunks, the same for all stages that hold equal ones."""
    job = rank.setup.job
    held = sum((chunk_parameters(rank, chunk) for chunk in held_chunks), Parameters())
    ends = sum((chunk_parameters(rank, replace(chunk, layers=())) for chunk in held_chunks), Parameters())
    table = sum(_table_parameters(rank) for chunk in held_chunks if chunk.has_embedding)
    parameters, gradients, optimizer = state_bytes(rank, held, ends.total, table)
    in_head, in_layer = transient_bytes(rank, held_chunks)
    moments = [(True, gradients, max(in_head, in_layer))]
    if _frees_gradients(rank):
        late = _late_moments(rank, held_chunks, gradients, in_layer)
        moments = [(True, 0.0, max(in_head, in_layer)), *late]
    if job.framework == "deepspeed" and job.sharding.zero and job.precision.gradients == "bf16" and not offloads(rank):
        moments.append((False, gradients, _stepping_bytes(rank, held)))
    num_communicators = 1 + sum(rank.layout(group)[0] > 1 for group in Group)
    reserve = FIGURES.context_bytes + num_communicators * FIGURES.communicator_bytes
    if rank.setup.device.architecture == "tpu":
        reserve = FIGURES.tpu_reserve_bytes
    in_host = host_bytes(rank, owned(rank, trained(rank, held)), *_kept_on_host(rank, held))
    return HeldMemory(parameters, optimizer, in_host, tuple(moments), reserve)


def _table_parameters(rank: Rank) -> float:
    model = rank.setup.model
    return float(-(-model.vocab_size // rank.tp) * model.hidden_size)


def _kept_on_host(rank: Rank, held: Parameters) -> tuple[float, float]:
    """Return the parameters that a rank offloads, and the bytes of each; fp32 ones are the optimizer's own."""
    job = rank.setup.job
    if not offloads(rank, "parameters") or (job.framework == "fsdp2" and job.lora is None):
        return 0.0, 0.0
    frozen = job.precision.frozen_weights if job.lora is not None else "bf16"
    return owned(rank, held), PACKED_BYTES.get(frozen, WIRE_BYTES.get(frozen, BF16_BYTES))


def stage_memory(
    rank: Rank, stage: int, held: HeldMemory, activations_bytes: float, num_in_flight: float
) -> StageMemory:
    """Return one stage's memory; `activations_bytes` is the peak from the schedule's replay."""
    moments = [(activations_bytes if keeps else 0.0, gradients, rest) for keeps, gradients, rest in held.moments]
    activations_bytes, gradients, transient = max(moments, key=sum)
    parameters, optimizer, reserve = held.parameters_bytes, held.optimizer_bytes, held.reserve_bytes
    # Blocks held without use are freed when there is no room for them.
    held_bytes = (parameters, gradients, optimizer, activations_bytes, transient, reserve)
    room = max(FIGURES.usable_fraction * rank.setup.device.memory_bytes - sum(held_bytes), 0.0)
    unused = min(FIGURES.fragmentation * (activations_bytes + transient), room)
    return StageMemory(stage, *held_bytes, num_in_flight, held.host_bytes, unused)
