"""Memory of a training rank: what recomputation frees, what frameworks hold beside it, and steps measured on B200."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from readers.training.b200_memory import cut, read_measured_steps
from windtunnel import catalog
from windtunnel.calibration.training_runs import shape_of
from windtunnel.pricing.estimator import RooflineEstimator
from windtunnel.pricing.roofline import Roofline
from windtunnel.schema import decode, encode
from windtunnel.training.costs import LAUNCHES
from windtunnel.training.figures import FIGURES
from windtunnel.training.fitting_changes import fitting_changes
from windtunnel.training.job import TrainingJob
from windtunnel.training.layers.parts import layer_parts, layer_work
from windtunnel.training.layers.rank import Rank
from windtunnel.training.memory import StageMemory
from windtunnel.training.setup import resolve
from windtunnel.training.step import TrainingResult, simulate_training, training_prices

JOB: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "device": "h100_sxm",
    "num_devices": 8,
    "sequence_tokens": 4096,
    "global_batch": 8,
}
TOKENS, WIDTH, VOCABULARY = 4096, 4096, 128_256


def step(**changes: Any) -> TrainingResult:
    setup = resolve(decode({**JOB, **changes}, TrainingJob))
    return simulate_training(setup, RooflineEstimator(Roofline(setup.device, setup.node)))


def memory(**changes: Any) -> StageMemory:
    return step(**changes).worst_memory


def layer_kept(**changes: Any) -> float:
    rank = Rank(resolve(decode({**JOB, **changes}, TrainingJob)))
    return layer_work(rank, rank.setup.model.layers[-1]).kept_bytes


def test_measured_steps_allocate_what_is_predicted(reference: Path) -> None:
    # Megatron-LM's own peaks; SimuMax has 0.46% in the mean and 1.4% at worst.
    errors: dict[str, list[float]] = defaultdict(list)
    for measured in read_measured_steps(reference / "training_memory" / "b200_rows.csv"):
        stages = step_of(measured.job).memory
        predicted = max(stage.allocated_bytes for stage in stages)
        errors[measured.model].append(abs(predicted / measured.allocated_bytes - 1))
    every = [error for found in errors.values() for error in found]
    assert len(every) >= 22
    assert sum(every) / len(every) < 0.005
    assert max(every) < 0.015


def step_of(job: TrainingJob) -> TrainingResult:
    setup = resolve(job)
    return simulate_training(setup, RooflineEstimator(Roofline(setup.device, setup.node)))


def test_a_cut_mixture_of_experts_keeps_one_dense_layer() -> None:
    assert [group.num_layers for group in cut(catalog.model("deepseek-ai/DeepSeek-V3"), 4).layers] == [1, 3]
    assert cut(catalog.model("meta-llama/Llama-3.1-8B"), 4).num_layers == 4


@pytest.mark.parametrize(("loss", "each"), [("separate", 2.0), ("fp32", 4.0), ("eager", 10.0), ("chunked", -1.75)])
def test_a_loss_keeps_its_copies_of_the_logits(loss: str, each: float) -> None:
    # Long enough for the head to hold more than the widest layer.
    long = {"sequence_tokens": 32768}
    more = memory(kernels={"cross_entropy": loss}, **long).transient_bytes - memory(**long).transient_bytes
    if each > 0:
        assert more == pytest.approx(32768 * VOCABULARY * each, rel=1e-6)
    else:
        assert more < 0


def test_gemms_that_sum_leave_a_placeholder_for_each_shape_of_a_weight() -> None:
    shapes = 2.0 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
    head = 2.0 * VOCABULARY * 4096
    apart = memory(overlap={"tensor_gradient": False})
    assert memory().transient_bytes - apart.transient_bytes == pytest.approx(shapes + head, rel=1e-3)


def test_context_parallelism_by_exchange_keeps_queries_keys_and_values_twice() -> None:
    split = {"cp": 2, "cp_method": "ulysses"}
    more = layer_kept(parallelism=split) - layer_kept(parallelism={"cp": 2})
    assert more == pytest.approx(TOKENS / 2 * (32 + 2 * 8) * 128 * 2.0)


def test_recomputing_an_activation_frees_the_input_of_the_product_after_it() -> None:
    less = layer_kept() - layer_kept(recompute={"granularity": "selective", "modules": ["activation"]})
    assert less == pytest.approx(TOKENS * 14336 * 2.0)


def test_recomputing_a_feed_forward_leaves_its_input_only() -> None:
    less = layer_kept() - layer_kept(recompute={"granularity": "selective", "modules": ["feed_forward"]})
    assert less == pytest.approx(TOKENS * 3 * 14336 * 2.0)


def test_recomputing_latent_projections_frees_queries_keys_and_values() -> None:
    model = {"model": "deepseek-ai/DeepSeek-V3", "parallelism": {"ep": 8}}
    less = layer_kept(**model) - layer_kept(
        **model, recompute={"granularity": "selective", "modules": ["latent_up_projection"]}
    )
    assert less == pytest.approx(TOKENS * 128 * (192 + 192 + 128) * 2.0)


def test_the_published_layout_of_deepseek_v3_fits_its_framework() -> None:
    # arXiv:2412.19437, sections 3.2 and 3.3.
    result = step(
        model="deepseek-ai/DeepSeek-V3",
        device="h800_sxm",
        num_devices=2048,
        global_batch=15360,
        framework="deepseek",
        parallelism={"pp": 16, "ep": 64, "layers_per_stage": [3, *[4] * 14, 2]},
        precision={"compute": "fp8", "moments": "bf16"},
        recompute={"granularity": "selective", "modules": ["norms", "activation", "latent_up_projection"]},
    )
    assert result.fits


def test_activations_in_the_hosts_memory_do_not_count() -> None:
    half, none = memory(recompute={"offload_layers": 16}), memory(recompute={"offload_layers": 32})
    assert half.activations_bytes == pytest.approx(memory().activations_bytes / 2, rel=0.01)
    assert none.activations_bytes < 0.01 * memory().activations_bytes


def test_frozen_weights_may_be_there_in_8_bit_only() -> None:
    wide, narrow = (memory(lora={}, precision={"frozen_weights": each}) for each in ("bf16", "fp8"))
    adapters_bytes = wide.gradients_bytes / 2
    """16 bits of each adapter's weight, whose gradient is in fp32."""
    assert narrow.parameters_bytes - adapters_bytes == (wide.parameters_bytes - adapters_bytes) / 2


@pytest.mark.full
def test_frozen_weights_of_4_bits_are_those_of_layers_and_are_unpacked_for_every_product() -> None:
    """QLoRA's paper fine-tunes a model of 65 B parameters on a GPU of 48 GB (arXiv:2305.14314, abstract)."""
    wide, packed = (memory(lora={}, precision={"frozen_weights": each}) for each in ("bf16", "nf4"))
    model = catalog.model("meta-llama/Llama-3.1-8B")
    ends = 2 * model.vocab_size * model.hidden_size
    share = 2 * packed.parameters_bytes / wide.parameters_bytes
    assert share == pytest.approx((1 - ends / 8.03e9) * 0.5159 + 2 * ends / 8.03e9, rel=0.01)
    shape = shape_of("llama-65b")
    assert shape is not None
    raw = {
        "model": encode(shape.model("llama-65b", 512)),
        "device": "l40s",
        "num_devices": 1,
        "sequence_tokens": 512,
        "global_batch": 16,
        "framework": "fsdp2",
        "sharding": {"zero": 0},
        "recompute": {"granularity": "full"},
    }
    jobs = [{**raw, "lora": {"rank": 16}, "precision": {"frozen_weights": each}} for each in ("nf4", "bf16")]
    small, large = (simulate_training(resolve(decode(job, TrainingJob))) for job in jobs)
    assert small.fits
    assert not large.fits
    assert small.step_s > large.step_s


def test_a_master_copy_may_be_what_a_bf16_parameter_lacks() -> None:
    whole, remainder = (memory(precision={"master_weights": each}) for each in ("fp32", "remainder"))
    assert whole.optimizer_bytes / remainder.optimizer_bytes == pytest.approx(12 / 10)


def test_sharded_parameters_stay_gathered_between_micro_batches_of_a_pipeline() -> None:
    sharded = {"framework": "fsdp2", "global_batch": 32}
    whole = memory(**sharded, parallelism={"pp": 2})
    # Parameters in 16 bit and gradients in 32 bit of half the layers.
    assert whole.transient_bytes > 16 * 218e6 * (2 + 4)
    assert memory(**sharded).transient_bytes < whole.transient_bytes


def test_blocks_without_use_never_keep_a_job_from_fitting() -> None:
    room = FIGURES.usable_fraction * catalog.device("h100_sxm").memory_bytes
    for num_layers in range(0, 32, 4):
        result = step(micro_batch=2, global_batch=16, recompute={"granularity": "full", "num_layers": num_layers})
        worst = result.worst_memory
        outside = FIGURES.context_bytes + 2 * FIGURES.communicator_bytes
        assert result.fits == (worst.allocated_bytes + outside <= room * (1 + 1e-9))


def test_a_host_holds_up_experts_that_no_graph_launches() -> None:
    model = {"model": "Qwen/Qwen3-30B-A3B", "parallelism": {"ep": 8}}
    launched, whole = step(**model), step(**model, kernels={"cuda_graphs": "full"})
    waited = FIGURES.experts_launch_s["none"] * 48
    assert launched.breakdown_s[LAUNCHES] == pytest.approx(waited)
    assert LAUNCHES not in whole.breakdown_s
    assert LAUNCHES not in step().breakdown_s


def test_kernels_of_experts_send_at_their_share_of_the_links() -> None:
    model = {"model": "Qwen/Qwen3-30B-A3B", "kernels": {"cuda_graphs": "full"}}
    split = [{"ep": 8, "experts_exchange": how} for how in ("all_to_all", "by_node")]
    plain, kernels = (step(**model, parallelism=each).breakdown_s["exposed communication (ep)"] for each in split)
    assert kernels < plain


@pytest.mark.full
def test_changes_that_fit_are_offered_with_what_they_need() -> None:
    setup = resolve(decode({**JOB, "micro_batch": 4, "global_batch": 32, "sequence_tokens": 8192}, TrainingJob))
    prices = training_prices(setup)
    result = simulate_training(setup)
    assert not result.fits
    assert all(changed.fits for _, changed in fitting_changes(result, prices))


def test_a_graph_leaves_the_launches_that_it_does_not_hold() -> None:
    model = {"model": "Qwen/Qwen3-30B-A3B", "parallelism": {"ep": 8}}
    steps = [step(**model, kernels={"cuda_graphs": each}).step_s for each in ("none", "routing", "partial", "full")]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 4


def test_a_hybrids_layers_have_one_part_each() -> None:
    rank = Rank(resolve(decode({**JOB, "model": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"}, TrainingJob)))
    names = [{part.name for part in layer_parts(rank, group)} for group in rank.setup.model.layers]
    scan, experts, attention = names
    assert {"scan", "convolution", "in_proj", "out_proj"} <= scan
    assert not {"attention", "router"} & scan
    assert "router" in experts
    assert "input_norm" not in experts
    assert "attention" in attention
    assert "feed_forward_residual" not in attention
    for group, found in zip(rank.setup.model.layers, names, strict=True):
        assert sum("norm" in name and "gated" not in name for name in found) == 1, group


def test_every_stage_of_a_hybrid_has_its_share_of_each_kind_of_layer() -> None:
    result = step(model="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", parallelism={"pp": 2}, global_batch=16)
    first, last = (cost.chunk.layers for cost in result.costs)
    assert [count for _, count in first] == [count for _, count in last]
    assert [count for _, count in first] == [11.5, 11.5, 3.0]


def test_experts_behind_a_latent_width_exchange_it() -> None:
    super_ = {"model": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "parallelism": {"ep": 8}}
    rank = Rank(resolve(decode({**JOB, **super_}, TrainingJob)))
    parts = {part.name: part for part in layer_parts(rank, rank.setup.model.layers[1])}
    (sent,) = parts["dispatch"].forward
    assert float(sent.op.message_bytes) == TOKENS * 22 * 1024 * 2.0
    assert {"experts_latent_down", "experts_latent_up"} <= set(parts)


def test_deepspeed_holds_what_its_source_says() -> None:
    """16-bit partitions of parameters and gradients beside 12 bytes of state; gradients in fp32 without sharding."""
    num_parameters = 8.03e9
    sharded, gradients, none = (memory(framework="deepspeed", sharding={"zero": zero}) for zero in (3, 2, 0))
    assert sharded.parameters_bytes == pytest.approx(2 * num_parameters / 8, rel=0.01)
    assert sharded.gradients_bytes == pytest.approx(2 * num_parameters / 8, rel=0.01)
    assert sharded.optimizer_bytes == pytest.approx(12 * num_parameters / 8, rel=0.01)
    assert gradients.gradients_bytes == pytest.approx(2 * num_parameters / 8, rel=0.01)
    # Autograd's 16-bit gradients and the fp32 sums of `bf16_optimizer.py`.
    assert none.gradients_bytes == pytest.approx(6 * num_parameters, rel=0.01)


def test_deepspeed_frees_what_no_backward_pass_needs_soon() -> None:
    kept = {"framework": "deepspeed", "recompute": {"granularity": "full"}, "kernels": {"cross_entropy": "chunked"}}
    few, many = (memory(**kept, sharding={"zero": 3, "max_live_elements": live}) for live in (10**8, 2 * 10**9))
    layer = (7.5e9 - VOCABULARY * WIDTH) / 32  # one is gathered, whatever the limit says
    assert many.transient_bytes - few.transient_bytes == pytest.approx(2 * (2e9 - layer), rel=0.05)


def test_the_update_of_deepspeed_may_be_the_fullest_moment() -> None:
    short = {"framework": "deepspeed", "sequence_tokens": 128, "kernels": {"cross_entropy": "chunked"}}
    updating = memory(**short, sharding={"zero": 2})
    assert updating.activations_bytes == 0.0
    assert updating.transient_bytes == pytest.approx(4 * 8.03e9 / 8 + FIGURES.workspace_bytes, rel=0.01)


def test_sharded_fp32_parameters_are_parameters_and_no_state() -> None:
    """FSDP2 shards fp32 parameters, which are their own master copies: 4 bytes of each, beside 8 of moments."""
    fsdp = memory(framework="fsdp2", sharding={"zero": 3})
    assert fsdp.parameters_bytes == pytest.approx(4 * 8.03e9 / 8, rel=0.01)
    assert fsdp.optimizer_bytes == pytest.approx(2 * fsdp.parameters_bytes)
