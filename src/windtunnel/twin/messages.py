"""Anthropic's Messages API, as vLLM 0.24 serves it: a request is a chat, its answer one block of `content`.

Fields, errors and events are those of vLLM's `vllm/entrypoints/anthropic`, which counts cached tokens as input and
sends no `ping`. No answer holds a block of thinking.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from windtunnel.twin.engine import Answer
from windtunnel.twin.protocol import Asked, Events, Limits, RequestError, Words, ask, malformed
from windtunnel.twin.tokens import Tokenizer

AS_IN_CHATS = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k", "ignore_eos", "priority")
"""Fields that a chat has too, the last two of them no part of the API: a twin's clients ask for exact lengths."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BILLING = "x-anthropic-billing-header"
"""Beginning of a block of Claude Code's that differs in each request: vLLM leaves it out, for the prefix cache."""


def ask_message(
    body: Mapping[str, Any], kind: str, tokenizer: Tokenizer, words: Words, limits: Limits, number: int
) -> Asked:
    """Read the body of a request; arguments and errors are those of `ask`."""
    for name in ("model", "max_tokens"):
        if body.get(name) is None:
            raise malformed(f"{name} is missing", name)
    asked = ask(chat_of(body), "chat", tokenizer, words, limits, number)
    asked.kind = kind
    return asked


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat that a request of the Messages API is; RequestError where it cannot be read."""
    messages, system = body.get("messages"), list[str]()
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise malformed("messages must be a list of messages", "messages")
    for name in ("metadata", "output_config", "tool_choice"):
        if not isinstance(body.get(name), dict | None):
            raise malformed(f"{name} must be an object, not {body[name]!r:.40}", name)
    inline = [message.get("content") for message in messages if message.get("role") == "system"]
    for content in (body.get("system"), *inline):
        texts = [str(block.get("text") or "") for block in _blocks(content or "", "system")]
        system += [text for text in texts if not text.startswith(BILLING)]
    chat = {name: body[name] for name in AS_IN_CHATS if body.get(name) is not None}
    chat["messages"] = [{"role": "system", "content": "".join(system)}] if any(system) else []
    chat["messages"] += [made for each in messages if each.get("role") != "system" for made in _messages(each)]
    chat |= {"stop": body.get("stop_sequences"), "user": (body.get("metadata") or {}).get("user_id")}
    if (form := (body.get("output_config") or {}).get("format")) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    return chat | _tools(body)


def _blocks(content: Any, name: str) -> list[dict[str, Any]]:
    """Return the blocks of a content, which is a text or a list of them."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise malformed(f"the content of {name} must be a text or a list of blocks", name)
    return blocks


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a message as those of a chat: results of tools first, each alone; thoughts of former turns are left out."""
    parts, calls = list[dict[str, Any]](), list[dict[str, Any]]()
    for block in _blocks(message.get("content"), "messages"):
        match block.get("type"):
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                result = _blocks(block.get("content") or "", "messages")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            case "thinking" | "redacted_thinking" | "tool_reference":
                pass
            case _:
                parts.append(block)
    if parts or calls:
        yield {"role": message.get("role"), "content": parts, **({"tool_calls": calls} if calls else {})}


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return tools and the choice of one as a chat has them."""
    tools, choice = body.get("tools") or [], body.get("tool_choice") or {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "input_schema" in tool for tool in tools):
        raise malformed("a tool must have a name and an input_schema: those of Anthropic's own are not served", "tools")
    if (kind := choice.get("type", "auto")) not in (*CHOICES, "tool"):
        raise malformed("tool_choice must be of type auto, any, tool or none", "tool_choice")
    functions = [{"name": tool.get("name"), "parameters": tool["input_schema"]} | tool for tool in tools]
    named = {"type": "function", "function": {"name": choice.get("name")}}
    if not tools and kind == "auto":
        return {}
    chosen = named if kind == "tool" else CHOICES[kind]
    return {"tools": [{"type": "function", "function": each} for each in functions] or None, "tool_choice": chosen}


def error_document(error: RequestError) -> dict[str, Any]:
    """Return an error in the form of the Messages API."""
    return {"type": "error", "error": {"type": error.kind, "message": error.message}}


def message_document(asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the whole reply; RequestError, as in vLLM, for the call of a tool that `max_tokens` has cut off."""
    choice, block = asked.choices[0], _block(asked)
    text = json.loads(b'"' + b"".join(choice.pieces) + b'"')
    try:
        block |= {"text": text} if asked.tool is None else {"input": json.loads(text)}
    except ValueError as error:
        raise RequestError(str(error), 500, "internal_error") from None
    usage = {"input_tokens": answers[0].input_tokens, "output_tokens": answers[0].sent}
    return _message(asked, usage) | {"content": [block], "stop_reason": STOP_REASONS[choice.finish_reason]}


def _message(asked: Asked, usage: Mapping[str, int]) -> dict[str, Any]:
    head = {"id": asked.stream_id, "type": "message", "role": "assistant", "content": [], "model": asked.model}
    return head | {"stop_reason": None, "stop_sequence": None, "usage": usage}


def _block(asked: Asked) -> dict[str, Any]:
    """Return the block of an answer, empty."""
    if asked.tool is None:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": f"call_{asked.stream_id[-24:]}", "name": asked.tool, "input": {}}


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


class MessageEvents(Events):
    """Makes the events of a message, from parts of JSON that are made once."""

    def __init__(self, asked: Asked, index: int = 0) -> None:
        super().__init__(asked, index)
        kind, name = ("text_delta", "text") if asked.tool is None else ("input_json_delta", "partial_json")
        delta = _event("content_block_delta", index=0, delta={"type": kind, name: ""})
        self._before, self._after = delta[:-5], delta[-5:]

    def tokens(self, begin: int, answer: Answer, is_last: bool) -> bytes:
        events = self._before + b"".join(self.choice.pieces[begin : answer.sent]) + self._after
        if begin == 0:  # vLLM starts a message with its first token
            usage = {"input_tokens": answer.input_tokens, "output_tokens": 0}
            start = _event("message_start", message=_message(self.asked, usage))
            events = start + _event("content_block_start", index=0, content_block=_block(self.asked)) + events
        if is_last:
            usage = {"input_tokens": answer.input_tokens, "output_tokens": answer.sent}
            delta = {"stop_reason": STOP_REASONS[self.choice.finish_reason]}
            events += _event("content_block_stop", index=0) + _event("message_delta", delta=delta, usage=usage)
        return events

    def closing(self, _answers: Sequence[Answer]) -> bytes:
        return _event("message_stop")

    def failed(self, error: RequestError) -> bytes:
        return _event("error", error=error_document(error)["error"])
