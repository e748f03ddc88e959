"""What `windtunnel observe` learns from recorded steps, from metrics alone and from requests, and how it sees drift.

    python benchmarks/observe.py [DIR] [--learn SHARE] [--page docs/guides/observe.md]

DIR holds `engine_steps/` (vLLM 0.20.1 on B300) and `serving/per_request/`; it is also taken from
WINDTUNNEL_REFERENCE. SHARE of each run's steps is learnt from, 0.2 where it is not given. Errors of the others are
those of the calibration file, priced again. `--page` replaces the three tables between this benchmark's marks.

Metrics are made of the steps as the server would have exported them each second: sums and buckets of the time between
tokens and of the tokens of a step, counts of tokens and prompts, and the KV cache's use at the scrape; lengths are
those of the requests that were sent. What is learnt from them is judged on the same later steps.

Logs of vLLM are made of recorded throughput and requests under way; what is learnt from them is judged by the requests.

For drift, all times from a random step on get 5% longer or shorter, behind the steps that the calibration is learnt
from. Of attention data-parallel runs one rank is recorded, and a step waits for all of them: they are counted apart.
"""

import argparse
import csv
import gzip
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from diagnose_recorded import runs as recorded_requests
from readers.pages import write_table
from reference import REFERENCE
from windtunnel.calibration.steps.price import KINDS, PricedSteps, in_order, price_run
from windtunnel.calibration.steps.read import StepRun, read_step_runs
from windtunnel.errors import InputError
from windtunnel.formats.telemetry.logs import read_log
from windtunnel.formats.telemetry.prometheus import DECLARED
from windtunnel.formats.telemetry.record import INTERVAL, Buckets, ServerRecord, record_of_requests
from windtunnel.metrics.accuracy import Score, score
from windtunnel.production.drift import COUNTS, OTHERS, states_of, watch
from windtunnel.production.intervals import price_intervals
from windtunnel.production.observe import Observation, observe_record, observe_steps, with_calibration
from windtunnel.serving.priced_deployments import PricedDeployments
from windtunnel.serving.scenario import resolve

PERIOD_S = 1.0
LENGTHS = np.array([mantissa * 10.0**power for power in range(6) for mantissa in (1, 2, 5)] + [np.inf])
STEP_TOKENS = np.array([*DECLARED["buckets"]["iteration"], np.inf])
GAPS_S = np.array(
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, np.inf]
)
SHIFT, WITHIN, NUM_SHIFTS = 1.05, 200, 20
SHOWN = ("decode", "mixed")


def counted(values: np.ndarray, bounds: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    return np.bincount(np.searchsorted(bounds, values), weights, bounds.size).astype(float)


def lengths_of(path: Path) -> dict[str, dict[str, Buckets]]:
    """Return run -> histograms of the requests that were sent."""
    sent: dict[str, list[tuple[int, int]]] = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            sent[row["run"]].append((int(row["prompt_tokens"]), int(row["max_tokens"])))
    return {
        run: {
            name: Buckets(tuple(LENGTHS), tuple(counted(values, LENGTHS)), float(values.mean()))
            for name, values in zip(("input_tokens", "output_tokens"), np.array(pairs).T, strict=True)
        }
        for run, pairs in sent.items()
    }


def exported(run: StepRun, lengths: Mapping[str, Buckets], share: float) -> tuple[ServerRecord, float]:
    """Return a run's steps as intervals of `PERIOD_S`, and the share of these that its first `share` of steps makes."""
    assert run.setup is not None
    steps = in_order(run.steps, run.setup.parallelism.attention_dp)
    period = (np.cumsum(steps["wall_s"]) // PERIOD_S).astype(int)
    rows, sizes, gaps, ends = [], [], [], []
    for number in np.unique(period):
        own = steps[period == number]
        decodes, ends_of = own["decode_requests"], own[[0, -1]]
        row = np.zeros((), INTERVAL)
        row["start_s"], row["duration_s"], row["steps"] = number * PERIOD_S, own["wall_s"].sum(), own.size
        row["prompts"], row["cached_tokens"] = own["prefill_requests"].sum(), own["prefill_kv_tokens"].sum()
        row["prompt_tokens"] = own["prefill_tokens"].sum() + row["cached_tokens"]
        row["gaps"], row["gaps_s"] = decodes.sum(), (decodes * own["wall_s"]).sum()
        row["generation_tokens"] = row["gaps"] + row["prompts"]
        row["running"], row["context_variance"] = ends_of["decode_requests"].mean(), np.nan
        held = ends_of["decode_requests"].sum()
        row["context_tokens"] = ends_of["decode_kv_tokens"].sum() / held if held else np.nan
        rows.append(row)
        sizes.append(counted(own["prefill_tokens"] + decodes, STEP_TOKENS))
        gaps.append(counted(own["wall_s"], GAPS_S, decodes))
        ends.append(np.flatnonzero(period == number)[-1] + 1)
    histograms = (STEP_TOKENS, np.array(sizes)), (GAPS_S, np.array(gaps))
    record = ServerRecord("metrics", np.array(rows), 1, *histograms, lengths)
    return record, float((np.array(ends) <= share * steps.size).mean())


def later_steps(run: StepRun, made: Observation, share: float) -> PricedSteps:
    """Return a run's later steps, priced with what was learnt."""
    priced = price_run(with_calibration(run, made.calibration), PricedDeployments().estimator)
    return priced.taken(np.arange(priced.kind.size) >= int(share * priced.kind.size))


def scores(steps: PricedSteps) -> dict[str, Score]:
    by_kind = {kind: score(steps.errors[steps.kind == place].tolist()) for place, kind in enumerate(KINDS)}
    return {kind: known for kind, known in by_kind.items() if known is not None}


def drifts(steps: PricedSteps, random_: np.random.Generator) -> tuple[int, list[tuple[int | None, bool]]]:
    """Return the alarms without a shift; and of each shift the steps until it is noticed, None: not within `WITHIN`,
    with whether half of these have a graph size that occurred before it.
    """
    steps = steps.taken(steps.kind == 0)
    residuals, states = np.log(steps.measured_s / steps.predicted_s), states_of(steps, "step")
    delays: list[tuple[int | None, bool]] = []
    for begin in random_.integers(residuals.size // 10, residuals.size - WITHIN, NUM_SHIFTS):
        is_known = bool(np.isin(states[begin : begin + WITHIN], states[:begin]).mean() > 0.5)
        for factor in (SHIFT, 1 / SHIFT):
            shifted = residuals[: begin + WITHIN].copy()
            shifted[begin:] += np.log(factor)
            found = [
                each.noticed - begin
                for each in watch(shifted, states, COUNTS["step"]).drifts
                if each.noticed >= begin and (each.change > 0) == (factor > 1)
            ]
            delays.append((int(found[0]) if found else None, is_known))
    ranks = 0 if steps.run.setup is None else steps.run.setup.parallelism.attention_dp
    least = OTHERS if ranks > np.unique(steps.run.steps["dp_rank"]).size else 0.0
    told = [each for each in watch(residuals, states, COUNTS["step"]).drifts if abs(np.log1p(each.change)) >= least]
    return len(told), delays


def real_requests(folder: Path) -> Iterator[tuple[StepRun, ServerRecord]]:
    """Yield the deployment and the record of servers whose requests were recorded one by one."""
    for name, server, requests in recorded_requests(folder):
        names = ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "e2e_s")
        record = record_of_requests(name, {each: getattr(requests, each) for each in names})
        yield StepRun(name, str(server.model), np.zeros(0), resolve(server)), record


def logged(folder: Path, name: str) -> ServerRecord | None:
    """Return vLLM's log of a run, with a line each second, as `observe` reads it; None where it was not recorded."""
    lines = []
    with gzip.open(folder / "llmservingsim_vllm_timeseries.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["case"] == name:
                minute, second = divmod(round(float(row["t"])), 60)
                lines.append(
                    f"INFO 05-19 10:{minute:02d}:{second:02d} [loggers.py:271] Engine 000: Avg prompt throughput: "
                    f"{row['prompt_throughput']} tokens/s, "
                    f"Avg generation throughput: {row['gen_throughput']} tokens/s, "
                    f"Running: {row['running']} reqs, Waiting: {row['waiting']} reqs, "
                    f"GPU KV cache usage: {row['kv_cache_pct']}%, Prefix cache hit rate: 0.0%"
                )
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "server.log"
        path.write_text("\n".join(lines), encoding="utf-8")
        return read_log(path) if lines else None


def later_intervals(run: StepRun, record: ServerRecord) -> float:
    """Return the median error of the second half of a record's intervals."""
    priced = price_intervals(run, record, PricedDeployments().estimator)
    return float(np.median(np.abs(priced.errors[priced.kind.size // 2 :])))


def learnt_from_steps(folder: Path, share: float) -> tuple[str, str]:
    """Return Markdown on what is learnt from steps and from metrics, and on drift."""
    lengths, shared = lengths_of(folder / "engine_steps" / "requests.csv.gz"), PricedDeployments()
    every = read_step_runs(folder / "engine_steps", {}, {"device": "b300_sxm"})
    medians: dict[str, list[tuple[float, float]]] = defaultdict(list)
    watched: dict[bool, list[tuple[int, list[tuple[int | None, bool]]]]] = {True: [], False: []}
    refused, random_ = [], np.random.default_rng(0)
    lines = ["| run | learnt from steps | from metrics | decode: before -> from steps, from metrics | mixed |"]
    lines.append("|---|---|---|---|---|")
    for run in every:
        try:
            by_steps = observe_steps(run, share, shared)
            record, part = exported(run, lengths[run.name], share)
            by_metrics = observe_record(run, record, part, shared)
        except InputError as error:
            refused.append(error.message)
            continue
        judged = scores(later_steps(run, by_metrics, share))
        cells = []
        for kind in SHOWN:
            cells.append("")
            if kind in by_steps.after and kind in judged:
                values = by_steps.before[kind].median, by_steps.after[kind].median, judged[kind].median
                cells[-1] = f"{values[0]:.1%} -> {values[1]:.1%}, {values[2]:.1%}"
                medians[kind].append(values[1:])
        lines.append(f"| {run.label} | {by_steps.learnt} | {by_metrics.learnt} | {' | '.join(cells)} |")
        later = later_steps(run, by_steps, share)
        if (later.kind == 0).sum() > 2 * WITHIN:
            watched[not run.remarks].append(drifts(later, random_))
    lines.append(f"\n{len(every) - len(refused)} of {len(every)} runs; refused: {'; '.join(refused) or 'none'}.")
    for kind, pairs in medians.items():
        steps, metrics = np.array(pairs).mean(axis=0)
        lines.append(
            f"Mean of the medians of {kind} steps: {steps:.1%} from steps, {metrics:.1%} from metrics, "
            f"{metrics / steps:.2f} times."
        )
    return "\n".join(lines), drift_table(watched)


def drift_table(watched: Mapping[bool, list[tuple[int, list[tuple[int | None, bool]]]]]) -> str:
    """Return Markdown on the shifts noticed and the alarms without one; `watched` by whether all ranks are recorded."""
    lines = [
        f"| recorded | shifts noticed within {WITHIN} steps | at graph sizes seen before | median | alarms without |",
        "|---|---:|---:|---:|---:|",
    ]
    for is_whole, results in watched.items():
        if not results:
            continue
        shifts = [shift for _, of_run in results for shift in of_run]
        noticed = [delay for delay, _ in shifts if delay is not None]
        known = [delay is not None for delay, is_known in shifts if is_known]
        what = "all ranks" if is_whole else "one of several data-parallel ranks"
        unclear = "" if is_whole else ", as unclear"
        lines.append(
            f"| {what}, {len(results)} runs | {len(noticed)} of {len(shifts)}{unclear} | {sum(known)} of {len(known)} "
            f"| {np.median(noticed):.0f} steps | {sum(alarms for alarms, _ in results)} in {len(results)} runs |"
        )
    return "\n".join(lines)


def learnt_from_requests(folder: Path) -> str:
    """Return Markdown on what is learnt from requests and from logs."""
    lines = ["| requests of | learnt | decode | mixed | all, learnt from the log |", "|---|---|---|---|---|"]
    shared = PricedDeployments()
    for run, record in real_requests(folder):
        made = observe_record(run, record, priced=shared)
        cells = [
            f"{made.before[kind].median:.1%} -> {made.after[kind].median:.1%}" if kind in made.after else ""
            for kind in SHOWN
        ]
        cells.append("")
        if (log := logged(folder, run.name)) is not None:
            by_log = with_calibration(run, observe_record(run, log, priced=shared).calibration)
            cells[-1] = f"{later_intervals(run, record):.1%} -> {later_intervals(by_log, record):.1%}"
        lines.append(f"| {run.name} | {made.learnt} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=REFERENCE, metavar="DIR")
    parser.add_argument("--learn", type=float, default=0.2, metavar="SHARE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page to write the tables into")
    arguments = parser.parse_args()
    steps, drift = learnt_from_steps(arguments.folder, arguments.learn)
    requests = learnt_from_requests(arguments.folder / "serving" / "per_request")
    tables = {"steps": steps, "requests": requests, "drift": drift}
    for name, table in tables.items():
        print(f"{table}\n")
        if arguments.page is not None:
            write_table(arguments.page, name, "observe.py", table)


if __name__ == "__main__":
    main()
