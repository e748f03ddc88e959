"""Price every recorded step of a run, in all and by family of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration.steps.read import StepRun, StepTable
from windtunnel.compiled.arrays import Bools, Floats, Ints
from windtunnel.errors import InputError
from windtunnel.model import operators as ops
from windtunnel.pricing.calibrated import CLASSES
from windtunnel.pricing.estimator import Estimator
from windtunnel.serving.deployment import HostOverheads
from windtunnel.serving.scenario import Setup
from windtunnel.serving.schedulers.batch_rows import BATCH_ROW, price_batch_rows
from windtunnel.serving.setup.estimators import shard_of
from windtunnel.serving.setup.step_prices import DeployedModel, Split, StepPrices, combined, priced_parts
from windtunnel.serving.state.records import StepCost

KINDS = ("decode", "prefill", "mixed")

HEAD, HOST, RECURRENT, SMALL = "head and sampling", "host floor", "recurrent attention", "small kernels"
ATTENTION_DECODE, GEMM, EXPERTS = "attention decode", "GEMM", "experts"
_FAMILIES = {
    "gemm": GEMM,
    "experts": EXPERTS,
    "decode_attention": ATTENTION_DECODE,
    "prefill_attention": "attention prefill",
    "collective": "collectives",
}

OUTLIER, SHIFTED = 3.0, 1.5
"""A step is not scored whose measured time over the priced one is `OUTLIER` times the median of its kind in the run, or
as many times below it; nor two neighbours of which the first is `SHIFTED` times above and the second as far below, or
the first above its price and the second `OUTLIER` times below."""
LEAST_LAUNCHES = 5
"""Decode steps right before steps with prompts that tell how long launching these takes."""
SLOW_STEP = np.dtype([("place", np.int64), ("measured_s", np.float64), ("predicted_s", np.float64)])
SLOW = "far slower than others of the kind: the first steps hold compilation, and ranks wait for each other"
FAST = "far faster than others of the kind"
TOGETHER = "two steps recorded together: the first's time holds part of the second's"
"""An engine in one process learns late that a step has ended (vLLM 0.20.1 on B300, two steps of 8,190 tokens: 807.6 and
11.5 ms, where others take 409). What it launches meanwhile is taken off by `_own_times`."""


@dataclass(frozen=True)
class PricedSteps:
    """The steps of a run that were priced, beside their measured times; arrays have a value a step, in their order."""

    run: StepRun
    kind: Ints
    """Position in `KINDS`."""
    measured_s: Floats
    predicted_s: Floats
    device_s: Floats
    """Price of a step that the host launches at once, without `unhidden_s`."""
    launch_s: Floats
    """What the host needs to launch a step, which lasts at least so long; 0 for a step that one graph holds."""
    is_in_pieces: Bools
    """Whether the host launches a step with prompts in captured pieces, and not kernel by kernel."""
    families_s: Mapping[str, Floats]
    """Family of operators -> its seconds; with the host's floor they add up to `predicted_s`."""
    num_requests: Floats
    context_variation: Floats
    """Standard deviation of the decoding requests' contexts over their mean."""
    decode_share: Floats
    """1 for a step without prompts and 0 for others; of an interval of time the share of its steps without prompts."""
    others_s: Floats
    """What a step takes longer at most where ranks that were not recorded compute prompts, too."""
    left_out: Mapping[str, int]
    """Reason -> number of rows, or of steps, that are not among these."""
    unhidden_s: float = 0.0
    """The host's work that nothing hides, of each step."""
    slow: NDArray[Any] = field(default_factory=lambda: np.empty(0, SLOW_STEP))
    """Steps left out as far slower than others of their kind: their `place` in the run, `measured_s` and `predicted_s`,
    the last scaled by the median of their kind."""

    @property
    def errors(self) -> Floats:
        """Return predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1

    def taken(self, which: Bools, left_out: Mapping[str, int] | None = None) -> PricedSteps:
        columns: dict[str, Any] = {
            name: values[which]
            for name, values in vars(self).items()
            if isinstance(values, np.ndarray) and name != "slow"
        }
        families_s = {name: seconds[which] for name, seconds in self.families_s.items()}
        return replace(self, **columns, families_s=families_s, left_out={**self.left_out, **(left_out or {})})


def price_run(run: StepRun, estimator_of: Callable[[Setup], Estimator]) -> PricedSteps:
    """Price the steps of a run, far outliers left out and counted; errors are those of `price_every_step`."""
    return without_outliers(price_every_step(run, estimator_of))


def price_every_step(run: StepRun, estimator_of: Callable[[Setup], Estimator]) -> PricedSteps:
    """Price the steps of a run; InputError where none is usable, or the deployment's steps are not single batches."""
    setup = run.setup
    assert setup is not None
    if setup.parallelism.pp > 1 or setup.engine.speculative is not None:
        raise InputError(f"{run.name}: steps through pipeline stages, and of drafts, are not priced row by row")
    steps, left_out = _usable(run.steps)
    if not steps.size:
        raise InputError(f"{run.name}: no step can be priced: {', '.join(left_out)}")
    attention_dp = setup.parallelism.attention_dp
    steps = in_order(steps, attention_dp)
    rows = batch_rows(steps, attention_dp)
    group_tokens, most_tokens = _group_tokens(rows, attention_dp)
    deployed = DeployedModel(setup.device, shard_of(setup), setup.engine, setup.max_model_len)
    parts = _by_head(priced_parts(estimator_of(setup), deployed, family_shares))
    cost = combined(parts, dict.fromkeys(parts, 1.0)).lowered().cost
    predicted_s = _priced(cost, rows, group_tokens)
    launched_at_once = cost._replace(launch_s=np.zeros(1), decode_launch_s=np.zeros(1))
    engine = msgspec.structs.replace(setup.engine, host=HostOverheads())
    families_s = {
        name: _priced(replace(part, engine=engine).lowered().cost, rows, group_tokens) for name, part in parts.items()
    }
    families_s[HOST] = predicted_s - sum(families_s.values())
    first = np.flatnonzero(np.diff(rows["step"], prepend=-1))
    sums = {name: np.add.reduceat(rows[name], first) for name in ("decode_requests", "prefill_tokens", "num_running")}
    widest = np.maximum.reduceat(rows["decode_requests"] + rows["prefill_tokens"], first)
    mean_context = rows["context_tokens"] / np.maximum(rows["decode_requests"], 1)
    variation = np.sqrt(rows["context_variance"]) / np.maximum(mean_context, 1.0)
    launch_s, has_prompts = cost.launch_s[np.minimum(widest, cost.launch_s.size - 1)], sums["prefill_tokens"] > 0
    of_decodes_s = cost.decode_launch_s[np.minimum(widest, cost.decode_launch_s.size - 1)]
    priced = PricedSteps(
        run=run,
        kind=np.where(~has_prompts, 0, np.where(sums["decode_requests"] == 0, 1, 2)),
        measured_s=np.maximum.reduceat(steps["wall_s"], first),
        predicted_s=predicted_s,
        device_s=_priced(launched_at_once, rows, group_tokens) - cost.unhidden_step_s,
        launch_s=np.where(has_prompts, launch_s, of_decodes_s),
        is_in_pieces=has_prompts & (launch_s > 0) & (launch_s < cost.launch_s.max()),
        families_s=families_s,
        num_requests=sums["num_running"].astype(np.float64),
        context_variation=np.maximum.reduceat(variation, first),
        decode_share=(~has_prompts).astype(np.float64),
        others_s=np.maximum(_priced(cost, rows, most_tokens) - predicted_s, 0.0),
        left_out=left_out,
        unhidden_s=cost.unhidden_step_s,
    )
    return replace(priced, measured_s=_own_times(priced, steps["counter"][first]))


def _own_times(priced: PricedSteps, counter: Floats) -> Floats:
    """Return measured times without the launches of the next step, which belong to that one.

    An engine in one process learns that a step has ended when it has launched the next one: what it records is the
    step's own time, more by the launch of the next and less by that of its own. A decode step before a mixed one shows
    how long that is: 36 ms of Qwen3.6-35B-A3B kernel by kernel, where engines of several processes show 0 (vLLM 0.20.1
    on B300). Before a step that decodes nothing, the engine may have been idle.
    """
    own_s, decodes, mixed = priced.measured_s.copy(), priced.kind == 0, priced.kind == KINDS.index("mixed")
    is_next = counter[1:] == counter[:-1] + 1
    after_two = np.flatnonzero(is_next[:-1] & is_next[1:] & decodes[:-2] & decodes[1:-1] & mixed[2:]) + 1
    usual_s = own_s[after_two - 1] * priced.predicted_s[after_two] / priced.predicted_s[after_two - 1]
    late_s = own_s[after_two] - usual_s
    for in_pieces in (True, False):
        has_it = mixed & (priced.is_in_pieces == in_pieces)
        excess_s = late_s[has_it[after_two + 1]]
        if excess_s.size < LEAST_LAUNCHES:
            continue
        low_s, launch_s = np.percentile(excess_s, [25, 50])
        if low_s > launch_s / 4 > 0:
            before = np.flatnonzero(is_next & has_it[1:])
            moved_s = np.minimum(launch_s, 0.9 * priced.measured_s[before])
            own_s[before] -= moved_s
            own_s[before + 1] += moved_s
    return own_s


def _usable(steps: StepTable) -> tuple[StepTable, dict[str, int]]:
    """Return the rows that can be priced, in the order of their steps, and the number of the others by reason."""
    counts = [steps[name] for name in ("prefill_tokens", "prefill_requests", "decode_requests", "decode_kv_tokens")]
    reasons = {
        "no wall time": ~(np.nan_to_num(steps["wall_s"]) > 0),
        "a count is missing or negative": ~np.all([values >= 0 for values in counts], axis=0),
        "an empty step": (counts[0] == 0) & (counts[2] == 0),
        "prompt tokens without a prompt": (counts[0] > 0) & (counts[1] == 0),
    }
    refused, left_out = np.zeros(steps.size, np.bool_), {}
    for reason, which in reasons.items():
        if (which & ~refused).any():
            left_out[reason] = int((which & ~refused).sum())
        refused |= which
    return steps[~refused], left_out


def in_order(steps: StepTable, attention_dp: int) -> StepTable:
    """Return rows in the order of their steps: those of ranks that step together behind one another."""
    of_rank = np.zeros(steps.size) if _step_together(steps, attention_dp) else steps["dp_rank"]
    return steps[np.lexsort((steps["counter"], of_rank, steps["worker"]))]


def _step_together(steps: StepTable, attention_dp: int) -> bool:
    """Whether several attention data-parallel ranks are recorded, with counters that tell which rows are one step."""
    return attention_dp > 1 and all(np.unique(steps[name]).size > 1 for name in ("dp_rank", "counter"))


def batch_rows(steps: StepTable, attention_dp: int = 1) -> NDArray[np.void]:
    """Return steps `in_order` as rows of `BATCH_ROW`; attention data-parallel ranks of one worker and counter are one.

    A table gives sums over the prompts of a step, and the variance of their lengths. For n chunks of C tokens in all
    behind K cached ones, the sum of c (k + c / 2) is taken as C (K + C / 2) / n + n variance / 2: exact for whole
    prompts, and for equal chunks behind equal contexts; and at most C (K + C / 2), all of it in one prompt.
    """
    rows = np.zeros(steps.size, BATCH_ROW)
    tokens, prompts = steps["prefill_tokens"], steps["prefill_requests"]
    pairs = tokens * (np.nan_to_num(steps["prefill_kv_tokens"]) + tokens / 2)
    spread = prompts * np.maximum(np.nan_to_num(steps["prefill_variance"]), 0.0) / 2
    rows["prefill_pairs"] = np.minimum(pairs / np.maximum(prompts, 1) + spread, pairs)
    rows["prefill_tokens"], rows["decode_requests"] = tokens, steps["decode_requests"]
    rows["context_tokens"] = steps["decode_kv_tokens"]
    rows["context_variance"] = np.maximum(np.nan_to_num(steps["decode_kv_variance"]), 0.0)
    rows["num_running"] = rows["num_sampled"] = steps["decode_requests"] + prompts
    is_new = np.ones(steps.size, np.bool_)
    if _step_together(steps, attention_dp):
        is_new[1:] = np.any([steps[name][1:] != steps[name][:-1] for name in ("worker", "counter")], axis=0)
    rows["step"] = np.cumsum(is_new) - 1
    return rows


def _group_tokens(rows: NDArray[np.void], attention_dp: int) -> tuple[Ints, Ints]:
    """Return the tokens of every step over all ranks, and the most that they may be.

    Ranks that were not recorded decode as many requests as the others, and at most compute as many prompt tokens, too;
    where the others only compute prompts, they are taken to do the same.
    """
    _, first, counts = np.unique(rows["step"], return_index=True, return_counts=True)
    decodes = np.add.reduceat(rows["decode_requests"], first)
    tokens = np.add.reduceat(rows["prefill_tokens"], first) + decodes
    missing = np.maximum(attention_dp - counts, 0)
    usual, most = (tokens + missing * others // counts for others in (np.where(decodes > 0, decodes, tokens), tokens))
    return np.asarray(usual, np.int64), np.asarray(most, np.int64)


def family_shares(op: ops.Op) -> dict[str, Floats]:
    """Return the family of an operator, with all of its time."""
    kind = CLASSES.get(op.kind, "other")
    family = _FAMILIES.get(kind) or (SMALL if isinstance(op, ops.Elementwise) else RECURRENT)
    return {family: np.asarray(1.0)}


def _by_head(parts: Mapping[str, StepPrices]) -> dict[str, StepPrices]:
    """Return parts of which one is the head: the LM head, the gathering of its logits, and sampling."""
    head = combined(parts, dict.fromkeys(parts, 1.0))
    nothing: Split = (np.zeros_like(head.group),) * 3
    no_head: Split = (np.zeros_like(head.sampled_nodes),) * 3
    waiting = None if head.waiting is None else head.waiting * 0
    head = replace(head, token=nothing, group=head.group * 0, decode=head.decode * 0, prefill=head.prefill * 0)
    head = replace(head, waiting=waiting)
    return {**{name: replace(part, head=no_head) for name, part in parts.items()}, HEAD: head}


def _priced(cost: StepCost, rows: NDArray[np.void], group_tokens: Ints) -> Floats:
    step_s = np.zeros(group_tokens.size)
    price_batch_rows(cost, rows.view(np.recarray), group_tokens, step_s)
    return step_s


def without_outliers(priced: PricedSteps) -> PricedSteps:
    """Leave out steps that are far from others of their kind, and pairs of which the first holds part of the second."""
    ratio = priced.measured_s / priced.predicted_s
    together = _together(ratio, 1.0, 1 / OUTLIER)
    for kind in np.unique(priced.kind):
        apart = (priced.kind == kind) & ~together
        ratio[priced.kind == kind] /= np.median(ratio[apart]) if apart.any() else 1.0
    together |= _together(ratio, SHIFTED, 1 / SHIFTED)
    reasons = {SLOW: (ratio > OUTLIER) & ~together, FAST: (ratio < 1 / OUTLIER) & ~together, TOGETHER: together}
    counts = {reason: int(which.sum()) for reason, which in reasons.items() if which.any()}
    places = np.flatnonzero(reasons[SLOW])
    slow = np.empty(places.size, SLOW_STEP)
    slow["place"], slow["measured_s"] = places, priced.measured_s[places]
    slow["predicted_s"] = priced.measured_s[places] / ratio[places]
    return replace(priced, slow=slow).taken(~np.any(list(reasons.values()), axis=0), counts)


def _together(ratio: Floats, above: float, below: float) -> Bools:
    """Mark pairs of steps of which the first is above its price by so much, and the second below."""
    pairs = np.zeros(ratio.size, np.bool_)
    pairs[:-1] = (ratio[:-1] > above) & (ratio[1:] < below)
    pairs[1:] |= pairs[:-1].copy()
    return pairs
