"""Kernels of `aiconfigurator-core`'s layout that only convert and stream: static fp8 quantisation."""

from __future__ import annotations

import numpy as np

from windtunnel.model import operators as ops
from windtunnel.pricing.aiconfigurator.collection import ENGINES, Collection, Rows, first_rows
from windtunnel.pricing.table import Floats, MeasurementTable

QUANTISED_BYTES = 3.0
"""Static fp8 quantisation reads two bytes and writes one for every value."""


def elementwise_table(collection: Collection, op: ops.Op) -> MeasurementTable | None:
    """Return static fp8 quantisation, at every size by the engine with the fastest kernel: memory bounds it.

    SGLang 0.5.14 timed a kernel that takes 7 to 13 times as long as vLLM's and TRT-LLM's, which lie within 1.5 of each
    other (764 us against 60 and 90 us for 16,384 x 8,192 values on B200); that says nothing of norms and activations.
    """
    by_engine = conversions(collection)
    if not by_engine:
        return None
    num_bytes, seconds = fastest_conversion(by_engine)
    label = " or ".join(collection.label("quantize", rows).partition(",")[0] for rows, _, _ in by_engine)
    label = label if len(by_engine) == 1 else f"the fastest of {label}"
    sites = {"bytes_per_row": np.ones(len(num_bytes))}
    return MeasurementTable(op.kind, sites, {"rows": num_bytes}, seconds, label, {"name": "any"})


def conversions(collection: Collection) -> list[tuple[Rows, Floats, Floats]]:
    """Return each engine's static fp8 quantisation on this system: rows, bytes moved and seconds."""
    by_engine = []
    for engine in dict.fromkeys((collection.engine, *ENGINES)):
        rows = first_rows(collection.of(engine), "quantize", "scale_matrix_perf", ("m", "k"), [{}])
        if rows is not None and rows.place.engine == engine:
            num_bytes = rows.columns["m"] * rows.columns["k"] * QUANTISED_BYTES
            by_engine.append((rows, *lower_middle(num_bytes, rows.seconds)))
    return by_engine


def fastest_conversion(by_engine: list[tuple[Rows, Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return bytes and the least seconds of any engine, at the sizes of the first."""
    num_bytes = by_engine[0][1]
    curves = [np.interp(np.log(num_bytes), np.log(sizes), seconds) for _, sizes, seconds in by_engine]
    return num_bytes, np.asarray(np.min(curves, axis=0), dtype=np.float64)


def lower_middle(num_bytes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return bytes and seconds: the median over shapes in every half octave, made non-decreasing."""
    octave = np.round(np.log2(num_bytes) * 2) / 2
    octaves = np.unique(octave)
    middle = np.array([np.median(seconds[octave == value]) for value in octaves])
    return 2.0**octaves, np.maximum.accumulate(middle)
