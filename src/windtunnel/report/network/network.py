"""Fabrics, with a drawing, collectives and iterations for people and as documents; flows and queues as CSV files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.files import csv_text, write_text
from windtunnel.network.backends.packet import PacketTimes
from windtunnel.network.collectives.call import CollectiveRun
from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.network.flows import Flows
from windtunnel.network.paths import FlowTimes
from windtunnel.report.chart import Axis, Chart, Series
from windtunnel.report.layout import facts_of, filled, layouts_beside, rows_of, table_of
from windtunnel.report.numbers import percent
from windtunnel.report.render.html import template
from windtunnel.report.render.json import version
from windtunnel.report.report import Block, Facts, Figures, OnPage, Report, Section, Table
from windtunnel.schema import fields_of
from windtunnel.training.iteration.layers import Iteration
from windtunnel.training.iteration.shared_fabric import SharedJob
from windtunnel.units import format_bytes, format_count, format_seconds

LAYOUT = layouts_beside(__file__)

WIDTH = 1200
MOST_SERVERS, MOST_SWITCHES = 16, 64
"""Of more, the first are drawn, and a line names the number of the others."""
_ROW = 110
_MOST_BEND = 120


class DrawnKind(NamedTuple):
    """A kind of node."""

    name: str
    colour: str


GPU, *SWITCHES = (DrawnKind(**kind) for kind in LAYOUT["nodes"])
"""GPUs; switches by tier, the last for any tier above."""


def drawing(fabric: Fabric) -> tuple[str, str]:
    """Draw a fabric as (SVG, caption); hovering a node names it and its links."""
    places, servers, height = _layout(fabric)
    pairs = zip(fabric.link_a.tolist(), fabric.link_b.tolist(), strict=True)
    links = [(places[a], places[b], _bend(places[a], places[b])) for a, b in pairs if a in places and b in places]
    tiers = range(0 if (fabric.kind == NodeKind.SCALE_UP_SWITCH).any() else 1, int(fabric.tier.max()) + 1)
    values = {
        "servers": servers,
        "links": links,
        "nodes": [_node(fabric, node, x, y) for node, (x, y) in places.items()],
        "kinds": [GPU, *map(switch_of, tiers)],
    }
    hidden = fabric.num_nodes - len(places)
    size = f"{fabric.num_gpus} {fabric.gpu_type} GPUs in {format_count(fabric.num_servers, 'server')}"
    caption = f"{size}, {format_count(fabric.num_links, 'link')}. Point at a node to see its links."
    caption += f" {hidden} more nodes are like those shown and are left out." if hidden else ""
    return str(template("fabric.svg").render(values, width=WIDTH, height=height)), caption


def switch_of(tier: int) -> DrawnKind:
    """Return the kind of the switches of a tier; tier 0 is below the leaves."""
    return SWITCHES[min(tier, len(SWITCHES) - 1)]


def _layout(fabric: Fabric) -> tuple[dict[int, tuple[float, int]], list[dict[str, float]], int]:
    """Return where each drawn node is, the boxes of servers, and the picture's height."""
    tiers = int(fabric.tier.max())
    places: dict[int, tuple[float, int]] = {}
    row = 100 * fabric.kind.astype(int) + fabric.tier
    # Links within a row are arches, which need room.
    first = 40 + (_MOST_BEND if (row[fabric.link_a] == row[fabric.link_b]).any() else 0)
    for tier in range(1, tiers + 1):
        switches = fabric.nodes_of(NodeKind.SWITCH, tier)[:MOST_SWITCHES]
        for x, node in zip(_spread(len(switches), 0, WIDTH), switches.tolist(), strict=True):
            places[node] = (x, first + _ROW * (tiers - tier))
    num_servers = min(fabric.num_servers, MOST_SERVERS)
    top, width = first + _ROW * tiers, WIDTH / num_servers - 8
    servers = []
    for server, middle in enumerate(_spread(num_servers, 0, WIDTH)):
        servers.append({"left": middle - width / 2, "top": top, "width": width})
        inside = np.flatnonzero(fabric.server == server)
        for kind, y in ((NodeKind.GPU, top), (NodeKind.SCALE_UP_SWITCH, top + 70)):
            nodes = inside[fabric.kind[inside] == kind][:MOST_SWITCHES]
            for x, node in zip(_spread(len(nodes), middle - width / 2, width), nodes.tolist(), strict=True):
                places[node] = (x, y)
    return places, servers, top + 120


def _bend(start: tuple[float, int], end: tuple[float, int]) -> float:
    """Return the height of a link's arch: 0 between rows, inside one row the higher the longer it is."""
    return min(2.0 * _MOST_BEND, 16 + abs(end[0] - start[0]) / 5) if start[1] == end[1] else 0.0


def _spread(count: int, left: float, width: float) -> list[float]:
    return [left + width * (i + 0.5) / count for i in range(count)]


def _node(fabric: Fabric, node: int, x: float, y: int) -> dict[str, Any]:
    kind = GPU if fabric.kind[node] == NodeKind.GPU else switch_of(int(fabric.tier[node]))
    degree = int(np.count_nonzero((fabric.link_a == node) | (fabric.link_b == node)))
    return {"x": x, "y": y, "kind": kind, "title": f"{kind.name} {node}, {degree} links"}


_GROUPS = {"tp": "tensor parallel", "ep": "expert parallel", "dp": "data parallel", "dp_ep": "of experts"}
_MOST_ROWS = 12
_PHASES = ("forward", "weight_gradient", "input_gradient")
_SECONDS = {"compute_s": "compute_ns", "communication_s": "total_ns", "exposed_s": "exposed_ns"}
"""Name in the document -> time of a phase."""
_SUMMED = ("lines", "compute_s", "total_s", "exposed_s")


def topology_report(fabric: Fabric) -> Report:
    """Return the report of a fabric: its nodes by kind, its links by what they join, and a drawing."""
    counts = rows_of(fabric, LAYOUT["fabric"]) + [(name, str(num)) for name, num in _switches(fabric)]
    links = table_of(_links(fabric), LAYOUT["links"])
    drawn = Section("Drawing", [OnPage(lambda: [Figures([drawing(fabric)])])])
    return Report(fabric.name, [Facts(counts, 18)], [Section("", [links], "Links"), drawn], verdict=_headline(fabric))


def _headline(fabric: Fabric) -> str:
    """Say how fast a GPU's links are, by what they lead to."""
    rates = []
    for link in _links(fabric):
        if link["from"] == GPU.name:
            target, ends = ("its neighbours", 2) if link["to"] == GPU.name else (f"a {link['to']}", 1)
            gbps = ends * link["num"] / fabric.num_gpus * link["bytes_per_s"] / 125e6
            rates.append(f"{gbps:,.0f} Gbps to {target}")
    return f"Each of {format_count(fabric.num_gpus, 'GPU')} has {' and '.join(rates)}." if rates else ""


def topology_document(fabric: Fabric) -> dict[str, Any]:
    """Document a fabric: counts, and links by kind, in SI units."""
    return {
        "windtunnel": version(),
        **fields_of(fabric, "name", "gpu_type", "num_gpus", "gpus_per_server", "num_servers", "num_nodes", "num_links"),
        "switches": dict(_switches(fabric)),
        "links": _links(fabric),
    }


def _switches(fabric: Fabric) -> Iterator[tuple[str, int]]:
    for tier, (name, _) in enumerate(SWITCHES[:-1]):
        num = int(np.count_nonzero((fabric.kind != NodeKind.GPU) & (fabric.tier == tier)))
        if num:
            yield f"{name}{'es' if name.endswith('switch') else 's'}".replace("leafs", "leaves"), num


def _links(fabric: Fabric) -> list[dict[str, Any]]:
    level = np.where(fabric.kind == NodeKind.GPU, -1, fabric.tier)
    a, b = level[fabric.link_a], level[fabric.link_b]
    keys = np.column_stack([np.minimum(a, b), np.maximum(a, b), fabric.bandwidth_bytes_per_s, fabric.latency_s])
    kinds, counts = np.unique(keys, axis=0, return_counts=True)
    nodes = [*SWITCHES, GPU]
    return [
        {"from": nodes[int(low)].name, "to": nodes[int(high)].name, "num": int(num)}
        | {"bytes_per_s": rate, "latency_s": latency}
        for (low, high, rate, latency), num in zip(kinds.tolist(), counts, strict=True)
    ]


def collective_report(run: CollectiveRun) -> Report:
    """Return the report of a collective: time, bandwidths as nccl-tests defines them, algorithm and source."""
    is_plain = run.backend != "analytic" and run.protocol == "simple"
    known = collective_document(run) | {"fabric": run.call.fabric.name, "protocol": None if is_plain else run.protocol}
    known["num_servers"] = known["num_servers"] if known["num_servers"] > 1 else None
    title, facts = f"{run.call.op} of {format_bytes(run.call.size_bytes)}", facts_of(known, LAYOUT["collective"])
    return Report(title, [facts], notes=run.notes, verdict=filled(LAYOUT["verdict"], known))


def collective_document(run: CollectiveRun) -> dict[str, Any]:
    """Document one collective."""
    work = fields_of(run.call, "op", "size_bytes") | fields_of(run.call.ranks, "num_ranks", "num_servers")
    answer = fields_of(run, "seconds", "algorithm_bytes_per_s", "bus_bytes_per_s")
    how = fields_of(run, "algorithm", "protocol", "backend", "source") | ({"notes": run.notes} if run.notes else {})
    return {"windtunnel": version(), **work, **answer, **how}


def sizes_report(runs: Sequence[CollectiveRun], measured: Mapping[int, float]) -> Report:
    """Return the table of a collective by its size, as nccl-tests prints it, beside what was `measured` (s by size)."""
    rows = sizes_document(runs, measured)["runs"]
    best = max(rows, key=itemgetter("bus_bytes_per_s"))
    least = min(row["size_bytes"] for row in rows if row["bus_bytes_per_s"] >= best["bus_bytes_per_s"] / 2)
    is_seen = min(row["size_bytes"] for row in rows) < least < best["size_bytes"]
    known = {**best, "fabric": runs[0].call.fabric.name, "half": least if is_seen else None}
    if measured:
        known["error"] = float(np.median([abs(row["error"]) for row in rows]))

    def curve() -> list[Block]:
        axes = Axis("MiB", is_log=True), Axis("bus bandwidth, GB/s", low=0.0)
        names = {"bus_bytes_per_s": "predicted", "measured_bus_bytes_per_s": "measured"}
        lines = [
            Series(label if measured else "", [row["size_bytes"] / 2**20 for row in rows], rates, "marked")
            for name, label in names.items()
            if (rates := [row[name] / 1e9 for row in rows if name in row])
        ]
        return [Figures([(Chart(*axes, lines), "bus bandwidth over the size")])]

    columns, verdict = ("measured_sizes", "measured_verdict") if measured else ("sizes", "sizes_verdict")
    table = Section("", [OnPage(curve), table_of(rows, LAYOUT[columns])], is_open=True)
    return Report(f"{best['op']} by size", [], [table], runs[0].notes, verdict=filled(LAYOUT[verdict], known))


def sizes_document(runs: Sequence[CollectiveRun], measured: Mapping[int, float]) -> dict[str, Any]:
    """Document a collective of several sizes, with what was `measured` (s by size) and the errors."""
    rows = []
    for run in runs:
        row = {name: value for name, value in collective_document(run).items() if name != "windtunnel"}
        if (taken_s := measured.get(run.call.size_bytes)) is not None:
            rate = run.bus_bytes_per_s * run.seconds / taken_s
            row |= {"measured_s": taken_s, "measured_bus_bytes_per_s": rate, "error": run.seconds / taken_s - 1}
        rows.append(row)
    return {"windtunnel": version(), "runs": rows}


def iteration_report(iteration: Iteration) -> Report:
    """Return the report of an iteration: where its time goes, and the layers that take longest."""
    total, job = iteration.total_ns, iteration.workload
    spent = {"computation": float(iteration.compute_ns)}
    spent |= {_GROUPS[group]: exposed for group, exposed in iteration.exposed_ns.items()}
    spent |= {"between stages": iteration.pp_ns, "pipeline idle": iteration.bubble_ns}
    rows = [(name, format_seconds(ns * 1e-9), percent(ns / total)) for name, ns in spent.items() if ns > 0]
    shape = {**fields_of(job, "num_gpus", "tp", "ep", "pp", "dp", "num_micro_batches"), "num_layers": len(job.layers)}
    tables = [Table(("exposed", "time", "share"), rows), table_of(_longest_layers(iteration), LAYOUT["layers"])]
    first = sorted(rows, key=lambda row: -spent[row[0]])[:2]
    mostly = ", ".join(f"{name} {share}" for name, _, share in first)
    verdict = f"An iteration takes {format_seconds(total * 1e-9)}: {mostly}."
    return Report(job.name, [filled(LAYOUT["iteration"], shape)], [Section("", tables, is_open=True)], verdict=verdict)


def _longest_layers(iteration: Iteration) -> list[dict[str, Any]]:
    """Return the layers that take longest, the lines of one name together."""
    sums: dict[str, dict[str, Any]] = {}
    for row in iteration.layers:
        into = sums.setdefault(row.layer.name, {"name": row.layer.name, **dict.fromkeys(_SUMMED, 0)})
        phases = [getattr(row, name) for name in _PHASES]
        into["lines"] += 1
        into["compute_s"] += row.compute_ns * 1e-9
        into["total_s"] += sum(phase.total_ns for phase in phases) * 1e-9
        into["exposed_s"] += sum(phase.exposed_ns for phase in phases) * 1e-9
    return sorted(sums.values(), key=lambda layer: -(layer["compute_s"] + layer["exposed_s"]))[:_MOST_ROWS]


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
                    phase: {name: getattr(getattr(row, phase), field) * 1e-9 for name, field in _SECONDS.items()}
                    for phase in _PHASES
                },
            }
            for row in iteration.layers
        ],
    }


def shared_report(jobs: Sequence[SharedJob], fabric: Fabric, placement: str) -> Report:
    """Return the report of jobs that share a network: each one's iteration alone and beside the others."""
    title = f"{format_count(len(jobs), 'job')} on {fabric.name}, {placement}"
    slowed = max(jobs, key=attrgetter("slowdown"))
    return Report(title, [table_of(jobs, LAYOUT["jobs"])], verdict=filled(LAYOUT["slowed"], slowed))


def shared_document(jobs: Sequence[SharedJob], fabric: Fabric, placement: str) -> dict[str, Any]:
    """Document jobs that share a network."""
    return {
        "windtunnel": version(),
        "topology": fabric.name,
        "placement": placement,
        "jobs": [
            {"workload": job.workload.name, "num_gpus": job.workload.num_gpus, "gpus": job.gpus.tolist()}
            | fields_of(job, "alone_s", "shared_s", "slowest_s", "slowdown", "num_iterations")
            for job in jobs
        ],
    }


def write_flow_times(flows: Flows, times: FlowTimes, path: Path) -> None:
    """Write a row for each flow: its ends, channel, step and bytes; when it began, was sent and was complete, in us.
    InputError where the file cannot be written."""
    columns = fields_of(flows, "group", "channel", "step", "source", "destination", "size_bytes")
    columns |= {f"{name}_us": getattr(times, f"{name}_s") * 1e6 for name in ("begin", "sent", "finish")}
    _write_columns(columns.items(), path)


def _write_columns(columns: Iterable[tuple[str, NDArray[Any]]], path: Path) -> None:
    names, values = zip(*columns, strict=True)
    write_text(path, csv_text(names, zip(*(np.round(column, 6).tolist() for column in values), strict=True)))


def write_link_use(fabric: Fabric, times: FlowTimes, path: Path) -> None:
    """Write a row for each direction of each link that carried anything: bytes, and how long it was busy until the end.

    Packets add the largest queue, how long it was paused, and the pauses, marks and losses there. InputError where the
    file cannot be written.
    """
    source, target = fabric.directions
    rate = np.repeat(fabric.bandwidth_bytes_per_s, 2)
    used = np.flatnonzero(times.link_bytes)
    end_s = max(float(times.finish_s.max(initial=0.0)), 1e-12)
    columns: dict[str, NDArray[Any]] = {"from": source, "to": target, "bytes_per_s": rate}
    columns |= {"bytes": np.rint(times.link_bytes).astype(np.int64), "busy_fraction": times.link_bytes / rate / end_s}
    if isinstance(times, PacketTimes):
        links = times.links
        columns |= {"most_queued_bytes": links.most_queued_bytes, "paused_us": links.paused_ps * 1e-6}
        columns |= {name: links[f"num_{name}"] for name in ("pauses", "marks", "drops")}
    _write_columns(((name, column[used]) for name, column in columns.items()), path)
