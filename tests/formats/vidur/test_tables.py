"""Vidur's prediction tables: what is missing is said, not taken for zero."""

from pathlib import Path

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.formats.vidur.read import OPTIONAL_OPERATORS, TOKEN_OPERATORS, read_tables


def arrays() -> dict[str, np.ndarray]:
    tokens = np.arange(1, 9)
    by_tokens = {name: np.ones(8) for name in (*TOKEN_OPERATORS, "attn_kv_cache_save", "all_reduce")}
    return {
        **by_tokens,
        **{f"{name}__x": tokens for name in by_tokens},
        "attn_prefill": np.ones((2, 8)),
        "attn_prefill_kv": np.array([0, 64]),
        "attn_prefill_chunk": tokens,
        "attn_decode": np.ones((8, 2)),
        "attn_decode_bs": tokens,
        "attn_decode_kv": np.array([0, 64]),
    }


def written(folder: Path, without: str | None = None) -> Path:
    path = folder / "tables.npz"
    np.savez(path, **{name: array for name, array in arrays().items() if name != without})
    return path


def test_times_are_seconds_from_zero_tokens_on(tmp_path: Path) -> None:
    tables = read_tables(written(tmp_path))
    np.testing.assert_array_equal(tables.token_s["mlp_act"], [0, *[1e-3] * 8])
    assert tables.prefill_s.shape == (2, 9)


@pytest.mark.parametrize("name", ["mlp_act", "attn_rope", "attn_decode", "attn_decode_kv", "add__x", "all_reduce__x"])
def test_a_missing_array_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"(?m)has no {name}$"):
        read_tables(written(tmp_path, without=name))


def test_layers_with_one_norm_have_no_times_of_the_second(tmp_path: Path) -> None:
    assert not {*OPTIONAL_OPERATORS} & {*read_tables(written(tmp_path, without=OPTIONAL_OPERATORS[0])).token_s}
