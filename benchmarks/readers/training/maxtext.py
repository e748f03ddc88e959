"""Runs of MaxText and Paxml, whose settings tables of published rates leave out.

`training/*/*/README.md` of AI-Hypercomputer/tpu-recipes, and NVIDIA's recipes of MaxText and Paxml on GPUs
(dgxc-benchmarking), which shard parameters over all devices and do not say what they recompute.
"""

from __future__ import annotations

from collections.abc import Mapping

from windtunnel.calibration.training_runs import plain_name
from windtunnel.calibration.training_usual import completed as with_usual

Row = Mapping[str, str]


def is_maxtext(row: Row) -> bool:
    """Whether a row's run shards parameters over all devices, as MaxText and Paxml do without further settings."""
    said = f"{row['source']} {row['framework']} {row['model']}".lower()
    return "maxtext" in said or "tpu-recipes" in said or "paxml" in said or "tpu" in row["accelerator"].lower()


def completed(row: Row, device: str) -> dict[str, str]:
    """Complete a row on a device of the catalog with the settings of its script or recipe."""
    said = {name: text for name, text in row.items() if text}
    filled = with_usual(said, "maxtext", plain_name(row["model"]), device).columns
    return {**row, "tp": "1", "seq_len": usual_tokens(row), **filled, "framework": "MaxText"}


def usual_tokens(row: Row) -> str:
    """Return the tokens of a sequence where a row does not say them."""
    starts = {"gpt3": 2048, "maxtext": 2048, "llama2": 4096, "mixtral": 4096, "deepseek": 4096}
    name = row["model"].lower()
    return str(next((length for start, length in starts.items() if name.startswith(start)), 8192))
