"""Whether `windtunnel recommend` names the cheapest deployment, and how long it takes.

Random cases with a fixed seed: a model, traffic, limits, devices and, in half of them, a load. Each is also searched
exhaustively over a wider space: the same checkpoints and layouts, every token budget of 512 to 32,768 and every limit
of running requests of 32 to 1,024. The recommended deployment and those that the exhaustive search ends in are then
priced by the mean of their capacities over the same five streams of requests, found afresh with a step of 0.5%.
Printed are the costs over that of the exhaustive winner, which counts, and over that of the cheapest of its finalists,
which chance may have put behind. A case in which nothing keeps the limits is refused by both; another is drawn.

Then the time of one recommendation over three devices with the usual space, as CPU seconds and on the clock; and for
some loads the replicas that are counted, those that are simulated behind one router, and how long that takes.

python benchmarks/recommend.py [NUM_CASES]
"""

import math
import os
import random
import sys
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec

from windtunnel.metrics.limits import Limit, parse_limits
from windtunnel.report.search.study import evidence_of
from windtunnel.search.evaluation.evaluate import Evaluator
from windtunnel.search.evaluation.schema import Question
from windtunnel.search.executors import HERE, Means
from windtunnel.search.fleets import FleetSimulator, fleets
from windtunnel.search.recommend import DEPLOYMENT, deployments_space
from windtunnel.search.space.space import Space, point_at
from windtunnel.search.store import Store
from windtunnel.search.study import Study, search
from windtunnel.units import format_count

SEED, NUM_CASES, NUM_STREAMS = 20, 20, 5
NUM_REQUESTS = 8_000
"""Requests of the streams that deployments are priced with: as many as the trace of code has, in thousands."""
MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "llama-3.1-70b", "gpt-oss-20b", "qwen2.5-7b")
DEVICES = ("h100_sxm", "h200_sxm", "a100_sxm", "l40s", "b200_sxm", "l4")
TTFTS, TPOTS = ("200ms", "500ms", "1s", "2s"), ("20ms", "30ms", "50ms", "100ms")
STATISTICS = ("p50", "p90", "p99")
TOKEN_BUDGETS = [None, 512, 1024, 2048, 4096, 8192, 16384, 32768]
RUNNING = [None, 32, 64, 128, 256, 512, 1024]
LOADS = 3.0, 20.0, 100.0, 400.0
"""Requests a second to take replicas for."""
MOST_S = 60
"""Seconds that a recommendation over three devices may take on two idle cores."""
NOT_WORSE = 1.005
"""Ratio of costs up to which two deployments cost the same: one step of the loads that a capacity is found on."""


@dataclass(frozen=True)
class Case:
    """One question to `windtunnel recommend`."""

    model: str
    workload: dict[str, Any]
    slo: str
    devices: tuple[str, ...]
    max_devices: int
    load: float | None

    @property
    def limits(self) -> tuple[Limit, ...]:
        return parse_limits(self.slo)

    @property
    def title(self) -> str:
        load = "" if self.load is None else f", {self.load:g} requests/s"
        return f"{self.model} on {'+'.join(self.devices)} (at most {self.max_devices}), {self.slo}{load}"

    def space(self) -> Space:
        """Return the space that `windtunnel recommend` searches."""
        shared = {"model": self.model, "deployment": {"device": self.devices[0]}, "workload": self.workload}
        return deployments_space(shared, self.devices, self.limits, {"devices": self.max_devices})


def drawn(rng: random.Random) -> Case:
    """Draw a case."""
    if rng.random() < 0.3:
        workload: dict[str, Any] = {"trace": {"path": rng.choice(("azure2023_conv", "azure2023_code"))}}
    else:
        middles = rng.choice((256, 512, 1024, 2048, 4096)), rng.choice((32, 128, 256, 512))
        lengths = [{"type": "uniform", "min_tokens": middle // 2, "max_tokens": 3 * middle // 2} for middle in middles]
        workload = dict(zip(("input_tokens", "output_tokens"), lengths, strict=True))
    workload |= {"arrivals": {"type": "poisson", "rate_per_s": 1.0}, "num_requests": 300}
    ttft, tpot = (
        f"{name}_{rng.choice(STATISTICS)}={rng.choice(times)}" for name, times in (("ttft", TTFTS), ("tpot", TPOTS))
    )
    devices = tuple(rng.sample(DEVICES, rng.choice((1, 2, 3))))
    load = rng.choice((20.0, 100.0, 400.0)) if rng.random() < 0.5 else None
    return Case(rng.choice(MODELS), workload, f"{ttft},{tpot}", devices, rng.choice((1, 2, 4)), load)


def winners(space: Space, load: float | None) -> list[int]:
    """Return the points that a search ends in, the one that it names first: the cheapest replicas for the load, or the
    finalists in their order."""
    outcome = search(space, Store(None, print)).outcomes[0]
    if load is None or not outcome.ranking:
        return outcome.ranking[: outcome.num_finalists]
    return [fleet.index for fleet in fleets(outcome, load, outcome.num_finalists)]


def cost(space: Space, index: int, load: float | None) -> float:
    """Return USD of a million requests, by the mean capacity over the streams; infinity where a limit is broken."""
    evaluator = Evaluator(space)
    runs = [
        evaluator.evaluate(index, None, Question(seed=seed, num_requests=NUM_REQUESTS)) for seed in range(NUM_STREAMS)
    ]
    if not all(run.holds for run in runs):
        return math.inf
    mean_load, price = fmean(run.load for run in runs), runs[0].figures["usd_per_hour"]
    copies = 1 if load is None else math.ceil(load / mean_load * (1 - 1e-9))
    return copies * price / (load or mean_load) / 3600 * 1e6


def _fleet_text(study: Study, load: float) -> str:
    """Say how many replicas of the cheapest deployment are counted and simulated, and how long the answer takes."""
    counted, started_s = fleets(study.outcomes[0], load, 1)[0], time.process_time()
    found = FleetSimulator(study, study.outcomes[0], load).fewest(counted)
    alone_s, started_s = time.process_time() - started_s, time.process_time()
    evidence_of(study, Store(None, print), 5, load, recommends=True)
    whole_s = time.process_time() - started_s
    how = f"{found.copies} simulated in {alone_s:.1f} CPU s, the whole answer in {whole_s:.1f}"
    return f"{load:g} requests/s: {format_count(counted.copies, 'replica')} counted, {how}"


def usual_time() -> str:
    """Say how long a recommendation over three devices takes, with the workload of the guide, on two processes."""
    trace = {
        "trace": {"path": "azure2023_conv"},
        "arrivals": {"type": "poisson", "rate_per_s": 1.0},
        "num_requests": 1000,
    }
    case = Case("llama-3.1-70b", trace, "ttft_p90=2s,tpot_p99=50ms", ("h100_sxm", "b200_sxm", "l40s"), 8, None)
    space = case.space()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    study = search(space, Store(None, print), HERE)
    alone = (
        f"{time.process_time() - cpu_s:.1f} CPU s in one process, {time.perf_counter() - started_s:.1f} s on the clock"
    )
    started_s = time.perf_counter()
    search(space, Store(None, print), Means("processes", 2, None))
    both = f"{time.perf_counter() - started_s:.1f} s on the clock in two"
    times = f"{alone}, {both}; at most {MOST_S} s is wanted, and the machine's load is {os.getloadavg()[0]:.1f}"
    lines = [f"{space.num_points} points of {case.title}: {times}", *(_fleet_text(study, load) for load in LOADS)]
    return "\n".join(lines)


def main() -> int:
    """Print the cases, the ratio of costs in each, and the time of a usual recommendation."""
    rng = random.Random(SEED)
    num_cases = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_CASES
    scored, refused, missed, dearest = 0, 0, 0, 0.0
    while scored < num_cases:
        case = drawn(rng)
        usual = case.space()
        whole = msgspec.structs.replace(
            usual,
            vary={DEPLOYMENT: usual.vary[DEPLOYMENT], "max_num_batched_tokens": TOKEN_BUDGETS, "max_num_seqs": RUNNING},
            strategy="exhaustive",
        )
        started_s = time.process_time()
        recommended = winners(usual, case.load)
        middle_s = time.process_time()
        best = winners(whole, case.load)
        times = f"{middle_s - started_s:.1f} and {time.process_time() - middle_s:.1f} CPU s"
        if not recommended or not best:
            refused += 1
            missed += bool(recommended) != bool(best)
            print(f"refused  {case.title}: recommended {recommended}, exhaustive {best}", flush=True)
            continue
        scored += 1
        costs = {index: cost(whole, index, case.load) for index in best}
        cheapest = min(best, key=lambda index: costs[index])
        price = cost(usual, recommended[0], case.load)
        ratio = price / costs[best[0]]
        dearest = max(dearest, price / costs[cheapest])
        missed += ratio > NOT_WORSE
        titles = point_at(usual, recommended[0]).title, point_at(whole, best[0]).title
        print(
            f"{ratio:7.3f} {price / costs[cheapest]:7.3f}  {case.title}: {titles[0]}; best: {titles[1]} ({times})",
            flush=True,
        )
    cheap = f"{scored - missed} as cheap as the exhaustive winner, at most {dearest:.3f} of the cheapest finalist"
    print(f"{scored} cases scored, {refused} refused by both; {cheap}")
    print(usual_time())
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
