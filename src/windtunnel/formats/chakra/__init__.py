"""MLCommons Chakra execution traces (`.et`): one file a rank, a graph of computations and communications.

A file is a sequence of protobuf messages, each with its length before it: the trace's metadata, then nodes to the end
(mlcommons/chakra, schema/protobuf/et_def.proto, 0.0.4 and 1.0.0; ASTRA-sim's fork has the same numbers). The extra
`chakra` installs protobuf. `training` writes a job for ASTRA-sim 2.

Refused: files that are cut off or are no protobuf messages of a trace. Fields of newer schemas are skipped.
"""

from windtunnel.formats.chakra.trace import START, TRACE, read_contents
from windtunnel.formats.recognise import FileFormat

FORMATS = (FileFormat(TRACE, "workload or trace", lambda file: START.match(file.start) is not None, read_contents),)
