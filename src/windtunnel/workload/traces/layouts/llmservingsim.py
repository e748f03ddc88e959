"""LLMServingSim's request files."""

from windtunnel.workload.traces.layouts import Layout

LAYOUT = Layout(
    source="https://github.com/casys-kaist/LLMServingSim",
    input_tokens="input_toks",
    output_tokens="output_toks",
    arrival="arrival_ns",
    arrival_unit="ns",
)
