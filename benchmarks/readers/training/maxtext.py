"""Settings of MaxText's runs that tables of published rates leave out.

`src/maxtext/configs/tpu/*/*.sh` of AI-Hypercomputer/maxtext, `training/*/*/README.md` of AI-Hypercomputer/tpu-recipes,
and NVIDIA's recipes of MaxText and Paxml on GPUs (dgxc-benchmarking), which shard parameters over all devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from windtunnel.calibration.training_runs import Shape

Row = Mapping[str, str]

# configs/tpu/v4/22b.sh and 52b.sh, with the heads of 256 and the two products of a feed-forward of their time.
V4_SHAPES = {
    22: Shape(48, 6144, 24, 24, 24576, 32000, tied=False, bias=False, head_dim=256),
    52: Shape(32, 12288, 32, 32, 49152, 32000, tied=False, bias=False, head_dim=256),
}
# Scale and device -> `per_device_batch_size`, `ici_tensor_parallelism` and `remat_policy` of configs/tpu/*/*.sh.
SCRIPTS: dict[tuple[int, str], tuple[int, int, str]] = {
    (22, "v4"): (13, 1, "full"),
    (52, "v4"): (7, 1, "full"),
    (16, "v5e"): (6, 1, "full"),
    (32, "v5e"): (4, 1, "full"),
    (64, "v5e"): (2, 1, "full"),
    (128, "v5e"): (1, 16, "qkv_proj_offloaded"),
    (32, "v5p"): (6, 4, "minimal"),
    (64, "v5p"): (3, 4, "minimal"),
    (128, "v5p"): (1, 8, "minimal"),
    (256, "v5p"): (1, 8, "minimal"),
    (512, "v5p"): (2, 8, "full"),
    (1024, "v5p"): (2, 16, "full"),
}
LENGTHS = {"gpt3": 2048, "maxtext": 2048, "llama2": 4096, "mixtral": 4096, "deepseek": 4096}
"""Tokens of a sequence by the beginning of a model's name; 8,192 for others."""

KEPT: dict[str, dict[str, Any]] = {
    "full": {"granularity": "full"},
    "minimal": {"granularity": "none"},
    # Of a layer only the projections of attention stay; on TPU v5e they wait in the host's memory.
    "save_qkv_proj": {"granularity": "selective", "modules": ["norms", "activation", "feed_forward", "core_attention"]},
}
KEPT["qkv_proj_offloaded"] = {**KEPT["save_qkv_proj"], "offload_layers": 1000}


def is_maxtext(row: Row) -> bool:
    """Whether a row's run shards parameters over all devices, as MaxText and Paxml do without further settings."""
    said = f"{row['source']} {row['framework']} {row['model']}".lower()
    return "maxtext" in said or "tpu-recipes" in said or "paxml" in said or "tpu" in row["accelerator"].lower()


def scale_of(row: Row) -> int | None:
    """Return the `global_parameter_scale` of MaxText's own models, `MaxText-32B`."""
    found = re.fullmatch(r"maxtext-(\d+)b", row["model"].lower())
    return int(found[1]) if found else None


def shape(scale: int) -> Shape:
    """Return the shape of a model by its scale: heads and feed-forward, width and depth double in turn (pyconfig.py,
    `get_individual_scales`).
    """
    if scale in V4_SHAPES:
        return V4_SHAPES[scale]
    turns, rest = divmod(int(math.log2(scale)), 3)
    wide = 2 ** (turns + (rest > 0))
    return Shape(
        layers=16 * 2**turns,
        hidden=2048 * 2 ** (turns + (rest > 1)),
        heads=16 * wide,
        kv_heads=16 * wide,
        ffn=7168 * wide,
        vocab=32000,
        tied=False,
        bias=False,
        gated=True,
        head_dim=128,
    )


def completed(row: Row) -> dict[str, str]:
    """Complete a row with the settings of its script or recipe."""
    filled = dict(row)
    scale, generation = scale_of(row), re.search(r"v\d[ep]?", row["accelerator"].lower())
    script = SCRIPTS.get((scale or 0, generation[0] if generation else ""))
    if script is not None:
        filled["mbs"], filled["tp"] = str(script[0]), str(script[1])
    name = row["model"].lower()
    usual = next((length for start, length in LENGTHS.items() if name.startswith(start)), 8192)
    filled["seq_len"] = row["seq_len"] or str(usual)
    filled["framework"] = "MaxText"
    filled["tp"] = filled["tp"] or "1"
    ranks = math.prod(int(float(filled[name] or 1)) for name in ("tp", "pp", "cp"))
    filled["fsdp"] = row["fsdp"] or str(_slice_devices(row) * int(float(filled["cp"] or 1)) // ranks)
    tokens = re.search(r"tokens per step (\d+)", row["note"])
    if tokens and not row["gbs"]:
        filled["gbs"] = str(max(int(tokens[1]) // int(float(filled["seq_len"])), 1))
    if filled["gbs"] and not filled["mbs"]:
        replicas = int(float(row["n_gpus"])) // int(float(filled["tp"]))
        filled["mbs"] = str(max(int(float(filled["gbs"])) // replicas, 1))
    # The recipes of tpu-recipes keep projections and layers' inputs in the host's memory (`remat_policy=custom`).
    # Those of NVIDIA's do not say; of the policies that fit it is the one that recomputes least.
    policy = script[2] if script else "qkv_proj_offloaded"
    filled["act_ckpt"] = row["act_ckpt"] or policy
    return filled


def _slice_devices(row: Row) -> int:
    """Return the devices that share parameters: those of a slice, `slices 2x v5e-256`, beyond which data is parallel.

    Names of slices of v4 and v5p count two cores for each chip.
    """
    said = re.search(r"slices (\d+)x", row["note"])
    return int(float(row["n_gpus"])) // (int(said[1]) if said else 1)
