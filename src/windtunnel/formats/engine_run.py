"""Recorded runs of a real engine: its requests, and every step with the tokens that it scheduled.

A file is a JSON list (also `.gz`) of runs: `requests` (`arrival_s`, `prompt_tokens`, `output_tokens`), `steps`
(`cpu_s`, `wall_s`, `scheduled`: [request, tokens] pairs) and `token_times_s` (request -> times of its output tokens),
on a clock that starts at 0. A run in which a request was preempted, and its tokens computed twice, is refused.
"""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError, missing_file
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
class Batches:
    """What each of `[k]` steps held."""

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
    batches: Batches
    duration_s: Floats
    """Of each step: from the end of the one before, or from the arrival that ended an idle time, to the end of its
    tokens.
    """
    first_token_s: Floats
    finish_s: Floats
    gaps_s: Floats
    """Times between consecutive tokens of a request, all requests together."""
    rate_per_s: float = 0.0
    """Arrivals; 0 where it was not recorded."""
    cpu_pressure: float = 0.0
    """Share of the run in which other processes kept the engine from a core (Linux PSI)."""

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        return self.finish_s - self.arrival_s


def read_engine_runs(path: Path) -> list[EngineRun]:
    """The runs in a file.

    Raises:
        InputError: the file is missing, cut off, not of this layout, or its steps do not add up to its requests.
    """
    runs = decode(_read_json(path), tuple[RawRun, ...], path.name)
    return [engine_run(run, f"{path.name}: run {position}") for position, run in enumerate(runs)]


def _read_json(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except FileNotFoundError:
        raise missing_file(path) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None


def write_engine_runs(path: Path, runs: Sequence[RawRun]) -> None:
    """Write runs as `read_engine_runs` reads them."""
    encoded = msgspec.json.encode(runs)
    path.write_bytes(gzip.compress(encoded, mtime=0) if path.suffix == ".gz" else encoded)


def engine_run(run: RawRun, where: str) -> EngineRun:
    """A run with what each of its steps held; `where` names it in messages.

    Raises:
        InputError: its steps do not add up to its requests.
    """
    inputs = np.array([request.prompt_tokens for request in run.requests], np.int64)
    outputs = np.array([request.output_tokens for request in run.requests], np.int64)
    arrival_s = np.array([request.arrival_s for request in run.requests])
    tokens = [run.token_times_s.get(str(i), ()) for i in range(len(run.requests))]
    if not run.requests or not run.steps:
        raise InputError(
            f"{where} has {len(run.requests)} requests and {len(run.steps)} steps; at least one of each is needed"
        )
    for i, times in enumerate(tokens):
        if not times or len(times) != outputs[i]:
            raise InputError(f"{where}: request {i} has {len(times)} token times for {outputs[i]} output tokens")
    batches, duration_s = _replay(run, inputs, tokens, arrival_s, where)
    first_token_s = np.array([times[0] for times in tokens])
    finish_s = np.array([times[-1] for times in tokens])
    return EngineRun(
        arrival_s=arrival_s,
        input_tokens=inputs,
        output_tokens=outputs,
        scheduled=tuple(dict(step.scheduled) for step in run.steps),
        batches=batches,
        duration_s=duration_s,
        first_token_s=first_token_s,
        finish_s=finish_s,
        gaps_s=np.concatenate([np.diff(times) for times in tokens]),
        rate_per_s=run.rate_per_s,
        cpu_pressure=run.cpu_pressure,
    )


def _replay(
    run: RawRun, inputs: Ints, tokens: list[tuple[float, ...]], arrival_s: Floats, where: str
) -> tuple[Batches, Floats]:
    """What each step held and how long it took.

    It starts when the one before ends, or where nothing was left to do, at the next arrival; it ends at the token that
    it gave, else after its wall time.
    """
    computed = np.zeros(inputs.size, np.int64)
    arrivals_s = np.append(np.sort(arrival_s), np.inf)
    rows, durations, now_s, num_finished = [], [], 0.0, 0
    for number, step in enumerate(run.steps):
        decodes = context = chunk_tokens = sampled = 0
        pairs = 0.0
        start_s = max(now_s, float(arrivals_s[num_finished]))
        end_s = start_s + step.wall_s
        for i, count in step.scheduled:
            if not 0 <= i < inputs.size or count < 1:
                raise InputError(f"{where}: step {number} schedules {count} tokens of request {i}")
            if computed[i] + count >= inputs[i] + len(tokens[i]):
                raise InputError(f"{where}: step {number} exceeds the {len(tokens[i])} output tokens of request {i}")
            if computed[i] >= inputs[i]:
                decodes, context = decodes + 1, context + int(computed[i]) + 1
            else:
                chunk_tokens += count
                pairs += count * (float(computed[i]) + 0.5 * count)
            computed[i] += count
            if computed[i] >= inputs[i]:
                sampled += 1
                end_s = tokens[i][int(computed[i] - inputs[i])]
                num_finished += int(computed[i] + 1 == inputs[i] + len(tokens[i]))
        rows.append((decodes, context, chunk_tokens, pairs, sampled))
        durations.append(end_s - start_s)
        now_s = end_s
    unfinished = np.flatnonzero(computed + 1 != inputs + np.array([len(times) for times in tokens]))
    if unfinished.size:
        raise InputError(f"{where}: the steps do not add up to the tokens of request {unfinished[0]}")
    decodes_, context_, chunk_, pairs_, sampled_ = (np.array(column) for column in zip(*rows, strict=True))
    return Batches(decodes_, context_, chunk_, pairs_, sampled_), np.array(durations)
