"""Facts of BLOOM's mapping sweep that its chronicles say around their tables and the rows leave out.

The text is `train/tr11-176B-ml/chronicles-prequel.md` of bigscience-workshop/bigscience; headings are quoted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

Row = Mapping[str, str]
Shapes = Mapping[str, set[tuple[str, str]]]
"""Name of a model -> depths and widths that rows give it."""

FIRST_WIDTH = "14400"
FIRST_DATES = ("; 02-17;", "; 02-20;")
"""'Best TFLOPs' and 'Choosing the fastest 3D Topology' keep the width at 14,400 and vary the depth."""


def is_bloom(row: Row) -> bool:
    """Whether a row is from the chronicles."""
    return row["source"].startswith("BigScience")


def shapes_of(rows: Iterable[Row]) -> Shapes:
    """Return depths and widths by the name of the model, as rows print them."""
    shapes: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        if is_bloom(row) and row["hidden"]:
            shapes.setdefault(row["model"], set()).add((row["layers"], row["hidden"]))
    return shapes


def completed(row: Row, shapes: Shapes) -> dict[str, str]:
    """Complete a row's shape: its width by its date or by other rows of that name, its depth by its size.

    Where only one of depth and width is known, the other follows from P = 12 l h^2 (arXiv:2104.04473, section 5), in
    layers that the stages divide and widths in steps of 1,024.
    """
    layers, hidden = row["layers"], row["hidden"]
    same = shapes.get(row["model"], set())
    if not hidden and not layers:
        if any(date in row["note"] for date in FIRST_DATES):
            hidden = FIRST_WIDTH
        elif len(same) == 1:
            layers, hidden = next(iter(same))
    if row["params_B"].replace(".", "").isdigit():
        size = float(row["params_B"]) * 1e9
        if layers and not hidden:
            hidden = str(round((size / (12 * float(layers))) ** 0.5 / 1024) * 1024)
        if hidden and not layers:
            stages = int(float(row["pp"]))
            layers = str(round(size / (12 * float(hidden) ** 2) / stages) * stages)
    return {**row, "layers": layers, "hidden": hidden, "heads": row["heads"] or _heads(layers, hidden)}


def _heads(layers: str, hidden: str) -> str:
    """Return the number of heads.

    'Final round comparison': 64 throughout, also above; 'Best TFLOPs': 96 at the first width, 32 for 8 layers.
    """
    if not hidden or float(hidden) != float(FIRST_WIDTH):
        return "64"
    return "32" if float(layers) == 8 else "96"


def gradients(row: Row) -> Literal["fp32", "bf16"]:
    """Return the format of gradients.

    'Rebalancing layers': fp16 sums gradients as they are; the bf16 optimizer, from 28 February on, in fp32.
    """
    return "fp32" if "; 02-28" in row["note"] else "bf16"


def layers_per_stage(num_layers: int, num_stages: int) -> list[int]:
    """Return the layers of each stage where they do not divide evenly.

    'Rebalancing layers': embedding and head take the place of a layer each where that comes out even
    (`type:transformer|embedding`). 'Re-do': else the last stage has what the others leave, of 78 layers on 12 one.
    """
    share, rest = divmod(num_layers + 2, num_stages)
    if not rest:
        return [share - 1, *[share] * (num_stages - 2), share - 1]
    share = -(-num_layers // num_stages)
    return [max(min(share, num_layers - share * stage), 0) for stage in range(num_stages)]
