"""Vidur's traces; its ShareGPT and arXiv files have lengths only."""

from windtunnel.workload.traces.layouts import Layout

LAYOUT = Layout(
    source="https://github.com/microsoft/vidur",
    input_tokens="num_prefill_tokens",
    output_tokens="num_decode_tokens",
    arrival="arrived_at",
)
