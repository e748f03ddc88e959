"""Replicas that come and go, and what waits for them at the router: autoscaling, faults, deferred and users' routing.

A replica is off, starts for `start_s`, is up, drains (serves what it has and gets nothing new) or has failed. Faults
are drawn before the run, so that a step knows when it starts whether it will end: one that a failure cuts short is
recorded with its time and no tokens, and nothing of it is kept. The requests of a failed replica are sent again
`retry_s` later; what they had produced stays produced, and is computed again with their prompt, as after a preemption,
unless they start over.
Requests for which no replica has room are held at the router in order, and tried again whenever a request ends or a
replica comes up.

Changes of replicas go before arrivals and step ends of the same time.
"""

from typing import NamedTuple

import numpy as np

from windtunnel.kernels.heap import meld
from windtunnel.kernels.jit import inner
from windtunnel.kernels.kvcache import entry_of, forget
from windtunnel.kernels.kvtiers import drop
from windtunnel.kernels.policies import gained_tokens, replica_load, replica_with_prefix
from windtunnel.kernels.state import (
    DEFERRED,
    DRAINING,
    FAILED,
    MODULUS,
    MULTIPLIER,
    NONE,
    OFF,
    POWER_OF_TWO,
    PREFIX_AFFINITY,
    RANDOM,
    ROUND_ROBIN,
    SESSION_AFFINITY,
    STARTING,
    UP,
    Floats,
    Ints,
    Settings,
    Table,
)

METRICS = ("outstanding", "waiting", "running", "kv_use")
"""The codes of `Scaling.metric` are positions here."""
OUTSTANDING, WAITING, RUNNING, KV_USE = range(4)


class Scaling(NamedTuple):
    """How the number of replicas changes, and what a fault costs. Scalars."""

    initial_replicas: int
    start_s: float = 0.0
    """From the launch of a replica until it is up."""
    retry_s: float = 0.0
    """From a failure until its requests are sent again."""
    starts_over: int = 0
    """1: they are sent without what they had produced."""
    metric: int = OUTSTANDING
    target: float = 0.0
    """Of the metric for each replica; 0: no policy."""
    min_replicas: int = 1
    max_replicas: int = 1
    interval_s: float = np.inf
    tolerance_fraction: float = 0.0
    up_looks: int = 0
    """Looks before the present one that must have asked for more too."""
    down_looks: int = 0
    most_outstanding: int = 0
    """`deferred`: requests at a replica, beyond which it gets no more."""


FLEET_REPLICA = np.dtype(
    [
        ("phase", "i8"),
        ("next_s", "f8"),  # end of its start or repair
        ("fails_s", "f8"),  # its next fault
        ("next_fault", "i8"),  # position of that in its list
    ]
)
"""One record a replica."""

CONTROL = np.dtype(
    [
        ("next_s", "f8"),  # of the next change of a replica
        ("look_s", "f8"),  # next look of the policy
        ("num_looks", "i8"),
        ("next_change", "i8"),  # of the plan
        ("wanted", "i8"),  # replicas that start or are up
        ("asks", "i8"),  # 1: the first held request is tried again
        ("asked_s", "f8"),  # since then
        ("num_held", "i8"),
        ("first_held", "i8"),
        ("num_retries", "i8"),  # waiting for their time
        ("first_retry", "i8"),
        ("num_phases", "i8"),  # rows of `phases` written by this call
        ("num_losses", "i8"),  # rows of `losses`
        ("pending", "i8"),  # request that a user's router is asked for, or NONE
        ("answer", "i8"),
        ("is_held", "i8"),  # 1: the pending request is the first held one
        ("pending_s", "f8"),
        ("event", "i8"),  # whose deliveries the question interrupted, or NONE
        ("event_s", "f8"),
        ("ended_step", "i8"),
    ]
)
"""The registers, one record."""

PHASE = np.dtype([("time_s", "f8"), ("replica", "i8"), ("phase", "i8")])
"""One record a change of a replica's phase."""

LOSS = np.dtype([("request", "i8"), ("replica", "i8"), ("begin_s", "f8"), ("end_s", "f8")])
"""One record a stay of a request at a replica that failed."""


class Fleet(NamedTuple):
    """What a run with replicas that come and go, or with a router that holds requests back, needs."""

    scaling: Scaling
    replicas: Table
    """[replica]"""
    control: Table
    """[1]"""
    fault_s: Floats
    """[replica, k] in order; infinity for none. The host writes further ones over those that have happened."""
    repair_s: Floats
    """[replica, k] how long each lasts."""
    change_s: Floats
    """[changes + 1] of the plan, in order, infinity at the end."""
    change_replicas: Ints
    """[changes + 1]"""
    recommended: Ints
    """[looks] replicas that the latest looks asked for."""
    sent_s: Floats
    """[request] when the client sent it; `arrival_s` is when it reached its replica."""
    num_retries: Ints
    """[request]"""
    discarded_tokens: Ints
    """[request] that it had produced and produces again."""
    held: Ints
    """[request] ring."""
    retries: Ints
    """[request] ring."""
    retry_s: Floats
    """[request] when each of those is due."""
    phases: Table
    losses: Table


def new_fleet(
    settings: Settings,
    scaling: Scaling,
    num_requests: int,
    fault_s: Floats,
    repair_s: Floats,
    change_s: Floats,
    change_replicas: Ints,
) -> Fleet:
    """A fleet of `settings.num_replicas` replicas, the first `initial_replicas` of them up."""
    replicas = np.zeros(settings.num_replicas, FLEET_REPLICA).view(np.recarray)
    replicas.phase[: scaling.initial_replicas] = UP
    replicas.next_s = np.inf
    replicas.fails_s = fault_s[:, 0]
    control = np.zeros(1, CONTROL).view(np.recarray)
    control.wanted = scaling.initial_replicas
    control.look_s = scaling.interval_s if scaling.target > 0 else np.inf
    control.next_s = min(control.look_s[0], change_s[0], fault_s[:, 0].min())
    control.pending, control.event = NONE, NONE
    return Fleet(
        scaling=scaling,
        replicas=replicas,
        control=control,
        fault_s=fault_s,
        repair_s=repair_s,
        change_s=change_s,
        change_replicas=change_replicas,
        recommended=np.full(max(scaling.up_looks, scaling.down_looks) + 1, scaling.initial_replicas),
        sent_s=np.zeros(num_requests),
        num_retries=np.zeros(num_requests, np.int64),
        discarded_tokens=np.zeros(num_requests, np.int64),
        held=np.zeros(num_requests, np.int64),
        retries=np.zeros(num_requests, np.int64),
        retry_s=np.zeros(num_requests),
        phases=np.zeros(max(8 * settings.num_replicas, 4096), PHASE).view(np.recarray),
        losses=np.zeros(num_requests + 4096, LOSS).view(np.recarray),
    )


@inner
def next_resend_s(fleet):
    """When a held or lost request is next tried."""
    control = fleet.control
    send_s = np.inf
    if control[0].num_held > 0 and control[0].asks:
        send_s = control[0].asked_s
    if control[0].num_retries > 0:
        send_s = min(send_s, fleet.retry_s[control[0].first_retry])
    return send_s


@inner
def ask_again(fleet, now_s):
    """Something ended or came up: the first held request may have a place now."""
    if fleet.control[0].num_held > 0:
        fleet.control[0].asks = 1
        fleet.control[0].asked_s = now_s


@inner
def take_lost(fleet, now_s):
    """The lost request that is due at `now_s`, or NONE."""
    control = fleet.control
    if control[0].num_retries == 0 or fleet.retry_s[control[0].first_retry] > now_s:
        return NONE
    k = fleet.retries[control[0].first_retry]
    control[0].first_retry = (control[0].first_retry + 1) % fleet.retries.size
    control[0].num_retries -= 1
    return k


@inner
def hold(fleet, k):
    """Put request `k` behind those that are held at the router."""
    control = fleet.control
    fleet.held[(control[0].first_held + control[0].num_held) % fleet.held.size] = k
    control[0].num_held += 1


@inner
def drop_held(fleet):
    """Take the first held request off the queue."""
    control = fleet.control
    control[0].first_held = (control[0].first_held + 1) % fleet.held.size
    control[0].num_held -= 1


@inner
def nth_up(fleet, n):
    """The `n`-th of the replicas that are up."""
    for replica in range(fleet.replicas.size):
        if fleet.replicas[replica].phase == UP:
            if n == 0:
                return replica
            n -= 1
    return NONE


@inner
def route_up(settings, cache, sessions, ranks, clock, fleet, i):
    """`policies.route` over the replicas that are up; NONE where there is none, or none with room."""
    num_up = 0
    for replica in range(settings.num_replicas):
        if fleet.replicas[replica].phase == UP:
            num_up += 1
    if num_up == 0:
        return NONE
    if settings.router == ROUND_ROBIN:
        replica = clock[0].turn
        while fleet.replicas[replica].phase != UP:
            replica = (replica + 1) % settings.num_replicas
        clock[0].turn = (replica + 1) % settings.num_replicas
        return replica
    if sessions is not None and settings.router == SESSION_AFFINITY:
        session = sessions.session[i]
        if session != NONE and sessions.replica[session] != NONE:
            if fleet.replicas[sessions.replica[session]].phase == UP:
                return sessions.replica[session]
    if cache is not None and settings.router == PREFIX_AFFINITY:
        replica = replica_with_prefix(settings, cache, ranks, fleet, i)
        if replica != NONE:
            return replica
    draws = settings.router == RANDOM or settings.router == POWER_OF_TWO
    best, least = NONE, 0
    for position in range(1 + (settings.router == POWER_OF_TWO) if draws else settings.num_replicas):
        replica = position
        if draws:
            clock[0].random = clock[0].random * MULTIPLIER % MODULUS
            replica = nth_up(fleet, clock[0].random % num_up)
        if fleet.replicas[replica].phase != UP:
            continue
        load = replica_load(settings, ranks, replica)
        if best == NONE or load < least or (load == least and replica < best):
            best, least = replica, load
    if settings.router == DEFERRED and least >= fleet.scaling.most_outstanding:
        return NONE
    return best


@inner
def set_phase(fleet, replica, phase, now_s):
    """Change a replica's phase and write it down."""
    fleet.replicas[replica].phase = phase
    row = fleet.control[0].num_phases
    fleet.phases[row].time_s = now_s
    fleet.phases[row].replica = replica
    fleet.phases[row].phase = phase
    fleet.control[0].num_phases = row + 1


@inner
def lose(fleet, requests, replica, i, now_s):
    """Request `i` was at a replica that has failed: it will be sent again."""
    requests[i].computed_tokens = 0
    requests[i].chunks_in_flight = 0
    requests[i].is_decoding = 0
    requests[i].slides = 0
    requests[i].passed_blocks = 0
    if fleet.scaling.starts_over:
        fleet.discarded_tokens[i] += requests[i].target_tokens - requests[i].input_tokens
        requests[i].target_tokens = requests[i].input_tokens
        requests[i].first_token_s = np.nan
    fleet.num_retries[i] += 1
    control = fleet.control
    at = (control[0].first_retry + control[0].num_retries) % fleet.retries.size
    fleet.retries[at] = i
    fleet.retry_s[at] = now_s + fleet.scaling.retry_s
    control[0].num_retries += 1
    row = control[0].num_losses
    fleet.losses[row].request = i
    fleet.losses[row].replica = replica
    fleet.losses[row].begin_s = requests[i].arrival_s
    fleet.losses[row].end_s = now_s
    control[0].num_losses = row + 1


@inner
def lose_cache(cache, rank):
    """Forget all that a rank has cached, and its replica's own tiers."""
    entry = cache.ranks[rank].first
    while entry != NONE:
        after = cache.entries[entry].after
        forget(cache, rank, entry)
        cache.entries[entry].num_blocks = 0
        entry = after
    for tier in range(cache.tiers.size):
        if not cache.tiers[tier].outlives:
            row, pool = cache.tiers[tier].row, rank // cache.tiers[tier].ranks_per_pool
            while cache.pools[row, pool].first != NONE:
                drop(cache, row, pool, cache.pools[row, pool].first)


@inner
def lose_shared(cache, rank, i):
    """Forget what running request `i` shares with others of its rank, which fail with it."""
    node = cache.requests[i].deepest
    while node != NONE:
        entry = entry_of(cache, rank, node)
        cache.entries[entry].num_blocks = 0
        cache.entries[entry].references = 0
        node = cache.nodes[node].parent
    cache.requests[i].deepest = NONE
    cache.requests[i].shared_blocks = 0


@inner
def clear(settings, cache, requests, speculation, ranks, lanes, lists, stages, fleet, replica, now_s):
    """Leave a replica as it starts: empty. What it had, if it failed, is sent again, rank by rank: running requests in
    their order, then waiting ones in theirs.
    """
    first = replica * settings.ranks_per_replica
    for rank in range(first, first + settings.ranks_per_replica):
        i = ranks[rank].first
        while i != NONE:
            after = requests[i].after
            if cache is not None:
                lose_shared(cache, rank, i)
            if requests[i].is_decoding:
                lane = requests[i].lane
                computed = lanes[lane].steps - requests[i].joined
                if requests[i].skipped_at == lanes[lane].num_verified:  # left out of the step that the failure ends
                    num_gained = 1
                    if speculation is not None:
                        num_gained = gained_tokens(speculation, lanes, lane)
                    computed += num_gained
                was_left_out = requests[i].skipped_at != NONE
                was_left_out = was_left_out and requests[i].skipped_at >= lanes[lane].num_verified - 1
                if computed > requests[i].target_tokens and not was_left_out:
                    requests[i].last_token_s = lanes[lane].last_decode_s
                requests[i].target_tokens = computed + 1
            lose(fleet, requests, replica, i, now_s)
            i = after
        while ranks[rank].waiting != NONE:
            i = ranks[rank].waiting
            ranks[rank].waiting = meld(
                requests.order, requests.left, requests.right, requests[i].left, requests[i].right
            )
            requests[i].left = NONE
            requests[i].right = NONE
            lose(fleet, requests, replica, i, now_s)
        if cache is not None:
            lose_cache(cache, rank)
        empty_rank(settings, ranks, rank)
        for lane in range(rank * settings.num_stages, (rank + 1) * settings.num_stages):
            empty_lane(lanes, lists, lane)
            if cache is not None:
                cache.load_s[lane] = 0.0
    for stage in range(settings.num_stages):
        stages[replica, stage] = 0.0


@inner
def empty_rank(settings, ranks, rank):
    """As `state.new_ranks` makes it."""
    ranks[rank].num_running = 0
    ranks[rank].num_waiting = 0
    ranks[rank].waiting_tokens = 0
    ranks[rank].num_outstanding = 0
    ranks[rank].remaining_tokens = 0
    ranks[rank].free_blocks = settings.num_blocks
    ranks[rank].free_window_blocks = settings.num_window_blocks
    ranks[rank].first = NONE
    ranks[rank].last = NONE
    ranks[rank].waiting = NONE
    ranks[rank].num_prefilling = 0
    ranks[rank].new_token_ratio = 0.0
    ranks[rank].fair_tag = 0
    ranks[rank].waited_steps = 0
    ranks[rank].balance_waited = 0
    ranks[rank].balance_ready = 0
    ranks[rank].steps_to_receive = 0


@inner
def empty_lane(lanes, lists, lane):
    """As `state.new_lanes` and `new_lists` make it."""
    lanes[lane].is_busy = 0
    lanes[lane].steps = 0
    lanes[lane].num_decoding = 0
    lanes[lane].context_tokens = 0
    lanes[lane].finish_size = 0
    lanes[lane].batch_size = 0
    lanes[lane].batch_decodes = 0
    lanes[lane].num_skipped = 0
    lanes[lane].skipped_context_tokens = 0
    lanes[lane].skipped_since_s = 0.0
    lanes[lane].holds_back = 0
    lanes[lane].looks_again = 0
    lanes[lane].num_joined = 0
    lanes[lane].joined_since_s = 0.0
    lanes[lane].last_decode_s = -np.inf
    lanes[lane].num_verified = 0
    for kind in range(lists.shape[1]):
        for position in range(lists.shape[2]):
            lists[lane, kind, position] = 0


@inner
def has_requests(settings, ranks, replica):
    """Whether any request waits or runs there."""
    first = replica * settings.ranks_per_replica
    num_present = 0
    for rank in range(first, first + settings.ranks_per_replica):
        num_present += ranks[rank].num_outstanding
    return num_present > 0


@inner
def after_step(settings, cache, requests, speculation, ranks, lanes, lists, stages, fleet, replica, now_s):
    """A step of a replica has ended: if it drains and is empty now, it goes off."""
    if fleet.replicas[replica].phase == DRAINING and not has_requests(settings, ranks, replica):
        set_phase(fleet, replica, OFF, now_s)
        clear(settings, cache, requests, speculation, ranks, lanes, lists, stages, fleet, replica, now_s)
        fleet.control[0].next_s = min(fleet.control[0].next_s, now_s)  # it may be wanted again


@inner
def look(settings, ranks, fleet):
    """The policy's look: Kubernetes' horizontal pod autoscaler (`pkg/controller/podautoscaler`, 1.30).

    As many replicas are recommended as bring the metric to its target, unless it is within the tolerance of it. More
    are started if all looks of the last `up_looks` asked for more, fewer if all of the last `down_looks` asked for
    fewer.
    """
    scaling, control = fleet.scaling, fleet.control
    total = 0
    for rank in range(ranks.size):
        if fleet.replicas[rank // settings.ranks_per_replica].phase != UP:
            continue
        if scaling.metric == OUTSTANDING:
            total += ranks[rank].num_outstanding
        elif scaling.metric == WAITING:
            total += ranks[rank].num_waiting
        elif scaling.metric == RUNNING:
            total += ranks[rank].num_running
        else:
            total += settings.num_blocks - ranks[rank].free_blocks
    if scaling.metric == OUTSTANDING or scaling.metric == WAITING:
        total += control[0].num_held
    wanted = control[0].wanted
    needed = total / scaling.target
    if scaling.metric == KV_USE:
        needed = needed / (settings.num_blocks * settings.ranks_per_replica)
    if abs(needed / wanted - 1.0) > scaling.tolerance_fraction:
        wanted = np.int64(np.ceil(needed))
    wanted = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
    fleet.recommended[control[0].num_looks % fleet.recommended.size] = wanted
    least, most = wanted, wanted
    for back in range(fleet.recommended.size):
        earlier = fleet.recommended[(control[0].num_looks - back) % fleet.recommended.size]
        if back <= scaling.up_looks:
            least = min(least, earlier)
        if back <= scaling.down_looks:
            most = max(most, earlier)
    control[0].num_looks += 1
    if control[0].wanted < least:
        control[0].wanted = least
    elif control[0].wanted > most:
        control[0].wanted = most


@inner
def resize(settings, ranks, fleet, now_s):
    """Start replicas that are off, the first ones first, or stop some: those that start, the last first, then the one
    with the fewest requests.

    Returns a replica that has nothing to drain and is off at once, or NONE; call it again then.
    """
    num_active = 0
    for replica in range(settings.num_replicas):
        phase = fleet.replicas[replica].phase
        if phase in (STARTING, UP):
            num_active += 1
    for replica in range(settings.num_replicas):
        if num_active < fleet.control[0].wanted and fleet.replicas[replica].phase == OFF:
            set_phase(fleet, replica, STARTING, now_s)
            fleet.replicas[replica].next_s = now_s + fleet.scaling.start_s
            num_active += 1
    for replica in range(settings.num_replicas - 1, -1, -1):
        if num_active > fleet.control[0].wanted and fleet.replicas[replica].phase == STARTING:
            set_phase(fleet, replica, OFF, now_s)
            fleet.replicas[replica].next_s = np.inf
            num_active -= 1
    while num_active > fleet.control[0].wanted:
        idlest, least = NONE, 0
        for replica in range(settings.num_replicas - 1, -1, -1):
            if fleet.replicas[replica].phase == UP:
                first = replica * settings.ranks_per_replica
                load = 0
                for rank in range(first, first + settings.ranks_per_replica):
                    load += ranks[rank].num_outstanding
                if idlest == NONE or load < least:
                    idlest, least = replica, load
        set_phase(fleet, idlest, DRAINING, now_s)
        num_active -= 1
        if least == 0:
            return idlest
    return NONE


@inner
def change(settings, cache, requests, speculation, ranks, lanes, lists, stages, fleet, now_s):
    """Apply the faults, repairs, starts and decisions of `now_s`."""
    scaling, control, replicas = fleet.scaling, fleet.control, fleet.replicas
    for replica in range(settings.num_replicas):
        if replicas[replica].fails_s <= now_s:
            back_s = now_s + fleet.repair_s[replica, replicas[replica].next_fault]
            replicas[replica].next_fault += 1
            replicas[replica].fails_s = fleet.fault_s[replica, replicas[replica].next_fault]
            if replicas[replica].phase == FAILED:
                replicas[replica].next_s = max(replicas[replica].next_s, back_s)
            elif replicas[replica].phase != OFF:
                set_phase(fleet, replica, FAILED, now_s)
                replicas[replica].next_s = back_s
                clear(settings, cache, requests, speculation, ranks, lanes, lists, stages, fleet, replica, now_s)
        elif replicas[replica].next_s <= now_s:
            replicas[replica].next_s = np.inf
            if replicas[replica].phase == STARTING:
                set_phase(fleet, replica, UP, now_s)
                ask_again(fleet, now_s)
            else:
                set_phase(fleet, replica, OFF, now_s)
    if fleet.change_s[control[0].next_change] <= now_s:
        control[0].wanted = fleet.change_replicas[control[0].next_change]
        control[0].next_change += 1
    if control[0].look_s <= now_s:
        look(settings, ranks, fleet)
        control[0].look_s += scaling.interval_s
    idle = resize(settings, ranks, fleet, now_s)
    while idle != NONE:
        set_phase(fleet, idle, OFF, now_s)
        clear(settings, cache, requests, speculation, ranks, lanes, lists, stages, fleet, idle, now_s)
        idle = resize(settings, ranks, fleet, now_s)
    next_s = min(control[0].look_s, fleet.change_s[control[0].next_change])
    for replica in range(settings.num_replicas):
        next_s = min(next_s, replicas[replica].fails_s, replicas[replica].next_s)
    control[0].next_s = next_s


@inner
def has_room_to_log(settings, fleet):
    """Whether a change, whatever it does, finds room for what it writes down and a fault behind each that happens."""
    control = fleet.control
    if control[0].num_losses + fleet.held.size > fleet.losses.size:
        return False
    if control[0].num_phases + 5 * settings.num_replicas > fleet.phases.size:
        return False
    for replica in range(settings.num_replicas):
        if fleet.replicas[replica].next_fault + 1 >= fleet.fault_s.shape[1]:
            return False
    return True
