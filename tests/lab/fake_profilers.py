"""Stand-ins for `nsys` and `ncu` on PATH: they note their command line and leave a recorded profile behind.

`nsys profile` leaves what the program would have left too: the metrics and records of a run.
"""

import stat
import sys
from pathlib import Path

import numpy as np

from windtunnel.metrics.records import STEP_COLUMNS, Table, request_table

METRICS = """{"engine": "transformers 5", "device": "H100", "dtype": "bfloat16", "num_requests": 1, "input_tokens": 8,
"output_tokens": 2, "ttft_s": 0.01, "tpot_s": 0.005, "e2e_s": 0.015, "output_tokens_per_s": 133.0,
"total_tokens_per_s": 666.0, "num_steps": 2, "is_profiled": true, "load_s": 1.0, "peak_memory_bytes": 1000}"""

_TOOL = """#!{python}
import pathlib, shutil, sys
recorded = pathlib.Path({recorded!r})
with (recorded / "commands.txt").open("a") as file:
    file.write(" ".join([{name!r}, *sys.argv[1:]]) + "\\n")
if (recorded / "fail").exists():
    sys.exit("the injection library died")
options = dict(text.removeprefix("--").partition("=")[::2] for text in sys.argv if text.startswith("--"))
if sys.argv[1] == "profile":
    folder = pathlib.Path(options["output"]).parent
    pathlib.Path(options["output"] + ".nsys-rep").write_bytes(b"report")
    for path in (recorded / "run").iterdir():
        shutil.copy(path, folder)
elif sys.argv[1] == "export":
    shutil.copy(recorded / "capture.sqlite", options["output"])
elif "import" in options:
    sys.stdout.write((recorded / "counters.csv").read_text())
else:
    pathlib.Path(options["export"] + ".ncu-rep").write_bytes(b"report")
"""


def install(folder: Path, *tools: str) -> tuple[Path, Path]:
    """Make the tools; returns the folder for PATH and the folder of what they leave behind."""
    on_path, recorded = folder / "bin", folder / "recorded"
    on_path.mkdir(parents=True)
    (recorded / "run").mkdir(parents=True)
    for name in tools:
        tool = on_path / name
        tool.write_text(_TOOL.format(python=sys.executable, recorded=str(recorded), name=name), encoding="utf-8")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (recorded / "run" / "metrics.json").write_text(METRICS, encoding="utf-8")
    _write_records(recorded / "run")
    return on_path, recorded


def _write_records(folder: Path) -> None:
    engine = {"arrival_s": [0.0], "scheduled_s": [0.0], "first_token_s": [0.01], "finish_s": [0.015]}
    counts = {"input_tokens": [8], "output_tokens": [2], "priority": [0], "num_preemptions": [0]}
    columns = {name: np.array(values) for name, values in (engine | counts).items()}
    request_table(columns, np.zeros(1, np.int64), 0.0, 0).write_parquet(folder / "requests.parquet")
    steps = {"start_s": np.array([0.0, 0.01]), "duration_s": np.array([0.01, 0.005]), "num_prefills": np.array([1, 0])}
    Table(steps, STEP_COLUMNS).write_parquet(folder / "steps.parquet")
