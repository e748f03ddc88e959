"""Tokenizers: text gives the same ids again, and answers survive the way to the client and back."""

from pathlib import Path

import numpy as np
import pytest

from windtunnel.errors import InputError
from windtunnel.lab import tiny_models
from windtunnel.twin import tokens
from windtunnel.twin.tokens import ModelTokenizer, PieceTokenizer, answer_ids

TEXT = "You are a helpful assistant.\n\nGrüße, 東京! 12345 tokens cost 0.5 $  ok"


def test_pieces_are_short_and_give_the_text_back() -> None:
    tokenizer = PieceTokenizer()
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert all(len(tokenizer.decode([i]).encode()) <= 12 for i in ids)
    words = "The quick brown fox jumps over the lazy dog and runs through the forest until the evening " * 20
    assert 3.0 < len(words) / len(tokenizer.encode(words)) < 4.5


def test_answers_give_their_ids_again_behind_any_message() -> None:
    tokenizer = PieceTokenizer()
    ids = answer_ids(np.array(list(tokenizer.words)), 7, 200)
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text) == ids
    assert len(set(tokenizer.words)) == len(tokenizer.words) > 500
    first = tokenizer.chat([{"role": "user", "content": TEXT}], None)
    turn = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    assert tokenizer.chat(turn, None)[: len(first) + len(ids)] == [*first, *ids]
    assert (
        answer_ids(np.array(list(tokenizer.words)), 8, 1) != ids[:1]
        or answer_ids(np.array(list(tokenizer.words)), 8, 9) != ids[:9]
    )


@pytest.mark.parametrize("knows_all", [True, False])
def test_the_longest_token_bounds_tokens_only_where_no_text_is_lost(tmp_path: Path, knows_all: bool) -> None:
    own = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    letters = {letter: i for i, letter in enumerate(["<unk>", "A", " ", "é", "\n", "token"])}
    made = own.Tokenizer(own.models.BPE(letters if knows_all else {"<unk>": 0, "A": 1}, [], unk_token="<unk>"))
    made.decoder = own.decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    assert ModelTokenizer(tmp_path).longest_bytes == (5 if knows_all else None)
    assert PieceTokenizer().longest_bytes == 4


def test_a_models_own_tokenizer_is_read_from_its_folder(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(tiny_models.write_tiny_model(tmp_path / "tiny"))
    ids = answer_ids(np.array(list(tokenizer.words)), 3, 50)
    text = "".join(tokenizer.words[i] for i in ids)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids).strip() == text.strip()
    assert tokenizer.chat([{"role": "user", "content": text}], None) == ids
    with pytest.raises(InputError, match="cannot be read as a tokenizer"):
        ModelTokenizer(tmp_path)


def test_a_long_text_is_cut_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices end inside words, numbers and characters of several bytes."""
    words = ["abc", "Hello", " ", "  \n", "12345", "é", "日本", "😀", "x", ".", "A", " the "]
    text = "".join(np.random.default_rng(0).choice(words, 5000))
    whole = PieceTokenizer().encode(text)
    assert PieceTokenizer().decode(whole) == text
    for size in (64, 100, 1001):
        monkeypatch.setattr(tokens, "SLICE_BYTES", size)
        assert PieceTokenizer().encode(text) == whole
