"""Diffusion jobs: tokens and arithmetic against hand counts, how time scales, energy, memory, and wrong input."""

import csv
import re
from typing import Any

import pytest

import diffusion
import recorded
from windtunnel.diffusion.job import DiffusionSetup, job_from, resolve
from windtunnel.diffusion.model import Decoder, diffusion_model, shipped
from windtunnel.diffusion.operators import FullAttention, Share, block_kernels, block_work, decoder_work
from windtunnel.diffusion.search import search_diffusion
from windtunnel.diffusion.simulate import ends_work, simulate_diffusion, step_work
from windtunnel.errors import InputError
from windtunnel.report.diffusion.batch import diffusion_report, points_report

FLUX = {"model": "FLUX.1-dev", "device": "h100_sxm"}
TINY = {
    "hidden_size": 64,
    "head_dim": 32,
    "feed_forward_size": 256,
    "blocks": [{"type": "single", "number": 3}],
    "modulation": 0,
    "text_tokens": 8,
    "guidance": "none",
    "text_encoders": [{"parameters": 1000, "layers": 1, "hidden_size": 10, "tokens": 8}],
    "decoder": {"channels": [8, 4], "resnets": 1},
    "height": 32,
    "width": 64,
    "steps": 5,
}


def setup_of(**keys: Any) -> DiffusionSetup:
    return resolve(job_from({**FLUX, **keys}))


@pytest.mark.parametrize(
    ("model", "height", "width", "frames", "tokens"),
    [
        ("FLUX.1-dev", 1024, 1024, 1, 64 * 64),
        ("SANA1.5_1.6B_1024px_diffusers", 1024, 1024, 1, 32 * 32),
        ("Wan2.1-T2V-14B-Diffusers", 480, 832, 81, 21 * 30 * 52),
        ("HunyuanVideo", 720, 1280, 129, 33 * 45 * 80),
        ("CogVideoX-2b", 480, 720, 49, 13 * 30 * 45),
        ("CogVideoX1.5-5B", 768, 1360, 81, 11 * 48 * 85),
    ],
)
def test_tokens_of_a_size(model: str, height: int, width: int, frames: int, tokens: int) -> None:
    assert diffusion_model(model).latent_tokens(height, width, frames) == tokens


@pytest.mark.parametrize(
    ("model", "billions", "error"),
    [
        ("FLUX.1-dev", 11.9, 0.03),
        ("stable-diffusion-3.5-large", 8.1, 0.02),
        ("stable-diffusion-3.5-medium", 2.24, 0.05),
        ("PixArt-Sigma-XL-2-1024-MS", 0.61, 0.05),
        ("HunyuanDiT-v1.2-Diffusers", 1.5, 0.05),
        ("SANA1.5_1.6B_1024px_diffusers", 1.6, 0.03),
        ("SANA1.5_4.8B_1024px_diffusers", 4.8, 0.03),
        ("Wan2.1-T2V-1.3B-Diffusers", 1.42, 0.03),
        ("Wan2.1-T2V-14B-Diffusers", 14.3, 0.03),
        ("HunyuanVideo", 12.8, 0.02),
        ("CogVideoX-2b", 1.69, 0.03),
        ("CogVideoX1.5-5B", 5.57, 0.09),
        ("Qwen-Image", 20.4, 0.01),
    ],
)
def test_parameters_are_those_that_publishers_state(model: str, billions: float, error: float) -> None:
    """They follow from width, blocks and modulation, so that a wrong shape in the catalog is seen here."""
    assert diffusion_model(model).transformer_parameters / 1e9 == pytest.approx(billions, rel=error)


def test_arithmetic_of_a_single_stream_by_hand() -> None:
    """32 x 64 pixels are 8 x 16 patches; with 8 text tokens, 136 tokens of width 64 in each of three blocks."""
    setup = resolve(job_from({"model": TINY, "device": "h100_sxm"}))
    tokens = 8 * 16 + 8
    products = 2 * tokens * (4 * 64 * 64 + 2 * 64 * 256)
    attention = 4 * tokens * tokens * 64
    assert setup.image_tokens == 128
    assert sum(work.flops for work in step_work(setup)) == pytest.approx(3 * (products + attention))


def test_double_blocks_attend_together_and_multiply_apart() -> None:
    model = diffusion_model("stable-diffusion-3.5-large")
    works = list(block_work(model, model.blocks[0], Share(2, 4096, 333)))
    products = sum(work.flops for work in works if work.part == "products")
    attention = sum(work.flops for work in works if work.part == "attention")
    d = 2432
    assert products == 2 * 2 * (4096 + 333) * 12 * d * d + 2 * 2 * 2 * 6 * d * d
    assert attention == 4 * 2 * (4096 + 333) ** 2 * d


def test_attention_is_quadratic_and_products_are_linear_in_tokens() -> None:
    model = diffusion_model("Wan2.1-T2V-1.3B-Diffusers")
    once, twice = (list(block_work(model, model.blocks[0], Share(1, tokens, 512))) for tokens in (8192, 16384))
    flops = [sum(work.flops for work in works if isinstance(work.op, FullAttention)) for works in (once, twice)]
    cross = 4 * 8192 * 512 * 1536
    assert flops[1] - 2 * cross == pytest.approx(4 * (flops[0] - cross))


@pytest.mark.parametrize(("ulysses", "ring"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_sequence_parallelism_divides_attention_and_products(ulysses: int, ring: int) -> None:
    """512 text tokens are divided too, so that eight devices do exactly the work of one."""
    split = {"ulysses": ulysses, "ring": ring}
    alone, divided = (
        step_work(setup_of(model="FLUX.1-schnell")),
        step_work(setup_of(model="FLUX.1-schnell", parallelism=split)),
    )
    for part in ("products", "attention"):
        of_one, of_eight = (sum(w.flops for w in works if w.part == part) for works in (alone, divided))
        modulation = sum(w.flops for w in alone if getattr(w.op, "m", 0) == 1)
        kept = modulation if part == "products" else 0
        assert of_eight - kept == pytest.approx((of_one - kept) / 8)
    sent = {work.op.op: work for work in divided if work.part == "exchange"}
    assert set(sent) == {name for name, degree in (("all_to_all", ulysses), ("send_recv", ring)) if degree > 1}


def test_convolutions_of_a_decoder_by_hand() -> None:
    """Two stages of one residual block: 8 to 8 channels at 4 x 8, an upsampling convolution, then 8 to 4 at 8 x 16."""
    works = list(decoder_work(Decoder(channels=(8, 4), resnets=1), 8, 16, 1))
    first = 2 * 9 * 32 * (8 * 8 + 8 * 8)
    upsampling = 2 * 9 * 128 * 8 * 8
    second = 2 * 9 * 128 * (8 * 4 + 4 * 4)
    assert sum(work.flops for work in works) == first + upsampling + second


def test_time_of_steps_and_batches() -> None:
    """Steps add up; the host's launches bound a pass of few tokens, and not a large batch."""
    short, long = (simulate_diffusion(setup_of(steps=steps)) for steps in (10, 20))
    assert long.batch_s - short.batch_s == pytest.approx(10 * short.step_s)
    split = {"ulysses": 8}
    bound = simulate_diffusion(setup_of(parallelism=split))
    model = bound.setup.model
    launches = sum(blocks.number * block_kernels(model, blocks, bound.setup.share) for blocks in model.blocks)
    assert bound.step_s == pytest.approx(launches * 17e-6)
    assert bound.busy_s["waiting"] > 0
    assert simulate_diffusion(setup_of(parallelism=split, host_us=0)).batch_s < bound.batch_s
    full = simulate_diffusion(setup_of(parallelism=split, batch=16))
    assert full.busy_s["waiting"] == 0
    assert full.output_s < bound.output_s / 2


def test_guidance_runs_two_passes_and_cfg_splits_them() -> None:
    wan = {"model": "Wan2.1-T2V-1.3B-Diffusers", "device": "h100_sxm"}
    guided, plain, split = (
        simulate_diffusion(resolve(job_from({**wan, **keys})))
        for keys in ({}, {"guidance": False}, {"parallelism": {"cfg": 2}})
    )
    assert guided.step_s == pytest.approx(2 * plain.step_s)
    assert split.step_s == pytest.approx(plain.step_s)
    assert split.energy_j is not None
    assert guided.energy_j is not None
    assert split.energy_j > guided.energy_j, "one of two devices waits for the decoder"


def test_power_lies_between_waiting_and_the_power_limit() -> None:
    for keys in ({}, {"parallelism": {"ulysses": 8}}, {"batch": 16}):
        result = simulate_diffusion(setup_of(**keys))
        assert result.energy_j is not None
        watts = result.energy_j / result.batch_s / result.setup.job.parallelism.num_devices
        assert 0.27 * 700 < watts < 700
    setup = setup_of()
    assert sum(work.flops for work in ends_work(setup)) > 0


def test_every_model_of_the_catalog_is_priced() -> None:
    for name, model in shipped().items():
        result = simulate_diffusion(resolve(job_from({"model": name, "device": "b200_sxm"})))
        assert result.batch_s > 0
        assert result.memory["transformer"] == 2 * model.transformer_parameters
        assert sum(result.busy_s.values()) == pytest.approx(result.batch_s)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "FLUX.2-pro"}, "there is no diffusion model 'FLUX.2-pro'"),
        ({"height": 1000}, "height is 1000; black-forest-labs/FLUX.1-dev makes multiples of 16 pixels"),
        ({"frames": 9}, "makes images, not 9 frames"),
        ({"parallelism": {"ulysses": 5}}, "ulysses is 5, which does not divide the 24 heads"),
        ({"parallelism": {"ring": 16}}, "the job needs 16 devices; dgx_h100 has 8"),
        ({"parallelism": {"cfg": 2}}, "cfg is 2, but a step of black-forest-labs/FLUX.1-dev has one pass"),
        ({"guidance": True}, "is distilled to one pass"),
        ({"model": {**TINY, "head_dim": 48}}, "hidden_size is 64, which head_dim 48 does not divide"),
        ({"model": {**TINY, "blocks": []}}, "blocks is empty"),
        ({"model": {**TINY, "decoder": {"channels": [], "resnets": 1}}}, "the number of channels is 0"),
        ({"batch": 0}, "batch is 0; at least 1 is needed"),
        ({"stepz": 3}, r"unknown key \$.stepz"),
    ],
)
def test_wrong_input_is_answered_in_a_sentence(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        setup_of(**keys)


def test_a_search_ranks_by_cost_and_says_what_it_refuses() -> None:
    vary = {"batch": [1, 8], "parallelism.ulysses": [1, 5]}
    points = search_diffusion({**FLUX, "vary": vary}, "job.yaml")
    assert [point.settings["batch"] for point in points if point.result] == [8, 1]
    assert {point.reason.partition(",")[0] for point in points if not point.result} == {"ulysses is 5"}
    with pytest.raises(InputError, match="vary of a diffusion job is a table of lists"):
        search_diffusion({**FLUX, "vary": {"batch": 4}}, "job.yaml")


@pytest.mark.full
@pytest.mark.parametrize("name", recorded.entries("mlenergy/diffusion_energy.csv"))
def test_recorded_runs_are_predicted(name: str) -> None:
    """The shipped figures give 6.2% of latency and 9.2% of joules in the median over all 491 rows."""
    with (recorded.REFERENCE / "mlenergy" / name).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    scored = [diffusion.with_efficiency(row, resolve(diffusion.job_of(row)), None) for row in rows]
    for index, limit in enumerate((0.08, 0.11)):
        errors = sorted(abs(row.errors[index]) for row in scored)
        assert errors[len(errors) // 2] < limit


def test_a_limit_is_kept_or_broken() -> None:
    assert simulate_diffusion(setup_of(limit_s=20)).is_good
    assert not simulate_diffusion(setup_of(limit_s=5)).is_good
    points = search_diffusion({**FLUX, "limit_s": 7, "vary": {"parallelism.ulysses": [1, 4]}}, "job.yaml")
    assert [point.settings["parallelism.ulysses"] for point in points if point.result] == [4]
    assert re.fullmatch(r"a batch takes [\d.]+ s; the limit is 7 s", points[-1].reason)


def test_only_a_limit_makes_a_time_good() -> None:
    assert diffusion_report(simulate_diffusion(setup_of())).is_good is None
    assert diffusion_report(simulate_diffusion(setup_of(limit_s=20))).is_good is True
    assert diffusion_report(simulate_diffusion(setup_of(device="rtx_4090"))).is_good is False


def test_a_search_says_what_the_cheapest_costs_and_shows_every_point() -> None:
    points = search_diffusion({**FLUX, "vary": {"batch": [1, 8]}}, "job.yaml")
    report = points_report(points, 5)
    assert re.match(r"Cheapest, at \$0\.\d{4} each: batch 8\. An image takes ", str(report.verdict))
    assert report.sections[0].is_open


def test_weights_that_exceed_a_device_do_not_fit() -> None:
    assert simulate_diffusion(setup_of()).fits
    assert not simulate_diffusion(setup_of(device="rtx_4090")).fits


@pytest.mark.full
@pytest.mark.parametrize("name", recorded.entries("mlenergy/diffusion_energy.csv"))
def test_recorded_runs_fit(name: str) -> None:
    with (recorded.REFERENCE / "mlenergy" / name).open(newline="", encoding="utf-8") as file:
        assert all(simulate_diffusion(resolve(diffusion.job_of(row))).fits for row in csv.DictReader(file))
