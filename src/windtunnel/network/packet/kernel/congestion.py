"""Rate control of a queue pair, acknowledgement by acknowledgement: DCQCN, DCTCP, TIMELY and HPCC.

Each follows its paper in the form that the HPCC authors' simulator gives it (github.com/alibaba-edu/
High-Precision-Congestion-Control), which SimAI uses and whose parameters SimAI.conf names.
"""

import numpy as np

from windtunnel.compiled.jit import inner
from windtunnel.compiled.records import Records, int64
from windtunnel.network.packet.kernel import codes
from windtunnel.network.packet.kernel.state import Connection, PacketKernelSettings, PacketState, Stamp


@inner
def advance_alpha(settings: PacketKernelSettings, connection: Connection, now_ps: int) -> None:
    """Update DCQCN's alpha to `now_ps`: every `alpha_interval_ps` after the first mark it rises if a mark came in
    between, and falls otherwise.
    """
    due = (now_ps - connection.first_mark_ps) // settings.alpha_interval_ps
    if due <= connection.num_alpha_updates:
        return
    keep = 1.0 - settings.ewma_gain
    connection.alpha *= keep
    if connection.is_marked_for_alpha:
        connection.alpha += settings.ewma_gain
        connection.is_marked_for_alpha = 0
    connection.alpha *= keep ** np.float64(due - connection.num_alpha_updates - 1)
    connection.num_alpha_updates = due


@inner
def dcqcn_mark(settings: PacketKernelSettings, connection: Connection, now_ps: int) -> int:
    """Note a marked acknowledgement; return when to cut the rate, -1 if a cut is already scheduled.

    Source: Zhu et al., "Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015, section 3.1. Cuts happen on
    a grid of `decrease_interval_ps` that starts with the first mark.
    """
    if connection.first_mark_ps < 0:
        connection.first_mark_ps = now_ps
        connection.alpha = 1.0
        connection.num_alpha_updates = 0
        connection.target_rate = connection.rate
    else:
        advance_alpha(settings, connection, now_ps)
        connection.is_marked_for_alpha = 1
    if connection.is_decrease_due:
        return int64(-1)
    connection.is_decrease_due = 1
    since_ps = now_ps - connection.first_mark_ps
    return connection.first_mark_ps + (since_ps // settings.decrease_interval_ps + 1) * settings.decrease_interval_ps


@inner
def dcqcn_decrease(settings: PacketKernelSettings, connection: Connection, now_ps: int) -> None:
    """Cut the rate (DCQCN paper, equation 1) and restart the increase timer."""
    connection.is_decrease_due = 0
    advance_alpha(settings, connection, now_ps)
    if settings.clamp_target_rate or connection.stage > 0:
        connection.target_rate = connection.rate
    connection.rate = max(settings.min_rate_bytes_per_s, connection.rate * (1.0 - connection.alpha / 2.0))
    connection.stage = 0
    connection.increase_ps = now_ps + settings.increase_interval_ps


@inner
def dcqcn_increase(settings: PacketKernelSettings, connection: Connection, now_ps: int) -> None:
    """Raise the rate: fast recovery, then additive, then hyper increase (DCQCN paper, equations 3 and 4)."""
    if connection.stage == settings.fast_recovery_times:
        connection.target_rate = min(connection.max_rate, connection.target_rate + settings.rate_ai_bytes_per_s)
    elif connection.stage > settings.fast_recovery_times:
        connection.target_rate = min(connection.max_rate, connection.target_rate + settings.rate_hai_bytes_per_s)
    connection.rate = 0.5 * (connection.rate + connection.target_rate)
    connection.stage += 1
    connection.increase_ps = now_ps + settings.increase_interval_ps


@inner
def dctcp_acknowledged(settings: PacketKernelSettings, connection: Connection, byte: int, is_marked: int) -> None:
    """Set the rate by DCTCP after an acknowledgement.

    Source: Alizadeh et al., "Data Center TCP (DCTCP)", SIGCOMM 2010, equations 1 and 2, on a rate, not a window.
    """
    is_round_over = byte > connection.update_byte
    connection.num_marks += is_marked
    if is_round_over:
        if connection.update_byte == 0:
            connection.num_batch = connection.next_byte // settings.payload_bytes + 1
        else:
            fraction = min(1.0, connection.num_marks / connection.num_batch)
            connection.alpha += settings.ewma_gain * (fraction - connection.alpha)
            connection.num_marks = 0
            connection.num_batch = (connection.next_byte - byte) // settings.payload_bytes + 1
        connection.update_byte = connection.next_byte
    if connection.stage == 1 and byte > connection.congested_byte:
        connection.stage = 0
    if is_marked and connection.stage == 0:
        connection.rate = max(settings.min_rate_bytes_per_s, connection.rate * (1.0 - connection.alpha / 2.0))
        connection.stage = 1
        connection.congested_byte = connection.next_byte
    if connection.stage == 0 and is_round_over:
        connection.rate = min(connection.max_rate, connection.rate + settings.dctcp_rate_ai_bytes_per_s)


@inner
def timely_acknowledged(settings: PacketKernelSettings, connection: Connection, byte: int, rtt_ps: int) -> None:
    """Set the rate by TIMELY after an acknowledgement.

    Source: Mittal et al., "TIMELY: RTT-based Congestion Control for the Datacenter", SIGCOMM 2015, algorithm 1.
    """
    if byte <= connection.update_byte:
        return
    if connection.update_byte != 0:
        difference_ps = (1.0 - settings.timely_alpha) * connection.rtt_difference_ps + settings.timely_alpha * (
            rtt_ps - connection.last_rtt_ps
        )
        gradient = difference_ps / settings.timely_min_rtt_ps
        connection.rtt_difference_ps = difference_ps
        if rtt_ps < settings.timely_low_ps or (rtt_ps <= settings.timely_high_ps and gradient <= 0.0):
            step = settings.rate_ai_bytes_per_s if connection.stage < 5 else settings.rate_hai_bytes_per_s
            connection.rate = min(connection.max_rate, connection.target_rate + step)
            connection.stage += 1
        else:
            if rtt_ps > settings.timely_high_ps:
                factor = 1.0 - settings.timely_beta * (1.0 - settings.timely_high_ps / rtt_ps)
            else:
                factor = max(0.0, 1.0 - settings.timely_beta * gradient)
            connection.rate = max(settings.min_rate_bytes_per_s, connection.target_rate * factor)
            connection.stage = 0
        connection.target_rate = connection.rate
    if connection.next_byte > connection.update_byte:
        connection.update_byte = connection.next_byte
        connection.last_rtt_ps = rtt_ps


@inner
def hpcc_utilisation(
    connection: Connection, stamps: Records[Stamp], seen: Records[Stamp], num_stamps: int
) -> tuple[float, int]:
    """Return the utilisation of the busiest hop since the stamps in `seen`, and its interval; update `seen`."""
    utilisation = 0.0
    interval_ps = int64(0)
    for hop in range(num_stamps):
        passed_ps = max(1, stamps[hop].time_ps - seen[hop].time_ps)
        rate = (stamps[hop].sent_bytes - seen[hop].sent_bytes) * 1e12 / passed_ps
        queue_bytes = min(stamps[hop].queue_bytes, seen[hop].queue_bytes)
        line_rate = stamps[hop].bytes_per_s
        used = rate / line_rate + queue_bytes * connection.max_rate / line_rate / connection.window_bytes
        if used > utilisation:
            utilisation = used
            interval_ps = passed_ps
        seen[hop] = stamps[hop]
    return utilisation, interval_ps


@inner
def hpcc_acknowledged(
    settings: PacketKernelSettings,
    connection: Connection,
    byte: int,
    stamps: Records[Stamp],
    seen: Records[Stamp],
    num_stamps: int,
) -> None:
    """Set the rate by HPCC after an acknowledgement.

    Source: Li et al., "HPCC: High Precision Congestion Control", SIGCOMM 2019, algorithm 1, with one rate.
    """
    is_round_over = byte > connection.update_byte
    if connection.update_byte == 0:
        connection.update_byte = connection.next_byte
        for hop in range(num_stamps):
            seen[hop] = stamps[hop]
        return
    if not is_round_over and not settings.fast_react:
        return
    utilisation, interval_ps = hpcc_utilisation(connection, stamps, seen, num_stamps)
    interval_ps = min(interval_ps, connection.base_rtt_ps)
    weight = interval_ps / connection.base_rtt_ps
    connection.utilisation += weight * (utilisation - connection.utilisation)
    load = connection.utilisation / settings.target_utilisation
    stage = connection.stage + 1
    rate = connection.target_rate + settings.rate_ai_bytes_per_s
    if load >= 1.0 or connection.stage >= settings.most_increases:
        stage = 0
        rate = connection.target_rate / load + settings.rate_ai_bytes_per_s
    connection.rate = min(connection.max_rate, max(settings.min_rate_bytes_per_s, rate))
    if is_round_over:
        connection.target_rate = connection.rate
        connection.stage = stage
        connection.update_byte = max(connection.update_byte, connection.next_byte)


@inner
def acknowledged(state: PacketState, packet: int, rtt_ps: int) -> None:
    """Set the rate of the connection that `packet` acknowledges, under every congestion control but DCQCN."""
    settings, record = state.settings, state.packets[packet]
    number = record.connection
    connection = state.connections[number]
    if settings.congestion == codes.DCTCP:
        dctcp_acknowledged(settings, connection, record.byte, record.is_marked)
    elif settings.congestion == codes.TIMELY:
        timely_acknowledged(settings, connection, record.byte, rtt_ps)
    elif settings.congestion == codes.HPCC:
        stamps, seen = state.stamps[packet], state.seen[number]
        hpcc_acknowledged(settings, connection, record.byte, stamps, seen, record.num_stamps)
