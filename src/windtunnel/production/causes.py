"""Causes of a slow server, as changes of its simulation: what a server with that fault would have done.

A cause has one severity, which grows with the harm. `CAUSES` says what a severity changes and which are tried.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from windtunnel.hardware import Device
from windtunnel.pricing.calibrated import ARITHMETIC, CalibratedEstimator
from windtunnel.pricing.estimator import Estimator
from windtunnel.schema import read_yaml
from windtunnel.serving.scenario import Setup

TEXTS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))
"""Cause -> its title, its evidence, and what to change, for each engine or for all."""

DEVICE = (
    *("gemm.memory", "gemm.compute", "experts.memory", "experts.compute"),
    *("prefill_attention", "decode_attention", "collective", "other"),
)
"""Factors that together cover every operator (`pricing.calibrated`)."""


OF_CLIENT = ("load_generator", "client_backlog")
"""Causes on the client's side: beside one, latencies tell nothing of the server."""
CLIENT_BUSY = (0.3, 0.5, 0.7, 0.8, 0.87, 0.93, 0.97, 1.0, 1.05)
"""Shares of a run's time in which a slow client is busy with what it receives; above 1 it would have lasted longer."""
LEAST_LOST = 0.05
"""Share of the expected hits of the prefix cache that may be missing, a choice: overlap decides some of them."""


@dataclass(frozen=True)
class Change:
    """What a fault does to a simulation."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine."""
    host_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds on top of those of `HostOverheads`, by its names."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors of operators' times, by the names of `pricing.calibrated`."""
    transfer_share: float = 1.0
    """Share of the links between pools that is left."""
    pause_s: float = 0.0
    """Time from the first arrival in which nothing is served."""
    slow_replica: float = 1.0
    """Factor of everything on the devices of one of several replicas."""
    missing_replicas: int = 0
    """Replicas that do not serve."""
    version: str = ""
    """Version of the engine, with its defaults; empty: the described one."""
    client_part_s: float = 0.0
    """Time that the client takes for each part of an answer, for one after the other."""
    finds_as_recorded: bool = False
    """Whether prompts find in the prefix cache what the server says that they found, and no more."""

    def joined(self, other: "Change") -> "Change":
        host_s, factors = dict(self.host_s), dict(self.factors)
        for name, extra_s in other.host_s.items():
            host_s[name] = host_s.get(name, 0.0) + extra_s
        for name, factor in other.factors.items():
            factors[name] = factors.get(name, 1.0) * factor
        return Change(
            {**self.engine, **other.engine},
            host_s,
            factors,
            self.transfer_share * other.transfer_share,
            self.pause_s + other.pause_s,
            self.slow_replica * other.slow_replica,
            self.missing_replicas + other.missing_replicas,
            other.version or self.version,
            self.client_part_s + other.client_part_s,
            self.finds_as_recorded or other.finds_as_recorded,
        )

    def applied(self, setup: Setup) -> Setup:
        """Return a replica's setup with the changes of its engine and host."""
        host = {name: (getattr(setup.engine.host, name) or 0.0) + extra_s for name, extra_s in self.host_s.items()}
        changed = {**self.engine, "host": msgspec.structs.replace(setup.engine.host, **host)}
        return replace(setup, engine=msgspec.structs.replace(setup.engine, **changed))

    def estimator(self, estimator: Estimator, device: Device) -> Estimator:
        return CalibratedEstimator(estimator, device, self.factors) if self.factors else estimator


@dataclass(frozen=True)
class Served:
    """What is known of a healthy server before its faults are looked for."""

    setup: Setup
    num_blocks: int
    """KV blocks of a rank."""
    most_running: int
    longest_tokens: int
    """Of a request's prompt and output."""
    shares_prefixes: bool
    hands_over: bool
    """Whether KV goes from pool to pool."""
    num_replicas: int = 1
    """Equal ones that serve all the time; 1 where they come and go, or serve in pools."""
    other_versions: tuple[str, ...] = ()
    """Versions of the engine that it may have in truth."""
    hits_lost: float | None = None
    """Share of the prompt tokens that should be in the prefix cache that the server did not find there; None where it
    does not say."""
    launch_slowness: float = 1.0
    """How many times as long as known hosts its host takes to launch a kernel, as far as the run shows it."""
    tokens_per_s: float = 0.0
    """Output tokens that the client received, from the first arrival to the last answer."""
    first_token_s: float = np.inf
    """From the first arrival to the first token of any request: nothing was served for longer."""


@dataclass(frozen=True)
class Cause:
    """A kind of fault."""

    change: Callable[[float, Served], Change]
    """Severity -> what it changes."""
    severities: Callable[[Served], Sequence[float]]
    """Those that are tried, from the mildest; empty where the server cannot have the fault."""
    is_continuous: bool = True
    """Whether severities between those that are tried make sense."""
    is_first: bool = False
    """Whether it counts only where no other cause explains more: on top of others it explains what is left of any."""


def _factors(
    names: Sequence[str], values: Sequence[float], applies: Callable[[Served], bool] = lambda _: True
) -> Cause:
    def change(severity: float, _served: Served) -> Change:
        return Change(factors=dict.fromkeys(names, severity))

    return Cause(change, lambda served: values if applies(served) else ())


def _host(name: str, values: Sequence[float]) -> Cause:
    return Cause(lambda severity, _served: Change(host_s={name: severity}), lambda _served: values)


def _engine(name: str, values: Callable[[Served], Sequence[float]], is_continuous: bool = False) -> Cause:
    return Cause(lambda severity, _served: Change(engine={name: int(severity)}), values, is_continuous)


def _powers(low: float, high: float, descending: bool = True) -> list[float]:
    """Return the powers of two from `low` to below `high`, from the mildest."""
    values = [float(2**power) for power in range(20) if low <= 2**power < high]
    return values[::-1] if descending else values


def _graph_ends(served: Served) -> list[float]:
    """Return largest sizes of a graph from those that ran down to four: graphs of fewer requests are no graphs."""
    largest = served.setup.engine.max_cudagraph_capture_size or 0
    return _powers(4, min(largest, served.most_running))


def _smaller_caches(served: Served) -> list[float]:
    """Return numbers of blocks from those that the busiest moment needs down to those of one request."""
    least = -(-served.longest_tokens // (served.setup.engine.block_size or 1)) + 2
    need = min(served.num_blocks, least * max(served.most_running, 1))
    return [float(value) for value in np.geomspace(need, least, 9).astype(int)] if need > least else []


def _smaller_budgets(served: Served) -> list[float]:
    budget = served.setup.engine.max_num_batched_tokens or 0
    least = max(32, min(served.setup.engine.max_num_seqs or 0, served.most_running))
    return _powers(least, budget)


def _larger_budgets(served: Served) -> list[float]:
    budget = served.setup.engine.max_num_batched_tokens or 0
    return _powers(budget + 1, max(8 * budget, 65_536), descending=False)[:4]


def _eager(severity: float, served: Served) -> Change:
    """Launch every kernel by itself, on a host that takes `severity` times as long for it as known ones."""
    return Change({"max_cudagraph_capture_size": 0, "piecewise_cudagraphs": False}, _slower_launches(severity, served))


def _graphs_end(severity: float, served: Served) -> Change:
    """Launch steps of more than `severity` requests kernel by kernel, on a host as slow at it as the run shows."""
    return Change({"max_cudagraph_capture_size": int(severity)}, _slower_launches(served.launch_slowness, served))


def _slower_launches(slowness: float, served: Served) -> dict[str, float]:
    return {"launch_s": (slowness - 1) * (served.setup.engine.host.launch_s or 0.0)}


def _cache_severities(served: Served) -> list[float]:
    if served.hits_lost is not None:
        return [served.hits_lost] if served.hits_lost > LEAST_LOST else []
    return [1.0] if served.shares_prefixes and served.setup.engine.enable_prefix_caching else []


def _cache_cold(_severity: float, served: Served) -> Change:
    """Let prompts find what the server says, or nothing where it does not say."""
    return Change({"enable_prefix_caching": False}) if served.hits_lost is None else Change(finds_as_recorded=True)


CAUSES: Mapping[str, Cause] = {
    "eager": Cause(
        _eager, lambda served: (1.0, 1.5, 2.25, 3.4, 5.0) if served.setup.engine.max_cudagraph_capture_size else ()
    ),
    "graphs_end": Cause(_graphs_end, _graph_ends, is_continuous=False),
    "host_stall": _host("unhidden_step_s", [float(value) for value in np.geomspace(0.5e-3, 64e-3, 8)]),
    "kv_preemption": _engine("num_gpu_blocks", _smaller_caches, is_continuous=True),
    "prefix_cache_cold": Cause(_cache_cold, _cache_severities, is_continuous=False),
    "all_reduce": _factors(["collective"], [1.5, 2.25, 3.4, 5, 7.6], lambda served: served.setup.parallelism.tp > 1),
    "experts": _factors(
        ["experts.memory", "experts.compute"], [1.2, 1.5, 2, 3, 4.5], lambda served: served.setup.model.has_experts
    ),
    "clock": _factors(ARITHMETIC, [1.2, 1.45, 1.75, 2.1, 2.5, 3.6]),
    "slow_rank": _factors(DEVICE, [1.1, 1.25, 1.55, 1.95, 2.5, 3.5]),
    "batch_limit": _engine("max_num_seqs", lambda served: _powers(1, served.most_running)),
    "token_limit": _engine("max_num_batched_tokens", _smaller_budgets),
    "prefill_blocks": _engine("max_num_batched_tokens", _larger_budgets),
    "slow_replica": Cause(
        lambda severity, _served: Change(slow_replica=severity),
        lambda served: (1.25, 1.55, 1.95, 2.5, 3.5) if served.num_replicas > 1 else (),
    ),
    "missing_replicas": Cause(
        lambda severity, _served: Change(missing_replicas=int(severity)),
        lambda served: [float(count) for count in range(1, served.num_replicas)][:4],
        is_continuous=False,
    ),
    "version": Cause(
        lambda severity, served: Change(version=served.other_versions[int(severity) - 1]),
        lambda served: [float(number + 1) for number in range(len(served.other_versions))],
        is_continuous=False,
    ),
    "kv_transfer": Cause(
        lambda severity, _served: Change(transfer_share=severity),
        lambda served: (0.5, 0.25, 0.12, 0.06, 0.03) if served.hands_over else (),
    ),
    "tokenizer": _host("prompt_token_s", [float(value) for value in np.geomspace(5e-6, 1e-3, 8)]),
    "load_generator": _host("stream_s", [float(value) for value in np.geomspace(0.2e-3, 50e-3, 8)]),
    "client_backlog": Cause(
        lambda severity, _served: Change(client_part_s=severity),
        lambda served: [share / served.tokens_per_s for share in CLIENT_BUSY] if served.tokens_per_s else (),
        is_first=True,
    ),
    "compilation": Cause(
        lambda severity, _served: Change(pause_s=severity),
        lambda served: [value for value in np.geomspace(0.5, 64, 8).tolist() if value < 2 * served.first_token_s],
    ),
}
"""Name, as in `causes.yaml` -> the cause."""
