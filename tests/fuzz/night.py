"""Fuzz for as long as wanted, in ranges of seeds: `python -m fuzz.night --cases 100000`; see `make fuzz`.

A chunk of cases has a seed of its own, so that any chunk can be run again alone, and a night goes on at `--first`.
Failures are minimised, and written as lines of data for tests/cases/.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from plain_records import read_by_name

CHUNK = 250
SHRINK_S = 30.0
"""Longest search for a smaller case that fails in the same way."""
QUICK = (
    "catalog",
    "collective_",
    "experiment",
    "form_save",
    "model",
    "network",
    "packets",
    "page",
    "topology",
    "workload_",
)
SLOW = {"calibrate", "form_sweep", "pools", "result", "search", "search_jobs", "steps", "tables", "validate", "whatif"}


def check(tree: dict[str, Any], folder: Path, client: Any) -> str:
    """Run one case; returns how it ended, raises what it may not do."""
    from fuzz import answers

    if tree.get("results"):
        answers.ask_results(tree, folder)
        return "asked"
    if "command" in tree and tree["command"][:2] == ["lab", "run"]:
        # A real model would be run for a minute; what is read of the file is judged before.
        tree["command"] = ["lab", "run", "experiment.yaml", "--set", "model=./missing", "--out", "results"]
    if "command" in tree and tree["command"][:2] == ["lab", "replay"]:
        tree["command"] = ["lab", "replay", "job.yaml", "--set", "parallelism.dp=9999"]
    try:
        if "http" in tree:
            return str(answers.ask(client, tree)[0])
        answer = answers.run_command(tree, folder)
    except answers.HangError:
        if not answers.ends_compiled(tree, folder):
            raise
        return "slow without compiling"
    answers.judge(tree, answer)
    return f"exit {answer.code}"


SURROUNDINGS = {
    "WINDTUNNEL_MEMORY_LIMIT": "500MiB",
    "WINDTUNNEL_TIME_LIMIT": "4ms",
    "NO_COLOR": "1",
    "COLUMNS": "120",
    "XDG_CACHE_HOME": "/nonexistent",
}
"""Environment of every case: limits that keep runs small where loops are interpreted."""


@cache
def _runs() -> dict[str, bytes]:
    """The files of two runs."""
    import windtunnel as wt
    from fuzz import answers
    from windtunnel.report.serving.run import write_run

    with tempfile.TemporaryDirectory() as place:
        for name, rate_per_s in (("served", 4.0), ("other", 8.0)):
            load = {"input_tokens": 30, "output_tokens": 3, "num_requests": 4, "rate_per_s": rate_per_s}
            write_run(wt.simulate(wt.scenario(model="llama-3.1-8b", device="h100_sxm", **load)), Path(place) / name)
        return answers.snapshot(Path(place))


def served(folder: Path) -> Any:
    """A client of a dashboard with two runs."""
    from fuzz import answers

    for name, content in _runs().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return answers.client_of(folder)


def fuzz(
    cases: int, number: int | None, seen: set[str], ended: Callable[[str], None], only: str = ""
) -> list[dict[str, Any]]:
    """Run `cases` cases of the chunk `number` (None: the fixed cases of CI); returns the minimised failures."""
    from fuzz import answers
    from fuzz.edits import edits
    from fuzz.inputs import edited, seeds

    read_by_name()
    every = {name: tree for name, tree in seeds().items() if only in name}
    # What takes a quarter of a second and more is drawn a tenth as often as what takes 20 ms and less.
    weights = {name: 1 if name in SLOW else 10 if name.startswith(QUICK) else 4 for name in sorted(every)}
    names = [name for name, weight in weights.items() for _ in range(weight)]
    last: dict[str, Any] = {}
    failures = []
    with contextlib.ExitStack() as held:
        place = held.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        results, work = Path(place) / "results", Path(place) / "work"
        results.mkdir()
        work.mkdir()
        # Requests of one client share a thread, which takes 4 ms to start.
        client = held.enter_context(served(results))

        @st.composite
        def case(draw: st.DrawFn) -> tuple[str, list[Any]]:
            name = draw(st.sampled_from(names))
            return name, draw(edits(every[name]))

        @given(case())
        def run(drawn: tuple[str, list[Any]]) -> None:
            if "since" in last and time.monotonic() - last["since"] > SHRINK_S:
                return
            name, changes = drawn
            tree = edited(every[name], changes)
            try:
                ended(check(tree, work, client))
            except (Exception, answers.HangError) as error:
                sign = answers.signature(error)
                if sign in seen:
                    ended("seen")
                    return
                steps = [edit.as_data() for edit in changes]
                last.setdefault("since", time.monotonic())
                last.update(sign=sign, seed=name, edits=steps, failed=str(error)[:400], changes=changes)
                if isinstance(error, answers.HangError):
                    raise TimeoutError(str(error)) from error
                raise

        phases = (Phase.generate, Phase.shrink)
        checks = list(HealthCheck)
        options = settings(
            max_examples=cases, deadline=None, database=None, phases=phases, suppress_health_check=checks,
            derandomize=number is None, report_multiple_bugs=False,
        )  # fmt: skip
        test = options(run)
        if number is not None:
            test = seed(number)(test)
        try:
            test()
        except BaseException as error:
            if "sign" not in last:
                raise error
            if not isinstance(error, TimeoutError):  # a hang takes too long to try again
                last["edits"] = _needed(
                    last["changes"], partial(_fails, every[last["seed"]], last["sign"], work, client)
                )
            failures.append({name: last[name] for name in ("sign", "seed", "edits", "failed")})
            seen.add(last["sign"])
    return failures


def _needed(changes: list[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    """Return the edits without those that the failure does not need: shrinking may stop at two where one would do."""
    for change in list(changes):
        rest = [each for each in changes if each is not change]
        if rest and fails(rest):
            changes = rest
    return [edit.as_data() for edit in changes]


def _fails(tree: Any, sign: str, work: Path, client: Any, changes: list[Any]) -> bool:
    """Return whether edits of a good input fail as `sign` says."""
    from fuzz import answers
    from fuzz.inputs import edited

    try:
        check(edited(tree, changes), work, client)
    except (Exception, answers.HangError) as error:  # noqa: BLE001 whatever it is, it is compared
        return answers.signature(error) == sign
    return False


def chunk(number: int, seen: list[str], only: str = "") -> tuple[int, list[dict[str, Any]], dict[str, int]]:
    """Run a chunk until nothing new fails in it."""
    counts: dict[str, int] = {}

    def ended(how: str) -> None:
        counts[how] = counts.get(how, 0) + 1

    known, failures = set(seen), []
    os.environ |= SURROUNDINGS
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 hypothesis reports every failure there
    while found := fuzz(CHUNK, number, known, ended, only):
        failures += found
        if len(failures) > 8:
            break
    return number, failures, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1, help="first chunk, to go on where a night stopped")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="seeds whose names contain this")
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures.jsonl"))
    options = parser.parse_args()
    numbers = iter(range(options.first, options.first + -(-options.cases // CHUNK)))
    totals: Counter[str] = Counter()
    seen: set[str] = set()
    started_s = time.monotonic()
    with ProcessPoolExecutor(options.workers) as workers, options.out.open("a", encoding="utf-8") as file:
        running = {workers.submit(chunk, number, [], options.only) for number in islice(numbers, options.workers)}
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                running.remove(done)
                number, failures, counts = done.result()
                totals.update(counts)
                for failure in failures:
                    if failure["sign"] not in seen:
                        seen.add(failure["sign"])
                        file.write(json.dumps(failure) + "\n")
                file.flush()
                passed_s = time.monotonic() - started_s
                say = f"chunk {number}: {totals.total():,} cases in {passed_s:.0f} s; {len(seen)} kinds of failures"
                print(f"{say}; {dict(totals)}", flush=True)  # noqa: T201
                for following in islice(numbers, 1):
                    running.add(workers.submit(chunk, following, sorted(seen), options.only))
    sys.exit(1 if seen else 0)


if __name__ == "__main__":
    main()
