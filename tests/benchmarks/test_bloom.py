"""What BLOOM's chronicles say around their tables, against the shapes that they print."""

import pytest

from readers.training import bloom as bloom_runs

ROW = {
    "source": "BigScience BLOOM 176B tuning chronicles",
    "model": "GPT-183B",
    "params_B": "183",
    "pp": "12",
    "layers": "",
    "hidden": "",
    "heads": "",
    "note": "A100 experiments; 02-20; interconnect",
}


def test_first_rows_keep_the_width_and_get_their_depth_from_the_size() -> None:
    found = bloom_runs.completed(ROW, {})
    assert (found["layers"], found["hidden"], found["heads"]) == ("72", "14400", "96")


def test_a_later_row_takes_the_shape_that_others_of_its_name_print() -> None:
    row = {**ROW, "model": "GPT-181B", "params_B": "181", "note": "A100 experiments; 02-25; interconnect"}
    shapes = bloom_runs.shapes_of([{**row, "layers": "72.0", "hidden": "14336.0"}])
    found = bloom_runs.completed(row, shapes)
    assert (found["layers"], found["hidden"], found["heads"]) == ("72.0", "14336.0", "64")
    assert bloom_runs.completed({**row, "heads": "112"}, shapes)["heads"] == "112"
    assert bloom_runs.completed(row, {})["hidden"] == ""


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "wanted"),
    [
        (78, 12, [7] * 11 + [1]),  # "Re-do": the last stage has 1 block, while the rest have 7
        (70, 12, [5, *[6] * 10, 5]),  # the final model: embedding and head count as a layer each
        (100, 6, [16, 17, 17, 17, 17, 16]),
    ],
)
def test_stages_are_those_of_the_chronicles(num_layers: int, num_stages: int, wanted: list[int]) -> None:
    assert bloom_runs.layers_per_stage(num_layers, num_stages) == wanted
