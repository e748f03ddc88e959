"""Settings of Megatron-Bridge's recipes that its table of published runs does not print.

`scripts/performance/configs/*/*_workload_base_configs.py` of NVIDIA-NeMo/Megatron-Bridge, their fields
`cpu_offloading_num_layers`, `cuda_graph_impl`, `cuda_graph_scope`, `cutedsl_fused_grouped_mlp`,
`moe_flex_dispatcher_backend` (DeepEP or HybridEP; without one the plain all-to-all), `moe_a2a_overlap` and
`recompute_modules`. Recipes change between releases; a layout that only one of them has tells which it was.

Release 25.09 (`configs/*/*_llm_pretrain.py`, `apply_moe_token_drop`): mixtures of experts drop and pad to a capacity of
1.0 behind the plain all-to-all where the table says tokendrop; graphs hold a whole step of Qwen3 on Blackwell
(`cuda_graph_impl` local, `cuda_graph_scope` full_iteration); DeepSeek-V3 on H100 exchanges tokens beside computation
(`moe_a2a_1f1b_overrides`) and reduces gradients after it (`overlap_grad_reduce` False). DeepSeek-V3 is trained with a
layer of multi-token prediction unless the table says otherwise, and split as `pp_layout` says, `Et*4|(t*4|)*14tmL`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HYBRID: dict[str, Any] = {"parallelism": {"experts_exchange": "hybrid"}}
ROUTING: dict[str, Any] = {"kernels": {"cuda_graphs": "routing"}}
GRAPHS: dict[str, Any] = {"kernels": {"cuda_graphs": "partial"}}
WHOLE: dict[str, Any] = {"kernels": {"cuda_graphs": "full", "fused_experts": True}, "overlap": {"experts": True}}
"""Whole steps as graphs, grouped products in one kernel with what is around them, the exchange beside computation."""
PLAIN: dict[str, Any] = {"parallelism": {"experts_exchange": "all_to_all"}}
BLACKWELL = ("gb200", "gb300", "b200_sxm", "b300_sxm")
OVERLAPPED: dict[str, Any] = {"overlap": {"experts": True}}
LATE_GRADIENTS: dict[str, Any] = {"overlap": {"experts": True, "gradient_reduce": False}}
WHOLE_STEP: dict[str, Any] = {"kernels": {"cuda_graphs": "full"}}
TOKEN_DROP: dict[str, Any] = {"parallelism": {"experts_capacity": 1.0, "experts_exchange": "all_to_all"}}


def recomputing(*modules: str) -> dict[str, Any]:
    """Return the settings of selective recomputation of these modules."""
    return {"recompute": {"granularity": "selective", "modules": list(modules)}}


def offloading(num_layers: int) -> dict[str, Any]:
    """Return the settings of so many layers whose activations wait in the host's memory."""
    return {"recompute": {"offload_layers": num_layers}}


def split_with_prediction(num_layers: int, num_chunks: int) -> list[int]:
    """Return layers by chunk where the last one, with the head and what predicts further tokens, has what is left."""
    inner = -(-num_layers // num_chunks)
    last = max(num_layers - inner * (num_chunks - 1), 0)
    return [num_layers - inner * (num_chunks - 2) - last, *[inner] * (num_chunks - 2), last]


@dataclass(frozen=True)
class Recipe:
    """Settings of the runs of one model that meet every condition."""

    model: str
    settings: Mapping[str, Any]
    devices: tuple[str, ...] = ()
    """Empty: all."""
    formats: tuple[str, ...] = ()
    degrees: Mapping[str, int] = field(default_factory=dict)
    since: str = ""
    """A release."""
    before: str = "99"
    """The first release without it."""

    def applies(self, model: str, device: str, compute: str, parallelism: Mapping[str, Any], release: str) -> bool:
        """Whether a run is one of its."""
        return (
            model.endswith(self.model)
            and (not self.devices or device in self.devices)
            and (not self.formats or compute in self.formats)
            and all(parallelism.get(name, 1) == degree for name, degree in self.degrees.items())
            and self.since <= release < self.before
        )


RECIPES: tuple[Recipe, ...] = (
    Recipe("Qwen3-30B-A3B", WHOLE_STEP, devices=("gb200", "b200_sxm"), before="25.11"),
    Recipe("Qwen3-235B-A22B", WHOLE_STEP, devices=("gb200",), before="25.11"),
    Recipe("DeepSeek-V3", LATE_GRADIENTS, devices=("h100_sxm",), before="25.11"),
    Recipe("DeepSeek-V3", {"mtp_layers": 1}),
    Recipe("Llama-3-70B", offloading(40), devices=("gb200",), formats=("fp8_current",), degrees={"pp": 1}),
    Recipe("Llama-3-70B", offloading(20), devices=("gb200",), formats=("bf16",), degrees={"pp": 1}),
    Recipe("Llama-3-70B", offloading(20), devices=("gb300",), formats=("fp8_current",), degrees={"pp": 1}),
    Recipe("Llama-3-70B", offloading(30), devices=("gb300",), formats=("bf16",), degrees={"pp": 1}),
    Recipe("Llama-3-70B", offloading(5), devices=("b200_sxm",), formats=("fp8_current",), degrees={"pp": 1}),
    *(
        Recipe(model, WHOLE, devices=(device,), formats=("mxfp8",), since="26.06")
        for device in ("gb200", "gb300", "b300_sxm")
        for model in ("gpt-oss-120b", "Qwen3-235B-A22B", "Qwen3-30B-A3B", "DeepSeek-V3")
    ),
    Recipe("Qwen3-30B-A3B", ROUTING, devices=("gb200",), formats=("mxfp8",)),
    Recipe("Qwen3-30B-A3B", ROUTING, devices=("gb300", "b300_sxm")),
    *(
        Recipe(model, settings, devices=(device,), since=since)
        for device in ("gb200", "gb300")
        for model in ("Qwen3-235B-A22B", "Qwen3-30B-A3B", "DeepSeek-V3")
        for settings, since in ((GRAPHS, ""), (HYBRID, "25.11"))
    ),
    Recipe("DeepSeek-V3", GRAPHS, devices=("b300_sxm",)),
    Recipe("Nemotron-3-Nano-30B-A3B-BF16", {**GRAPHS, **HYBRID}, devices=BLACKWELL),
    Recipe("Nemotron-3-Nano-30B-A3B-BF16", {**HYBRID, **recomputing("norms", "experts")}, devices=("h100_sxm",)),
    Recipe("Nemotron-3-Super-120B-A12B-BF16", GRAPHS, devices=("gb300", "b300_sxm")),
    Recipe("Nemotron-3-Super-120B-A12B-BF16", HYBRID, devices=("gb300", "gb200", "b200_sxm")),
    Recipe("Nemotron-3-Super-120B-A12B-BF16", recomputing("norms", "activation"), devices=("gb200", "b200_sxm")),
    Recipe("gpt-oss-120b", GRAPHS, devices=("gb300", "b300_sxm")),
    Recipe("gpt-oss-120b", {**PLAIN, **recomputing("norms", "activation")}, formats=("bf16",)),
    Recipe("Qwen3-235B-A22B", PLAIN, devices=("b200_sxm", "b300_sxm")),
    Recipe("Qwen3-235B-A22B", {**PLAIN, **OVERLAPPED}, devices=("h100_sxm",), since="25.11"),
    Recipe("Qwen3-30B-A3B", PLAIN, devices=("b200_sxm",)),
    Recipe("Qwen3-30B-A3B", PLAIN, devices=("h100_sxm",), degrees={"pp": 2}),
    Recipe("DeepSeek-V3", OVERLAPPED, formats=("mxfp8",), since="26.06"),
    Recipe("DeepSeek-V3", OVERLAPPED, devices=("b200_sxm",), degrees={"pp": 8, "ep": 32}),
    Recipe("DeepSeek-V3", recomputing("latent_up_projection", "feed_forward"), devices=("h100_sxm",)),
    Recipe("DeepSeek-V3", recomputing("latent_up_projection")),
)
