"""Draws of conversations and shared prompts: requests that wait for others, with growing contexts."""

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Bools
from windtunnel.errors import InputError
from windtunnel.workload.generate import draws
from windtunnel.workload.schema import RequestSource
from windtunnel.workload.sessions import SharedPrompts


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """The requests of sessions, one session after the other; arrays of shape [num_requests]."""

    session: draws.Counts
    new_tokens: draws.Counts
    """Tokens of text that no earlier turn had."""
    input_tokens: draws.Counts
    output_tokens: draws.Counts
    wait_s: draws.Seconds
    prompt: draws.Counts
    """Shared prompt of the session, or -1."""
    prompt_tokens: draws.Counts
    """`[num_prompts]` Length of each shared prompt."""

    def take(self, rows: Bools | slice) -> "Turns":
        columns = {name: getattr(self, name)[rows] for name in self.__slots__ if name != "prompt_tokens"}
        return replace(self, **columns)


def draw_turns(source: RequestSource, num_starts: int, limit: int | None, seed: np.random.SeedSequence) -> Turns:
    """Draw the requests of at most `num_starts` sessions. InputError where no first turn is within
    `max_context_tokens`.

    Args:
        source: with `sessions`.
        limit: maximum number of requests; the last sessions are cut.
        seed: seed from which the streams are spawned. A session's draws do not depend on how many follow.
    """
    assert source.sessions is not None
    num_sessions = num_starts
    if limit is not None:
        turns = draws.draw_counts(source.sessions.turns, num_sessions, draws.spawn(seed)["turns"])
        num_sessions = min(int(np.searchsorted(np.cumsum(turns), limit)) + 1, num_sessions)
    drawn = _turns(source, num_sessions, seed)
    while limit is not None and drawn.input_tokens.size < limit and num_sessions < num_starts:
        num_sessions = min(2 * num_sessions, num_starts)
        drawn = _turns(source, num_sessions, seed)
    drawn = drawn.take(slice(0, limit))
    if not drawn.input_tokens.size:
        max_tokens = source.sessions.max_context_tokens
        raise InputError(f"no first turn of a session is within max_context_tokens, which is {max_tokens}")
    return drawn


def _turns(source: RequestSource, num_sessions: int, seed: np.random.SeedSequence) -> Turns:
    """Draw all requests of the first `num_sessions` sessions, without those beyond `max_context_tokens`."""
    sessions, rngs = source.sessions, draws.spawn(seed)
    assert sessions is not None
    assert source.input_tokens is not None
    assert source.output_tokens is not None
    turns = draws.draw_counts(sessions.turns, num_sessions, rngs["turns"])
    calls = np.zeros(int(turns.sum()), np.int64)
    if sessions.tool_calls is not None:
        calls = draws.draw_counts(sessions.tool_calls.per_turn, calls.size, rngs["tool_calls"])
    turn = np.repeat(np.arange(calls.size), calls + 1)
    session = np.repeat(np.arange(num_sessions), turns)[turn]
    begins_turn, begins_session = begins(turn), begins(session)
    follows, is_call = begins_turn & ~begins_session, ~begins_turn

    new_tokens = np.empty(turn.size, np.int64)
    wait_s = np.zeros(turn.size)
    new_tokens[begins_session] = draws.draw_lengths(source.input_tokens, num_sessions, rngs["input_tokens"])
    num_follow = int(follows.sum())
    followup = sessions.followup_tokens if sessions.followup_tokens is not None else source.input_tokens
    new_tokens[follows] = draws.draw_lengths(followup, num_follow, rngs["followup_tokens"])
    wait_s[follows] = draws.draw_durations(sessions.think_s, num_follow, rngs["think_times"])
    if sessions.tool_calls is not None:
        num_calls = int(is_call.sum())
        new_tokens[is_call] = draws.draw_lengths(sessions.tool_calls.output_tokens, num_calls, rngs["tool_tokens"])
        wait_s[is_call] = draws.draw_durations(sessions.tool_calls.run_s, num_calls, rngs["tool_times"])
    output_tokens = draws.draw_lengths(source.output_tokens, turn.size, rngs["output_tokens"], "output_tokens")

    prompt, prompt_tokens = np.full(num_sessions, -1), np.zeros(0, np.int64)
    context = within(new_tokens + output_tokens, begins_session)
    if source.shared_prompts is not None:
        prompt, prompt_tokens = draw_prompts(source.shared_prompts, num_sessions, rngs)
        context = context + prompt_tokens[prompt][session]
    drawn = Turns(session, new_tokens, context - output_tokens, output_tokens, wait_s, prompt[session], prompt_tokens)
    max_tokens = sessions.max_context_tokens
    return drawn if max_tokens is None else drawn.take(context <= max_tokens)


def begins(group: draws.Counts) -> Bools:
    """Return a mask of the rows at which a new group begins, in a sorted column of groups."""
    return np.concatenate([np.ones(min(group.size, 1), bool), group[1:] != group[:-1]])


Number = TypeVar("Number", np.int64, np.float64)


def within(values: NDArray[Number], begins_group: Bools) -> NDArray[Number]:
    """Return running sums that start again where a group begins."""
    sums = np.cumsum(values)
    before = (sums - values)[begins_group]
    return np.asarray(sums - np.repeat(before, np.diff(np.append(np.flatnonzero(begins_group), values.size))))


def draw_prompts(
    prompts: SharedPrompts, size: int, rngs: dict[str, np.random.Generator]
) -> tuple[draws.Counts, draws.Counts]:
    """Draw the prompt of each of `size` requests, and the tokens of each of `prompts.count` prompts."""
    weights = np.arange(1, prompts.count + 1, dtype=np.float64) ** -prompts.alpha
    tokens = draws.draw_lengths(prompts.tokens, prompts.count, rngs["prompt_tokens"])
    return draws.draw_indices(weights, size, rngs["prompts"]), tokens
