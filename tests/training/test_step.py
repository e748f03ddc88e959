"""A simulated training step: its parts add up, faster with better means, and it is as fast to simulate as promised."""

import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from windtunnel.catalog import device
from windtunnel.errors import InputError
from windtunnel.metrics.uncertainty import Spread
from windtunnel.pricing.estimator import RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode, encode
from windtunnel.training.campaign import campaign
from windtunnel.training.fitting_changes import fitting_changes
from windtunnel.training.job import TrainingJob, load
from windtunnel.training.layers.chunks import LayerChunk, chunk_parameters, chunks
from windtunnel.training.layers.part import Task
from windtunnel.training.layers.rank import Rank
from windtunnel.training.layers.sharding import reduce_tasks
from windtunnel.training.program import device_program
from windtunnel.training.setup import TrainingSetup, resolve
from windtunnel.training.step import (
    TrainingResult,
    simulate_training,
    simulate_with,
    spreads,
    step_interval,
    training_prices,
)

JOB: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "device": "h100_sxm",
    "num_devices": 32,
    "sequence_tokens": 8192,
    "global_batch": 64,
    "parallelism": {"tp": 2, "pp": 4},
}


def step(**changes: Any) -> TrainingResult:
    setup = resolve(decode({**JOB, **changes}, TrainingJob))
    return simulate_training(setup, RooflineEstimator(Roofline(setup.device, setup.node)))


def test_the_breakdown_adds_up_to_the_step() -> None:
    for changes in ({}, {"schedule": "zb_h1"}, {"framework": "fsdp2", "parallelism": {}}, {"schedule": "dualpipe"}):
        result = step(**changes)
        assert sum(result.breakdown_s.values()) == pytest.approx(result.step_s, rel=1e-6)
        assert min(result.breakdown_s.values()) >= 0


@pytest.mark.full
def test_measured_times_are_scaled_to_the_arithmetic_of_a_device_of_ones_own_and_not_to_its_memory() -> None:
    """Arithmetic bounds most of a step; the sustained rates were fitted on cards of other memories too."""
    h100 = device("h100_sxm")
    twice = msgspec.structs.replace(
        h100, peak_flops_per_s={name: 2 * rate for name, rate in h100.peak_flops_per_s.items()}
    )
    memory = msgspec.structs.replace(h100, memory_bytes_per_s=h100.memory_bytes_per_s / 2)
    steps = [simulate_training(load({**JOB, "device": encode(each)})).step_s for each in (h100, twice, memory)]
    assert steps[0] == simulate_training(load(JOB)).step_s
    assert 0.5 < steps[1] / steps[0] < 0.75
    assert steps[2] == pytest.approx(steps[0], rel=0.01)


@pytest.mark.parametrize("layers", [[0, 16, 16, 0], [11, 0, 11, 10]])
def test_a_stage_may_hold_no_layers_where_parameters_are_sharded(layers: list[int]) -> None:
    result = step(framework="fsdp2", parallelism={"pp": 4, "layers_per_stage": layers})
    assert sum(result.breakdown_s.values()) == pytest.approx(result.step_s, rel=1e-6)


def test_no_step_is_faster_than_the_peaks_of_its_formats() -> None:
    slow = {"device": "a100_sxm", "sequence_tokens": 32768, "parallelism": {"tp": 8}, "precision": {"compute": "fp32"}}
    result = step(**slow)
    assert result.flops_per_s_per_device > 19.5e12
    assert 0.5 < result.mfu < result.hfu < 1
    assert step(**slow, recompute={"granularity": "full"}).hfu < 1
    assert step(precision={"compute": "fp8"}).peak_flops_per_s == 1979e12


def test_the_same_job_gives_the_same_numbers() -> None:
    assert step().step_s == step().step_s


def test_more_micro_batches_shrink_the_bubble() -> None:
    # A model whose head is light beside its layers.
    light = {"model": "meta-llama/Llama-2-70b-hf", "sequence_tokens": 4096}
    bubbles = [step(global_batch=batch, **light).bubble_fraction for batch in (32, 64, 256)]
    assert bubbles == sorted(bubbles, reverse=True)
    # 1F1B: (p - 1) / (m + p - 1), up to the head's weight on the last stage.
    assert bubbles[2] == pytest.approx(3 / 67, abs=0.03)


def test_pytorchs_own_attention_is_slower_on_hopper_alone() -> None:
    seconds = {
        (device, kernel): step(device=device, kernels={"attention": kernel}).breakdown_s["attention"]
        for device in ("h100_sxm", "a100_sxm")
        for kernel in ("flash", "flash2")
    }
    assert seconds["h100_sxm", "flash2"] == pytest.approx(1.75 * seconds["h100_sxm", "flash"])
    assert seconds["a100_sxm", "flash2"] == seconds["a100_sxm", "flash"]
    older, newer = (step(kernels={"attention": kernel}) for kernel in ("flash2", "flash"))
    assert older.hardware_flops == newer.hardware_flops
    assert step(framework="deepspeed", parallelism={}).setup.job.kernels.attention == "flash2"


def test_recomputation_takes_time_and_saves_memory() -> None:
    plain, full = step(), step(recompute={"granularity": "full"})
    assert 1.15 < full.step_s / plain.step_s < 1.4
    assert full.worst_memory.activations_bytes < plain.worst_memory.activations_bytes / 5
    assert full.hfu / full.mfu == pytest.approx(4 / 3, rel=0.05)
    unfused = step(kernels={"attention": "unfused"})
    assert unfused.hfu == unfused.mfu


def test_better_means_never_cost_time() -> None:
    base = step().step_s
    assert step(overlap={"tensor_parallel": True}).step_s < base
    assert step(overlap={"gradient_reduce": False, "parameter_gather": False}).step_s > base
    assert step(parallelism={"tp": 2, "pp": 4, "virtual_stages": 4}).step_s < base
    assert step(overlap={"pipeline": False}).step_s > base


def test_ranks_that_keep_their_share_of_gradients_reduce_them_in_every_pass() -> None:
    whole, shared = ({"framework": "deepspeed", "parallelism": {}, "sharding": {"zero": zero}} for zero in (1, 2))
    assert step(**shared).step_s > step(**whole).step_s
    assert step(**shared, global_batch=32).step_s == step(**whole, global_batch=32).step_s
    later = {"overlap": {"gradient_reduce": False}, "global_batch": 128}
    plain, often = step(**whole, **later).breakdown_s, step(**shared, **later).breakdown_s
    # Four micro-batches: three reductions beside the one that ends a step.
    once = plain["exposed gradient reduction"]
    assert often["exposed gradient reduction"] == once
    assert 3 * once < often["exposed communication (dp)"] < 3.5 * once


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"parallelism": {"tp": 8}}, 16),
        ({"parallelism": {"tp": 8}, "overlap": {"gradient_reduce": False}}, 16),
        ({"parallelism": {"tp": 2, "pp": 4, "virtual_stages": 4}}, 4),
        ({"parallelism": {"tp": 2, "pp": 4, "virtual_stages": 4}, "schedule": "looped_bfs"}, 1),
        ({"parallelism": {"tp": 2, "pp": 4}, "schedule": "zb_h1"}, 16),
        ({"parallelism": {"tp": 8}, "sharding": {"zero": 1}}, 1),
    ],
)
def test_a_step_lists_the_reductions_of_every_pass(changes: dict[str, Any], times: int) -> None:
    setup = resolve(decode({**JOB, "sharding": {"zero": 2}, **changes}, TrainingJob))
    tasks = [task for action in device_program(setup, 0) for task in action.tasks]
    sent = sum(task.wire_bytes for task in tasks if task.name == "gradient_reduce_scatter")
    once = [task for chunk in chunks(setup) if chunk.stage == 0 for task in reduced(setup, chunk)]
    assert sent == pytest.approx(times * sum(task.wire_bytes for task in once))


def reduced(setup: TrainingSetup, chunk: LayerChunk) -> tuple[Task, ...]:
    return reduce_tasks(Rank(setup), chunk_parameters(Rank(setup), chunk))


def test_lora_trains_adapters_only() -> None:
    plain, lora = step(), step(lora={"rank": 16})
    assert lora.step_s < 0.9 * plain.step_s
    assert lora.worst_memory.optimizer_bytes < 0.02 * plain.worst_memory.optimizer_bytes


@pytest.mark.parametrize(
    ("model", "lora", "num_trained"),
    [
        # r (in + out) of every adapted matrix: 4096 wide, 1024 of keys and of values, 14336 of the feed-forward.
        ("llama-3.1-8b", {}, 41_943_040),
        ("llama-3.1-8b", {"target_modules": ["q_proj", "v_proj"]}, 32 * 16 * (2 * 4096 + 4096 + 1024)),
        ("llama-3.1-8b", {"target_modules": ["qkv_proj"]}, 32 * 16 * (4096 + 6144)),
        ("llama-3.1-8b", {"all_linear": False}, 32 * 16 * (4 * 4096 + 2 * (4096 + 1024))),
        ("mixtral-8x7b", {"rank": 64, "target_modules": ["gate_proj", "up_proj", "down_proj"]}, 905_969_664),
        ("deepseek-v3", {"target_modules": ["q_a_proj"]}, 61 * 16 * (7168 + 1536)),
    ],
)
def test_adapters_have_the_sizes_of_their_modules(model: str, lora: dict[str, Any], num_trained: int) -> None:
    raw = {"model": model, "framework": "fsdp2", "parallelism": {}, "lora": lora, "recompute": {"granularity": "full"}}
    result = step(**raw, sharding={"zero": 0})
    assert result.num_trained == num_trained
    # In fp32: weights and both moments of Adam beside them, gradients.
    assert result.worst_memory.optimizer_bytes == 12 * num_trained
    assert result.worst_memory.gradients_bytes == 4 * num_trained
    every = step(**raw | {"lora": {"rank": 128}}, sharding={"zero": 0})
    assert every.step_s > result.step_s


def test_a_fused_projection_has_one_adapter_by_megatron() -> None:
    layer = 16 * (4096 + 6144) + 16 * 2 * 4096 + 16 * (4096 + 2 * 14336) + 16 * (14336 + 4096)
    assert step(lora={}, parallelism={"tp": 4, "pp": 2}).num_trained == 32 * layer


def test_adapters_need_a_module_that_the_model_has() -> None:
    with pytest.raises(InputError, match=r"lora.target_modules is q_a_proj, and .* has none of them"):
        step(lora={"target_modules": ["q_a_proj"]})


def test_what_attention_computes_twice_is_no_work_of_the_model() -> None:
    """The backward pass of FlashAttention is 2.5 times the forward one, of which 0.5 are its scores again."""
    result = step(sequence_tokens=32768, parallelism={"tp": 4, "cp": 2})
    attention = 32 * 4 * 4096 * 32768**2 / 2 * result.setup.job.global_batch / result.setup.degrees.num_devices
    assert result.hardware_flops - result.model_flops == pytest.approx(0.5 * attention, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("granularity", ["none", "selective"])
def test_recomputing_the_projections_of_latents_may_make_a_job_fit(granularity: str) -> None:
    raw = {
        "model": "deepseek-v3",
        "num_devices": 1024,
        "sequence_tokens": 4096,
        "global_batch": 2048,
        "parallelism": {"pp": 16, "ep": 64, "layers_per_stage": [3, *[4] * 14, 2]},
        "precision": {"compute": "fp8_block", "moments": "bf16", "master_weights": "remainder"},
        "recompute": {"granularity": granularity},
    }
    setup = resolve(decode({**JOB, **raw}, TrainingJob))
    prices = training_prices(setup)
    result = simulate_with(setup, prices)
    assert not result.fits
    names = [name for name, _ in fitting_changes(result, prices)]
    assert "recompute={granularity: selective, modules: [norms, activation, latent_up_projection]}" in names


@pytest.mark.full
def test_memory_peaks_on_the_first_stage_and_fitting_changes_fit() -> None:
    setup = resolve(decode({**JOB, "num_devices": 8, "parallelism": {"tp": 1}, "micro_batch": 2}, TrainingJob))
    prices = training_prices(setup)
    result = simulate_with(setup, prices)
    assert not result.fits
    found = fitting_changes(result, prices)
    assert found
    assert all(changed.fits for _, changed in found)
    stages = step().memory
    assert stages[0].num_in_flight > stages[-1].num_in_flight == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({"model": "mistralai/Mixtral-8x7B-v0.1", "sequence_tokens": 1024, "parallelism": {}}, "parallelism.ep=8"),
        ({"framework": "fsdp2", "parallelism": {}, "sharding": {"zero": 3, "group": 2}}, "sharding.group=null"),
        ({"model": "meta-llama/Llama-3.1-70B", "parallelism": {"tp": 2}}, "parallelism.tp=16"),
        (
            {
                "device": "rtx_4090",
                "node": None,
                "num_devices": 1,
                "framework": "fsdp2",
                "sharding": {"zero": 0},
                "parallelism": {},
                "lora": {},
                "recompute": {"granularity": "full"},
                "micro_batch": 2,
            },
            "kernels.cross_entropy=chunked",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_told_every_kind_of_split(changes: dict[str, Any], change: str) -> None:
    setup = resolve(decode({**JOB, "sequence_tokens": 4096, **changes}, TrainingJob))
    prices = training_prices(setup)
    result = simulate_with(setup, prices)
    assert not result.fits
    assert change in [name for name, _ in fitting_changes(result, prices)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({"num_devices": 64, "parallelism": {}}, "recompute={granularity: full}, sharding.zero=3"),
        ({"num_devices": None, "parallelism": {"tp": 8, "dp": 8}}, "parallelism.pp=2, parallelism.dp=4"),
        ({**JOB, "num_devices": 8, "parallelism": {}, "micro_batch": 2}, "parallelism.tp=4"),
        ({"num_devices": 64, "parallelism": {"tp": 8}, "num_microbatches": 16}, "sharding.zero=2"),
        (
            {"num_devices": 64, "parallelism": {"tp": 4, "pp": 4, "virtual_stages": 5}},
            "recompute={granularity: selective, modules: [norms, activation]}",
        ),
    ],
)
def test_a_change_set_by_its_name_gives_the_step_that_it_was_offered_with(changes: dict[str, Any], change: str) -> None:
    raw = {**JOB, "model": "meta-llama/Llama-3.1-70B", "global_batch": 128, **changes}
    setup = resolve(load(raw))
    prices = training_prices(setup)
    found = dict(fitting_changes(simulate_with(setup, prices), prices))
    assert change in found
    for name, changed in found.items():
        settings = (part.split("=", 1) for part in re.split(r", (?=[a-z_.]+=)", name))
        again = resolve(load(raw, {path: yaml.safe_load(value) for path, value in settings}))
        assert (again.job, again.degrees) == (changed.setup.job, changed.setup.degrees)
        assert again.degrees.num_devices == setup.degrees.num_devices


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({"framework": "deepspeed", "sharding": {"zero": 2}}, ["sharding.offload=optimizer"]),
        (
            {"framework": "deepspeed", "sharding": {"zero": 3}},
            ["sharding.offload=optimizer", "sharding.offload=parameters"],
        ),
        (
            {"framework": "fsdp2", "sharding": {"zero": 0}, "precision": {"moments": "int8"}},
            ["precision.gradients=bf16, precision.master_weights=bf16"],
        ),
        (
            {"framework": "fsdp2", "sharding": {"zero": 0}, "lora": {}, "device": "l4", "model": "qwen2.5-14b"},
            ["precision.frozen_weights=nf4"],
        ),
    ],
)
def test_what_devices_keep_of_the_state_is_changed_first(changes: dict[str, Any], offered: list[str]) -> None:
    """One device, of which no change makes several: the cheapest single changes that fit, by their step."""
    raw = {"model": "qwen2.5-7b", "device": "a100_sxm", "sequence_tokens": 1024, "global_batch": 2, **changes}
    setup = resolve(load({**raw, "recompute": {"granularity": "full"}, "kernels": {"cross_entropy": "chunked"}}))
    prices = training_prices(setup)
    found = fitting_changes(simulate_with(setup, prices), prices)
    assert sorted(name for name, _ in found) == offered
    steps = [changed.step_s for _, changed in found]
    assert steps == sorted(steps)


def test_stragglers_cost_the_expected_largest_deviation() -> None:
    even = step(faults={"jitter_by_doubling": 0.0})
    slow = step(faults={"straggler_fraction": 0.02, "jitter_by_doubling": 0.0})
    assert slow.step_s / even.step_s == pytest.approx(1 + 0.02 * np.sqrt(2 * np.log(32)))


def test_jitter_grows_with_every_doubling_beyond_a_node() -> None:
    even, jitter = step(faults={"jitter_by_doubling": 0.0}), step(faults={"jitter_by_doubling": 0.01})
    assert jitter.step_s / even.step_s == pytest.approx(1.02)
    assert even.step_s < step().step_s < jitter.step_s
    alone = step(num_devices=8, parallelism={"tp": 4}, global_batch=16, faults={"jitter_by_doubling": 0.01})
    assert "stragglers" not in alone.breakdown_s


def test_goodput_is_youngs() -> None:
    run = campaign(
        step(total_tokens=1e12, faults={"device_mtbf_s": 32e6, "restart_s": 600, "checkpoint_bytes_per_s": 1e9})
    )
    assert run is not None
    interval = np.sqrt(2 * run.checkpoint_s * 1e6)
    assert run.checkpoint_interval_s == pytest.approx(interval)
    writing = run.checkpoint_s / (interval + run.checkpoint_s)
    assert run.goodput_fraction == pytest.approx((1 - writing) / (1 + (600 + interval / 2) / 1e6))
    assert run.num_steps == np.ceil(1e12 / (64 * 8192))
    assert campaign(step()) is None


@pytest.mark.full
@pytest.mark.compiled
def test_16384_ranks_take_less_than_a_second() -> None:
    raw = {
        "model": "meta-llama/Llama-3.1-405B",
        "device": "h100_sxm",
        "num_devices": 16384,
        "sequence_tokens": 8192,
        "global_batch": 16384,
        "parallelism": {"tp": 8, "pp": 16, "layers_per_stage": [7, *[8] * 14, 7]},
    }
    simulate_training(decode(raw, TrainingJob))
    began = time.process_time()
    result = simulate_training(decode(raw, TrainingJob))
    assert time.process_time() - began < 1.0
    assert result.timeline.starts.size == 16 * 128 * 2


def test_an_interval_is_what_published_runs_left_and_wider_where_nobody_measured() -> None:
    found = step(parallelism={"tp": 8, "pp": 1})
    expected, spread = step_interval(found), spreads()["dense"].spread
    assert expected.low < found.step_s * spread.p10
    assert expected.high > found.step_s * spread.p90
    experts = step(model="mistralai/Mixtral-8x7B-v0.1", parallelism={"tp": 2, "pp": 4, "ep": 2})
    wider = step_interval(experts)
    alone = step_interval(step(model="mistralai/Mixtral-8x7B-v0.1"))
    assert alone.high / alone.low > expected.high / expected.low
    assert wider.high / wider.low > expected.high / expected.low
    exact = Spread(p10=1.0, p50=1.0, p90=1.0, num_runs=1000)
    bounds = step_interval(found, {"dense": msgspec.structs.replace(spreads()["dense"], spread=exact)})
    assert bounds.low * bounds.high == pytest.approx(found.step_s**2)


def test_an_interval_widens_with_the_distance_from_the_runs_that_were_learnt() -> None:
    found, known = step(parallelism={"tp": 8, "pp": 1}), spreads()["dense"]
    assert known.distance(found.setup) == 0
    widths = []
    for unknown in ({}, {"formats": ("fp8",)}, {"formats": ("fp8",), "architectures": ("volta",)}):
        bounds = step_interval(found, {"dense": msgspec.structs.replace(known, **unknown)})
        widths.append(bounds.high / bounds.low)
    assert widths == sorted(set(widths))
    # A class of which hardly a run is known is a dense job outside what was learnt.
    experts = step(model="mistralai/Mixtral-8x7B-v0.1", parallelism={"tp": 2, "pp": 4, "ep": 2})
    few = msgspec.structs.replace(known, spread=Spread(p10=1.0, p50=1.0, p90=1.0, num_runs=1))
    alone, without = step_interval(experts, {"dense": known, "experts": few}), step_interval(experts, {"dense": known})
    assert (alone.low, alone.high) == (without.low, without.high)
    inside = step_interval(experts, {"dense": known, "experts": known})
    assert without.high / without.low > inside.high / inside.low
