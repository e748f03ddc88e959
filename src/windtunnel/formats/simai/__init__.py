"""SimAI's files (https://github.com/aliyun/SimAI, 1.6 and 1.7): workloads (`.txt`), `SimAI.conf`, reports.

A workload is one line of settings, the number of layers, and a line of twelve columns for each layer: a name, an unused
dependency, three phases (forward, gradient of the input, gradient of the weights) of compute time in nanoseconds,
collective and bytes, and the time of the update. Gradient accumulation is written out: every micro-batch has its own
lines.

Both vintages are read: AICB's of 2025 with `ep: pp: vpp: ga: all_gpus:` in the first line, and older ones without them;
columns separated by tabs or blanks; and `MICRO` files, which have no settings. Sizes are those of the whole logical
tensor, as NCCL counts: the gathered tensor of an all-gather, the input of a reduce-scatter, all that one rank sends
in an all-to-all (astra-sim/workload/Workload.cc at 1.7).

Refused: unknown settings, collectives and policies; lines of another length; a wrong number of layers.
"""

from windtunnel.formats.recognise import FileFormat
from windtunnel.formats.simai.workload import WORKLOAD, is_workload, read_contents

FORMATS = (FileFormat(WORKLOAD, "workload or trace", is_workload, read_contents),)
