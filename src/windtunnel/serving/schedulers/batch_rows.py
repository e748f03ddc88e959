"""Prices of many batches at once: look-ups in the arrays of a `StepCost` for every row of a table of steps."""

from typing import Protocol

import numpy as np

from windtunnel.compiled.jit import entry
from windtunnel.compiled.records import F8, I8, Ints, Records, layout
from windtunnel.serving.schedulers.step_cost import decode_attention_s, device_step_s, prefill_attention_s, with_host
from windtunnel.serving.state.records import Floats, StepCost


class BatchRow(Protocol):
    """One record for each step and attention data-parallel rank, in the order of the steps."""

    step: I8
    decode_requests: I8
    context_tokens: I8  # in the cache of the decoding requests
    context_variance: F8  # of their contexts, tokens squared
    prefill_tokens: I8
    prefill_pairs: F8  # query-key pairs of the prefill chunks
    num_sampled: I8
    num_running: I8


BATCH_ROW = layout(BatchRow)


@entry
def price_batch_rows(cost: StepCost, rows: Records[BatchRow], group_tokens: Ints, step_s: Floats) -> None:
    """Price steps by their rows into `step_s`, `[steps]` seconds, with the terms of `serving.state.records.StepCost`.

    `cost` is of a replica without pipeline stages, drafts and recorded durations. `rows` are batches, the ranks of one
    step behind one another; `group_tokens`, `[steps]`, are those of all ranks together, which decide the time of
    experts.
    """
    row = 0
    while row < len(rows):
        step = rows[row].step
        attention_s, prefill_tokens = 0.0, 0
        most_decodes, most_tokens, most_sampled, most_running = 0, 0, 0, 0
        while row < len(rows) and rows[row].step == step:
            decodes, tokens = rows[row].decode_requests, rows[row].prefill_tokens
            context_tokens, deviation_tokens = rows[row].context_tokens + decodes, 0.0
            if cost.longest_share > 0.0:
                deviation_tokens = np.sqrt(rows[row].context_variance)
            attention_s = max(
                attention_s,
                decode_attention_s(cost, decodes, context_tokens, tokens, deviation_tokens, 0)
                + prefill_attention_s(cost, tokens, rows[row].prefill_pairs),
            )
            most_decodes = max(most_decodes, decodes)
            most_tokens = max(most_tokens, decodes + tokens)
            most_sampled = max(most_sampled, rows[row].num_sampled)
            most_running = max(most_running, rows[row].num_running)
            prefill_tokens += tokens
            row += 1
        device_s = device_step_s(
            cost, attention_s, prefill_tokens, most_decodes, most_tokens, most_sampled, group_tokens[step]
        )
        step_s[step] = with_host(cost, device_s, most_running)
