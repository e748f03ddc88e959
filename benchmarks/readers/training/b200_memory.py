"""Megatron-LM steps of models cut to a few layers on eight B200, with their allocated memory.

Settings are those of SimuMax's scripts (`simu_tools/megatron_scripts/scripts/run_pretrain_*.sh`): Megatron-LM 0.14 with
Transformer Engine, sequences of 4,096 tokens, a distributed optimizer without overlap, gradients in fp32; a mixture of
experts keeps one dense layer. A case is named by its model and degrees; `cef` fuses the cross entropy.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from windtunnel import catalog
from windtunnel.calibration.training_runs import model_name
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import decode
from windtunnel.training.job import TrainingJob

Row = Mapping[str, str]
NUM_DEVICES, USUAL_TOKENS = 8, 4096


@dataclass(frozen=True)
class MeasuredStep:
    """One case, as measured."""

    case: str
    model: str
    job: TrainingJob
    step_s: float
    allocated_bytes: float
    """Peak of a rank's tensors, of the fullest rank."""


def read_measured_steps(path: Path) -> list[MeasuredStep]:
    """Read `b200_rows.csv`.

    Raises:
        InputError: a model or a layout is not known.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        MeasuredStep(
            row["case"],
            row["model"],
            decode(_job(row), TrainingJob, row["case"]),
            float(row["real_ms"]) / 1e3,
            float(row["real_alloc_gib"]) * 2**30,
        )
        for row in rows
    ]


def _job(row: Row) -> dict[str, Any]:
    def degree(name: str, usual: int = 1) -> int:
        found = re.search(rf"(?<![a-z]){name}(\d+)", row["case"])
        return int(found[1]) if found else usual

    model = cut(catalog.model(model_name(row["model"])), int(row["layer_num"]))
    split: dict[str, Any] = {name: degree(name) for name in ("tp", "pp", "cp", "ep")}
    split["virtual_stages"] = int(row["vp_size"] or 1)
    if split["cp"] > 1:
        split["cp_method"] = "ulysses"
    replicas = NUM_DEVICES // (split["tp"] * split["pp"] * split["cp"])
    return {
        "model": msgspec.to_builtins(model),
        "device": "b200_sxm",
        "num_devices": NUM_DEVICES,
        "sequence_tokens": degree("seq", USUAL_TOKENS),
        "global_batch": int(row["mbc"]) * replicas,
        "parallelism": split,
        "overlap": {"gradient_reduce": False, "parameter_gather": False, "pipeline": row["pp_comm_async"] == "True"},
        "kernels": {"cross_entropy": "in_place" if row["case"].endswith("_cef") else "fp32"},
    }


def cut(model: ModelSpec, num_layers: int) -> ModelSpec:
    """Return a model's first layers, at most one of them dense where others are mixtures of experts."""
    kept, left = [], num_layers
    for group in model.layers:
        is_dense = isinstance(group.feed_forward, DenseFeedForward) and model.has_experts
        count = min(group.num_layers, left, 1 if is_dense else left)
        if count:
            kept.append(msgspec.structs.replace(group, num_layers=count))
        left -= count
    return msgspec.structs.replace(model, layers=tuple(kept))
