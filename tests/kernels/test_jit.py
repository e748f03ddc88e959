"""How kernels are compiled and kept."""

from pathlib import Path

import pytest
from numba import config

from windtunnel.kernels.jit import NamedApart
from windtunnel.kernels.serve import run


@pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")
def test_processes_that_compile_at_once_keep_their_code_apart(tmp_path: Path) -> None:
    """Both read an index that is still empty; the index of the second then names the file that the first wrote last."""
    assert isinstance(run._cache._cache_file, NamedApart)
    first, second = (NamedApart(str(tmp_path), "run", 0) for _ in range(2))
    names = [one._data_name(1) for one in (first, second)]
    first._save_index({"few arguments": names[0]})
    second._save_index({"many arguments": names[1]})
    second._save_data(names[1], "code for many")
    first._save_data(names[0], "code for few")
    assert second.load("many arguments") == "code for many"
    assert first.load("few arguments") is None
