"""Profilers' captures: Nsight Systems (exports of 2022.4 and 2023.4), Nsight Compute (2024.1), `torch.profiler`.

`read` tells the tool by a file's content and returns one `Capture`, whatever the tool; `write` makes JSON, CSV and
Parquet of it. PyTorch's execution traces (`pytorch_trace`) are read for their collectives.

Refused: reports that were not exported, files that are cut off, execution traces of an unknown schema.
"""
