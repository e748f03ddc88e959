"""Requests for vectors and scores: every text is a prompt, computed to its end; what comes of it means nothing."""

import base64
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from windtunnel.twin.protocol import RequestError, malformed
from windtunnel.twin.tokens import Tokenizer

Ids = Sequence[int]
SIZE = 64
"""Numbers of an embedding whose size nobody asks for."""
MOST_DIMENSIONS = 16_384
LABELS = ("LABEL_0", "LABEL_1")
"""Classes, by the names that Transformers gives them where a model's config has none."""


@dataclass(frozen=True)
class Pooling:
    """Prompts to compute, and what to make of them."""

    prompts: Sequence[Any]
    """Texts, token ids or conversations (objects with `messages`)."""
    reply: Callable[[list[Ids]], dict[str, Any]]
    """From the ids of all prompts to the reply, without its model and its tokens."""
    most_tokens: int | None = None
    """Tokens to which a prompt is cut, 0: those that the model takes; None: a longer one is refused."""


def _embedded(prefix: str, kind: str, field: str, body: Mapping[str, Any]) -> Pooling:
    inputs, vector = _inputs(body), _vectors(body)
    return Pooling(inputs, lambda ids: _listed(prefix, kind, [{field: vector(each)} for each in ids]))


def _classify(body: Mapping[str, Any]) -> Pooling:
    def reply(ids: list[Ids]) -> dict[str, Any]:
        rows = []
        for share in map(_score, ids):
            about = {"label": LABELS[share < 0.5], "probs": [share, 1 - share], "num_classes": len(LABELS)}
            rows.append(about)
        return _listed("classify", None, rows)

    return Pooling(_inputs(body), reply)


def _scores(body: Mapping[str, Any]) -> Pooling:
    """Read pairs of texts: one with each of several, or one after the other (vLLM's `scoring/protocol.py`)."""
    pairs = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
    names = next((pair for pair in pairs if all(body.get(name) is not None for name in pair)), None)
    if names is None:
        raise RequestError("give queries and documents, queries and items, or text_1 and text_2", param="queries")
    first, second = (_texts(body[name], name) for name in names)
    if len(first) not in (1, len(second)):
        raise RequestError("Input lengths must be either 1:1, 1:N or N:N", param=names[0])
    prompts = [f"{one}\n{other}" for one, other in zip(first * (len(second) // len(first)), second, strict=True)]
    return Pooling(prompts, lambda ids: _listed("score", "score", [{"score": _score(each)} for each in ids]))


def _rerank(body: Mapping[str, Any]) -> Pooling:
    """Read a query and documents: each is a prompt behind the query (the API of vLLM and Jina)."""
    query, top = body.get("query"), body.get("top_n") or 0
    if not isinstance(query, str):
        raise RequestError("query must be a text", param="query")
    documents = _texts(body.get("documents"), "documents")
    if type(top) is not int or top < 0:
        raise RequestError("top_n must be a whole number of at least 0, which is all", param="top_n")

    def reply(ids: list[Ids]) -> dict[str, Any]:
        rows = [
            {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": _score(each)}
            for index, (text, each) in enumerate(zip(documents, ids, strict=True))
        ]
        rows.sort(key=lambda row: -float(row["relevance_score"]))  # type: ignore[arg-type]
        return {"id": f"rerank-{uuid4().hex}", "results": rows[: top or None]}

    return Pooling([f"{query}\n{each}" for each in documents], reply)


POOLING: Mapping[str, Callable[[Mapping[str, Any]], Pooling]] = {
    "/v1/embeddings": partial(_embedded, "embd", "embedding", "embedding"),
    "/pooling": partial(_embedded, "pool", "pooling", "data"),
    "/classify": _classify,
    **dict.fromkeys(("/score", "/v1/score"), _scores),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _rerank),
}
"""Path -> how its requests are read."""


def pooling_of(path: str, body: Mapping[str, Any]) -> Pooling:
    """Read the body of a request; RequestError where it cannot be served."""
    most = body.get("truncate_prompt_tokens")
    if most is not None and (type(most) is not int or most < -1):
        raise malformed("truncate_prompt_tokens must be a whole number of at least -1", "truncate_prompt_tokens")
    return replace(POOLING[path](body), most_tokens=None if most is None else max(most, 0))


def cut(prompt: Any, most_tokens: int, tokenizer: Tokenizer) -> Any:
    """Return the first so many tokens of a prompt, as vLLM's tokenizers keep them; what is none stays."""
    if isinstance(prompt, str):
        longest = tokenizer.longest_bytes
        prompt = tokenizer.encode(prompt if longest is None else prompt[: most_tokens * longest])
    return prompt[:most_tokens] if isinstance(prompt, list) else prompt


def _texts(given: Any, name: str) -> list[str]:
    """Return a text, or several, as a list."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts", param=name)
    return texts


def _inputs(body: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a request: `input`, or a conversation as `messages`."""
    if body.get("messages") is not None:
        return [{"messages": body["messages"]}]
    given = body.get("input")
    if given is None:
        raise malformed("give an input, or messages", "input")
    inputs: list[Any] = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if not all(isinstance(each, str) or (isinstance(each, list) and {*map(type, each)} == {int}) for each in inputs):
        raise RequestError("input must be a text, token ids, or a list of either", param="input")
    return inputs


def _vectors(body: Mapping[str, Any]) -> Callable[[Ids], list[float] | str]:
    """Return what makes a prompt's ids a vector of length 1."""
    size, form = body.get("dimensions"), body.get("encoding_format")
    if size is None:
        size = SIZE
    if type(size) is not int or not 1 <= size <= MOST_DIMENSIONS:
        raise RequestError(f"dimensions must be a whole number from 1 to {MOST_DIMENSIONS}", param="dimensions")
    if form not in (None, "float", "base64"):
        raise RequestError("encoding_format must be float or base64", param="encoding_format")

    def vector(ids: Ids) -> list[float] | str:
        numbers = [((ids[k % len(ids)] * 2654435761 + 40503 * k) % 65536) / 32768 - 1 for k in range(size)]
        length = sum(number * number for number in numbers) ** 0.5 or 1.0
        numbers = [number / length for number in numbers]
        return base64.b64encode(struct.pack(f"<{size}f", *numbers)).decode() if form == "base64" else numbers

    return vector


def _score(ids: Ids) -> float:
    """Return a score from 0 to 1, the same for the same ids."""
    return sum(ids) * 2654435761 % 65536 / 65536


def _listed(prefix: str, kind: str | None, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a reply that lists one row for each prompt."""
    data = [{"index": index, **({"object": kind} if kind else {}), **row} for index, row in enumerate(rows)]
    return {"id": f"{prefix}-{uuid4().hex}", "object": "list", "created": int(time.time()), "data": data}
