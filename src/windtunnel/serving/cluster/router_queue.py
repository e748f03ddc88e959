"""Requests that wait at the router, and those that are sent again after a failure."""

from windtunnel.compiled.jit import inner
from windtunnel.serving.state.fleet import ReplicaFleet
from windtunnel.serving.state.records import NONE


@inner
def ask_again(fleet: ReplicaFleet, now_s: float) -> None:
    """Try the first request at the router again: something ended or came up."""
    if fleet.control[0].num_at_router > 0:
        fleet.control[0].asks = 1
        fleet.control[0].asked_s = now_s


@inner
def take_lost(fleet: ReplicaFleet, now_s: float) -> int:
    """Take the lost request that is due at `now_s`, or NONE."""
    control = fleet.control
    if control[0].num_retries == 0 or fleet.retry_s[control[0].first_retry] > now_s:
        return NONE
    k = fleet.retries[control[0].first_retry]
    control[0].first_retry = (control[0].first_retry + 1) % fleet.retries.size
    control[0].num_retries -= 1
    return k


@inner
def hold(fleet: ReplicaFleet, k: int) -> None:
    """Put request `k` at the end of the router queue."""
    control = fleet.control
    fleet.router_queue[(control[0].first_at_router + control[0].num_at_router) % fleet.router_queue.size] = k
    control[0].num_at_router += 1


@inner
def drop_first_at_router(fleet: ReplicaFleet) -> None:
    """Take the first request off the router queue."""
    control = fleet.control
    control[0].first_at_router = (control[0].first_at_router + 1) % fleet.router_queue.size
    control[0].num_at_router -= 1
