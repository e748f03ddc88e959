"""Vidur's profiling data."""

from pathlib import Path

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.vidur.read import VidurFile, operator_tables
from windtunnel.model.attention.grouped_query import DecodeAttention, PrefillAttention
from windtunnel.model.operators import Collective, Gemm
from windtunnel.pricing.profile import profile_estimator, write_profile
from windtunnel.pricing.table import merged, read_tables
from windtunnel.workload.traces.table_file import read_columns


def profiles(reference: Path) -> Path:
    return reference / "vidur" / "profiles"


@pytest.mark.full
def test_a_real_profile_prices_the_operators_that_it_measured(reference: Path, tmp_path: Path) -> None:
    llama = profiles(reference) / "compute" / "a100" / "meta-llama" / "Llama-2-70b-hf"
    network = profiles(reference) / "network" / "a100_dgx"
    attention = VidurFile(read_columns(llama / "attention.csv"))
    files = [llama / "mlp.csv", llama / "attention.csv", network / "all_reduce.csv"]
    tables = merged([table for path in files for table in operator_tables(path, "a100_sxm")])
    folder = tmp_path / "profile"
    write_profile(folder, tables, {"device": "a100_sxm"})
    assert read_tables(folder / "gemm.parquet")[0].statistics["min_s"].min() > 0
    device = catalog.device("a100_sxm")
    estimator = profile_estimator(folder, device, catalog.node("dgx_a100"))

    def milliseconds(op: object) -> float:
        return float(np.asarray(estimator.estimate(op).seconds)) * 1e3  # type: ignore[arg-type]

    # TP2, 512 tokens: the rows of the file.
    mlp = VidurFile(read_columns(llama / "mlp.csv"))
    (row,) = np.flatnonzero((mlp.numbers("num_tokens") == 512) & (mlp.numbers("num_tensor_parallel_workers") == 2))
    up = mlp.numbers("time_stats.mlp_up_proj.median")[row]
    assert milliseconds(Gemm(512, 2 * 28672 // 2, 8192)) == pytest.approx(up)
    pre = mlp.numbers("time_stats.attn_pre_proj.median")[row]
    assert milliseconds(Gemm(512, (64 + 2 * 8) * 128 // 2, 8192)) == pytest.approx(pre)
    # Decode: 32 requests of 1,024 cached tokens, 4 of 8 key heads on a GPU.
    assert milliseconds(DecodeAttention(32, 1025, 32, 4, 128)) == pytest.approx(0.064, rel=0.05)
    # Prefill: a whole prompt, and the same chunk after 1,024 cached tokens.
    assert milliseconds(PrefillAttention(1, 1024, 32, 4, 128)) == pytest.approx(0.216, rel=0.02)
    times_ms = attention.numbers("time_stats.attn_prefill.median")[
        (attention.numbers("prefill_chunk_size") == 1024) & (attention.numbers("kv_cache_size") == 1024)
    ]
    assert milliseconds(PrefillAttention(1024 / 3072, 3072, 32, 4, 128)) == pytest.approx(float(np.median(times_ms)))
    assert milliseconds(Collective("all_reduce", float(1 << 20), 4)) == pytest.approx(0.064, rel=0.1)


ATTENTION = """\
n_embd,n_q_head,n_kv_head,num_tensor_parallel_workers,batch_size,prefill_chunk_size,kv_cache_size,is_prefill,{times}
4096,32,8,1,1,512,256,True,500,,1
4096,32,8,2,16,0,1023,False,,250,1
"""


def test_steps_become_points_of_our_operators(tmp_path: Path) -> None:
    names = ("attn_prefill", "attn_decode", "attn_kv_cache_save")
    statistics = ("min", "max", "mean", "std")
    columns = [f"time_stats.{name}.median" for name in names]
    others = [f"time_stats.{name}.{statistic}" for name in names for statistic in statistics]
    lines = ATTENTION.format(times=",".join([*columns, *others])).splitlines()
    path = tmp_path / "attention.csv"
    path.write_text("\n".join([lines[0], *(line + ",0" * len(others) for line in lines[1:])]) + "\n")
    tables = {table.kind: table for table in operator_tables(path)}
    prefill, decode = tables["prefill_attention"], tables["decode_attention"]
    assert (prefill.seconds[0], decode.seconds[0]) == (0.5, 0.25)
    assert prefill.axes["num_tokens"][0] == 2 * 256 + 512
    assert (decode.axes["batch"][0], decode.axes["context_tokens"][0]) == (16, 1024)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("a,b\n", "has no rows"),
        ("a,b\n1\n", "row 1 has 1 value, but there are 2 columns"),
        ("a,b\n1,2\n", "is none of Vidur's profiles"),
        ("time_stats.mlp_up_proj.median,n_embd\n1,2\n", "has no column num_tensor_parallel_workers"),
    ],
)
def test_other_files_are_answered_with_a_sentence(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mlp.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        operator_tables(path)
