"""The packet level in plain Python: the oracle of `network.packet.kernel.loop`, for small cases.

Objects instead of tables, one heap of events, a walk over all connections of a link instead of heaps of turns; of the
rate controls DCQCN and DCTCP, of the recoveries go-back-N, of the routings fixed paths. It uses none of the kernels.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from windtunnel.network.flows import Reduction
from windtunnel.network.packet.tables import PacketTables

DATA, ACK, NACK, PAUSE, RESUME = range(5)
DCQCN, DCTCP = 1, 8
SWITCH = 2
PAUSE_FRAME_BYTES = 64


@dataclass(eq=False)
class Packet:
    """A data packet, which becomes its own answer, or a pause frame."""

    kind: int
    num_bytes: int
    way: list[int]
    connection: "Connection | None" = None
    first_byte: int = 0
    hop: int = 0
    is_marked: bool = False
    ingress: int | None = None


@dataclass(eq=False)
class Connection:
    """Both ends of a flow under way."""

    flow: int
    turn: int
    size: int
    window: int
    way: list[int]
    reply: list[int]
    max_rate: float
    rate: float
    next_byte: int = 0
    acked: int = 0
    expected: int = 0
    refused: int = -1
    highest: int = 0
    next_send_ps: int = 0
    is_waiting: bool = False
    is_complete: bool = False
    target_rate: float = 0.0
    alpha: float = 1.0
    first_mark_ps: int | None = None
    num_alpha_updates: int = 0
    is_marked_for_alpha: bool = False
    is_decrease_due: bool = False
    is_increase_due: bool = False
    increase_ps: int = 0
    stage: int = 0
    update_byte: int = 0
    congested_byte: int = 0
    num_marks: int = 0
    num_batch: int = 0


@dataclass(eq=False)
class Link:
    """A transmitter, and the ingress at its far end."""

    record: Any
    number: int
    free_ps: int = 0
    is_due: bool = False
    is_paused: bool = False
    has_paused: bool = False
    control: deque[Packet] = field(default_factory=deque)
    queue: deque[Packet] = field(default_factory=deque)
    queue_bytes: int = 0
    connections: list[Connection] = field(default_factory=list)
    last_turn: int = -1
    ingress_bytes: int = 0
    headroom_bytes: int = 0
    num_draws: int = 0
    num_pauses: int = 0
    num_marks: int = 0
    num_drops: int = 0


def scrambled(word: int) -> int:
    """MurmurHash3's 32-bit finaliser."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
    word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
    return word ^ (word >> 16)


class PacketReference:
    """Runs `PacketTables` to the end; then `start_ps` and `finish_ps` hold each flow's times."""

    def __init__(self, tables: PacketTables) -> None:
        self.tables, self.settings = tables, tables.settings
        self.links = [Link(tables.links[i], i) for i in range(len(tables.links))]
        self.shared_bytes = [0] * len(tables.nodes)
        num_flows = len(tables.flows)
        self.children: list[list[int]] = [[] for _ in range(num_flows)]
        for flow in range(num_flows):
            for parent in tables.parent[tables.parent_ptr[flow] : tables.parent_ptr[flow + 1]]:
                self.children[parent].append(flow)
        self.parents_left = [int(count) for count in tables.flows.parents_left]
        self.start_ps = [-1] * num_flows
        self.finish_ps = [-1] * num_flows
        self.ready_ps = [0] * num_flows
        self.released: dict[int, int] = {}
        """Chunks of a channel so far."""
        self.is_reducing: dict[int, bool] = {}
        """By rank."""
        self.reducing_ps: dict[int, int] = {}
        """By flow."""
        self.waiting: dict[int, deque[int]] = {}
        self.queue_free_ps: dict[int, int] = {}
        self.events: list[tuple[int, bool, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.now_ps = self.num_scheduled = self.num_started = 0
        for flow in tables.first:
            self.release(int(flow))
        while self.events:
            self.now_ps, _, _, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)

    def schedule(self, due_ps: int, action: Callable[..., None], *arguments: Any, sender: int = -1) -> None:
        """Messages of a `sender` come before all else of that time."""
        heapq.heappush(self.events, (due_ps, sender < 0, sender, self.num_scheduled, action, arguments))
        self.num_scheduled += 1

    # ------------------------------------------------------------------------------------------------------------ flows

    def reduce(self, flow: int) -> None:
        """SimAI's ranks add up what they have received, or not."""
        number = int(self.tables.flows[flow].channel)
        channel = self.tables.channels[number]
        rank, released = int(channel.rank), self.released.get(number, 0)
        self.released[number] = released + 1
        if released % int(channel.cycle) == 0:
            self.is_reducing[rank] = not self.is_reducing.get(rank, False)
        elif self.tables.flows[flow].reduction == Reduction.EVERY or self.is_reducing[rank]:
            self.reducing_ps[flow] = 3 * 10_000

    def release(self, flow: int) -> None:
        if self.tables.flows[flow].channel >= 0:
            self.reduce(flow)
        queue = int(self.tables.flows[flow].queue)
        if queue in self.waiting:
            self.waiting[queue].append(flow)
            return
        self.waiting[queue] = deque()
        self.start_when_free(flow, self.queue_free_ps.get(queue, 0))

    def start_when_free(self, flow: int, free_ps: int) -> None:
        record = self.tables.flows[flow]
        delay_ps = int(record.delay_ps) + self.reducing_ps.get(flow, 0)
        due_ps = max(self.ready_ps[flow] + delay_ps, int(record.start_ps), free_ps, self.now_ps)
        self.schedule(due_ps, self.start, flow)

    def sent(self, flow: int, free_ps: int) -> None:
        queue = int(self.tables.flows[flow].queue)
        self.queue_free_ps[queue] = free_ps
        if self.waiting[queue]:
            self.start_when_free(self.waiting[queue].popleft(), free_ps)
        else:
            del self.waiting[queue]

    def complete(self, flow: int) -> None:
        self.finish_ps[flow] = self.now_ps
        for child in self.children[flow]:
            self.ready_ps[child] = self.now_ps
            self.has_one_less(child)

    def has_one_less(self, flow: int) -> None:
        self.parents_left[flow] -= 1
        if self.parents_left[flow] == 0:
            self.release(flow)

    def start(self, flow: int) -> None:
        tables, record = self.tables, self.tables.flows[flow]
        self.start_ps[flow] = self.now_ps
        if record.follower >= 0:
            self.has_one_less(int(record.follower))
        routes = tables.routes
        way = [int(x) for x in routes.path_links[routes.paths[record.path] : routes.paths[record.path + 1]]]
        back = [int(x) for x in routes.reply_links[routes.replies[record.reply] : routes.replies[record.reply + 1]]]
        if record.size_bytes == 0 or not way:
            self.sent(flow, self.now_ps)
            self.complete(flow)
            return
        rate = 1e12 / float(self.links[way[0]].record.ps_per_byte)
        connection = Connection(
            flow, self.num_started, int(record.size_bytes), int(routes.window_bytes[record.path]), way, back, rate, rate
        )
        connection.next_send_ps = self.now_ps
        connection.target_rate = rate
        self.num_started += 1
        self.links[way[0]].connections.append(connection)
        self.wake(connection)

    # ---------------------------------------------------------------------------------------------------------- sending

    def may_send(self, connection: Connection) -> bool:
        if connection.next_byte >= connection.size:
            return False
        window = connection.window or 2**62
        if connection.window and self.settings.window_follows_rate and connection.rate < connection.max_rate:
            window = max(1, int(window * connection.rate / connection.max_rate))
        return connection.next_byte - connection.acked < window

    def wake(self, connection: Connection) -> None:
        if connection.is_waiting or not self.may_send(connection):
            return
        link = self.links[connection.way[0]]
        if connection.next_send_ps > max(self.now_ps, link.free_ps):
            connection.is_waiting = True
            self.schedule(connection.next_send_ps, self.send_again, connection)
            return
        self.serve(link)

    def send_again(self, connection: Connection) -> None:
        connection.is_waiting = False
        self.wake(connection)

    def next_connection(self, link: Link) -> Connection | None:
        """The next in the round of starts among those that may send now."""
        able = [c for c in link.connections if not c.is_waiting and self.may_send(c)]
        if not able:
            return None
        later = [c for c in able if c.turn > link.last_turn]
        return min(later or able, key=lambda c: c.turn)

    def next_data_packet(self, link: Link) -> Packet | None:
        connection = self.next_connection(link)
        if connection is None:
            return None
        link.last_turn = connection.turn
        byte = connection.next_byte
        connection.next_byte = min(byte + self.settings.payload_bytes, connection.size)
        num_bytes = connection.next_byte - byte + self.settings.header_bytes
        free_ps = self.now_ps + self.sending_ps(link, num_bytes)
        if connection.next_byte > connection.highest:
            connection.highest = connection.next_byte
            if connection.next_byte == connection.size:
                self.sent(connection.flow, free_ps)
        connection.next_send_ps = free_ps
        if connection.rate < connection.max_rate:
            connection.next_send_ps = self.now_ps + int(num_bytes * 1e12 / connection.rate + 0.5)
        if self.may_send(connection) and connection.next_send_ps > free_ps:
            connection.is_waiting = True
            self.schedule(connection.next_send_ps, self.send_again, connection)
        return Packet(DATA, num_bytes, connection.way, connection, byte)

    def sending_ps(self, link: Link, num_bytes: int) -> int:
        tick = self.settings.tick_ps
        if tick == 1:
            return int(num_bytes * float(link.record.ps_per_byte) + 0.5)
        return int(num_bytes * float(link.record.ps_per_byte) / tick) * tick

    def serve_when_free(self, link: Link) -> None:
        if not link.is_due:
            link.is_due = True
            self.schedule(max(self.now_ps, link.free_ps), self.is_free, link)

    def is_free(self, link: Link) -> None:
        link.is_due = False
        self.serve(link)

    def serve(self, link: Link) -> None:
        """Send the next packet of a link, now or when it is free."""
        if link.is_due:
            return
        if link.free_ps > self.now_ps:
            self.serve_when_free(link)
            return
        packet: Packet | None
        if link.control:
            packet = link.control.popleft()
        elif link.is_paused:
            return
        elif link.queue:
            packet = link.queue.popleft()
            link.queue_bytes -= packet.num_bytes
        else:
            packet = self.next_data_packet(link)
            if packet is None:
                return
        self.leave_switch(link, packet)
        link.free_ps = self.now_ps + self.sending_ps(link, packet.num_bytes)
        has_more = not link.is_paused and (bool(link.queue) or self.next_connection(link) is not None)
        if has_more or link.control or self.settings.tick_ps > 1:
            self.serve_when_free(link)
        due_ps = link.free_ps + int(link.record.latency_ps)
        self.schedule(due_ps, self.arrive, link, packet, sender=int(link.record.sender))

    # --------------------------------------------------------------------------------------------------------- switches

    def threshold(self, link: Link) -> int:
        node = int(link.record.target)
        used = self.shared_bytes[node] if self.settings.dynamic_pfc else 0
        return (int(self.tables.nodes[node].shared_limit_bytes) - used) >> int(link.record.pfc_shift)

    def share(self, link: Link) -> int:
        return max(0, link.ingress_bytes - self.settings.reserve_bytes)

    def send_pause(self, link: Link, kind: int) -> None:
        back = self.links[link.number ^ 1]
        back.control.append(Packet(kind, PAUSE_FRAME_BYTES, [back.number]))
        self.serve_when_free(back)

    def admit(self, link: Link, num_bytes: int) -> bool:
        threshold = self.threshold(link)
        headroom = int(link.record.headroom_limit_bytes) if self.settings.pfc else 0
        if num_bytes + link.headroom_bytes > headroom and num_bytes + self.share(link) > threshold:
            return False
        over = link.ingress_bytes + num_bytes - self.settings.reserve_bytes
        if over > threshold and over > 0:
            link.headroom_bytes += num_bytes
        else:
            link.ingress_bytes += num_bytes
            self.shared_bytes[int(link.record.target)] += max(0, min(num_bytes, over))
        is_full = link.headroom_bytes > 0 or self.share(link) >= self.threshold(link)
        if self.settings.pfc and not link.has_paused and is_full:
            link.has_paused = True
            link.num_pauses += 1
            self.send_pause(link, PAUSE)
        return True

    def leave_switch(self, link: Link, packet: Packet) -> None:
        if packet.ingress is None:
            return
        came = self.links[packet.ingress]
        packet.ingress = None
        from_headroom = min(came.headroom_bytes, packet.num_bytes)
        self.shared_bytes[int(came.record.target)] -= min(packet.num_bytes - from_headroom, self.share(came))
        came.headroom_bytes -= from_headroom
        came.ingress_bytes -= packet.num_bytes - from_headroom
        if came.has_paused and came.headroom_bytes == 0:
            share = self.share(came)
            if share == 0 or share + self.settings.resume_offset_bytes <= self.threshold(came):
                came.has_paused = False
                self.send_pause(came, RESUME)
        if packet.kind == DATA and self.settings.ecn and not packet.is_marked and self.is_congested(link):
            packet.is_marked = True
            link.num_marks += 1

    def is_congested(self, link: Link) -> bool:
        low, high = int(link.record.ecn_min_bytes), int(link.record.ecn_max_bytes)
        if not low < link.queue_bytes <= high:
            return link.queue_bytes > high
        return self.draw(link) < (link.queue_bytes - low) / (high - low) * float(link.record.ecn_max_probability)

    def draw(self, link: Link) -> float:
        """A hash of seed, link and count."""
        link.num_draws += 1
        return scrambled(scrambled(scrambled(self.settings.seed) ^ int(link.record.name)) ^ link.num_draws) / 2**32

    def arrive(self, link: Link, packet: Packet) -> None:
        if packet.kind >= PAUSE:
            held = self.links[link.number ^ 1]
            held.is_paused = packet.kind == PAUSE
            if packet.kind == RESUME:
                self.serve(held)
            return
        if link.record.error_fraction > 0 and self.draw(link) < float(link.record.error_fraction):
            link.num_drops += 1
            return
        if packet.hop < len(packet.way) - 1:
            self.forward(link, packet)
        elif packet.kind == DATA:
            self.receive_data(packet)
        else:
            self.receive_answer(packet)

    def forward(self, link: Link, packet: Packet) -> None:
        if self.tables.nodes[link.record.target].kind == SWITCH:
            if not self.admit(link, packet.num_bytes):
                link.num_drops += 1
                return
            packet.ingress = link.number
        packet.hop += 1
        onward = self.links[packet.way[packet.hop]]
        if packet.kind != DATA and self.settings.acks_first:
            onward.control.append(packet)
        else:
            onward.queue.append(packet)
            onward.queue_bytes += packet.num_bytes
        self.serve(onward)

    # ------------------------------------------------------------------------------------------------------------- ends

    def receive_data(self, packet: Packet) -> None:
        connection = packet.connection
        assert connection is not None
        answer = ACK
        if packet.first_byte == connection.expected:
            connection.expected = min(packet.first_byte + self.settings.payload_bytes, connection.size)
        elif packet.first_byte > connection.expected:
            if connection.refused == connection.expected:
                return
            connection.refused, answer = connection.expected, NACK
        if connection.expected >= connection.size and not connection.is_complete and not self.settings.completes_on_ack:
            connection.is_complete = True
            self.complete(connection.flow)
        packet.kind, packet.num_bytes, packet.first_byte = answer, self.settings.ack_bytes, connection.expected
        packet.way, packet.hop = connection.reply, 0
        first = self.links[packet.way[0]]
        first.queue.append(packet)
        first.queue_bytes += packet.num_bytes
        self.serve(first)

    def receive_answer(self, packet: Packet) -> None:
        connection = packet.connection
        assert connection is not None
        if connection.acked >= connection.size:
            return
        if packet.first_byte > connection.acked:
            connection.acked = packet.first_byte
            connection.next_byte = max(connection.next_byte, packet.first_byte)
        if packet.kind == NACK:
            connection.next_byte = connection.acked
        if connection.acked >= connection.size:
            self.links[connection.way[0]].connections.remove(connection)
            if not connection.is_complete:
                connection.is_complete = True
                self.complete(connection.flow)
            return
        if self.settings.congestion == DCQCN and packet.is_marked:
            self.dcqcn_mark(connection)
        elif self.settings.congestion == DCTCP:
            self.dctcp(connection, packet.first_byte, packet.is_marked)
        self.wake(connection)

    # ------------------------------------------------------------------------------------------------------------ rates

    def advance_alpha(self, connection: Connection) -> None:
        assert connection.first_mark_ps is not None
        due = (self.now_ps - connection.first_mark_ps) // self.settings.alpha_interval_ps
        if due > connection.num_alpha_updates:
            keep = 1.0 - self.settings.ewma_gain
            connection.alpha = connection.alpha * keep + self.settings.ewma_gain * connection.is_marked_for_alpha
            connection.is_marked_for_alpha = False
            connection.alpha *= keep ** float(due - connection.num_alpha_updates - 1)
            connection.num_alpha_updates = due

    def dcqcn_mark(self, connection: Connection) -> None:
        if connection.first_mark_ps is None:
            connection.first_mark_ps, connection.alpha = self.now_ps, 1.0
            connection.target_rate = connection.rate
        else:
            self.advance_alpha(connection)
            connection.is_marked_for_alpha = True
        if not connection.is_decrease_due:
            connection.is_decrease_due = True
            interval = self.settings.decrease_interval_ps
            steps = (self.now_ps - connection.first_mark_ps) // interval + 1
            self.schedule(connection.first_mark_ps + steps * interval, self.dcqcn_decrease, connection)

    def dcqcn_decrease(self, connection: Connection) -> None:
        if connection.acked >= connection.size:
            return
        connection.is_decrease_due = False
        self.advance_alpha(connection)
        if self.settings.clamp_target_rate or connection.stage > 0:
            connection.target_rate = connection.rate
        connection.rate = max(self.settings.min_rate_bytes_per_s, connection.rate * (1.0 - connection.alpha / 2.0))
        connection.stage = 0
        connection.increase_ps = self.now_ps + self.settings.increase_interval_ps
        if not connection.is_increase_due:
            connection.is_increase_due = True
            self.schedule(connection.increase_ps, self.dcqcn_increase, connection)
        self.wake(connection)

    def dcqcn_increase(self, connection: Connection) -> None:
        if connection.acked >= connection.size:
            return
        if self.now_ps >= connection.increase_ps:
            over = connection.stage - self.settings.fast_recovery_times
            if over >= 0:
                step = self.settings.rate_ai_bytes_per_s if over == 0 else self.settings.rate_hai_bytes_per_s
                connection.target_rate = min(connection.max_rate, connection.target_rate + step)
            connection.rate = 0.5 * (connection.rate + connection.target_rate)
            connection.stage += 1
            connection.increase_ps = self.now_ps + self.settings.increase_interval_ps
        self.schedule(connection.increase_ps, self.dcqcn_increase, connection)
        self.wake(connection)

    def dctcp(self, connection: Connection, byte: int, is_marked: bool) -> None:
        payload = self.settings.payload_bytes
        is_round_over = byte > connection.update_byte
        connection.num_marks += is_marked
        if is_round_over:
            if connection.update_byte == 0:
                connection.num_batch = connection.next_byte // payload + 1
            else:
                fraction = min(1.0, connection.num_marks / connection.num_batch)
                connection.alpha += self.settings.ewma_gain * (fraction - connection.alpha)
                connection.num_marks = 0
                connection.num_batch = (connection.next_byte - byte) // payload + 1
            connection.update_byte = connection.next_byte
        if connection.stage == 1 and byte > connection.congested_byte:
            connection.stage = 0
        if is_marked and connection.stage == 0:
            connection.rate = max(self.settings.min_rate_bytes_per_s, connection.rate * (1.0 - connection.alpha / 2.0))
            connection.stage, connection.congested_byte = 1, connection.next_byte
        if connection.stage == 0 and is_round_over:
            connection.rate = min(connection.max_rate, connection.rate + self.settings.dctcp_rate_ai_bytes_per_s)
