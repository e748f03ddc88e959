"""vLLM's use of a device's memory."""

SAMPLER_BYTES = 30.0
"""Bytes of one logit while the profiling run samples with a top-p (0.8 to 0.24 `_dummy_sampler_run`,
`apply_top_k_top_p`): 2 of the model and 4 in fp32, then sorted, 4 and an index of 8, both with a second buffer. Every
rank has gathered all of the vocabulary (`LogitsProcessor._gather_logits`)."""
