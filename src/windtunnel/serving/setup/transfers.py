"""KV transfers between pools: the rules of the handoff, and the bandwidth of the links."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from windtunnel.compiled.arrays import Ints
from windtunnel.errors import InputError
from windtunnel.model.memory import kv_bytes_per_token, state_bytes_per_request
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import Shard
from windtunnel.network.cluster import handoff_bytes_per_s, network_of
from windtunnel.serving import codes
from windtunnel.serving.deployment import LINK_EFFICIENCY, TRANSFER_LATENCY_S, Transfer, TransferLink
from windtunnel.serving.engines.contract import behaviour_of
from windtunnel.serving.scenario import Scenario, Setup
from windtunnel.serving.state.pools import HandoffRules, PoolPlan


def handoff_rules_of(scenario: Scenario, setups: Sequence[Setup], shard: Shard) -> HandoffRules:
    """Return the handoff rules as the loop takes them; the KV of a request is what one copy of the model caches."""
    transfer, first = transfer_of(scenario, setups), setups[0]
    assert transfer.latency_s is not None
    model = replace(shard, parallelism=Parallelism())
    return HandoffRules(
        decode_router=codes.ROUTERS.index(transfer.router),
        local_tokens=transfer.local_prefill_tokens,
        decode_samples_first=int(transfer.first_token == "decode"),
        decode_streams_first=int(transfer.first_token == "prefill" and transfer.streamed_by == "decode"),
        bytes_per_token=kv_bytes_per_token(model, first.max_model_len),
        bytes_per_request=state_bytes_per_request(model, first.max_model_len),
        latency_s=transfer.latency_s,
        tail_fraction=1.0 / first.model.num_layers if transfer.overlap else 1.0,
    )


def transfer_of(scenario: Scenario, setups: Sequence[Setup]) -> Transfer:
    """Fill in the deployment's transfer: defaults of the engine that decodes, and of the calibration in force there."""
    pools = zip(scenario.deployment.groups, setups, strict=True)
    decodes = next((setup for pool, setup in pools if pool.role != "prefill"), setups[-1])
    samples_first = scenario.deployment.transfer.first_token == "decode"
    streams_first = samples_first or behaviour_of(decodes.engine.name).decode_streams_first
    default = Transfer(
        link_efficiency=LINK_EFFICIENCY,
        latency_s=TRANSFER_LATENCY_S,
        streamed_by="decode" if streams_first else "prefill",
    )
    learnt = None if decodes.calibration is None else decodes.calibration.transfer
    if learnt is not None:
        default = msgspec.structs.replace(default, link_efficiency=learnt.link_efficiency, latency_s=learnt.latency_s)
    return scenario.deployment.transfer.over(default)


def kv_copies(setup: Setup, shard: Shard) -> float:
    """Return the copies of a request's KV on one rank's devices.

    Latent attention keeps all of it on each device, grouped queries what their key and value heads cannot be spread
    over.
    """
    model, shape = replace(shard, parallelism=Parallelism()), setup.parallelism
    once = kv_bytes_per_token(model, setup.max_model_len)
    each = kv_bytes_per_token(shard, setup.max_model_len)
    return max(each * shape.tp * shape.pp / once, 1.0) if once else 1.0


def with_links(scenario: Scenario, setups: Sequence[Setup], plans: Sequence[PoolPlan]) -> list[PoolPlan]:
    """Give the plans the bandwidth that transfers reach: the scenario's, or a share of what links and network carry.
    InputError where there is no link, or the pools do not stand on one network."""
    transfer = transfer_of(scenario, setups)
    assert transfer.link_efficiency is not None
    if transfer.bytes_per_s is not None:
        return [plan._replace(link_bytes_per_s=transfer.bytes_per_s) for plan in plans]
    published = [_link_bytes_per_s(setup, transfer.link) for setup in setups]
    hands_off = any(plan.role == codes.PREFILL for plan in plans)
    for pool, bytes_per_s in zip(scenario.deployment.groups, published, strict=True):
        if bytes_per_s == 0.0 and hands_off:
            raise InputError(
                f"pool {pool.name}: its node has no link to others over which a KV cache could be sent",
                "give deployment.transfer.bytes_per_s, or take a node with scale_out",
            )
    slowest = _network_bytes_per_s(scenario, setups, plans) if hands_off else np.inf
    return [
        plan._replace(link_bytes_per_s=min(bytes_per_s, slowest) * transfer.link_efficiency)
        for plan, bytes_per_s in zip(plans, published, strict=True)
    ]


def embedding_link(scenario: Scenario, encoder: Setup, setups: Sequence[Setup]) -> tuple[float, float]:
    """Return bytes per second and latency of a transfer from an encoder to the pools of `setups`, the slowest of them.
    InputError where there is no link."""
    transfer = transfer_of(scenario, setups)
    assert transfer.latency_s is not None
    assert transfer.link_efficiency is not None
    if transfer.bytes_per_s is not None:
        return transfer.bytes_per_s, transfer.latency_s
    slowest = min(_link_bytes_per_s(setup, transfer.link) for setup in (encoder, *setups))
    if slowest == 0.0:
        raise InputError(
            "a node has no link to others over which embeddings of images could be sent",
            "give deployment.transfer.bytes_per_s, or take a node with scale_out",
        )
    return slowest * transfer.link_efficiency, transfer.latency_s


def _link_bytes_per_s(setup: Setup, over: TransferLink) -> float:
    """Return the published bandwidth of the links of one rank's devices, out of its node or inside it."""
    link = setup.node.scale_out if over == "scale_out" else setup.node.scale_up
    return 0.0 if link is None else link.bytes_per_s * setup.parallelism.tp * setup.parallelism.pp


def _network_bytes_per_s(scenario: Scenario, setups: Sequence[Setup], plans: Sequence[PoolPlan]) -> float:
    """Return what the deployment's network carries from rank to rank, between the farthest ones; infinity without one.

    Pools lie on the network one after the other, their replicas too.
    """
    settings = scenario.deployment.network
    if settings is None:
        return np.inf
    if len({setup.node.name for setup in setups}) > 1:
        raise InputError(
            "the pools stand in different nodes, and a network is made of one kind",
            "leave deployment.network out, or give the pools one device",
        )
    network = network_of(settings, setups[0].node, scenario.deployment.num_devices)
    first, sides = 0, dict[bool, list[Ints]]({True: [], False: []})
    for setup, plan in zip(setups, plans, strict=True):
        width = setup.parallelism.tp * setup.parallelism.pp
        ranks = first + np.arange(plan.settings.num_replicas * plan.settings.ranks_per_replica * width)
        sides[plan.role == codes.PREFILL].append(ranks.reshape(-1, width))
        first += ranks.size
    return min(
        handoff_bytes_per_s(network, senders, receivers) for senders in sides[True] for receivers in sides[False]
    )
