"""Profilers' captures: Nsight Systems (exports of 2022.4 and 2023.4), Nsight Compute (2024.1), `torch.profiler`.

`read` returns a `Capture`, whatever the tool; `write` makes JSON, CSV and Parquet of it.

Refused: reports that were not exported, and files that are cut off.
"""

from windtunnel.formats.captures import kineto, ncu, nsys
from windtunnel.formats.recognise import FileFormat

FORMATS = (
    FileFormat("nsys SQLite", "capture", nsys.is_nsys, nsys.read_nsys),
    FileFormat("ncu CSV", "capture", ncu.is_ncu, ncu.read_ncu),
    FileFormat("Kineto JSON", "capture", lambda file: file.is_json, kineto.read_kineto_capture, is_certain=False),
    FileFormat(kineto.TRACE, "workload or trace", kineto.is_kineto, kineto.read_contents),
)
