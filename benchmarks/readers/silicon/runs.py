"""Measured serving runs, a row each, as the scenarios that they were: three CSV files joined by `id` and `settings_id`.

`dev.csv` (or another file of its columns) holds the measurement, `row_settings.csv` what was recovered for the row
(true parallelism, client, limits), `engine_settings.csv` what was recovered for its configuration (image, memory,
formats). Where they differ the recovered value counts. The measurements are those of aiconfigurator-core 0.12, the
settings those of the InferenceX recipes that made them. Nothing is guessed: a row that leaves open what was run is
refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from readers.silicon.engines import default_engine, generated_engine, recorded_engine
from readers.silicon.pools import pool_records, pools_of, transfer_of
from readers.silicon.rows import Row, is_default, rows
from windtunnel import catalog
from windtunnel.calibration.measured_runs import UNRECORDED_SPREAD, Measurement, parallelism_label, reason_of
from windtunnel.errors import InputError
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Format, Precision
from windtunnel.model.shape import ModelSpec
from windtunnel.serving.deployment import Deployment, EngineSettings, Pool, Speculative, Transfer
from windtunnel.serving.scenario import Scenario
from windtunnel.workload.arrivals import ClosedLoop
from windtunnel.workload.lengths import Lengths, Uniform
from windtunnel.workload.schema import Workload

ROW_SETTINGS, ENGINE_SETTINGS = "row_settings.csv", "engine_settings.csv"

AGGREGATED, DISAGGREGATED = "agg", "disagg"

ENGINES = ("vllm", "sglang", "trtllm")
OTHER_ENGINE_NAMES = {"tensorrt_llm": "trtllm", "tensorrt-llm": "trtllm", "trt": "trtllm"}

REQUESTS_PER_SLOT = 10
"""Requests per client slot where the number was not recorded."""
REQUESTS_PER_SLOT_BY_DIGITS = {("sglang", "h100_sxm"): 20, ("trtllm", "h100_sxm"): 20}
"""The same where unrounded means tell: their digits are multiples of 1 / N with these N."""

CLIENT, UNRECORDED_CLIENT = "inferencex", "unrecorded"
"""Clients, by their names in the catalog, of rows whose recipes are known and of all others."""
CLIENT_SEED = 0
"""Default seed of lengths, of every run whose client is known."""

NOT_SPECULATIVE = ("none", "none?")

ODD_FLAGS = ("cold_start_no_warmup", "token_inflation_5x", "debug_run_c512", "gtl_client_unknown", "ttft>30%_of_e2e")
"""Rows that are not a steady run of what their settings say: no warm-up, prompts five times too long, a debugging run,
an unknown client, or mostly queueing."""
UNRECORDED_SOURCES = ("autogap", "gtl")
"""Collections of which neither server flags nor client settings are known; engine defaults are assumed."""
GENERATED = {("autogap", "h100_sxm")}
"""(collection, system) of which neither flags nor client were recorded, but what wrote them is known: AIConfigurator's
generator (`silicon_engines.generated_engine`). That means of TensorRT-LLM and SGLang are multiples of 1 / (20 C) is the
doing of its client, which sends 20 requests for each of the concurrency. Those of other systems were rounded, and do
not tell."""
GENERATED_WARMUP = 2
"""Requests of its warm-up for each of the concurrency."""
OFTEN_ODD = ("gtl",)
"""Collections whose concurrency spans several replicas, by the looks of their TPOT."""
UNRECORDED_WEIGHT = 0.2
"""In a calibration, of a run whose settings were not recorded."""

SECONDARY_WEIGHT = 0.3
"""In a calibration, of a run that may have had speculative decoding on without a record of it."""

CHECKPOINTS = {
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("Qwen/Qwen3-32B", "fp4"): "nvidia/Qwen3-32B-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "fp8"): "Qwen/Qwen3.5-397B-A17B-FP8",
    ("deepseek-ai/DeepSeek-R1", "fp4"): "nvidia/DeepSeek-R1-FP4",
    ("deepseek-ai/DeepSeek-V3.2", "fp4"): "nvidia/DeepSeek-V3.2-NVFP4",
    ("moonshotai/Kimi-K2.5", "fp4"): "nvidia/Kimi-K2.5-NVFP4",
    ("zai-org/GLM-5", "fp4"): "nvidia/GLM-5-NVFP4",
    ("zai-org/GLM-5", "fp8"): "zai-org/GLM-5-FP8",
}
"""(model, format) -> the published checkpoint, where a row names only the former."""

LABELS: Mapping[Format, str] = {
    Format.BF16: "bf16",
    Format.FP8: "fp8",
    Format.FP8_BLOCK: "fp8",
    Format.INT4: "int4",
    Format.NVFP4: "fp4",
    Format.MXFP4: "fp4",
}
"""A checkpoint's narrowest format -> its name in the `precision` column."""

KV_FORMATS = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2"), "fp8"),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half"), "bf16"),
}
"""Value of `kv_cache_dtype` -> the format with as many bits."""

ONLINE_FORMATS = {"fp8": Format.FP8, "fp8_block": Format.FP8_BLOCK}
"""`gemm_quant_mode` -> the format that an engine makes of a bf16 checkpoint when it loads it."""


@dataclass(frozen=True)
class MeasuredRun:
    """One measured serving run."""

    id: str
    use: str
    """`primary`, `secondary`, or why the row is not to be scored."""
    source: str
    speculative: str
    """`none`, `none?` (not recorded, nothing speaks for it) or the method."""
    num_draft_tokens: int | None
    """Draft tokens of one verification, with `mtp`."""
    system: str
    model: str
    """As the measurement names it."""
    checkpoint: str | None
    """The loaded checkpoint; None where only `model` and `precision` are known."""
    precision: str | None
    """`bf16`, `fp8`, `fp4`, `int4`; None: the checkpoint as it is."""
    gemm_format: str | None
    kv_cache: str | None
    """`fp8`, `bf16`, or None: the checkpoint's own."""
    parallelism: Parallelism
    engine: EngineSettings
    input_tokens: int
    output_tokens: int
    """The longest prompt and output; the client draws from `range_ratio` of them to them."""
    range_ratio: float | None
    """None: not recorded."""
    concurrency: int | None
    rate_per_s: float | None
    """At which the client releases requests, beside its concurrency; None: all at once."""
    num_requests: int | None
    num_warmup_requests: int
    ttft_s: float
    tpot_s: float
    """Means over requests."""
    flags: tuple[str, ...]
    """Oddities of the row."""
    unmodelled: tuple[str, ...]
    """Recorded settings that have no counterpart in a scenario."""
    pools: tuple[Pool, ...] = ()
    """Separate servers for prefill and decode, in place of `parallelism`."""
    assumed: str = ""
    """Unrecorded settings for which the usual value is assumed."""

    @property
    def mean_output_tokens(self) -> float:
        """Mean of the client's distribution."""
        return self.output_tokens * (1.0 if self.range_ratio is None else (1 + self.range_ratio) / 2)

    @property
    def e2e_s(self) -> float:
        """Mean latency of a request, from the two means that were measured."""
        return self.ttft_s + self.tpot_s * (self.mean_output_tokens - 1)

    @property
    def is_unrecorded(self) -> bool:
        """Whether nobody knows the flags of its server."""
        return self.source in UNRECORDED_SOURCES

    @property
    def lengths_seed(self) -> int | None:
        """Seed of the client's draws, where the client is known and draws."""
        return None if self.range_ratio in (None, 1.0) else CLIENT_SEED


def is_silicon(path: Path) -> bool:
    """Whether a CSV file has the columns of this layout."""
    if path.suffix != ".csv":
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return "silicon_ttft_ms" in file.readline().strip().split(",")


def read_runs(measurements: Path) -> list[MeasuredRun]:
    """Read the aggregated runs of a file of measurements (`dev.csv`); the two files of settings lie beside it.

    Rows that were truly run with separate pools for prefill and decode (`true_mode` is `disagg`) are left out.

    Raises:
        InputError: a file is missing, or a row is malformed; names file, line and column.
    """
    recovered, servers = _settings(measurements)
    return [
        _run(measured, row, servers)
        for measured in rows(measurements)
        if (row := _recovered(measured, recovered)).required("true_mode") == AGGREGATED
    ]


def read_measurements(measurements: Path) -> list[Measurement]:
    """Read every row of such a file as a measurement, separate pools too; a malformed row becomes a refused one.

    Raises:
        InputError: a file is missing, or has a line of another number of values than its header.
    """
    recovered, servers = _settings(measurements)
    read = []
    for measured in rows(measurements):
        try:
            read.append(measurement_of(_run(measured, _recovered(measured, recovered), servers)))
        except InputError as error:
            read.append(_refused(measured, error))
    return read


def _settings(measurements: Path) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return the recovered rows and the configurations, by their ids."""
    recovered = {row.required("id"): row for row in rows(measurements.with_name(ROW_SETTINGS))}
    servers = {row.required("settings_id"): row for row in rows(measurements.with_name(ENGINE_SETTINGS))}
    return recovered, servers


def _refused(measured: Row, error: InputError) -> Measurement:
    columns = {"engine": "backend", "version": "backend_version", "device": "system", "model": "model_path"}
    labels = {label: measured.text(column).rpartition("/")[2] for label, column in columns.items()}
    return Measurement(measured.text("id"), None, reason_of(error), {}, labels, measured.text("use"))


def scenario_of(run: MeasuredRun, acceptance_fraction: float | None = None) -> Scenario:
    """Return the scenario that `run` measured.

    Args:
        run: what was measured.
        acceptance_fraction: of draft tokens, which no row records; None refuses runs with speculative decoding.

    Raises:
        InputError: the row leaves open what was run, or it was something that a scenario cannot say.
    """
    engine = run.engine
    if engine.name == "trtllm":
        # Its own all-reduce is the fused one.
        engine = msgspec.structs.replace(engine, fused_all_reduce=None)
    if run.speculative not in NOT_SPECULATIVE:
        if run.num_draft_tokens is None:
            raise InputError("it decodes speculatively, or may, and how many tokens it drafts was not recorded")
        if acceptance_fraction is None:
            raise InputError("it decodes speculatively, and how many draft tokens were accepted was not recorded")
        speculative = Speculative(
            method="mtp", num_draft_tokens=run.num_draft_tokens, acceptance_fraction=acceptance_fraction
        )
        engine = msgspec.structs.replace(engine, speculative=speculative)
    if run.concurrency is None:
        raise InputError("the client's concurrency was not recorded")
    per_slot = REQUESTS_PER_SLOT_BY_DIGITS.get((run.engine.name, run.system), REQUESTS_PER_SLOT)
    model, precision = served_checkpoint(run)
    return Scenario(
        model=model,
        precision=precision,
        deployment=Deployment(
            device=run.system,
            parallelism=run.parallelism,
            engine=engine,
            pools=run.pools,
            transfer=transfer_of(run.engine.name, run.system, run.pools) if run.pools else Transfer(),
            settings_assumed=run.is_unrecorded,
        ),
        workload=Workload(
            arrivals=ClosedLoop(
                concurrency=run.concurrency, num_warmup_requests=run.num_warmup_requests, rate_per_s=run.rate_per_s
            ),
            input_tokens=_lengths(run.input_tokens, run.range_ratio),
            output_tokens=_lengths(run.output_tokens, run.range_ratio),
            lengths_seed=run.lengths_seed,
            client=UNRECORDED_CLIENT if run.is_unrecorded else CLIENT,
            num_requests=run.num_requests or per_slot * run.concurrency,
        ),
    )


def served_checkpoint(run: MeasuredRun) -> tuple[str, Precision]:
    """Return the catalog's name of the checkpoint that `run` loaded, and the formats it was served in.

    Raises:
        InputError: the catalog does not have it, or its formats are not those recorded.
    """
    name = run.checkpoint or CHECKPOINTS.get((run.model, run.precision or ""), run.model)
    spec = catalog.model(name)
    if not run.checkpoint and run.precision is not None and _is_narrower(run.precision, spec.precision):
        spec = _published(spec.name, run.precision) or spec
    precision = spec.precision
    label = _label(precision)
    if run.precision not in (label, None):
        online = ONLINE_FORMATS.get(run.gemm_format or "")
        if run.precision != "fp8" or label != "bf16" or online is None:
            raise InputError(f"it was run in {run.precision}, and {spec.name} is a checkpoint in {label}")
        precision = msgspec.structs.replace(precision, weights=online)
    if run.kv_cache is not None:
        precision = msgspec.structs.replace(precision, kv_cache=Format(run.kv_cache))
    return spec.name, precision


def _label(precision: Precision) -> str | None:
    """Return the name of these formats in the `precision` column."""
    narrowest = precision.experts_format if precision.experts_format is not Format.BF16 else precision.weights
    return LABELS.get(narrowest)


def _is_narrower(label: str, precision: Precision) -> bool:
    """Whether what `label` names cannot be what an engine makes of a checkpoint in `precision` when it loads it."""
    return (_label(precision), label) in (("bf16", "fp4"), ("bf16", "int4"), ("fp8", "fp4"), ("fp8", "int4"))


@cache
def _published(name: str, label: str) -> ModelSpec | None:
    """Return the catalog's checkpoint of the shape of `name` in the formats of `label`, where all such are equal.

    A later one that is named after the first (`...-NVFP4-V2`) was not there when most runs were made, which name it.
    """

    def shape(spec: ModelSpec) -> ModelSpec:
        return msgspec.structs.replace(spec, name="", precision=Precision())

    target = shape(catalog.model(name))
    specs = [catalog.model(other) for other in catalog.names("models")]
    specs = [spec for spec in specs if _label(spec.precision) == label and shape(spec) == target]
    first = min((spec.name for spec in specs), key=len, default="")
    if all(spec.name.startswith(first) for spec in specs):
        specs = [spec for spec in specs if spec.name == first]
    return specs[0] if specs and all(spec.precision == specs[0].precision for spec in specs) else None


def measurement_of(run: MeasuredRun) -> Measurement:
    """Return `run` with the scenario that it measured, or with the reason why there is none."""
    scenario, refused, precision = None, "", None
    speculates = run.speculative not in NOT_SPECULATIVE
    try:
        scenario = scenario_of(run, 0.0 if speculates else None)
        precision = scenario.precision
    except InputError as error:
        refused = reason_of(error)
    labels = {
        "engine": run.engine.name,
        "version": run.engine.version or "",
        "device": run.system,
        "model": (run.checkpoint or run.model).rpartition("/")[2],
        "format": "" if precision is None else f"{precision.weights}/{precision.experts_format}/{precision.kv_cache}",
        "parallelism": parallelism_label(run.parallelism, run.pools),
        "mode": DISAGGREGATED if run.pools else AGGREGATED,
        "prompt": str(run.input_tokens),
        "output": str(run.output_tokens),
        "concurrency": str(run.concurrency or ""),
        "source": run.source,
        "flags": " ".join(run.flags),
        "odd": ", ".join(flag for flag in run.flags if flag in ODD_FLAGS),
        "unmodelled": "; ".join(run.unmodelled),
        "assumed": run.assumed,
    }
    measured = {"tpot": run.tpot_s, "ttft": run.ttft_s, "e2e": run.e2e_s}
    is_odd = run.source in OFTEN_ODD or any(flag in ODD_FLAGS for flag in run.flags)
    weight = 0.0 if is_odd else UNRECORDED_WEIGHT if run.is_unrecorded else 1.0
    weight *= 1.0 if run.use == "primary" else SECONDARY_WEIGHT
    return Measurement(
        run.id,
        scenario,
        refused,
        measured,
        labels,
        run.use,
        weight=weight,
        unknown=_unknown(run),
        lacks_acceptance=speculates,
    )


def _unknown(run: MeasuredRun) -> tuple[str, ...]:
    """Return unrecorded settings, among those that decide how many requests and tokens a step takes."""
    names = ["max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"]
    if run.engine.name == "sglang":
        names.append("receive_interval_steps")
    return tuple(name for name in names if getattr(run.engine, name) is None) if run.is_unrecorded else ()


def _lengths(longest: int, range_ratio: float | None) -> Lengths:
    if range_ratio is None:
        low, high = round(longest * (1 - UNRECORDED_SPREAD)), round(longest * (1 + UNRECORDED_SPREAD))
        return Uniform(min_tokens=max(low, 1), max_tokens=high)
    # As `sample_random_requests` of https://github.com/kimbochen/bench_serving draws them.
    return longest if range_ratio == 1.0 else Uniform(min_tokens=max(1, int(range_ratio * longest)), max_tokens=longest)


def _recovered(measured: Row, recovered: Mapping[str, Row]) -> Row:
    identity = measured.required("id")
    if identity not in recovered:
        raise InputError(f"{measured.where}: {ROW_SETTINGS} has no row of id {identity!r}")
    return recovered[identity]


def _run(measured: Row, row: Row, servers: Mapping[str, Row]) -> MeasuredRun:
    settings_id = row.text("settings_id")
    if settings_id and settings_id not in servers:
        raise InputError(f"{row.where}: {ENGINE_SETTINGS} has no row of settings_id {settings_id!r}")
    concurrency = row.count_or_none("concurrency")
    server = servers[settings_id].at_load(concurrency) if settings_id else None
    engine = OTHER_ENGINE_NAMES.get(measured.required("backend").lower(), measured.required("backend").lower())
    if engine not in ENGINES:
        raise InputError(f"{measured.where}: backend is {measured.text('backend')!r}; known: {', '.join(ENGINES)}")
    pools: tuple[Pool, ...] = ()
    mode, assumed = row.required("true_mode"), ""
    if mode not in (AGGREGATED, DISAGGREGATED):
        raise InputError(f"{row.where}: true_mode is {mode!r}; known: {AGGREGATED}, {DISAGGREGATED}")
    is_generated = (row.text("source"), measured.text("system")) in GENERATED and concurrency is not None
    if mode == DISAGGREGATED:
        settings, pools, assumed = pools_of(engine, server)
        range_ratio = None if server is None else _range_ratio(server)
    elif server:
        settings, range_ratio = recorded_engine(engine, measured, row, server), _range_ratio(server)
    elif is_generated:
        settings, range_ratio = generated_engine(engine, measured, row.count("concurrency")), 1.0
    else:
        settings, range_ratio = default_engine(engine, measured), None
    return MeasuredRun(
        id=measured.required("id"),
        use=measured.required("use"),
        source=row.text("source"),
        speculative=row.required("speculative"),
        num_draft_tokens=_num_draft_tokens(server),
        system=measured.required("system"),
        model=measured.required("model_path"),
        checkpoint=(server.text("hf_model") or None) if server else None,
        precision=measured.text("precision") or None,
        gemm_format=measured.text("gemm_quant_mode") or None,
        kv_cache=_kv_cache(server) if server else None,
        parallelism=_replica_parallelism(measured, row) if mode == AGGREGATED else Parallelism(),
        engine=settings,
        input_tokens=measured.count("isl"),
        output_tokens=measured.count("osl"),
        range_ratio=range_ratio,
        concurrency=concurrency,
        rate_per_s=_rate(server) if server else None,
        num_requests=row.count_or_none("num_prompts"),
        num_warmup_requests=GENERATED_WARMUP * (concurrency or 0) if is_generated else _num_warmup(row),
        ttft_s=measured.number("silicon_ttft_ms") * 1e-3,
        tpot_s=measured.number("silicon_tpot_ms") * 1e-3,
        flags=tuple(row.text("flags").split()),
        unmodelled=_unmodelled(row, server),
        pools=pools,
        assumed=assumed,
    )


def _replica_parallelism(measured: Row, row: Row) -> Parallelism:
    return _recovered_parallelism(row) if row.text("true_tp") else _recorded_parallelism(measured)


def _recovered_parallelism(row: Row) -> Parallelism:
    """Return the recovered parallelism; attention data parallelism has one group for each of the `true_tp` devices."""
    num_devices, ep = row.count("true_tp"), row.count("true_ep")
    return _parallelism(row, 1, num_devices, ep) if row.truth("dp_attention") else _parallelism(row, num_devices, 1, ep)


def _recorded_parallelism(measured: Row) -> Parallelism:
    """Return the recorded parallelism; with experts `tp_size x groups = moe_tp_size x moe_ep_size`."""
    tp, pp = measured.count("tp_size"), measured.count_or_none("pp_size") or 1
    ep = measured.count_or_none("moe_ep_size") or 1
    num_ranks = ep * (measured.count_or_none("moe_tp_size") or 1)
    if num_ranks > 1 and num_ranks % tp:
        raise InputError(f"{measured.where}: moe_tp_size x moe_ep_size = {num_ranks} is no multiple of tp_size = {tp}")
    return _parallelism(measured, tp, max(num_ranks // tp, 1), ep, pp)


def _parallelism(row: Row, tp: int, attention_dp: int, ep: int, pp: int = 1) -> Parallelism:
    try:
        return Parallelism(tp=tp, attention_dp=attention_dp, ep=ep, pp=pp)
    except ValueError as error:
        raise InputError(f"{row.where}: {error}") from None


def _num_draft_tokens(server: Row | None) -> int | None:
    """Read `EAGLE(MTP) steps 2, topk 1, draft tokens 3`, where the third is the verified token, or
    `MTP num_nextn_predict_layers=3`; None without.
    """
    steps = re.search(r"(?:steps |num_nextn_predict_layers=)(\d+)", server.text("speculative") if server else "")
    return int(steps[1]) if steps else None


def _kv_cache(server: Row) -> str | None:
    """Read the KV format: `auto` is the checkpoint's (vLLM: `resolve_kv_cache_dtype_string`); `auto (bf16)` says it."""
    value = server.text("kv_cache_dtype").lower()
    both = re.fullmatch(r"p:(\S+) d:(\S+)", value)
    if both and both[1] != both[2]:
        raise InputError(f"its pools keep their KV caches in two formats, {both[1]} and {both[2]}")
    value = both[1] if both else value
    inner = re.fullmatch(r"(?:auto|default) \((\w+)\)", value)
    name = inner[1] if inner else value
    if is_default(name):
        return None
    if name not in KV_FORMATS:
        raise InputError(
            f"{server.where}: kv_cache_dtype is {server.text('kv_cache_dtype')!r}; known: auto, {', '.join(KV_FORMATS)}"
        )
    return KV_FORMATS[name]


def _range_ratio(server: Row) -> float | None:
    """Return the shortest length as a share of the longest; None where it was not recorded."""
    value = server.text("client_random_range_ratio")
    if not value:
        return None
    ratio = 0.0 if re.fullmatch(r"0(\.0*)?", value) else server.number("client_random_range_ratio")
    if ratio > 1:
        raise InputError(f"{server.where}: client_random_range_ratio is {value!r}; from 0 to 1 is needed")
    return ratio


def _rate(server: Row) -> float | None:
    """Return requests a second; None for `inf`, all at once."""
    column = "client_request_rate"
    is_recorded = column in server.values and server.text(column) not in ("", "inf")
    return server.number(column) if is_recorded else None


def _num_warmup(row: Row) -> int:
    """Read `2*CONC identical requests`, or none."""
    concurrency = row.count_or_none("concurrency")
    factor = re.match(r"(\d+)\*CONC", row.text("warmup"))
    return int(factor[1]) * concurrency if factor and concurrency else 0


_SCHEDULER_WORDS = r"(scheduler-recv-interval|schedule-conservativeness|batch_wait_\w+) [\d.]+|no batch wait|default"


def _unmodelled(row: Row, server: Row | None) -> tuple[str, ...]:
    """Return recorded settings that no scenario holds, of the scheduler's column or of the pools' columns.

    Prefix caching is not among them: the client draws every prompt anew, and no prefix is found.
    """
    settings = []
    if server is not None and row.text("true_mode") == DISAGGREGATED:
        settings += [setting for record in pool_records(server) for setting in record.unmodelled]
    if left := re.sub(_SCHEDULER_WORDS, "", row.text("scheduler")).strip(" ,;"):
        settings.append(left)
    return tuple(settings)
