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
    # and the up-projections of attention are recomputed (3.2.3).
    "DeepSeek-V3": Source(
        "deepseek",
        {
            "precision": {"moments": "bf16"},
            "global_batch": 15360,
            "recompute": {"granularity": "selective", "modules": ["norms", "activation", "latent_up_projection"]},
        },
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
BY_FRAMEWORK: dict[str, Source] = {
    "maxtext": SOURCES["MaxText"],
    "megatron-deepspeed": Source("deepspeed", {"sharding": {"zero": 1}}),
    "deepspeed": Source("deepspeed"),
    "torchtitan": SOURCES["torchtitan"],
    "fsdp": Source("fsdp2"),
    "nemo": SOURCES["NeMo"],
    "megatron": Source("megatron"),
}
"""A word of a framework's name -> what is usual for it, for sources that are not known themselves."""
# Its recipes are named FP8_CS (scripts/performance/configs).
SOURCES["Megatron-Bridge"] = replace(SOURCES["NeMo"], fp8="fp8_current")


@dataclass(frozen=True)
class Shape:
    """A published model that has no config.json in the catalog."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = True
    bias: bool = True
    gated: bool = False
    head_dim: int | None = None
    experts: int = 0
    per_token: int = 0


SHAPES: dict[str, Shape] = {
    # arXiv:2005.14165, table 2.1; NeMo's GPT-3 recipes for the sizes between.
    "gpt3-175b": Shape(96, 12288, 96, 96, 49152, 51200),
    "gpt3-20b": Shape(44, 6144, 48, 48, 24576, 51200),
    "gpt5b": Shape(24, 4096, 32, 32, 16384, 51200),
    "gpt-20b": Shape(44, 6144, 48, 48, 24576, 51200),
    # arXiv:2402.16819 and arXiv:2406.11704; the small ones as in NeMo's recipes.
    "nemotron4 15b": Shape(32, 6144, 48, 8, 24576, 256000, tied=False, bias=False),
    "nemotron4 340b": Shape(96, 18432, 96, 8, 73728, 256000, tied=False, bias=False),
    "nemotron-8b": Shape(32, 4096, 32, 32, 16384, 256000, tied=False, bias=False),
    "nemotron-22b": Shape(40, 6144, 48, 48, 24576, 256000, tied=False, bias=False),
    "nemotron-340b": Shape(96, 18432, 96, 8, 73728, 256000, tied=False, bias=False),
    # arXiv:2005.14165, table 2.1, and NeMo's recipes.
    "gpt3-126m": Shape(12, 768, 12, 12, 3072, 51200),
    "gpt3-350m": Shape(24, 1024, 16, 16, 4096, 51200),
    "gpt3-760m": Shape(24, 1536, 16, 16, 6144, 51200),
    "gpt3-1.3b": Shape(24, 2048, 16, 16, 8192, 51200),
    "gpt3-2.7b": Shape(32, 2560, 32, 32, 10240, 51200),
    "gpt3-6.7b": Shape(32, 4096, 32, 32, 16384, 51200),
    "gpt3-13b": Shape(40, 5120, 40, 40, 20480, 51200),
    "gpt3-40b": Shape(48, 8192, 64, 64, 32768, 51200),
    # arXiv:2201.11990, 2205.01068, 2211.05100, 2302.13971 (table 2), 2210.02414 (GeGLU).
    "mt-nlg 530b": Shape(105, 20480, 128, 128, 81920, 51200),
    "opt-175b": Shape(96, 12288, 96, 96, 49152, 50272),
    "bloom-176b": Shape(70, 14336, 112, 112, 57344, 250880),
    "llama-7b": Shape(32, 4096, 32, 32, 11008, 32000, tied=False, bias=False, gated=True),
    "llama-13b": Shape(40, 5120, 40, 40, 13824, 32000, tied=False, bias=False, gated=True),
    "llama-33b": Shape(60, 6656, 52, 52, 17920, 32000, tied=False, bias=False, gated=True),
    "llama-65b": Shape(80, 8192, 64, 64, 22016, 32000, tied=False, bias=False, gated=True),
    "glm-130b": Shape(70, 12288, 96, 96, 32768, 150528, gated=True),
    # arXiv:2311.16867 and the config.json of falcon-40b and falcon-180B.
    "falcon-40b": Shape(60, 8192, 128, 8, 32768, 65024, bias=False),
    "falcon-180b": Shape(80, 14848, 232, 8, 59392, 65024, bias=False),
    # arXiv:2204.02311, table 1: one key/value head, SwiGLU of four times the width.
    "palm-8b": Shape(32, 4096, 16, 1, 16384, 256000, bias=False, gated=True, head_dim=256),
    "palm-62b": Shape(64, 8192, 32, 1, 32768, 256000, bias=False, gated=True, head_dim=256),
    "palm-540b": Shape(118, 18432, 48, 1, 73728, 256000, bias=False, gated=True, head_dim=256),
    # config.json of OLMo-2-1124-13B, starcoder2-7b and dbrx-base.
    "olmo2-13b": Shape(40, 5120, 40, 40, 13824, 100352, tied=False, bias=False, gated=True),
    "starcoder2-7b": Shape(32, 4608, 36, 4, 18432, 49152),
    "dbrx": Shape(40, 6144, 48, 8, 10752, 100352, False, False, gated=True, experts=16, per_token=4),
    # llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml; padded vocabulary.
    "mpt-125m": Shape(12, 768, 12, 12, 3072, 50368, bias=False),
    "mpt-350m": Shape(24, 1024, 16, 16, 4096, 50368, bias=False),
    "mpt-760m": Shape(24, 1536, 12, 12, 6144, 50368, bias=False),
    "mpt-1b": Shape(24, 2048, 16, 16, 8192, 50368, bias=False),
    "mpt-3b": Shape(32, 2560, 20, 20, 10240, 50368, bias=False),
    "mpt-7b": Shape(32, 4096, 32, 32, 16384, 50368, bias=False),
    "mpt-13b": Shape(40, 5120, 40, 40, 20480, 50368, bias=False),
    "mpt-30b": Shape(48, 7168, 56, 56, 28672, 50368, bias=False),
    "mpt-70b": Shape(80, 8192, 64, 64, 32768, 50368, bias=False),
}
# xai-org/grok-1 run.py.
SHAPES["grok1 314b"] = Shape(64, 6144, 48, 8, 32768, 131072, bias=False, gated=True, experts=8, per_token=2)
SAME_SHAPE = {
    "paxml gpt175b": "gpt3-175b",
    "paxml gpt5b": "gpt5b",
    "gpt3": "gpt3-175b",
    "nemotron4-340b": "nemotron4 340b",
    "nemotron4-15b": "nemotron4 15b",
    "nemotron-15b": "nemotron4 15b",
    "nemotron-4-340b": "nemotron4 340b",
    "nemotron-4-15b": "nemotron4 15b",
    "grok1": "grok1 314b",
    "gpt-175b": "gpt3-175b",
    "gpt3-5b": "gpt5b",
    "dbrx-132b": "dbrx",
    "bloom": "bloom-176b",
    "megatron-turing 530b": "mt-nlg 530b",
    "turing-nlg 530b": "mt-nlg 530b",
}
"""Other names of these; separators do not count in either (`runs.plain_name`)."""

# What nobody would find by a model's name alone; keys as `runs.plain_name` returns them.
CATALOG_NAMES = {
    "llama27b": "Llama-2-7b-hf",
    "llama213b": "Llama-2-13b-hf",
    "llama270b": "Llama-2-70b-hf",
    "llama270blora": "Llama-2-70b-hf",
    "llama3405b": "Llama-3.1-405B",
    "deepseek3671b": "DeepSeek-V3",
    "deepseekv3671b": "DeepSeek-V3",
    "deepseekr1": "DeepSeek-V3",
    "deepseek216b": "DeepSeek-V2-Lite",
    "deepseekv216b": "DeepSeek-V2-Lite",
    "deepseek2236b": "DeepSeek-V2",
    "deepseekv2236b": "DeepSeek-V2",
    "llama4maverick": "Llama-4-Maverick-17B-128E-Instruct",
    "llama4scout": "Llama-4-Scout-17B-16E-Instruct",
    "maverick": "Llama-4-Maverick-17B-128E-Instruct",
    "scout": "Llama-4-Scout-17B-16E-Instruct",
    "llama417b16e": "Llama-4-Scout-17B-16E-Instruct",
    "llama417b128e": "Llama-4-Maverick-17B-128E-Instruct",
    "mistral7b": "Mistral-7B-v0.3",
    "mistralnemo12b": "Mistral-Nemo-Base-2407",
    "olmo27b": "OLMo-2-1124-7B",
    "kimik2": "Kimi-K2-Instruct",
    "kimik21t": "Kimi-K2-Instruct",
    "qwen3next80b": "Qwen3-Next-80B-A3B-Instruct",
    "nemotron3nano": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron3super": "NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "nemotron3ultra": "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nemotronh56b": "Nemotron-H-56B-Base-8K",
}
IDLE_WORDS = ("meta", "hf", "instruct", "base", "it", "bf16", "v01", "2407", "2501", "chat", "nvidia")
"""Parts of a checkpoint's name that tables of training leave out."""

DEVICES: dict[str, str] = {
    "a100": "a100_sxm",
    "a100 sxm4 40gb": "a100_40gb_sxm",
    "a100 sxm 40gb": "a100_40gb_sxm",
    "a100 40gb": "a100_40gb_sxm",
    "a100 pcie": "a100_pcie",
    "v100": "v100_sxm",
    "h100": "h100_sxm",
    "h100 pcie": "h100_pcie",
    "h100 nvl": "h100_nvl",
    "h200": "h200_sxm",
    "h200 nvl": "h200_nvl",
    "h800": "h800_sxm",
    "h20": "h20",
    "gh200": "gh200",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40": "l40",
    "l40s": "l40s",
    "rtx pro 6000": "rtx_pro_6000_server",
    "mi250x": "mi250x",
    "mi300x": "mi300x",
    "mi325x": "mi325x",
    "mi355x": "mi355x",
    "gaudi2": "gaudi2",
    "gaudi 2": "gaudi2",
    "gaudi r 2": "gaudi2",
    "gaudi3": "gaudi3",
    "gaudi 3": "gaudi3",
    "gaudi r 3": "gaudi3",
    "tpu v4": "tpu_v4",
    "tpu v5e": "tpu_v5e",
    "tpu v5p": "tpu_v5p",
    "tpu v6e": "tpu_v6e",
    "trillium": "tpu_v6e",
    "tpu v7": "tpu_v7",
    "tpu v7x": "tpu_v7",
    "tpu7x": "tpu_v7",
    "ironwood": "tpu_v7",
    # Instances of clouds.
    "p4d": "a100_40gb_sxm",
    "p4de": "a100_sxm",
    "p5": "h100_sxm",
    "p5e": "h200_sxm",
    "p5en": "h200_sxm",
    "p6 b200": "b200_sxm",
}
"""Words of what an accelerator is called, in lower case -> a device of the catalog. The entry with most letters counts;
what says no more than `H100` is the SXM module."""
OTHER_MODULES = ("a100 pcie 40gb", "v100 pcie", "v100 sxm2 16gb")
"""Words of modules that the catalog lacks."""

TASKS = ("", "pretrain", "SFT", "LoRA")
FINE_TUNED_ON_TOKENS = 200
"""NeMo and Megatron-Bridge fine-tune on SQuAD, packed to the length of a sequence (Megatron-Bridge recipes, dataset
"squad" with `PackedSequenceSpecs`): a paragraph of about 140 words, a question and its answer (arXiv:1606.05250)."""

FORMATS = {
    "fp16": "fp16",
    "fp16/bf16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "amp-bf16": "bf16",
    "amp-fp8": "fp8",
    "fp8": "fp8",
    "fp8-ds": "fp8",
    "fp8-cs": "fp8_current",
    "fp8-sc": "fp8_block",
    "fp8-mx": "mxfp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "aqt-int8": "int8",
}
"""Format of a table, with hyphens for its underscores -> recipe. `amp_fp8` is Transformer Engine's delayed scaling
(composer)."""
FORMAT_WORDS = (
    ("nvfp4|fp4", "nvfp4"),
    ("mxfp8|fp8 mx", "mxfp8"),
    ("rowwise", "fp8_rowwise"),
    ("fp8.*(cs|current|tensorwise)", "fp8_current"),
    ("fp8.*(sc|sub|block|blockwise)", "fp8_block"),
    ("fp8|float8|e4m3", "fp8"),
    ("int8|aqt", "int8"),
    ("bf16|bfloat16", "bf16"),
    ("fp16|float16|half", "fp16"),
    ("tf32|fp32|float32", "fp32"),
)
"""Words of a format that is written otherwise, the most particular first -> recipe."""
