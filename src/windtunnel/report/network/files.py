"""CSV files of a simulated network: every flow's times, every link's use, and queues over time."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.files import csv_text, write_text
from windtunnel.network.fabric import Fabric
from windtunnel.network.flows import Flows
from windtunnel.network.packet.simulate import PacketTimes, QueueTrace
from windtunnel.network.paths import FlowTimes


def write_flow_times(flows: Flows, times: FlowTimes, path: Path) -> None:
    """Write a row for each flow: its ends, channel, step and bytes; when it began, was sent and was complete, in us.

    Raises:
        InputError: the file cannot be written.
    """
    head = ("group", "channel", "step", "source", "destination", "size_bytes", "begin_us", "sent_us", "finish_us")
    rows: list[list[Any]] = [getattr(flows, name).tolist() for name in head[:6]]
    rows += [np.round(each * 1e6, 6).tolist() for each in (times.begin_s, times.sent_s, times.finish_s)]
    write_text(path, csv_text(head, zip(*rows, strict=True)))


def write_link_use(fabric: Fabric, times: FlowTimes, path: Path) -> None:
    """Write a row for each direction of each link that carried anything: bytes, and how long it was busy until the end.

    Packets add the largest queue, how long it was paused, and the pauses, marks and losses there.

    Raises:
        InputError: the file cannot be written.
    """
    ends = np.column_stack([fabric.link_a, fabric.link_b])
    source, target = ends.ravel(), ends[:, ::-1].ravel()
    rate = np.repeat(fabric.bandwidth_bytes_per_s, 2)
    used = np.flatnonzero(times.link_bytes)
    end_s = max(float(times.finish_s.max(initial=0.0)), 1e-12)
    head = ["from", "to", "bytes_per_s", "bytes", "busy_fraction"]
    columns: list[NDArray[Any]] = [
        source,
        target,
        rate,
        np.rint(times.link_bytes).astype(np.int64),
        times.link_bytes / rate / end_s,
    ]
    if isinstance(times, PacketTimes):
        links = times.links
        head += ["most_queued_bytes", "paused_us", "pauses", "marks", "drops"]
        columns += [links.most_queued_bytes, links.paused_s * 1e6, links.num_pauses, links.num_marks, links.num_drops]
    rounded = (np.round(each[used], 6).tolist() for each in columns)
    write_text(path, csv_text(head, zip(*rounded, strict=True)))


def write_queues(fabric: Fabric, trace: QueueTrace, path: Path) -> None:
    """Write a row for each sample of the queues, a column for each traced link, `36-40` from node 36 to node 40.

    Raises:
        InputError: the file cannot be written.
    """
    ends = np.column_stack([fabric.link_a, fabric.link_b])
    names = [f"{source}-{target}" for source, target in zip(ends.ravel(), ends[:, ::-1].ravel(), strict=True)]
    head = ["time_us", *(names[link] for link in trace.links.tolist())]
    rows = zip(np.round(trace.time_s * 1e6, 6).tolist(), trace.queued_bytes.tolist(), strict=True)
    write_text(path, csv_text(head, ((moment, *queued) for moment, queued in rows)))
