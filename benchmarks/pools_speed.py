"""How fast runs with pools are: prefill and decode apart, against the same replicas that do both, in one run.

Every figure is checked against the work it stands for: all requests finished, every output token decoded once.
"""

import time
from collections.abc import Callable

import numpy as np

import serving_speed
from windtunnel.serving.codes import DECODE, PREFILL, ROUTERS
from windtunnel.serving.run import LoopRun, prepare_loop
from windtunnel.serving.state.pools import HandoffRules, PoolPlan
from windtunnel.workload.generate.requests import RequestArrays

NUM_REQUESTS = 100_000
REPEATS = 3
LEAST_OUTSTANDING = ROUTERS.index("least_outstanding")
TRAVEL = HandoffRules(decode_router=LEAST_OUTSTANDING, bytes_per_token=131072.0, latency_s=4e-4)


def main() -> None:
    """1,024 in, 256 out, a closed loop of 128 clients for each decode replica, or Poisson arrivals."""
    settings, cost, requests = serving_speed.prepared(128, NUM_REQUESTS, 1024, 256)
    print(
        "| prefill + decode replicas | load | requests/s | ns a row | of the aggregated speed |\n|---|---|---|---|---|"
    )
    for prefill, decode in ((1, 1), (2, 2), (4, 4), (8, 24)):
        for load, concurrency in (("closed loop", 128 * decode), ("Poisson", 0)):
            gaps_s = np.random.default_rng(0).exponential(1 / (20 * decode), NUM_REQUESTS)
            arrival_s = np.zeros(NUM_REQUESTS) if concurrency else np.cumsum(gaps_s)
            sent = RequestArrays(
                arrival_s, requests.input_tokens, requests.output_tokens, requests.priority, concurrency
            )
            own = settings._replace(concurrency=concurrency, router=LEAST_OUTSTANDING)
            plans = [
                PoolPlan(own._replace(num_replicas=count), cost, role=role, link_bytes_per_s=4e10)
                for count, role in ((prefill, PREFILL), (decode, DECODE))
            ]
            apart_s, num_rows = timed(lambda: prepare_loop(plans, sent, handoff_rules=TRAVEL).run())  # noqa: B023
            together = own._replace(num_replicas=prefill + decode)
            together_s, _ = timed(lambda: prepare_loop([PoolPlan(together, cost)], sent).run())  # noqa: B023
            print(
                f"| {prefill} + {decode} | {load} | {NUM_REQUESTS / apart_s:,.0f} | {apart_s / num_rows * 1e9:,.0f} | "
                f"{together_s / apart_s:.2f} |"
            )


def timed(run: Callable[[], LoopRun]) -> tuple[float, int]:
    """Least CPU seconds of several runs, and rows."""
    best_s = np.inf
    for _ in range(REPEATS):
        started_s = time.process_time()
        finished = run()
        records, steps = finished.requests, finished.steps
        best_s = min(best_s, time.process_time() - started_s)
        assert np.isfinite(records["finish_s"]).all()
        decoded = (steps["decode_tokens"] * steps["num_steps"]).sum() + steps["resumed_tokens"].sum()
        assert decoded == (records["output_tokens"] - 1).sum()
    return best_s, len(steps)


if __name__ == "__main__":
    main()
