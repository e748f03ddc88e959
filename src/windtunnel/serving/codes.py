"""The names of schedulers, routers, queue orders, roles and scaling metrics, and the codes that stand for them in the
compiled loops: a code is the position of its name. Schemas, kernels and oracles take both from here.
"""

from typing import Literal, get_args

EngineScheduler = Literal["vllm_v1", "trtllm", "sglang", "trtllm_max_utilization"]
SCHEDULERS: tuple[str, ...] = get_args(EngineScheduler)
"""Schedulers of engines, which the serving loop runs."""
VLLM_V1, TRTLLM, SGLANG, TRTLLM_MAX_UTILIZATION = range(4)

PER_REQUEST_SCHEDULERS = ("vllm_v0", "sarathi", "orca", "faster_transformer", "lightllm", "user")
"""Schedulers that may batch any subset of a replica's requests; their codes follow those of `SCHEDULERS`."""
VLLM_V0, SARATHI, ORCA, FASTER_TRANSFORMER, LIGHTLLM, USER = range(4, 10)

Router = Literal[
    "round_robin",
    "random",
    "power_of_two",
    "least_outstanding",
    "least_kv",
    "session_affinity",
    "prefix_affinity",
    "least_waiting",
    "adapter_affinity",
]
ROUTERS: tuple[str, ...] = get_args(Router)
ROUND_ROBIN, RANDOM, POWER_OF_TWO, LEAST_OUTSTANDING, LEAST_KV, SESSION_AFFINITY, PREFIX_AFFINITY = range(7)
LEAST_WAITING, ADAPTER_AFFINITY = 7, 8
HOLDING_ROUTERS = ("deferred", "user")
"""Routers that may hold requests back; their codes follow those of `ROUTERS`. A run with one needs a
`serving.state.fleet.ReplicaFleet`."""
DEFERRED, USERS_ROUTER = len(ROUTERS), len(ROUTERS) + 1
ASSIGNED = -1
"""The router of a run whose requests name their replicas."""

QUEUE_ORDERS = ("fcfs", "priority", "shortest", "deadline", "fair_share")
"""Orders of waiting requests."""
FCFS, PRIORITY, SHORTEST, DEADLINE, FAIR_SHARE = range(5)
LONGEST_PREFIX_MATCH = "lpm"
"""SGLang's order of waiting requests; a flag of its scheduler and not a queue order of the loop."""

Role = Literal["both", "prefill", "decode", "encode"]
BOTH, PREFILL, DECODE = range(3)
"""What a pool serves: whole requests, prefills, or requests that were prefilled elsewhere. A pool that encodes images
comes before the loop."""

ScalingMetric = Literal["outstanding", "waiting", "running", "kv_use"]
SCALING_METRICS: tuple[str, ...] = get_args(ScalingMetric)
OUTSTANDING, WAITING, RUNNING, KV_USE = range(4)

OFF, STARTING, UP, DRAINING, FAILED = range(5)
"""Phases of a replica that may come and go."""
