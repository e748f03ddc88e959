"""Rows of MLPerf Training's results, under the names of the other tables and completed from each other.

Submitters run NVIDIA's configurations; one that logs no layout has that of the others with its benchmark, device,
number of devices and batch, or else the most usual one of its device for as many ranks of a model. Where its device's
logged runs differ in context parallelism alone, its own follows from its ranks; otherwise it is that of any device. A
logged layout that contradicts the logged micro-batches counts as none. Gaudi's have their own (`GAUDI_LAYOUTS`). One
with as many replicas as devices, and no known layout, is taken for the benchmark's reference (mlcommons/training,
llama2_70b_lora): ZeRO-3 of DeepSpeed, bf16, layers recomputed.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping

Row = Mapping[str, str]
Layouts = Counter[tuple[str, ...]]
"""How many runs have a tensor, pipeline and context parallelism."""
GAUDI_LAYOUTS = ((8, 8, 1), (8, 8, 2), (8, 6, 2))
"""Tensor and pipeline parallelism and micro-batch of GPT-3 on Gaudi 2: 8 x 8, with 2 sequences at once from round 3.1
on (Intel-HabanaLabs/benchmarks/gpt3/README.md of training_results_v4.0); on 384 of them only 8 x 6 gives the logged
steps."""
SHORTEST_MIN = 3.0
"""Minutes of a run below which its start weighs too much in its time for a step to follow from it."""


def completed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows with layouts of equal runs, and with the step that throughput or time to train leaves."""
    layouts: dict[tuple[str, ...], Layouts] = {}
    depths: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    # A log may name a configuration that its own micro-batches contradict: 2 of the 65 that tell both.
    rows = [row if _agrees(row) else row | {"tp": "", "pp": "", "cp": ""} for row in rows]
    for row in rows:
        if row["tp"]:
            for key in filter(None, (*_keys(row), _of_any_device(row), _of_device(row))):
                layouts.setdefault(key, Counter())[tuple(row[name] for name in ("tp", "pp", "cp"))] += 1
        if row["vp"]:
            depths.setdefault(_pipeline(row), []).append((row["round"], row["vp"]))
    rows = [row | {"step_time_s_median": row["step_time_s_median"] or _logged_step(row)} for row in rows]
    shares = _step_shares(rows)
    filled = []
    for row in rows:
        row = dict(row)
        if not row["tp"]:
            known = next((layouts[key] for key in _keys(row) if key in layouts), None)
            if shared := _of_any_device(row):
                known = known or _spread_as_others(row, layouts) or layouts.get(shared)
            if gaudi := _gaudi_layout(row):
                row |= gaudi
            elif known:
                row |= dict(zip(("tp", "pp", "cp"), known.most_common(1)[0][0], strict=True))
            elif _ranks(row).startswith("1 "):
                row |= {"tp": "1", "pp": "1", "cp": "1", "fsdp": "FULL_SHARD", "act_ckpt": "full"}
        if not row["vp"] and (near := depths.get(_pipeline(row))):
            row["vp"] = min(near, key=lambda at: (_distance(at[0], row["round"]), at[0]))[1]
        if not row["step_time_s_median"] and row["benchmark"] in shares and (whole := _seconds_to_train(row)):
            row["step_time_s_median"] = str(whole * shares[row["benchmark"]])
        filled.append(row)
    return filled


def _keys(row: Row) -> list[tuple[str, ...]]:
    """Return what equal configurations share, the closest first."""
    device = _of_device(row)
    run = (*device, row["n_accel"], row["global_batch_size"])
    model = (*device, _ranks(row))
    return [(*run, row["grad_accum"], row["round"]), (*run, row["grad_accum"]), (*model, row["round"]), model]


def _of_device(row: Row) -> tuple[str, str]:
    return row["benchmark"], re.sub(r"[^a-z0-9]", "", row["accelerator"].lower())


def _of_any_device(row: Row) -> tuple[str, ...]:
    """Return what runs of a benchmark share on any device; none where each device holds a model, and on Gaudi."""
    return () if _is_gaudi(row) or _ranks(row).startswith("1 ") else (row["benchmark"], "any", _ranks(row))


def _spread_as_others(row: Row, layouts: Mapping[tuple[str, ...], Layouts]) -> Layouts | None:
    """Return the layout for these ranks on a device whose logged runs differ in context parallelism alone."""
    logged = layouts.get(_of_device(row), Counter())
    splits = {(tp, pp or "1") for tp, pp, _ in logged}
    if len(splits) != 1 or len({cp for *_, cp in logged}) < 2 or not re.match(r"\d+ ", _ranks(row)):
        return None
    ((tp, pp),) = splits
    cp = float(_ranks(row).split()[0]) / (float(tp) * float(pp))
    return Counter([(tp, pp, f"{cp:g}")]) if cp >= 1 and cp.is_integer() else None


def _agrees(row: Row) -> bool:
    """Return whether replicas x micro-batch x micro-batches of a layout make the batch; True if one is unknown."""
    try:
        ranks, micro_batches, batch = (float(row[name]) for name in ("tp", "grad_accum", "global_batch_size"))
    except ValueError:
        return True
    ranks *= float(row["pp"] or 1) * float(row["cp"] or 1)
    return float(row["n_accel"]) / ranks * float(row["mbs"] or 1) * micro_batches == batch


def _is_gaudi(row: Row) -> bool:
    return "gaudi" in row["accelerator"].lower()


def _gaudi_layout(row: Row) -> dict[str, str] | None:
    """Return the layout of GPT-3 on Gaudi that gives the logged number of micro-batches."""
    if not _is_gaudi(row) or row["benchmark"] != "gpt3" or not row["grad_accum"]:
        return None
    batch, accumulated = float(row["global_batch_size"]), float(row["grad_accum"])
    for tp, pp, micro_batch in GAUDI_LAYOUTS:
        if float(row["n_accel"]) / (tp * pp) * micro_batch * accumulated == batch:
            return {"tp": str(tp), "pp": str(pp), "cp": "1", "mbs": str(micro_batch)}
    return None


def _ranks(row: Row) -> str:
    """Return the devices of a model with micro-batches of one sequence: devices x accumulated / batch."""
    try:
        ranks = float(row["n_accel"]) * float(row["grad_accum"]) / float(row["global_batch_size"])
    except (ValueError, ZeroDivisionError):
        return "unknown"
    return f"{ranks:g} a model"


def _pipeline(row: Row) -> tuple[str, ...]:
    return (row["benchmark"], row["accelerator"], row["tp"], row["pp"])


def _distance(first: str, second: str) -> float:
    return abs(float(first.lstrip("v")) - float(second.lstrip("v")))


def _logged_step(row: Row) -> str:
    """Return the seconds of a step by the throughput of a log; none for GPT-3's, which contains evaluation."""
    if row["benchmark"] == "gpt3" or not row.get("logged_throughput_raw"):
        return ""
    return str(float(row["global_batch_size"]) / float(row["logged_throughput_raw"]))


def _seconds_to_train(row: Row) -> float | None:
    """Return the time to train over the optimizer steps until the target; samples are tokens in GPT-3's logs."""
    try:
        samples, batch = float(row["samples_at_stop_median"]), float(row["global_batch_size"])
        length, minutes = float(row["seq_len"]), float(row["time_to_train_min_olympic"])
    except ValueError:
        return None
    steps = samples / batch / (length if row["benchmark"] == "gpt3" else 1.0)
    return minutes * 60 / steps if minutes >= SHORTEST_MIN else None


def _step_shares(rows: list[dict[str, str]]) -> dict[str, float]:
    """Return the share of the time to train that steps take, the rest is evaluation; median of runs that log both."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        if row["step_time_s_median"] and (whole := _seconds_to_train(row)):
            shares.setdefault(row["benchmark"], []).append(float(row["step_time_s_median"]) / whole)
    return {name: statistics.median(found) for name, found in shares.items()}


def renamed(row: Row, columns: tuple[str, ...]) -> dict[str, str]:
    """Return a row under the names of the other tables."""

    def is_set(name: str) -> bool:
        return row.get(name, "").lower() in ("true", "1", "1.0")

    # NVIDIA's GPT-3 and Llama submissions compute in fp8 from round 3.0 on, whether or not the log says so; an A100
    # cannot. Google's of GPT-3 quantise products to int8 (google/aqt).
    # Gaudi 2 does from round 3.1 on (README of training_results_v4.0).
    is_later_gaudi = _is_gaudi(row) and row["round"] > "v3.0" and row["benchmark"] == "gpt3"
    is_usual = bool(re.match(r"(NVIDIA (?!A100)|AMD)", row["accelerator"]))
    computes_in_fp8 = is_set("fp8") or is_usual or is_later_gaudi
    usual = "aqt-int8" if "TPU" in row["accelerator"] else "fp8" if computes_in_fp8 else "bf16"
    is_reference = bool(row.get("fsdp"))
    usual = "bf16" if is_reference else usual
    return dict.fromkeys(columns, "") | {
        "source": f"MLPerf Training {'reference ' * is_reference}{row['round']}",
        "model": row["benchmark"].replace("llama31_405b", "llama31-405b"),
        "accelerator": row["accelerator"],
        "n_gpus": row["n_accel"],
        "precision": "nvfp4" if is_set("fp4") else usual,
        "gbs": row["global_batch_size"],
        "mbs": row["mbs"],
        "seq_len": row["nominal_seq_len"] or row["seq_len"],
        **{name: row[name] for name in ("tp", "pp", "cp", "vp")},
        **{name: row.get(name, "") for name in ("fsdp", "act_ckpt")},
        "iter_time_s": row["step_time_s_median"],
        "mem_GB": row["max_memory_GB"],
    }
