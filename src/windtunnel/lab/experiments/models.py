"""Load an experiment's model, with or without weights, its tokenizer, and the tokens of its prompt."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.lab.experiments.schema import Experiment

_LOG = logging.getLogger("windtunnel.lab")


def uses_cuda(experiment: Experiment) -> bool:
    """Whether the experiment runs on a GPU.

    Raises:
        InputError: it must, and torch finds no GPU.
    """
    import torch

    if experiment.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, and torch finds no GPU here", "take --device cpu")
    return experiment.device != "cpu" and torch.cuda.is_available()


def model_folder(experiment: Experiment) -> Path | None:
    """Return the model's folder on this machine; None where its name is one of huggingface.co.

    Raises:
        InputError: it is a path, and there is no config.json at it.
    """
    path = Path(experiment.model)
    folder = path.parent if path.name == "config.json" else path
    is_path = path.is_absolute() or path.suffix == ".json" or experiment.model.startswith(".") or folder.is_dir()
    if is_path and not (folder / "config.json").is_file():
        raise InputError(f"there is no model {experiment.model}", "name a folder with config.json, or a config.json")
    return folder if is_path else None


def has_weights(folder: Path) -> bool:
    """Whether the folder has weights to load."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer to load."""
    return any(folder.glob("tokenizer*"))


def load_model(experiment: Experiment, device: str) -> Any:
    """Load the model in evaluation mode; where its folder has no weights, they are random and depend on the seed."""
    import torch
    import transformers

    folder = model_folder(experiment)
    dtype = "auto" if experiment.dtype == "auto" else getattr(torch, experiment.dtype)
    auto: Any = transformers.AutoModelForCausalLM
    try:
        if folder is None or has_weights(folder):
            model = auto.from_pretrained(folder or experiment.model, dtype=dtype)
        else:
            _LOG.info("no weights in %s: they are random", folder)
            config = transformers.AutoConfig.from_pretrained(folder)
            model_dtype = config.dtype or torch.float32 if dtype == "auto" else dtype
            model = auto.from_config(config, dtype=model_dtype)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{experiment.model} cannot be loaded: {str(error).strip().partition(chr(10))[0]}") from None
    return model.to(device).eval()


def load_tokenizer(experiment: Experiment) -> Any:
    """Load the model's tokenizer; None where its folder has none, or where the prompt is a number of tokens."""
    import transformers

    folder = model_folder(experiment)
    if folder is not None and not has_tokenizer(folder):
        return None
    return transformers.AutoTokenizer.from_pretrained(folder or experiment.model)


def prompt_tokens(experiment: Experiment, config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens of every request's prompt.

    Raises:
        InputError: prompt and answer have more tokens than the model takes.
    """
    vocabulary = int(config.vocab_size)
    if experiment.prompt_tokens is not None:
        tokens = np.random.default_rng(experiment.seed).integers(0, vocabulary, experiment.prompt_tokens).tolist()
    elif tokenizer is not None:
        tokens = tokenizer.encode(experiment.prompt)
    else:
        _LOG.info("the model has no tokenizer: every byte of the prompt is a token")
        tokens = [byte % vocabulary for byte in experiment.prompt.encode()]
    longest = getattr(config, "max_position_embeddings", None)
    if longest and len(tokens) + experiment.max_tokens > longest:
        raise InputError(
            f"{len(tokens)} prompt tokens and {experiment.max_tokens} more are too many: the model takes {longest}"
        )
    return list(tokens)
