"""How often `windtunnel gate` is wrong: changes that change nothing, and regressions of 5% in the noise of real runs.

Predicted: a server's command in 200 random other words (aliases of options, their order, defaults that are spelled out,
a container around it), against the command itself. Each must pass.

Measured: the noise of a run is drawn from pairs of runs of the same settings on different days among the published
rows of `reference/silicon`: half of the logarithm of such a pair's ratio, times the root of two, with a random sign.
With 1, 2, 3 and 5 repeats on each side, 2,000 gates of equal servers and 2,000 of one that is 5% slower.

python benchmarks/gate.py
"""

import csv
import math
import random
import sys
from collections import defaultdict

import windtunnel as wt
from reference import REFERENCE
from windtunnel.formats.clients.read import ClientResult
from windtunnel.formats.launch.read import read_launch_command
from windtunnel.production.gate import gate_change, gate_measured
from windtunnel.serving.results import Result
from windtunnel.serving.scenario import scenario_from
from windtunnel.serving.shorthand import raw_scenario

SEED, NUM_WORDINGS, NUM_GATES, REGRESSION = 24, 200, 2000, 0.05
SERVERS = (
    {"model": "llama-3.1-8b", "tp": "1", "max-num-seqs": "64"},
    {"model": "qwen3-32b", "tp": "2", "max-num-batched-tokens": "4096"},
    {"model": "gpt-oss-20b", "tp": "1", "gpu-memory-utilization": "0.85"},
    {"model": "llama-3.1-70b", "tp": "4", "max-num-seqs": "128", "max-num-batched-tokens": "8192"},
)
ALIASES = {"tp": ("-tp", "--tensor-parallel-size")}
SPELLED_OUT = ("--pipeline-parallel-size 1", "--gpu-memory-utilization 0.9", "--enable-chunked-prefill")
"""Options with the engine's default."""
SAME = ("settings_id", "backend_version", "model_path", "system", "precision", "mode", "isl", "osl", "concurrency")


def simulated(command: str) -> Result:
    base = read_launch_command(command).raw
    load = {"device": "h100_sxm", "input_tokens": 512, "output_tokens": 64, "num_requests": 40}
    return wt.simulate(scenario_from(raw_scenario(base, load, rate_per_s=4.0)))


def command_of(server: dict[str, str]) -> str:
    options = [f"--{name} {value}" for name, value in server.items() if name not in ("model", "tp")]
    return f"vllm serve {server['model']} -tp {server['tp']} {' '.join(options)}"


def reworded(server: dict[str, str], draw: random.Random) -> str:
    """Return another command of the same server."""
    options = []
    for name, value in server.items():
        if name != "model":
            flag = draw.choice(ALIASES.get(name, (f"--{name}",)))
            options.append(f"{flag}{draw.choice(' =') if flag.startswith('--') else ' '}{value}")
    options += [text for text in SPELLED_OUT if draw.random() < 0.5 and text.split()[0][2:] not in server]
    draw.shuffle(options)
    if draw.random() < 0.5:
        return f"docker run --gpus all vllm/vllm-openai --model {server['model']} {' '.join(options)}"
    return f"vllm serve {server['model']} {' '.join(options)}"


def recorded_noise() -> list[float]:
    """Return half the squared differences' roots of repeated runs: |ln ratio| of TPOT over the root of two."""
    folder = REFERENCE / "silicon"
    with (folder / "row_settings.csv").open(encoding="utf-8") as file:
        settings = {row["id"]: row for row in csv.DictReader(file)}
    groups: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    with (folder / "dev.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            about = settings.get(row["id"], {})
            if about.get("confidence") in ("high", "medium"):
                key = tuple({**row, **about}[name] for name in SAME)
                groups[key].setdefault(about["measurement_group"], float(row["silicon_tpot_ms"]))
    pairs = [tuple(values.values())[:2] for values in groups.values() if len(values) > 1]
    return [abs(math.log(other / one)) / math.sqrt(2) for one, other in pairs]


def measured(scale: float, count: int, noise: list[float], draw: random.Random) -> list[ClientResult]:
    values = [0.01 * scale * math.exp(draw.choice((-1, 1)) * draw.choice(noise)) for _ in range(count)]
    return [
        ClientResult(str(index), "vllm", 1024, 128, 100, 8, None, {"tpot": value}) for index, value in enumerate(values)
    ]


def main() -> None:
    draw = random.Random(SEED)
    known = {command_of(server): simulated(command_of(server)) for server in SERVERS}
    failed = 0
    for _ in range(NUM_WORDINGS):
        server = draw.choice(SERVERS)
        failed += not gate_change(known[command_of(server)], simulated(reworded(server, draw)), ()).passes
    print(f"predicted: {failed} of {NUM_WORDINGS} commands in other words fail")
    if not (REFERENCE / "silicon").is_dir():
        sys.exit("measured: the folder of recorded runs is missing")
    noise = recorded_noise()
    print(
        f"measured: the noise of {len(noise)} pairs of repeated runs, median {sorted(noise)[len(noise) // 2]:.2%} a run"
    )
    print("repeats on each side   equal servers that fail   5% regressions that fail")
    for count in (1, 2, 3, 5):
        shares = []
        for scale in (1.0, 1 + REGRESSION):
            gates = [
                gate_measured(measured(1.0, count, noise, draw), measured(scale, count, noise, draw))
                for _ in range(NUM_GATES)
            ]
            shares.append(sum(not gate.passes for gate in gates) / NUM_GATES)
        print(f"{count:20d}   {shares[0]:24.2%}   {shares[1]:24.2%}")


if __name__ == "__main__":
    main()
