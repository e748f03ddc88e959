"""A fabric as a drawing: tiers above each other, servers as boxes; `templates/fabric.svg` writes it."""

from typing import Any, NamedTuple

import numpy as np

from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.report.layout import layouts_beside
from windtunnel.report.render.html import template
from windtunnel.units import format_count

WIDTH = 1200
MOST_SERVERS, MOST_SWITCHES = 16, 64
"""Of more, the first are drawn, and a line names the number of the others."""
_ROW = 110
_MOST_BEND = 120


class DrawnKind(NamedTuple):
    """A kind of node."""

    name: str
    colour: str


GPU, *SWITCHES = (DrawnKind(**kind) for kind in layouts_beside(__file__))
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
