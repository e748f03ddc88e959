"""The short names that people type, for the command line and for Python alike, turned into a scenario."""

from typing import Any

from windtunnel.errors import InputError
from windtunnel.spec import catalog
from windtunnel.spec.noun import encode
from windtunnel.spec.scenario import Scenario, scenario_from, set_path

PATHS: dict[str, str] = {
    "model": "model",
    "device": "deployment.device",
    "node": "deployment.node",
    "replicas": "deployment.replicas",
    "tp": "deployment.parallelism.tp",
    "pp": "deployment.parallelism.pp",
    "ep": "deployment.parallelism.ep",
    "attention_dp": "deployment.parallelism.attention_dp",
    "engine": "deployment.engine.name",
    "engine_version": "deployment.engine.version",
    "max_num_seqs": "deployment.engine.max_num_seqs",
    "max_num_batched_tokens": "deployment.engine.max_num_batched_tokens",
    "gpu_memory_utilization": "deployment.engine.gpu_memory_utilization",
    "quant": "precision.weights",
    "kv_cache_dtype": "precision.kv_cache",
    "input_tokens": "workload.input_tokens",
    "output_tokens": "workload.output_tokens",
    "num_requests": "workload.num_requests",
    "seed": "seed",
}
"""Short name -> path in a scenario."""

DEFAULT_REQUESTS_PER_SLOT = 10
"""Requests of a closed loop without `num_requests`, for each client slot, as benchmark clients commonly send."""
DEFAULT_NUM_REQUESTS = 1000


def scenario(
    *,
    rate_per_s: float | None = None,
    concurrency: int | None = None,
    trace: str | None = None,
    slo: dict[str, float] | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Scenario:
    """A scenario from short names, for instance `scenario(model="llama-3.1-8b", device="h100_sxm", concurrency=8, ...)`.

    Args:
        rate_per_s: Poisson arrivals.
        concurrency: a closed loop of so many clients.
        trace: a requests file; gives lengths, and arrivals unless a rate or concurrency is given.
        slo: `ttft_s`, `tpot_s`, `e2e_s`.
        settings: dotted path -> value, for everything without a short name.
        options: the names in `PATHS`.

    Raises:
        InputError: an unknown name, or values that do not go together.
    """
    return scenario_from(
        raw_scenario({}, options, rate_per_s, concurrency, trace, slo, settings), source="", folder=None
    )


def raw_scenario(
    raw: dict[str, Any],
    options: dict[str, Any],
    rate_per_s: float | None = None,
    concurrency: int | None = None,
    trace: str | None = None,
    slo: dict[str, float] | None = None,
    settings: dict[str, Any] | None = None,
    allow_download: bool = False,
) -> dict[str, Any]:
    """`raw` with short names applied over it, as builtins, not yet decoded."""
    if rate_per_s is not None and concurrency is not None:
        raise InputError("a rate and a concurrency exclude each other", "open loop: rate; closed loop: concurrency")
    if trace is not None:
        raw["workload"] = {"trace": {"path": trace}}
    for name, value in options.items():
        if name not in PATHS:
            raise InputError(f"there is no option {name!r}", f"known: {', '.join(PATHS)}")
        if value is not None:
            set_path(raw, PATHS[name], value)
    if rate_per_s is not None:
        set_path(raw, "workload.arrivals", {"type": "poisson", "rate_per_s": rate_per_s})
    if concurrency is not None:
        set_path(raw, "workload.arrivals", {"type": "closed_loop", "concurrency": concurrency})
    for name, limit in (slo or {}).items():
        set_path(raw, f"slo.{name}", limit)
    for dotted, value in (settings or {}).items():
        set_path(raw, dotted, value)
    _keep_published_formats(raw, allow_download)
    workload = raw.setdefault("workload", {})
    if isinstance(workload, dict) and "trace" not in workload and not {"num_requests", "duration_s"} & set(workload):
        slots = workload.get("arrivals", {}).get("concurrency") if isinstance(workload.get("arrivals"), dict) else None
        per_slot = DEFAULT_REQUESTS_PER_SLOT * slots if isinstance(slots, int) and slots > 0 else DEFAULT_NUM_REQUESTS
        workload["num_requests"] = per_slot
    return raw


def _keep_published_formats(raw: dict[str, Any], allow_download: bool) -> None:
    """Where some formats are given, those that they do not speak of stay as the checkpoint was published.

    A format of the weights speaks of attention and experts too; a format of the KV cache of nothing else.
    """
    given = raw.get("precision")
    if not isinstance(given, dict) or not isinstance(raw.get("model"), str):
        return
    published = encode(catalog.model(raw["model"], allow_download).precision)
    if "weights" in given:
        published = {name: published[name] for name in ("lm_head", "kv_cache") if name in published}
    raw["precision"] = published | given
