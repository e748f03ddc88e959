"""Command lines of vLLM, SGLang and TensorRT-LLM's servers.

Sources: `vllm serve --help` of 0.24, `python -m sglang.launch_server --help` of 0.5.14, `trtllm-serve --help` and
`tensorrt_llm/llmapi/llm_args.py` of 1.3; for drafts, docs.vllm.ai (features, 0.26), docs.sglang.io (advanced features)
and nvidia.github.io/TensorRT-LLM (features, 1.4).

`read` turns a command into a deployment, `write` does the reverse, `scripts` makes shell scripts, Kubernetes manifests
and Helm charts. Refused: commands that start no such server, name no model, or have a value that its option does not
take. Options that are ignored, not modelled or unknown are listed, never skipped in silence.
"""
