"""Write a tiny model with random weights as a checkpoint, which engines serve."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import import_extra
from windtunnel.lab.bench.client import FIRST_TOKEN_ID, WORD
from windtunnel.schema import read_yaml

_FILES = Path(__file__).with_name("tiny_model")
"""Config and tokenizer, but for the words of its vocabulary.

An end that no tokenizer ever gives: answers have the requested length, also where a server refuses ignore_eos.
"""
_LAYOUT: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))
TINY: dict[str, Any] = json.loads((_FILES / "config.json").read_text(encoding="utf-8"))
"""1.2 million parameters: a few milliseconds a step on any processor."""


def write_tiny_model(folder: Path) -> Path:
    """Write a checkpoint with random weights and a tokenizer of words; needs no network, and no torch.
    MissingExtraError where safetensors is not installed.

    Returns:
        The folder.
    """
    safetensors = import_extra("safetensors.numpy", "bench")
    write_tokenizer(folder, TINY["vocab_size"])
    shutil.copy(_FILES / "config.json", folder)
    rng = np.random.default_rng(0)
    dim = TINY["head_dim"]
    sizes = TINY | {"query": TINY["num_attention_heads"] * dim, "kv": TINY["num_key_value_heads"] * dim}
    shapes = dict(_LAYOUT["first"])
    for layer in range(TINY["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _LAYOUT["layer"].items()}
    weights = {}
    for name, shape in (shapes | _LAYOUT["last"]).items():
        lengths = [sizes[size] for size in shape]
        drawn = np.ones(lengths) if len(lengths) == 1 else rng.standard_normal(lengths) * 0.02
        weights[f"{name}.weight"] = drawn.astype(np.float32)
    safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_tokenizer(folder: Path, num_words: int) -> None:
    """Write a tokenizer of words: a prompt of n words has n tokens, and every generated token is text at once.

    Bytes would not do: servers hold back tokens that are no whole character yet.
    """
    shutil.copytree(_FILES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json"))
    tokenizer: dict[str, Any] = json.loads((_FILES / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words = {WORD if number == FIRST_TOKEN_ID else f"w{number}": number for number in range(num_words)}
    vocabulary = {word: number for word, number in words.items() if number not in special.values()} | special
    tokenizer["model"]["vocab"] = vocabulary
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
