"""AICB, the workload generator of SimAI (https://github.com/aliyun/aicb at 23eec3c, which SimAI 1.7 pins).

Read: its commands and scripts (`read`), communication lists (`csv_records`), AIOB times (`aiob_times`). Written: its
own files, byte for byte (`write`), and a right list of a training job (`training`).

Refused: commands on which AICB fails, jobs that its arguments cannot describe, groups that its lists cannot name.
docs/reference/aicb-differences.md lists where its workloads differ from what the frameworks do.
"""
