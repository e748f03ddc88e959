"""Vidur's files (https://github.com/microsoft/vidur at 7d47513).

Read: a run's `config.json`, look-up tables, requests and profiling data (`read`). Written: request metrics
(`write`). `replay` runs a configuration on Vidur's tables, with Vidur's results.

Refused: unknown schedulers, tables with missing operators or gaps.
"""
