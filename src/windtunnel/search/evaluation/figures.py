"""Resources of a deployment, and the figures of its run that a search compares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.metrics.fleet import lost_steps
from windtunnel.metrics.limits import Limit
from windtunnel.metrics.summary import SECONDS_PER_HOUR, itl_distribution
from windtunnel.model.launches.forward import attention_side
from windtunnel.schema import read_yaml
from windtunnel.search.capacity.load import is_closed
from windtunnel.search.capacity.probe import Served
from windtunnel.search.space.space import Budget
from windtunnel.serving.analysis.device_use import power_model
from windtunnel.serving.prepared import PreparedDeployment
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario
from windtunnel.serving.setup.fleet_plan import comes_and_goes
from windtunnel.units import format_count

FIGURES: Mapping[str, str] = read_yaml(Path(__file__).with_name("figures.yaml"))
"""Name -> meaning. Figures that need an unknown price or power are absent."""


@dataclass(frozen=True)
class Takes:
    """Resources of a deployment; None where unknown."""

    devices: float
    usd_per_hour: float | None
    busy_w: float | None
    """Power with all devices busy."""


@dataclass(frozen=True, eq=False)
class Deployed:
    """A point, resolved for deployment."""

    scenario: Scenario
    setup: Setup | None
    """What the scenario resolves to; None where the deployment has pools."""
    takes: Takes


def load_worth(objective: str, score: float, takes: Takes, mean_output: float) -> float | None:
    """Return the requests a second at which a deployment reaches a score; None where the load does not decide it.

    Args:
        objective: a name in `FIGURES`.
        score: its value, negated where smaller is better.
        mean_output: tokens of a request.
    """
    match objective:
        case "requests_per_s":
            return score
        case "output_tokens_per_s":
            return score / mean_output
        case "output_tokens_per_s_per_device":
            return score * takes.devices / mean_output
        case "requests_per_usd" if takes.usd_per_hour:
            return score * takes.usd_per_hour / SECONDS_PER_HOUR
        case "usd_per_million_output_tokens" if takes.usd_per_hour and score < 0:
            return takes.usd_per_hour / SECONDS_PER_HOUR / mean_output * 1e6 / -score
        case _:
            return None


def check_budget(takes: Takes, budget: Budget) -> None:
    """Raise InputError where a deployment takes more than `budget` allows."""
    if budget.devices is not None and takes.devices > budget.devices:
        raise InputError(f"{format_count(round(takes.devices), 'device')}; the budget is {budget.devices}")
    if budget.usd_per_hour is not None:
        if takes.usd_per_hour is None:
            raise InputError("its price is not known, and the budget is in dollars", "give price_usd_per_hour")
        if takes.usd_per_hour > budget.usd_per_hour:
            raise InputError(f"${takes.usd_per_hour:,.2f} an hour; the budget is ${budget.usd_per_hour:,.2f}")
    if budget.power_w is not None:
        if takes.busy_w is None:
            raise InputError("its power is not known, and the budget is in watts", "give deployment.power.busy_w")
        if takes.busy_w > budget.power_w:
            raise InputError(f"{takes.busy_w:,.0f} W; the budget is {budget.power_w:,.0f} W")


def taken_by(scenario: Scenario, replicas: Sequence[float] = ()) -> Takes:
    """Return the resources that the deployment of `scenario` takes: at most, or with its mean `replicas`, one number
    for each pool that serves tokens."""
    deployment = scenario.deployment
    held = dict(zip((pool.name for pool in deployment.groups), replicas, strict=False))
    parts = [(pool_scenario(scenario, pool).deployment, pool) for pool in deployment.pools or deployment.groups]
    prices = [pool.price_usd_per_hour for pool in deployment.pools] or [deployment.price_usd_per_hour]
    devices: float = 0
    usd_per_hour: float | None = 0.0
    power_w: float | None = 0.0
    for (part, pool), given_price in zip(parts, prices, strict=True):
        device = catalog.device(part.device)
        price = given_price if given_price is not None else device.price_usd_per_hour
        watts = device.tdp_w if deployment.power.busy_w is None else deployment.power.busy_w
        num_devices = held.get(pool.name, pool.most_replicas) * part.parallelism.num_devices
        devices += num_devices
        usd_per_hour = None if price is None or usd_per_hour is None else usd_per_hour + price * num_devices
        power_w = None if watts is None or power_w is None else power_w + watts * num_devices
    return Takes(devices, usd_per_hour, power_w)


def figures(
    deployed: Deployed, server: PreparedDeployment, served: Served, sustained: float | None, limits: Sequence[Limit]
) -> dict[str, float]:
    """Return the known figures of `FIGURES`, and those of the latencies that have limits.

    Args:
        sustained: the requests a second that the deployment keeps up with, of an open loop. Rates follow from it and
            not from the run's span, which ends with a tail that a service does not have.
        limits: may be of other statistics than `STATISTICS`.
    """
    held = taken_by(deployed.scenario, served.replicas)
    num_devices, usd_per_hour = held.devices, held.usd_per_hour
    span_s = float((served.arrival_s + served.e2e_s).max() - served.arrival_s.min())
    requests_per_s = served.arrival_s.size / span_s
    if sustained is not None:
        requests_per_s = sustained
    output_per_s = float(served.output_tokens.mean()) * requests_per_s
    values = {
        "devices": float(num_devices),
        "requests_per_s": requests_per_s,
        "makespan_s": span_s,
        "output_tokens_per_s": output_per_s,
        "output_tokens_per_s_per_device": output_per_s / num_devices,
        "num_preemptions": float(served.num_preemptions),
    }
    if not is_closed(deployed.scenario.workload):
        values["stream_over_e2e"] = served.stream_over_e2e
    tpot_s = served.values("tpot")
    if tpot_s.size:
        values["output_tokens_per_s_per_user"] = float((1.0 / tpot_s[tpot_s > 0]).mean())
    if usd_per_hour:
        values["usd_per_hour"] = usd_per_hour
        values["requests_per_usd"] = requests_per_s * SECONDS_PER_HOUR / usd_per_hour
        values["usd_per_million_output_tokens"] = usd_per_hour / SECONDS_PER_HOUR / output_per_s * 1e6
    values |= _use(deployed, server, served, span_s)
    if "mean_w" in values:
        values["output_token_j"] = values["mean_w"] / output_per_s
    for metric, percentiles in served.percentiles((50, 90, 99)).items():
        values[f"{metric}_mean"] = float(served.values(metric).mean())
        values |= {f"{metric}_{name}": value for name, value in percentiles.items()}
    itl = itl_distribution(served.steps)
    if itl is not None:
        values |= {f"itl_{name}": float(getattr(itl, name)) for name in ("mean", *STATISTICS)}
    known = [limit for limit in limits if f"{limit.metric}_mean" in values]
    return values | {limit.name: served.statistic(limit) for limit in known if limit.name not in values}


STATISTICS = ("p50", "p90", "p99")


def _use(deployed: Deployed, server: PreparedDeployment, served: Served, span_s: float) -> dict[str, float]:
    """Return the busy fraction, the peak of KV use and the mean power of the devices."""
    steps, deployment = served.steps, deployed.scenario.deployment
    is_whole = ~lost_steps(steps) if comes_and_goes(deployment) else True
    first, busy_s, slots, mean_w, peaks = 0, 0.0, 0.0, 0.0, [0.0]
    for pool, replicas in zip(server.pools, served.replicas, strict=True):
        end, split = first + pool.settings.num_replicas, pool.setup.parallelism
        mine = (steps["replica"] >= first) & (steps["replica"] < end) & is_whole
        part_busy_s = float(steps["duration_s"][mine].sum())
        part_slots = replicas * split.pp
        power = power_model(deployment, pool.setup, attention_side(pool.shard), steps.where(mine))
        if power is None:
            mean_w = np.nan
        else:
            mean_w += power.at(min(part_busy_s / span_s / part_slots, 1.0)) * replicas * split.num_devices
        if mine.any():
            num_blocks = pool.memory.num_blocks * pool.settings.ranks_per_replica
            peaks.append(float(steps["used_blocks"][mine].max()) / num_blocks)
        busy_s, slots, first = busy_s + part_busy_s, slots + part_slots, end
    values = {"busy_fraction": min(busy_s / span_s / slots, 1.0), "kv_peak_fraction": max(peaks)}
    return values if np.isnan(mean_w) else values | {"mean_w": float(mean_w)}
