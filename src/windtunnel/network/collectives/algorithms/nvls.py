"""NVLink SHARP (NVLS) as flows: the NVSwitch reduces and multicasts."""

import numpy as np

from windtunnel.errors import InputError
from windtunnel.network.collectives.call import CollectiveCall, Ranks, bus_factor
from windtunnel.network.collectives.closed_forms import ClosedForm, Latency, device_of
from windtunnel.network.fabric import NodeKind
from windtunnel.network.flows import Flows, Hop, Ids, flows_of, in_channels, parents_from
from windtunnel.units import US

OPERATIONS = ("all_reduce",)
NCCL_CODE = 4
AT_LINK_RATE = True
MOST_HEADS = 32
"""Ranks among which a channel divides a buffer (NCCL src/include/device.h, NCCL_MAX_NVLS_ARITY)."""
_CHUNKS = ((64, 131072), (8, 65536), (2, 32768))
"""(Rounds, bytes): the chunk of a channel and head where the buffer fills that many rounds of such chunks, else 16 KiB
(NCCL src/enqueue.cc, `NCCL_ALGO_NVLS`)."""
_STAGES = 4
"""Scatter, reduce, broadcast and gather, each by its own warps, work on rounds that follow each other (NCCL
src/device/all_reduce.h, `NCCL_ALGO_NVLS`): the last round leaves three rounds after it came."""
NVLS_CHUNKS = {"hopper": 2}
"""Architecture -> chunks whose sums go down while the next go up, else one: of the time in which all go up and then
down, H100 and H200 take 0.82 and B200 and GB200 0.94 to 1.06 between 4 and 16 GiB (nccl-tests)."""


def fill_bytes(ranks: Ranks, size_bytes: float) -> float:
    """Return the bytes of the rounds that the stages are apart: a round is a chunk of every channel and head."""
    at_once = ranks.nvls_channels * min(ranks.per_server, MOST_HEADS)
    chunk = next((chunk for rounds, chunk in _CHUNKS if size_bytes >= rounds * at_once * chunk), 16384)
    return (_STAGES - 1) * min(at_once * chunk, size_bytes)


def nvls_bytes_per_s(ranks: Ranks) -> float:
    """Return the rate of a rank inside its server, whose switches add."""
    return ranks.scale_up_bytes_per_s * ranks.nvls_share


def _later_fill_bytes(_protocol: str, ranks: Ranks, size_bytes: float, _rate_over_inside: float) -> float:
    """Return the bytes of the time that the stages take longer to fill than `_LATENCY` has."""
    known_bytes = _LATENCY.scale_up * US * nvls_bytes_per_s(ranks) / bus_factor("all_reduce", ranks.num_ranks)
    return max(fill_bytes(ranks, size_bytes) - known_bytes, 0.0)


_LATENCY = Latency(8.4, 16.6, 18.0)
"""Together the 25 us of NCCL's model, which knows no fill of the stages: of them 8.4 us are any kernel's of the
protocol simple, and the others, or the fill where that is longer, pass until the first bytes are there."""
CLOSED_FORM = ClosedForm(
    latencies={"simple": _LATENCY},
    applies=lambda op, ranks: op == "all_reduce" and ranks.num_servers == 1 and ranks.nvls and ranks.num_ranks > 4,
    steps_us=lambda _op, _ranks, near, _far: near,
    scale_up_bytes_per_s=nvls_bytes_per_s,
    fill_bytes=_later_fill_bytes,
)


def flows(call: CollectiveCall) -> Flows:
    """Return the flows of an all-reduce by all switches of the ranks' server; each adds its part of the buffer."""
    fabric, gpu = call.fabric, int(call.gpus[0])
    if call.ranks.num_servers > 1 or not call.ranks.nvls:
        raise InputError("nvls needs one server whose switches add", "use ring or tree")
    source, target = fabric.directions
    switches = np.unique(target[(source == gpu) & (fabric.kind[target] == NodeKind.SCALE_UP_SWITCH)])
    if len(switches) == 0:
        raise InputError(f"GPU {gpu} of {fabric.name} has no scale-up switch, which nvls needs", "use ring")
    if call.settings.compat == "simai":
        return nvls(call.gpus, int(switches[0]), call.size_bytes)  # sums go down while the next go up
    device = device_of(fabric)
    num_chunks = NVLS_CHUNKS.get(device.architecture, 1) if device else 1
    fill_s = fill_bytes(call.ranks, call.size_bytes) / call.ranks.scale_up_bytes_per_s
    fill_s = max(fill_s, _LATENCY.scale_up * US / 2)
    part_bytes = max(call.size_bytes // len(switches), 1)
    parts = switches[: call.size_bytes].tolist()
    return in_channels([nvls(call.gpus, each, part_bytes, min(num_chunks, part_bytes), fill_s) for each in parts])


def nvls(ranks: Ids, switch: int, size_bytes: int, num_chunks: int = 4, fill_s: float = 0.0) -> Flows:
    """Lay out an all-reduce in the NVSwitch: every GPU sends its chunk up, the switch sends the sum to all.

    A chunk follows the one before on the same pair; the first one waits `fill_s` before it goes up, and before its sum
    goes down.
    """
    n = len(ranks)
    each = size_bytes // num_chunks
    if each < 1:
        raise InputError(f"{size_bytes} bytes do not fill {num_chunks} chunks")
    gpus = np.asarray(ranks, np.int64)
    up = np.full(n, switch, np.int64)
    # The sum waits for all chunks, and each flow for the chunk before it on its pair.
    first = 2 * n * np.arange(num_chunks)[:, None, None]
    chunks = np.where(np.arange(2 * n)[:, None] >= n, np.arange(n), -1)
    before = np.where(first > 0, first - 2 * n + np.arange(2 * n)[:, None], -1)
    table = np.concatenate([np.where(chunks >= 0, first + chunks, -1), before], axis=2)
    return flows_of(
        np.tile(np.concatenate([gpus, up]), num_chunks),
        np.tile(np.concatenate([up, gpus]), num_chunks),
        each,
        parents=parents_from(table.reshape(-1, n + 1)),
        step=np.repeat(np.arange(num_chunks), 2 * n),
        hop=Hop.NVLS,
        delay_s=np.where(np.arange(2 * n * num_chunks) < 2 * n, fill_s, 0.0),
    )
