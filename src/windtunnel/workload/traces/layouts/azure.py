"""Microsoft Azure's LLM inference traces of 2023 and 2024; times are dates."""

from windtunnel.workload.traces.layouts import Layout

LAYOUT = Layout(
    source="https://github.com/Azure/AzurePublicDataset",
    input_tokens="ContextTokens",
    output_tokens="GeneratedTokens",
    arrival="TIMESTAMP",
)
