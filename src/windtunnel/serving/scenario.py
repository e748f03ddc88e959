"""Schema of a scenario, everything that decides a run's result; and the setup that it resolves to."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from windtunnel import catalog
from windtunnel.arguments import checked
from windtunnel.errors import InputError
from windtunnel.hardware import Device, Node, check_node, check_reach
from windtunnel.metrics.limits import Slo, check_limited
from windtunnel.model.exchange import DEEPEP, DEEPEP_NORMAL, MEGA_MOE
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import COMPUTE, Format, Precision, computed_as
from windtunnel.model.sampling import GREEDY, Sampling
from windtunnel.model.shape import ModelSpec
from windtunnel.network.settings import ClusterNetwork
from windtunnel.schema import Schema, check_seed, decode, differences, encode, fields_of, read_table, set_path
from windtunnel.schema import with_defaults as encoded_with_defaults
from windtunnel.serving.calibration import NONE, Calibration, Choice, calibration_for, load_calibration
from windtunnel.serving.deployment import Deployment, EngineSettings, Pool, Profile
from windtunnel.serving.engines import defaults
from windtunnel.serving.engines.workloads import for_pooling, with_lora
from windtunnel.units import format_count
from windtunnel.workload.client import Client, client_of, name_of
from windtunnel.workload.media import media_patches, vision_of
from windtunnel.workload.schema import Workload
from windtunnel.workload.traces.layouts import may_have_media


class Scenario(Schema):
    """One run, as a user writes it. Names refer to the catalog or to files."""

    model: str | ModelSpec
    """A catalog name, the path of a config.json, or a model written out: a `ModelSpec` or the keys of a config.json."""
    deployment: Deployment
    workload: Workload
    precision: Precision | None = None
    """None takes the formats of the published checkpoint."""
    slo: Slo | None = None
    seed: int = 0

    def check(self) -> None:
        check_seed(self.seed)
        check_limited(self.workload.task, self.slo.limits if self.slo else ())
        if isinstance(self.model, Mapping):
            msgspec.structs.force_setattr(self, "model", catalog.model(self.model))
        self._fill_in_media()

    def _fill_in_media(self) -> None:
        """Fill in the tokens of drawn images, or the model that sees those of a trace."""
        workload, filled = self.workload, dict[str, Any](media_tokens=None, vision=None)
        if not workload.draws_media and not any(map(may_have_media, workload.traces)):
            if workload.vision is None:
                return
        elif workload.draws_media:
            patches = media_patches(catalog.model(self.model), workload.images, workload.videos)
            filled["media_tokens"] = tuple(each.tokens for each in patches)
        else:
            filled["vision"] = vision_of(catalog.model(self.model))
        msgspec.structs.force_setattr(self, "workload", msgspec.structs.replace(workload, **filled))

    @property
    def model_name(self) -> str:
        return self.model if isinstance(self.model, str) else self.model.name

    def with_deployment(self, **changes: Any) -> "Scenario":
        """Return the scenario with other values of some fields of its deployment."""
        return msgspec.structs.replace(self, deployment=msgspec.structs.replace(self.deployment, **changes))


SCENARIO_HINT = "`windtunnel init serving` writes one to begin with"
OTHER_FILES = {
    "vary": ("is a search space", "give it to windtunnel search, or take that section out of the file"),
    "global_batch": ("describes a training job", "give it to windtunnel train, or with `vary` to windtunnel search"),
    "summary": ("is a result", "simulate the scenario.yaml beside it"),
}
"""Key that no scenario has -> the file that has it, and where it belongs."""


@dataclass(frozen=True)
class Setup:
    """A scenario resolved: names looked up and defaults filled in."""

    model: ModelSpec
    precision: Precision
    device: Device
    node: Node
    parallelism: Parallelism
    engine: EngineSettings
    max_model_len: int
    """Tokens of the longest request that the engine accepts."""
    profile: Profile | None = None
    """The user's measured operators; None: the shipped tables."""
    calibration: Calibration | None = None
    """None: not calibrated."""
    calibration_name: str | None = None
    not_calibrated: str = ""
    """Why there is no calibration; empty with one."""
    settings_assumed: bool = False
    learnt: Mapping[str, int | float] = field(default_factory=dict)
    """Settings of `engine` from the calibration: neither given nor the engine's defaults."""
    network: ClusterNetwork | None = None
    sampling: Sampling = GREEDY
    """Sampling of every request."""
    sampling_source: str = ""
    """Where it comes from."""
    random_tokens: bool = False
    """Prompts are random tokens, not text."""
    client: Client = field(default_factory=Client)
    client_name: str = ""
    """Empty where its times are given."""
    arithmetic_slower: float = 1.0
    """Times as long as what arithmetic bounds takes under the devices' power limit."""

    @property
    def frontend(self) -> Client:
        """Seconds of API server and client together."""
        return self.client.behind(self.engine.host)


FOLLOWING = frozenset(
    {
        *("slo", "node", "num_gpu_blocks", "reserved_bytes", "max_cudagraph_capture_size", "host"),
        *("fused_all_reduce", "fused_all_reduce_bytes", "scaled_sparse_kv", "compresses_in_one_block"),
    }
)
"""Keys that follow from others in a result's scenario, or judge alone: they explain nothing where another differs."""


def follows(path: str, values: Sequence[Any]) -> bool:
    """Whether a difference of a setting follows from others: CUDA graphs are turned off by an option alone."""
    is_turned_off = path.endswith("max_cudagraph_capture_size") and 0 in values
    return not is_turned_off and not FOLLOWING.isdisjoint(path.split("."))


@checked
def load(path: Path | str, overrides: dict[str, Any] | None = None) -> Scenario:
    """Read the scenario in a YAML or JSON file.

    Args:
        path: the file; traces that it names are looked up beside it first.
        overrides: dotted path (`workload.arrivals.rate_per_s`) -> value, as `--set` gives them.

    Raises:
        InputError: the file is missing or wrong, or an override names no field.
    """
    path = Path(path)
    raw = read_raw(path)
    for dotted, value in (overrides or {}).items():
        set_path(raw, dotted, value)
    keep_published_formats(raw)
    count_requests(raw)
    return scenario_from(raw, str(path), path.parent)


DEFAULT_REQUESTS_PER_SLOT = 10
"""Requests of a closed loop without `num_requests`, for each client slot, as benchmark clients commonly send."""
DEFAULT_NUM_REQUESTS = 1000


def count_requests(raw: dict[str, Any]) -> None:
    """Give a raw scenario its usual number of requests where nothing says where it ends: no count, time or file."""
    workload = raw.get("workload")
    if not isinstance(workload, dict) or {"num_requests", "duration_s", "trace", "tenants"} & set(workload):
        return
    arrivals = workload.get("arrivals")
    arrivals = arrivals if isinstance(arrivals, dict) else {}
    if arrivals.get("type") != "recorded":
        slots = arrivals.get("concurrency")
        per_slot = DEFAULT_REQUESTS_PER_SLOT * slots if isinstance(slots, int) and slots > 0 else DEFAULT_NUM_REQUESTS
        workload["num_requests"] = per_slot


def read_raw(path: Path) -> dict[str, Any]:
    """Read the keys of a scenario's file; a calibration that it names and that lies beside it as the path from here.
    InputError where the file is missing, is no YAML or JSON, or holds no keys; the hint knows a model's name."""
    catalog.check_is_file(path)
    raw = read_table(path, "a scenario", SCENARIO_HINT)
    deployment = raw.get("deployment")
    if isinstance(deployment, dict) and isinstance(name := deployment.get("calibration"), str):
        deployment["calibration"] = str(path.parent / name) if (path.parent / name).is_file() else name
    return raw


Described = Scenario | Mapping[str, Any] | Path | str
"""A scenario, its file, or the table of its keys."""


DEVICE_HINT = "deployment: {device: h100_sxm}, for instance; `windtunnel catalog devices` lists them"
"""Where a scenario has no device."""
_HINTS = {
    r"\$\.deployment(\.device)? is (missing|nothing)": DEVICE_HINT,
    r"\$\.model is (missing|nothing)": "model: llama-3.1-8b, for instance; `windtunnel catalog models` lists them",
    r"arrivals is missing": "arrivals: {type: poisson, rate_per_s: 10}, for instance",
    r"\.(scheduler|router) is function": "simulate takes functions: policy=..., router=...; elsewhere module:function",
    r"\.(device|node) is [A-Z]\w+; text is needed": "give its name, or the file that windtunnel.save writes of it",
}
"""Message of a wrong scenario -> its hint."""


def scenario_from(raw: dict[str, Any], source: str = "", folder: Path | None = None) -> Scenario:
    """Decode a scenario from builtins, as YAML or options give them; InputError names the path of what is wrong."""
    if raw.get("kind") == "diffusion":
        hint = "give it to windtunnel simulate or search; in Python to windtunnel.diffusion"
        raise InputError(f"{source or 'this'} describes a diffusion job, not a scenario", hint)
    for key, (what, hint) in OTHER_FILES.items():
        if key in raw:
            raise InputError(f"{source or 'this'} {what}, not a scenario", hint)
    if source and raw.keys().isdisjoint(Scenario.__struct_fields__):
        raise InputError(f"{source} is not a scenario: it has none of model, deployment and workload", SCENARIO_HINT)
    if folder is not None and "workload" in raw:
        raw["workload"] = beside(raw["workload"], folder)
    if isinstance(raw.get("model"), Mapping):
        raw = raw | {"model": catalog.model(raw["model"])}
    deployment = raw.get("deployment")
    if isinstance(deployment, dict) and "device" not in deployment and isinstance(deployment.get("pools"), list):
        devices = [pool.get("device") if isinstance(pool, dict) else None for pool in deployment["pools"]]
        if devices and all(devices):  # no pool takes the deployment's
            raw = raw | {"deployment": {**deployment, "device": devices[0]}}
    try:
        return decode(raw, Scenario, source)
    except InputError as error:
        for problem, hint in _HINTS.items():
            if re.search(problem, error.message):
                error.or_hint(hint)
        raise


def beside(raw: Any, folder: Path) -> Any:
    """Return `raw` with every `path` of a file in `folder` as the path from here."""
    if isinstance(raw, list):
        return [beside(entry, folder) for entry in raw]
    if not isinstance(raw, dict):
        return raw
    table = {key: beside(value, folder) for key, value in raw.items()}
    if isinstance(path := raw.get("path"), str) and (folder / path).exists():
        table["path"] = str(folder / path)
    return table


def keep_published_formats(raw: dict[str, Any], allow_download: bool = False) -> None:
    """Fill in the formats that `raw` leaves out from the published checkpoint, where it gives some.

    A format of the weights holds for attention and experts too; one of the KV cache for nothing else.
    """
    given = raw.get("precision")
    if not isinstance(given, dict) or not isinstance(raw.get("model"), str | Mapping | ModelSpec):
        return
    published = encode(catalog.model(raw["model"], allow_download).precision)
    if "weights" in given:
        published = {name: published[name] for name in ("lm_head", "kv_cache")}
    raw["precision"] = published | given


@checked
def resolve(scenario: Scenario, allow_download: bool = False, calibration: Calibration | None = None) -> Setup:
    """Look up the scenario's names, fill in its engine's defaults and check that its parts go together.

    `calibration` replaces the one that the deployment names or that ships.

    Raises:
        InputError: an unknown name, or a parallelism or format that this model, device or node cannot have; or the
            deployment has pools, each of which resolves alone (`pool_scenario`).
    """
    deployment = scenario.deployment
    if deployment.pools:
        raise InputError(
            f"the deployment has {format_count(len(deployment.pools), 'pool')}: there is not one setup of it",
            "write the device, parallelism and engine of one pool as a deployment without pools",
        )
    model, device = catalog.model(scenario.model, allow_download), catalog.device(deployment.device)
    node = catalog.node(deployment.node) if deployment.node else catalog.default_node(device)
    is_pooling = scenario.workload.is_pooling or model.is_encoder
    if is_pooling:
        model = msgspec.structs.replace(model, tie_word_embeddings=True, lm_head_bias=False, is_pooled=True)
    precision = scenario.precision or model.precision
    engine = defaults.with_defaults(deployment.engine, device, shape=deployment.parallelism)
    chosen = _calibration_choice(deployment, engine, device, calibration)
    learnt, host = dict[str, int | float](), engine.host
    client = client_of(scenario.workload.client)
    is_random = scenario.workload.has_random_tokens(client)
    if chosen.calibration is not None:
        client = chosen.calibration.clients.get(name_of(scenario.workload.client), client).over(client)
        host = chosen.host(str(engine.version), host).over(host)
        learnt = _learnt(deployment, chosen.calibration, device.name, str(engine.version), model.name)
    usual = msgspec.structs.replace(EngineSettings(host=host.launched(client.launch_ratio)), **learnt)
    engine = defaults.with_defaults(deployment.engine, device, usual, deployment.parallelism)
    engine = defaults.for_architecture(deployment.engine, engine, model.architecture, model.is_recurrent)
    max_model_len = engine.max_model_len or model.max_context_tokens
    sampling, sampling_source = scenario.workload.sampling_of(model)
    engine = with_lora(engine, scenario.workload.adapters)
    if is_pooling:
        engine = for_pooling(deployment, engine, model)
    engine = defaults.whole_prompt_tokens(deployment.engine, engine, max_model_len)
    setup = Setup(
        model=model,
        precision=precision,
        device=device,
        node=node,
        engine=engine,
        max_model_len=max_model_len,
        calibration=chosen.calibration,
        calibration_name=chosen.name,
        not_calibrated=chosen.reason,
        learnt={name: value for name, value in learnt.items() if getattr(engine, name) == value},
        sampling=sampling,
        sampling_source=sampling_source,
        random_tokens=is_random,
        client=client,
        client_name=name_of(scenario.workload.client),
        arithmetic_slower=deployment.power.slower(device.tdp_w, catalog.power_share(device), device.architecture),
        **fields_of(deployment, "parallelism", "profile", "settings_assumed", "network"),
    )
    _check(setup)
    return setup


def _check(setup: Setup) -> None:
    """Raise InputError for a parallelism or a format that the model, the device or the node cannot have."""
    check_node(setup.node, setup.device)
    check_parallelism(setup.model, setup.parallelism, setup.node, setup.engine.num_redundant_experts or 0)
    if setup.engine.enable_eplb and setup.parallelism.ep == 1:
        raise InputError(
            "engine.enable_eplb places experts on ranks by their load, and parallelism.ep is 1",
            "set parallelism.ep, or leave engine.enable_eplb out",
        )
    if setup.engine.two_batch_overlap or setup.engine.single_batch_overlap:
        check_overlap(setup.parallelism, setup.engine)
    if setup.engine.all2all_backend == MEGA_MOE:
        check_mega_moe(setup.model, setup.parallelism, setup.precision, setup.device)
    if setup.parallelism.ffn is not None:
        check_two_sides(setup.model, setup.engine)
    check_formats(setup.precision, setup.device)


def _calibration_choice(
    deployment: Deployment, engine: EngineSettings, device: Device, calibration: Calibration | None
) -> Choice:
    """Return the calibration in force: `calibration`, the deployment's, or the shipped one."""
    if calibration is not None:
        return Choice(calibration.engine, calibration)
    # The shipped calibrations correct the shipped tables; a profile has none but the one named with it.
    name = deployment.calibration or (None if deployment.profile is None else NONE)
    return calibration_for(engine.name, device.name, str(engine.version), name)


def _learnt(
    deployment: Deployment, calibration: Calibration, device: str, version: str, model: str
) -> dict[str, int | float]:
    """Return the calibration's values of engine settings that the deployment leaves out."""
    learnt: dict[str, int | float] = {}
    if deployment.settings_assumed:
        learnt |= calibration.settings_of(device, version, model)
    elif calibration.reserve is not None and deployment.engine.num_gpu_blocks is None:
        learnt["reserved_bytes"] = calibration.reserve.reserved_bytes
    return {name: value for name, value in learnt.items() if getattr(deployment.engine, name) is None}


def changed_settings(scenarios: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return dotted path -> its value in each encoded scenario, where these mean different things.

    A setting that is left out means its default, and a model's short name the model.
    """
    usual = [encoded_with_defaults(scenario, Scenario) for scenario in scenarios]

    def meant(path: str, value: Any, defaults: Mapping[str, Any]) -> Any:
        if path == "model":
            with suppress(InputError):
                return catalog.known_name("models", str(value))
        return defaults.get(path) if value is None else value

    def is_one(path: str, values: Sequence[Any]) -> bool:
        known = [meant(path, *each) for each in zip(values, usual, strict=True)]
        return all(value == known[0] for value in known)

    return {path: values for path, values in differences(scenarios).items() if not is_one(path, values)}


def pool_scenario(scenario: Scenario, pool: Pool) -> Scenario:
    """Return the scenario of one pool alone; fields that it leaves out are the deployment's.

    It is the scenario itself where the deployment has no pools. Where some pool runs the deployment's engine, a pool
    with another engine does not take over the settings that only the former reads, its version and its calibration.
    """
    deployment = scenario.deployment
    if not deployment.pools:
        return scenario
    # The name of a pool that leaves the engine out: the deployment's engine is meant.
    deployment_names = (EngineSettings().name, deployment.engine.name)
    is_other = pool.engine.name not in deployment_names
    shared, calibration = deployment.engine, deployment.calibration
    if is_other and any(other.engine.name in deployment_names for other in deployment.pools):
        shared = defaults.for_another_engine(shared, pool.engine)
        if calibration not in (None, NONE) and load_calibration(str(calibration)).engine == deployment.engine.name:
            calibration = None
    merged: dict[str, Any] = {}
    for layer in (shared, pool.engine):
        defaults.overlay(merged, layer)
    merged["name"] = pool.engine.name if is_other else deployment.engine.name
    alone = msgspec.structs.replace(
        deployment,
        device=pool.device or deployment.device,
        node=pool.node or (deployment.node if pool.device in (None, deployment.device) else None),
        parallelism=pool.parallelism or deployment.parallelism,
        replicas=pool.replicas,
        autoscaling=pool.autoscaling,
        engine=EngineSettings(**merged),
        calibration=calibration,
        pools=(),
    )
    return msgspec.structs.replace(scenario, deployment=alone)


def check_parallelism(model: ModelSpec, parallelism: Parallelism, node: Node, num_redundant_experts: int = 0) -> None:
    """Raise InputError where `model` cannot be split that way, or `node` is too small for it."""
    tp, ep = parallelism.tp, parallelism.ep
    for _, attention in model.attentions:
        heads = attention.widest_tp
        if heads % tp:
            good = [n for n in range(1, heads + 1) if heads % n == 0 and n <= 2 * node.num_devices]
            raise InputError(
                f"tp = {tp} does not divide the {heads} {attention.divided_by_tp} of {model.name}",
                f"possible: {', '.join(map(str, good))}",
            )
    for _, attention in model.attentions:
        kv_heads = attention.shared_kv_heads
        if kv_heads is not None and kv_heads % tp and tp % kv_heads:
            raise InputError(
                f"tp = {tp} neither divides the {kv_heads} key/value heads of {model.name} nor is a multiple",
                "the key/value heads must spread evenly over the ranks, or each be repeated as often",
            )
    check_divided(model, parallelism)
    if ep > 1 and not model.has_experts:
        raise InputError(f"ep = {ep}, but {model.name} has no experts", "leave ep out")
    for _, feed_forward in model.feed_forwards:
        slots = feed_forward.num_experts + num_redundant_experts
        if feed_forward.num_experts and slots % ep:
            further = f" and {num_redundant_experts} redundant ones" if num_redundant_experts else ""
            raise InputError(
                f"ep = {ep} does not divide the {feed_forward.num_experts} experts{further} of {model.name}",
                f"engine.num_redundant_experts = {num_redundant_experts + -slots % ep} makes the slots even"
                if parallelism.attention_dp > 1
                else None,
            )
    if parallelism.pp > model.num_layers:
        raise InputError(f"pp = {parallelism.pp}, but {model.name} has {format_count(model.num_layers, 'layer')}")
    if parallelism.ffn is not None:
        groups = parallelism.ffn.groups if model.has_experts else 1
        for _, feed_forward in model.feed_forwards:
            if feed_forward.num_experts % groups:
                experts = feed_forward.num_experts
                raise InputError(f"ffn.ep = {groups} does not divide the {experts} experts of {model.name}")
    check_reach(node, parallelism.num_devices, "one replica")


def check_divided(model: ModelSpec, parallelism: Parallelism) -> None:
    """Raise InputError where ranks cannot hold parts of each context: they would not hold equal keys and values, or a
    kind of attention cannot add partial outputs."""
    tp, dcp = parallelism.tp, parallelism.dcp
    for _, attention in model.attentions if dcp > 1 else ():
        if attention.divided_widths is None:
            raise InputError(
                f"dcp = {dcp} divides contexts over ranks, and {model.name} has windows, an indexer or recurrent "
                "states, which stay whole",
                "leave dcp out",
            )
        copies = max(tp // (attention.shared_kv_heads or 1), 1)
        if copies % dcp:
            raise InputError(
                f"dcp = {dcp} divides contexts over ranks that would hold equal keys and values: with tp = {tp} those "
                f"of {model.name} are held {format_count(copies, 'time')}",
                f"make tp a multiple of {(attention.shared_kv_heads or 1) * dcp}, or leave dcp out",
            )


def check_overlap(parallelism: Parallelism, engine: EngineSettings) -> None:
    """Raise InputError where no exchange of tokens could run beside computing."""
    if engine.two_batch_overlap and engine.single_batch_overlap:
        raise InputError(
            "engine.two_batch_overlap and engine.single_batch_overlap hide the same exchange of tokens",
            "leave one of them out",
        )
    name = "two_batch_overlap" if engine.two_batch_overlap else "single_batch_overlap"
    known = [each for each in DEEPEP if engine.two_batch_overlap or each != DEEPEP_NORMAL]
    is_spread = parallelism.attention_dp > 1 and parallelism.ep > 1 and parallelism.experts_tp == 1
    if not is_spread or engine.all2all_backend not in known:
        kernels = "DeepEP" if engine.two_batch_overlap else "DeepEP's low-latency kernels"
        raise InputError(
            f"engine.{name} hides the exchange of tokens by {kernels}, and there is none here",
            f"set parallelism.attention_dp, parallelism.ep, and engine.all2all_backend to one of {', '.join(known)}",
        )


def check_mega_moe(model: ModelSpec, parallelism: Parallelism, precision: Precision, device: Device) -> None:
    """Raise InputError where Mega MoE does not run: a rank holds experts whole, in a format that it has kernels for."""
    if not model.has_experts or parallelism.ep == 1 or parallelism.experts_tp > 1:
        ranks = parallelism.tp * parallelism.attention_dp
        several = (
            f"set parallelism.ep to {ranks}, or" if ranks > 1 else "take several devices, parallelism.ep as many, or"
        )
        raise InputError(
            "engine.all2all_backend is mega_moe, for ranks that hold different experts whole, and there are none",
            f"{several if model.has_experts else ''} leave engine.all2all_backend out".strip(),
        )
    if precision.experts_format not in FORMATS_OF_MEGA_MOE.get(device.architecture or "", ()):
        known = (f"{', '.join(formats)} on {name.title()}" for name, formats in FORMATS_OF_MEGA_MOE.items())
        raise InputError(
            f"Mega MoE has no kernel for experts in {precision.experts_format} on {device.title}",
            f"it has {' and '.join(known)}; leave engine.all2all_backend out",
        )


FORMATS_OF_MEGA_MOE = {
    "blackwell": (Format.MXFP4, Format.NVFP4, Format.MXFP4A4),
    "hopper": (Format.FP8, Format.FP8_BLOCK, Format.MXFP4),
}
"""Architecture -> formats of experts (DeepGEMM `csrc/jit_kernels/impls/`, 2026-09; on Hopper mxfp4 is FlashInfer's)."""


def check_two_sides(model: ModelSpec, engine: EngineSettings) -> None:
    """Raise InputError where a model or an engine cannot be divided so."""
    if any(group.attention is None or group.feed_forward is None for group in model.layers):
        raise InputError(
            f"{model.name} has layers without attention or without a feed-forward, which do not go from side to side",
            "leave parallelism.ffn out",
        )
    if engine.speculative is not None:
        raise InputError(
            "speculative decoding is not simulated where feed-forwards run on devices of their own: drafts would need "
            "passes between the sides too",
            "leave out engine.speculative or parallelism.ffn",
        )


def check_formats(precision: Precision, device: Device) -> None:
    """Raise InputError where `device` has no peak rate that computes one of the formats."""
    for part in ("weights", "attention_format", "attention_output_format", "experts_format", "lm_head"):
        number_format = getattr(precision, part)
        rates = device.peak_flops_per_s
        if not any(rate in rates for rate in COMPUTE[computed_as(number_format, rates)]):
            raise InputError(
                f"{device.title} has no published rate for {number_format}",
                f"it computes {', '.join(device.peak_flops_per_s)}",
            )
