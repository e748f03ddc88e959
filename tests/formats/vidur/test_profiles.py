"""Vidur's profiling data, read and written."""

from pathlib import Path

import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.formats.vidur.profiles import (
    STATISTICS_OF,
    ProfiledStep,
    collective_files,
    operator_tables,
    read_vidur_file,
    vidur_files,
    write_vidur_rows,
)
from windtunnel.model.attention.grouped_query import DecodeAttention, PrefillAttention
from windtunnel.model.operators import Collective, Gemm
from windtunnel.pricing.profile import profile_estimator, write_profile
from windtunnel.pricing.table import merged, read_tables


def profiles(reference: Path) -> Path:
    return reference / "vidur" / "profiles"


@pytest.mark.full
def test_a_real_profile_prices_the_operators_that_it_measured(reference: Path, tmp_path: Path) -> None:
    llama = profiles(reference) / "compute" / "a100" / "meta-llama" / "Llama-2-70b-hf"
    network = profiles(reference) / "network" / "a100_dgx"
    attention = read_vidur_file(llama / "attention.csv")
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
    mlp = read_vidur_file(llama / "mlp.csv")
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


def times(seconds: float) -> dict[str, float]:
    return dict.fromkeys(STATISTICS_OF, seconds)


def test_a_profile_of_ours_has_vidurs_columns(reference: Path, tmp_path: Path) -> None:
    model = catalog.model("llama-3.1-8b")
    names = ("embedding", "input_norm", "qkv_proj", "rope", "kv_cache_write", "o_proj", "post_attention_norm")
    rest = ("gate_up_proj", "activation", "down_proj")
    common = {name: times(1e-3 * (number + 1)) for number, name in enumerate((*names, *rest))}
    steps = [
        ProfiledStep(1, 1, 512, 256, {**common, "attention_prefill": times(0.5)}),
        ProfiledStep(2, 16, 0, 1023, {**common, "attention_decode": times(0.25)}),
    ]
    files = vidur_files(model, steps, 16)
    theirs = read_vidur_file(profiles(reference) / "compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv")
    assert list(files["mlp.csv"][0]) == list(theirs.columns)
    for name in ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp"):
        assert files["mlp.csv"][0][name] == theirs.columns[name][0]
    real = read_vidur_file(profiles(reference) / "compute/a100/meta-llama/Llama-2-70b-hf/attention.csv")
    missing = set(real.columns) - set(files["attention.csv"][0])
    assert missing == {"profile_method"}  # of that one older file
    path = tmp_path / "attention.csv"
    write_vidur_rows(files["attention.csv"], path)
    prefill, decode = (
        next(table for table in operator_tables(path) if table.kind == kind)
        for kind in ("prefill_attention", "decode_attention")
    )
    assert (prefill.seconds[0], decode.seconds[0]) == (0.5, 0.25)
    assert prefill.axes["num_tokens"][0] == 2 * 256 + 512
    assert (decode.axes["batch"][0], decode.axes["context_tokens"][0]) == (16, 1024)


def test_collectives_come_back_as_they_were(reference: Path, tmp_path: Path) -> None:
    path = profiles(reference) / "network" / "a100_dgx" / "send_recv.csv"
    tables = operator_tables(path)
    copy = tmp_path / "send_recv.csv"
    write_vidur_rows(collective_files(tables)["send_recv.csv"], copy)
    (again,) = operator_tables(copy)
    (first,) = tables
    for name in first.sites:
        np.testing.assert_array_equal(again.sites[name], first.sites[name])
    np.testing.assert_allclose(again.seconds, first.seconds, rtol=1e-12)


def test_models_that_vidur_does_not_know() -> None:
    with pytest.raises(InputError, match="cannot be written as Vidur's profile"):
        vidur_files(catalog.model("deepseek-ai/DeepSeek-V3"), [], 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read as CSV"),
        ("a,b\n", "holds no rows"),
        ("a,b\n1\n", "Expected 2 columns, got 1"),
        ("a,b\n1,2\n", "is none of Vidur's profiles"),
        ("time_stats.mlp_up_proj.median,n_embd\n1,2\n", "has no column num_tensor_parallel_workers"),
    ],
)
def test_other_files_are_answered_with_a_sentence(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mlp.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        operator_tables(path)
