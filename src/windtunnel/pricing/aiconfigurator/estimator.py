"""Measured operators from the data files of `aiconfigurator-core` (PyPI, Apache-2.0) or a folder of the same layout.

Only data files are read; the package's code is never imported.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from windtunnel import catalog
from windtunnel.arguments import checked
from windtunnel.errors import InputError, check_known, did_you_mean
from windtunnel.hardware import Device, Node
from windtunnel.metrics.power import clock_share
from windtunnel.model import operators as ops
from windtunnel.pricing.aiconfigurator.attention import decode_table, prefill_table
from windtunnel.pricing.aiconfigurator.collection import (
    DISTRIBUTIONS,
    ENGINE_CHOICES,
    KERNELS,
    Collection,
    KernelChoices,
    Reader,
)
from windtunnel.pricing.aiconfigurator.collectives import collective_table, nccl_table
from windtunnel.pricing.aiconfigurator.described import described_table
from windtunnel.pricing.aiconfigurator.exchange import exchange_table
from windtunnel.pricing.aiconfigurator.experts import experts_table, mega_moe_table
from windtunnel.pricing.aiconfigurator.gemms import elementwise_table, gemm_table
from windtunnel.pricing.aiconfigurator.latent_attention import latent_decode_table, latent_prefill_table, sparse_table
from windtunnel.pricing.aiconfigurator.published import fetched_folders
from windtunnel.pricing.choices import MOE_BACKENDS
from windtunnel.pricing.estimator import Coverage, Estimate, Estimator, RooflineEstimator, TableEstimator
from windtunnel.pricing.roofline import Roofline, scale_up_bytes_per_s
from windtunnel.pricing.table import MeasurementTable
from windtunnel.schema import fields_of
from windtunnel.units import version_key

PACKAGE = "aiconfigurator_core"

_READERS: Mapping[str, Reader] = {
    "gemm": gemm_table,
    "prefill_attention": prefill_table,
    "decode_attention": decode_table,
    "latent_prefill_attention": latent_prefill_table,
    "latent_decode_attention": latent_decode_table,
    "sparse_latent_prefill": sparse_table,
    "sparse_latent_decode": sparse_table,
    "experts": experts_table,
    "mega_moe": mega_moe_table,
    "elementwise": elementwise_table,
    "collective": collective_table,
    "token_exchange": exchange_table,
}
"""Kind of operator -> the reader of its tables; the classes of other kinds describe theirs."""


def table_for(collection: Collection, op: ops.Op) -> MeasurementTable | None:
    """Return the table that prices `op`, None where nobody measured its kind in its format and links on this system."""
    if isinstance(op, ops.Collective) and not _has_measured_links(op, collection.roofline):
        return None
    return collection.once(op, _READERS.get(op.kind, described_table))


def _has_measured_links(op: ops.Collective, roofline: Roofline) -> bool:
    """Return whether the ranks inside a node have the links with which collectives were measured."""
    measured, inside = catalog.measured_device(roofline.device), op.num_ranks // max(op.span_nodes, 1)
    usual = scale_up_bytes_per_s(inside, measured, catalog.default_node(measured))
    node = roofline.node
    return node is None or math.isclose(scale_up_bytes_per_s(inside, measured, node), usual, rel_tol=0.05)


def systems_folder(data_dir: Path | None = None) -> Path:
    """Return the folder that holds `<system>/<family>/...`: of the installed package, or below `data_dir`. InputError
    where the package is not installed, or `data_dir` does not hold such a folder."""
    if data_dir is None:
        package = importlib.util.find_spec(PACKAGE)
        if package is None or not package.submodule_search_locations:
            raise InputError(
                "the measured operators are not installed (package aiconfigurator-core)",
                "pip install aiconfigurator-core, or give a folder of the same layout as data_dir",
            )
        data_dir = Path(next(iter(package.submodule_search_locations)))
    for folder in (data_dir, data_dir / "data", data_dir / "systems" / "data"):
        if any(folder.glob("*/*/*/*/*_perf.parquet")):
            return folder
    raise InputError(
        f"{data_dir} holds no measured operators",
        "expected <system>/<family>/<engine>/<version>/<table>_perf.parquet, as in aiconfigurator-core's systems/data",
    )


def measured_systems(data_dir: Path | None = None) -> list[str]:
    """Return the systems that have measured tables."""
    return sorted({path.parents[3].name for path in systems_folder(data_dir).glob("*/*/*/*/*_perf.parquet")})


@checked
def measured_estimator(
    device: Device,
    node: Node | None,
    engine: str,
    version: str,
    data_dir: Path | None = None,
    kernels: KernelChoices = ENGINE_CHOICES,
    scales: bool = True,
) -> Estimator:
    """Return the estimator that reads tables measured on `device` and falls back to the calibrated roofline.

    Args:
        device: priced as `device.measured_as`, at its own rates where they are others than that device's; without it
            every operator is priced by the roofline.
        node: its links price collectives that nobody measured.
        engine: whose kernels; the nearest measured version is taken, and every estimate's source says which.
        version: of the engine.
        data_dir: a folder of the package's layout, in place of the installed package.
        kernels: choices among the engine's kernels.
        scales: whether measured times are scaled to all rates of the device, or to those of arithmetic alone.

    Raises:
        InputError: no data, or a system, distribution or backend that the data does not have.
    """
    roofline = Roofline(device, node)
    if device.measured_as is None:
        return RooflineEstimator(roofline)
    distribution, moe_backend = kernels.expert_distribution, kernels.moe_backend
    check_known(distribution, DISTRIBUTIONS, f"expert distribution {distribution!r} was not measured")
    if moe_backend is not None:
        check_known(moe_backend, MOE_BACKENDS, f"there is no backend of experts {moe_backend!r}")
    folder = systems_folder(data_dir) / device.measured_as
    if not folder.is_dir():
        known = measured_systems(data_dir)
        raise InputError(
            f"{device.name} is measured as {device.measured_as}, which the data does not have",
            did_you_mean(device.measured_as, known, f"it has {', '.join(known)}"),
        )
    wheels = fetched_folders() if data_dir is None else {}
    fetched = {wheel: systems / device.measured_as for wheel, systems in wheels.items()}
    measured, own = Roofline(_as_measured(device, _ARITHMETIC + _MEMORY if scales else _ARITHMETIC), node), None
    if measured != roofline:
        roofline, own = measured, Roofline(_at_its_clock(device), node) if scales else roofline
    collection = Collection(
        system=folder, fetched=fetched, engine=engine, version=version, roofline=roofline, **vars(kernels)
    )
    return TableEstimator(partial(table_for, collection), roofline, own=own)


_ARITHMETIC = ("peak_flops_per_s", "product_flops_per_s", "num_sms")
_MEMORY = ("memory_bytes_per_s", "copy_bytes_per_s", "l2_bytes")
"""Fields of a device that its roofline depends on."""


def _as_measured(device: Device, names: tuple[str, ...]) -> Device:
    """Return the device with some rates of its roofline as they were where it was measured, if they are known."""
    return msgspec.structs.replace(device, **fields_of(catalog.measured_device(device), *names))


def _at_its_clock(device: Device) -> Device:
    """Return a card of a measured chip with the peaks of the clock that its power for each multiprocessor sustains:
    tables hold the clock to which large products bring the device that was measured."""
    measured, power = catalog.measured_device(device), catalog.power_share(device)
    if power >= 1.0:
        return device
    share = clock_share(power, device.architecture) * (device.num_sms or 1) / (measured.num_sms or 1)
    most = {name: rate * share for name, rate in measured.peak_flops_per_s.items()}
    peaks = {name: min(rate, most.get(name, rate)) for name, rate in device.peak_flops_per_s.items()}
    return msgspec.structs.replace(device, peak_flops_per_s=peaks)


def nccl_estimator(device: Device, node: Node | None) -> Estimator:
    """Return the estimator of NCCL's collectives inside a server: as measured on `device`, else the calibrated form.
    InputError where the measured operators are not installed."""
    roofline = Roofline(device, node)
    folder = systems_folder() / device.measured_as if device.measured_as else None
    if folder is None or not folder.is_dir():
        return RooflineEstimator(roofline)
    collection = Collection(system=folder, engine="nccl", version="", roofline=roofline)
    return TableEstimator(partial(collection.once, reader=nccl_table), roofline)


HELD_BY_ALL_REDUCE = "norm"
"""Kernel that a fused all-reduce does too (`AllReduceFusionOp.RESIDUAL_RMS_NORM`): its bytes still move, its launch is
gone."""


@dataclass(frozen=True)
class CountedOnce:
    """Another estimator's seconds, less kernels that others hold."""

    estimator: Estimator
    fused_norm_tokens: float
    """Tokens of a step up to which its all-reduces compute the norms behind them; 0: none does."""
    tables_overlap: bool = True
    """Whether tables of some operators hold the kernels of `held_by`."""

    def estimate(self, op: ops.Op) -> Estimate:
        """Return the seconds of `op`: 0 for a kernel of `held_by`, less the launch for a norm in an all-reduce."""
        estimate = self.estimator.estimate(op)
        if not isinstance(op, ops.Elementwise):
            return estimate
        if self.tables_overlap and op.name in KERNELS.held_by:
            nothing = np.asarray(estimate.seconds) * 0.0
            label = f"within {KERNELS.held_by[op.name]}"
            return Estimate(nothing if np.ndim(nothing) else 0.0, Coverage.MEASURED, label, 0.0)
        if op.name == HELD_BY_ALL_REDUCE and self.fused_norm_tokens:
            launch_s = np.asarray(self.estimator.estimate(ops.Elementwise(op.name, 1.0, 1.0)).seconds)
            fused_s = launch_s * (np.asarray(op.rows) <= self.fused_norm_tokens)
            seconds = np.maximum(np.asarray(estimate.seconds) - fused_s, 0.0)
            label = f"{estimate.source}, its launch within the all-reduce"
            return replace(estimate, seconds=seconds if np.ndim(seconds) else float(seconds), source=label)
        return estimate


def counted_once(estimator: Estimator, engine: str, version: str, fused_norm_tokens: float) -> Estimator:
    """Return `estimator` without what its tables hold twice: norms that all-reduces compute, and for engines whose
    kernels overlap (`overlapped_since`) those of `held_by`. Before that version as much is missing as is held twice.

    `fused_norm_tokens` are tokens of a step up to which its all-reduces compute the norms behind them.
    """
    since = KERNELS.overlapped_since.get(engine)
    overlaps = since is not None and version_key(version) >= version_key(since)
    is_held = overlaps or (since is None and fused_norm_tokens > 0)
    if not is_held or not isinstance(estimator, TableEstimator):
        return estimator
    return CountedOnce(estimator, fused_norm_tokens, tables_overlap=overlaps)
