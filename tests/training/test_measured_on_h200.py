"""Steps of FSDP2 that were measured on one H200 (benchmarks/measured/h200/training_steps.csv)."""

import csv
import json
from pathlib import Path

import pytest

from windtunnel.training.costs import LAUNCHES
from windtunnel.training.job import load
from windtunnel.training.step import TrainingResult, simulate_training

STEPS = Path(__file__).parents[2] / "benchmarks" / "measured" / "h200" / "training_steps.csv"
SHAPES = {
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3.1-8b-8-layers": ("llama", 4096, 14336, 8, 32, 8, 128, 128256, False),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
}
KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
ROWS = list(csv.DictReader(STEPS.read_text().splitlines()))


def predicted(row: dict[str, str], folder: Path) -> TrainingResult:
    config = dict(zip(KEYS, SHAPES[row["of_model"]], strict=True))
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[str(config["model_type"])]
    config |= {"architectures": [name], "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    sequences = int(row["of_sequences"])
    job = {
        "model": str(path),
        "device": "h200_sxm",
        "num_devices": 1,
        "framework": "fsdp2",
        "sequence_tokens": int(row["of_tokens"]),
        "global_batch": sequences,
        "micro_batch": sequences,
        "recompute.granularity": row["of_recompute"],
        "kernels.fused": row["of_compiled"] == "True",
    }
    return simulate_training(load(None, job))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row[key] for key in row if key.startswith("of_")))
def test_allocated_memory(row, tmp_path):
    stage = predicted(row, tmp_path).worst_memory
    assert stage.allocated_bytes == pytest.approx(float(row["allocated_bytes"]), rel=0.005)


def is_bound_by_the_host(row: dict[str, str]) -> bool:
    """Whether its device waits for launches: a small model whose fastest step differs from the median by 9%."""
    return float(row["fastest_step_s"]) < 0.95 * float(row["step_s"])


@pytest.mark.parametrize("row", ROWS)
def test_steps(row, tmp_path):
    if is_bound_by_the_host(row):
        measured, within = float(row["fastest_step_s"]), 0.18
    else:
        measured, within = float(row["step_s"]), 0.08
    assert predicted(row, tmp_path).step_s == pytest.approx(measured, rel=within)


@pytest.mark.full
def test_a_host_bounds_eager_steps_of_small_models_only(tmp_path):
    waits = [predicted(row, tmp_path).breakdown_s.get(LAUNCHES, 0.0) > 0 for row in ROWS]
    assert waits == [is_bound_by_the_host(row) for row in ROWS]
