"""BurstGPT: ChatGPT and GPT-4 requests of a university's Azure OpenAI service. Requests without output failed."""

from windtunnel.workload.traces.layouts import Layout

LAYOUT = Layout(
    source="https://github.com/HPMLL/BurstGPT",
    input_tokens="Request tokens",
    output_tokens="Response tokens",
    arrival="Timestamp",
    session="Session ID",
    zero_output_failed=True,
)
