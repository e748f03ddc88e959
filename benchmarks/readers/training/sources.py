"""Facts that tables of published training runs do not print: sources, models, devices, formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Source:
    """Facts of all runs of one source that their tables do not print."""

    framework: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the job, as a YAML file would give them."""
    vocab_size: int | None = None
    """Used where the table leaves it out."""
    scale_out_bytes_per_s: float | None = None
    """Per device, where it is not the usual node's."""
    fp8: str = "fp8"
    """The recipe that it calls FP8."""


SELENE: dict[str, Any] = {"faults": {"jitter_by_doubling": 0.0012}}
"""NVIDIA's own cluster: the median of four series from one device to 1,024 (Megatron-LM, megatron.csv)."""

GPT_ERA: dict[str, Any] = {
    "dropout": True,
    "learned_positions": True,
    "parallelism": {"sequence_parallel": False},
    "kernels": {"attention": "unfused", "fused": True, "cross_entropy": "fp32"},
    "overlap": {"gradient_reduce": False, "parameter_gather": False, "tensor_gradient": False, "pipeline": False},
}
"""Megatron-LM of 2021: fused softmax, bias-GeLU and bias-dropout-add, no flash attention, nothing overlapped."""

SOURCES: dict[str, Source] = {
    # arXiv:2104.04473: no distributed optimizer, gradients all-reduced after the last micro-batch.
    **{
        name: Source(
            "megatron",
            {
                **GPT_ERA,
                **SELENE,
                "sharding": {"zero": 0},
                "precision": {"compute": "fp16", "gradients": "bf16", "gradient_reduce": "bf16"},
            },
            vocab_size=51200,
        )
        for name in ("Megatron-LM SC21", "Megatron-LM Jan 2021", "Megatron-LM Sep 2020", "Megatron-LM README (GPT-3")
    },
    # Table 5 of arXiv:2205.05198; one model replica. Megatron-LM sums gradients in fp32 for bf16 only (arguments.py).
    "SeqPar": Source(
        "megatron",
        {
            **GPT_ERA,
            **SELENE,
            "overlap": {**GPT_ERA["overlap"], "tensor_gradient": True},
            "sharding": {"zero": 0},
            "precision": {"compute": "fp16", "gradients": "bf16", "gradient_reduce": "bf16"},
        },
        vocab_size=51200,
    ),
    # Megatron-DeepSpeed, ZeRO-1 with bf16 or fp16; 2,048 sequences where a table does not say, and a vocabulary of
    # 250,680 tokens in multiples of 128 x TP (chronicles-prequel.md, "Best TFLOPs"). A node of 8 GPUs has 4 Omni-Path
    # links of 100 Gb/s (jz/hpc-specs.md), of which NCCL 2.10 took one for every ring (NET/IB/1 throughout in
    # experiments/bandwidth/all_reduce_bench-a100-n4.txt, which reached 5 GB/s a node by it).
    "BigScience BLOOM": Source(
        "deepspeed",
        {**GPT_ERA, "global_batch": 2048, "sharding": {"zero": 1}, "precision": {"gradient_reduce": "bf16"}},
        vocab_size=250880,
        scale_out_bytes_per_s=12.5e9 / 8,
    ),
    # MegatronLM README and its H100 figure: distributed optimizer, overlapped reduction and gather, flash attention.
    "Megatron-LM": Source("megatron", {"overlap": {"tensor_parallel": True}}),
    # Llama 3: FSDP that keeps parameters between forward and backward (ZeRO-2), interleaved 1F1B, all-gather CP; the
    # 126 layers, one taken from each end, give 16 stages 8 chunks of one layer (arXiv:2407.21783, section 3.3.2).
    "Llama 3 paper": Source(
        "megatron", {"sharding": {"zero": 2}, "parallelism": {"cp_method": "all_gather", "virtual_stages": 8}}
    ),
    # arXiv:2412.19437: batches grow to 15,360 sequences (4.2); DualPipe and experts over 64 ranks (3.2); norms, SwiGLU
    # and the up-projections of attention are recomputed (3.2.3); tiles of 1 x 128 and 128 x 128 values have a scale
    # (3.3.2); one further token is predicted (2.2, 4.2).
    "DeepSeek-V3": Source(
        "deepseek",
        {
            "precision": {"moments": "bf16"},
            "global_batch": 15360,
            "mtp_layers": 1,
            "recompute": {"granularity": "selective", "modules": ["norms", "activation", "latent_up_projection"]},
        },
        fp8="fp8_block",
    ),
    # NeMo's performance recipes: userbuffers for tensor parallelism, gradients reduced and kept in bf16, of the master
    # copy only what a bf16 parameter lacks (NeMo megatron_base_model.py; Megatron-Core optimizer/__init__.py).
    "NeMo": Source(
        "megatron",
        {
            "overlap": {"tensor_parallel": True},
            "precision": {"gradients": "bf16", "gradient_reduce": "bf16", "master_weights": "remainder"},
            "parallelism": {"experts_exchange": "by_node"},
        },
    ),
    # FSDP1 with flash attention in Triton; learned positions, tied embeddings, eager layer norms (llm-foundry,
    # scripts/train/benchmarking); FlashAttention's cross entropy (llmfoundry/models/mpt, `fused_crossentropy`).
    "MosaicML llm-foundry": Source(
        "fsdp2",
        {
            "learned_positions": True,
            "precision": {"gradients": "fp32"},
            "kernels": {"attention": "triton", "cross_entropy": "separate"},
        },
    ),
    # torchao's default recipe, a scale for each tensor; parameters are gathered in 8 bit with it (torchtitan
    # docs/float8.md). PyTorch called FlashAttention-2 itself.
    "torchtitan": Source("fsdp2", {"kernels": {"attention": "flash2"}}, fp8="fp8_current"),
    "MLPerf": Source(
        "megatron",
        {
            "overlap": {"tensor_parallel": True},
            "precision": {"gradients": "bf16", "gradient_reduce": "bf16", "master_weights": "remainder"},
        },
    ),
    "MLPerf Training reference": Source("deepspeed", {"sharding": {"zero": 3}, "lora": {"dropout": True}}),
    # Baseline and system of arXiv:2402.15627, section 6: GPT with a vocabulary of 64,000, FlashAttention-2.
    "MegaScale": Source("megatron", {"learned_positions": True, "kernels": {"attention": "flash2"}}, vocab_size=64000),
    "MaxText": Source("maxtext", {}),
    "Google tpu-recipes": Source("maxtext", {}),
}
LORA_OF_MLPERF: dict[str, Any] = {
    "precision": {"frozen_weights": "fp8", "activation_input": "fp8"},
    "lora": {"dropout": True},
}
"""Submissions of Llama 2 70B LoRA: dropout as the benchmark's rules say, FP8_ACTIVATION of NVIDIA's configurations, and
weights that are only there in 8 bit."""
SOURCES["NVIDIA DGX Cloud"] = SOURCES["NeMo"]
# Its recipes are named FP8_CS (scripts/performance/configs).
SOURCES["Megatron-Bridge"] = replace(SOURCES["NeMo"], fp8="fp8_current")

TASKS = ("", "pretrain", "SFT", "LoRA")
FINE_TUNED_ON_TOKENS = 200
"""NeMo and Megatron-Bridge fine-tune on SQuAD, packed to the length of a sequence (Megatron-Bridge recipes, dataset
"squad" with `PackedSequenceSpecs`): a paragraph of about 140 words, a question and its answer (arXiv:1606.05250)."""
