"""Order waiting requests by the user's function in Python, which is called once with all requests of a run."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError
from windtunnel.serving.custom.policy import load_function, read_only
from windtunnel.serving.custom.time_limit import InTime
from windtunnel.serving.deployment import OWN_ORDERS, EngineSettings, is_own_order
from windtunnel.workload.generate.requests import RequestArrays

MOST_S = 1e6
"""Seconds beyond which an order's answer makes no difference: the loop counts milliseconds."""


class Queued(NamedTuple):
    """All requests of a run, `[n]`: arrays that an order may read and must not change."""

    input_tokens: Ints
    output_tokens: Ints
    """Tokens that each will produce. A real scheduler does not know them."""
    priority: Ints
    tenant: Ints
    """-1: none."""
    session: Ints
    """-1: none."""


QueueOrder = Callable[[Queued], Any]
"""`order(requests)` -> seconds `[n]`: next of the waiting requests is the one whose sending time plus these seconds is
earliest. All 0 is first come first served; what differs by 1e6 s is a class of its own."""


def users_order(engines: Iterable[EngineSettings]) -> QueueOrder | None:
    """Import the queue order in Python that engines of one deployment name; None where they have built-in ones.
    InputError where it cannot be imported, or they differ: a request has one place in line wherever it waits."""
    names = {engine.scheduling_policy for engine in engines}
    own = sorted(name for name in names if name and is_own_order(name))
    if not own:
        return None
    if len(own) > 1 or "deadline" in names:
        others = ", ".join(sorted(str(name) for name in names - {own[0]}))
        raise InputError(f"pools order requests by {own[0]} and by {others}", "give pools one scheduling_policy")
    order: QueueOrder = load_function(own[0], OWN_ORDERS)
    return order


def queued(requests: RequestArrays) -> Queued:
    """Return what an order may know of the requests of a run."""
    nobody = np.full(requests.arrival_s.size, -1)
    tenant, session = (nobody if column is None else column for column in (requests.tenant, requests.session))
    columns = requests.input_tokens, requests.output_tokens, requests.priority, tenant, session
    return Queued(*map(read_only, columns))


def seconds_of(order: QueueOrder, requests: Queued) -> Floats:
    """Return the seconds `[n]` by which `order` puts requests after the time at which they are sent; InputError where
    it raises, does not return, or returns no such numbers."""
    call = InTime(f"the queue order {getattr(order, '__name__', type(order).__name__)}", order)
    num, answer = requests.input_tokens.size, call(0.0, requests)
    try:
        seconds = np.asarray(answer, np.float64)
    except (TypeError, ValueError):
        seconds = np.empty(())
    if seconds.shape != (num,) or np.isnan(seconds).any():
        raise InputError(f"{call.what} returned {answer!r:.80}", f"return seconds, one for each of {num:,} requests")
    return np.clip(seconds, -MOST_S, MOST_S)
