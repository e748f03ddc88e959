"""Results as JSON documents: SI numbers, units in the names, nothing that depends on the machine or the hour."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from windtunnel.metrics.summary import to_builtins
from windtunnel.report.version import version
from windtunnel.schema import encode

if TYPE_CHECKING:
    from windtunnel.serving.explain import Explanation
    from windtunnel.serving.setup.memory import MemoryPlan
    from windtunnel.serving.simulate import Result


def as_text(document: Any) -> str:
    """A document as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def run_document(result: Result) -> dict[str, Any]:
    """A simulation: its summary, the scenario with every default filled in, memory, and where its times come from."""
    by_pool = {pool.name: memory_document(pool.memory) for pool in result.pools}
    return {
        "windtunnel": version(),
        "scenario": encode(result.scenario),
        "summary": to_builtins(result.summary),
        "memory": memory_document(result.memory),
        **({"memory_by_pool": by_pool} if by_pool else {}),
        "coverage": {coverage.value: share for coverage, share in result.coverage.items()},
        "sources": result.sources,
        "interval_80": {name: {"low": found.low, "high": found.high} for name, found in result.intervals.items()},
        "calibration": {
            "name": result.setup.calibration_name,
            "not_calibrated": result.setup.not_calibrated or None,
            "remarks": list(result.calibration_remarks),
            "learnt": dict(result.setup.learnt),
        },
        "operators": result.operators,
    }


def step_document(step: Explanation) -> dict[str, Any]:
    """One explained step."""
    setup = step.setup
    return {
        "windtunnel": version(),
        "model": setup.model.name,
        "device": setup.device.name,
        "node": setup.node.name,
        "parallelism": {name: getattr(setup.parallelism, name) for name in setup.parallelism.__struct_fields__},
        "precision": {name: getattr(setup.precision, name) for name in setup.precision.__struct_fields__},
        "engine": encode(setup.engine),
        "batch": asdict(step.batch),
        "num_computed_tokens": step.num_computed_tokens,
        "device_s": step.device_s,
        "host_s": step.host_s,
        "host_overlaps": step.host_overlaps,
        "launch_s": step.launch_s,
        "unhidden_s": step.unhidden_s,
        "step_s": step.step_s,
        "bound_by": step.bound_by,
        "seconds_by_kind": step.seconds_by(lambda launch: launch.op.kind),
        "seconds_by_bound": step.seconds_by(lambda launch: launch.bound_by),
        "seconds_by_coverage": step.seconds_by(lambda launch: launch.coverage.value),
        "seconds_by_source": step.seconds_by(lambda launch: launch.source),
        "operators": [
            {
                "name": launch.name,
                "kind": launch.op.kind,
                "shape": asdict(launch.op),
                "count": launch.count,
                "each_s": launch.each_s,
                "total_s": launch.total_s,
                "flops": launch.flops,
                "num_bytes": launch.num_bytes,
                "flops_fraction": launch.flops_fraction,
                "bandwidth_fraction": launch.bandwidth_fraction,
                "bound_by": launch.bound_by,
                "coverage": launch.coverage.value,
                "source": launch.source,
            }
            for launch in step.launches
        ],
        "memory": memory_document(step.memory),
    }


def memory_document(memory: MemoryPlan) -> dict[str, Any]:
    """One device's memory."""
    return asdict(memory) | {"kv_tokens": memory.kv_tokens}
