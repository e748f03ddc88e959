"""Fabrics, collectives and iterations for people and as documents."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from windtunnel.network.collectives.call import CollectiveRun
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.report.network.drawing import drawing
from windtunnel.report.numbers import number, percent
from windtunnel.report.render.json import fields_of
from windtunnel.report.report import Column, Facts, Figures, OnPage, Report, Section, Table, table_of
from windtunnel.report.version import version
from windtunnel.training.iteration.layers import RankGroup
from windtunnel.training.iteration.shared_fabric import SharedJob
from windtunnel.training.iteration.times import Iteration
from windtunnel.units import format_bytes, format_count, format_seconds

_TIERS = {0: "scale-up switch", 1: "leaf", 2: "spine", 3: "core"}
_GROUPS = {
    RankGroup.TP: "tensor parallel",
    RankGroup.EP: "expert parallel",
    RankGroup.DP: "data parallel",
    RankGroup.DP_EP: "of experts",
}
_MOST_ROWS = 12


def topology_report(fabric: Fabric) -> Report:
    """Return the report of a fabric: its nodes by kind, its links by what they join, and a drawing."""
    counts = [("GPUs", f"{fabric.num_gpus} {fabric.gpu_type}, {fabric.gpus_per_server} a server")]
    counts += [(name, str(num)) for name, num in _switches(fabric)]
    columns: Mapping[str, Column] = {
        "links between": lambda row: f"{row['from']} - {row['to']}",
        "number": lambda row: str(row["num"]),
        "each way": lambda row: f"{number(row['bytes_per_s'] / 125e6)} Gbps",
        "latency": "latency_s",
    }
    links = table_of(_links(fabric), columns)
    drawn = Section("Drawing", [OnPage(lambda: [Figures([drawing(fabric)])])])
    return Report(fabric.name, [Facts(counts, 18)], [Section("", [links], "Links"), drawn])


def topology_document(fabric: Fabric) -> dict[str, Any]:
    """Document a fabric: counts, and links by kind, in SI units."""
    return {
        "windtunnel": version(),
        **fields_of(fabric, "name", "gpu_type", "num_gpus", "gpus_per_server", "num_servers", "num_nodes", "num_links"),
        "switches": dict(_switches(fabric)),
        "links": _links(fabric),
    }


def _switches(fabric: Fabric) -> list[tuple[str, int]]:
    switches = []
    for tier, name in _TIERS.items():
        num = int(np.count_nonzero((fabric.kind != NodeKind.GPU) & (fabric.tier == tier)))
        if num:
            switches.append((f"{name}{'es' if name.endswith('switch') else 's'}".replace("leafs", "leaves"), num))
    return switches


def _links(fabric: Fabric) -> list[dict[str, Any]]:
    level = np.where(fabric.kind == NodeKind.GPU, -1, fabric.tier)
    a, b = level[fabric.link_a], level[fabric.link_b]
    keys = np.column_stack([np.minimum(a, b), np.maximum(a, b), fabric.bandwidth_bytes_per_s, fabric.latency_s])
    kinds, counts = np.unique(keys, axis=0, return_counts=True)
    words = {-1: "GPU", **_TIERS}
    return [
        {"from": words[int(low)], "to": words[int(high)], "num": int(num), "bytes_per_s": rate, "latency_s": latency}
        for (low, high, rate, latency), num in zip(kinds.tolist(), counts, strict=True)
    ]


def collective_report(run: CollectiveRun, fabric: Fabric) -> Report:
    """Return the report of a collective: time, bandwidths as nccl-tests defines them, algorithm and source."""
    servers = f", {format_count(run.num_servers, 'server')}" if run.num_servers > 1 else ""
    is_plain = run.backend != "analytic" and run.protocol == "simple"
    facts = [
        ("ranks", f"{format_count(run.num_ranks, 'GPU')} of {fabric.name}{servers}"),
        ("time", format_seconds(run.seconds)),
        ("algbw", f"{number(run.algorithm_bytes_per_s / 1e9)} GB/s"),
        ("busbw", f"{number(run.bus_bytes_per_s / 1e9)} GB/s"),
        ("algorithm", run.algorithm if is_plain else f"{run.algorithm}, {run.protocol}"),
        ("found", run.source),
    ]
    return Report(f"{run.op} of {format_bytes(run.size_bytes)}", [Facts(facts)])


def collective_document(run: CollectiveRun) -> dict[str, Any]:
    """Document one collective."""
    work = fields_of(run, "op", "size_bytes", "num_ranks", "num_servers")
    answer = fields_of(run, "seconds", "algorithm_bytes_per_s", "bus_bytes_per_s")
    return {"windtunnel": version(), **work, **answer, **fields_of(run, "algorithm", "protocol", "backend", "source")}


def iteration_report(iteration: Iteration) -> Report:
    """Return the report of an iteration: where its time goes, and the layers that take longest."""
    total, job = iteration.total_ns, iteration.workload
    spent = {"computation": float(iteration.compute_ns)}
    spent |= {_GROUPS[group]: exposed for group, exposed in iteration.exposed_ns.items()}
    spent |= {"between stages": iteration.pp_ns, "pipeline idle": iteration.bubble_ns}
    rows = [(name, format_seconds(ns * 1e-9), percent(ns / total)) for name, ns in spent.items() if ns > 0]
    shape = f"TP {job.tp}, EP {job.ep}, PP {job.pp}, DP {job.dp}, {job.num_micro_batches} micro-batches"
    lead = f"{format_count(job.num_gpus, 'GPU')}, {shape}, {format_count(len(job.layers), 'layer')}"
    layers = Table(("layer", "lines", "computation", "communication", "exposed"), _layer_rows(iteration))
    tables = [Table(("exposed", "time", "share"), rows), layers]
    return Report(f"{job.name}: {format_seconds(total * 1e-9)} an iteration", [lead], [Section("", tables)])


def _layer_rows(iteration: Iteration) -> list[tuple[str, ...]]:
    sums: dict[str, list[int]] = {}
    for row in iteration.layers:
        phases = (row.forward, row.weight_gradient, row.input_gradient)
        into = sums.setdefault(row.layer.name, [0, 0, 0, 0])
        into[0] += 1
        into[1] += row.compute_ns
        into[2] += sum(phase.total_ns for phase in phases)
        into[3] += sum(phase.exposed_ns for phase in phases)
    longest = sorted(sums.items(), key=lambda item: -(item[1][1] + item[1][3]))[:_MOST_ROWS]
    return [(name, str(values[0]), *(format_seconds(value * 1e-9) for value in values[1:])) for name, values in longest]


def iteration_document(iteration: Iteration) -> dict[str, Any]:
    """Document an iteration, in seconds."""
    return {
        "windtunnel": version(),
        "workload": iteration.workload.name,
        "total_s": iteration.total_ns * 1e-9,
        "compute_s": iteration.compute_ns * 1e-9,
        "exposed_s": {str(group): spent * 1e-9 for group, spent in iteration.exposed_ns.items()},
        "pp_s": iteration.pp_ns * 1e-9,
        "bubble_s": iteration.bubble_ns * 1e-9,
        "layers": [
            {
                "name": row.layer.name,
                "phases": {
                    name: {
                        "compute_s": phase.compute_ns * 1e-9,
                        "communication_s": phase.total_ns * 1e-9,
                        "exposed_s": phase.exposed_ns * 1e-9,
                    }
                    for name, phase in (
                        ("forward", row.forward),
                        ("weight_gradient", row.weight_gradient),
                        ("input_gradient", row.input_gradient),
                    )
                },
            }
            for row in iteration.layers
        ],
    }


def shared_report(jobs: Sequence[SharedJob], fabric: Fabric, placement: str) -> Report:
    """Return the report of jobs that share a network: each one's iteration alone and beside the others."""
    columns: dict[str, Column] = {"job": "workload.name", "GPUs": lambda job: str(job.workload.num_gpus)}
    columns |= {"alone": "alone_s", "shared": "shared_s", "slowest": "slowest_s"}
    columns |= {"slowdown": lambda job: f"{job.slowdown:.2f}x", "iterations": lambda job: str(job.num_iterations)}
    return Report(f"{format_count(len(jobs), 'job')} on {fabric.name}, {placement}", [table_of(jobs, columns)])


def shared_document(jobs: Sequence[SharedJob], fabric: Fabric, placement: str) -> dict[str, Any]:
    """Document jobs that share a network."""
    return {
        "windtunnel": version(),
        "topology": fabric.name,
        "placement": placement,
        "jobs": [
            {
                "workload": job.workload.name,
                "num_gpus": job.workload.num_gpus,
                "gpus": job.gpus.tolist(),
                **fields_of(job, "alone_s", "shared_s", "slowest_s", "slowdown", "num_iterations"),
            }
            for job in jobs
        ],
    }
