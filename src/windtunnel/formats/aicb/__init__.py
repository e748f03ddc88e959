"""AICB, the workload generator of SimAI (https://github.com/aliyun/aicb at 23eec3c, which SimAI 1.7 pins).

Read: its commands and scripts (`read`), communication lists (`csv_records`), AIOB times (`aiob_times`). Written: its
own files, byte for byte (`write`), and a right list of a training job (`training`).

Refused: commands on which AICB fails, jobs that its arguments cannot describe, groups that its lists cannot name.
docs/reference/aicb-differences.md lists where its workloads differ from what the frameworks do.
"""

from windtunnel.formats.aicb.contents import AIOB, COMMAND, LIST, is_command, read_job, read_list, read_times
from windtunnel.formats.aicb.csv_records import COLUMNS
from windtunnel.formats.recognise import FileFormat

FORMATS = (
    FileFormat(LIST, "workload or trace", lambda file: COLUMNS in file.text[:100_000], read_list),
    FileFormat(
        AIOB,
        "workload or trace",
        lambda file: file.first_word.startswith(("train_iter:", "inference_term:")),
        read_times,
    ),
    FileFormat(COMMAND, "training job", is_command, read_job),
)
