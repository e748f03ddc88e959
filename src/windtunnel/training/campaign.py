"""Predict a complete training run: steps to a number of tokens, with checkpoints, failures, energy and cost."""

import math
from dataclasses import dataclass

from windtunnel.training.figures import FIGURES
from windtunnel.training.job import TrainingFaults
from windtunnel.training.layers.sharding import STATE_BYTES
from windtunnel.training.step import TrainingResult


@dataclass(frozen=True)
class Campaign:
    """Time, energy and cost of training on `total_tokens`."""

    total_tokens: float
    num_steps: int
    computing_s: float
    """Without failures and checkpoints."""
    elapsed_s: float
    goodput_fraction: float
    """`computing_s / elapsed_s`."""
    num_failures: float
    """Expected number."""
    checkpoint_bytes: float
    checkpoint_s: float
    """Seconds for which one checkpoint blocks training."""
    checkpoint_interval_s: float | None
    energy_j: float | None
    """Devices at their rated power for the whole time: an upper bound."""
    usd: float | None


def campaign(result: TrainingResult) -> Campaign | None:
    """Return the run over the job's `total_tokens`; None where it gives none.

    With mean time M between failures of the whole job, checkpoints that block it for d seconds every t, and R seconds
    to restart, the fraction of time that computes is (1 - d / (t + d)) / (1 + (R + t / 2) / M); t is Young's
    sqrt(2 d M) (Communications of the ACM 17(9), 1974) unless the job says otherwise.
    """
    job, setup = result.setup.job, result.setup
    if job.total_tokens is None:
        return None
    num_steps = math.ceil(job.total_tokens / (job.global_batch * job.sequence_tokens))
    computing_s = num_steps * result.step_s
    num_bytes = checkpoint_bytes(result)
    write_s = num_bytes / job.faults.checkpoint_bytes_per_s if job.faults.checkpoint_bytes_per_s else 0.0
    interval, fraction, mtbf = _goodput(
        job.faults, write_s if job.faults.checkpoint_blocks else 0.0, write_s, setup.degrees.num_devices
    )
    elapsed_s = computing_s / fraction
    watts = setup.device.tdp_w
    price = setup.device.price_usd_per_hour if job.price_usd_per_hour is None else job.price_usd_per_hour
    num_devices = setup.degrees.num_devices
    return Campaign(
        total_tokens=job.total_tokens,
        num_steps=num_steps,
        computing_s=computing_s,
        elapsed_s=elapsed_s,
        goodput_fraction=fraction,
        num_failures=elapsed_s / mtbf if mtbf else 0.0,
        checkpoint_bytes=num_bytes,
        checkpoint_s=write_s if job.faults.checkpoint_blocks else 0.0,
        checkpoint_interval_s=interval,
        energy_j=None if watts is None else watts * num_devices * elapsed_s,
        usd=None if price is None else price * num_devices * elapsed_s / 3600,
    )


def checkpoint_bytes(result: TrainingResult) -> float:
    """Return the bytes of 16-bit parameters, master copy and optimizer state of all that is trained."""
    precision = result.setup.job.precision
    each = 2.0 + FIGURES.num_moments[result.setup.job.optimizer] * STATE_BYTES[precision.moments]
    each += STATE_BYTES[precision.master_weights or "fp32"] if precision.master_weights != "bf16" else 0.0
    return result.num_trained * each


def _goodput(
    faults: TrainingFaults, blocking_s: float, write_s: float, num_devices: int
) -> tuple[float | None, float, float | None]:
    """Return the checkpoint interval, the fraction of time that computes, and the job's mean time between failures."""
    mtbf = faults.device_mtbf_s / num_devices if faults.device_mtbf_s else None
    interval = faults.checkpoint_interval_s
    if interval is None and mtbf is not None and write_s > 0:
        interval = math.sqrt(2 * write_s * mtbf)
    lost = (faults.restart_s + (interval or 0.0) / 2) / mtbf if mtbf else 0.0
    writing = blocking_s / (interval + blocking_s) if interval else 0.0
    return interval, (1.0 - writing) / (1.0 + lost), mtbf
