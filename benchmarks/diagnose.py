"""Whether `windtunnel diagnose` finds the fault that was put into a run, and stays silent about healthy ones.

Random deployments with a fixed seed: ten models, three engines, three devices, loads from a third of what a server
sustains to nine tenths, prompts of 128 to 4,096 tokens. A fault of random severity goes into the simulation: one that
lengthens a mean latency beyond the prediction's 99% interval, or with --before by at least 15%. The latencies then get
the noise of recorded runs: every request's, and a factor on all of them. The diagnosis sees the recorded requests and
the description of the healthy deployment; with --before also a healthy run of other requests, with noise of its own.
A quarter of the deployments have two to four replicas, a fifth share the beginnings of their prompts, and a tenth have
pools for prefill and decode. Faults that only some deployments can have are drawn first where they can.

Printed are the shares of runs whose first cause, or one of the first three, is the fault; the error of what mending it
gains, as a share of the recorded gap of the latest latency; and false alarms on healthy runs.

    python benchmarks/diagnose.py [NUM_RUNS] [--before] [--seed 24]

Ctrl-C prints what the runs so far give; parts with seeds of their own are other deployments.
"""

import argparse
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import windtunnel as wt
from windtunnel.errors import InputError
from windtunnel.production.causes import CAUSES, Change
from windtunnel.production.diagnose import LATENCIES, Diagnosis, diagnose, served_by, widths_of
from windtunnel.production.observed import Observed
from windtunnel.production.replay import Replay, replay_of
from windtunnel.serving.scenario import Scenario
from windtunnel.serving.shorthand import parse_lengths
from windtunnel.workload.generate.requests import generate

SEED, NUM_RUNS, NUM_REQUESTS = 24, 500, 400
MODELS = {
    "llama-3.1-8b": (1, 2),
    "llama-3.1-70b": (4, 8),
    "qwen3-8b": (1, 2),
    "qwen3-32b": (1, 2, 4),
    "qwen3-30b-a3b": (1, 2),
    "qwen2.5-7b": (1,),
    "qwen2.5-0.5b": (1,),
    "gpt-oss-20b": (1, 2),
    "gpt-oss-120b": (2, 4),
    "mixtral-8x7b": (2, 4),
}
DEVICES = ("h100_sxm", "h200_sxm", "b200_sxm")
ENGINES = ("vllm", "sglang", "trtllm")
RARE, USUAL = ("prefix_cache_cold", "kv_transfer", "slow_replica", "missing_replicas"), 0.5
"""Causes that only some deployments can have, and the share of these that have a usual one all the same."""
LEAST_EFFECT = 0.15
MOST_EFFECT = 30.0
REQUEST_NOISE = {"ttft": 0.1, "tpot": 0.02}
RUN_NOISE = {"ttft": 0.04, "tpot": 0.006}
"""Standard deviation of the logarithm: of one request's latency, and of all of a run's."""


def drawn_scenario(draw: random.Random) -> Scenario:
    model = draw.choice(list(MODELS))
    options: dict[str, Any] = {
        "model": model,
        "device": draw.choice(DEVICES),
        "tp": draw.choice(MODELS[model]),
        "engine": draw.choice(ENGINES),
        "input_tokens": draw.choice((128, 512, 1024, 2048, 4096)),
        "output_tokens": draw.choice((32, 128, 256)),
        "num_requests": NUM_REQUESTS,
        "seed": draw.randrange(1000),
    }
    settings: dict[str, Any] = {}
    match draw.random():
        case kind if kind < 0.25:
            settings["deployment.replicas"] = draw.choice((2, 3, 4))
        case kind if kind < 0.45:
            settings["workload.shared_prompts"] = {"tokens": options["input_tokens"]}
        case kind if kind < 0.55:
            roles = ("prefill", "decode")
            settings["deployment.pools"] = [{"name": role, "role": role, "replicas": 1} for role in roles]
    options["settings"] = settings
    for name in ("input_tokens", "output_tokens"):
        options[name] = parse_lengths(name, f"{options[name] // 2}-{options[name] * 3 // 2}")
    probe = wt.simulate(wt.scenario(**options, concurrency=256))
    rate = probe.summary.throughput.requests_per_s * draw.choice((0.3, 0.6, 0.9))
    return wt.scenario(**options, rate_per_s=rate)


def noisy(latencies: Mapping[str, Any], recorded: Observed, random_: np.random.Generator) -> Observed:
    """Return requests with latencies of a simulation, and the noise of a real run."""

    def scaled(name: str) -> Any:
        run = np.exp(RUN_NOISE[name] * random_.standard_normal())
        return latencies[name] * run * np.exp(REQUEST_NOISE[name] * random_.standard_normal(recorded.arrival_s.size))

    ttft_s, tpot_s = scaled("ttft"), np.nan_to_num(scaled("tpot"))
    e2e_s = ttft_s + tpot_s * np.maximum(recorded.output_tokens - 1, 0)
    zeros = np.zeros(recorded.arrival_s.size)
    return Observed(
        recorded.arrival_s, recorded.input_tokens, recorded.output_tokens, ttft_s, e2e_s, zeros, recorded.position
    )


def sent(scenario: Scenario, seed: int) -> Observed:
    requests = generate(scenario.workload, seed)
    nothing = np.zeros(requests.arrival_s.size)
    arrival_s = requests.arrival_s - requests.arrival_s[0]
    return Observed(
        arrival_s, requests.input_tokens, requests.output_tokens, nothing, nothing, nothing, np.arange(nothing.size)
    )


def with_fault(replay: Replay, draw: random.Random, has_before: bool) -> tuple[str, float, dict[str, Any]] | None:
    """Return a fault, its severity and the latencies with it; None where none that the server can have shows."""
    healthy = replay.latencies(Change())
    result = replay.healthy()
    served = served_by(replay, result, healthy, has_before)
    widths = {name: LEAST_EFFECT if has_before else np.expm1(width) for name, width in widths_of(result).items()}
    names = draw.sample([*CAUSES], len(CAUSES))
    names.sort(key=lambda name: name not in RARE or draw.random() < USUAL)
    for name in names:
        severities = list(CAUSES[name].severities(served))
        for severity in draw.sample(severities, len(severities)):
            try:
                faulty = replay.latencies(CAUSES[name].change(severity, served))
            except InputError:
                continue
            effects = {each: np.nanmean(faulty[each]) / np.nanmean(healthy[each]) - 1 for each in LATENCIES}
            if max(effects.values()) < MOST_EFFECT and any(effects[each] > 1.1 * widths[each] for each in LATENCIES):
                return name, severity, faulty
    return None


@dataclass
class Tally:
    """What the diagnoses so far were."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    confused: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    alarms: int = 0
    num_runs: int = 0

    def add(self, fault: tuple[str, float], found: Diagnosis, of_healthy: Diagnosis) -> None:
        name, severity = fault
        first = found.findings[0].name if found.findings else "nothing"
        three = [finding.name for finding in (*found.findings, *found.others)][:3] if found.findings else []
        alarm = f"; healthy, found {of_healthy.findings[0].name}" if of_healthy.findings else ""
        self.num_runs += 1
        self.alarms += bool(alarm)
        self.counts[name].update(runs=1, first=first == name, three=name in three)
        text = f"{self.num_runs}: {name} {severity:.3g}, found {', '.join(three) or 'nothing'}{alarm}"
        print(text, file=sys.stderr, flush=True)
        if first == name:
            late, first_found = found.late[0], found.findings[0]
            gap_s = found.recorded_s[late] - found.healthy_s[late]
            self.errors.append(abs((found.recorded_s[late] - first_found.without_s[late]) / gap_s - 1))
        else:
            self.confused[name, first] += 1

    def print(self) -> None:
        print(f"{'cause':20s} runs   first  among three")
        for name, count in [*sorted(self.counts.items()), ("all", sum(self.counts.values(), Counter()))]:
            rates = [count[part] / max(count["runs"], 1) for part in ("first", "three")]
            print(f"{name:20s} {count['runs']:4d} {rates[0]:7.1%} {rates[1]:8.1%}")
        if self.errors:
            middle, high = np.percentile(self.errors, [50, 90])
            print(f"gain as a share of the gap: median error {middle:.1%}, 90th percentile {high:.1%}")
        print(f"false alarms on healthy runs: {self.alarms} of {self.num_runs}")
        if self.times:
            print(f"time of a diagnosis: median {np.median(self.times):.1f} s, most {max(self.times):.1f} s")
        print("confused:", ", ".join(f"{a} as {b} ({count})" for (a, b), count in self.confused.most_common(12)))


def run_one(tally: Tally, draw: random.Random, noise: np.random.Generator, has_before: bool) -> None:
    """Draw a deployment and a fault, and diagnose it with and without; nothing where none that it can have shows."""
    try:
        scenario = drawn_scenario(draw)
        requests = sent(scenario, scenario.seed)
        replay = replay_of(scenario, requests)
        fault = with_fault(replay, draw, has_before)
    except InputError:
        return
    if fault is None:
        return
    name, severity, faulty = fault
    healthy = replay.latencies(Change())
    before = []
    if has_before:
        # Which prompts share their beginning is known of the scenario's own requests alone.
        others = sent(scenario, scenario.seed + (scenario.workload.shared_prompts is None))
        before.append(noisy(replay_of(scenario, others).latencies(Change()), others, noise))
    started_s = time.perf_counter()
    found = diagnose(scenario, noisy(faulty, requests, noise), before)
    tally.times.append(time.perf_counter() - started_s)
    tally.add((name, severity), found, diagnose(scenario, noisy(healthy, requests, noise), before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_runs", nargs="?", type=int, default=NUM_RUNS, metavar="NUM_RUNS")
    parser.add_argument("--before", action="store_true", help="a healthy run is known, too")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    draw, noise = random.Random(options.seed), np.random.default_rng(options.seed)
    tally = Tally()
    try:
        while tally.num_runs < options.num_runs:
            run_one(tally, draw, noise, options.before)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    tally.print()


if __name__ == "__main__":
    main()
