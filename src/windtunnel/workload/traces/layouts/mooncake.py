"""Mooncake: requests of Kimi, with a hash of every block of 512 prompt tokens."""

from windtunnel.workload.traces.layouts import Layout

LAYOUT = Layout(
    source="https://github.com/kvcache-ai/Mooncake",
    input_tokens="input_length",
    output_tokens="output_length",
    arrival="timestamp",
    arrival_unit="ms",
    hash_ids="hash_ids",
)
