"""Turn the short names that people type, on the command line and in Python, into a scenario."""

from __future__ import annotations  # `help` prints them as they are written

import copy
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack, get_type_hints

from windtunnel.arguments import checked
from windtunnel.errors import InputError, did_you_mean
from windtunnel.metrics.limits import slo_fields
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import builtin, encode, set_path
from windtunnel.serving.other_names import other_names
from windtunnel.serving.scenario import (
    Described,
    Scenario,
    count_requests,
    keep_published_formats,
    read_raw,
    scenario_from,
)
from windtunnel.units import whole


class _Served(TypedDict, total=False):
    model: Annotated[Path | str | ModelSpec | Mapping[str, Any] | None, "model"]
    device: Annotated[Path | str | None, "deployment.device"]


class _Uncalibrated(TypedDict, total=False):
    node: Annotated[Path | str | None, "deployment.node"]
    replicas: Annotated[int | None, "deployment.replicas"]
    tp: Annotated[int | None, "deployment.parallelism.tp"]
    pp: Annotated[int | None, "deployment.parallelism.pp"]
    ep: Annotated[int | None, "deployment.parallelism.ep"]
    attention_dp: Annotated[int | None, "deployment.parallelism.attention_dp"]
    dcp: Annotated[int | None, "deployment.parallelism.dcp"]
    engine: Annotated[str | None, "deployment.engine.name"]
    engine_version: Annotated[str | None, "deployment.engine.version"]
    scheduler: Annotated[str | None, "deployment.engine.scheduler"]
    max_num_seqs: Annotated[int | None, "deployment.engine.max_num_seqs"]
    max_num_batched_tokens: Annotated[int | None, "deployment.engine.max_num_batched_tokens"]
    gpu_memory_utilization: Annotated[float | None, "deployment.engine.gpu_memory_utilization"]
    enable_prefix_caching: Annotated[bool | None, "deployment.engine.enable_prefix_caching"]
    profile: Annotated[Path | str | None, "deployment.profile.folder"]
    quant: Annotated[str | None, "precision.weights"]
    kv_cache_dtype: Annotated[str | None, "precision.kv_cache"]
    input_tokens: Annotated[int | str | Mapping[str, Any] | None, "workload.input_tokens"]
    output_tokens: Annotated[int | str | Mapping[str, Any] | None, "workload.output_tokens"]
    task: Annotated[str | None, "workload.task"]
    num_requests: Annotated[int | None, "workload.num_requests"]
    client: Annotated[str | None, "workload.client"]
    temperature: Annotated[float | None, "workload.sampling.temperature"]
    top_p: Annotated[float | None, "workload.sampling.top_p"]
    top_k: Annotated[int | None, "workload.sampling.top_k"]
    min_p: Annotated[float | None, "workload.sampling.min_p"]
    logprobs: Annotated[int | None, "workload.sampling.logprobs"]
    structured_output: Annotated[bool | None, "workload.sampling.structured_output"]
    seed: Annotated[int | None, "seed"]


class _Deployed(_Uncalibrated, total=False):
    calibration: Annotated[Path | str | None, "deployment.calibration"]


class _Chosen(TypedDict, total=False):
    router: Annotated[str | None, "deployment.router"]
    estimator: Annotated[str | None, "deployment.profile.estimator"]


class Options(_Served, _Deployed, _Chosen, total=False):
    """Short names, each with its type and its path in a scenario; None stands for a name left out."""


class MeasuredOptions(_Served, _Uncalibrated, _Chosen, total=False):
    """Names of what served measured requests."""


class _Load(TypedDict, total=False):
    concurrency: int | None
    trace: Path | str | None
    settings: Mapping[str, Any] | None


class LoadOptions(Options, _Load, total=False):
    """Names of a scenario whose limits are an argument of their own."""

    rate_per_s: float | str | None


class ScenarioOptions(LoadOptions, total=False):
    """All names of a scenario."""

    slo: str | Mapping[str, Any] | None


class SimulateOptions(_Served, _Deployed, _Load, total=False):
    """Names of a scenario that are no arguments of `simulate`."""

    rate_per_s: float | str | None
    slo: str | Mapping[str, Any] | None


class RecommendOptions(_Deployed, _Chosen, _Load, total=False):
    """Names of a scenario that `recommend` does not choose, and prices."""

    prices: Mapping[str, float] | Path | str | None


class TrainOptions(TypedDict, total=False):
    """Short names of a training job, each with its path in it, and its other fields."""

    model: Annotated[Path | str | ModelSpec | Mapping[str, Any] | None, "model"]
    device: Annotated[Path | str | Mapping[str, Any] | None, "device"]
    node: Annotated[Path | str | Mapping[str, Any] | None, "node"]
    num_devices: Annotated[int | None, "num_devices"]
    sequence_tokens: Annotated[int | str | None, "sequence_tokens"]
    global_batch: Annotated[int | str | None, "global_batch"]
    micro_batch: Annotated[int | None, "micro_batch"]
    precision: Annotated[str | Mapping[str, Any] | None, "precision.compute"]
    lora: Annotated[int | Mapping[str, Any] | None, "lora.rank"]
    frozen_weights: Annotated[str | None, "precision.frozen_weights"]
    optimizer: Annotated[str | None, "optimizer"]
    moments: Annotated[str | None, "precision.moments"]
    topology: Annotated[Path | str | None, "network.topology"]
    backend: Annotated[str | None, "network.backend"]
    total_tokens: Annotated[float | str | None, "total_tokens"]
    framework: Annotated[str | None, "framework"]
    tp: Annotated[int | None, "parallelism.tp"]
    cp: Annotated[int | None, "parallelism.cp"]
    pp: Annotated[int | None, "parallelism.pp"]
    vpp: Annotated[int | None, "parallelism.virtual_stages"]
    ep: Annotated[int | None, "parallelism.ep"]
    zero: Annotated[int | None, "sharding.zero"]
    offload: Annotated[str | None, "sharding.offload"]
    schedule: Annotated[str | None, "schedule"]
    recompute: Annotated[str | Mapping[str, Any] | None, "recompute.granularity"]
    num_microbatches: int | None
    parallelism: Mapping[str, Any]
    sharding: Mapping[str, Any]
    overlap: Mapping[str, Any]
    kernels: Mapping[str, Any]
    dropout: bool
    learned_positions: bool
    mtp_layers: int
    document_tokens: int | None
    faults: Mapping[str, Any]
    network: Mapping[str, Any] | None
    price_usd_per_hour: float | None


def _paths_of(names: type) -> dict[str, str]:
    hints = get_type_hints(names, include_extras=True).items()
    return {name: hint.__metadata__[0] for name, hint in hints if hasattr(hint, "__metadata__")}


PATHS = _paths_of(Options)
"""Short name -> path in a scenario."""

OF_LOAD = ("rate_per_s", "concurrency", "trace", "slo", "settings")
"""Names of `scenario` that are no single field."""

JOB_PATHS = _paths_of(TrainOptions)
"""Short name -> path in a training job."""


@checked
def scenario(
    described: Described | None = None,
    *,
    rate_per_s: float | str | None = None,
    concurrency: int | None = None,
    trace: Path | str | None = None,
    slo: str | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> Scenario:
    """Make a scenario from short names: `scenario(model="llama-3.1-8b", device="h100_sxm", concurrency=8, ...)`.

    Args:
        described: a scenario, its file or its keys, which the names change: `scenario(chat, tp=2)`; None: none.
        rate_per_s: Poisson arrivals; infinity, as in benchmark clients, sends all as soon as `concurrency` allows.
        concurrency: clients of a closed loop; with a rate, the limit of requests under way.
        trace: a requests file; gives lengths, and arrivals unless a rate or concurrency is given.
        slo: limits: `"ttft_p90=1s,tpot_p99=50ms"`, `{"ttft_p90": "1s"}`, or a scenario's `{"ttft_s": 1.0}`.
        settings: dotted path -> value, for everything without a short name.
        options: the names of the command line: model, device, node, replicas, router, tp, pp, ep, attention_dp, dcp,
            engine, engine_version, calibration, scheduler, max_num_seqs, max_num_batched_tokens,
            gpu_memory_utilization, enable_prefix_caching, profile, estimator, quant, kv_cache_dtype, input_tokens,
            output_tokens, task, num_requests, client, temperature, top_p, top_k, min_p, logprobs, structured_output,
            seed.

    Raises:
        InputError: an unknown name, or values that do not go together.
    """
    raw, source, folder = _raw_of(described)
    raw = raw_scenario(raw, dict(options), rate_per_s, concurrency, trace, slo, settings)
    if described is None and trace is None and rate_per_s is None and concurrency is None and not settings:
        raise InputError("rate_per_s, concurrency or trace is missing", "for instance concurrency=16")
    # A trace named in a file lies beside it; one named in Python, where Python runs.
    return scenario_from(raw, source, folder if trace is None else None)


def _raw_of(described: Described | None) -> tuple[dict[str, Any], str, Path | None]:
    """Return what is described as builtins that may be changed, with its file's name and folder."""
    if isinstance(described, Path | str):
        return read_raw(Path(described)), str(described), Path(described).parent
    if isinstance(described, Scenario):
        return encode(described), "", None
    return copy.deepcopy(dict(described or {})), "", None


def described_by(described: Described | None, options: Mapping[str, Any], also: Iterable[str] = ()) -> Scenario:
    """Return the scenario that is described, with options over it, or that options alone describe.

    `also` are further names that the caller takes, for the hint where an option has no known name. InputError where
    neither is given, or as `scenario`.
    """
    for name in options:
        if name not in PATHS and name not in OF_LOAD:
            raise unknown_option(name, [*also, *PATHS, *OF_LOAD])
    if isinstance(described, Scenario) and not options:
        return described
    if described is None and not options:
        raise InputError("no scenario is given", 'give one, its file, or options: model="llama-3.1-8b", ...')
    return scenario(described, **options)


def unknown_option(name: str, known: Iterable[str]) -> InputError:
    """Return the error for an option that is none of the `known`, which another tool may call so."""
    names = list(dict.fromkeys(known))
    meant = other_names().get(name.replace("_", "-"), "").replace("-", "_")
    near = did_you_mean(meant or name, names, f"known: {', '.join(names)}")
    return InputError(f"there is no option {name!r}", f"did you mean {meant}?" if meant in names else near)


def raw_scenario(
    raw: dict[str, Any],
    options: dict[str, Any],
    rate_per_s: float | str | None = None,
    concurrency: int | None = None,
    trace: Path | str | None = None,
    slo: str | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    allow_download: bool = False,
) -> dict[str, Any]:
    """Apply short names to `raw`, a scenario as builtins that is not yet decoded."""
    if trace is not None:
        raw["workload"] = {"trace": {"path": trace}}
    for name, value in options.items():
        if name not in PATHS:
            raise unknown_option(name, [*PATHS, *OF_LOAD])
        if isinstance(value, str) and name in ("input_tokens", "output_tokens"):
            value = parse_lengths(f"$.{PATHS[name]}", value)
        if value is not None:
            set_path(raw, PATHS[name], value)
    if concurrency is not None:
        _set_concurrency(raw, concurrency, rate_per_s)
    elif rate_per_s is not None:
        arrivals = {"type": "burst"} if rate_per_s == math.inf else {"type": "poisson", "rate_per_s": rate_per_s}
        set_path(raw, "workload.arrivals", arrivals)
    for name, limit in (slo_fields(slo) if slo else {}).items():
        set_path(raw, f"slo.{name}", limit)
    for dotted, value in (settings or {}).items():
        set_path(raw, dotted, value)
    keep_published_formats(raw, allow_download)
    raw.setdefault("workload", {})
    count_requests(raw)
    return raw


def parse_lengths(name: str, text: str) -> Any:
    """Parse `1024` or `8k`, or `819-1024` for lengths drawn evenly between both, into a workload's lengths. InputError
    where it is neither; names the option or field `name`."""
    with suppress(ValueError):
        low, *high = (whole(part.strip()) for part in text.split("-", 1))
        return {"type": "uniform", "min_tokens": low, "max_tokens": high[0]} if high else low
    raise InputError(
        f"{name}: {text!r} is neither a number of tokens nor a range such as 819-1024",
        "a scenario has other distributions: workload.input_tokens: {type: lognormal, median_tokens: 512, sigma: 0.8}",
    )


def lay_over(raw: dict[str, Any], base: dict[str, Any]) -> None:
    """Put the values of `base` into `raw`, table by table."""
    for key, value in base.items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict):
            lay_over(raw[key], value)
        else:
            raw[key] = value


def _set_concurrency(raw: dict[str, Any], concurrency: int, rate_per_s: float | str | None) -> None:
    """Set a closed loop of so many clients.

    One that `raw` has already keeps its warm-up, and its release rate unless another is given.
    """
    workload = raw.get("workload")
    arrivals = workload.get("arrivals") if isinstance(workload, dict) else None
    kept = arrivals if isinstance(arrivals, dict) and arrivals.get("type") == "closed_loop" else {"type": "closed_loop"}
    if rate_per_s == math.inf:
        kept = {name: value for name, value in kept.items() if name not in ("rate_per_s", "cv")}
    elif rate_per_s is not None:
        kept = kept | {"rate_per_s": rate_per_s}
    set_path(raw, "workload.arrivals", kept | {"concurrency": builtin(concurrency)})
