"""How far estimators are off on points of Vidur's profiles that they were not shown, beside Vidur's own way.

Vidur's own: scikit-learn's random forest with one of its grid's points (250 trees, depth 16), a model for each operator
and split on Vidur's features (tokens; batch and context; cached tokens and chunk squared), on the same points left out.
Vidur itself reports errors on the points that it trained on. CPU seconds are of this process.
"""

import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from reference import REFERENCE
from windtunnel import catalog
from windtunnel.formats.vidur.read import operator_tables
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.shape import Shard
from windtunnel.pricing.choices import estimators
from windtunnel.pricing.estimator import TableEstimator
from windtunnel.pricing.profile import table_in
from windtunnel.pricing.regress import FOLDS, features, fitted, fold_numbers, scores
from windtunnel.pricing.roofline import Roofline
from windtunnel.pricing.table import MeasurementTable, merged
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.defaults import with_defaults
from windtunnel.serving.setup.step_prices import DeployedModel, lower_steps

FILES = (
    "compute/a100/meta-llama/Llama-2-70b-hf/mlp.csv",
    "compute/a100/meta-llama/Llama-2-70b-hf/attention.csv",
    "network/a100_dgx/all_reduce.csv",
    "network/a100_dgx/send_recv.csv",
)
METHODS = [name for name in estimators() if name != "auto"]


def reference() -> Path:
    folder = REFERENCE
    if not (folder / "vidur" / "profiles").is_dir():
        sys.exit(f"no profiles of Vidur's at {folder}; name the folder with WINDTUNNEL_REFERENCE")
    return folder / "vidur" / "profiles"


def vidurs_errors(table: MeasurementTable) -> np.ndarray:
    """|predicted / measured - 1| of every row, by a forest of the other folds of its site."""
    from sklearn.ensemble import RandomForestRegressor

    errors = np.full(len(table), np.nan)
    folds = fold_numbers(table, FOLDS)
    for rows in table.rows_by_site.values():
        x = features(table, rows)
        if table.kind == "prefill_attention":
            x = np.column_stack([x[:, 2], x[:, 1] ** 2])
        for fold in range(FOLDS):
            hidden = folds[rows] == fold
            forest = RandomForestRegressor(
                n_estimators=250, max_depth=16, min_samples_split=2, random_state=0, n_jobs=1
            )
            forest.fit(x[~hidden], table.seconds[rows][~hidden])
            errors[rows[hidden]] = np.abs(forest.predict(x[hidden]) / table.seconds[rows][hidden] - 1)
    return errors


def main() -> None:
    if find_spec("sklearn") is None:
        print("scikit-learn is not installed: pip install 'windtunnel[estimators]'")
        return
    device = catalog.device("a100_sxm")
    node = catalog.node("dgx_a100")
    roofline = Roofline(device, node)
    tables = merged([table for file in FILES for table in operator_tables(reference() / file, "a100_sxm")])
    print("mean |error| (MAPE) on points left out")
    print(f"{'operator':24} {'points':>7} {'Vidur':>7} " + " ".join(f"{name[:13]:>13}" for name in METHODS))
    for table in tables:
        theirs = np.nanmean(vidurs_errors(table))
        ours = {score.method: score.mean_error for score in scores(table, roofline, METHODS)}
        name = " ".join([table.kind, *table.words.values()])
        print(f"{name:24} {len(table):7,} {theirs:7.2%} " + " ".join(f"{ours[method]:13.2%}" for method in METHODS))
    print("\nfitting all of them and lowering Llama-2-70B, TP2, to the simulator's arrays")
    model = catalog.model("meta-llama/Llama-2-70b-hf")
    shard = Shard(model, model.precision, Parallelism(tp=2))
    engine = with_defaults(EngineSettings(), device)
    for method in METHODS:
        started_s = time.process_time()
        found = {(t.kind, *t.words.values()): fitted(t, roofline, method) for t in tables}
        fitted_s = time.process_time() - started_s
        deployed = DeployedModel(device, shard, engine, 4096)
        lower_steps(TableEstimator(partial(table_in, found), roofline), deployed)
        print(f"{method:18} {fitted_s:6.2f} s + {time.process_time() - started_s - fitted_s:6.2f} s of CPU")


if __name__ == "__main__":
    main()
