"""The Responses API of OpenAI, as vLLM 0.24 serves it: a request is a chat, its answer an item of `output`.

Fields, errors and events are those of vLLM's `vllm/entrypoints/openai/responses`. No response is kept, as in a vLLM
without `VLLM_ENABLE_RESPONSES_API_STORE`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.schema import read_yaml
from windtunnel.twin.engine import Answer
from windtunnel.twin.protocol import Asked, Events, Limits, RequestError, Words, ask, malformed
from windtunnel.twin.tokens import Tokenizer

_FIELDS: Mapping[str, Any] = read_yaml(Path(__file__).with_suffix(".yaml"))
TYPES = {"a list": list, "an object": dict, "true or false": bool, "a whole number": int, "a text": str}
"""How a type of JSON is called -> the type."""
FORMS = ("text", "json_object", "json_schema")
OWN_NAMES = {"messages": "input", "response_format": "text"}
"""Field of a chat -> the one that it is made from."""


def ask_response(
    body: Mapping[str, Any], kind: str, tokenizer: Tokenizer, words: Words, limits: Limits, number: int
) -> Asked:
    """Read the body of a request; arguments and errors are those of `ask`."""
    limits.check_model(body.get("model"))
    _check(body)
    chat = {name: body[name] for name in _FIELDS["as_in_chats"] if body.get(name) is not None}
    chat |= {"messages": _messages(body), "max_tokens": body.get("max_output_tokens")} | _tools(body)
    form = (body.get("text") or {}).get("format") or {}
    if form:
        chat["response_format"] = form if form.get("type") != "json_schema" else form | {"json_schema": form}
    if "message.output_text.logprobs" in (body.get("include") or ()):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs")}
    try:
        asked = ask(chat, "chat", tokenizer, words, limits, number)
    except RequestError as error:
        error.param = OWN_NAMES.get(error.param or "", error.param)
        raise
    room = limits.max_model_len - len(asked.choices[0].prompt)
    asked.kind, asked.given = kind, {**body, "max_output_tokens": body.get("max_output_tokens") or room}
    return asked


def _check(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a field of a wrong type, or one that needs what is not kept."""
    for name, kinds in _FIELDS["types"].items():
        value = body.get(name)
        if value is not None and type(value) not in map(TYPES.get, kinds):
            raise malformed(f"{name} must be {' or '.join(kinds)}, not {value!r:.40}", name)
    if body.get("input") is None:
        raise malformed("input is missing: a text or a list of items", "input")
    if body.get("prompt") is not None:
        raise malformed("prompt template is not supported", "prompt")
    if not all(name in _FIELDS["included"] for name in body.get("include") or ()):
        raise malformed(f"include must be among {', '.join(_FIELDS['included'])}", "include")
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise malformed("truncation must be auto or disabled", "truncation")
    form = (body.get("text") or {}).get("format") or {}
    if form and (not isinstance(form, dict) or form.get("type") not in FORMS):
        raise malformed(f"text.format must be of type {', '.join(FORMS)}", "text")
    if form and body.get("structured_outputs"):
        raise malformed("Cannot specify both structured_outputs and text.format", "structured_outputs")
    if body.get("background"):
        raise RequestError(
            "responses are not stored, and therefore none is computed in the background",
            kind="invalid_request_error",
            param="background",
        )
    if body.get("previous_response_id") is not None:
        raise unknown_response(body["previous_response_id"])


def unknown_response(name: str) -> RequestError:
    """Return the error for the id of a response, of which none is kept."""
    message = f"Response with id '{name}' not found."
    return RequestError(message, 404, "invalid_request_error", "response_id")


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat that instructions and input are; tool calls join the message before them."""
    instructions, items = body.get("instructions"), body["input"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        message = _message(item)
        last = messages[-1] if messages else {}
        if message is not None and message.get("tool_calls") and last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        elif message is not None:
            messages.append(message)
    return messages


def _message(item: Any) -> dict[str, Any] | None:
    """Return an item as a message; None for reasoning, which chat templates leave out of former turns."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message":
            return {"role": item.get("role"), "content": item.get("content")}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            return {"role": "tool", "content": item.get("output")}
        case "reasoning":
            return None
    raise malformed(f"an item of type {kind!r:.40} is not simulated" if kind else "items must be objects", "input")


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return tools and the choice of one as a chat has them: names and parameters below `function`."""
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise malformed("a tool must be a function with a name: no other kind is simulated", "tools")
    name = choice.get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if choice == "required" and not tools:
        raise malformed("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    if isinstance(choice, dict) and name not in [tool["name"] for tool in tools]:
        raise malformed("Tool choice 'function' not found in 'tools' parameter.", "tool_choice")
    if not tools:
        return {}
    chosen = choice if name is None else {"type": "function", "function": {"name": name}}
    return {"tools": [{"type": "function", "function": tool} for tool in tools], "tool_choice": chosen}


def response_document(asked: Asked, answers: Sequence[Answer], status: str | None = None) -> dict[str, Any]:
    """Return the whole reply; with a `status` of `in_progress` that of a stream which begins."""
    given, choice = asked.given, asked.choices[0]
    if status is None:
        status = "incomplete" if choice.finish_reason == "length" else "completed"
    tools = given.get("tools") or []
    tool_choice = given.get("tool_choice") or "auto"
    is_running = status == "in_progress"
    return {
        "id": asked.stream_id,
        "created_at": asked.created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": asked.model,
        "object": "response",
        "output": [] if is_running else [_item(asked)],
        **{name: given.get(name) for name in _FIELDS["repeated"]},
        **{name: value if given.get(name) is None else given[name] for name, value in _FIELDS["defaults"].items()},
        "tool_choice": "none" if not tools and tool_choice == "auto" else tool_choice,
        "tools": tools,
        "top_logprobs": None if choice.logprobs is None else choice.logprobs.most,
        "background": False,
        "status": status,
        "usage": None if is_running else _usage(answers[0]),
        **dict.fromkeys(("kv_transfer_params", "input_messages", "output_messages")),
    }


def _usage(answer: Answer) -> dict[str, Any]:
    """Return the tokens of a response; vLLM counts no turns where it calls no tools itself."""
    return {
        "input_tokens": answer.input_tokens,
        "input_tokens_details": {
            "cached_tokens": answer.cached_tokens,
            **{name: [] for name in ("input_tokens_per_turn", "cached_tokens_per_turn")},
        },
        "output_tokens": answer.sent,
        "output_tokens_details": {
            **dict.fromkeys(("reasoning_tokens", "tool_output_tokens"), 0),
            **{name: [] for name in ("output_tokens_per_turn", "tool_output_tokens_per_turn")},
        },
        "total_tokens": answer.input_tokens + answer.sent,
    }


def _item(asked: Asked, is_open: bool = False) -> dict[str, Any]:
    """Return the item that a response consists of: a message, or the call of a function; empty where it `is_open`."""
    choice, own = asked.choices[0], asked.stream_id.removeprefix("resp_")
    text = "" if is_open else json.loads(b'"' + b"".join(choice.pieces) + b'"')
    status = "in_progress" if is_open else "completed"
    if asked.tool is not None:
        call = {"id": f"fc_{own}", "call_id": f"call_{own}", "name": asked.tool, "arguments": text}
        return {"type": "function_call", "status": status, **call}
    content = [] if is_open else [_part(asked, text)]
    return {"id": f"msg_{own}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(asked: Asked, text: str) -> dict[str, Any]:
    """Return a text as the content of a message, with the probabilities of its tokens where they are asked for."""
    logprobs = asked.choices[0].logprobs
    rows = [] if logprobs is None or not text else logprobs.document(0, len(asked.choices[0].pieces))["content"]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": rows}


class ResponseEvents(Events):
    """Makes the events of a response, from parts of JSON that are made once."""

    def __init__(self, asked: Asked, index: int = 0) -> None:
        super().__init__(asked, index)
        self._number = 0
        item = _item(asked, is_open=True)
        self._where = {"output_index": 0, "item_id": item["id"]}
        self._opened = item
        kind = "function_call_arguments" if asked.tool is not None else "output_text"
        if asked.tool is None:
            self._where["content_index"] = 0
        self._delta = f"response.{kind}.delta"
        self._before = f'event: {self._delta}\ndata: {{"type":"{self._delta}","delta":"'.encode()
        self._after = b'",' + json.dumps(self._where, separators=(",", ":")).encode()[1:-1]

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._number, **fields}, separators=(",", ":"))
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    def opening(self) -> bytes:
        response = response_document(self.asked, (), "in_progress")
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=response) for name in names)

    def tokens(self, begin: int, answer: Answer, is_last: bool) -> bytes:
        events, end = b"", answer.sent
        if begin == 0:
            events = self._event("response.output_item.added", output_index=0, item=self._opened)
            if self.asked.tool is None:
                part = _part(self.asked, "")
                events += self._event("response.content_part.added", **self._where, part=part)
        logprobs = b""
        if self.asked.tool is None:
            own = self.choice.logprobs
            rows = [] if own is None else own.document(begin, end)["content"]
            logprobs = b',"logprobs":' + json.dumps(rows, separators=(",", ":")).encode()
        number = b',"sequence_number":%d}\n\n' % self._number
        self._number += 1
        events += self._before + b"".join(self.choice.pieces[begin:end]) + self._after + logprobs + number
        return events + self._done() if is_last else events

    def _done(self) -> bytes:
        """Return the events with which an item ends."""
        item = _item(self.asked)
        if self.asked.tool is not None:
            done = {"name": self.asked.tool, "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", **self._where, **done)
        else:
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            events = self._event("response.output_text.done", **self._where, **done)
            events += self._event("response.content_part.done", **self._where, part=part)
        return events + self._event("response.output_item.done", output_index=0, item=item)

    def closing(self, answers: Sequence[Answer]) -> bytes:
        return self._event("response.completed", response=response_document(self.asked, answers))

    def failed(self, error: RequestError) -> bytes:
        return self._event("error", code=str(error.status), message=error.message, param=error.param)
