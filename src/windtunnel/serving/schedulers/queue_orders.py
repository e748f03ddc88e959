"""The order in which requests wait: first come first served, by priority, by length, by deadline, fair to tenants."""

from windtunnel.compiled.heap import meld
from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.serving.codes import DEADLINE, FAIR_SHARE, FCFS, PRIORITY, SHORTEST
from windtunnel.serving.kv.windows import num_blocks_for
from windtunnel.serving.state.records import FAIR_TOKENS, MOST_REQUESTS, NONE, KernelSettings, Rank, Requests


@inner
def enqueue(settings: KernelSettings, requests: Requests, ranks: Records[Rank], rank: int, i: int) -> None:
    """Put request `i` on the waiting heap: first come first served, or by `queue_key` and then arrival.

    Under first come first served a preempted request belongs in front; it was sent before any that waits, which puts
    it there.
    """
    requests[i].left = NONE
    requests[i].right = NONE
    requests[i].order = requests[i].sequence
    if settings.queue_order != FCFS:
        requests[i].order += requests[i].queue_key * MOST_REQUESTS
    ranks[rank].waiting = meld(requests.order, requests.left, requests.right, ranks[rank].waiting, i)
    ranks[rank].num_waiting += 1
    ranks[rank].waiting_tokens += requests[i].target_tokens


@inner
def set_queue_key(
    settings: KernelSettings, requests: Requests, ranks: Records[Rank], rank: int, i: int, prompt_tokens: int
) -> None:
    """Set what request `i` is ordered by while it waits, on a rank that computes `prompt_tokens` of its prompt.

    `deadline` in milliseconds. `fair_share` is start-time fair queueing (Goyal, Vin and Cheng, 1996) with the weights
    of the virtual token counter (Sheng et al., OSDI 2024): a tenant's requests start at the service that it has had, at
    least at that of the latest admitted one; a prompt token counts once when the request is sent, an output token twice
    when it ends.
    """
    if settings.queue_order == PRIORITY:
        requests[i].queue_key = requests[i].priority
    elif settings.queue_order == SHORTEST:
        requests[i].queue_key = requests[i].input_tokens
    elif settings.queue_order == DEADLINE:
        requests[i].queue_key = int64(min(requests[i].deadline_s * 1e3, 1.0 * MOST_REQUESTS))
    elif settings.queue_order == FAIR_SHARE:
        tenant = requests[i].tenant
        requests[i].queue_key = max(requests[tenant].tenant_tag, ranks[rank].fair_tag)
        requests[tenant].tenant_tag = requests[i].queue_key + num_blocks_for(prompt_tokens, FAIR_TOKENS)
