"""Arguments of AICB's generators, under AICB's names (utils/utils.py)."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.errors import InputError, check_known
from windtunnel.schema import read_yaml

FRAMES = ("Megatron", "DeepSpeed", "collective_test", "DeepSeek")


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Arguments of AICB's training generators with their defaults (`get_params` in utils/utils.py)."""

    frame: str = "Megatron"
    gpu_type: str | None = None
    model_name: str | None = None
    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel: int = 1
    context_parallel_size: int = 1
    """Changes nothing in a generated file."""
    pp_rank: int = -1
    global_batch: int = 4
    micro_batch: int = 1
    epoch_num: int = 1
    computation_enable: bool = False
    hidden_size: int = 1024
    num_layers: int = 24
    seq_length: int = 2048
    num_attention_heads: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int = 32000
    make_vocab_size_divisible_by: int = 128
    add_bias_linear: bool = False
    use_flash_attn: bool = False
    swiglu: bool = False
    enable_sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    recompute_activations: bool = False
    aiob_enable: bool = False
    comp_filepath: str | None = None
    # Experts
    moe_enable: bool = False
    expert_model_parallel_size: int = 1
    num_experts: int = 1
    moe_router_topk: int = 1
    moe_grouped_gemm: bool = False
    # DeepSeek
    n_dense_layers: int = 3
    n_shared_expert: int = 2
    qk_rope_dim: int = 64
    qk_nope_dim: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    v_head_dim: int = 128
    # DeepSpeed; sizes in elements
    stage: int = 3
    amp_enabled: bool = False
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    contiguous_gradients: bool = False
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    prefetch_bucket_size: int = 1_000_000_000
    # Collective tests
    begin_size: int = 1048576
    end_size: int = 1048576
    test_comm: str = "all_reduce"
    iter_num: int = 500
    multi_all_reduce_enable: int = 0

    def __post_init__(self) -> None:
        check_known(self.frame, FRAMES, f"--frame is {self.frame!r}", f"it is one of {', '.join(FRAMES)}")
        if self.stage not in (1, 2, 3):
            raise InputError(f"--stage is {self.stage}; it is 1, 2 or 3")
        for name in ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel", "micro_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} is {getattr(self, name)}; at least 1 is needed")
        ranks = self.tensor_model_parallel_size * self.pipeline_model_parallel
        if self.world_size % ranks:
            raise InputError(
                f"--world_size {self.world_size} is not a multiple of tensor_model_parallel_size x "
                f"pipeline_model_parallel = {self.tensor_model_parallel_size} x {self.pipeline_model_parallel}"
            )
        if self.moe_enable and not self.enable_sequence_parallel:
            raise InputError("--moe_enable needs --enable_sequence_parallel")
        if self.expert_model_parallel_size > 1 and self.num_experts % self.expert_model_parallel_size:
            raise InputError(
                f"--num_experts {self.num_experts} is not a multiple of --expert_model_parallel_size "
                f"{self.expert_model_parallel_size}"
            )

    @property
    def data_parallel(self) -> int:
        return self.world_size // (self.tensor_model_parallel_size * self.pipeline_model_parallel)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step, rounded down, to 0 where the batch is too small."""
        return self.global_batch // (self.data_parallel * self.micro_batch)

    @property
    def layers_per_stage(self) -> int:
        """Layers of each stage, rounded down."""
        return self.num_layers // self.pipeline_model_parallel

    @property
    def heads(self) -> int:
        """Attention heads; AICB takes the number of layers where none is given."""
        return self.num_attention_heads or self.num_layers

    @property
    def padded_vocab_size(self) -> int:
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def feed_forward_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int((4 * self.hidden_size * 2 / 3) / 64) * 64 if self.swiglu else 4 * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class InferenceArguments:
    """Arguments of AICB's inference generators with their defaults (SimAI_inference_workload_generator.py)."""

    model_name: str
    config_file: str | None = None
    phase: str = "decode"
    seq_length: int = 1
    micro_batch: int = 1
    world_size: int = 1
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    pipeline_model_parallel: int = 1

    def __post_init__(self) -> None:
        least = max(1, self.tensor_model_parallel_size, self.expert_model_parallel_size)
        if self.world_size < least:
            raise InputError(f"--world_size is {self.world_size}; tensor and expert parallelism need at least {least}")
        if self.phase not in ("decode", "prefill"):
            raise InputError(f"--phase is {self.phase!r}; it is decode or prefill")


Arguments = TrainingArguments | InferenceArguments


@dataclass(frozen=True)
class Command:
    """One command line of AICB."""

    generator: str
    """Module of workload_generator that it runs."""
    arguments: Arguments
    remarks: tuple[str, ...] = ()
    """Changes that AICB makes to the command in silence."""
    writes_nothing: tuple[str, str] | None = None
    """Why AICB writes no file for it without a GPU, and what to type instead; the command still describes a job."""


WORDS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("words.yaml"))
"""Names that AICB's generators and files use, by subject."""
