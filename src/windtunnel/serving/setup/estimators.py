"""Choose the estimator of a setup's operators: tables, network and calibration."""

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec

from windtunnel.hardware import Device, Node
from windtunnel.model.exchange import ALL_GATHER, DEEPEP_AUTO, DEEPEP_LOW_LATENCY, DEEPEP_NORMAL, MEGA_MOE
from windtunnel.model.feed_forward.experts import is_exchanged
from windtunnel.model.operators import BF16_BYTES
from windtunnel.model.sampling import Sampler
from windtunnel.model.shape import LoraShape, Shard
from windtunnel.pricing.aiconfigurator.collection import RANDOM, TEXT, KernelChoices
from windtunnel.pricing.aiconfigurator.estimator import counted_once, measured_estimator
from windtunnel.pricing.aiconfigurator.published import fetched_folders
from windtunnel.pricing.calibrated import ARITHMETIC, CalibratedEstimator
from windtunnel.pricing.estimator import Estimator, RooflineEstimator
from windtunnel.pricing.profile import profile_estimator
from windtunnel.schema import fields_of
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.contract import behaviour_of
from windtunnel.serving.engines.defaults import applies_on
from windtunnel.serving.scenario import Setup

NVIDIA = "nvidia"
"""Vendor of the devices that FlashInfer's kernels run on."""


def shard_of(setup: Setup) -> Shard:
    """Return the model as the setup deploys it."""
    lora = setup.engine.lora
    return Shard(
        model=setup.model,
        precision=setup.precision,
        parallelism=setup.parallelism,
        devices_per_node=setup.node.num_devices,
        tf32=bool(setup.engine.tf32),
        scaled_sparse_kv=bool(setup.engine.scaled_sparse_kv),
        compresses_in_one_block=bool(setup.engine.compresses_in_one_block),
        prefills_tails=bool(setup.engine.swa_bounded_replay),
        ngrams_on_host=bool(setup.engine.ngram_tables_on_host),
        all2all_backend=exchange_of(setup),
        gathers_quantised=behaviour_of(setup.engine.name).gathers_quantised,
        redundant_experts=setup.engine.num_redundant_experts or 0 if setup.model.has_experts else 0,
        beside_tokens=setup.engine.shared_experts_beside_tokens or 0,
        routes_shared_expert=applies_on(setup.engine, setup.device.architecture, "shared_expert_routed"),
        sampler=Sampler(setup.sampling, sampler_kernel(setup)),
        lora=None if lora is None else LoraShape(**fields_of(lora, "rank", "target_modules", "fully_sharded")),
    )


def exchange_of(setup: Setup) -> str:
    """Return the kernels that exchange tokens; most engines sum over ranks where attention is not data-parallel."""
    backend = setup.engine.all2all_backend or ALL_GATHER
    exchanges = behaviour_of(setup.engine.name).exchanges_without_attention_dp or backend == MEGA_MOE
    return backend if exchanges or setup.parallelism.attention_dp > 1 else ALL_GATHER


def sampler_kernel(setup: Setup) -> str:
    """Return the engine's sampling kernel: PyTorch's sort where it names none, or one that the device lacks."""
    kernel = setup.engine.sampler or "sort"
    if setup.device.vendor == NVIDIA:
        return kernel
    return "triton" if kernel.startswith("triton") else "sort"


def estimator_for(setup: Setup) -> Estimator:
    """Return the estimator of the setup's own profile, or else the best for its device and engine."""
    if setup.profile is not None:
        profile = setup.profile
        return calibrated(profile_estimator(Path(profile.folder), setup.device, setup.node, profile.estimator), setup)
    engine = setup.engine
    assert engine.version is not None
    kernels = KernelChoices(
        cuda_graphs=bool(engine.max_cudagraph_capture_size),
        moe_backend=engine.moe_backend,
        expert_distribution=RANDOM if setup.random_tokens else TEXT,
        fused_all_reduce_bytes=_fused_bytes(setup),
        attention_backend=engine.attention_backend,
        deepep=_deepep(setup),
        num_redundant_experts=_placed(engine),
    )
    hardware = msgspec.json.encode((setup.device, setup.node))
    measured = _measured(hardware, engine.name, engine.version, kernels, *fetched_folders().items())
    if isinstance(measured, RooflineEstimator) and applies_on(engine, setup.device.architecture, "serial_products"):
        measured = RooflineEstimator(replace(measured.roofline, serial_products=True))
    once = counted_once(measured, engine.name, engine.version, _fused_norm_tokens(setup))
    return on_network(calibrated(once, setup), setup)


@lru_cache(16)
def _measured(hardware: bytes, engine: str, version: str, kernels: KernelChoices, *_fetched: object) -> Estimator:
    """Return `measured_estimator`, kept for setups that read the same tables: it holds what was made of them, in MB."""
    device, node = msgspec.json.decode(hardware, type=tuple[Device, Node])
    return measured_estimator(device, node, engine, version, kernels=kernels)


def _deepep(setup: Setup) -> str | None:
    """Return which kernels of DeepEP bring tokens to the experts, those of decode steps where both do; None: none."""
    backend = setup.engine.all2all_backend
    if not is_exchanged(shard_of(setup)) or backend not in (DEEPEP_NORMAL, DEEPEP_LOW_LATENCY, DEEPEP_AUTO):
        return None
    return DEEPEP_NORMAL if backend == DEEPEP_NORMAL else DEEPEP_LOW_LATENCY


def _placed(engine: EngineSettings) -> int | None:
    """Return the further copies of experts that are placed by their load; None: experts are not placed by it."""
    return engine.num_redundant_experts or (0 if engine.enable_eplb else None)


def _fused_bytes(setup: Setup) -> float:
    """Return the largest message whose all-reduce is fused; 0: none."""
    limit = setup.engine.fused_all_reduce_bytes
    return 0.0 if not setup.engine.fused_all_reduce else math.inf if limit is None else float(limit)


def _fused_norm_tokens(setup: Setup) -> float:
    """Return the tokens up to which the all-reduce of a layer computes the norm behind it; 0: never."""
    is_reduced = setup.parallelism.tp > 1
    return _fused_bytes(setup) / (setup.model.hidden_size * BF16_BYTES) if is_reduced else 0.0


def on_network(estimator: Estimator, setup: Setup) -> Estimator:
    """Price the replica's collectives between nodes on the setup's network, or with NCCL's model where it has none."""
    num_devices = setup.parallelism.num_devices
    if num_devices <= setup.node.num_devices or (setup.network is None and setup.device.vendor != NVIDIA):
        return estimator
    # Imported late: few deployments span nodes, and the network's loops take a tenth of a second to import.
    from windtunnel.network.cluster import OnNetwork, OverNodes, network_of

    if setup.network is None:
        return OverNodes(estimator, setup.node)
    network = network_of(setup.network, setup.node, num_devices)
    return OnNetwork(estimator, network, num_devices // setup.parallelism.pp)


def estimator_key(setup: Setup) -> tuple[Hashable, ...]:
    """Return a key: setups of equal keys have equal estimators, calibrations aside.

    Devices and nodes count as they are: two files may have one name.
    """
    engine, hardware = setup.engine, (msgspec.json.encode(setup.device), msgspec.json.encode(setup.node))
    graphs = bool(engine.max_cudagraph_capture_size)
    reduces = (_fused_bytes(setup), _fused_norm_tokens(setup))
    experts = _deepep(setup), _placed(engine), setup.random_tokens
    spans_nodes = setup.parallelism.num_devices > setup.node.num_devices
    backends = (engine.attention_backend, engine.moe_backend, *experts, spans_nodes)
    return (*hardware, engine.name, engine.version, graphs, *reduces, *backends, setup.profile)


def calibrated(estimator: Estimator, setup: Setup) -> Estimator:
    """Multiply the estimator's times by the factors of the setup's calibration and of its power limit."""
    factors = {} if setup.calibration is None else dict(setup.calibration.factors)
    if setup.arithmetic_slower != 1.0:
        factors |= {name: factors.get(name, 1.0) * setup.arithmetic_slower for name in ARITHMETIC}
    return CalibratedEstimator(estimator, setup.device, factors) if factors else estimator
