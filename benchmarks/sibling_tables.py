"""How far tables measured on another device, at a device's own rates, are from the device's own tables.

    python benchmarks/sibling_tables.py

Operators of steps of six models are priced three times: by the device's tables, by another's at its rates
(`measured_as`), and by the roofline, which was fitted on the device too. Errors are |predicted / measured - 1| against
the first; collectives, and what the device's own tables lack, are left out. It says which devices that nobody measured
may take whose tables: those of the same chip or generation, not those of the generation before.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np

from windtunnel import catalog
from windtunnel.model.launches.forward import decode_launches, prefill_launches, token_launches
from windtunnel.model.operators import Launch
from windtunnel.model.shape import Shard
from windtunnel.pricing.aiconfigurator.estimator import measured_estimator
from windtunnel.pricing.estimator import Estimator, RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.serving.scenario import resolve, scenario_from
from windtunnel.serving.setup.estimators import shard_of

ENGINE = ("vllm", "0.24.0")
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": {"tp": 1},
    "meta-llama/Llama-3.3-70B-Instruct": {"tp": 8},
    "Qwen/Qwen3-30B-A3B": {"tp": 2},
    "Qwen/Qwen3-235B-A22B-FP8": {"tp": 8, "ep": 8},
    "openai/gpt-oss-120b": {"tp": 2},
    "deepseek-ai/DeepSeek-V3": {"tp": 8, "ep": 8},
}
PAIRS = (
    ("h100_sxm", "h200_sxm"),
    ("h200_sxm", "h100_sxm"),
    ("gb200", "b200_sxm"),
    ("b200_sxm", "b300_sxm"),
    ("b300_sxm", "b200_sxm"),
    ("b200_sxm", "h200_sxm"),
    ("h200_sxm", "a100_sxm"),
)
"""Devices, and those whose tables are taken: the same generation first, then the one before."""
TOKENS = np.array([1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0])
CONTEXTS, PROMPTS = np.array([256.0, 1024.0, 4096.0, 16384.0]), np.array([512.0, 2048.0, 8192.0])


def shard(model: str, device: str) -> Shard:
    deployment = {"device": device, "parallelism": MODELS[model], "engine": {"name": ENGINE[0]}}
    workload = {"arrivals": {"type": "burst"}, "input_tokens": 512, "output_tokens": 100, "num_requests": 1}
    return shard_of(resolve(scenario_from({"model": model, "deployment": deployment, "workload": workload})))


def launches(device: str) -> Iterator[Launch]:
    """Yield what steps of the models launch, collectives apart."""
    for model in MODELS:
        served = shard(model, device)
        yield from (each for each in token_launches(served, TOKENS) if not each.op.is_communication)
        for batch in (1.0, 16.0, 128.0):
            yield from decode_launches(served, batch, CONTEXTS)
        yield from prefill_launches(served, np.ones(PROMPTS.size), PROMPTS)


def compare(name: str, sibling: str) -> list[str]:
    """Return a row for each kind of operator."""
    device = catalog.device(name)
    node = catalog.default_node(device)
    own = measured_estimator(device, node, *ENGINE)
    others: tuple[Estimator, ...] = (
        measured_estimator(msgspec.structs.replace(device, measured_as=sibling), node, *ENGINE),
        RooflineEstimator(Roofline(device, node)),
    )
    errors: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for launch in launches(name):
        measured = own.estimate(launch.op)
        if "roofline" in measured.source:
            continue
        for place, estimator in enumerate(others):
            ratio = np.asarray(estimator.estimate(launch.op).seconds) / np.asarray(measured.seconds)
            errors[launch.op.kind][place].extend(np.abs(np.ravel(ratio) - 1.0))
    rows = []
    for kind, both in errors.items():
        cells = [f"{np.median(each):.1%} | {np.quantile(each, 0.9):.1%}" for each in both]
        rows.append(f"| {name} | {sibling} | {kind} | {len(both[0])} | {' | '.join(cells)} |")
    return rows


def main() -> int:
    print("| device | tables of | operators | points | median | p90 | roofline, median | p90 |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for name, sibling in PAIRS:
        print("\n".join(compare(name, sibling)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
