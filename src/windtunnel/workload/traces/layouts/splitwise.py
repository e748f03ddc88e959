"""Traces of Splitwise's simulator."""

from windtunnel.workload.traces.layouts import Layout

LAYOUT = Layout(
    source="https://github.com/Mutinifni/splitwise-sim",
    input_tokens="prompt_size",
    output_tokens="token_size",
    arrival="arrival_timestamp",
)
