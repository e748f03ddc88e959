"""Write tiny models with random weights: a checkpoint for most engines, a GGUF file for llama.cpp."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import import_extra
from windtunnel.lab.bench.client import FIRST_TOKEN_ID, WORD

_FILES = Path(__file__).with_name("tiny_model")
"""Config and tokenizer, but for the words of its vocabulary.

An end that no tokenizer ever gives: answers have the requested length, also where a server refuses ignore_eos.
"""
TINY: dict[str, Any] = json.loads((_FILES / "config.json").read_text(encoding="utf-8"))
"""1.2 million parameters: a few milliseconds a step on any processor."""


def write_tiny_model(folder: Path) -> Path:
    """Write a checkpoint with random weights and a tokenizer of words; needs no network, and no torch.

    Returns:
        The folder.

    Raises:
        MissingExtraError: safetensors is not installed.
    """
    safetensors = import_extra("safetensors.numpy", "bench")
    shutil.copytree(_FILES, folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()), encoding="utf-8")
    safetensors.save_file(_llama_weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def _tokenizer() -> dict[str, Any]:
    """Return a tokenizer of words: a prompt of n words has n tokens, and every generated token is text at once.

    Bytes would not do: servers hold back tokens that are no whole character yet.
    """
    tokenizer: dict[str, Any] = json.loads((_FILES / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words = {WORD if number == FIRST_TOKEN_ID else f"w{number}": number for number in range(TINY["vocab_size"])}
    vocabulary = {word: number for word, number in words.items() if number not in special.values()} | special
    tokenizer["model"]["vocab"] = vocabulary
    return tokenizer


def _llama_weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    width, inner, dim = TINY["hidden_size"], TINY["intermediate_size"], TINY["head_dim"]
    query, kv = TINY["num_attention_heads"] * dim, TINY["num_key_value_heads"] * dim

    def matrix(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.02).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(TINY["vocab_size"], width)}
    for layer in range(TINY["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.self_attn.q_proj.weight": matrix(query, width),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv, width),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv, width),
            f"{prefix}.self_attn.o_proj.weight": matrix(width, query),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, width),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, width),
            f"{prefix}.mlp.down_proj.weight": matrix(width, inner),
            f"{prefix}.input_layernorm.weight": np.ones(width, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(width, np.float32),
        }
    norm = {"model.norm.weight": np.ones(width, np.float32)}
    return weights | norm | {"lm_head.weight": matrix(TINY["vocab_size"], width)}


SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL = 1, 2, 3
"""Types of tokens in GGUF."""


def write_tiny_gguf(folder: Path) -> Path:
    """Write the tiny model as a GGUF file, float32; returns its path.

    Its tokenizer joins the letters of a prompt's word to one token. The end of text is never the likeliest token, so
    that answers have the requested length.

    Raises:
        MissingExtraError: gguf is not installed.
    """
    gguf = import_extra("gguf", "bench")
    folder.mkdir(parents=True, exist_ok=True)
    tokens, types = _pieces(TINY["vocab_size"])
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(TINY["max_position_embeddings"])
    writer.add_embedding_length(TINY["hidden_size"])
    writer.add_block_count(TINY["num_hidden_layers"])
    writer.add_feed_forward_length(TINY["intermediate_size"])
    writer.add_head_count(TINY["num_attention_heads"])
    writer.add_head_count_kv(TINY["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(TINY["rms_norm_eps"])
    writer.add_rope_dimension_count(TINY["head_dim"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, TINY["num_hidden_layers"])
    tensors = _llama_weights()
    tensors["lm_head.weight"][2] = 0.0  # some of the other logits is always above zero
    for name, tensor in tensors.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "tiny.gguf"


def _pieces(number: int) -> tuple[list[str], list[int]]:
    """Return tokens and their types: ends, beginnings of a prompt's word, its letters, digits, words for answers."""
    starts = [SPACE + WORD[:length] for length in range(len(WORD), -1, -1)]
    letters = [*dict.fromkeys(WORD), *"0123456789"]
    tokens = ["<unk>", "<s>", "</s>", *starts, *letters]
    tokens += [f"{SPACE}w{token}" for token in range(len(tokens), number)]
    return tokens, [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (number - 3)]
