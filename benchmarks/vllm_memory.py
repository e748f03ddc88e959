"""Memory of vLLM start-ups against the memory plan: weights, activation peak, memory outside PyTorch, KV cache.

    python benchmarks/vllm_memory.py DIR [--rows]

DIR holds `vllm_memory/*.csv`, tables of an accuracy report (llm-d-planner, pull request 205): starts of vLLM on one to
four H100; it is also taken from WINDTUNNEL_REFERENCE. Some tables give GiB; the others give the error of that planner,
from whose own formulas the measured figures follow: weights as the checkpoint's parameters, an activation constant for
each architecture, 80 GiB a card. The share of the memory is not in the tables: 0.95 or 0.90, whichever closes the sum.
Figures of a pipeline are its first stage's, which does not sample.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec

from reference import REFERENCE
from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import BITS, Format, Precision
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.defaults import with_defaults
from windtunnel.serving.setup.memory import plan_memory, profiled_memory
from windtunnel.units import GIB

FOLDER = "vllm_memory"
CARD_GIB, USABLE_GIB = 80.0, 79.19
"""Memory of the card in the planner, and as the README gives it."""
SHARES = (0.95, 0.90)
MOST_TOKENS = 8192
VERSION = "0.19.0"
ITEMS = ("weights", "activations", "outside PyTorch", "KV cache", "KV tokens")
ARCHITECTURES = {
    "Qwen2.5": "Qwen2",
    "Kimi-Dev": "Qwen2",
    "Qwen3-30B": "Qwen3Moe",
    "Qwen3": "Qwen3",
    "Qwen1.5-MoE": "Qwen2Moe",
    "DeepSeek-V2": "DeepseekV2",
    "gemma-2": "Gemma2",
    "gemma-3": "Gemma3",
    "gemma-7b": "Gemma",
    "granite-vision": "LlavaNext",
    "granite": "Granite",
    "Llama-4": "Llama4",
    "Llama": "Llama",
    "phi-4": "Phi3",
    "Kimi-VL": "KimiVL",
    "MiMo-VL": "Qwen2_5_VL",
}
"""Part of a model's name -> its architecture in table 06, the first that fits."""
LLAMA = "Llama-3.1-8B-Instruct"
COLUMNS = {
    "weights": "Weight err",
    "activations": "Activation err",
    "outside PyTorch": "Non-torch err",
    "KV cache": "KV cache err",
}
GIB_COLUMNS = {
    "weights": "Actual weight (GiB)",
    "activations": "Actual activ (GiB)",
    "outside PyTorch": "Actual non-torch (GiB)",
}
POOL_COLUMNS = {"KV cache": "Actual KV (GiB)", "KV tokens": "Actual tokens"}
VERSION_COLUMNS = {
    "weights": "Weight (GiB)",
    "activations": "Activation (GiB)",
    "outside PyTorch": "Non-torch (GiB)",
    "KV cache": "KV cache (GiB)",
}
LOADED_COLUMNS = {"weights": "Actual weight (GiB)", "KV cache": "Actual KV (GiB)"}


@dataclass(frozen=True)
class Start:
    """One start of vLLM; `measured` has GiB, and tokens under "KV tokens"."""

    table: str
    model: str
    measured: Mapping[str, float]
    tp: int = 1
    pp: int = 1
    max_model_len: int = MOST_TOKENS
    dtype: str = ""
    quantised: str = ""
    kv_dtype: str = ""
    version: str = VERSION
    share: float = SHARES[0]
    reason: str = ""
    """Why it cannot be scored."""

    @property
    def text(self) -> str:
        parts = [self.model, f"tp {self.tp}", f"pp {self.pp}", self.dtype, self.quantised, self.kv_dtype]
        return " ".join(part for part in parts if part not in ("", "auto", "bf16", "tp 1", "pp 1", "—"))


def rows_of(folder: Path, number: str) -> list[dict[str, str]]:
    """Return the rows of a table by its number."""
    (path,) = (folder / FOLDER).glob(f"{number}_*.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float:
    """Return the number in a cell such as `+1.5%`, `~2.21` or `476,016`."""
    return float(re.sub(r"[~,%+]", "", text))


def name_of(model: str) -> str:
    """Return the catalog's name of a model that a table may name without its organisation."""
    ends = [name for name in catalog.names("models") if name.lower().endswith("/" + model.lower().split("/")[-1])]
    return ends[0] if ends else model


def planned_gib(start: Start, model: ModelSpec, constants: Mapping[str, float]) -> dict[str, float]:
    """Return the planner's own figures of a device; its parameters are those of the checkpoint."""
    architecture = next(kind for part, kind in ARCHITECTURES.items() if part.lower() in start.model.lower())
    bits = BITS[precision_of(replace(start, dtype="", quantised=""), model).weights]
    count = count_parameters(model)
    tables = count.embedding + count.lm_head
    num_bytes = (count.total - tables) * bits / 8 + (tables + model.tower_parameters) * 2
    devices = start.tp * start.pp
    figures = {
        "weights": num_bytes / GIB / devices,
        "activations": constants[architecture],
        "outside PyTorch": 0.6 if start.tp > 1 else 0.15,
    }
    used = figures["weights"] + figures["activations"] / devices + figures["outside PyTorch"]
    return figures | {"KV cache": start.share * CARD_GIB - used}


def absolute(start: Start, errors: Mapping[str, float], constants: Mapping[str, float]) -> Start:
    """Return the start with measured figures in place of the planner's relative errors."""
    try:
        model = catalog.model(name_of(start.model))
    except InputError:
        return replace(start, reason="no config of this model in the catalog")
    candidates = []
    for share in SHARES:
        tried = replace(start, share=share)
        planned = planned_gib(tried, model, constants)
        figures = {item: value / (1 + errors[item] / 100) for item, value in planned.items()}
        candidates.append((abs(sum(figures.values()) - share * USABLE_GIB), replace(tried, measured=figures)))
    rest, closest = min(candidates, key=lambda candidate: candidate[0])
    if rest > 0.02 * USABLE_GIB:
        return replace(closest, reason=f"its figures leave {rest:.1f} GiB of the card open")
    return closest


def starts(folder: Path) -> Iterator[Start]:
    """Yield every row of the reference; those of one start in several tables come once for each."""
    constants = {row["Architecture"]: number(row["Planner constant (GiB)"]) for row in rows_of(folder, "06")}
    for row in rows_of(folder, "01"):
        yield absolute(Start("01", row["Model"], {}), measured(row, COLUMNS), constants)
    yield from loads(folder)
    yield from pools(folder)
    for row in rows_of(folder, "14"):
        start = Start("14", row["Model"], {}, int(row["TP"]), int(row["PP"]), int(row["max_len"]))
        start = replace(start, dtype=row["dtype"], quantised=row["quant"], kv_dtype=row["kv_dtype"])
        yield absolute(start, measured(row, COLUMNS), constants)


def measured(row: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, float]:
    """Return the figures in some columns of a row."""
    return {item: number(row[column]) for item, column in columns.items()}


def loads(folder: Path) -> Iterator[Start]:
    """Yield the rows of tables that give GiB of what is in use, by parallelism and version."""
    for row in rows_of(folder, "02"):
        yield Start("02", row["Model"], measured(row, GIB_COLUMNS), tp=int(row["TP"]))
    for table, model in (("03", LLAMA), ("04", "Qwen3-8B")):
        for row in rows_of(folder, table):
            yield Start(table, model, measured(row, GIB_COLUMNS), pp=int(row["PP"]))
    # The model's name is not in the table; its weights are those of this one alone.
    for row in rows_of(folder, "08"):
        version = row["vLLM version"].strip("v†")
        yield Start("08", "Qwen3-14B", measured(row, VERSION_COLUMNS), version=version)


def pools(folder: Path) -> Iterator[Start]:
    """Yield the rows of tables that give GiB and tokens of the KV cache, by context and formats."""
    for row in rows_of(folder, "05"):
        longest = int(number(row["max_model_len"]))
        yield Start("05", row["Model"], measured(row, POOL_COLUMNS), max_model_len=longest)
    for row in rows_of(folder, "10"):
        start = Start("10", row["Model"], measured(row, POOL_COLUMNS), kv_dtype=row["kv_cache_dtype"])
        if (row["Model"], row["kv_cache_dtype"]) == (LLAMA, "auto"):
            start = replace(start, reason="its figures are those of the float32 start in table 11")
        yield start
    for row in rows_of(folder, "11"):
        yield Start("11", LLAMA, measured(row, LOADED_COLUMNS), dtype=row["dtype"])
    for row in rows_of(folder, "12"):
        yield Start("12", row["Model"], measured(row, LOADED_COLUMNS), quantised="fp8")


def precision_of(start: Start, model: ModelSpec) -> Precision:
    """Return the formats of a start: the checkpoint's, but for what its options say."""
    own = model.precision
    weights = Format.FP8 if start.quantised == "fp8" else own.weights
    kv_cache = Format.FP8 if start.kv_dtype == "fp8" else own.kv_cache
    if start.dtype in ("f32", "float32"):
        weights = kv_cache = Format.FP32
    return msgspec.structs.replace(own, weights=weights, kv_cache=kv_cache)


def predicted(start: Start) -> dict[str, float]:
    """Return the plan's figures of a start's first pipeline stage, in GiB and tokens."""
    model = catalog.model(name_of(start.model))
    shape = Parallelism(tp=start.tp, pp=start.pp)
    shard, device = Shard(model, precision_of(start, model), shape), catalog.device("h100_sxm")
    given = EngineSettings(version=start.version, gpu_memory_utilization=start.share)
    engine = with_defaults(given, device, shape=shape)
    plan = plan_memory(shard, device, engine, start.max_model_len)
    first = profiled_memory(shard, device, engine, start.max_model_len, last_stage=start.pp == 1)
    return {
        "weights": first.weight_bytes / GIB,
        "activations": first.activation_bytes / GIB,
        "outside PyTorch": first.reserved_bytes / GIB,
        "KV cache": (plan.kv_cache_bytes + plan.activation_bytes - first.activation_bytes) / GIB,
        "KV tokens": plan.kv_tokens,
    }


def score(found: list[Start]) -> tuple[list[tuple[Start, str, float, float]], list[Start]]:
    """Return (start, item, measured, predicted) of every figure, and the starts that are refused, with the reason."""
    figures, refused = [], []
    for start in found:
        if start.reason:
            refused.append(start)
            continue
        try:
            values = predicted(start)
        except InputError as error:
            refused.append(replace(start, reason=error.message))
            continue
        figures += [(start, item, value, values[item]) for item, value in start.measured.items()]
    return figures, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=REFERENCE)
    parser.add_argument("--rows", action="store_true", help="print every figure")
    options = parser.parse_args()
    if not (options.folder / FOLDER).is_dir():
        sys.exit(f"error: {options.folder / FOLDER} is not there\nhint: give the folder that holds {FOLDER}")
    found = list(starts(options.folder))
    figures, refused = score(found)
    print("| item | figures | mean error | worst error | of |\n|---|---:|---:|---:|---|")
    for item in ITEMS:
        errors = [(abs(value / was - 1), start) for start, name, was, value in figures if name == item]
        worst, start = max(errors, key=lambda pair: pair[0])
        print(f"| {item} | {len(errors)} | {fmean(e for e, _ in errors):.2%} | {worst:.2%} | {start.text} |")
    print(f"\n{len(found) - len(refused)} of {len(found)} starts scored")
    for start in refused:
        print(f"refused: table {start.table}, {start.text}: {start.reason}")
    for start, item, was, value in figures if options.rows else []:
        what = f"table {start.table}, vLLM {start.version}, share {start.share}, {start.text}: {item}"
        print(f"{what} {was:.2f}, predicted {value:.2f} ({value / was - 1:+.2%})")


if __name__ == "__main__":
    main()
