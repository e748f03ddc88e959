"""Fit a roofline's coefficients to measured tables: the source of the constants in `catalog/roofline`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.model import operators as ops
from windtunnel.model.precision import Format
from windtunnel.pricing.roofline import Coefficients, Roofline
from windtunnel.pricing.table import Floats, MeasurementTable, operator_type

BOUNDS: Mapping[str, tuple[float, float, float]] = {
    "launch_us": (3.0, 0.3, 80.0),
    "memory_efficiency": (0.85, 0.3, 1.0),
    "cache_fraction": (0.3, 0.02, 2.0),
    "cache_gb_per_s_per_sm": (25.0, 5.0, 100.0),
    "overlap": (2.0, 1.0, 6.0),
    "compute_efficiency": (0.8, 0.1, 1.0),
    "fill_depth": (64.0, 4.0, 1000.0),
    "tile_us": (0.3, 0.01, 10.0),
    "tile_64": (0.85, 0.3, 1.0),
    "step_us": (0.5, 0.01, 10.0),
    "split_us": (2.5, 0.2, 60.0),
    "wave_smoothing": (0.5, 0.02, 0.98),
    "quantise_us": (2.0, 0.2, 20.0),
    "quantise_passes": (1.5, 0.1, 10.0),
    "spread": (0.8, 0.2, 1.2),
    "imbalance": (0.1, 0.01, 0.5),
    "moving_passes": (1.0, 0.02, 10.0),
    "balance": (2.0, 0.8, 6.0),
    "hiding": (1.2, 0.7, 6.0),
    "half_head_dim": (20.0, 0.5, 300.0),
    "tile_rows": (64.0, 1.0, 256.0),
    "block_us": (0.2, 0.01, 10.0),
    "chain_us": (0.3, 0.01, 10.0),
    "chain_of_kernels_us": (80.0, 5.0, 400.0),
    "query_us": (0.1, 0.0005, 2.0),
    "chunk_us": (0.5, 0.01, 10.0),
    "wave_cost": (0.5, 0.02, 2.0),
    "passes": (2.0, 0.5, 20.0),
    "link_efficiency": (0.75, 0.1, 1.0),
    "ramp_us": (2.0, 0.02, 50.0),
}
"""Coefficient -> start of a fit, and the range in which it keeps its meaning."""

_MEMORY = ("memory_efficiency", "cache_fraction", "cache_gb_per_s_per_sm")
_TILES = ("compute_efficiency", "fill_depth", "tile_us", "tile_64", "wave_smoothing")
_PREFILL = (
    "launch_us",
    "tile_us",
    *_MEMORY,
    "compute_efficiency",
    "half_head_dim",
    "tile_rows",
    "fill_depth",
    "step_us",
    "balance",
    "overlap",
    "hiding",
)
_DECODE = ("launch_us", *_MEMORY, "compute_efficiency", "tile_rows", "block_us", "chain_us", "overlap", "hiding")
_SPARSE = ("chain_of_kernels_us", *_MEMORY, "compute_efficiency", "tile_rows", "query_us", "overlap")
NAMES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("launch_us", *_MEMORY, *_TILES, "split_us", "overlap", "quantise_us", "quantise_passes"),
    "experts": ("launch_us", *_MEMORY, *_TILES, "overlap", "spread", "imbalance", "moving_passes"),
    "prefill_attention": _PREFILL,
    "latent_prefill_attention": _PREFILL,
    "decode_attention": _DECODE,
    "latent_decode_attention": _DECODE,
    "sparse_latent_prefill": _SPARSE,
    "sparse_latent_decode": _SPARSE,
    "compressed_prefill": _SPARSE,
    "compressed_decode": _SPARSE,
    "block_sparse_prefill": _SPARSE,
    "block_sparse_decode": _SPARSE,
    "hyper_connection": ("launch_us", *_MEMORY),
    "gated_delta": ("launch_us", *_MEMORY, "chunk_us", "wave_cost", "passes", "overlap"),
    "kimi_delta": ("launch_us", *_MEMORY, "chunk_us", "wave_cost", "passes", "overlap"),
    "causal_convolution": ("launch_us", *_MEMORY, "block_us", "overlap"),
    "elementwise": ("launch_us", *_MEMORY),
    "collective": ("launch_us", "step_us", "link_efficiency", "ramp_us"),
}
"""Kind -> coefficients of its closed form (`roofline.FORMS`)."""

_ROBUST = 0.15
"""Relative error from which a point counts linearly and not by its square: kernel switches are not noise."""


@dataclass(frozen=True)
class Sample:
    """Rows of one device's table as operators with arrays in every dimension."""

    roofline: Roofline
    operators: tuple[ops.Op, ...]
    seconds: tuple[Floats, ...]

    def log_errors(self, coefficients: Coefficients) -> Floats:
        """Return log(predicted / measured) of every row."""
        return np.concatenate(
            [
                np.log(np.asarray(self.roofline.seconds_with(op, coefficients)) / seconds)
                for op, seconds in zip(self.operators, self.seconds, strict=True)
            ]
        )


def sample(table: MeasurementTable, roofline: Roofline, num_rows: int, rng: np.random.Generator) -> Sample:
    """Take up to `num_rows` random rows of a table.

    Dimensions that a closed form branches on (a window, an indexer, gating, decode) stay numbers, one operator for each
    value.
    """
    rows = rng.permutation(len(table))[:num_rows]
    part = table.take(rows)
    every = (
        *("window_tokens", "top_k", "index_num_heads", "compress_ratio"),
        *("gated", "decode", "span_nodes", "num_ranks"),
    )
    branching = [name for name in every if name in part.sites]
    keys = np.column_stack([part.sites[name] for name in branching]) if branching else np.zeros((len(part), 1))
    operators, seconds = [], []
    for key in np.unique(keys, axis=0):
        here = np.all(keys == key, axis=1)
        operators.append(_family(part, here, dict(zip(branching, key.tolist(), strict=False))))
        seconds.append(part.seconds[here])
    return Sample(roofline, tuple(operators), tuple(seconds))


def _family(table: MeasurementTable, rows: NDArray[np.bool_], numbers: Mapping[str, float]) -> ops.Op:
    dimensions = {name: column[rows] for name, column in {**table.sites, **table.axes}.items()}
    words = {name: Format(word) if name.endswith("format") else word for name, word in table.words.items()}
    fixed = {name: int(value) for name, value in numbers.items()}
    return operator_type(table.kind)(**{**dimensions, **words, **fixed})


def fit_roofline(kind: str, samples: Sequence[Sample], start: Coefficients | None = None) -> dict[str, float]:
    """Fit the coefficients of `kind` to log(predicted / measured) by robust least squares over all samples.

    Levenberg-Marquardt with numerical derivatives on coefficients mapped from their `BOUNDS` to the line.
    """
    first = {name: BOUNDS[name][0] for name in NAMES[kind]} | dict(start or {})
    return _refined(NAMES[kind], first, samples, pull=0.0, num_steps=30 if start is None else 8)


_PULL = 1.0
"""Weight of a family's shared coefficients, in rows: coefficients that no row shows do not move. On devices left out, 1
and 3 do equally well (prefill 15.2 % and 15.6 %, experts 14.6 % and 14.8 %), 6 is worse."""


def fit_family(samples: Sequence[Sample], shared: Coefficients) -> dict[str, float]:
    """Refit the coefficients on the samples of one family: engines dispatch other kernels on each."""
    return _refined(tuple(shared), shared, samples, pull=_PULL)


def _refined(
    names: Sequence[str], first: Coefficients, samples: Sequence[Sample], pull: float, num_steps: int = 8
) -> dict[str, float]:
    """Return `first` with the coefficients `names` moved to fit the samples."""
    anchor = _positions(names, first)

    def errors(x: Floats) -> Floats:
        coefficients = {**first, **_coefficients(names, x)}
        rows = [part.log_errors(coefficients) for part in samples]
        return np.concatenate([*rows, pull * (x - anchor) * _ROBUST] if pull else rows)

    return {**first, **_coefficients(names, _least_squares(errors, anchor, num_steps))}


def _coefficients(names: Sequence[str], x: Floats) -> dict[str, float]:
    def value(name: str, position: float) -> float:
        _, low, high = BOUNDS[name]
        return float(low * (high / low) ** (1.0 / (1.0 + np.exp(-position))))

    return {name: value(name, position) for name, position in zip(names, x, strict=True)}


def _positions(names: Sequence[str], coefficients: Coefficients) -> Floats:
    shares = np.array([np.log(coefficients[n] / BOUNDS[n][1]) / np.log(BOUNDS[n][2] / BOUNDS[n][1]) for n in names])
    shares = np.clip(shares, 0.02, 0.98)
    return np.asarray(np.log(shares / (1 - shares)))


def _least_squares(errors: Callable[[Floats], Floats], x: Floats, num_steps: int) -> Floats:
    def cost(residual: Floats) -> float:
        return float(np.sum(np.sqrt(1 + (residual / _ROBUST) ** 2) - 1))

    damping, residual = 1e-2, errors(x)
    for _ in range(num_steps):
        jacobian = np.column_stack([(errors(x + step) - residual) / 1e-2 for step in np.eye(len(x)) * 1e-2])
        weights = 1.0 / np.sqrt(1 + (residual / _ROBUST) ** 2)
        gram = jacobian.T @ (jacobian * weights[:, None])
        gradient = jacobian.T @ (residual * weights)
        before = cost(residual)
        for _ in range(6):
            move = np.linalg.solve(gram + damping * np.diag(np.diag(gram) + 1e-6), -gradient)
            trial = np.clip(x + np.clip(move, -1.0, 1.0), -6.0, 6.0)
            trial_residual = errors(trial)
            if cost(trial_residual) < before:
                x, residual, damping = trial, trial_residual, max(damping / 4, 1e-6)
                break
            damping *= 4
        else:
            return x
        if before - cost(residual) < 1e-5 * before:
            return x
    return x


def without(samples: Mapping[str, Sample], device: str) -> list[Sample]:
    """Return all samples but that of one device."""
    return [part for name, part in samples.items() if name != device]
