"""Measured operators from the data files of `aiconfigurator-core` (PyPI, Apache-2.0) or a folder of the same layout.

Only data files are read; the package's code is never imported.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from windtunnel.errors import InputError, did_you_mean
from windtunnel.hardware import Device, Node
from windtunnel.model import operators as ops
from windtunnel.pricing.aiconfigurator.collection import DISTRIBUTIONS, Collection
from windtunnel.pricing.aiconfigurator.collectives import nccl_table
from windtunnel.pricing.aiconfigurator.operators import table_for
from windtunnel.pricing.choices import MOE_BACKENDS
from windtunnel.pricing.estimator import Estimator, RooflineEstimator, TableEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import MeasurementTable

PACKAGE = "aiconfigurator_core"


def systems_folder(data_dir: Path | None = None) -> Path:
    """The folder that holds `<system>/<family>/...`: of the installed package, or below `data_dir`.

    Raises:
        InputError: the package is not installed, or `data_dir` does not hold such a folder.
    """
    if data_dir is None:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise InputError(
                "the measured operators are not installed (package aiconfigurator-core)",
                "pip install aiconfigurator-core, or give a folder of the same layout as data_dir",
            )
        data_dir = Path(next(iter(found.submodule_search_locations)))
    for folder in (data_dir, data_dir / "data", data_dir / "systems" / "data"):
        if any(folder.glob("*/*/*/*/*_perf.parquet")):
            return folder
    raise InputError(
        f"{data_dir} holds no measured operators",
        "expected <system>/<family>/<engine>/<version>/<table>_perf.parquet, as in aiconfigurator-core's systems/data",
    )


def measured_systems(data_dir: Path | None = None) -> list[str]:
    """The systems that have measured tables."""
    return sorted({path.parents[3].name for path in systems_folder(data_dir).glob("*/*/*/*/*_perf.parquet")})


def measured_estimator(
    device: Device,
    node: Node | None,
    engine: str,
    version: str,
    data_dir: Path | None = None,
    *,
    cuda_graphs: bool = True,
    expert_distribution: str = DISTRIBUTIONS[0],
    moe_backend: str | None = None,
    fused_all_reduce: bool = False,
    attention_backend: str | None = None,
) -> Estimator:
    """The estimator that reads tables measured on `device` and falls back to the calibrated roofline.

    Args:
        device: priced as `device.measured_as`; without it every operator is priced by the roofline.
        node: its links price collectives that nobody measured.
        engine: whose kernels; the nearest measured version is taken, and every estimate's source says which.
        version: of the engine.
        data_dir: a folder of the package's layout, in place of the installed package.
        cuda_graphs: whether all-reduce kernels run from graphs (without the host's launch time).
        expert_distribution: one of `DISTRIBUTIONS`.
        moe_backend: one of `MOE_BACKENDS`, the kernels that compute the experts; None takes the fastest measured.
        fused_all_reduce: whether FlashInfer's all-reduce, TensorRT-LLM's kernel, may be called where it is the fastest.
        attention_backend: one of `ATTENTION_BACKENDS`; None takes the kernels that the engine itself chose.

    Raises:
        InputError: no data, or a system, distribution or backend that the data does not have.
    """
    roofline = Roofline(device, node)
    if device.measured_as is None:
        return RooflineEstimator(roofline)
    if expert_distribution not in DISTRIBUTIONS:
        hint = did_you_mean(expert_distribution, DISTRIBUTIONS, f"known: {', '.join(DISTRIBUTIONS)}")
        raise InputError(f"expert distribution {expert_distribution!r} was not measured", hint)
    if moe_backend not in (None, *MOE_BACKENDS):
        hint = did_you_mean(str(moe_backend), MOE_BACKENDS, f"known: {', '.join(MOE_BACKENDS)}")
        raise InputError(f"there is no backend of experts {moe_backend!r}", hint)
    folder = systems_folder(data_dir) / device.measured_as
    if not folder.is_dir():
        known = measured_systems(data_dir)
        raise InputError(
            f"{device.name} is measured as {device.measured_as}, which the data does not have",
            did_you_mean(device.measured_as, known, f"it has {', '.join(known)}"),
        )
    collection = Collection(
        folder,
        engine,
        version,
        roofline,
        cuda_graphs,
        expert_distribution,
        moe_backend,
        fused_all_reduce,
        attention_backend,
    )
    return TableEstimator(Tables(collection), roofline)


@dataclass(frozen=True)
class Tables:
    """Measured tables of one system as one engine's version sees them, each read on first use."""

    collection: Collection

    def table_for(self, op: ops.Op) -> MeasurementTable | None:
        """The table to price `op` from, or None where nobody measured its kind in its format on this system."""
        return table_for(self.collection, op)


def nccl_estimator(device: Device, node: Node | None, data_dir: Path | None = None) -> Estimator:
    """The estimator of NCCL's collectives inside a server: as measured on `device`, else the calibrated closed form.

    Raises:
        InputError: the measured operators are not installed.
    """
    roofline = Roofline(device, node)
    folder = systems_folder(data_dir) / device.measured_as if device.measured_as else None
    if folder is None or not folder.is_dir():
        return RooflineEstimator(roofline)
    return TableEstimator(NcclTables(Collection(folder, "nccl", "", roofline)), roofline)


@dataclass(frozen=True)
class NcclTables:
    """Measured collectives of one system as NCCL alone runs them."""

    collection: Collection

    def table_for(self, op: ops.Op) -> MeasurementTable | None:
        """The table of the collective, or None where nobody measured it on this system."""
        key = ("nccl alone", getattr(op, "op", op.kind))
        if key not in self.collection.read:
            self.collection.read[key] = nccl_table(self.collection, op)
        return self.collection.read[key]
