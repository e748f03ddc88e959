"""How long it takes to draw, and to read from files, 100,000 requests.

    python benchmarks/workload_generation.py

Every line checks what it made; times are the best of five.
"""

import gzip
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from windtunnel.workload.arrivals import Arrivals, Burst, ClosedLoop, Gamma, Poisson, Static
from windtunnel.workload.generate.requests import RequestArrays, generate
from windtunnel.workload.lengths import Empirical, Lengths, Lognormal, Normal, Uniform, Zipf
from windtunnel.workload.schema import Trace, Workload

NUM_REQUESTS = 100_000
ARRIVALS: dict[str, Arrivals] = {
    "poisson": Poisson(rate_per_s=8),
    "gamma, cv 3": Gamma(rate_per_s=8, cv=3),
    "static": Static(rate_per_s=8),
    "burst": Burst(num_per_burst=64, interval_s=10),
    "closed loop": ClosedLoop(concurrency=64, num_warmup_requests=128),
}
LENGTHS: dict[str, Lengths] = {
    "fixed": 1024,
    "uniform": Uniform(min_tokens=819, max_tokens=1024),
    "normal": Normal(mean_tokens=1024, std_tokens=256),
    "lognormal": Lognormal(median_tokens=600, sigma=1.2, max_tokens=32768),
    "zipf, 131,072 lengths": Zipf(alpha=1.1, min_tokens=1, max_tokens=131072),
    "empirical, weighted": Empirical(values=tuple(range(1, 5001)), weights=tuple(1 / i for i in range(1, 5001))),
}


def main() -> None:
    print(f"{NUM_REQUESTS:,} requests: times, prompt and output lengths")
    for name, arrivals in ARRIVALS.items():
        report(name, Workload(arrivals=arrivals, input_tokens=1024, output_tokens=256, num_requests=NUM_REQUESTS))
    for name, lengths in LENGTHS.items():
        workload = Workload(
            arrivals=Poisson(rate_per_s=8), input_tokens=lengths, output_tokens=lengths, num_requests=NUM_REQUESTS
        )
        report(f"poisson, {name}", workload)
    with tempfile.TemporaryDirectory() as folder:
        for path in write_files(Path(folder)):
            report(path.name, Workload(trace=Trace(path=str(path))))


def report(name: str, workload: Workload) -> None:
    seconds, requests = best_of_five(lambda: generate(workload, seed=0))
    assert requests.num_requests == NUM_REQUESTS
    assert requests.input_tokens.min() >= 1
    assert requests.output_tokens.min() >= 1
    print(f"  {name:<36}{seconds * 1e3:8.1f} ms")


def best_of_five(make: Callable[[], RequestArrays]) -> tuple[float, RequestArrays]:
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        requests = make()
        times.append(time.perf_counter() - start_s)
    return min(times), requests


def write_files(folder: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "arrival_s": np.cumsum(rng.exponential(0.1, NUM_REQUESTS)),
            "input_tokens": rng.integers(1, 8192, NUM_REQUESTS),
            "output_tokens": rng.integers(1, 1024, NUM_REQUESTS),
        }
    )
    paths = [folder / f"requests{suffix}" for suffix in (".csv", ".csv.gz", ".jsonl", ".parquet")]
    csv.write_csv(table, paths[0])
    paths[1].write_bytes(gzip.compress(paths[0].read_bytes()))
    paths[2].write_bytes(b"\n".join(msgspec.json.encode(row) for row in table.to_pylist()))
    parquet.write_table(table, paths[3])
    return paths


if __name__ == "__main__":
    main()
