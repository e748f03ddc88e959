"""Compressed attention whose layers share what few of them compress, and prompts whose tails alone pass late layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model import memory
from windtunnel.model.attention.compressed import CompressedDecode
from windtunnel.model.attention.shared_compressed import SharedCompressedAttention
from windtunnel.model.config import model_from_config
from windtunnel.model.launches import forward
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Format
from windtunnel.model.shape import Shard

NAME = "deepseek-ai/DeepSeek-V4.1-Flash"
CONFIG = json.loads((Path(catalog.__file__).parent / "models" / "deepseek-ai--DeepSeek-V4.1-Flash.json").read_text())


def shard(tp: int = 1, **flags: bool) -> Shard:
    model = catalog.model(NAME)
    return Shard(model, model.precision, Parallelism(tp=tp, ep=tp), **flags)


def edited(**keys: object) -> dict[str, object]:
    return {**CONFIG, "text_config": {**CONFIG["text_config"], **keys}}


def test_parameters_are_those_published() -> None:
    """552 billion in the backbone, 16 of them for a token (arXiv:2609.19969), and 196.6 in tables of n-grams."""
    model = catalog.model(NAME)
    counted = count_parameters(model)
    assert counted.total == pytest.approx(552e9, rel=2e-3)
    assert counted.active == pytest.approx(16e9, rel=0.06)
    assert model.ngram_tables is not None
    assert model.ngram_tables.num_rows * model.ngram_tables.width == pytest.approx(196.6e9, rel=1e-3)


def test_layers_compress_choose_or_read_what_others_did() -> None:
    kinds = [part for num, part in catalog.model(NAME).attentions for _ in range(num)]
    assert all(isinstance(part, SharedCompressedAttention) for part in kinds)
    counts = {name: sum(getattr(part, name) for part in kinds) for name in ("compresses", "indexes", "is_tail")}
    assert counts == {"compresses": 4, "indexes": 8, "is_tail": 20}
    assert sorted(part.compress_ratio for part in kinds) == [0] * 2 + [1] * 20 + [2] * 18


def test_a_token_keeps_890_bytes_in_fp4() -> None:
    here = shard()
    in_fp4 = replace(here, precision=msgspec.structs.replace(here.precision, kv_cache=Format.NVFP4))
    assert memory.kv_bytes_per_token(in_fp4, 2**20) == 890  # the paper's "global KV cache footprint"
    assert memory.kv_bytes_per_token(here, 2**20) == 2.5 * (528 + 132)
    in_bf16 = replace(here, precision=msgspec.structs.replace(here.precision, kv_cache=Format.BF16))
    assert memory.kv_bytes_per_token(in_bf16, 2**20) == 2.5 * (1024 + 132)


def test_windows_count_for_every_layer() -> None:
    pending = 3 * 2 * 2 * 512 * 4  # two tokens' values and weights in fp32, in each layer that joins them
    assert memory.state_bytes_per_request(shard(), 2**20) == 40 * 128 * 528 + pending


def test_tables_of_ngrams_are_shared_by_the_ranks_or_on_the_host() -> None:
    """A rank of four was seen to hold 118.81 GiB with its tables, its drafter and its vision tower."""
    here = memory.loaded_bytes(shard(4))
    assert here / 2**30 == pytest.approx(118.81, rel=0.012)
    tables = 768_022_850 * 264
    assert here - memory.loaded_bytes(shard(4, ngrams_on_host=True)) == pytest.approx(tables / 4)


def test_layers_that_only_read_do_less_than_those_that_choose() -> None:
    here = shard(8)
    cores = [part.core_fields(here) for _, part in here.model.attentions]
    flops = {
        (fields["compresses"], fields["chooses"]): CompressedDecode(batch=1.0, context_tokens=1e5, **fields).flops
        for fields in cores
        if fields["compress_ratio"] == 1
    }
    assert flops[False, False] < flops[False, True] < flops[True, True]
    reading = next(fields for fields in cores if fields["compress_ratio"] == 1 and not fields["chooses"])
    core = CompressedDecode(batch=1.0, context_tokens=1e5, **reading)
    assert core.kept_pairs == 128 + 512  # its window, and those that were chosen for it


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kv_source_layer_ids": []}, "a layer that compresses"),
        ({"compress_ratios": [0, 0, 2]}, "a ratio for each of the 40 layers"),
        ({"compress_ratios": [0, 0, *[8] * 38]}, "0 to 4"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "layer 20 reads one of 1 tokens"),
        ({"o_groups": 7}, "o_groups"),
    ],
)
def test_layouts_that_no_layer_can_read_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        model_from_config(edited(**keys), NAME)


def test_tails_alone_pass_the_layers_behind_the_last_compressor() -> None:
    whole, tails = shard(8), shard(8, prefills_tails=True)
    batch = forward.StepBatch(prefill_tokens=8192, prefill_pairs=8192**2 / 2, sampled=1)
    assert batch.tail_tokens(whole) == 8192
    assert batch.tail_tokens(tails) == 128
    rows = [int(launch.op.m) for launch in forward.forward_launches(tails, batch) if launch.name == "q_b_proj"]
    assert sorted(set(rows)) == [128, 8192]
    counts = {
        m: sum(r.count for r in forward.forward_launches(tails, batch) if r.name == "q_b_proj" and r.op.m == m)
        for m in rows
    }
    assert counts == {128: 20, 8192: 20}


@pytest.mark.parametrize(
    ("prefill", "length", "read"),
    [
        (8192, 8192.0, 128),  # a prompt
        (8192, 2048.0, 4 * 128),  # four prompts
        (100, 100.0, 100),  # shorter than the window
        (2048, 2048.0 + 2 * 6000, 128),  # a chunk after 6,000 tokens
    ],
)
def test_tokens_of_tails_follow_the_chunks(prefill: int, length: float, read: int) -> None:
    assert forward.num_tail_tokens(shard(prefills_tails=True), prefill, length) == read
    assert forward.num_tail_tokens(shard(), prefill, length) == prefill


def test_tails_attend_to_what_their_last_tokens_see() -> None:
    """Pairs of queries and keys of the last 128 of 8,192 tokens: 128 x 8,192 less the triangle that they do not see."""
    (_, late), here = catalog.model(NAME).attentions[-1], shard(prefills_tails=True)
    batch, length = forward._read_later(here, late, np.array([1.0]), np.array([8192.0]))
    assert batch * length == pytest.approx(128)
    assert batch * length * length / 2 == pytest.approx(128 * 8192 - 128 * 128 / 2)
    (_, early) = catalog.model(NAME).attentions[0]
    assert forward._read_later(here, early, 1.0, 8192.0) == (1.0, 8192.0)
