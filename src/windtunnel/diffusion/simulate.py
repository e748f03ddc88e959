"""Time, energy, money and memory of making one batch of images or videos."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from windtunnel.diffusion import operators
from windtunnel.diffusion.job import DiffusionSetup
from windtunnel.hardware import Device
from windtunnel.model.operators import BF16_BYTES, Elementwise, Gemm, Op
from windtunnel.model.precision import Format
from windtunnel.notebook import Shown
from windtunnel.pricing.roofline import Roofline, machine
from windtunnel.schema import Fraction, Positive, Schema, decode, read_yaml

US = 1e-6
HEAD_DIM_STEP = 32
"""Kernels of FlashAttention pad heads to multiples of it."""


class Figures(Schema):
    """Figures that no model has of its own (`figures.yaml`)."""

    efficiency_by_architecture: dict[str, Positive]
    efficiency: Positive
    """Of other architectures."""
    eager_fraction: Fraction
    sustained_fraction: Fraction
    host_us: Positive
    convolution_fraction: dict[int, Fraction]
    flash2_flops_per_sm_clock: Positive
    flash2_fraction: Fraction
    flash2_half_head_dim: Positive
    saving_s_per_megapixel: Positive
    power_fraction: dict[str, Fraction]


FIGURES = decode(read_yaml(Path(__file__).with_name("figures.yaml")), Figures, "figures.yaml")


@dataclass(frozen=True)
class Pricer:
    """Seconds of operators on one device of a setup."""

    setup: DiffusionSetup

    def seconds(self, op: Op) -> float:
        """Return the seconds of one operator, as the device's closed forms have them."""
        device = self.setup.device
        if isinstance(op, operators.FullAttention):
            padded = -(-op.head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP
            flops = float(op.flops) * padded / op.head_dim
            return flops / self._attention_flops_per_s(padded) + float(op.num_bytes) / device.memory_bytes_per_s
        if isinstance(op, operators.Convolution):
            rate = machine(device, Format.BF16).flops_per_s * FIGURES.convolution_fraction[op.dimensions]
            return float(op.flops) / rate
        seconds = float(Roofline(device, self.setup.node).seconds(op))
        if isinstance(op, Elementwise):
            return seconds / FIGURES.eager_fraction
        return seconds / FIGURES.sustained_fraction if isinstance(op, Gemm) else seconds

    def _attention_flops_per_s(self, head_dim: int) -> float:
        device, rate = self.setup.device, machine(self.setup.device, Format.BF16).flops_per_s
        if self.setup.job.attention == "flash2" and device.num_sms and device.clock_per_s:
            rate = min(FIGURES.flash2_flops_per_sm_clock * device.num_sms * device.clock_per_s, rate)
        return rate * FIGURES.flash2_fraction * head_dim / (head_dim + FIGURES.flash2_half_head_dim)


@dataclass(frozen=True, repr=False)
class DiffusionResult(Shown):
    """One batch, from its prompts to its pixels."""

    REPORT = "diffusion.batch:diffusion_report"

    setup: DiffusionSetup
    batch_s: float
    step_s: float
    busy_s: Mapping[str, float]
    """Seconds of the batch by part; `waiting` is of the device for its host."""
    flops: float
    """Arithmetic of all devices."""
    energy_j: float | None
    """Of the batch, all devices; None: the device's power is not known."""
    memory: Mapping[str, float]
    """Bytes of one device by what fills it."""

    @property
    def output_s(self) -> float:
        """Seconds for each image or video."""
        return self.batch_s / self.setup.job.batch

    @property
    def output_j(self) -> float | None:
        return None if self.energy_j is None else self.energy_j / self.setup.job.batch

    @property
    def output_usd(self) -> float | None:
        hourly = self.setup.job.price_usd_per_hour or self.setup.device.price_usd_per_hour
        return None if hourly is None else hourly / 3600 * self.setup.job.parallelism.num_devices * self.output_s

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def device_bytes(self) -> int:
        return self.setup.device.usable_bytes or self.setup.device.memory_bytes

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.device_bytes

    @property
    def is_measured(self) -> bool:
        """Whether diffusion models were measured on a device of this architecture."""
        return self.setup.device.architecture in FIGURES.efficiency_by_architecture

    @property
    def is_good(self) -> bool:
        """Whether it fits, and a batch is ready within the job's limit."""
        return self.fits and self.batch_s <= (self.setup.job.limit_s or inf)


def step_work(setup: DiffusionSetup) -> list[operators.Work]:
    """Return the work of one forward pass of the transformer on one device."""
    return [
        operators.Work(work.part, work.op, work.count * blocks.number)
        for blocks in setup.model.blocks
        for work in operators.block_work(setup.model, blocks, setup.share)
    ]


def ends_work(setup: DiffusionSetup) -> list[operators.Work]:
    """Return the work before and after the steps: text encoders on every device, the decoder on one."""
    job, prompts = setup.job, setup.job.batch * setup.passes
    height, width, frames = job.height or 0, job.width or 0, job.frames or 1
    decoded = operators.decoder_work(setup.model.decoder, height, width, frames)
    encoded = [work for encoder in setup.model.text_encoders for work in operators.encoder_work(encoder, prompts)]
    return encoded + [operators.Work(work.part, work.op, work.count * job.batch) for work in decoded]


def simulate_diffusion(setup: DiffusionSetup) -> DiffusionResult:
    """Price a batch: `steps` denoising steps between text encoders and decoder.

    PyTorch's kernels run behind the host that launches them, so that a pass takes the longer of both. A ring round's
    transfer overlaps its attention (arXiv:2310.01889, section 3).
    """
    job, split = setup.job, setup.job.parallelism
    efficiency = job.efficiency or FIGURES.efficiency_by_architecture.get(setup.device.architecture, FIGURES.efficiency)
    host_us = FIGURES.host_us if job.host_us is None else job.host_us
    pricer = Pricer(setup)
    works, ends = step_work(setup), ends_work(setup)
    busy = {part: seconds / efficiency for part, seconds in seconds_by_part(works, pricer).items()}
    launches = sum(
        blocks.number * operators.block_kernels(setup.model, blocks, setup.share) for blocks in setup.model.blocks
    )
    pass_s = max(sum(busy.values()), launches * host_us * US)
    num_passes = (job.steps or 1) * setup.sequential_passes
    busy["waiting"] = pass_s - sum(busy.values())
    parts = {part: seconds * num_passes for part, seconds in busy.items()}
    parts |= {part: seconds / efficiency for part, seconds in seconds_by_part(ends, pricer).items()}
    pixels = (job.height or 0) * (job.width or 0) if job.frames == 1 else 0
    parts["saving"] = job.batch * pixels / 1e6 * FIGURES.saving_s_per_megapixel
    flops = sum(work.flops for work in works) * num_passes * split.num_devices + sum(work.flops for work in ends)
    return DiffusionResult(
        setup=setup,
        batch_s=sum(parts.values()),
        step_s=pass_s * setup.sequential_passes,
        busy_s=parts,
        flops=flops,
        energy_j=_energy_j(parts, setup.device, split.num_devices),
        memory=_memory(setup),
    )


def seconds_by_part(works: Iterable[operators.Work], pricer: Pricer) -> dict[str, float]:
    """Return the seconds of each part; of a ring's transfers, what its attention does not hide."""
    seconds: dict[str, float] = defaultdict(float)
    hidden = 0.0
    for work in works:
        each = pricer.seconds(work.op)
        if work.part == "attention" and isinstance(work.op, operators.FullAttention):
            hidden = each
        if getattr(work.op, "op", "") == "send_recv":
            each = max(each - hidden, 0.0)
        seconds[work.part] += each * work.count
    return dict(seconds)


def _energy_j(parts: Mapping[str, float], device: Device, num_devices: int) -> float | None:
    """Return the joules of all devices: power linear in the time of each part; other devices wait for the decoder."""
    if device.tdp_w is None:
        return None
    fraction = FIGURES.power_fraction
    idle_w = fraction["waiting"] * device.tdp_w
    joules = 0.0
    for part, seconds in parts.items():
        num_busy = 1 if part == "decoder" else num_devices
        joules += seconds * (num_busy * fraction[part] * device.tdp_w + (num_devices - num_busy) * idle_w)
    return joules


DECODED_FRAMES = 8
"""Frames that a video's decoder has in memory at once: diffusers decodes a latent frame or two at a time."""


def _memory(setup: DiffusionSetup) -> dict[str, float]:
    """Return the bytes of one device: weights, which no split divides, activations, and the decoder's last stage.

    Beside the residual, its norm and their sum there are queries, keys, values and copies of them in fp32, or both
    sides of the feed-forward's activation.
    """
    model, share, job = setup.model, setup.share, setup.job
    tokens = share.own_image + share.own_text
    width = 3 * model.hidden_size + max(8 * model.hidden_size, 2 * model.feed_forward_size)
    pixels = (job.height or 0) * (job.width or 0) * min(job.frames or 1, DECODED_FRAMES)
    return {
        "transformer": model.transformer_parameters * BF16_BYTES,
        "text encoders": sum(encoder.parameters for encoder in model.text_encoders) * BF16_BYTES,
        "activations": tokens * width * BF16_BYTES,
        "decoder": 4 * pixels * model.decoder.channels[-1] * BF16_BYTES,
    }
