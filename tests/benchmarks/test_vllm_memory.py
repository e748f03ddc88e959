"""The memory plan against the start-ups of vLLM 0.15 to 0.19 on one to four H100."""

from pathlib import Path
from statistics import fmean

import pytest

from vllm_memory import FOLDER, Start, number, predicted, score, starts


@pytest.mark.parametrize(
    ("item", "most_mean", "most"),
    [("KV cache", 0.005, 0.02), ("KV tokens", 0.001, 0.001), ("weights", 0.003, 0.01), ("activations", 0.02, 0.05)],
)
def test_the_plan_is_what_vllm_found(reference: Path, item: str, most_mean: float, most: float) -> None:
    if not (reference / FOLDER).is_dir():
        pytest.skip(f"no {FOLDER} in {reference}")
    found = list(starts(reference))
    figures, refused = score(found)
    errors = [abs(value / was - 1) for _, name, was, value in figures if name == item]
    assert len(found) - len(refused) >= 79
    assert fmean(errors) < most_mean
    assert max(errors) < most


def test_a_pipeline_is_scored_by_its_first_stage() -> None:
    alone, first = (predicted(Start("03", "Llama-3.1-8B-Instruct", {}, pp=pp)) for pp in (1, 2))
    assert first["activations"] < alone["activations"]
    assert first["KV cache"] > alone["KV cache"]


def test_cells_of_the_tables_are_read() -> None:
    assert [number(text) for text in ("+1.5%", "~2.21", "476,016", "-0.2%")] == [1.5, 2.21, 476016, -0.2]
