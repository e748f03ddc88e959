"""LoRA adapters of a pool: what they cannot go together with, what they add to a step, how long they load."""

from collections.abc import Sequence

import numpy as np

from windtunnel.errors import InputError
from windtunnel.hardware import host_bytes_per_s
from windtunnel.metrics.summary import AdapterSummary
from windtunnel.model.launches.lora import lora_bytes, lora_launches
from windtunnel.model.shape import Shard
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.deployment import Deployment, Pool
from windtunnel.serving.engines.contract import LoraBehaviour, behaviour_of
from windtunnel.serving.scenario import Setup
from windtunnel.serving.setup.fleet_plan import comes_and_goes
from windtunnel.serving.setup.memory import adapter_slots
from windtunnel.serving.setup.per_request import schedules_per_request
from windtunnel.serving.setup.step_prices import geometric_nodes, price_launch
from windtunnel.serving.state.adapters import AdapterLimits, AdapterPlan, Adapters
from windtunnel.serving.state.records import KernelSettings
from windtunnel.workload.generate.requests import RequestArrays


def refuse_with_adapters(deployment: Deployment, pool: Pool, setup: Setup, requests: RequestArrays) -> None:
    """Raise InputError where requests with adapters run in a pool whose slots are not modelled, or that fails."""
    if requests.adapter is None:
        if "adapter_affinity" in (deployment.router, deployment.transfer.router):
            raise InputError(
                "the router adapter_affinity sends requests where their LoRA adapters are, and no request has one",
                "set workload.adapters and engine.lora, or another router, such as least_outstanding",
            )
        return
    refused = [
        (setup.parallelism.pp > 1, "parallelism.pp: batches of several stages would share the slots"),
        (comes_and_goes(deployment), "autoscaling or faults: what a new replica has in its slots is not modelled"),
        (schedules_per_request(setup), f"the scheduler {setup.engine.scheduler}: it admits requests by blocks alone"),
    ]
    for is_given, reason in refused:
        if is_given:
            raise InputError(
                f"LoRA adapters do not go with {reason}", "leave that out, or workload.adapters and engine.lora"
            )
    roles, num_adapters = {each.role for each in deployment.groups}, int(requests.adapter.max()) + 1
    decodes = pool.role == "decode" or (pool.role == "both" and "prefill" in roles and "decode" not in roles)
    if decodes and _behaviour(setup).decodes_any and num_adapters > _most_together(setup, requests):
        raise InputError(
            f"requests use {num_adapters} LoRA adapters, and {setup.engine.name} decodes what was prefilled elsewhere "
            f"whatever its adapter: it fails with more than max_loras = {adapter_slots(setup.engine)} in a batch",
            "raise engine.lora.max_loras of the pools that decode, or leave deployment.pools out",
        )


def _behaviour(setup: Setup) -> LoraBehaviour:
    behaviour = behaviour_of(setup.engine.name).lora
    assert behaviour is not None
    return behaviour


def _most_together(setup: Setup, requests: RequestArrays) -> int:
    """Return how many adapters may run together, beside the base model where requests use it."""
    assert requests.adapter is not None
    return adapter_slots(setup.engine) - (_behaviour(setup).counts_base and bool((requests.adapter < 0).any()))


def adapter_plan(
    estimator: Estimator, shard: Shard, setup: Setup, settings: KernelSettings, requests: RequestArrays
) -> AdapterPlan | None:
    """Price the adapters' products in every step, and their loading; None: no request has an adapter. InputError where
    the model has none of the projections that adapters change."""
    if requests.adapter is None:
        return None
    lora, max_loras = setup.engine.lora, _most_together(setup, requests)
    assert lora is not None
    assert lora.max_cpu_loras is not None
    if max_loras < 1:
        raise InputError(
            "engine.lora.max_loras is 1, which requests to the base model take: no adapter could run",
            "raise engine.lora.max_loras",
        )
    widest = max(settings.max_num_batched_tokens, settings.max_prefill_tokens)
    drafted = 0 if setup.engine.speculative is None else setup.engine.speculative.num_draft_tokens
    nodes = geometric_nodes(widest + settings.max_num_seqs * (1 + drafted))
    most = min(max_loras, int(requests.adapter.max(initial=0)) + 1)
    priced = np.zeros((max_loras + 1, nodes.size))
    adapters, tokens = np.meshgrid(np.arange(1.0, most + 1), nodes, indexing="ij")
    gap_s = float(setup.engine.host.kernel_gap_s or 0.0)
    for launch in lora_launches(shard, tokens.ravel(), adapters.ravel()):
        each_s = np.asarray(price_launch(estimator, launch).estimate.seconds, np.float64)
        each_s = each_s + gap_s * launch.op.num_kernels
        priced[1 : most + 1] += launch.count * np.broadcast_to(each_s, tokens.size).reshape(tokens.shape)
    bytes_per_s = lora.host_bytes_per_s or host_bytes_per_s(setup.node)
    on_devices = lora_bytes(shard)
    host_load_s, disk_load_s = on_devices / bytes_per_s, on_devices * shard.tp / lora.disk_bytes_per_s
    limits = AdapterLimits(max_loras, lora.max_cpu_loras, host_load_s, disk_load_s)
    return AdapterPlan(limits, nodes, priced)


def adapter_summary(adapters: Adapters, ranks_per_replica: Sequence[int], busy_s: float) -> AdapterSummary:
    """Summarise how a run used its adapters; `busy_s` is the time of all steps of all replicas of all pools, which have
    `ranks_per_replica`."""
    ranks, counts = adapters.ranks, adapters.num_steps.sum(axis=0)
    used = np.unique(adapters.of_request[adapters.of_request >= 0])
    numbers = np.arange(counts.size)
    lookups, loads = int(ranks["num_lookups"].sum()), int(ranks["num_loads"].sum())
    times_s = [adapter_times_s(adapters, pool, num_ranks) for pool, num_ranks in enumerate(ranks_per_replica)]
    products_s, loads_s = np.sum(times_s, axis=0).tolist()
    return AdapterSummary(
        num_adapters=int(used.size),
        mean_in_step=float((counts * numbers).sum() / max(counts.sum(), 1)),
        most_in_step=int(numbers[counts > 0].max(initial=0)),
        slot_hit_fraction=1.0 - loads / lookups if lookups else 1.0,
        num_loads=loads,
        num_disk_loads=int(ranks["num_disk_loads"].sum()),
        load_fraction=loads_s / busy_s,
        product_fraction=products_s / busy_s,
    )


def adapter_times_s(adapters: Adapters, pool: int, num_ranks: int) -> tuple[float, float]:
    """Return the time that adapters added to the steps of a pool's replicas of `num_ranks` ranks each: products, and
    loads, seconds."""
    ranks = adapters.ranks[adapters.ranks["pool"] == pool]
    return float(ranks["total_step_s"].sum() / num_ranks), float(ranks["total_load_s"].sum())
