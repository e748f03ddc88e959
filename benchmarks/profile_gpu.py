"""Profile a dense and a mixture-of-experts model on the GPU at hand, and hold sums of operators against whole steps.

Made for machines lent for minutes: every stage ends by itself, and given again the command goes on where it stopped.

    python benchmarks/profile_gpu.py --out profiles/h100            # everything, about 20 minutes on one H100
    python benchmarks/profile_gpu.py --out profiles/h100 --minutes 9  # as much as fits; again, for the rest

Whole steps are those of the complete model, replayed as a CUDA graph, at batches and contexts that the profile does
not hold. What is left in `OUT/DEVICE/MODEL` is small: one Parquet file an operator, with device, driver, versions,
method and date inside, `device.yaml` and `check.json`. The measured steps beside it (`steps/`) are for going on.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from windtunnel import catalog
from windtunnel.lab.profile.compute import ComputePlan
from windtunnel.lab.profile.machine import free_memory_bytes
from windtunnel.lab.profile.model import LayerStack, StepShape, layer_weight_bytes
from windtunnel.lab.profile.run import ComputeProfile, profile_compute
from windtunnel.lab.profile.torch_steps import require_torch, whole_forward
from windtunnel.lab.timing import clock_for
from windtunnel.model.feed_forward.dense import DenseFeedForward
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.precision import Precision
from windtunnel.model.shape import ModelSpec, Shard
from windtunnel.pricing.profile import profile_estimator
from windtunnel.serving.setup.step_prices import price_step

MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")
BATCHES, CONTEXTS, CHUNKS = (1, 2, 8, 32, 48), (200, 700, 2500), (48, 200, 700, 1800)
"""Of the whole steps, between the points of the profile's grid."""
AIM = 0.07
"""Median |error| of a dense model's sums."""
REPEATS = 20
SHARE_OF_WEIGHTS = 0.7
"""Of the free memory that a whole model may take."""


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the profiles.")
@click.option("--device-name", default="h100_sxm", help="The GPU's name in the catalog, or a new one.  [h100_sxm]")
@click.option("--model", "models", multiple=True, default=MODELS, help="What to profile.  [one dense, one of experts]")
@click.option("--minutes", type=float, default=25.0, help="Stop in good time before so many are over.  [25]")
@click.option("--budget", type=float, default=240.0, help="Seconds to refine each model's profile.  [240]")
@click.option("--tp", default="1", help="Tensor-parallel splits of the profile.  [1]")
@click.option("--attention", default="sdpa", help="sdpa, flash_attn or flashinfer.  [sdpa]")
@click.option("--clock", default=None, help="cuda_event, cuda_graph or kineto.  [cuda_event]")
@click.option("--torch-device", default=None, help="cpu to try this script out.  [cuda where there is one]")
@click.option("--max-context", default=4096, help="Longest request of the profile.  [4096]")
@click.option("--max-batch", default=64, help="Most decoding requests of the profile.  [64]")
def main(
    out: Path,
    device_name: str,
    models: tuple[str, ...],
    minutes: float,
    budget: float,
    tp: str,
    attention: str,
    clock: str | None,
    torch_device: str | None,
    max_context: int,
    max_batch: int,
) -> None:
    ends_s = time.monotonic() + 60 * minutes
    device = require_torch(torch_device)
    worst_dense = 0.0
    for name in models:
        model = catalog.model(name)
        folder = out / device_name / model.name.replace("/", "--")
        left_s = ends_s - time.monotonic()
        if left_s < 30:
            sys.exit(f"no time is left for {model.name}: give the command again")
        plan = ComputePlan(
            tp=tuple(int(part) for part in tp.split(",")),
            torch_device=device,
            clock=clock,
            attention=attention,
            max_batch=max_batch,
            max_context=max_context,
            budget_s=min(budget, left_s / 2),
        )
        profile = profile_compute(model, Precision(), device_name, folder, plan, tell)
        errors = profile.closure_errors
        click.echo(f"\n{model.name}: {len(profile.steps)} steps of a few layers, ", nl=False)
        click.echo(f"sum of operators over the whole {np.median(errors):+.1%} median, {np.abs(errors).max():.1%} most")
        error = check(model, profile, device, attention, ends_s)
        if all(isinstance(group.feed_forward, DenseFeedForward) for group in model.layers):
            worst_dense = max(worst_dense, error or 0.0)
    if worst_dense > AIM:
        sys.exit(f"the sum of operators is off by {worst_dense:.1%}; the aim is {AIM:.0%}")


def tell(tp: int, num_steps: int, left_s: float | None, _error: float) -> None:
    click.echo(f"\r  tp {tp}: {num_steps} steps, {left_s or 0:.0f} s left   ", nl=False, err=True)


def check(model: ModelSpec, profile: ComputeProfile, device: str, attention: str, ends_s: float) -> float | None:
    """Median |error| of predicted whole steps; None where the model does not fit or no time is left."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()  # what the profile's layers held
    shard = Shard(model, Precision(), Parallelism())
    group = max(model.layers, key=lambda found: found.num_layers)
    weights_bytes = sum(layer_weight_bytes(shard, found) * found.num_layers for found in model.layers)
    if len(model.layers) > 1 or weights_bytes > SHARE_OF_WEIGHTS * free_memory_bytes(device):
        click.echo("  no whole step: its layers differ, or the model does not fit")
        return None
    done = read_checks(profile.folder)
    shapes = [shape for shape in wanted() if key(shape) not in done]
    if shapes:
        most = max(shape.batch * (shape.context + shape.chunk) for shape in shapes)
        stack = LayerStack(shard, group, group.num_layers, device, max(CHUNKS), most, attention)
        for shape in shapes:
            if time.monotonic() > ends_s - 20:
                sys.exit("the time is over: give the command again")
            done[key(shape)] = whole_s(stack, shape, clock_for(device, torch.get_num_threads()))
            (profile.folder / "check.json").write_text(json.dumps(done, indent=1) + "\n")
    estimator = profile_estimator(profile.folder, profile.device, None)
    errors = []
    for shape in wanted():
        sum_s = sum(launch.total_s for launch in price_step(estimator, shard, shape.step_batch))
        errors.append(sum_s / done[key(shape)] - 1)
        click.echo(f"  {key(shape):>24} {done[key(shape)] * 1e3:8.3f} ms, sum of operators {errors[-1]:+.1%}")
    found = float(np.median(np.abs(errors)))
    click.echo(f"  whole steps of all layers: median |error| {found:.1%}, most {np.abs(errors).max():.1%}")
    return found


def wanted() -> Iterator[StepShape]:
    yield from (StepShape(batch, context) for batch in BATCHES for context in CONTEXTS)
    yield from (StepShape(1, 0, chunk) for chunk in CHUNKS)


def key(shape: StepShape) -> str:
    return f"prefill {shape.chunk}" if shape.chunk else f"decode {shape.batch} x {shape.context}"


def whole_s(stack: LayerStack, shape: StepShape, clock: str) -> float:
    stack.prepare(shape)
    for _ in range(2):
        stack.run(shape, lambda _name: None)
    whole = whole_forward(lambda mark: stack.run(shape, mark), clock)
    return float(np.median([whole() for _ in range(REPEATS)]))


def read_checks(folder: Path) -> dict[str, float]:
    path = folder / "check.json"
    return json.loads(path.read_text()) if path.is_file() else {}


if __name__ == "__main__":
    main()
