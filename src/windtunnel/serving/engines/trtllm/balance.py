"""TensorRT-LLM's balance of attention data parallelism: ranks that hold prompts back until all can prefill."""

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records
from windtunnel.serving.state.records import NONE, KernelSettings, Rank, Requests, Slot


@inner
def balance_ranks(
    settings: KernelSettings,
    requests: Requests,
    ranks: Records[Rank],
    slots: Records[Slot],
    first: int,
    stage: int,
    cutoff_s: float,
) -> None:
    """Balance attention data-parallel ranks as TensorRT-LLM does (`PyExecutor._balance_adp_requests`, 1.1 and 1.2):
    decide whether the waiting prompts of the replica's ranks are held back from the step that is being formed.

    While all ranks decode, prompts wait until every rank has one and room for it, `timeout_iters` steps at most since
    that was last so, and then for `batching_wait_iters` more. The steps count whether a prompt waits or not.
    """
    all_ready, all_decode, any_decodes = True, True, False
    for rank in range(first, first + settings.ranks_per_replica):
        slot = rank * settings.num_stages + stage
        i = ranks[rank].waiting
        has_prompt = i != NONE and requests[i].arrival_s <= cutoff_s
        all_ready = all_ready and has_prompt and ranks[rank].num_running < settings.max_num_seqs
        all_decode = all_decode and slots[slot].num_decoding > 0
        any_decodes = any_decodes or slots[slot].num_decoding > 0
    holds_back = 0
    if any_decodes and all_ready:
        ranks[first].balance_waited = 0
        if all_decode:
            holds_back = 1 if ranks[first].balance_ready < settings.balance_wait_steps else 0
            ranks[first].balance_ready = ranks[first].balance_ready + 1 if holds_back else 0
    elif any_decodes:
        ranks[first].balance_waited += 1
        holds_back = 1 if all_decode and ranks[first].balance_waited < settings.balance_steps else 0
        if not holds_back:
            ranks[first].balance_waited = 0
    for rank in range(first, first + settings.ranks_per_replica):
        slots[rank * settings.num_stages + stage].holds_back = holds_back


@inner
def count_balance(
    settings: KernelSettings, ranks: Records[Rank], slots: Records[Slot], first: int, end: int, num_steps: int
) -> None:
    """Count `num_steps` equal decode steps, of which the first is counted already, in which nobody waited."""
    for rank in range(first, end):
        if slots[rank * settings.num_stages].num_decoding == 0:
            return
    ranks[first].balance_waited = (ranks[first].balance_waited + num_steps - 1) % settings.balance_steps
