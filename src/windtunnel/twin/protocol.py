"""What clients of an OpenAI-compatible server ask for, and how they are answered."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.errors import InputError
from windtunnel.schema import read_yaml
from windtunnel.twin.engine import Answer
from windtunnel.twin.logprobs import MOST_LOGPROBS, Logprobs
from windtunnel.twin.tokens import Tokenizer, answer_ids, text_for, text_of

_FIELDS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))
ANY_NAME: Sequence[str] = tuple(_FIELDS["any_name"])
"""Engines whose servers do not check the model's name."""
TRUTHS = ("stream", "ignore_eos", "echo")
GREEDY = 1e-5
"""Temperature below which vLLM's `SamplingParams` take the most likely token."""
FORMATS = (None, "text", "json_object", "json_schema", "structural_tag")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
"""Types of the parts of a message that are text, from vLLM's `chat_utils.py`; the rest are images, audio, videos."""


class RequestError(Exception):
    """A request that is answered with an error, in the form of the OpenAI API."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param

    @property
    def document(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}


def malformed(message: str, param: str | None = None) -> RequestError:
    """Return the error for a body that vLLM's schemas refuse: a wrong type, or fields that exclude each other."""
    return RequestError(message, 400, "Bad Request", param)


@dataclass(frozen=True)
class Limits:
    """What a server takes."""

    models: Sequence[str]
    """Names: of the model, then of LoRA adapters."""
    max_model_len: int
    output_tokens: Sequence[int]
    """Lengths of the answers that end by themselves, one after the other."""
    vocab_size: int
    """Of the model: the ids of prompts lie below, or are the tokenizer's own."""
    num_names: int = 1
    """How many of the names are the model's."""
    takes_any_name: bool = False
    """Whether a request may name the model as it likes, as in SGLang; an adapter stands behind a colon there."""

    @property
    def adapters(self) -> Sequence[str]:
        return self.models[self.num_names :]

    def check_model(self, name: Any, is_exact: bool = False) -> str:
        """Return a served model's name, the first where a request names none; RequestError where there is no such, if
        the name has to be exact, or the engine checks it."""
        if not isinstance(name, str | None):
            raise malformed(f"model must be a text, not {name!r:.40}", "model")
        model = name or self.models[0]
        _, _, adapter = model.partition(":")
        if model not in self.models and self.takes_any_name and not is_exact and adapter in ("", *self.adapters):
            return adapter or model
        if model not in self.models:
            raise RequestError(f"The model `{model}` does not exist.", 404, "NotFoundError", "model")
        return str(model)

    def check_ids(self, ids: Any, tokenizer: Tokenizer, param: str) -> list[int]:
        """Return a list of token ids; RequestError where it is none, or one is outside the vocabulary, as in vLLM."""
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise RequestError(f"{param} must be a list of token ids, which are not negative", param=param)
        if (unknown := next((i for i in ids if i >= self.vocab_size and not tokenizer.has(i)), None)) is not None:
            raise RequestError(f"Token id {unknown} is out of vocabulary", param=param)
        return ids

    def check_bias(self, bias: Mapping[str, Any]) -> None:
        """Raise RequestError for a `logit_bias` of what is no token id, or of one outside the vocabulary, as vLLM."""
        if not all(token.isdecimal() and len(token) < 20 and type(by) in (int, float) for token, by in bias.items()):
            raise RequestError("logit_bias must give a number for each token id", param="logit_bias")
        if unknown := [int(token) for token in bias if int(token) >= self.vocab_size]:
            said = f"token_id(s) {unknown} in logit_bias contain out-of-vocab token ids."
            raise RequestError(f"{said} Vocabulary size: {self.vocab_size}", param="logit_bias")


@dataclass
class Choice:
    """One answer to a prompt of a request, which may ask for several, and have several prompts."""

    prompt: list[int]
    ids: list[int]
    pieces: list[bytes]
    """Its text, escaped for JSON, one for each token."""
    finish_reason: str
    most_tokens: int
    """Of the answer, as far as it is asked for."""
    logprobs: Logprobs | None = None
    echo: bytes = b""
    """Text of the prompt, escaped for JSON, where it is part of the answer."""


@dataclass
class Asked:
    """A request as the twin serves it."""

    kind: str
    """`chat`, `completion`, `response`, `message` or `generate`."""
    model: str
    choices: list[Choice]
    """The answers to the first prompt, then those to the next one."""
    num_answers: int
    """To each prompt."""
    streams: bool
    includes_usage: bool = False
    usage_in_chunks: bool = False
    priority: int = 0
    session: str | None = None
    tool: str | None = None
    """Name of the function that the answer calls."""
    replica: int | None = None
    """Whose port was asked; None: the router chooses."""
    stream_id: str = ""
    created: int = 0
    is_pooled: bool = False
    """It asks for a vector or a score."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What the answer repeats of a request, or depends on, where its API is not that of chats and completions."""


def ask(body: Mapping[str, Any], kind: str, tokenizer: Tokenizer, words: "Words", limits: Limits, number: int) -> Asked:
    """Read the body of a request. RequestError where it cannot be served.

    Args:
        kind: `chat` or `completion`.
        number: of the request: seeds its answer, and its length where it does not say one.
    """
    model = limits.check_model(body.get("model"))
    _check_values(body)
    _check_choices(body)
    limits.check_bias(body.get("logit_bias") or {})
    is_chat, count = kind == "chat", body.get("n") or 1
    prompts = [chat_prompt(body, tokenizer, limits.max_model_len)] if is_chat else _prompts(body, tokenizer, limits)
    if not prompts or not all(prompts):
        raise RequestError("the prompt is empty", param="messages" if is_chat else "prompt")
    has_echo = not is_chat and bool(body.get("echo"))
    tool, text = _demanded(body)
    own = tokenizer.encode(text)
    # What is demanded ends where it is complete, and not as long as the workload's answers.
    limits = replace(limits, output_tokens=[len(own)]) if text else limits
    every = [prompt for prompt in prompts for _ in range(count)]
    asked = Asked(
        kind,
        model,
        [_choice(body, kind, each, words, limits, number + index, has_echo) for index, each in enumerate(every)],
        count,
        bool(body.get("stream")),
        priority=body.get("priority") or 0,
        session=None if body.get("user") is None else str(body["user"]),
        tool=tool,
    )
    options = body.get("stream_options") or {}
    asked.includes_usage = bool(options.get("include_usage"))
    asked.usage_in_chunks = bool(options.get("continuous_usage_stats"))
    # vLLM names tool calls as the reason only where the model chose the tool, or that it calls one.
    whole = "tool_calls" if tool and body["tool_choice"] == "required" else "stop"
    for choice in asked.choices if text else ():
        _shape(choice, text, own, "length" if body.get("ignore_eos") else whole)
    most = _num_logprobs(body, kind)
    for choice in asked.choices if has_echo or most is not None else ():
        prompt_texts = [tokenizer.decode([token]) for token in choice.prompt] if has_echo else []
        choice.echo = escaped("".join(prompt_texts))
        if most is not None:
            ids, texts = choice.ids, [json.loads(b'"' + piece + b'"') for piece in choice.pieces]
            ids = choice.prompt + ids if has_echo else ids
            choice.logprobs = Logprobs(is_chat, most, ids, prompt_texts + texts, len(prompt_texts), tokenizer.words)
    return asked


def _check_values(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a field that is not simulated, or outside its range."""
    for name, harmless in _FIELDS["refused"].items():
        if body.get(name) not in harmless:
            raise RequestError(f"{name}={body[name]!r} is not simulated", param=name)
    for name, (kind, least, largest, words) in _FIELDS["ranges"].items():
        value = body.get(name)
        is_number = type(value) is int or (kind == "number" and type(value) is float)
        if value is not None and not (is_number and least <= value <= largest):
            said = f"{name} must be {words}, not {value!r:.40}"
            raise RequestError(said, param=name) if is_number else malformed(said, name)
    for name in TRUTHS:
        if body.get(name) not in (None, True, False):
            raise malformed(f"{name} must be true or false, not {body[name]!r:.40}", name)
    for name, form in (("stream_options", dict), ("logit_bias", dict), ("structured_outputs", dict), ("tools", list)):
        if not isinstance(body.get(name), form | None):
            raise malformed(f"{name} must be {'an object' if form is dict else 'a list'}", name)
    for name in ("regex", "grammar", "structural_tag"):
        if (body.get("structured_outputs") or {}).get(name):
            raise RequestError(f"structured_outputs.{name} is not simulated", param="structured_outputs")


def _check_choices(body: Mapping[str, Any]) -> None:
    temperature = body.get("temperature")
    if (body.get("n") or 1) > 1 and temperature is not None and temperature < GREEDY:
        raise RequestError(f"n must be 1 when using greedy sampling, got {body['n']}.", param="n")
    stop = body.get("stop")
    if not all(isinstance(text, str) and text for text in (stop if isinstance(stop, list) else [stop or "none"])):
        raise RequestError("stop must be a text or a list of texts, none of them empty", param="stop")
    formatted = body.get("response_format") or {}
    if not isinstance(formatted, dict) or formatted.get("type") not in FORMATS:
        raise RequestError(f"response_format must be one of {', '.join(FORMATS[1:])}", param="response_format")
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto", "required") and not isinstance(choice, dict):
        raise RequestError("tool_choice must be none, auto, required or name a function", param="tool_choice")
    if body.get("stream_options") and not body.get("stream"):
        raise malformed("Stream options can only be defined when `stream=True`.", "stream_options")
    if choice not in (None, "none") and not body.get("tools"):
        raise malformed("tool_choice needs tools", "tool_choice")


def _num_logprobs(body: Mapping[str, Any], kind: str) -> int | None:
    """Return how many likely tokens each place of an answer names; None where no probabilities are asked for."""
    name = "top_logprobs" if kind == "chat" else "logprobs"
    most = None if body.get(name) is False else _whole(body, name)
    if kind == "chat":
        if body.get("logprobs") not in (None, True, False):
            raise RequestError("logprobs must be true or false", param="logprobs")
        if not body.get("logprobs"):
            if most:
                raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
            return None
        most = most or 0
    if most is not None and not 0 <= most <= MOST_LOGPROBS:
        raise RequestError(f"{name} must be from 0 to {MOST_LOGPROBS}, got {most}.", param=name)
    return most


def _choice(
    body: Mapping[str, Any], kind: str, prompt: list[int], words: "Words", limits: Limits, number: int, has_echo: bool
) -> Choice:
    """Return one answer; with `echo` and `max_tokens` of 0 it has a token that is computed and not shown, as vLLM's."""
    is_prompt_alone = has_echo and body.get("max_tokens") == 0
    body = {**body, "max_tokens": 1, "ignore_eos": True} if is_prompt_alone else body
    num_tokens, most = _output_tokens(body, kind, len(prompt), limits, number)
    ids, pieces = words.answer(number, num_tokens)
    return Choice(prompt, ids, [b""] if is_prompt_alone else pieces, "stop" if num_tokens < most else "length", most)


def chat_prompt(body: Mapping[str, Any], tokenizer: Tokenizer, most: float = math.inf) -> list[int]:
    """Return the ids of a conversation; RequestError where its messages are none, or surely have too many tokens."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise malformed("messages must be a list of messages", "messages")
    if not messages:
        return []
    for message in messages:
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not isinstance(content, str | list | None):
            raise malformed("a message needs a role, and a content of text or parts", "messages")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (kind := part.get("type", "text")) not in TEXT_PARTS:
                raise RequestError(
                    f"a part of type {kind!r:.40} is not simulated: this server takes text", param="messages"
                )
    _check_length([json.dumps(body.get("tools") or ""), *map(text_of, messages)], tokenizer, most)
    try:
        return tokenizer.chat(messages, body.get("tools"))
    except InputError as error:
        raise RequestError(error.message, param="messages") from None


def _check_length(texts: Sequence[str], tokenizer: Tokenizer, most: float) -> None:
    """Refuse texts that have more than so many tokens for sure: to cut them would hold all streams up for seconds."""
    if tokenizer.longest_bytes is not None:
        least = sum(len(text.encode("utf-8", "replace")) for text in texts) // tokenizer.longest_bytes
        if least > most:
            raise _too_long(most, least, 0, "at least ")


def _too_long(most: float, given: int, asked: int, about: str = "") -> RequestError:
    """Return the error for `given` input and `asked` output tokens, in the words of vLLM's `renderers/params.py`."""
    return RequestError(
        f"This model's maximum context length is {most} tokens. However, you requested {asked} output tokens and your "
        f"prompt contains {about}{given} input tokens, for a total of {about}{given + asked} tokens. Please reduce the "
        "length of the input prompt or the number of requested output tokens.",
        param="input_tokens",
    )


def _prompts(body: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> list[list[int]]:
    """Return the ids of each prompt: a text, ids, or a list of texts or of lists of ids."""
    prompt, ids = body.get("prompt"), list[list[int]]()
    if prompt is None:
        raise malformed("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    several = prompt if isinstance(prompt, list) and all(isinstance(each, str | list) for each in prompt) else [prompt]
    for each in several:
        if isinstance(each, str):
            _check_length([each], tokenizer, limits.max_model_len)
            ids.append(tokenizer.encode(each))
        else:
            ids.append(limits.check_ids(each, tokenizer, "prompt"))
    return ids


def _whole(body: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number that a request gives; None where it gives none."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise malformed(f"{name} must be a whole number, not {value!r:.40}", name)
    return value


def _output_tokens(
    body: Mapping[str, Any], kind: str, input_tokens: int, limits: Limits, number: int
) -> tuple[int, int]:
    """Return how many tokens the answer has, and how many it may have.

    Where neither `ignore_eos` nor `min_tokens` says otherwise, it ends by itself where the workload's answers do.
    """
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    most = _whole(body, name)
    room = limits.max_model_len - input_tokens
    if most is None and kind == "completion":
        most = 16  # the OpenAI API's default, vLLM's too, for null as well (`normalize_null_max_tokens`)
    if most is not None and most < 1:
        raise RequestError(f"{name} must be at least 1, got {most}.", param=name)
    if most is not None and most > limits.max_model_len:
        said = f"{name}={most} cannot be greater than max_model_len={limits.max_model_len}."
        raise RequestError(f"{said} Please request fewer output tokens.", param=name)
    if room < 1 or (most is not None and most > room):
        raise _too_long(limits.max_model_len, input_tokens, most or 0)
    most = room if most is None else most
    own_end = limits.output_tokens[number % len(limits.output_tokens)]
    if body.get("ignore_eos"):
        own_end = most
    least = body.get("min_tokens") or 1
    if least > most:
        raise RequestError(f"min_tokens is {least}, which is more than {name} of {most}", param="min_tokens")
    return min(max(own_end, least), most), most


def _demanded(body: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the function that the answer must call, and the JSON that it must be; empty where it is free."""
    choice, tools, formatted = body.get("tool_choice"), body.get("tools"), body.get("response_format") or {}
    structured = body.get("structured_outputs") or {}
    try:
        if tools and (choice == "required" or isinstance(choice, dict)):
            name = None if choice == "required" else choice["function"]["name"]
            called = next((each["function"] for each in tools if name in (None, each["function"]["name"])), None)
            if called is None:
                raise RequestError("tool_choice names no function among the tools", param="tool_choice")
            return str(called["name"]), text_for(called.get("parameters") or {})
        if formatted.get("type") == "json_object" or structured.get("json_object"):
            return None, text_for({"type": "object"})
        if formatted.get("type") == "json_schema":
            return None, text_for((formatted.get("json_schema") or {}).get("schema") or {})
        if (choices := structured.get("choice")) is not None:
            return None, str(choices[0])
        if (schema := structured.get("json")) is not None:
            return None, text_for(json.loads(schema) if isinstance(schema, str) else schema)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise RequestError("the tools, tool_choice, response_format or structured_outputs cannot be read") from None
    return None, ""


def _shape(answer: Choice, text: str, own: Sequence[int], reason: str) -> None:
    """Give an answer a text with the tokens `own`, as far as its length goes; where whole, it ends for `reason`."""
    count, whole = len(answer.ids), max(len(answer.ids), len(own))
    ends = [len(text) * position // whole for position in range(count + 1)]
    answer.pieces = [escaped(text[begin:end]) for begin, end in pairwise(ends)]
    answer.ids = [*own, *answer.ids][:count]
    answer.finish_reason = "length" if count < len(own) else reason


def escaped(text: str) -> bytes:
    """Return a text as it stands between the quotes of JSON."""
    return json.dumps(text)[1:-1].encode()


class Words:
    """The words of answers: their ids, and their text escaped for JSON."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids = np.array(list(tokenizer.words), np.int64)
        self.texts = {i: escaped(text) for i, text in tokenizer.words.items()}

    def answer(self, number: int, num_tokens: int) -> tuple[list[int], list[bytes]]:
        ids, texts = answer_ids(self.ids, number, num_tokens), self.texts
        return ids, [texts[i] for i in ids]


def usage(answers: Sequence[Answer], num_answers: int = 1) -> dict[str, Any]:
    """Return the tokens that a request has had, with so many answers to each prompt, which counts once."""
    firsts, tokens = answers[::num_answers], sum(answer.sent for answer in answers)
    prompt_tokens = sum(answer.input_tokens for answer in firsts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in firsts)},
    }


def document(asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the whole reply to a request that does not stream."""
    return {
        "id": asked.stream_id,
        "object": "chat.completion" if asked.kind == "chat" else "text_completion",
        "created": asked.created,
        "model": asked.model,
        "choices": [_whole_choice(asked, index) for index in range(len(asked.choices))],
        "usage": usage(answers, asked.num_answers),
        **dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params")),
    }


def _whole_choice(asked: Asked, index: int) -> dict[str, Any]:
    choice = asked.choices[index]
    text = json.loads(b'"' + choice.echo + b"".join(choice.pieces) + b'"')
    logprobs = None if choice.logprobs is None else choice.logprobs.document(0, _num_shown(choice))
    reply = {"index": index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
    reply |= dict.fromkeys(("stop_reason", "token_ids"))
    if asked.kind != "chat":
        return reply | {"text": text}
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    if asked.tool is not None:
        call = _call(asked, index) | {"function": {"name": asked.tool, "arguments": text}}
        message |= {"content": None, "tool_calls": [call]}
    return reply | {"message": message}


def _call(asked: Asked, index: int) -> dict[str, Any]:
    """Return the head of an answer's tool call, whose id is another in each."""
    return {"id": f"call_{asked.stream_id[-24:]}{index or ''}", "type": "function"}


def _num_shown(choice: Choice) -> int:
    """Return the tokens of an answer that are part of its text."""
    return 0 if choice.pieces == [b""] else len(choice.pieces)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class Events(ABC):
    """Makes the server-sent events of one answer."""

    def __init__(self, asked: Asked, index: int = 0) -> None:
        self.asked, self.index, self.choice = asked, index, asked.choices[index]

    def opening(self) -> bytes:
        """Return what leaves before the first token."""
        return b""

    @abstractmethod
    def tokens(self, begin: int, answer: Answer, is_last: bool) -> bytes:
        """Return the events with an answer's tokens from `begin` to those that have been sent."""

    def closing(self, _answers: Sequence[Answer]) -> bytes:
        """Return the events behind the last token of a request's answers."""
        return b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        """Return the last events of an answer that fails."""
        return b"data: %b\n\ndata: [DONE]\n\n" % _compact(error.document).encode()


class Chunks(Events):
    """Makes the events of chats and completions, from parts of JSON that are made once."""

    def __init__(self, asked: Asked, index: int = 0) -> None:
        super().__init__(asked, index)
        self._pieces = self.choice.pieces
        is_chat = asked.kind == "chat"
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": asked.stream_id, "object": kind, "created": asked.created, "model": asked.model}
        self._head = b"data: " + _compact(head).encode()[:-1] + b',"choices":'
        choice = self._head + b'[{"index":%d,' % index
        if asked.tool is not None:
            self._before = choice + b'"delta":{"tool_calls":[{"index":0,"function":{"arguments":"'
            delta_end = b'"}}]}'
        elif is_chat:
            self._before, delta_end = choice + b'"delta":{"content":"', b'"}'
        else:
            self._before, delta_end = choice + b'"text":"', b'"'
        self._logprobs = delta_end + b',"logprobs":'
        self._reason = b',"finish_reason":'
        nobody = b',"usage":null' if asked.includes_usage and not asked.usage_in_chunks else b""
        self._end = b"}]" + nobody + b"}\n\n"
        self._after = self._logprobs + b"null" + self._reason + b"null" + self._end
        self._is_plain = not asked.usage_in_chunks and self.choice.logprobs is None

    def _first(self, closing: bytes) -> bytes:
        """Return the event before an answer's first token."""
        asked = self.asked
        if asked.kind != "chat":
            return b""
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        if asked.tool is not None:
            call = {"index": 0} | _call(asked, self.index) | {"function": {"name": asked.tool, "arguments": ""}}
            delta = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._head + _compact([choice]).encode() + closing[2:]

    def _closed(self, answer: Answer, num_tokens: int) -> bytes:
        """Return the end of an event after which so many tokens have been sent."""
        if not self.asked.usage_in_chunks:
            return self._end
        used = usage([answer]) | {"completion_tokens": num_tokens, "total_tokens": answer.input_tokens + num_tokens}
        return b'}],"usage":' + _compact(used).encode() + b"}\n\n"

    def tokens(self, begin: int, answer: Answer, is_last: bool) -> bytes:
        end, pieces = answer.sent, self._pieces
        text = pieces[begin] if end == begin + 1 else b"".join(pieces[begin:end])
        if self._is_plain and begin and not is_last:
            return self._before + text + self._after
        if begin == 0:
            text = self.choice.echo + text
        logprobs = b"null"
        if self.choice.logprobs is not None:
            shown = min(end, _num_shown(self.choice))
            logprobs = _compact(self.choice.logprobs.document(begin, shown)).encode()
        closing = self._closed(answer, end)
        reason = b'"%s"' % self.choice.finish_reason.encode() if is_last else b"null"
        event = self._before + text + self._logprobs + logprobs + self._reason + reason + closing
        return event if begin else self._first(self._closed(answer, 0)) + event

    def closing(self, answers: Sequence[Answer]) -> bytes:
        if not self.asked.includes_usage:
            return super().closing(answers)
        used = _compact(usage(answers, self.asked.num_answers)).encode()
        return self._head + b'[],"usage":' + used + b"}\n\n" + super().closing(answers)
