"""Tokenizers of a twin: its own and a model's from a local folder; words of answers, and texts that fit a schema."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice, product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Ints
from windtunnel.errors import InputError, import_extra

NUM_WORDS = 1 << 10
"""Different tokens of answers."""
PIECES = re.compile(rb" ?[A-Za-z]{1,3}(?![A-Za-z])| [A-Za-z]{1,3}|[A-Za-z]{1,4}|[0-9]{1,3}|[\x80-\xff]{1,4}|\s{1,4}|.")
"""At most four bytes: close to the mean of English text under the tokenizers of today's models."""
SLICE_BYTES, LOOK_AHEAD = 1 << 14, 8
"""Bytes that are cut at once, for no other thread runs meanwhile, and pieces at their end that are cut once more."""
MOST_DEEP, MOST_ITEMS = 8, 4
"""Of a value that fits a JSON Schema."""
SYLLABLES = "ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "ze", "ka"


class Tokenizer(Protocol):
    """Turns text into ids and back."""

    @property
    def name(self) -> str: ...
    @property
    def words(self) -> Mapping[int, str]:
        """Ids that answers are made of, and the text of each in an answer, which gives the same ids again."""

    @property
    def longest_bytes(self) -> int | None:
        """Most bytes of text that a token stands for; None: a token may stand for any, as an unknown word's does."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def has(self, token: int) -> bool:
        """Whether it makes an id."""

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]: ...


class PieceTokenizer:
    """Cuts text into pieces of at most four bytes. An id is those bytes behind a 1, read as a number."""

    name = "pieces"
    longest_bytes = 4

    @cached_property
    def words(self) -> Mapping[int, str]:
        """Words of a space and three letters."""
        texts = (f" {syllable}{last}" for last, syllable in product("nrstlmbdkpgvzfhc", SYLLABLES))
        more = (f" {first}{syllable}" for first, syllable in product("abdefghilmnoprstuvwkzcjqxy", SYLLABLES))
        known = dict.fromkeys([*texts, *more])
        return {_number(text.encode()): text for text in islice(known, NUM_WORDS)}

    def encode(self, text: str) -> list[int]:
        data, ids, begin = text.encode("utf-8", "replace"), list[int](), 0
        while begin < len(data):
            end = begin + SLICE_BYTES
            pieces = PIECES.findall(data, begin, end)
            if end < len(data):  # the last pieces may go on behind it
                del pieces[-LOOK_AHEAD:]
            begin += sum(map(len, pieces))
            ids += [int.from_bytes(b"\1" + piece, "big") for piece in pieces]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(i.to_bytes(8, "big").lstrip(b"\0")[1:] for i in ids).decode("utf-8", "replace")

    def has(self, token: int) -> bool:
        size = token.bit_length() // 8
        return size < 5 and token >> 8 * size == 1 and PIECES.fullmatch(token.to_bytes(size + 1, "big")[1:]) is not None

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        ids = self.encode(json.dumps(tools)) if tools else []
        for message in messages:
            ids += [_number(b"<|"), *self.encode(str(message.get("role", ""))), _number(b"|>")]
            ids += self.encode(text_of(message))
            ids.append(_number(b"<.>"))
        return [*ids, _number(b"<|"), *self.encode("assistant"), _number(b"|>")]


def _number(piece: bytes) -> int:
    return int.from_bytes(b"\1" + piece, "big")


def text_of(message: Mapping[str, Any]) -> str:
    """Return all text of a chat message: its content, or the parts of it, and its tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    calls = message.get("tool_calls")
    return f"{content}{json.dumps(calls)}" if calls else str(content)


class ModelTokenizer:
    """A model's own tokenizer, from the `tokenizer.json` of a local folder, with its chat template if it has one.
    InputError where the folder has none that can be read; MissingExtraError where the package `tokenizers` is not
    installed."""

    def __init__(self, folder: Path) -> None:
        own = import_extra("tokenizers", "serve").Tokenizer
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            self._own = own.from_file(str(file))
        except Exception as error:  # noqa: BLE001 the package raises plain exceptions
            raise InputError(
                f"{file} cannot be read as a tokenizer: {error}", "give a folder with tokenizer.json"
            ) from None
        self.name = str(folder)
        self._template = _chat_template(file.parent)

    @cached_property
    def words(self) -> Mapping[int, str]:
        """Whole words behind a space that stay the same among others; less where there are none."""
        texts = {i: self._behind(i) for i in sorted(self._own.get_vocab().values())}
        for form in (" [a-z]{2,8}", r" \w+", ".+"):
            fitting = (i for i, text in texts.items() if re.fullmatch(form, text) and self.encode(text * 3) == [i] * 3)
            words = {i: texts[i] for i in islice(fitting, NUM_WORDS)}
            if len(words) > 1:
                return words
        return texts

    @cached_property
    def longest_bytes(self) -> int | None:
        """Bytes of the longest token, where text comes back whole."""
        probe = f"A{' ' * 200}{'é' * 200}\n"
        is_whole = self.decode(self.encode(probe)) == probe
        return max(len(text.encode()) for text in self._own.get_vocab()) if is_whole else None

    def _behind(self, i: int) -> str:
        return self.decode([i, i]).removeprefix(self.decode([i]))

    def encode(self, text: str) -> list[int]:
        # Of the two, only this one lets other threads run meanwhile.
        return list(self._own.encode_batch([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return str(self._own.decode(list(ids), skip_special_tokens=False))
        except (OverflowError, TypeError):
            return ""

    def has(self, token: int) -> bool:
        return bool(token < self._own.get_vocab_size())

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        if self._template is not None:
            flat = [{**message, "content": text_of(message)} for message in messages]
            return self.encode(self._template.render(messages=flat, tools=tools, add_generation_prompt=True))
        ids = self.encode(json.dumps(tools)) if tools else []
        for message in messages:
            ids += [*self.encode(f"<|{message.get('role', '')}|>"), *self.encode(text_of(message))]
        return [*ids, *self.encode("<|assistant|>")]


def _chat_template(folder: Path) -> Any:
    """Return the chat template of a model's folder; None where it has none."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = None
    if (folder / "chat_template.jinja").exists():
        text = (folder / "chat_template.jinja").read_text()
    elif (folder / "tokenizer_config.json").exists():
        text = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    if not isinstance(text, str):
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": _refuse, "bos_token": "", "eos_token": ""}
    environment.globals["strftime_now"] = lambda _: ""
    return environment.from_string(text)


def _refuse(message: str) -> None:
    raise InputError(f"the chat template refuses this: {message}")


def answer_ids(words: Ints, seed: int, count: int) -> list[int]:
    """Return the ids of an answer out of `words`: the same for the same seed, another for others.

    A linear congruential generator modulo 2^32 (Numerical Recipes, 1992) picks the words: its k-th value is
    a^k x + c (a^k - 1) / (a - 1).
    """
    factor, sum_of_powers = _powers(1 << max(count, 256).bit_length())
    start = np.uint32((seed * 2654435761 + 12345) & 0xFFFFFFFF)
    values = factor[:count] * start + sum_of_powers[:count] * np.uint32(1013904223)
    picked: list[int] = words[(values >> np.uint32(12)) % np.uint32(words.size)].tolist()
    return picked


@lru_cache(maxsize=4)
def _powers(count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """[count] a^k from k = 1 on, and the sums of all powers below, modulo 2^32."""
    powers = np.multiply.accumulate(np.full(count, 1664525, np.uint32), dtype=np.uint32)
    below = np.concatenate([np.ones(1, np.uint32), powers[:-1]])
    return powers, np.add.accumulate(below, dtype=np.uint32)


def text_for(schema: Any) -> str:
    """Return the text of a value that fits a schema, with every property that it names."""
    return json.dumps(_value(schema, schema, 0))


def _value(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MOST_DEEP:
        return None
    if "$ref" in schema:
        return _value(_referred(str(schema["$ref"]), root), root, depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _value(schema[key][0], root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "object" or "properties" in schema:
        return {name: _value(part, root, depth + 1) for name, part in (schema.get("properties") or {}).items()}
    if kind == "array":
        count = max(int(schema.get("minItems", 1)), 0)
        return [_value(schema.get("items", {"type": "string"}), root, depth + 1) for _ in range(min(count, MOST_ITEMS))]
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("maximum", 1))
    return {"boolean": True, "null": None}.get(str(kind), "lorem"[: schema.get("maxLength", 5)])


def _referred(path: str, root: Any) -> Any:
    """Return the part of a schema that a reference within it names."""
    part = root
    for name in path.removeprefix("#/").split("/"):
        part = part.get(name) if isinstance(part, Mapping) else None
    return part
