"""Results as JSON documents: SI numbers, units in the names, independent of machine and time."""

from __future__ import annotations

from dataclasses import asdict
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import msgspec

from windtunnel.metrics.summary import to_builtins
from windtunnel.report.version import version
from windtunnel.schema import encode

if TYPE_CHECKING:
    from windtunnel.serving.explain import Explanation
    from windtunnel.serving.results import Result
    from windtunnel.serving.setup.memory import MemoryPlan


def as_text(document: Any) -> str:
    """Return a document as indented JSON; numbers of numpy are plain ones."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=methodcaller("item")), indent=2).decode()


def fields_of(thing: Any, *names: str) -> dict[str, Any]:
    """Return the attributes `names` of `thing` by name."""
    return {name: getattr(thing, name) for name in names}


def run_document(result: Result) -> dict[str, Any]:
    """Document a simulation: summary, scenario with every default filled in, memory, and where its times come from."""
    by_pool = {pool.name: memory_document(pool.memory) for pool in result.pools}
    return {
        "windtunnel": version(),
        "scenario": encode(result.scenario),
        "summary": to_builtins(result.summary),
        "memory": memory_document(result.memory),
        **({"memory_by_pool": by_pool} if by_pool else {}),
        "coverage": {coverage.value: share for coverage, share in result.coverage.items()},
        "sources": result.sources,
        "interval_80": {name: fields_of(interval, "low", "high") for name, interval in result.intervals.items()},
        "calibration": {
            "name": result.setup.calibration_name,
            "not_calibrated": result.setup.not_calibrated or None,
            "remarks": list(result.calibration_remarks),
            "learnt": dict(result.setup.learnt),
        },
        "operators": result.operators,
    }


def step_document(step: Explanation) -> dict[str, Any]:
    """Document one explained step."""
    setup = step.setup
    return {
        "windtunnel": version(),
        "model": setup.model.name,
        "device": setup.device.name,
        "node": setup.node.name,
        "parallelism": fields_of(setup.parallelism, *setup.parallelism.__struct_fields__),
        "precision": fields_of(setup.precision, *setup.precision.__struct_fields__),
        "engine": encode(setup.engine),
        "batch": asdict(step.batch),
        **fields_of(step, "num_computed_tokens", "device_s", "host_s", "host_overlaps"),
        **fields_of(step, "launch_s", "unhidden_s", "step_s", "bound_by"),
        "seconds_by_kind": step.seconds_by(lambda launch: launch.op.kind),
        "seconds_by_bound": step.seconds_by(lambda launch: launch.bound_by),
        "seconds_by_coverage": step.seconds_by(lambda launch: launch.coverage.value),
        "seconds_by_source": step.seconds_by(lambda launch: launch.source),
        "operators": [
            {
                "name": launch.name,
                "kind": launch.op.kind,
                "shape": asdict(launch.op),
                **fields_of(launch, "count", "each_s", "total_s", "flops", "num_bytes"),
                **fields_of(launch, "flops_fraction", "bandwidth_fraction", "bound_by"),
                "coverage": launch.coverage.value,
                "source": launch.source,
            }
            for launch in step.launches
        ],
        "memory": memory_document(step.memory),
    }


def memory_document(memory: MemoryPlan) -> dict[str, Any]:
    """Document one device's memory."""
    return asdict(memory) | {"kv_tokens": memory.kv_tokens}
