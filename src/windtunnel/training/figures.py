"""Figures of training that no model, framework or run has of its own, from `figures.yaml`."""

from pathlib import Path

from windtunnel.schema import Schema, decode, read_yaml


class Figures(Schema):
    """Everything in `figures.yaml`, which describes the fields and has their sources."""

    sustained_fraction: dict[str, float]
    other_sustained_fraction: float
    format_rates: dict[str, dict[str, float]]
    whole_step_rates: dict[str, dict[str, float]]
    rated_w: dict[str, float]
    clock_by_power: float
    jitter_by_doubling: float
    overlap_slowdown: float
    collective_launch_s: float
    network_efficiency: float
    pcie_efficiency: float
    network_error: float
    aligned_values: int
    unaligned_slowdown: float
    unaligned_heads_slowdown: float
    grouped_efficiency: dict[str, float]
    other_grouped_efficiency: float
    permute_slowdown: float
    experts_bias_bytes: dict[str, float]
    exchange_efficiency: float
    experts_launch_s: dict[str, float]
    host: dict[str, float]
    host_offload: dict[str, float]
    latent_slowdown: dict[str, float]
    scan_slowdown: float
    scaling_bytes: dict[str, float]
    attention_backward_flops: float
    attention_backward_efficiency: float
    flash2_slowdown: dict[str, dict[int, float]]
    triton_slowdown: dict[str, float]
    context_bytes: float
    communicator_bytes: float
    workspace_bytes: float
    tpu_reserve_bytes: float
    logit_bytes: dict[str, float]
    eager_passes: dict[str, dict[str, float]]
    logit_moved_bytes: dict[str, dict[str, float]]
    usable_fraction: float
    fragmentation: float
    num_moments: dict[str, float]


FIGURES = decode(read_yaml(Path(__file__).with_name("figures.yaml")), Figures, "figures.yaml")
