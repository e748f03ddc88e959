"""Anthropic's Messages API of a twin: documents, events and errors as vLLM's."""

import json
from typing import Any

import httpx
import pytest

from live_twins import post
from windtunnel.twin.server import TwinApp

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "Hello there"}
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "llama", "max_tokens": 6, "ignore_eos": True, "messages": [USER]} | fields


def message_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the documents of a stream, each named by its event."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    pairs = [part.split("\n") for part in answer.text.split("\n\n") if part]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [each["type"] for each in documents]
    return documents


def test_a_message_has_the_length_that_was_asked_for(app: TwinApp) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: 1"}
    system: list[dict[str, Any]] = [
        billing,
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    message = post(app, MESSAGES, asked(system=system)).json()
    assert [message[name] for name in ("type", "role", "model", "stop_reason")] == [
        "message", "assistant", "llama", "max_tokens"
    ]  # fmt: skip
    chat = [{"role": "system", "content": "Be brief."}, USER]
    inline = asked(messages=[{"role": "system", "content": "Be brief."}, USER])
    assert post(app, MESSAGES, inline).json()["usage"] == message["usage"]
    count = post(app, "/tokenize", {"messages": chat}).json()["count"]
    assert message["usage"] == {"input_tokens": count, "output_tokens": 6}
    (block,) = message["content"]
    assert post(app, "/tokenize", {"prompt": block["text"]}).json()["count"] == 6
    counted = post(app, f"{MESSAGES}/count_tokens", {"model": "llama", "messages": [USER], "system": system}).json()
    assert counted == {"input_tokens": count, "context_management": {"original_input_tokens": count}}
    ended = asked(max_tokens=4000, ignore_eos=False, tool_choice={"type": "auto"})
    assert post(app, MESSAGES, ended).json()["stop_reason"] == "end_turn"


def test_the_events_of_a_message_have_anthropics_names_and_order(app: TwinApp) -> None:
    documents = message_events(post(app, MESSAGES, asked(stream=True, max_tokens=3)))
    deltas = ["content_block_delta"] * 3
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert [each["type"] for each in documents] == ["message_start", "content_block_start", *deltas, *ends]
    assert documents[0]["message"]["content"] == []
    assert all(each["delta"]["type"] == "text_delta" and each["delta"]["text"] for each in documents[2:5])
    assert documents[-2]["delta"] == {"stop_reason": "max_tokens"}
    assert documents[-2]["usage"]["output_tokens"] == 3


def test_a_message_uses_the_tool_that_is_demanded_and_takes_its_result(app: TwinApp) -> None:
    demand = asked(tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=100, ignore_eos=False)
    message = post(app, MESSAGES, demand).json()
    (block,) = message["content"]
    assert (message["stop_reason"], block["type"], block["name"], block["input"]) == (
        "tool_use", "tool_use", "weather", {"city": "lorem"}
    )  # fmt: skip
    named = demand | {"stream": True, "tool_choice": {"type": "tool", "name": "weather"}}
    documents = message_events(post(app, MESSAGES, named))
    assert documents[1]["content_block"]["input"] == {}
    parts = [each["delta"]["partial_json"] for each in documents if each["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"city": "lorem"}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert post(app, MESSAGES, asked(messages=turns, tools=[WEATHER])).status_code == 200
    cut = post(app, MESSAGES, demand | {"max_tokens": 1})
    assert (cut.status_code, cut.json()["error"]["type"]) == (500, "internal_error")


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": None}, 400, "model is missing"),
        ({"model": "other"}, 404, "does not exist"),
        ({"max_tokens": None}, 400, "max_tokens is missing"),
        ({"messages": "Hello"}, 400, "messages must be a list"),
        ({"messages": []}, 400, "the prompt is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "'image' is not simulated"),
        ({"messages": [{"role": "user", "content": [5]}]}, 400, "a text or a list of blocks"),
        ({"system": 5}, 400, "content of system must be"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "input_schema"),
        ({"tools": [WEATHER], "tool_choice": {"type": "all"}}, 400, "auto, any, tool or none"),
        ({"tool_choice": {"type": "any"}}, 400, "tool_choice needs tools"),
        ({"metadata": "me"}, 400, "metadata must be an object"),
        ({"max_tokens": 4096}, 400, "maximum context length"),
    ],
)
def test_a_message_that_cannot_be_given_is_refused(
    app: TwinApp, fields: dict[str, Any], status: int, words: str
) -> None:
    answer = post(app, MESSAGES, asked(**fields))
    document = answer.json()
    assert (answer.status_code, document["type"]) == (status, "error")
    assert words in document["error"]["message"]
