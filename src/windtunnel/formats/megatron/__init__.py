"""Megatron-LM command lines (NVIDIA/Megatron-LM core_v0.13, megatron/training/arguments.py).

`read` turns a launch script, a command, or the arguments that a run's log prints into a training job; `write` does the
reverse. Refused: missing arguments, wrong values, variables that are not assigned. Arguments that change nothing that
is predicted (data, learning rates, logging) are ignored and listed.
"""

from windtunnel.formats.megatron.job import is_arguments, read_job
from windtunnel.formats.recognise import FileFormat

FORMATS = (FileFormat("Megatron arguments", "training job", is_arguments, read_job, is_certain=False),)
