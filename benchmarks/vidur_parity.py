"""Vidur's recorded runs on its own look-up tables: how far our times are from its, and how much sooner we have them.

Vidur's loop times are CPU seconds with its default metrics on a machine of two cores (commit 7d47513); our engine's are
the best of some runs here, wall time, the batches' records included.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from readers.vidur_runs import find_tables, read_case
from reference import REFERENCE
from windtunnel.errors import InputError
from windtunnel.formats.vidur.read import read_tables
from windtunnel.formats.vidur.replay import replay

VIDUR_LOOP_S = {
    "a_llama2-7b_tp1_vllm_arxiv1k_qps2": 1.66,
    "b_llama3-8b_tp1_sarathi512_conv512": 0.63,
    "c_llama2-70b_tp2pp2_sarathi_arxiv500": 3.04,
    "c_llama2-70b_tp4pp1_sarathi_arxiv500": 1.20,
}
"""With default metrics, of cases that were recorded with all metrics on."""
REPEATS = 20


def reference() -> Path:
    folder = REFERENCE
    if not (folder / "vidur").is_dir():
        sys.exit(f"no recorded Vidur runs at {folder}; name the folder with WINDTUNNEL_REFERENCE")
    return folder / "vidur"


def loop_s(folder: Path) -> float:
    """Vidur's loop in CPU seconds, NaN where it was not recorded with default metrics."""
    if folder.name in VIDUR_LOOP_S:
        return VIDUR_LOOP_S[folder.name]
    path = folder / "summary.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    summary, phases = recorded.get("summary") or {}, recorded.get("phases") or {}
    return float(phases["sim_loop"]["cpu_s"]) if phases and summary.get("tag") != "full" else np.nan


def main() -> None:
    folder = reference()
    print(f"{'case':38} {'requests':>8} {'batches':>8} {'most off':>9} {'Vidur s':>8} {'ours ms':>8} {'ratio':>7}")
    ratios = []
    for path in sorted(file.parent for file in folder.glob("cases/*/config.json")):
        case = read_case(path)
        try:
            file = find_tables(folder / "op_tables", case.config)
        except InputError:
            print(f"{path.name:38} {len(case.requests.arrival_s):8,} its look-up tables were not recorded")
            continue
        tables = read_tables(file, case.config.kv_cache_prediction_granularity)
        runs = [replay(case.config, tables, case.requests) for _ in range(REPEATS)]
        expected = pq.read_table(path / "requests.parquet").sort_by("Request Id")
        theirs = expected["request_e2e_time"].to_numpy()
        ours = runs[0].requests["finish_s"] - runs[0].requests["arrival_s"]
        assert np.array_equal(np.isnan(ours), np.isnan(theirs)), f"{path.name}: not the same requests finished"
        best_s, most_off = min(run.engine_time_s for run in runs), np.nanmax(abs(ours / theirs - 1))
        ratios.append(loop_s(path) / best_s)
        print(
            f"{path.name:38} {len(ours):8,} {runs[0].steps['num_steps'].sum():8,} {most_off:9.1e} "
            f"{loop_s(path):8.2f} {best_s * 1e3:8.2f} {ratios[-1]:7,.0f}"
        )
    print(f"ratio: median {np.nanmedian(ratios):,.0f}, least {np.nanmin(ratios):,.0f}")


if __name__ == "__main__":
    main()
