"""Peak of an engine's profiling run on one device: the layers at full budget, then the sampler at full batch."""

from dataclasses import dataclass

from windtunnel.hardware import Device
from windtunnel.model.memory import value_bytes
from windtunnel.model.operators import FP32_BYTES
from windtunnel.model.shape import HIDDEN_STATES, Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.defaults import profiling_of
from windtunnel.units import KIB, MIB

CUBLAS_BYTES = {"hopper": 32 * MIB, "blackwell": 32 * MIB}
OTHER_CUBLAS_BYTES = 8320 * KIB
"""cuBLAS's workspace by architecture (PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp, 2.4 to 2.10)."""
STAGE_STATES = 2
"""Hidden states and residual, in buffers that go from one pipeline stage to the next."""
MOST_EXPERTS_TOKENS = 16384
"""Tokens of all ranks that experts' workspace is made for (vLLM 0.12 to 0.17: VLLM_FUSED_MOE_CHUNK_SIZE)."""


@dataclass(frozen=True)
class Activations:
    """Memory of a profiling run, in bytes of one device."""

    forward_bytes: float
    """Widest point of the layers."""
    sampler_bytes: float
    """Logits and the sampler's temporaries, which come after the layers."""
    kept_bytes: float
    """Workspaces that stay allocated: cuBLAS's, experts', images' embeddings, buffers between pipeline stages."""

    @property
    def peak_bytes(self) -> float:
        """Peak of the run ("peak activation" of vLLM)."""
        return self.kept_bytes + max(self.forward_bytes, self.sampler_bytes)


def activations(
    shard: Shard, device: Device, engine: EngineSettings, max_model_len: int, last_stage: bool = True
) -> Activations:
    """Return the memory of the run in which `engine` profiles a stage of the pipeline; the last one samples."""
    assert engine.max_num_batched_tokens is not None
    model, tokens, each = shard.model, engine.max_num_batched_tokens, value_bytes(shard)
    keeps = profiling_of(engine).keeps_experts_workspace
    widest = workspace = 0.0
    for _, part in model.feed_forwards:
        kept = part.workspace_values(shard) if keeps else 0.0
        widest = max(widest, HIDDEN_STATES * model.hidden_size if kept else part.peak_values(shard))
        workspace = max(workspace, kept / shard.parallelism.attention_dp)
    gathered = min(tokens * shard.parallelism.attention_dp, max(MOST_EXPERTS_TOKENS, tokens))
    kept_values = gathered * workspace
    kept_values += tokens * model.hidden_size * (STAGE_STATES if shard.parallelism.pp > 1 else 0)
    kept_values += tokens * model.hidden_size if model.tower_parameters else 0.0
    return Activations(
        forward_bytes=tokens * widest * each,
        sampler_bytes=sampler_bytes(shard, device, engine, max_model_len) if last_stage else 0.0,
        kept_bytes=kept_values * each + CUBLAS_BYTES.get(device.architecture, OTHER_CUBLAS_BYTES),
    )


def sampler_bytes(shard: Shard, device: Device, engine: EngineSettings, max_model_len: int) -> float:
    """Return the peak while the profiling run samples: every rank has gathered the logits of the whole vocabulary.

    vLLM samples `max_num_seqs` dummy requests with a top-k and a top-p, whatever is served later
    (`GPUModelRunner._dummy_sampler_run`): the logits, their fp32 copy and what the sampler makes of it; beside them the
    step's hidden states, and two copies of the rows that are sampled.
    """
    assert engine.max_num_batched_tokens is not None
    assert engine.max_num_seqs is not None
    model, profiling, tokens = shard.model, profiling_of(engine), engine.max_num_batched_tokens
    rows = min(engine.max_num_seqs, tokens)
    if profiling.samples_prompts:
        rows = -(-tokens // max_model_len)
    logits = rows * model.vocab_size * (value_bytes(shard) + profiling.sampler_bytes)
    buffers = (device.num_sms or 0) * model.vocab_size * FP32_BYTES if profiling.sampler_rows_by_sm else 0.0
    return logits + buffers + (tokens + 2 * rows) * model.hidden_size * value_bytes(shard)


def graph_bytes(engine: EngineSettings, sizes: int, full_sizes: int) -> float:
    """Return the memory that an engine sets aside for CUDA graphs of so many sizes; 0 where it does not.

    vLLM from 0.20 on captures the two largest graphs of each kind and extrapolates (`profile_cudagraph_memory`).
    """
    profiling = profiling_of(engine)
    return profiling.first_graph_bytes + profiling.graph_bytes * (sizes + full_sizes) if sizes else 0.0
