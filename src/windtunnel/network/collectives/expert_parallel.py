"""All-to-alls that bring tokens to experts and back, in closed form, as DeepEP's kernels do them.

Normal kernels send a token once to each server that needs it, over the sender's rail, and copy it there to each GPU
(DeepSeek-V3 technical report, section 3.2.2). Low-latency kernels send a copy for each chosen expert at once. Both are
described in https://github.com/deepseek-ai/DeepEP; a figure in GB/s counts what stays on a server or a GPU too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, check_known
from windtunnel.model.exchange import low_latency_copies
from windtunnel.network.collectives.call import CollectiveCall, CollectiveRun, Ranks
from windtunnel.network.collectives.closed_forms import chosen_gpus, closed_form, place_of
from windtunnel.network.fabric import Fabric
from windtunnel.network.settings import NetworkSettings
from windtunnel.pricing.exchange import LOW_LATENCY_S, NIC_SHARE, NVLINK_SHARE

KERNELS = ("deepep_normal", "deepep_low_latency", "deepep_low_latency_rdma")
"""The last one, of DeepEP's first release, sends by RDMA inside a server too."""
PHASES = {"dispatch": "fp8", "combine": "bf16"}
"""Phase -> usual type of what it sends."""
MOST_EXPERTS = 2**16
MOST_SCORES = 2**28
"""Largest number of scores that are drawn for the tokens of all ranks."""


@dataclass(frozen=True, slots=True)
class TokenTraffic:
    """Tokens of each rank and the experts that they choose."""

    num_tokens: int
    """Of one rank."""
    hidden: int = 7168
    num_experts: int = 256
    top_k: int = 8
    max_servers: int | None = None
    """Most servers whose experts one token may choose; None: all."""
    phase: str = "dispatch"
    dtype: str | None = None
    """`fp8` (with a float32 scale for each 128 values) or `bf16`; None: the phase's."""
    dedup_per_server: bool = False
    """Whether a token crosses to a server once, whatever number of GPUs needs it there."""
    kernel: str | None = None
    """A name in `KERNELS`; None: normal kernels that send as `dedup_per_server` says."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        dtype = self.dtype or PHASES[self.phase]
        return self.hidden + self.hidden // 128 * 4 if dtype == "fp8" else 2 * self.hidden


def run_expert_all_to_all(fabric: Fabric, traffic: TokenTraffic, ranks: int | list[int]) -> CollectiveRun:
    """Return the time of a dispatch or combine; the size is what DeepEP counts, so size by time is its GB/s. InputError
    where the traffic does not fit the ranks, or the servers have no network."""
    gpus = chosen_gpus(fabric, ranks)
    place = place_of(fabric, gpus)
    _check(traffic, place)
    is_normal = traffic.kernel in (None, "deepep_normal")
    counted, nic, nvlink = (_normal_rows if is_normal else _low_latency_rows)(traffic, place)
    if nic and not place.network_bytes_per_s:
        raise InputError(f"{fabric.name} has no network, which {traffic.kernel} needs", "add servers to the topology")
    nic_s = nic * traffic.row_bytes / (place.network_bytes_per_s * NIC_SHARE) if nic else 0.0
    nvlink_s = nvlink * traffic.row_bytes / (place.scale_up_bytes_per_s * NVLINK_SHARE) if nvlink else 0.0
    # Whatever its size, a normal kernel takes no less than NCCL's smallest exchange.
    seconds = max(nic_s, nvlink_s) + (closed_form("all_to_all", 1, place)[0] if is_normal else LOW_LATENCY_S)
    call = CollectiveCall(fabric, "all_to_all", int(counted * traffic.row_bytes), gpus, place, NetworkSettings())
    by = "network" if nic_s > nvlink_s else "scale-up links"
    name = traffic.kernel or ("by_server" if traffic.dedup_per_server else "by_gpu")
    return CollectiveRun(call, seconds, name, "simple", "analytic", f"closed form, bound by the {by}")


def _check(traffic: TokenTraffic, place: Ranks) -> None:
    if traffic.kernel is not None:
        check_known(traffic.kernel, KERNELS, f"there is no kernel {traffic.kernel!r}")
    check_known(traffic.phase, tuple(PHASES), f"there is no phase {traffic.phase!r}")
    check_known(traffic.dtype or "fp8", ("fp8", "bf16"), f"there is no token type {traffic.dtype!r}")
    if traffic.dedup_per_server and (traffic.kernel or "").startswith("deepep_low"):
        lone = "low-latency kernels send every copy by itself; --dedup-per-server does not go with them"
        raise InputError(lone, "give --kernel deepep_normal")
    if traffic.num_experts % place.num_ranks or not 0 < traffic.num_experts <= MOST_EXPERTS:
        uneven = f"{traffic.num_experts} experts do not spread evenly over {place.num_ranks} ranks"
        raise InputError(uneven, f"give a multiple of {place.num_ranks}, at most {MOST_EXPERTS}")
    servers = min(place.num_servers if traffic.max_servers is None else traffic.max_servers, place.num_servers)
    reachable = traffic.num_experts // place.num_servers * servers
    if min(traffic.num_tokens, traffic.hidden, traffic.top_k, servers) < 1 or traffic.top_k > reachable:
        tokens = f"{traffic.num_tokens} tokens of width {traffic.hidden}"
        raise InputError(f"{tokens} cannot choose {traffic.top_k} of {reachable} experts")


def _low_latency_rows(traffic: TokenTraffic, place: Ranks) -> tuple[float, float, float]:
    """Return the copies of tokens of a rank: in all, over the network, and over links inside the server."""
    copies, n = traffic.num_tokens * traffic.top_k, place.num_ranks
    if traffic.kernel == "deepep_low_latency_rdma":
        return copies, copies * (n - 1) / n, 0.0
    between, inside = low_latency_copies(copies, n, place.per_server)
    return copies, float(between), float(inside)


def _normal_rows(traffic: TokenTraffic, place: Ranks) -> tuple[float, float, float]:
    """Return the copies of tokens of a rank: counted in the mean, over the network and inside the server at most.

    What a GPU keeps passes through the same buffers as what it sends inside the server, and takes as long.
    """
    to_server, to_gpu = routed(traffic, place)
    servers, size = place.num_servers, place.per_server
    is_own = np.repeat(np.eye(servers, dtype=bool), size, axis=0)
    if not (traffic.dedup_per_server or traffic.kernel):
        inside = np.where(np.repeat(is_own, size, axis=1), to_gpu, 0)
        return float(to_gpu.sum(axis=1).mean()), _most(to_gpu - inside), _most(inside)
    counted = to_gpu if servers == 1 else to_server
    crossing = np.where(is_own, 0, to_server)
    arriving = crossing.reshape(servers, size, servers).sum(axis=0)
    forwarded = to_gpu.reshape(servers, size, servers, size).sum(axis=(0, 3))
    nvlink = max(forwarded.max(), to_gpu.sum(axis=0).max())
    return float(counted.sum(axis=1).mean()), float(max(crossing.sum(axis=1).max(), arriving.max())), float(nvlink)


def _most(rows: NDArray[np.int64]) -> float:
    """Return the most that a rank sends or receives, of (num_ranks, num_ranks) rows."""
    return float(max(rows.sum(axis=0).max(), rows.sum(axis=1).max()))


def routed(traffic: TokenTraffic, place: Ranks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw which experts tokens choose, as DeepEP's tests do: the best of random scores in the best servers.

    Of very many tokens, fewer are drawn and their counts scaled.

    Returns:
        (num_ranks, num_servers) and (num_ranks, num_ranks) tokens that each rank has for each server and each GPU.
    """
    rng, n, servers = np.random.default_rng(0), place.num_ranks, place.num_servers
    num_chosen = min(traffic.max_servers or servers, servers)
    to_server, to_gpu = np.zeros((n, servers), np.int64), np.zeros((n, n), np.int64)
    num_drawn = max(16, min(traffic.num_tokens, MOST_SCORES // (16 * n), MOST_SCORES // (n * traffic.num_experts)))
    num_drawn = min(num_drawn, traffic.num_tokens)
    for rank in range(n):
        scores = rng.random((num_drawn, servers, traffic.num_experts // servers))
        if num_chosen < servers:
            best = np.sort(scores, axis=2)[..., -2:].sum(axis=2)
            left_out = np.argpartition(best, servers - num_chosen, axis=1)[:, : servers - num_chosen]
            np.put_along_axis(scores, left_out[..., None], -1.0, axis=1)
        flat = scores.reshape(num_drawn, -1)
        chosen = np.argpartition(flat, -traffic.top_k, axis=1)[:, -traffic.top_k :]
        for per_part, counts in ((traffic.num_experts // servers, to_server), (traffic.num_experts // n, to_gpu)):
            needs = np.zeros((num_drawn, counts.shape[1]), bool)
            np.put_along_axis(needs, chosen // per_part, True, axis=1)
            counts[rank] = needs.sum(axis=0) * traffic.num_tokens // num_drawn
    return to_server, to_gpu
