"""Encoders: published counts of parameters, pairs of whole prompts, positions, and configs that cannot be read."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.model.config import model_from_config
from windtunnel.model.launches.forward import StepBatch, attention_launches, head_launches, token_launches
from windtunnel.model.memory import kv_bytes_per_token
from windtunnel.model.parallelism import Parallelism
from windtunnel.model.parameters import count_parameters
from windtunnel.model.precision import Precision
from windtunnel.model.shape import Shard

# Numbers of parameters, counted from the tensors of each architecture without the integers of position ids; cards give
# three digits (bge-m3 568M, bge-large 335M).
PUBLISHED = {
    "BAAI/bge-m3": (567_754_752, 8192),
    "BAAI/bge-reranker-v2-m3": (567_755_777, 8192),
    "BAAI/bge-large-en-v1.5": (335_141_888, 512),
    "BAAI/bge-base-en-v1.5": (109_482_240, 512),
    "intfloat/multilingual-e5-large": (559_890_432, 512),
    "Alibaba-NLP/gte-modernbert-base": (149_014_272, 8192),
    "nomic-ai/nomic-embed-text-v1.5": (136_731_648, 2048),
    "Qwen/Qwen3-Embedding-0.6B": (595_776_512, 32_768),
    "Qwen/Qwen3-Embedding-8B": (7_567_295_488, 40_960),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_positions_are_the_published_ones(name: str) -> None:
    model = catalog.model(name)
    assert (count_parameters(model).total, model.max_context_tokens) == PUBLISHED[name]
    assert model.is_encoder == ("Qwen" not in name)


def shard_of(name: str, tp: int = 1) -> Shard:
    return Shard(catalog.model(name), Precision(), Parallelism(tp=tp))


@pytest.mark.parametrize("tp", [1, 2])
def test_every_token_sees_the_whole_prompt_and_leaves_nothing(tp: int) -> None:
    shard, lengths = shard_of("bge-m3", tp), (100, 300)
    tokens = sum(lengths)
    batch = StepBatch(prefill_tokens=tokens, prefill_pairs=sum(n * n / 2 for n in lengths), sampled=2)
    (launch,) = attention_launches(shard, batch)
    pairs = sum(n * n for n in lengths)
    assert launch.count == 24
    assert float(launch.op.flops) == pytest.approx(4 * pairs * 1024 / tp)
    assert "kv_cache_write" not in [launch.name for launch in token_launches(shard, tokens)]
    assert kv_bytes_per_token(shard, 8192) == 0
    assert list(shard.model.attentions[0][1].decode_launches(shard, 4, 100)) == []


def test_modernbert_sees_everything_in_every_third_layer() -> None:
    shard = shard_of("gte-modernbert-base")
    full, local = attention_launches(shard, StepBatch(prefill_tokens=1024, prefill_pairs=1024**2 / 2, sampled=1))
    assert (full.count, local.count) == (8, 14)
    assert float(full.op.flops) == pytest.approx(4 * 1024**2 * 768)
    assert float(local.op.flops) == pytest.approx(4 * 1024 * 128 * 768)
    _, short = attention_launches(shard, StepBatch(prefill_tokens=64, prefill_pairs=64**2 / 2, sampled=1))
    assert float(short.op.flops) == pytest.approx(4 * 64**2 * 768)


def test_a_reranker_has_a_dense_layer_before_its_score() -> None:
    def names(name: str) -> list[str]:
        shard = shard_of(name)
        pooled = replace(shard, model=msgspec.structs.replace(shard.model, is_pooled=True))
        return [launch.name for launch in head_launches(pooled, 4)]

    assert names("bge-m3") == ["pooler"]
    assert names("bge-reranker-v2-m3") == ["pooler", "score_dense"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "alibi"}, "with 'alibi' positions cannot be modelled"),
        ({"is_decoder": True}, "as a decoder cannot be modelled"),
        ({"num_attention_heads": 13}, "hidden_size 768 is not a multiple"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"type_vocab_size": -1}, "type_vocab_size is -1"),
        ({"model_type": "nomic_bert", "moe_every_n_layers": 2}, "experts in an encoder"),
        ({"model_type": "bret"}, "model_type .bret. is not known"),
    ],
)
def test_other_encoders_are_refused(changes: dict[str, Any], words: str) -> None:
    config = catalog.model_config("bge-base-en-v1.5")
    with pytest.raises(InputError, match=words):
        model_from_config(config | changes, "mine")
