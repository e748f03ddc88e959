"""Every two features of a deployment run together and conserve what they handle, or are refused with a reason.

`docs/reference/combinations.md` lists the pairs that are refused; `--update` writes it anew. The rest of the pairs are
simulated in as few runs as a greedy covering array needs.
"""

import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import windtunnel as wt
from serving.test_simulate import PlainRoofline
from windtunnel.compiled.arrays import Ints
from windtunnel.errors import InputError
from windtunnel.serving.custom.policy import PolicyEngine, PolicyRequests
from windtunnel.serving.custom.router import Arrival, Replicas

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "combinations.md"

Choice = tuple[str, str]
"""An axis and one of its values."""
Row = dict[str, str]
"""A value for every axis."""


def scheduler(name: str) -> dict[str, Any]:
    return {"deployment.engine.scheduler": name}


def pools(*roles: str) -> dict[str, Any]:
    return {"deployment.pools": [{"name": f"pool {number}", "role": role} for number, role in enumerate(roles)]}


def caching(**more: Any) -> dict[str, Any]:
    engine = {"deployment.engine.enable_prefix_caching": True, **more}
    return engine | {"workload.shared_prompts": {"tokens": 64, "count": 2}}


SCALING = {
    "type": "target",
    "metric": "outstanding",
    "target": 4,
    "max_replicas": 3,
    "interval_s": 0.02,
    "scale_down_after_s": 0.2,
}
FAULTS = {"scheduled": [{"at_s": 0.05, "replica": 0, "repair_s": 0.1}], "retry_s": 0.05}
TIER = {"name": "host", "capacity_bytes": 10**9, "bandwidth_bytes_per_s": 10**10}
SPECULATIVE = {"method": "ngram", "num_draft_tokens": 2, "acceptance_fraction": 0.7}

# Axis -> value -> settings. The first value of each axis goes with every other; runs of pairs start from it.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "router": {"built-in router": {}, "own router": {}},
    "scheduler": {
        "vLLM": {},
        "SGLang": {"deployment.engine.name": "sglang"},
        "TensorRT-LLM": {"deployment.engine.name": "trtllm"},
        **{name: scheduler(name) for name in ("vllm_v0", "sarathi", "orca", "faster_transformer")},
        "lightllm": scheduler("lightllm")
        | {"deployment.engine.block_size": 1, "deployment.engine.num_gpu_blocks": 1280},
        "own policy": {},
    },
    "replicas": {
        "one replica": {},
        "equal replicas": {"deployment.replicas": 2},
        "prefill and decode pools": pools("prefill", "decode"),
        "pools of every role": pools("prefill", "decode", "both"),
        "unequal pools": {"deployment.pools": [{"name": "first"}, {"name": "second", "device": "h200_sxm"}]},
    },
    "fleet": {
        "fixed fleet": {},
        "autoscaling": {"deployment.autoscaling": SCALING, "deployment.start_s": 0.02},
        "faults": {"deployment.faults": FAULTS, "deployment.start_s": 0.02},
    },
    "KV retention": {
        "no prefix cache": {"deployment.engine.enable_prefix_caching": False},
        "prefix cache": caching(),
        "KV tiers": caching(**{"deployment.engine.kv_tiers": [TIER]}),
    },
    "decoding": {"one token a step": {}, "speculative decoding": {"deployment.engine.speculative": SPECULATIVE}},
    "load": {
        "open loop": {"workload.arrivals": {"type": "poisson", "rate_per_s": 400}},
        "closed loop": {"workload.arrivals": {"type": "closed_loop", "concurrency": 12}},
        "sessions": {
            "workload.arrivals": {"type": "poisson", "rate_per_s": 200},
            "workload.sessions": {"turns": 3, "think_s": 0.01},
        },
    },
    "requests": {
        "text": {},
        "LoRA adapters": {
            "workload.adapters": {"count": 3, "popularity": "uniform", "base_fraction": 0.2},
            "deployment.engine.lora": {"rank": 16, "max_loras": 4, "max_cpu_loras": 4},
        },
        "images": {
            "model": "Qwen/Qwen3-VL-8B-Instruct",
            "deployment.engine.max_model_len": 1280,
            "workload.images": {"count": 2, "width": 224, "height": 224, "distinct": 8},
        },
        "embeddings of a decoder": {"workload.task": "embed"},
        "embeddings of an encoder": {"model": "BAAI/bge-m3", "workload.task": "embed"},
    },
}
BASE: Row = {axis: next(iter(values)) for axis, values in AXES.items()}
NUM_REQUESTS = 24
SMALL = {"block_size": 16, "num_gpu_blocks": 80, "max_model_len": 768, "max_num_seqs": 16}
"""Room for few requests, so that some are preempted and cached blocks are evicted to the tier below."""


def own_router(_request: Arrival, replicas: Replicas) -> int | None:
    return int(np.argmax(replicas.is_up)) if replicas.is_up.any() else None


def own_policy(requests: PolicyRequests, waiting: Ints, ready: Ints, engine: PolicyEngine) -> list[tuple[int, int]]:
    """Run decodes, then prompts in order of arrival that fit to their end; restart the latest where blocks run out."""

    def blocks(tokens: int) -> int:
        return -(-int(tokens) // engine.block_size)

    running, free_blocks, batch = sorted(ready), engine.free_blocks, []
    while len(running) > 1 and free_blocks < 2 * len(running):
        batch.append((running[-1], 0))
        free_blocks += int(requests.num_blocks[running.pop()])
    budget = engine.max_num_batched_tokens - engine.decode_tokens * len(running)
    for i in running:
        left = int(requests.prompt_tokens[i] - requests.processed_tokens[i])
        tokens = 1 if requests.is_prefilled[i] else min(left, budget, engine.block_size)
        if tokens > 0 and free_blocks > engine.decode_tokens:
            batch.append((i, tokens))
            budget -= 0 if requests.is_prefilled[i] else tokens
        free_blocks -= blocks(requests.input_tokens[i] + requests.output_tokens[i]) - int(requests.num_blocks[i])
    for i in [] if batch[:1] and batch[0][1] == 0 else waiting[: engine.max_num_seqs - engine.num_running]:
        tokens = min(int(requests.prompt_tokens[i] - requests.processed_tokens[i]), budget)
        free_blocks -= blocks(requests.input_tokens[i] + requests.output_tokens[i]) + 2
        if tokens <= 0 or free_blocks < 0:
            break
        batch.append((i, tokens))
        budget -= tokens
    return batch


def simulate(row: Row) -> wt.Result:
    settings: dict[str, Any] = {f"deployment.engine.{name}": value for name, value in SMALL.items()}
    for axis, value in row.items():
        settings |= AXES[axis][value]
    if "deployment.pools" in settings and "deployment.autoscaling" in settings:
        scaling = {"autoscaling": settings.pop("deployment.autoscaling")}
        settings["deployment.pools"] = [pool | scaling for pool in settings["deployment.pools"]]
    if "workload.task" not in settings:
        settings["workload.output_tokens"] = {"type": "uniform", "min_tokens": 1, "max_tokens": 20}
    scenario = wt.scenario(
        model=settings.pop("model", "meta-llama/Llama-3.1-8B"),
        device="h100_sxm",
        input_tokens={"type": "uniform", "min_tokens": 40, "max_tokens": 200},
        num_requests=NUM_REQUESTS,
        settings=settings,
    )
    policy = own_policy if row["scheduler"] == "own policy" else None
    router = own_router if row["router"] == "own router" else None
    return wt.simulate(scenario, PlainRoofline(), policy=policy, router=router)


def refusal(pair: Sequence[Choice]) -> str | None:
    """The reason for which two choices are refused, everything else being usual; None where they run."""
    try:
        simulate(BASE | dict(pair))
    except InputError as error:
        scheduler_name = dict(pair).get("scheduler", "-").replace("own policy", f"{__name__}:own_policy")
        reason = re.sub(r"^pool pool \d: ", "", error.message)
        return re.sub(rf"\bscheduler {scheduler_name}(?= |:)", "scheduler NAME", reason)
    return None


def pairs() -> Iterator[tuple[Choice, Choice]]:
    for (first, values), (second, others) in combinations(AXES.items(), 2):
        for value in values:
            yield from (((first, value), (second, other)) for other in others)


Refusals = dict[tuple[Choice, Choice], str]
"""Pairs of choices, and why each is refused."""
NUM_COMPLETIONS = 40

PAGE_TEXT = """\
# Combinations of features

<!-- written by tests/serving/test_combinations.py --update -->

A deployment makes one choice on each of these axes:

| axis | choices |
|---|---|
{axes}
Any two choices run together unless the last table lists them. The tests simulate every other pair, many pairs in each
run, and check that requests, tokens and KV blocks are conserved.

| axes | pairs that run | pairs that are refused |
|---|---|---|
{counts}
## Refused pairs

Each choice of the first column is refused with each of the second. NAME stands for the name of a function or scheduler.

| choices | refused with | reason |
|---|---|---|
{refused}"""


def rendered(refusals: Refusals) -> str:
    """The page for a table of refusals."""
    axes = "".join(f"| {axis} | {', '.join(values)} |\n" for axis, values in AXES.items())
    counts = ""
    for axis, other in combinations(AXES, 2):
        num_refused = sum((first[0], second[0]) == (axis, other) for first, second in refusals)
        counts += f"| {axis}, {other} | {len(AXES[axis]) * len(AXES[other]) - num_refused} | {num_refused} |\n"
    partners: dict[tuple[str, str, str], list[str]] = {}
    for ((_, first), (axis, second)), reason in refusals.items():
        partners.setdefault((first, axis, reason), []).append(second)
    groups: dict[tuple[str, str], list[str]] = {}
    for (first, _, reason), seconds in partners.items():
        groups.setdefault((", ".join(seconds), reason), []).append(first)
    rows = (f"| {', '.join(firsts)} | {seconds} | {reason} |\n" for (seconds, reason), firsts in groups.items())
    return PAGE_TEXT.format(axes=axes, counts=counts, refused="".join(rows))


def listed() -> Refusals:
    """The pairs that the page says are refused."""
    axis_of = {value: axis for axis, values in AXES.items() for value in values}
    refusals: Refusals = {}
    for line in PAGE.read_text(encoding="utf-8").partition("## Refused pairs")[2].splitlines()[6:]:
        firsts, seconds, reason = line.strip("| ").split(" | ")
        for first, second in product(firsts.split(", "), seconds.split(", ")):
            if first in axis_of and second in axis_of:
                refusals[(axis_of[first], first), (axis_of[second], second)] = reason
    return {pair: refusals[pair] for pair in pairs() if pair in refusals}


def loop_of(row: Row) -> tuple[bool, ...]:
    """The features that decide which code of the loop is compiled: rows that share them cost no further compilation."""
    is_usual = {axis: value == BASE[axis] for axis, value in row.items()}
    return (
        row["scheduler"] in ("vLLM", "TensorRT-LLM"),
        row["scheduler"] == "SGLang",
        "pools" in row["replicas"],
        is_usual["router"] and is_usual["fleet"],
        is_usual["KV retention"],
        is_usual["decoding"],
        row["load"] == "sessions",
        row["requests"] == "LoRA adapters",
        row["requests"] == "images",
    )


def covering_rows(refusals: Refusals) -> list[Row]:
    """Rows that contain every pair of choices but the refused ones.

    Each row completes a pair that no row has yet: of many random completions, one that an earlier row's loop can run,
    and of these the one with most new pairs.
    """
    rng, refused = random.Random(0), {frozenset(pair) for pair in refusals}
    left = [pair for pair in pairs() if pair not in refusals]
    rows: list[Row] = []
    while left:
        loops = {loop_of(row) for row in rows}
        completions = [completed(left[0], refused, rng) for _ in range(NUM_COMPLETIONS)]
        row = max(completions, key=lambda row: (loop_of(row) in loops, sum(set(pair) <= row.items() for pair in left)))
        rows.append(row)
        left = [pair for pair in left if not set(pair) <= row.items()]
    return rows


def completed(pair: tuple[Choice, Choice], refused: set[frozenset[Choice]], rng: random.Random) -> Row:
    """A row with `pair` and random choices on the other axes, none of which is refused with another."""
    row = dict(pair)
    for axis, values in AXES.items():
        if axis not in row:
            go_together = [v for v in values if not any(frozenset({(axis, v), c}) in refused for c in row.items())]
            row[axis] = rng.choice(go_together)
    return {axis: row[axis] for axis in AXES}


def assert_conserves(row: Row, result: wt.Result) -> None:
    """Invariants 1, 2, 3 and 4, as far as the records of a run show them."""
    requests, steps, summary = result.requests, result.steps, result.summary
    assert requests["request"].tolist() == list(range(NUM_REQUESTS))
    times = np.stack([requests[name] for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")])
    assert (np.diff(times, axis=0) >= 0).all()
    assert summary.checks is None or summary.checks.passed
    computed, needed = steps["prefill_tokens"].sum(), (requests["input_tokens"] - requests["cached_tokens"]).sum()
    begins_again = requests["num_preemptions"].any() or row["fleet"] == "faults"
    assert computed >= needed if begins_again else computed == needed
    sampled = (steps["num_sampled"] + (steps["num_steps"] - 1) * steps["decode_tokens"]).sum()
    outputs = requests["output_tokens"].sum() + requests.columns.get("discarded_tokens", np.zeros(1)).sum()
    streams_later = row["scheduler"] == "TensorRT-LLM" and "prefill" in str(AXES["replicas"][row["replicas"]])
    if streams_later and row["fleet"] == "faults" and row["decoding"] == BASE["decoding"]:
        # A handoff that is lost before the decode side streams the first output loses that one, which nobody has had.
        assert outputs <= sampled <= outputs + requests["num_retries"].sum()
    elif row["decoding"] == BASE["decoding"]:
        assert sampled == outputs
    else:
        most_tokens = 1 + SPECULATIVE["num_draft_tokens"]
        assert outputs / most_tokens <= sampled <= outputs * most_tokens
    caches = row["KV retention"] != BASE["KV retention"] and row["requests"] != "embeddings of an encoder"
    assert (requests["cached_tokens"].sum() > 0) == caches
    assert_blocks_come_back(row, result)


def assert_blocks_come_back(row: Row, result: wt.Result) -> None:
    """Blocks in use never exceed the block pool, and a replica's last steps hold those of the last requests alone."""
    requests, steps = result.requests, result.steps
    assert (steps["used_blocks"] >= 0).all()
    assert (steps["used_blocks"] <= result.memory.num_blocks).all()
    longest = int((requests["input_tokens"] + requests["output_tokens"]).max()) + SPECULATIVE["num_draft_tokens"]
    reserved = SMALL["max_model_len"] if row["scheduler"] in ("orca", "faster_transformer") else longest
    for replica in np.unique(steps["replica"]):
        mine = np.flatnonzero(steps["replica"] == replica)
        hands_over = not steps["decode_tokens"][mine].any()
        if not hands_over:
            most_blocks = steps["num_running"][mine[-1]] * -(-reserved // result.memory.block_size)
            assert steps["used_blocks"][mine[-1]] <= most_blocks


ROWS = covering_rows(listed())


def test_the_page_is_what_update_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == rendered(listed())


@pytest.mark.full
def test_refused_pairs_are_refused_for_the_reason_on_the_page() -> None:
    refusals = listed()
    assert {pair: refusal(pair) for pair in refusals} == refusals


def test_the_rows_cover_every_other_pair() -> None:
    covered = {pair for pair in pairs() for row in ROWS if set(pair) <= row.items()}
    assert covered == set(pairs()) - set(listed())


@pytest.mark.full
@pytest.mark.interpreted
@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(v for axis, v in row.items() if v != BASE[axis]))
def test_what_runs_together_conserves_requests_tokens_and_blocks(row: Row) -> None:
    assert_conserves(row, simulate(row))


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: PYTHONPATH=tests python tests/serving/test_combinations.py --update")
    PAGE.write_text(rendered({pair: reason for pair in pairs() if (reason := refusal(pair))}), encoding="utf-8")
