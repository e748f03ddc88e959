"""Windtunnel's own layout: the names of a workload's streams."""

from windtunnel.workload.traces.layouts import LENGTHS, Layout

LAYOUT = Layout(
    "this project",
    *LENGTHS,
    arrival="arrival_s",
    priority="priority",
    tenant="tenant",
    session="session",
    hash_ids="hash_ids",
)
