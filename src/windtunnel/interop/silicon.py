"""Measured serving runs, a row each, as the scenarios that they were: three CSV files joined by `id` and `settings_id`.

`dev.csv` (or another file of its columns) holds the measurement, `row_settings.csv` what was recovered for the row
(true parallelism, client, limits), `engine_settings.csv` what was recovered for its configuration (image, memory,
formats). Where they differ the recovered value counts. The measurements are those of aiconfigurator-core 0.12, the
settings those of the InferenceX recipes that made them. Nothing is guessed: a row that leaves open what was run is
refused.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from windtunnel.errors import InputError, did_you_mean
from windtunnel.interop.measured_runs import UNRECORDED_SPREAD, Measurement
from windtunnel.spec import catalog
from windtunnel.spec.arrivals import ClosedLoop
from windtunnel.spec.deployment import (
    BALANCE_BATCHING_ITERS,
    BALANCE_TIMEOUT_ITERS,
    MOE_BACKENDS,
    Deployment,
    EngineSettings,
    Parallelism,
    Speculative,
)
from windtunnel.spec.lengths import Lengths, Uniform
from windtunnel.spec.precision import Format, Precision
from windtunnel.spec.scenario import Scenario
from windtunnel.spec.workload import Workload

ROW_SETTINGS, ENGINE_SETTINGS = "row_settings.csv", "engine_settings.csv"

AGGREGATED = "agg"

ENGINES = ("vllm", "sglang", "trtllm")

REQUESTS_PER_SLOT = {"vllm": 10, "sglang": 20, "trtllm": 20}
"""Requests per client slot where the number was not recorded: the digits of those rows' means are multiples of 1 / N
with these N."""

CLIENT_SEED = 0
"""Of every run whose client is known: the seed that it draws lengths from, its default."""

NOT_SPECULATIVE = ("none", "none?")

ODD_FLAGS = ("cold_start_no_warmup", "token_inflation_5x", "debug_run_c512", "gtl_client_unknown", "ttft>30%_of_e2e")
"""Rows that are not a steady run of what their settings say: no warm-up, prompts five times too long, a debugging run,
an unknown client, or mostly queueing."""
UNRECORDED_SOURCES = ("autogap", "gtl")
"""Collections of which neither server flags nor client settings are known; engine defaults are assumed."""
GENERATED = {("autogap", "h100_sxm")}
"""(collection, system) of which neither flags nor client were recorded, but what wrote them is known: AIConfigurator's
generator (`_generated`). That means of TensorRT-LLM and SGLang are multiples of 1 / (20 C) is the doing of its client,
which sends 20 requests for each of the concurrency. Those of other systems were rounded, and do not tell."""
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
"""What the `precision` column calls a checkpoint's narrowest format."""

ONLINE_FORMATS = {"fp8": Format.FP8, "fp8_block": Format.FP8_BLOCK}
"""`gemm_quant_mode` -> the format that an engine makes of a bf16 checkpoint when it loads it."""


@dataclass(frozen=True)
class Row:
    """One line of a file; its getters name file, line and column when a value is wrong."""

    values: Mapping[str, str]
    where: str

    def text(self, column: str) -> str:
        """The value, "" where it was left out."""
        if column not in self.values:
            raise InputError(f"{self.where}: there is no column {column!r}", did_you_mean(column, self.values))
        return self.values[column].strip()

    def required(self, column: str) -> str:
        """The value.

        Raises:
            InputError: it was left out.
        """
        value = self.text(column)
        if not value:
            raise InputError(f"{self.where}: {column} is empty")
        return value

    def number(self, column: str) -> float:
        """A number above zero."""
        value = self.required(column)
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise InputError(f"{self.where}: {column} is {value!r}; a number above zero is needed")
        return number

    def count(self, column: str) -> int:
        """A whole number above zero, maybe written as `8.0`."""
        number = self.number(column)
        if number != int(number):
            raise InputError(f"{self.where}: {column} is {self.text(column)!r}; a whole number is needed")
        return int(number)

    def count_or_none(self, column: str) -> int | None:
        """A whole number above zero, None where it was left out, is 0, or the engine's default was in force."""
        value = self.text(column)
        if not value or re.match(r"not set|engine default|default\b|0(\.0*)?$", value):
            return None
        return self.count(column)

    def truth(self, column: str) -> bool:
        """`True` or `False`; what was left out is not so."""
        value = self.text(column)
        if value not in ("True", "False", ""):
            raise InputError(f"{self.where}: {column} is {value!r}; True or False is needed")
        return value == "True"


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
    """Of one verification, with `mtp`."""
    system: str
    model: str
    """As the measurement names it."""
    checkpoint: str | None
    """What was loaded; None where only `model` and `precision` are known."""
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
    num_requests: int | None
    num_warmup_requests: int
    ttft_s: float
    tpot_s: float
    """Means over requests."""
    flags: tuple[str, ...]
    """What is odd about the row."""
    unmodelled: tuple[str, ...]
    """Recorded settings that have no counterpart in a scenario."""

    @property
    def mean_output_tokens(self) -> float:
        """Of the client's distribution."""
        return self.output_tokens * (1.0 if self.range_ratio is None else (1 + self.range_ratio) / 2)

    @property
    def e2e_s(self) -> float:
        """Mean latency of a request, from the two means that were measured."""
        return self.ttft_s + self.tpot_s * (self.mean_output_tokens - 1)

    @property
    def lengths_seed(self) -> int | None:
        """Of the client's draws, where the client is known and draws."""
        return None if self.range_ratio in (None, 1.0) else CLIENT_SEED


def is_silicon(path: Path) -> bool:
    """Whether a CSV file has the columns of this layout."""
    if path.suffix != ".csv":
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return "silicon_ttft_ms" in file.readline().split(",")


def read_runs(measurements: Path) -> list[MeasuredRun]:
    """The aggregated runs of a file of measurements (`dev.csv`); the two files of settings lie beside it.

    Rows that were truly run with separate pools for prefill and decode (`true_mode` is `disagg`) are left out.

    Raises:
        InputError: a file is missing, or a row is malformed; names file, line and column.
    """
    recovered = {row.required("id"): row for row in _rows(measurements.with_name(ROW_SETTINGS))}
    servers = {row.required("settings_id"): row for row in _rows(measurements.with_name(ENGINE_SETTINGS))}
    return [
        _run(measured, row, servers)
        for measured in _rows(measurements)
        if (row := _recovered(measured, recovered)).required("true_mode") == AGGREGATED
    ]


def scenario_of(run: MeasuredRun, acceptance_fraction: float | None = None) -> Scenario:
    """The scenario that `run` measured.

    Args:
        run: what was measured.
        acceptance_fraction: of draft tokens, which no row records; None refuses runs with speculative decoding.

    Raises:
        InputError: the row leaves open what was run, or it was something that a scenario cannot say.
    """
    engine = run.engine
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
    per_slot = REQUESTS_PER_SLOT[run.engine.name]
    model, precision = served_checkpoint(run)
    return Scenario(
        model=model,
        precision=precision,
        deployment=Deployment(
            device=run.system,
            parallelism=run.parallelism,
            engine=engine,
            settings_assumed=run.source in UNRECORDED_SOURCES,
        ),
        workload=Workload(
            arrivals=ClosedLoop(concurrency=run.concurrency, num_warmup_requests=run.num_warmup_requests),
            input_tokens=_lengths(run.input_tokens, run.range_ratio),
            output_tokens=_lengths(run.output_tokens, run.range_ratio),
            lengths_seed=run.lengths_seed,
            num_requests=run.num_requests or per_slot * run.concurrency,
        ),
    )


def served_checkpoint(run: MeasuredRun) -> tuple[str, Precision]:
    """The catalog's name of the checkpoint that `run` loaded, and the formats it was served in.

    Raises:
        InputError: the catalog does not have it, or its formats are not those recorded.
    """
    name = run.checkpoint or CHECKPOINTS.get((run.model, run.precision or ""), run.model)
    spec = catalog.model(name)
    precision = spec.precision
    narrowest = precision.experts_format if precision.experts_format is not Format.BF16 else precision.weights
    label = LABELS.get(narrowest)
    if run.precision not in (label, None):
        online = ONLINE_FORMATS.get(run.gemm_format or "")
        if run.precision != "fp8" or label != "bf16" or online is None:
            raise InputError(f"it was run in {run.precision}, and {spec.name} is a checkpoint in {label}")
        precision = msgspec.structs.replace(precision, weights=online)
    if run.kv_cache is not None:
        precision = msgspec.structs.replace(precision, kv_cache=Format(run.kv_cache))
    return spec.name, precision


def measurement_of(run: MeasuredRun) -> Measurement:
    """`run` with the scenario that it measured, or with the reason why there is none."""
    scenario, refused, precision = None, "", None
    speculates = run.speculative not in NOT_SPECULATIVE
    try:
        scenario = scenario_of(run, 0.0 if speculates else None)
        precision = scenario.precision
    except InputError as error:
        refused = error.message
    shape = run.parallelism
    widths = {"tp": shape.tp, "pp": shape.pp, "ep": shape.ep, "dp": shape.attention_dp}
    labels = {
        "engine": run.engine.name,
        "version": run.engine.version or "",
        "device": run.system,
        "model": (run.checkpoint or run.model).rpartition("/")[2],
        "format": "" if precision is None else f"{precision.weights}/{precision.experts_format}/{precision.kv_cache}",
        "parallelism": " ".join(f"{name}{width}" for name, width in widths.items() if width > 1 or name == "tp"),
        "prompt": str(run.input_tokens),
        "output": str(run.output_tokens),
        "concurrency": str(run.concurrency or ""),
        "source": run.source,
        "flags": " ".join(run.flags),
        "unmodelled": "; ".join(run.unmodelled),
    }
    measured = {"tpot": run.tpot_s, "ttft": run.ttft_s, "e2e": run.e2e_s}
    is_odd = run.source in OFTEN_ODD or any(flag in ODD_FLAGS for flag in run.flags)
    weight = 0.0 if is_odd else UNRECORDED_WEIGHT if run.source in UNRECORDED_SOURCES else 1.0
    weight *= 1.0 if run.use == "primary" else SECONDARY_WEIGHT
    return Measurement(run.id, scenario, refused, measured, labels, run.use, weight=weight, lacks_acceptance=speculates)


def _lengths(most: int, range_ratio: float | None) -> Lengths:
    if range_ratio is None:
        low, high = round(most * (1 - UNRECORDED_SPREAD)), round(most * (1 + UNRECORDED_SPREAD))
        return Uniform(min_tokens=max(low, 1), max_tokens=high)
    return most if range_ratio == 1.0 else Uniform.of_range_ratio(most, range_ratio)


def _rows(path: Path) -> Iterator[Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no file {path}", "the three files of the layout lie in one folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    lines = csv.reader(text.splitlines())
    header = next(lines, [])
    for line in lines:
        where = f"{path.name} line {lines.line_num}"
        if len(line) != len(header):
            raise InputError(f"{where} has {len(line)} values for {len(header)} columns")
        yield Row(dict(zip(header, line, strict=True)), where)


def _recovered(measured: Row, recovered: Mapping[str, Row]) -> Row:
    identity = measured.required("id")
    if identity not in recovered:
        raise InputError(f"{measured.where}: {ROW_SETTINGS} has no row of id {identity!r}")
    return recovered[identity]


def _run(measured: Row, row: Row, servers: Mapping[str, Row]) -> MeasuredRun:
    settings_id = row.text("settings_id")
    if settings_id and settings_id not in servers:
        raise InputError(f"{row.where}: {ENGINE_SETTINGS} has no row of settings_id {settings_id!r}")
    server = servers[settings_id] if settings_id else None
    engine = measured.required("backend")
    if engine not in ENGINES:
        raise InputError(f"{measured.where}: backend is {engine!r}; known: {', '.join(ENGINES)}")
    concurrency = row.count_or_none("concurrency")
    is_generated = (row.text("source"), measured.text("system")) in GENERATED and concurrency is not None
    if server:
        settings, range_ratio = _engine(engine, row, server), server.number("client_random_range_ratio")
    elif is_generated:
        settings, range_ratio = _generated(engine, measured, row.count("concurrency")), 1.0
    else:
        settings, range_ratio = _default_engine(engine, measured), None
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
        parallelism=_recovered_parallelism(row) if row.text("true_tp") else _recorded_parallelism(measured),
        engine=settings,
        input_tokens=measured.count("isl"),
        output_tokens=measured.count("osl"),
        range_ratio=range_ratio,
        concurrency=concurrency,
        num_requests=row.count_or_none("num_prompts"),
        num_warmup_requests=GENERATED_WARMUP * (concurrency or 0) if is_generated else _num_warmup(row),
        ttft_s=measured.number("silicon_ttft_ms") * 1e-3,
        tpot_s=measured.number("silicon_tpot_ms") * 1e-3,
        flags=tuple(row.text("flags").split()),
        unmodelled=_unmodelled(server),
    )


def _recovered_parallelism(row: Row) -> Parallelism:
    """Attention data parallelism runs one group of one device for each of the `true_tp` devices."""
    num_devices, ep = row.count("true_tp"), row.count("true_ep")
    return _parallelism(row, 1, num_devices, ep) if row.truth("dp_attention") else _parallelism(row, num_devices, 1, ep)


def _recorded_parallelism(measured: Row) -> Parallelism:
    """From the measurement's own columns; with experts `tp_size x groups = moe_tp_size x moe_ep_size`."""
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


def _engine(name: str, row: Row, server: Row) -> EngineSettings:
    fraction = server.text("gpu_mem_util_or_mem_fraction_static_or_kv_free_fraction")
    prefill = re.search(r"\d+", server.text("max_prefill_tokens"))
    interval = re.search(r"scheduler-recv-interval (\d+)", row.text("scheduler"))
    wait_steps = re.search(r"batch_wait_timeout_iters (\d+)", row.text("scheduler"))
    wait_ratio = re.search(r"batch_wait_max_tokens_ratio ([\d.]+)", row.text("scheduler"))
    return EngineSettings(
        name=name,
        version=image_version(server.text("engine_image")),
        max_num_seqs=row.count_or_none("max_num_seqs"),
        max_num_batched_tokens=row.count_or_none("max_batched_tokens"),
        max_prefill_tokens=int(prefill[0]) if prefill else None,
        max_cudagraph_capture_size=row.count_or_none("cuda_graph_max_bs"),
        piecewise_cudagraphs=_piecewise_cudagraphs(row, server),
        block_size=server.count_or_none("block_size"),
        gpu_memory_utilization=None
        if fraction.startswith("not set")
        else server.number("gpu_mem_util_or_mem_fraction_static_or_kv_free_fraction"),
        receive_interval_steps=int(interval[1]) if interval else None,
        async_scheduling=_switch(server.text("async_or_overlap_scheduling")),
        batch_wait_timeout_iters=int(wait_steps[1]) if wait_steps else None,
        batch_wait_max_tokens_ratio=float(wait_ratio[1]) if wait_ratio else None,
        attention_dp_timeout_iters=_balance(server, "timeout_iters", BALANCE_TIMEOUT_ITERS),
        attention_dp_batching_wait_iters=_balance(server, "batching_wait_iters", BALANCE_BATCHING_ITERS),
        moe_backend=_moe_backend(server),
        fused_all_reduce=_fused_all_reduce(server),
    )


def _switch(text: str) -> bool | None:
    """`on (default)`, `async-scheduling on`, `off`; None where the engine's own default was in force."""
    found = re.match(r"(?:async-scheduling )?(on|off)\b", text)
    return found[1] == "on" if found else None


def _moe_backend(server: Row) -> str | None:
    """The family of kernels that a flag or variable named: `flashinfer_trtllm`, `Marlin (VLLM_...)`, `DEEPGEMM`.

    Of `FlashInfer FP8 MoE off, DeepGEMM MoE off (Triton)` what is off does not count. None: the engine chose.
    """
    text = re.sub(r"\w+( \w+)* off\b", "", server.text("moe_backend").lower())
    return next((name for name in MOE_BACKENDS if name in text), None)


def _balance(server: Row, name: str, default: int) -> int | None:
    """`batching_wait_iters 0, enable_balance true, timeout_iters 60`; None where it is off."""
    text = server.text("attention_dp_config")
    found = re.search(rf"{name} (\d+)", text)
    return (int(found[1]) if found else default) if "enable_balance true" in text else None


def _piecewise_cudagraphs(row: Row, server: Row) -> bool | None:
    """`FULL_AND_PIECEWISE`, `FULL_DECODE_ONLY`; `c4-8: padding on; piecewise off; c16-64: padding on; piecewise on`
    where it goes by the client's concurrency; None: the engine's default.
    """
    text = server.text("cuda_graph")
    concurrency = row.count_or_none("concurrency") or 0
    for low, high, switch in re.findall(r"(?:c(\d+)(?:-(\d+))?: )?[\w ]+; piecewise (on|off)", text):
        if not low or int(low) <= concurrency <= int(high or low):
            return bool(switch == "on")
    return True if "PIECEWISE" in text else False if "FULL_DECODE_ONLY" in text else None


def _num_draft_tokens(server: Row | None) -> int | None:
    """`EAGLE(MTP) steps 2, topk 1, draft tokens 3`, where the third is the verified token, or
    `MTP num_nextn_predict_layers=3`; None without.
    """
    found = re.search(r"(?:steps |num_nextn_predict_layers=)(\d+)", server.text("speculative") if server else "")
    return int(found[1]) if found else None


def _fused_all_reduce(server: Row) -> bool | None:
    """`all-reduce fusion on`, `fuse_allreduce_rms`, `all-reduce fusion off`; None: the engine's default."""
    found = re.search(r"all-reduce fusion (on|off)|fuse_allreduce_rms", server.text("gemm_and_allreduce_fusion"))
    return found and found[1] != "off"


def _default_engine(name: str, measured: Row) -> EngineSettings:
    """Nothing but the version was recorded."""
    return EngineSettings(name=name, version=measured.text("backend_version") or None)


def _generated(name: str, measured: Row, concurrency: int) -> EngineSettings:
    """What AIConfigurator's generator writes for a server whose batch is the client's concurrency.

    Source: aiconfigurator 0.12 `generator/rule_plugin/{trtllm,vllm,sglang}.rule` and
    `generator/config/backend_templates/trtllm/extra_engine_args.1.0.0rc3.yaml.j2`; its client in
    `backend_templates/benchmark/bench_run.sh.j2` and `deployment_config.yaml`: lengths without deviation.
    """
    longest, of_trtllm = measured.count("isl") + GENERATED_SLACK_TOKENS[name], name == "trtllm"
    return EngineSettings(
        name=name,
        version=measured.text("backend_version") or None,
        max_num_seqs=concurrency,
        max_num_batched_tokens=None if name == "sglang" else concurrency + longest,
        max_prefill_tokens=longest if name == "sglang" else None,
        max_cudagraph_capture_size=concurrency,
        cudagraph_sizes=tuple(range(1, concurrency + 1)),
        gpu_memory_utilization=0.8 if of_trtllm else None,
        enable_prefix_caching=False if of_trtllm else None,
    )


GENERATED_SLACK_TOKENS = {"vllm": 1500, "sglang": 1500, "trtllm": 1000}
"""What the generator's token budget adds to the prompt. Its first version, of the summer of TensorRT-LLM 1.0.0rc3,
writes 1,500 as all later ones do, below a comment that says "+1000 is for holding the largest isl"; budgets in whole
blocks came later. The runs speak for the comment. With 1,500, two prompts of 1,024 tokens or three of 512 share a step;
what another request's prompt adds, by TPOT of two output lengths, is a step for each prompt of 1,024 (Llama-3.1-8B on
four devices: 11 to 17 ms, as for 2,048 tokens) and half a step for each of 512."""


def image_version(image: str) -> str | None:
    """The engine's release in its image's tag: `vllm/vllm-openai:v0.19.0-cu130` -> `0.19.0`; None for other builds."""
    tag = image.partition(" ")[0].rpartition(":")[2]
    release = re.match(r"v?(\d+\.\d+(?:\.\d+)*(?:\.?(?:rc|post)\d+)*)", tag)
    return release[1] if release else None


def _kv_cache(server: Row) -> str | None:
    """`auto` takes the checkpoint's own format (vLLM: `resolve_kv_cache_dtype_string`)."""
    value = server.text("kv_cache_dtype")
    known = {"fp8": "fp8", "fp8_e4m3": "fp8", "auto (bf16)": "bf16", "bf16": "bf16", "auto": None, "": None}
    if value not in known:
        raise InputError(f"{server.where}: kv_cache_dtype is {value!r}; known: {', '.join(known)}")
    return known[value]


def _num_warmup(row: Row) -> int:
    """`2*CONC identical requests`, or none."""
    concurrency = row.count_or_none("concurrency")
    found = re.match(r"(\d+)\*CONC", row.text("warmup"))
    return int(found[1]) * concurrency if found and concurrency else 0


def _unmodelled(server: Row | None) -> tuple[str, ...]:
    found = []
    if server is not None and server.text("prefix_caching").startswith("ON"):
        found.append("prefix caching")
    return tuple(found)
