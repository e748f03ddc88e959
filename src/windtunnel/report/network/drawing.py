"""A fabric as a drawing: tiers above each other, servers as boxes."""

from collections.abc import Iterator

import numpy as np

from windtunnel.network.fabric import Fabric, NodeKind
from windtunnel.units import format_count

WIDTH = 1200
MOST_SERVERS, MOST_SWITCHES = 16, 64
"""Of more, the first are drawn, and a line names the number of the others."""
_ROW = 110
_MOST_BEND = 120
_LINK = 'fill="none" stroke="#888" stroke-opacity=".4"'
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")


def drawing(fabric: Fabric) -> tuple[str, str]:
    """Draw a fabric as (SVG, caption); hovering a node names it and its links."""
    places, boxes, height = _layout(fabric)
    lines = [
        _line(places[a], places[b])
        for a, b in zip(fabric.link_a.tolist(), fabric.link_b.tolist(), strict=True)
        if a in places and b in places
    ]
    nodes = [_node(fabric, node, x, y) for node, (x, y) in places.items()]
    hidden = fabric.num_nodes - len(places)
    size = f"{fabric.num_gpus} {fabric.gpu_type} GPUs in {format_count(fabric.num_servers, 'server')}"
    caption = f"{size}, {format_count(fabric.num_links, 'link')}. Point at a node to see its links."
    caption += f" {hidden} more nodes are like those shown and are left out." if hidden else ""
    parts = "\n".join([*boxes, *lines, *nodes, *_legend(fabric, height)])
    return f'<svg viewBox="0 0 {WIDTH} {height + 24}" width="{WIDTH}" role="img" font-size="11">{parts}</svg>', caption


def _legend(fabric: Fabric, y: int) -> Iterator[str]:
    """Name the colour of every kind of node that the fabric has."""
    kinds = [(0, 0), *([(1, 0)] if (fabric.kind == NodeKind.SCALE_UP_SWITCH).any() else [])]
    kinds += [(int(NodeKind.SWITCH), tier) for tier in range(1, int(fabric.tier.max()) + 1)]
    for place, kind in enumerate(kinds):
        yield f'<rect x="{8 + 150 * place}" y="{y}" width="9" height="9" rx="2" fill="{_colour(*kind)}"/>'
        yield f'<text x="{22 + 150 * place}" y="{y + 9}" fill="currentColor">{_name(*kind)}</text>'


def _layout(fabric: Fabric) -> tuple[dict[int, tuple[float, int]], list[str], int]:
    """Return where each drawn node is, the boxes of servers, and the picture's height."""
    tiers = int(fabric.tier.max())
    places: dict[int, tuple[float, int]] = {}
    first = 40 + (_MOST_BEND if _has_flat_links(fabric) else 0)
    for tier in range(1, tiers + 1):
        switches = fabric.nodes_of(NodeKind.SWITCH, tier)[:MOST_SWITCHES]
        for x, node in zip(_spread(len(switches), 0, WIDTH), switches.tolist(), strict=True):
            places[node] = (x, first + _ROW * (tiers - tier))
    servers = min(fabric.num_servers, MOST_SERVERS)
    top = first + _ROW * tiers
    boxes = []
    for server, middle in enumerate(_spread(servers, 0, WIDTH)):
        wide = WIDTH / servers - 8
        left = middle - wide / 2
        boxes.append(
            f'<rect x="{left:.1f}" y="{top - 16}" width="{wide:.1f}" height="112" rx="6" '
            'fill="currentColor" fill-opacity=".06"/>'
        )
        inside = np.flatnonzero(fabric.server == server)
        for kind, y in ((NodeKind.GPU, top), (NodeKind.SCALE_UP_SWITCH, top + 70)):
            nodes = inside[fabric.kind[inside] == kind][:MOST_SWITCHES]
            for x, node in zip(_spread(len(nodes), left, wide), nodes.tolist(), strict=True):
                places[node] = (x, y)
        boxes.append(f'<text x="{left + 4:.1f}" y="{top + 92}" fill="currentColor">server {server}</text>')
    return places, boxes, top + 120


def _has_flat_links(fabric: Fabric) -> bool:
    """Whether links join nodes of one row."""
    row = 100 * fabric.kind.astype(int) + fabric.tier
    return bool((row[fabric.link_a] == row[fabric.link_b]).any())


def _line(start: tuple[float, int], end: tuple[float, int]) -> str:
    """Draw a link: straight between rows, inside one row an arch, which is higher the longer it is."""
    (x, y), (to_x, to_y) = start, end
    bend = min(2.0 * _MOST_BEND, 16 + abs(to_x - x) / 5) if y == to_y else 0
    if not bend:
        return f'<path d="M{x:.1f} {y}L{to_x:.1f} {to_y}" {_LINK}/>'
    return f'<path d="M{x:.1f} {y}Q{(x + to_x) / 2:.1f} {y - bend:.1f} {to_x:.1f} {to_y}" {_LINK}/>'


def _spread(count: int, left: float, width: float) -> list[float]:
    return [left + width * (i + 0.5) / count for i in range(count)]


def _node(fabric: Fabric, node: int, x: float, y: int) -> str:
    kind, tier = int(fabric.kind[node]), int(fabric.tier[node])
    degree = int(np.count_nonzero((fabric.link_a == node) | (fabric.link_b == node)))
    label = f"<title>{_name(kind, tier)} {node}, {degree} links</title>"
    colour = _colour(kind, tier)
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{colour}">{label}</circle>'
    return f'<rect x="{x - 7:.1f}" y="{y - 5}" width="14" height="10" rx="2" fill="{colour}">{label}</rect>'


def _name(kind: int, tier: int) -> str:
    return {0: "GPU", 1: "scale-up switch"}.get(kind, {1: "leaf", 2: "spine", 3: "core"}.get(tier, "switch"))


def _colour(kind: int, tier: int) -> str:
    return _COLOURS[0 if kind == 0 else 1 if kind == 1 else min(1 + tier, 4)]
