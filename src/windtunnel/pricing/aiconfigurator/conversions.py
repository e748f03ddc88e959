"""Kernels of `aiconfigurator-core`'s layout that only convert and stream: what static fp8 quantisation takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from windtunnel.model import operators as ops
from windtunnel.pricing.aiconfigurator.collection import ENGINES, Collection, Rows, first_rows
from windtunnel.pricing.table import Floats, MeasurementTable

QUANTISED_BYTES = 3.0
"""Static fp8 quantisation reads two bytes and writes one for every value."""


def elementwise_table(collection: Collection, op: ops.Op) -> MeasurementTable | None:
    """Static fp8 quantisation, at every size by the engine whose kernel is fastest: the device's memory decides.

    SGLang 0.5.14 timed a kernel that takes 7 to 13 times as long as vLLM's and TRT-LLM's, which lie within 1.5 of each
    other (764 us against 60 and 90 us for 16,384 x 8,192 values on B200); that says nothing of norms and activations.
    """
    found = conversions(collection)
    if not found:
        return None
    at, seconds = fastest_conversion(found)
    label = " or ".join(collection.label("quantize", rows).partition(",")[0] for rows, _, _ in found)
    label = label if len(found) == 1 else f"the fastest of {label}"
    sites = {"bytes_per_row": np.ones(len(at))}
    return MeasurementTable(op.kind, sites, {"rows": at}, seconds, label, {"name": "any"})


def conversions(collection: Collection) -> list[tuple[Rows, Floats, Floats]]:
    """Every engine's static fp8 quantisation on this system: its rows, bytes moved and seconds."""
    found = []
    for engine in dict.fromkeys((collection.engine, *ENGINES)):
        rows = first_rows(replace(collection, engine=engine), "quantize", "scale_matrix_perf", ("m", "k"), [{}])
        if rows is not None and rows.place.engine == engine:
            num_bytes = rows.columns["m"] * rows.columns["k"] * QUANTISED_BYTES
            found.append((rows, *lower_middle(num_bytes, rows.seconds)))
    return found


def fastest_conversion(found: list[tuple[Rows, Floats, Floats]]) -> tuple[Floats, Floats]:
    """Bytes and the least seconds of any engine, at the sizes of the first."""
    at = found[0][1]
    curves = [np.interp(np.log(at), np.log(sizes), seconds) for _, sizes, seconds in found]
    return at, np.asarray(np.min(curves, axis=0), dtype=np.float64)


def lower_middle(num_bytes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Seconds against bytes: the median over shapes in every half octave, made non-decreasing."""
    octave = np.round(np.log2(num_bytes) * 2) / 2
    at = np.unique(octave)
    middle = np.array([np.median(seconds[octave == value]) for value in at])
    return 2.0**at, np.maximum.accumulate(middle)
