"""Recorded runs of a real engine: its requests, and every step with the tokens that it scheduled.

A file is a JSON list (also `.gz`) of runs: `requests` (`arrival_s`, `prompt_tokens`, `output_tokens`), `steps`
(`cpu_s`, `wall_s`, `scheduled`: [request, tokens] pairs) and `token_times_s` (request -> times of its output tokens),
on a clock that starts at 0. A run in which a request was preempted, and its tokens computed twice, is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.files import decode_json, write_bytes
from windtunnel.schema import decode

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request of the run."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


class RecordedStep(msgspec.Struct, frozen=True):
    """One step; `scheduled` holds [request, tokens] pairs."""

    cpu_s: float
    wall_s: float
    scheduled: tuple[tuple[int, int], ...]


class RawRun(msgspec.Struct, frozen=True):
    """A run as it stands in the file; other keys are ignored."""

    requests: tuple[RecordedRequest, ...]
    steps: tuple[RecordedStep, ...]
    token_times_s: dict[str, tuple[float, ...]]
    rate_per_s: float = 0.0
    cpu_pressure: float = 0.0


@dataclass(frozen=True)
class RecordedBatches:
    """Contents of each of `[k]` steps."""

    decode_requests: Ints
    decode_context_tokens: Ints
    """Sum over decoding requests, the token being computed included."""
    prefill_tokens: Ints
    prefill_pairs: Floats
    sampled: Ints


@dataclass(frozen=True)
class EngineRun:
    """One recorded run; requests in order of arrival."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    scheduled: tuple[dict[int, int], ...]
    """Per step: request -> tokens."""
    batches: RecordedBatches
    duration_s: Floats
    """Duration of each step: from the end of the previous one, or from the arrival that ended an idle time, to its last
    token.
    """
    first_token_s: Floats
    finish_s: Floats
    gaps_s: Floats
    """Times between consecutive tokens of a request, all requests together."""
    rate_per_s: float = 0.0
    """Rate of arrivals; 0 where it was not recorded."""
    cpu_pressure: float = 0.0
    """Share of the run in which the engine waited for a core (Linux PSI)."""

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        return self.finish_s - self.arrival_s


def read_engine_runs(path: Path) -> list[EngineRun]:
    """Read the runs in a file.

    Raises:
        InputError: the file is missing, cut off, not of this layout, or its steps do not add up to its requests.
    """
    runs = decode(decode_json(path, object, "a list of recorded runs"), tuple[RawRun, ...], path.name)
    return [engine_run(run, f"{path.name}: run {position}") for position, run in enumerate(runs)]


def write_engine_runs(path: Path, runs: Sequence[RawRun]) -> None:
    """Write runs as `read_engine_runs` reads them."""
    write_bytes(path, msgspec.json.encode(runs))


def engine_run(run: RawRun, where: str) -> EngineRun:
    """Return a run with the contents of its steps; `where` names it in messages.

    Raises:
        InputError: its steps do not add up to its requests.
    """
    inputs = np.array([request.prompt_tokens for request in run.requests], np.int64)
    outputs = np.array([request.output_tokens for request in run.requests], np.int64)
    arrival_s = np.array([request.arrival_s for request in run.requests])
    tokens_s = [run.token_times_s.get(str(i), ()) for i in range(len(run.requests))]
    if not run.requests or not run.steps:
        raise InputError(
            f"{where} has {len(run.requests)} requests and {len(run.steps)} steps; at least one of each is needed"
        )
    for i, times_s in enumerate(tokens_s):
        if not times_s or len(times_s) != outputs[i]:
            raise InputError(f"{where}: request {i} has {len(times_s)} token times for {outputs[i]} output tokens")
    batches, duration_s = _replay(run, inputs, tokens_s, np.sort(arrival_s), where)
    return EngineRun(
        arrival_s=arrival_s,
        input_tokens=inputs,
        output_tokens=outputs,
        scheduled=tuple(dict(step.scheduled) for step in run.steps),
        batches=batches,
        duration_s=duration_s,
        first_token_s=np.array([times_s[0] for times_s in tokens_s]),
        finish_s=np.array([times_s[-1] for times_s in tokens_s]),
        gaps_s=np.concatenate([np.diff(times_s) for times_s in tokens_s]),
        rate_per_s=run.rate_per_s,
        cpu_pressure=run.cpu_pressure,
    )


def _replay(
    run: RawRun, inputs: Ints, tokens_s: list[tuple[float, ...]], arrivals_s: Floats, where: str
) -> tuple[RecordedBatches, Floats]:
    """Return contents and durations of the steps.

    A step starts when the previous one ends, or without work left at the next arrival; it ends at its token, else after
    its wall time.
    """
    computed = np.zeros(inputs.size, np.int64)
    arrivals_s = np.append(arrivals_s, np.inf)
    rows, durations_s, now_s, num_finished = [], [], 0.0, 0
    for number, step in enumerate(run.steps):
        decodes = context = chunk_tokens = sampled = 0
        pairs = 0.0
        start_s = max(now_s, float(arrivals_s[num_finished]))
        now_s = start_s + step.wall_s
        for i, count in step.scheduled:
            if not 0 <= i < inputs.size or count < 1:
                raise InputError(f"{where}: step {number} schedules {count} tokens of request {i}")
            if computed[i] + count >= inputs[i] + len(tokens_s[i]):
                raise InputError(f"{where}: step {number} exceeds the {len(tokens_s[i])} output tokens of request {i}")
            if computed[i] >= inputs[i]:
                decodes, context = decodes + 1, context + int(computed[i]) + 1
            else:
                chunk_tokens += count
                pairs += count * (float(computed[i]) + 0.5 * count)
            computed[i] += count
            if computed[i] >= inputs[i]:
                sampled += 1
                now_s = tokens_s[i][int(computed[i] - inputs[i])]
                num_finished += int(computed[i] + 1 == inputs[i] + len(tokens_s[i]))
        rows.append((decodes, context, chunk_tokens, pairs, sampled))
        durations_s.append(now_s - start_s)
    unfinished = np.flatnonzero(computed + 1 != inputs + np.array([len(times_s) for times_s in tokens_s]))
    if unfinished.size:
        raise InputError(f"{where}: the steps do not add up to the tokens of request {unfinished[0]}")
    return RecordedBatches(*(np.array(column) for column in zip(*rows, strict=True))), np.array(durations_s)
