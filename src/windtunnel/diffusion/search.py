"""Try every combination of a diffusion job's varied settings."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import Any

from windtunnel.diffusion.job import job_from, resolve
from windtunnel.diffusion.simulate import DiffusionResult, simulate_diffusion
from windtunnel.errors import InputError
from windtunnel.schema import set_path

MAX_POINTS = 10_000


@dataclass(frozen=True)
class Point:
    """One combination: its result, or the reason that it has none."""

    settings: Mapping[str, Any]
    result: DiffusionResult | None = None
    reason: str = ""

    @property
    def rank(self) -> tuple[float, float]:
        """Cost of an image or video, in dollars or else in seconds of devices; then the time of the batch."""
        if self.result is None:
            return (inf, inf)
        devices = self.result.setup.job.parallelism.num_devices
        return (self.result.output_usd or devices * self.result.output_s, self.result.batch_s)


def search_diffusion(raw: Mapping[str, Any], where: str) -> list[Point]:
    """Return every combination of `vary` (dotted path -> values), the cheapest first, and last those without an answer.
    InputError where `vary` is no table of lists, is too large, or names a wrong setting."""
    base = {key: value for key, value in raw.items() if key != "vary"}
    vary: Any = raw.get("vary")
    lists = vary.values() if isinstance(vary, Mapping) else ()
    if not lists or not all(isinstance(values, list) and values for values in lists):
        raise InputError(
            f"{where}: vary of a diffusion job is a table of lists", "for instance vary: {batch: [1, 4, 16]}"
        )
    num_points = prod(map(len, lists))
    if num_points > MAX_POINTS:
        raise InputError(f"{where}: vary has {num_points:,} combinations; at most {MAX_POINTS:,} are tried")
    points = []
    for values in product(*lists):
        settings = dict(zip(vary, values, strict=True))
        point = deepcopy(base)
        for path, value in settings.items():
            set_path(point, path, value)
        job = job_from(point, where)
        try:
            result = simulate_diffusion(resolve(job))
        except InputError as error:
            points.append(Point(settings, reason=error.message))
            continue
        if result.is_good:
            points.append(Point(settings, result))
            continue
        slow = f"a batch takes {result.batch_s:.3g} s; the limit is {job.limit_s:g} s"
        points.append(Point(settings, reason=slow if result.fits else "does not fit the device's memory"))
    return sorted(points, key=lambda each: each.rank)
