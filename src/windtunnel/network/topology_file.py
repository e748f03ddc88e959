"""SimAI's topology files, read and written.

Format (`gen_Topo_Template.py`, SimAI 1.6): a line `nodes gpus_per_server nvswitches switches links gpu_type`, a line
with the ids of all switches, and a line `source destination rate latency error_rate` for each link.
"""

from decimal import Decimal
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel import catalog
from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError, did_you_mean
from windtunnel.files import read_text
from windtunnel.network.fabric import Fabric, NodeKind, check
from windtunnel.units import format_count, parse_quantity

GPU_TYPES = ("A100", "A800", "H100", "H800", "H20")
"""What SimAI knows; devices of the catalog are known too."""

_HEADER = ("nodes", "GPUs per server", "NVSwitches", "switches", "links")


def read_topology(path: Path) -> Fabric:
    """Return the fabric in a topology file, plain or gzipped.

    Raises:
        InputError: the file is missing or wrong; names the file and the line.
    """
    lines = read_text(path).rstrip().splitlines()
    if len(lines) < 2:
        raise InputError(
            f"{path} has {format_count(len(lines), 'line')}; a topology has a header, a line of switches, and its links"
        )
    counts, gpu_type = _header(lines, path)
    num_nodes, gpus_per_server, num_scale_up, num_switches, num_links = counts
    num_gpus = num_nodes - num_scale_up - num_switches
    if num_gpus < 1 or gpus_per_server < 1 or num_gpus % gpus_per_server:
        raise InputError(f"{path}, line 1: {num_gpus} GPUs do not fill servers of {gpus_per_server}")
    _check_switch_ids(lines, path, num_gpus, num_nodes)
    if len(lines) - 2 < num_links:
        raise InputError(f"{path}, line 1: it announces {format_count(num_links, 'link')}; {len(lines) - 2} follow")
    if len(lines) - 2 > num_links:
        raise InputError(
            f"{path}, line {num_links + 3}: line 1 announces {format_count(num_links, 'link')}; here is one more"
        )
    ends, rate, latency, error = _links(lines[2:], path)
    kind = np.repeat(
        np.array([NodeKind.GPU, NodeKind.SCALE_UP_SWITCH, NodeKind.SWITCH], np.int8),
        [num_gpus, num_scale_up, num_switches],
    )
    fabric = Fabric(
        name=path.name,
        gpu_type=gpu_type,
        gpus_per_server=gpus_per_server,
        kind=kind,
        tier=np.zeros(num_nodes, np.int8),
        server=np.full(num_nodes, -1, np.int32),
        link_a=ends[:, 0],
        link_b=ends[:, 1],
        bandwidth_bytes_per_s=rate,
        latency_s=latency,
        error_fraction=error,
        gpus_forward=num_switches + num_scale_up == 0,
        is_kind_assumed=True,
    )
    check(fabric, str(path), "line", 3)
    fabric.tier[:] = _tiers(fabric)
    fabric.server[:] = _servers(fabric)
    return fabric


def topology_text(fabric: Fabric) -> str:
    """Return the text of a topology file, byte for byte as SimAI's generator writes it."""
    num_scale_up, num_switches = (len(fabric.nodes_of(kind)) for kind in (NodeKind.SCALE_UP_SWITCH, NodeKind.SWITCH))
    counts = (fabric.num_nodes, fabric.gpus_per_server, num_scale_up, num_switches, fabric.num_links)
    switches = range(fabric.num_gpus, fabric.num_nodes)
    head = f"{' '.join(map(str, counts))} {fabric.gpu_type}\n{''.join(f'{node} ' for node in switches)}\n"
    words = (
        _words(fabric.bandwidth_bytes_per_s / 125e6, "Gbps"),
        _words(fabric.latency_s * 1e3, "ms"),
        _words(fabric.error_fraction, ""),
    )
    links = zip(fabric.link_a.tolist(), fabric.link_b.tolist(), *words, strict=True)
    return head + "".join(f"{a} {b} {rate} {latency} {error}\n" for a, b, rate, latency, error in links)


def _words(values: Floats, unit: str) -> list[str]:
    """Return numbers without exponent and without digits that only rounding brought: 0.000025ms, 2880Gbps."""
    known, which = np.unique(values, return_inverse=True)
    words = [format(Decimal(f"{value:.12g}").normalize(), "f") + unit for value in known]
    return [words[k] for k in which.tolist()]


def _header(lines: list[str], path: Path) -> tuple[list[int], str]:
    words = lines[0].split()
    if len(words) != 6:
        raise InputError(
            f"{path}, line 1: it has {format_count(len(words), 'field')}; 6 are needed",
            "nodes, GPUs per server, NVSwitches, switches, links, GPU type",
        )
    wrong = next((pair for pair in zip(words, _HEADER, strict=False) if not pair[0].isdecimal()), None)
    if wrong:
        raise InputError(f"{path}, line 1: {wrong[0]!r} is not a number of {wrong[1]}")
    known = [*GPU_TYPES, *(name.partition("_")[0].upper() for name in catalog.names("devices"))]
    if words[5].partition("_")[0].upper() not in known:
        raise InputError(
            f"{path}, line 1: the GPU type {words[5]!r} is not known",
            did_you_mean(words[5], known, f"known: {', '.join(GPU_TYPES)} and the catalog's devices"),
        )
    return list(map(int, words[:5])), words[5]


def _check_switch_ids(lines: list[str], path: Path, num_gpus: int, num_nodes: int) -> None:
    words = lines[1].split()
    expected = list(map(str, range(num_gpus, num_nodes)))
    if words == expected:
        return
    if len(words) != len(expected):
        raise InputError(f"{path}, line 2: it lists {len(words)} switches; line 1 announces {len(expected)}")
    odd = next(word for word, switch in zip(words, expected, strict=True) if word != switch)
    raise InputError(
        f"{path}, line 2: the switch {odd!r} is out of place; switches are {num_gpus} to {num_nodes - 1} in order"
    )


def _links(lines: list[str], path: Path) -> tuple[NDArray[np.int32], Floats, Floats, Floats]:
    ends = np.empty((len(lines), 2), np.int32)
    numbers = np.empty((3, len(lines)))
    read: dict[tuple[str, str, str], tuple[float, float, float]] = {}
    for i, line in enumerate(lines):
        words = line.split()
        if len(words) != 5:
            raise InputError(
                f"{path}, line {i + 3}: it has {format_count(len(words), 'field')}; 5 are needed",
                "source, destination, rate, latency, error rate",
            )
        a, b, *rest = words
        if not (a.isdecimal() and b.isdecimal()):
            raise InputError(f"{path}, line {i + 3}: {a if not a.isdecimal() else b!r} is not a node id")
        triple = (rest[0], rest[1], rest[2])
        if triple not in read:
            read[triple] = _link_numbers(*triple, f"{path}, line {i + 3}")
        ends[i] = min(int(a), 2**31 - 1), min(int(b), 2**31 - 1)
        numbers[:, i] = read[triple]
    return ends, numbers[0], numbers[1], numbers[2]


def _link_numbers(rate: str, latency: str, error_rate: str, where: str) -> tuple[float, float, float]:
    try:
        return parse_quantity("rate_bytes_per_s", rate), parse_quantity("latency_s", latency), float(error_rate)
    except InputError as error:
        raise InputError(f"{where}: {error.message}", error.hint) from None
    except ValueError:
        raise InputError(f"{where}: {error_rate!r} is not an error rate") from None


def _tiers(fabric: Fabric) -> NDArray[np.int8]:
    """Return 0 for GPUs and scale-up switches; for another switch its distance from the nearest GPU."""
    far = np.int8(100)
    tier = np.where(fabric.kind == NodeKind.SWITCH, far, 0).astype(np.int8)
    source, target = fabric.directions
    frontier, distance = fabric.kind == NodeKind.GPU, 0
    while frontier.any():
        distance += 1
        is_next = np.zeros(fabric.num_nodes, bool)
        is_next[target[frontier[source]]] = True
        frontier = is_next & (tier == far)
        tier[frontier] = distance
    return tier


def _servers(fabric: Fabric) -> NDArray[np.int32]:
    server = np.full(fabric.num_nodes, -1, np.int32)
    server[: fabric.num_gpus] = np.arange(fabric.num_gpus) // fabric.gpus_per_server
    source, target = fabric.directions
    up = (fabric.kind[source] == NodeKind.GPU) & (fabric.kind[target] == NodeKind.SCALE_UP_SWITCH)
    server[target[up]] = server[source[up]]
    return server
