"""Search spaces that no file names: the deployments of a model on some devices, and the changes to one deployment."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from msgspec.structs import replace

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.launch.read import servers
from windtunnel.formats.launch.scripts import changed_options
from windtunnel.hardware import Device
from windtunnel.metrics.limits import Limit
from windtunnel.model.exchange import ALL_GATHER, DEEPEP, MEGA_MOE
from windtunnel.model.precision import COMPUTE, Format, computed_as
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import encode
from windtunnel.search.evaluation.figures import taken_by
from windtunnel.search.space.space import CHANGE, SHORT_PATHS, Space, point_at, scenario_at, space_from, value_text
from windtunnel.serving.deployment import EngineSettings, Pool, TargetScaling
from windtunnel.serving.engines.contract import split_columns
from windtunnel.serving.scenario import Scenario, Setup, pool_scenario, resolve
from windtunnel.serving.setup.fleet_plan import comes_and_goes
from windtunnel.units import format_count

DEPLOYMENT = "deployment"
"""Name of the setting in `vary` whose values are whole deployments."""
TOKEN_BUDGETS = (None, 512, 1024, 2048, 4096, 8192, 16384)
"""Token budgets of a step to try; None is the engine's default."""
AS_IT_IS = "as it is"
"""Value of `CHANGE` that changes nothing."""
CAPACITY = "output_tokens_per_s_per_device"
"""Objective of changes that are ranked by capacity: lengths are the same, so tokens and requests rise together."""
MOST_FIXED = 8
"""Fixed numbers of replicas that are tried in place of an autoscaler."""
SPLITS = {"1 prefill + 1 decode": (1, 1), "1 prefill + 2 decode": (1, 2), "2 prefill + 1 decode": (2, 1)}
"""Name -> replicas of the prefill pool and of the decode pool."""


def deployments_space(
    shared: Mapping[str, Any],
    devices: Sequence[str],
    limits: Sequence[Limit],
    budget: Mapping[str, Any],
    prices: Mapping[str, float] = {},
    splits: bool = False,
) -> Space:
    """Return the space of every checkpoint of a model on every device, in every layout that a node holds. InputError
    where a device or the model is unknown, a device has no price, or nothing can be tried.

    Args:
        shared: a scenario as builtins; its model names any checkpoint of the shape, and its limits and formats do not
            count.
        prices: device -> USD an hour for one of them, where it is not the catalog's.
        splits: whether prefill and decode are tried in pools of their own, too.
    """
    foreign = next((name for name in prices if name not in devices), None)
    if foreign is not None:
        raise InputError(
            f"there is a price of {foreign}, which is not among the devices {', '.join(devices)}", "leave it out"
        )
    alternatives: dict[str, dict[str, Any]] = {}
    for device in _priced(devices, prices):
        for checkpoint, model in catalog.checkpoints(shared["model"], device.vendor).items():
            if _is_native(device, model):
                engine = shared["deployment"].get("engine", {}).get("name", EngineSettings().name)
                alternatives |= _on_device(device, checkpoint, model, splits, engine)
    if not alternatives:
        raise InputError(f"no checkpoint of {shared['model']} has a format of {', '.join(devices)}")
    raw = {
        **shared,
        "slo": None,
        "precision": {},
        "vary": {DEPLOYMENT: alternatives, "max_num_batched_tokens": list(TOKEN_BUDGETS)},
        "limits": {limit.name: limit.most_s for limit in limits},
        "budget": dict(budget),
        "strategy": "prune",
    }
    return space_from(raw, "windtunnel recommend")


def changes_space(
    scenario: Scenario, limits: Sequence[Limit], objective: str = "requests_per_usd", budget: Mapping[str, Any] = {}
) -> Space:
    """Return the space of single changes to a deployment: engine settings, formats, parallelism; of pools, each pool's.

    Each is named by the options of the server's command line that make it, where there are some. `budget` holds fields
    of `Budget`. Where replicas come and go, all changes serve the workload's own load, by the clock.
    """
    raw = {**encode(scenario), "limits": {limit.name: limit.most_s for limit in limits}}
    raw.pop("slo", None)
    deployment = scenario.deployment
    changes = _changes_of_pools(scenario) if deployment.pools else _changes(resolve(scenario))
    if comes_and_goes(deployment):
        raw["load"] = "given"
        changes |= {} if deployment.pools else _fleet_changes(deployment.groups[0])
        if deployment.faults is not None and deployment.faults.retry == "start_over":
            changes["Routers that resume a lost request (retry: resume)"] = {f"{DEPLOYMENT}.faults.retry": "resume"}
    raw |= {"vary": {CHANGE: changes}, "objective": objective, "budget": dict(budget)}
    space = space_from(raw, "windtunnel recommend")
    named: dict[str, dict[str, Any]] = {}
    for index, (name, settings) in enumerate(changes.items()):
        after = scenario_at(space, point_at(space, index).settings)
        named[_options_of(scenario, after) or name] = settings
    return replace(space, vary={CHANGE: named})


def ranked_changes(scenario: Scenario, limits: Sequence[Limit]) -> Space:
    """Return `changes_space`, ranked by what a dollar serves where replicas come and go at known prices, so that the
    number of devices differs, and otherwise by the capacity of each device."""
    is_priced = comes_and_goes(scenario.deployment) and taken_by(scenario).usd_per_hour
    return changes_space(scenario, limits, "requests_per_usd" if is_priced else CAPACITY)


def _options_of(before: Scenario, after: Scenario) -> str:
    """Return the changed options of command lines, those of a pool behind its name; empty where no option says it."""
    pools, others = before.deployment.groups, after.deployment.groups
    if [pool.replicas for pool in pools] != [pool.replicas for pool in others]:
        return ""
    texts: dict[str, str] = {}
    for pool, other in zip(pools, others, strict=True):
        one, two = pool_scenario(before, pool), pool_scenario(after, other)
        is_server = catalog.spelling("engines", one.deployment.engine.name) in servers()
        texts[pool.name] = changed_options(one, two) if is_server else ""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items() if text)


def _changes_of_pools(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return name -> settings of each change of a pool's replicas or settings, of formats, and of none."""
    found: dict[str, dict[str, Any]] = {AS_IT_IS: {}}
    for index, pool in enumerate(scenario.deployment.pools):
        place, alone = f"{DEPLOYMENT}.pools.{index}.", pool_scenario(scenario, pool)
        found |= _fleet_changes(pool, place)
        if pool.role == "encode":
            continue
        split = {f"{place}parallelism": encode(alone.deployment.parallelism)}
        for name, settings in _changes(resolve(alone)).items():
            paths = {SHORT_PATHS.get(path, path): value for path, value in settings.items()}
            own = {path.removeprefix(f"{DEPLOYMENT}."): value for path, value in paths.items() if DEPLOYMENT in path}
            if not own:
                found[name] = settings
                continue
            first = split if any(path.startswith("parallelism.") for path in own) else {}
            found[f"{pool.name}: {name}"] = first | {place + path: value for path, value in own.items()}
    return found | _without_pools(scenario)


def _fleet_changes(pool: Pool, place: str = f"{DEPLOYMENT}.") -> dict[str, dict[str, Any]]:
    """Return name -> settings, below `place`, of each change of a pool's number of replicas, or of its autoscaler."""
    scaling, of_pool = pool.autoscaling, f" of {pool.name}" if pool.name else ""
    if scaling is None:
        counts = filter(None, (pool.replicas - 1, pool.replicas + 1))
        return {
            f"{format_count(count, 'replica')}{of_pool} (now {pool.replicas})": {f"{place}replicas": count}
            for count in counts
        }
    found: dict[str, dict[str, Any]] = {}
    if isinstance(scaling, TargetScaling):
        least, most, whole = scaling.min_replicas, scaling.max_replicas, 1.0 if scaling.metric == "kv_use" else math.inf
        tried: dict[str, list[float]] = {
            "target": [each for share in (0.5, 0.75, 1.5, 2.0) if (each := share * scaling.target) <= whole],
            "min_replicas": [each for each in (least // 2, least - 1, least + 1, least + 2) if 0 < each <= most],
            "max_replicas": [each for each in (most - 1, most + 1, 2 * most) if each >= max(least, pool.replicas)],
            "scale_up_after_s": [share * scaling.scale_up_after_s for share in (0.25, 0.5, 2.0)],
            "scale_down_after_s": [share * scaling.scale_down_after_s for share in (0.25, 0.5, 2.0)],
        }
        for name, values in tried.items():
            now = getattr(scaling, name)
            for value in dict.fromkeys(each for each in values if each != now):
                began = {f"{place}replicas": value} if name == "min_replicas" and pool.replicas == least else {}
                found[f"{name} {value:g}{of_pool} (now {now:g})"] = {f"{place}autoscaling.{name}": value} | began
    for fixed in range(pool.fewest_replicas, pool.most_replicas + 1, -(-pool.most_replicas // MOST_FIXED)):
        name = f"No autoscaling{of_pool}: {format_count(fixed, 'replica')}"
        found[name] = {f"{place}autoscaling": None, f"{place}replicas": fixed}
    return found


def _without_pools(scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return the change to equal replicas on as many devices, as the one pool that decodes runs and with the token
    budget of the one that prefills; nothing where they are on other devices or do not divide them."""
    pools = scenario.deployment.pools
    if [pool.role for pool in sorted(pools, key=lambda pool: pool.role)] != ["decode", "prefill"]:
        return {}
    prefill, decode = sorted(pools, key=lambda pool: pool.role != "prefill")
    one, other = (pool_scenario(scenario, pool).deployment for pool in (prefill, decode))
    replicas, left = divmod(scenario.deployment.num_devices, other.parallelism.num_devices)
    if left or (one.device, one.engine.name) != (other.device, other.engine.name) or decode.autoscaling:
        return {}
    engine = replace(decode.engine, max_num_batched_tokens=one.engine.max_num_batched_tokens)
    both = replace(decode, name="all", role="both", replicas=replicas, engine=engine)
    text = f"No pools: {format_count(replicas, 'replica')} of {decode.name}, each serving whole requests"
    return {text: {f"{DEPLOYMENT}.pools": [encode(both)]}}


def _changes(setup: Setup) -> dict[str, dict[str, Any]]:
    """Return name -> settings of each change, and of none."""
    engine = setup.engine
    found: dict[str, dict[str, Any]] = {AS_IT_IS: {}}

    def add(name: str, values: Iterable[Any], present: Any) -> None:
        found.update({f"{name} {value_text(value)}": {name: value} for value in values if value != present})

    seqs, budget = engine.max_num_seqs, engine.max_num_batched_tokens
    add("max_num_seqs", [max(seqs // 2, 1), seqs * 2, seqs * 4] if seqs else [], seqs)
    add("max_num_batched_tokens", [2048, 4096, 8192, 16384] if budget else [], budget)
    add("gpu_memory_utilization", [0.95], engine.gpu_memory_utilization)
    add("enable_prefix_caching", [True], engine.enable_prefix_caching)
    add("deployment.engine.enable_chunked_prefill", [True], engine.enable_chunked_prefill)
    if engine.max_cudagraph_capture_size == 0:
        found["CUDA graphs"] = {"deployment.engine.max_cudagraph_capture_size": None}
    add("deployment.engine.cudagraph_padding", [True], engine.cudagraph_padding)
    add("deployment.engine.async_scheduling", [True], engine.async_scheduling)
    if (lora := engine.lora) and lora.max_loras:
        for slots in (lora.max_loras * 2, lora.max_loras * 4):
            held = {"deployment.engine.lora.max_cpu_loras": max(lora.max_cpu_loras or 0, slots)}
            found[f"{slots} LoRA slots"] = {"deployment.engine.lora.max_loras": slots} | held
    add("kv_cache", _kv_formats(setup.device, setup.model, setup.precision.kv_cache), None)
    own = {name: getattr(setup.precision, name) for name in ("kv_cache", "recurrent_state")}
    kept = {name: str(each) for name, each in own.items() if each not in (None, getattr(setup.model.precision, name))}
    for checkpoint, model in catalog.checkpoints(setup.model, setup.device.vendor).items():
        if _is_native(setup.device, model) and model.precision.weights != setup.precision.weights:
            found[f"model {checkpoint}"] = {"model": checkpoint, "precision": kept}
    return found | _splits(setup)


def _splits(setup: Setup) -> dict[str, dict[str, Any]]:
    """Return name -> settings of half and twice the tensor parallelism, and of experts divided otherwise.

    Where all devices hold different experts they go on to. DeepEP and Mega MoE need such.
    """
    split, model, name = setup.parallelism, setup.model, setup.engine.name
    widest = [attention.widest_tp for _, attention in model.attentions]
    ranks, found = split.tp * split.attention_dp, dict[str, dict[str, Any]]()
    for degree in (split.tp // 2, split.tp * 2):
        is_spread = split.ep > 1 and split.ep == ranks
        settings = {"tp": degree} | ({"ep": degree * split.attention_dp} if is_spread else {})
        if 1 <= degree <= setup.node.num_devices and not any(heads % degree for heads in widest):
            found[f"tp {degree}"] = settings
    whole, apart = {"tp": ranks, "attention_dp": 1}, {"tp": 1, "attention_dp": ranks, "ep": ranks}
    if split.attention_dp > 1 and not any(heads % ranks for heads in widest):
        found[f"tp {ranks} in place of attention data parallelism"] = whole
    if split.attention_dp == 1 and model.has_experts and ranks > 1 and not _caches_apart(model):
        found[f"attention data parallelism of {ranks}"] = apart
    if setup.engine.all2all_backend in DEEPEP:
        found["no DeepEP"] = {"deployment.engine.all2all_backend": ALL_GATHER}
    for degree in (ranks, 1) if model.has_experts else ():
        if degree != split.ep and (degree > 1 or setup.engine.all2all_backend not in (*DEEPEP, MEGA_MOE)):
            found[f"ep {degree}"] = {"ep": degree}
    return {title: settings for title, settings in found.items() if _starts(name, setup, settings)}


def _starts(engine: str, setup: Setup, settings: Mapping[str, Any]) -> bool:
    """Whether the degrees go together, and an engine starts with experts that are divided so."""
    with suppress(ValueError):
        after = replace(setup.parallelism, **{name: n for name, n in settings.items() if "." not in name})
        return split_columns(engine, setup.model, setup.precision.experts_format, after.experts_tp) is None
    return False


def _priced(devices: Sequence[str], prices: Mapping[str, float]) -> Iterator[Device]:
    """Yield devices with their prices: the given ones, else the catalog's; InputError for those that have neither."""
    known = [
        replace(device, price_usd_per_hour=prices.get(name, device.price_usd_per_hour))
        for name, device in zip(devices, map(catalog.device, devices), strict=True)
    ]
    if lacking := [each.name for each in known if each.price_usd_per_hour is None]:
        without = f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no list price"
        given = ",".join(f"{name}=10.50" for name in lacking)
        hint = f"give USD an hour for one device: --prices {given}, or a file for hardware that you own"
        raise InputError(f"{without}, and deployments are compared by money", hint)
    yield from known


def _is_native(device: Device, model: ModelSpec) -> bool:
    """Whether a device computes the checkpoint's weights at their own rate, or the format computes in bf16 anyway."""
    formats, rates = {model.precision.weights, model.precision.experts_format}, device.peak_flops_per_s
    return all(COMPUTE[each][0] in rates and computed_as(each, rates) is each for each in formats)


def _kv_formats(device: Device, model: ModelSpec, present: Format) -> list[str]:
    """Return the formats of a KV cache to try beside the present one: FP8, where a device computes in it.

    It halves the bytes of a token, and engines then choose other attention kernels; both are in the prediction.
    """
    has_use = not model.is_encoder and "fp8" in device.peak_flops_per_s and present != Format.FP8
    return [str(Format.FP8)] if has_use else []


def _on_device(
    device: Device, checkpoint: str, model: ModelSpec, splits: bool, engine: str
) -> dict[str, dict[str, Any]]:
    """Return name -> settings of every layout of a checkpoint on one node of a device with which an engine starts."""
    found: dict[str, dict[str, Any]] = {}
    others = _kv_formats(device, model, model.precision.kv_cache)
    formats: list[dict[str, str]] = [{}, *({"kv_cache": each} for each in others)]
    for layout, kv in product(layouts(model, catalog.default_node(device).num_devices), formats):
        split = layout["tp"] * layout.get("attention_dp", 1) // layout.get("ep", 1)
        if split_columns(engine, model, model.precision.experts_format, split) is not None:
            continue
        degrees = " ".join(f"{name.upper().replace('_', ' ')} {degree}" for name, degree in layout.items())
        title = ", ".join(
            [f"{device.name} {degrees}", formats_text(model), *(f"{each} KV cache" for each in kv.values())]
        )
        priced = {"deployment.price_usd_per_hour": device.price_usd_per_hour}
        settings = {"model": checkpoint, "device": device.name, **layout, **kv, **priced}
        found[title] = settings
        for name, (prefill, decode) in SPLITS.items() if splits else ():
            pools = [
                {"name": role, "role": role, "replicas": replicas, "price_usd_per_hour": device.price_usd_per_hour}
                for role, replicas in (("prefill", prefill), ("decode", decode))
            ]
            found[f"{title}, {name}"] = settings | {"deployment.pools": pools}
    return found


def formats_text(model: ModelSpec) -> str:
    """Return the format of a checkpoint's weights, and of its experts where it is another."""
    weights, experts = model.precision.weights, model.precision.experts
    return str(weights) if experts is None or not model.has_experts else f"{weights} with {experts} experts"


def layouts(model: ModelSpec, num_devices: int) -> Iterator[dict[str, int]]:
    """Yield the degrees of parallelism that fit a node: tensor parallelism, with expert parallelism, and attention data
    parallelism where all ranks would cache the same keys and values."""
    widest = [attention.widest_tp for _, attention in model.attentions]
    degree = 1
    while degree <= num_devices:
        if all(heads % degree == 0 for heads in widest):
            yield {"tp": degree}
            if model.has_experts and degree > 1:
                yield {"tp": degree, "ep": degree}
        if model.has_experts and degree > 1 and not _caches_apart(model):
            yield {"tp": 1, "attention_dp": degree, "ep": degree}
        degree *= 2


def _caches_apart(model: ModelSpec) -> bool:
    """Whether ranks of tensor parallelism cache keys and values of their own."""
    return all(attention.shared_kv_heads is not None for _, attention in model.attentions)
