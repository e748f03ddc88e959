from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from readers.vidur_runs import read_batches


def test_batches_keep_their_numbers_where_a_time_limit_caught_one_in_flight(tmp_path: Path) -> None:
    """Batch 1, of another replica, had not ended; the second stage of a batch is not a batch of its own."""
    columns = {
        "stage": [0, 1, 0],
        "batch_id": [0, 0, 2],
        "start_us": [0.0, 10.0, 20.0],
        "duration_us": [10.0, 10.0, 5.0],
        "request_ids": [[7, 8], [7, 8], [9]],
        "num_tokens": [[3, 4], [3, 4], [1]],
    }
    path = tmp_path / "iterations.parquet"
    parquet.write_table(pa.table(columns), path)
    batches = read_batches(path)
    assert (batches.number.tolist(), batches.batch.tolist()) == ([0, 2], [0, 0, 2])
    assert (batches.request.tolist(), batches.tokens.tolist()) == ([7, 8, 9], [3, 4, 1])
    np.testing.assert_allclose(batches.start_s, [0, 20e-6])
