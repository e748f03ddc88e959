"""Chunks: the layers that a pipeline device runs together, and the parameters that each of its ranks holds of them."""

from dataclasses import dataclass, replace

from windtunnel.errors import InputError
from windtunnel.model.shape import LayerGroup
from windtunnel.training.job import V_SCHEDULES
from windtunnel.training.layers.parts import layer_parts
from windtunnel.training.layers.rank import Rank
from windtunnel.training.setup import TrainingSetup


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank."""

    dense: float = 0.0
    experts: float = 0.0
    adapters: float = 0.0
    """Those that LoRA trains, beside the others; and of experts."""
    experts_adapters: float = 0.0

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(*(sum(pair) for pair in zip(self.counts, other.counts, strict=True)))

    def __mul__(self, count: float) -> "Parameters":
        return Parameters(*(own * count for own in self.counts))

    @property
    def counts(self) -> tuple[float, float, float, float]:
        return self.dense, self.experts, self.adapters, self.experts_adapters

    @property
    def total(self) -> float:
        return self.dense + self.experts


@dataclass(frozen=True)
class LayerChunk:
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
        """Key of a chunk's work: equal chunks of a pipeline are priced once."""
        return (self.layers, self.has_embedding, self.has_head)


def chunks(setup: TrainingSetup) -> tuple[LayerChunk, ...]:
    """Return every chunk of the pipeline, in the order of the forward pass.

    Groups of layers that differ in their feed-forward come one after the other, as the model lists them (DeepSeek's
    dense layers first); groups that differ in attention alone alternate, so that every chunk has its share, as do
    layers of one part (hybrids).
    """
    runs: list[tuple[float, list[LayerGroup]]] = []
    is_hybrid = any(group.attention is None or group.feed_forward is None for group in setup.model.layers)
    for group in setup.model.layers:
        if runs and (is_hybrid or runs[-1][1][0].feed_forward == group.feed_forward):
            runs[-1] = (runs[-1][0] + group.num_layers, [*runs[-1][1], group])
        else:
            runs.append((float(group.num_layers), [group]))
    split, pp = list[LayerChunk](), setup.degrees.pp
    for index, num_held in enumerate(setup.layers_per_chunk):
        layers: list[tuple[LayerGroup, float]] = []
        left = float(num_held)
        while left > 0:
            num_layers, groups = runs[0]
            taken = min(left, num_layers)
            total = sum(group.num_layers for group in groups)
            layers += [(group, taken * group.num_layers / total) for group in groups]
            left -= taken
            if taken == num_layers:
                runs.pop(0)
            else:
                runs[0] = (num_layers - taken, groups)
        # Of DualPipe's two devices, the one whose direction is forward.
        stage = 2 * pp - 1 - index if setup.job.schedule in V_SCHEDULES and index >= pp else index % pp
        is_last = index == setup.degrees.num_chunks - 1
        if is_last and setup.job.mtp_layers:
            layers.append((setup.model.layers[-1], float(setup.job.mtp_layers)))
        split.append(LayerChunk(index, stage, tuple(layers), index == 0, is_last))
    return tuple(split)


def trained(rank: Rank, held: Parameters) -> Parameters:
    """Count the parameters of `held` that are trained: all, or adapters alone."""
    return held if rank.setup.job.lora is None else Parameters(held.adapters, held.experts_adapters)


def layer_parameters(rank: Rank, group: LayerGroup) -> Parameters:
    """Count one layer's parameters on one rank; norms, routers and latent down-projections are on every tensor rank."""
    key = ("parameters", id(group))  # the rank's model keeps its groups
    if key not in rank.works:
        rank.works[key] = _layer_parameters(rank, group)
    held: Parameters = rank.works[key]
    return held


def num_adapter_parameters(setup: TrainingSetup) -> float:
    """Count the parameters of a job's adapters, on all ranks together; raise InputError where the model has none."""
    whole = Rank(replace(setup, degrees=replace(setup.degrees, tp=1, ep=1, experts_tp=1)))
    held = (trained(whole, layer_parameters(whole, group)).total * group.num_layers for group in setup.model.layers)
    if num_adapters := sum(held):
        return num_adapters
    targets = ", ".join((setup.job.lora and setup.job.lora.target_modules) or ())
    raise InputError(f"lora.target_modules is {targets}, and {setup.model.name} has none of them", "name others")


def _layer_parameters(rank: Rank, group: LayerGroup) -> Parameters:
    tp, width = rank.tp, rank.width
    held = Parameters(group.num_norms * width * (2.0 if rank.setup.model.norm_bias else 1.0))
    if group.attention is not None:
        of_rank = group.attention.rank_parameters(width, tp)
        held = Parameters(of_rank) + held + Parameters(float(group.attention.norm_parameters()))
    if group.feed_forward is not None:
        count, known = group.feed_forward.parameters(width), rank.setup.degrees
        held = held + Parameters(count.dense / tp + count.shared / tp + count.router)
        held = held + Parameters(0.0, count.routed / (known.ep * known.experts_tp))
    if rank.setup.job.lora is not None:
        for part in layer_parts(rank, group):
            of_experts = part.adapters if part.module == "experts" else 0.0
            held = held + Parameters(adapters=part.adapters - of_experts, experts_adapters=of_experts)
    return held


def chunk_parameters(rank: Rank, chunk: LayerChunk) -> Parameters:
    """Count the parameters of a chunk on one rank: its layers, the embedding and the head where it has them.

    A tied head on another device than the embedding is a copy of it.
    """
    model = rank.setup.model
    table = -(-model.vocab_size // rank.tp) * model.hidden_size
    held = sum((layer_parameters(rank, group) * count for group, count in chunk.layers), Parameters())
    if chunk.has_embedding:
        job = rank.setup.job
        positions = model.learned_positions or (job.sequence_tokens if job.learned_positions else 0)
        held = held + Parameters(float(table + positions * model.hidden_size))
    if chunk.has_head:
        norm = model.hidden_size * (2 if model.norm_bias else 1)
        has_table = not model.tie_word_embeddings or rank.setup.degrees.pp > 1
        held = held + Parameters(float(norm + (table if has_table else 0)))
        if predicted := rank.setup.job.mtp_layers:
            copy = table if copies_embedding(rank) and not model.tie_word_embeddings else 0
            held = held + Parameters(copy + predicted * (3.0 * norm + 2 * model.hidden_size**2 / rank.tp))
    return held


def copies_embedding(rank: Rank) -> bool:
    """Whether the last stage holds a copy of the embedding, as a tied head or for multi-token prediction (Megatron-Core
    multi_token_prediction.py). Schedules that fold a pipeline have both ends on one device (arXiv:2412.19437, section
    3.2.1).
    """
    job = rank.setup.job
    predicts = job.mtp_layers > 0 and job.schedule not in (*V_SCHEDULES, "dualpipe")
    return rank.setup.degrees.pp > 1 and (rank.setup.model.tie_word_embeddings or predicts)
