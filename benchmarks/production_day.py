"""A day in production: whole public traces, and a synthetic week at the scale of the Azure 2024 traces, end to end.

    python benchmarks/production_day.py                  the 2023 traces, a trace of ten million rows, the week
    python benchmarks/production_day.py --week-scale 0.1 a tenth of the week's requests on a tenth of its replicas

Each part runs in a process of its own, so that the peak memory is its own; every part checks the work done.

The week has as many requests as the published traces: 16,803,695 of code completion and 27,303,999 of conversation,
each in seven days (https://github.com/Azure/AzurePublicDataset, analysis/AzureLLMInferenceDataset2024.ipynb). Lengths
are drawn, pairs kept, from the 2023 traces of the same two services. The shape of the load over the week is assumed:
working hours at three times the night for conversation and six times for code, weekends at half of that.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.serving.long_run import simulate_long
from windtunnel.serving.scenario import Scenario, scenario_from
from windtunnel.serving.simulate import simulate
from windtunnel.workload.generate.requests import generate
from windtunnel.workload.schema import Trace, Workload

CODE_REQUESTS, CONVERSATION_REQUESTS = 16_803_695, 27_303_999
DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0
WEEK_REPLICAS = 100
TRACE_ROWS = 10_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--week-scale", type=float, default=1.0, help="share of the week's requests and replicas")
    parser.add_argument("--threads", type=int, default=2, help="replicas of the week simulated at once")
    parser.add_argument("--only", choices=("traces", "rows", "week"), help="one part")
    options = parser.parse_args()
    print(f"{'':<44}{'requests':>12}{'wall':>9}{'CPU':>9}{'peak memory':>13}")
    if options.only in (None, "traces"):
        in_own_process(trace, "azure2023_code")
        in_own_process(trace, "azure2023_conv")
    if options.only in (None, "rows"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.csv"
            write_rows(path, TRACE_ROWS)
            in_own_process(read_rows, str(path))
    if options.only in (None, "week"):
        in_own_process(week, options.week_scale, options.threads)


def in_own_process(part: Callable[..., Any], *arguments: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=part, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, "a part failed"


def report(name: str, num_requests: int, started_s: float, detail: str) -> None:
    use = resource.getrusage(resource.RUSAGE_SELF)
    wall_s, cpu_s = time.perf_counter() - started_s, use.ru_utime + use.ru_stime
    print(f"{name:<44}{num_requests:>12,}{wall_s:>8.1f}s{cpu_s:>8.1f}s{use.ru_maxrss / 1024:>9,.0f} MiB\n  {detail}")


def trace(name: str) -> None:
    """A whole trace on four replicas of Llama-3.1-70B."""
    raw: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-70B",
        "deployment": {"device": "h100_sxm", "parallelism": {"tp": 4}, "replicas": 4, "router": "least_outstanding"},
        "workload": {"trace": {"path": name}},
    }
    simulate(scenario_from({**raw, "workload": {**raw["workload"], "num_requests": 10}}))  # loads the compiled loop
    started_s = time.perf_counter()
    result = simulate(scenario_from(raw))
    summary = result.summary
    assert summary.checks is not None
    assert summary.checks.passed
    assert summary.num_requests == {"azure2023_code": 8819, "azure2023_conv": 19366}[name]
    rate = summary.num_requests / result.engine_time_s
    report(
        f"{name}, four replicas of Llama-3.1-70B TP 4",
        summary.num_requests,
        started_s,
        f"TTFT p50 {summary.ttft_s.p50:.3f} s, p99 {summary.ttft_s.p99:.3f} s; busy "
        f"{summary.utilisation.busy_fraction:.0%}; loop {result.engine_time_s:.2f} s, {rate:,.0f} requests/s",
    )


def write_rows(path: Path, count: int) -> None:
    """A trace in the layout of Azure's, a block at a time."""
    rng = np.random.default_rng(0)
    start = np.datetime64("2024-05-10T00:00:00", "us")
    time_s = 0.0
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for _ in range(0, count, 500_000):
            times_s = time_s + np.cumsum(rng.exponential(0.06, 500_000))
            time_s = float(times_s[-1])
            dates = np.datetime_as_string(start + (times_s * 1e6).astype("timedelta64[us]"))
            tokens = zip(dates, rng.integers(1, 8000, 500_000), rng.integers(1, 1000, 500_000), strict=True)
            file.writelines(f"{date.replace('T', ' ')}+00:00,{prompt},{output}\n" for date, prompt, output in tokens)


def read_rows(path: str) -> None:
    started_s = time.perf_counter()
    requests = generate(Workload(trace=Trace(path=path)), seed=0)
    assert requests.num_requests == TRACE_ROWS
    report(
        "a CSV trace of ten million rows, read",
        requests.num_requests,
        started_s,
        f"{Path(path).stat().st_size / 2**20:,.0f} MiB of text; the arrays have {32 * TRACE_ROWS / 2**20:,.0f} MiB",
    )


def week(scale: float, num_threads: int) -> None:
    """Both services on one pool of Llama-3.1-8B."""
    started_s = time.perf_counter()
    run = simulate_long(week_scenario(scale), num_threads=num_threads)
    summary = run.summary
    assert summary.checks.passed
    assert abs(summary.num_requests / ((CODE_REQUESTS + CONVERSATION_REQUESTS) * scale) - 1) < 0.01
    shares = ", ".join(f"{good.fraction:.1%} of {name}" for name, good in summary.tenants.items())
    report(
        f"a week, {round(WEEK_REPLICAS * scale)} replicas of Llama-3.1-8B",
        summary.num_requests,
        started_s,
        f"drawn in {run.generate_time_s:.1f} s; loop {run.engine_cpu_s:.1f} CPU-s, {summary.num_steps:,} steps; busy "
        f"{summary.busy_fraction:.0%}; TTFT p50 {summary.ttft_s.p50:.3f} s, p99 {summary.ttft_s.p99:.3f} s; "
        f"within limits: {shares}",
    )


def week_scenario(scale: float) -> Scenario:
    """Two tenants with a rate curve of seven days each."""
    services = (
        ("code", CODE_REQUESTS, 6.0, "azure2023_code", {"ttft_s": 0.5, "e2e_s": 2.0}),
        ("conversation", CONVERSATION_REQUESTS, 3.0, "azure2023_conv", {"ttft_s": 1.0, "tpot_s": 0.05}),
    )
    tenants = [
        {
            "name": name,
            "arrivals": {"type": "curve", "period_s": WEEK_S, "points": week_curve(count * scale, peak)},
            "trace": {"path": path, "order": "resampled"},
            "slo": slo,
        }
        for name, count, peak, path, slo in services
    ]
    return scenario_from(
        {
            "model": "meta-llama/Llama-3.1-8B",
            "deployment": {"device": "h100_sxm", "replicas": max(round(WEEK_REPLICAS * scale), 1)},
            "workload": {"tenants": tenants, "duration_s": WEEK_S},
        }
    )


def week_curve(num_requests: float, peak: float) -> list[dict[str, float]]:
    """Night until 6 h, up to the peak from 10 to 16 h, down to the night at 22 h; the peak is half on two days."""
    points = []
    for day in range(7):
        top = peak if day < 5 else max(peak / 2, 1.0)
        points += [(day * DAY_S + hour * 3600, level) for hour, level in ((6, 1.0), (10, top), (16, top), (22, 1.0))]
    times = np.array([at_s for at_s, _ in points])
    levels = np.array([level for _, level in points])
    around = np.append(times, times[0] + WEEK_S), np.append(levels, levels[0])
    area = float(np.trapezoid(around[1], around[0]))
    return [{"at_s": at_s, "rate_per_s": level * num_requests / area} for at_s, level in points]


if __name__ == "__main__":
    main()
