"""Electric power: what a device draws in steps and between them, and what that is at the meter."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from windtunnel.compiled.arrays import Floats
from windtunnel.errors import InputError
from windtunnel.schema import Fraction, NonNegative, Positive, Schema, check_at_least, decode, read_yaml

Share = TypeVar("Share", float, Floats)

JOULES_PER_KWH = 3.6e6
LEAST_SHARE = 0.5
"""Share of the power at which operators were measured down to which the clock is predicted."""


class PowerTerms(Schema):
    """Electric power of a deployment, beyond what the catalogue knows of its devices."""

    busy_w: NonNegative | None = None
    """Power of one device in every step; None takes it by what a step computes and reads, at most the thermal design
    power."""
    limit_w: Positive | None = None
    """Power limit of one device, as `nvidia-smi --power-limit` sets it; None: the thermal design power. What arithmetic
    bounds takes longer (`clock_share`); limits below half of the design power are refused."""
    idle_fraction: Fraction = 0.15
    """Share of `busy_w`, or of the thermal design power, that an idle device draws. Measured on an A100 SXM: 62 W of
    400 W."""
    host_w: NonNegative = 0.0
    """Power of the host, network cards, switches and fans, for each device, busy or not."""
    pue: float = 1.0
    """Energy of the data centre over that of its servers (power usage effectiveness)."""
    carbon_g_per_kwh: NonNegative | None = None
    """Grams of CO2 equivalent that a kilowatt-hour of the grid stands for; None leaves them out."""

    def check(self) -> None:
        check_at_least(1, pue=self.pue)

    def slower(self, design_w: float | None, power_share: float, architecture: str) -> float:
        """Return how many times as long arithmetic takes at the power limit as at the device's design power. InputError
        where the limit is out of the law's range, or the design power is not known.

        Args:
            power_share: design power over that at which the operators of as many multiprocessors were measured.
        """
        if self.limit_w is None:
            return 1.0
        if design_w is None:
            raise InputError("power.limit_w needs the device's tdp_w, which is not known", "leave it out")
        least_w = LEAST_SHARE / power_share * design_w
        if not least_w <= self.limit_w <= design_w:
            raise InputError(
                f"power.limit_w is {self.limit_w:g}; {least_w:.4g} to {design_w:g} W can be predicted",
                "below, clocks fall faster than any law that was measured; above, nothing changes",
            )
        limited = clock_share(self.limit_w / design_w * power_share, architecture)
        return clock_share(power_share, architecture) / limited


class Power(Schema):
    """Electric power of all devices, with what `deployment.power` says of hosts and data centre."""

    mean_w: float
    energy_j: float
    """Over the span."""
    output_token_j: float
    """Energy over output tokens."""
    request_j: float | None = None
    """Energy over requests; None in results that do not say."""
    carbon_g: float | None = None
    """Grams of CO2 equivalent over the span; None where the grid's are not given."""


class PowerCurve(Schema):
    """Draw in a step, as a share of the power limit: steps + memory x MBU + compute x the root of MFU, at most 1.

    Fitted by `benchmarks/energy.py` to runs whose power was measured; `power.yaml` has the coefficients and the source.
    """

    steps: float
    memory: float
    compute: float

    def fraction(self, mbu: Floats, mfu: Floats) -> Floats:
        """Return the share of the limit for each step's use of memory bandwidth and of arithmetic, `[n]` each."""
        return np.minimum(self.steps + self.memory * mbu + self.compute * np.sqrt(mfu), 1.0)


class _Curves(Schema):
    by_architecture: dict[str, PowerCurve]
    other: PowerCurve


_CURVES = decode(read_yaml(Path(__file__).with_name("power.yaml")), _Curves, "power.yaml")


def curve_of(architecture: str) -> PowerCurve:
    """Return the curve of an architecture, or that of all measured ones together."""
    return _CURVES.by_architecture.get(architecture, _CURVES.other)


def clock_share(power: float, architecture: str) -> float:
    """Return the clock of arithmetic at a share of the power at which it was measured, over its clock there.

    Dynamic power grows as f V^2, between the clock and its cube, taken for the square; `steps` of the curve stays.

    MLPerf Inference 4.1 has H200 at 500 of 700 W at 0.81 (Llama-2-70B) and 0.83 (Mixtral) of its rate, arithmetic 0.79;
    at 350 W at 0.65 (GPT-J), 0.57. Six RTX 3090 of 350 W have prompts at 0.94, 0.85 and 0.60 with 300, 250 and 200 W
    (MiniMax-M2.5, llmgarage.ai, February 2026): 0.89, 0.76 and 0.60. InputError where the share is below what was
    measured.
    """
    if power < LEAST_SHARE * (1.0 - 1e-9):
        why = f"at {power:.0%} of the power for each multiprocessor at which operators were measured"
        raise InputError(f"the clock {why} is not known", f"{LEAST_SHARE:.0%} is; correct tdp_w, or leave it out")
    static = curve_of(architecture).steps
    return math.sqrt((min(power, 1.0) - static) / (1.0 - static))


def waited(measured_w: float, slow_w: float, predicted_w: float, idle_w: float, slower: float) -> bool:
    """Whether devices that took `slower` times their predicted time waited, rather than computing for longer.

    `slow_w` is their draw in steps that much slower. If they compute as predicted, and are idle for the rest, they draw
    idle + (predicted - idle) / slower: less than half way between the two counts as waiting.
    """
    return measured_w < (slow_w + idle_w + (predicted_w - idle_w) / slower) / 2


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Power of a device and its share of host and data centre, linear in the share of time u in which it runs steps.

    (idle + (busy - idle) u + host) x PUE. Source: Fan, Weber and Barroso, Power Provisioning for a Warehouse-sized
    Computer (ISCA 2007), section 4.
    """

    idle_w: float
    busy_w: float
    """Mean over the time in steps."""
    terms: PowerTerms

    def at(self, busy_fraction: Share) -> Share:
        """Return the watts at one share of busy time, or at each of several."""
        return self.at_meter(self.idle_w + (self.busy_w - self.idle_w) * busy_fraction)

    def at_meter(self, device_w: Share) -> Share:
        """Return the watts of a device that draws `device_w` with its share of host and data centre."""
        return (device_w + self.terms.host_w) * self.terms.pue


def power_of(
    mean_w: float | None, span_s: float, num_requests: float, output_tokens: float, terms: PowerTerms
) -> Power | None:
    """Return the power and energy of all devices together, None where their power is unknown."""
    if mean_w is None:
        return None
    energy_j, grams = mean_w * span_s, terms.carbon_g_per_kwh
    return Power(
        mean_w=mean_w,
        energy_j=energy_j,
        output_token_j=energy_j / output_tokens,
        request_j=energy_j / num_requests,
        carbon_g=None if grams is None else energy_j / JOULES_PER_KWH * grams,
    )
