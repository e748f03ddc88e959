"""What an engine's profiling run allocates, and what it sets aside: data of a version, in its `defaults.yaml`."""

from windtunnel.schema import Schema


class Profiling(Schema):
    """The profiling run of an engine version; an engine without one has the neutral values."""

    sampler_bytes: float = 8.0
    """Bytes of the sampler's temporaries for each logit, at their peak, beside the logits themselves."""
    sampler_rows_by_sm: bool = False
    """Whether the sampler keeps a row of fp32 logits for each streaming multiprocessor."""
    samples_prompts: bool = False
    """Whether the run samples the longest prompts that the token budget holds, and not `max_num_seqs` requests."""
    keeps_experts_workspace: bool = False
    """Whether the workspace of experts stays allocated between layers and steps."""
    first_graph_bytes: float = 0.0
    """Memory set aside for the largest CUDA graph; 0: graphs are captured outside the engine's share of the memory."""
    graph_bytes: float = 0.0
    """Memory set aside for each further CUDA graph."""
