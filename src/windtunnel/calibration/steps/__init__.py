"""Recorded steps of real engines: read forward-pass metrics, price every step, score and fit.

SGLang (`srt/observability/forward_pass_metrics.py`), TensorRT-LLM and vLLM (pull request 52061) report the composition
and the wall time of every forward pass.
"""
