"""Vidur's recorded runs on its own look-up tables: how far our times are from its, and how much sooner we have them.

Vidur's loop times are CPU seconds with its default metrics on a machine of two cores (commit 7d47513); our engine's are
the best of some runs here, wall time, the batches' records included.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from windtunnel.engine.vidur import replay
from windtunnel.interop.vidur import read_case, read_tables

VIDUR_LOOP_S = {
    "a_llama2-7b_tp1_vllm_arxiv1k_qps2": 1.66,
    "b_llama3-8b_tp1_sarathi512_conv512": 0.63,
    "c_llama2-70b_tp2pp2_sarathi_arxiv500": 3.04,
    "c_llama2-70b_tp4pp1_sarathi_arxiv500": 1.20,
    "d_llama2-7b_tp1_ft_fixed": 1.37,
    "d_llama2-7b_tp1_orca_arxiv300": 2.18,
    "e_llama2-7b_4rep_lor_vllm": 5.2,
    "e_llama2-7b_4rep_rr_vllm": 5.2,
    "i_llama2-7b_tp1pp4_vllm": 3.27,
}
TABLES = {
    "orca": "llama2-7b_tp1_orca",
    "ft_": "llama2-7b_tp1_orca",
    "tp2pp2": "llama2-70b_tp2pp2_pairwise_REALATTN",
    "tp4pp1": "llama2-70b_tp4pp1_pairwise",
    "tp1pp4": "llama2-7b_tp1pp4_vllm",
    "llama3-8b": "llama3-8b_tp1",
}
REPEATS = 20


def reference() -> Path:
    folder = Path(os.environ.get("WINDTUNNEL_REFERENCE") or Path(__file__).resolve().parents[2] / "shared/reference")
    if not (folder / "vidur").is_dir():
        sys.exit(f"no recorded Vidur runs at {folder}; name the folder with WINDTUNNEL_REFERENCE")
    return folder / "vidur"


def main() -> None:
    folder = reference()
    print(f"{'case':38} {'requests':>8} {'batches':>8} {'most off':>9} {'Vidur s':>8} {'ours ms':>8} {'ratio':>7}")
    ratios = []
    for name, vidur_s in VIDUR_LOOP_S.items():
        table = next((file for part, file in TABLES.items() if part in name), "llama2-7b_tp1_vllm")
        case, tables = read_case(folder / "cases" / name), read_tables(folder / "op_tables" / f"tables_{table}.npz")
        runs = [replay(case.config, tables, case.requests) for _ in range(REPEATS)]
        expected = pq.read_table(folder / "cases" / name / "requests.parquet").sort_by("Request Id")
        theirs = expected["request_e2e_time"].to_numpy()
        ours = runs[0].requests["finish_s"] - runs[0].requests["arrival_s"]
        best_s = min(run.engine_time_s for run in runs)
        ratios.append(vidur_s / best_s)
        print(
            f"{name:38} {len(ours):8,} {runs[0].steps['num_steps'].sum():8,} {np.max(abs(ours / theirs - 1)):9.1e} "
            f"{vidur_s:8.2f} {best_s * 1e3:8.2f} {ratios[-1]:7,.0f}"
        )
    print(f"ratio: median {np.median(ratios):,.0f}, least {min(ratios):,.0f}")


if __name__ == "__main__":
    main()
