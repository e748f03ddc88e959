"""A training job: model, batch, how it spreads over devices, number formats, recomputation, overlap and schedule."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.hardware import Device, Node
from windtunnel.model.precision import Format
from windtunnel.model.shape import ModelSpec
from windtunnel.network.settings import ClusterNetwork
from windtunnel.schema import AtLeastOne, Positive, Schema, check_non_negative, decode, read_table, read_yaml, set_path

Framework = Literal["megatron", "deepspeed", "fsdp2", "deepseek", "maxtext"]

Offload = Literal["none", "optimizer", "parameters"]

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v"]
V_SCHEDULES = ("zb_v", "dualpipe_v")
"""Schedules that fold a pipeline of `2 x pp` chunks into a V: device i has chunks i and 2 pp - 1 - i.

`dualpipe` has `pp` chunks and every device holds two of them, i and pp - 1 - i: parameters are there twice.
"""
CHUNKED_SCHEDULES = ("interleaved", "looped_bfs")
"""Schedules that give every device `virtual_stages` chunks of layers."""

ComputeFormat = Literal[
    "fp32", "fp16", "bf16", "fp8", "fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "int8"
]

_RECIPES: dict[str, dict[str, str]] = read_yaml(Path(__file__).with_name("recipes.yaml"))
GEMM_FORMATS = {name: Format(recipe["gemm"]) for name, recipe in _RECIPES.items()}
"""Format of a training recipe -> the format whose GEMMs cost the same."""
UNITS = {name: recipe["units"] for name, recipe in _RECIPES.items() if "units" in recipe}
"""Format of a training recipe -> the rate that devices with its matrix units publish."""


class TrainingParallelism(Schema):
    """How a job spreads over its devices; `None` follows from the others."""

    tp: AtLeastOne = 1
    sequence_parallel: bool | None = None
    """Norms, dropouts and residuals split along the sequence over `tp`; None: as the framework does."""
    cp: AtLeastOne = 1
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How context-parallel ranks meet each other's keys: passed round, gathered first, or heads exchanged."""
    pp: AtLeastOne = 1
    virtual_stages: AtLeastOne = 1
    """Chunks of layers on each device (VPP)."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each chunk in the order of the forward pass, `pp x virtual_stages` of them; None splits evenly."""
    dp: AtLeastOne | None = None
    ep: AtLeastOne = 1
    experts_tp: AtLeastOne | None = None
    """Ways that each expert is sharded (expert-TP); None takes 1, or `tp` where `ep` is 1."""
    experts_dp: AtLeastOne | None = None
    experts_exchange: Literal["all_to_all", "by_node", "hybrid", "all_gather"] | None = None
    """How tokens reach experts: each on its own, or once for each node and copied there (by_node: DeepEP, hybrid:
    HybridEP); or all of them reach every rank (Megatron's default). None: as the framework does."""
    experts_capacity: Positive | None = None
    """Tokens that each expert takes against an even share, dropped and padded to that number, so that the host waits
    for no count of them (Megatron's `--moe-expert-capacity-factor` with `--moe-pad-expert-input-to-capacity`). None:
    all that come, evenly spread."""

    def check(self) -> None:
        stages = self.layers_per_stage
        if stages is not None and min(stages, default=-1) < 0:
            raise ValueError(f"layers_per_stage is {list(stages)}; no stage has fewer than 0 layers")
        num_chunks = self.pp * self.virtual_stages
        if stages is not None and len(stages) != num_chunks:
            raise ValueError(
                f"layers_per_stage has {len(stages)} entries; pp x virtual_stages = {self.pp} x {self.virtual_stages} "
                f"= {num_chunks} are needed"
            )


class Sharding(Schema):
    """What data-parallel ranks divide among themselves, ZeRO's stages (arXiv:1910.02054), and in which pieces.

    `None` takes the framework's. Sizes count elements, as DeepSpeed's options of these names do.
    """

    zero: Literal[0, 1, 2, 3] | None = None
    """1: optimizer state (Megatron's distributed optimizer), 2: gradients too, 3: parameters too (FSDP)."""
    group: AtLeastOne | None = None
    """Ranks that share one copy; between groups gradients are all-reduced (HSDP). None: all of them."""
    reshard_after_forward: bool = True
    """ZeRO-3: parameters are gathered again for the backward pass."""
    reduce_bucket_elements: AtLeastOne | None = None
    """Gradients reduced together; ZeRO-3 outside DeepSpeed reduces layer by layer."""
    gather_bucket_elements: AtLeastOne | None = None
    """DeepSpeed's ZeRO-1 and 2: updated parameters gathered together."""
    prefetch_bucket_elements: AtLeastOne | None = None
    """DeepSpeed's ZeRO-3: parameters gathered together."""
    persistence_threshold_elements: int | None = None
    """DeepSpeed's ZeRO-3: smaller parameters are never sharded."""
    max_live_elements: int | None = None
    """DeepSpeed's ZeRO-3: gathered parameters held at once."""
    offload: Offload = "none"
    """What waits in the host's memory. optimizer: fp32 state, which the host's processors update (ZeRO-Offload,
    arXiv:2101.06840; DeepSpeed's `offload_optimizer`, Megatron's `--optimizer-cpu-offload`). parameters: 16-bit
    parameters too, which come to the device for every use (`offload_param` of ZeRO-3, FSDP2's `CPUOffloadPolicy`)."""
    host_parameters_per_s: Positive | None = None
    """Parameters that all processors of one host update a second; None: as measured with DeepSpeed's CPU Adam, scaled
    by the bandwidth of the host's memory."""


class TrainingPrecision(Schema):
    """Number formats. `None` takes the framework's."""

    compute: ComputeFormat = "bf16"
    """GEMMs of the layers; the head, attention's core and norms stay in 16 bit. `fp8` scales a tensor by what earlier
    steps saw (delayed scaling), `fp8_current` by what is in it, `fp8_rowwise` each row of it by that."""
    gradients: Literal["fp32", "bf16"] | None = None
    """In which micro-batches are summed."""
    gradient_reduce: Literal["fp32", "bf16"] | None = None
    """On the wire between data-parallel ranks."""
    parameter_gather: Literal["fp32", "bf16", "fp8"] | None = None
    """Parameters on the wire."""
    master_weights: Literal["fp32", "remainder", "bf16"] | None = None
    """The optimizer's own copy; remainder: the 16 bits that a bf16 parameter lacks of it (`store_param_remainders` of
    Apex and Transformer Engine); bf16: none, it updates the parameters themselves."""
    moments: Literal["fp32", "bf16", "fp8", "int8"] = "fp32"
    """The optimizer's state, per moment. int8: blocks of 256 values with a scale (bitsandbytes' 8-bit optimizers,
    arXiv:2110.02861); those of the embedding stay in fp32, as Hugging Face's Trainer has them."""
    experts_dispatch: Literal["bf16", "fp8"] | None = None
    """Tokens on their way to experts in the forward pass."""
    activation_input: Literal["bf16", "fp8"] | None = None
    """In which an activation's input is kept (Megatron-Core's `activation_func_fp8_input_store`)."""
    frozen_weights: Literal["bf16", "fp8", "int8", "nf4"] = "bf16"
    """Weights that LoRA does not train. nf4: 4 bits with quantised scales (QLoRA, arXiv:2305.14314), which every
    product first unpacks to bf16; int8: 8 bits with a scale a row, multiplied so forward, no faster than in bf16, and
    unpacked backward (LLM.int8(), arXiv:2208.07339). In both, embedding and head stay in bf16."""


RecomputedModule = Literal[
    "core_attention", "norms", "activation", "latent_up_projection", "feed_forward", "experts", "every_second_product"
]
"""What selective recomputation can drop; `every_second_product` is what torchtitan calls selective checkpointing."""

BY_OPERATOR: tuple[RecomputedModule, ...] = ("norms", "activation", "every_second_product")
"""What torchtitan's `selective_ac_option = "op"` computes again: all but attention, every other product and what ranks
exchange."""


class Recompute(Schema):
    """What the backward pass computes again so as not to keep it (arXiv:2205.05198, section 5)."""

    granularity: Literal["none", "selective", "full"] = "none"
    modules: tuple[RecomputedModule, ...] | None = None
    """Of selective recomputation; None takes `core_attention`. Flash attention recomputes its scores anyhow; naming it
    then costs nothing more than its forward pass."""
    num_layers: Annotated[int, check_non_negative] | None = None
    """Layers of each chunk that are fully recomputed; None: all."""
    distribute: bool = False
    """Full: kept layer inputs are split over tensor-parallel ranks and gathered again."""
    offload_layers: Annotated[int, check_non_negative] = 0
    """Layers whose activations wait in the host's memory (Transformer Engine's CPU offloading)."""


class TrainingOverlap(Schema):
    """What runs beside computation. `None` takes the framework's."""

    gradient_reduce: bool | None = None
    parameter_gather: bool | None = None
    tensor_parallel: bool | None = None
    """GEMMs cut into pieces that travel while others compute (Transformer Engine's userbuffers, async TP)."""
    tensor_gradient: bool | None = None
    """Tensor-parallel collectives of the backward pass beside the weights' gradients (Megatron-LM from 2022 on)."""
    pipeline: bool | None = None
    experts: bool | None = None
    """Dispatch and combine beside another micro-batch's computation (DualPipe, Megatron's 1F1B A2A overlap)."""


class Kernels(Schema):
    """Which kernels compute what is not a GEMM. `None` takes the framework's."""

    attention: Literal["flash", "flash2", "triton", "unfused"] | None = None
    """`flash`: the kernels that were measured on the device (cuDNN's, FlashAttention-3). `flash2`: FlashAttention-2,
    which older PyTorch calls itself and which is slower on Hopper. `triton`: FlashAttention of 2022 in Triton.
    `unfused` keeps the scores in memory (before 2022)."""
    cross_entropy: Literal["in_place", "separate", "fp32", "eager", "chunked"] | None = None
    """Which copies of the logits the loss keeps. in_place: their gradient takes their place (Transformer Engine);
    separate: it is a second 16-bit tensor (FlashAttention's, torch.compile); fp32: beside them is a fp32 copy
    (Megatron-LM's own); eager: PyTorch's, with their logarithmic softmax; chunked: a piece at a time."""
    cuda_graphs: Literal["none", "routing", "partial", "full"] | None = None
    """What is launched as a graph: nothing, routing, attention and routing, or a whole step. It matters to mixtures of
    experts, where the host waits for the number of tokens of each expert before it can launch what follows."""
    fused_experts: bool | None = None
    """Grouped products with activation and quantisation in one kernel (Megatron-Core's `cutedsl_fused_grouped_mlp`)."""
    fused: bool | None = None
    """Norms, activations, rope, residuals, loss each in one pass (Transformer Engine, torch.compile); else one kernel
    for each operation, as eager PyTorch."""


_OfAttention = Literal[
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"
]
LoraTarget = _OfAttention | Literal["gate_proj", "up_proj", "gate_up_proj", "down_proj"]


class Lora(Schema):
    """Adapters beside frozen linear layers (arXiv:2106.09685): `rank x (inputs + outputs)` parameters at each."""

    rank: AtLeastOne = 16
    all_linear: bool = True
    """Adapters at every linear layer but the head and routers, those of each expert too; else at those of attention
    only."""
    target_modules: tuple[LoraTarget, ...] | None = None
    """Adapters at these linear layers only, in each expert too. `qkv_proj` and `gate_up_proj` are one adapter for what
    is fused (Megatron-Core's), `q_proj` and the like one for each (PEFT's). None: as `all_linear` says."""
    dropout: bool = False
    """Before adapters: the input is written again, and kept so with its mask."""

    def check(self) -> None:
        if self.target_modules is not None and not (self.all_linear and self.target_modules):
            raise ValueError("target_modules takes the place of all_linear: name one module or more, or leave it out")


class TrainingFaults(Schema):
    """What interrupts a run, and what an interruption costs; the goodput follows (Young 1974, Daly 2006)."""

    device_mtbf_s: Positive | None = None
    """Mean time between failures of one device with its share of host and network; None: nothing fails. Llama 3 405B:
    1.8e8 s, 419 interruptions of 16,384 H100 in 54 days (arXiv:2407.21783, section 3.3.4)."""
    restart_s: float = 600.0
    """From a failure to the first new step, without the lost work."""
    checkpoint_interval_s: Positive | None = None
    """None takes Young's optimum."""
    checkpoint_bytes_per_s: Positive | None = None
    """Storage bandwidth of the whole job; None: checkpoints cost nothing."""
    checkpoint_blocks: bool = True
    """False: written beside training; only failures lose work."""
    straggler_fraction: float = 0.0
    """Standard deviation of devices' speed, relative; every step waits for the slowest."""
    jitter_by_doubling: Annotated[float, check_non_negative] | None = None
    """Share of a step that each doubling of the devices beyond eight costs; None: what clusters lose in the median."""

    def check(self) -> None:
        if self.restart_s < 0 or not 0 <= self.straggler_fraction < 1:
            raise ValueError("restart_s is at least 0 and straggler_fraction from 0 to below 1")


class TrainingJob(Schema):
    """One training run, as a person writes it down."""

    model: str | ModelSpec
    """A catalog name, the path of a config.json, or a model written out: a `ModelSpec` or the keys of a config.json."""
    device: str | Device
    """A catalog name, a YAML file, or a device written out; the node likewise."""
    sequence_tokens: AtLeastOne
    global_batch: AtLeastOne
    """Sequences of one optimizer step."""
    node: str | Node | None = None
    """None takes the usual node of the device."""
    num_devices: AtLeastOne | None = None
    """None: tp x cp x pp x dp."""
    micro_batch: AtLeastOne = 1
    """Sequences that a rank computes at once."""
    num_microbatches: AtLeastOne | None = None
    """Gradient accumulation: micro-batches of one rank in a step; None follows from the batch."""
    parallelism: TrainingParallelism = TrainingParallelism()
    sharding: Sharding = Sharding()
    precision: TrainingPrecision = TrainingPrecision()
    recompute: Recompute = Recompute()
    lora: Lora | None = None
    """Low-rank adapters are trained and nothing else."""
    optimizer: Literal["adam", "sgd_momentum", "sgd", "adafactor", "muon", "lion"] = "adam"
    overlap: TrainingOverlap = TrainingOverlap()
    kernels: Kernels = Kernels()
    schedule: ScheduleName | None = None
    """None: `1f1b`, or `interleaved` with virtual stages."""
    framework: Framework = "megatron"
    dropout: bool = False
    """Masks are kept; GPT-3 and its contemporaries."""
    learned_positions: bool = False
    """A position embedding of `sequence_tokens` rows (GPT-2, GPT-3)."""
    mtp_layers: Annotated[int, check_non_negative] = 0
    """Layers of multi-token prediction on the last stage (arXiv:2412.19437, section 2.2): each is a layer like the
    model's last one, a product that joins its input with the next token's embedding, and the head once more."""
    document_tokens: AtLeastOne | None = None
    """Mean length of the documents that sequences are packed from, where attention does not cross from one to the next;
    None: a sequence is one document."""
    total_tokens: Positive | None = None
    """Of the whole run; gives its duration, energy and price."""
    faults: TrainingFaults = TrainingFaults()
    network: ClusterNetwork | None = None
    """Between the nodes; None takes closed forms over their published links."""
    price_usd_per_hour: float | None = None
    """Of one device; None takes the catalog's list price."""


def load(path: Mapping[str, Any] | Path | str | None, overrides: dict[str, Any] | None = None) -> TrainingJob:
    """Return the job in a YAML or JSON file, if there is one, with every override over it.

    Args:
        path: the file, or the job's keys.
        overrides: as `--set` gives them: dotted path -> value.

    Raises:
        InputError: the file is missing or wrong, an override names no field, or what a job needs is given by neither.
    """
    if path is None or isinstance(path, Mapping):
        raw, path = copy.deepcopy(dict(path or {})), None
    else:
        catalog.check_is_file(Path(path))
        raw = read_table(Path(path), "a training job", JOB_HINT)
    _without_dependents(raw, overrides or {})
    for dotted, value in (overrides or {}).items():
        set_path(raw, dotted, value)
    if path is not None and "deployment" in raw:
        raise InputError(f"{path} describes a deployment, not a training job", "give it to windtunnel simulate")
    if raw.get("kind") == "diffusion":
        raise InputError(f"{path or 'this'} generates images or videos: training that is not modelled")
    if path is not None and raw.keys().isdisjoint(TrainingJob.__struct_fields__):
        raise InputError(f"{path} is not a training job: it has none of {', '.join(_NEEDED)}", JOB_HINT)
    for name, what in _NEEDED.items():
        if raw.get(name) is None:
            raise InputError(
                f"{name} is missing: {what}", f"give --{name.replace('_', '-')}, or {name} in a file or in Python"
            )
    if isinstance(raw["model"], Mapping):
        raw["model"] = catalog.model(raw["model"])
    return decode(raw, TrainingJob, str(path) if path is not None else "")


_HANG_ON = {
    "recompute.granularity": ("none", ("modules", "num_layers", "distribute")),
    "parallelism.pp": (1, ("layers_per_stage",)),
    "parallelism.virtual_stages": (1, ("layers_per_stage",)),
}
"""Field -> its default, and the fields beside it that say something of that value alone."""


def _without_dependents(raw: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Leave out of a job's keys what hangs on a field that is overridden with another value, unless it is too."""
    for dotted in overrides.keys() & _HANG_ON.keys():
        section, name = dotted.split(".")
        table, (usual, fields) = raw.get(section), _HANG_ON[dotted]
        if isinstance(table, dict) and table.get(name, usual) != overrides[dotted]:
            for field in {*fields} - {path.removeprefix(f"{section}.") for path in overrides}:
                table.pop(field, None)


JOB_HINT = "see docs/guides/first-training-job.md"
_NEEDED = {
    "model": "a model of the catalog (`windtunnel catalog models`)",
    "device": "a device of the catalog (`windtunnel catalog devices`)",
    "sequence_tokens": "tokens of one sequence, as 4096",
    "global_batch": "sequences of one optimizer step, as 128",
}
