"""The Responses API of a twin: documents, events and errors as vLLM's."""

import json
from typing import Any

import httpx
import pytest

from live_twins import post, run
from windtunnel.twin.server import TwinApp

RESPONSES = "/v1/responses"
FOUND = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": FOUND}


def response_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the documents of a stream of the Responses API, each named by its event and numbered in order."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    pairs = [part.split("\n") for part in answer.text.split("\n\n") if part]
    documents = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [each["type"] for each in documents]
    assert [each["sequence_number"] for each in documents] == list(range(len(documents)))
    return documents


def test_a_response_is_a_message_of_the_length_that_was_asked_for(app: TwinApp) -> None:
    asked = {"input": "Hello there", "instructions": "Be brief.", "max_output_tokens": 6, "ignore_eos": True}
    response = post(app, RESPONSES, asked).json()
    assert (response["object"], response["status"]) == ("response", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = response["output"]
    assert (item["type"], item["role"], item["content"][0]["type"]) == ("message", "assistant", "output_text")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    count = post(app, "/tokenize", {"messages": chat}).json()["count"]
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (count, 6, count + 6)
    assert post(app, "/tokenize", {"prompt": item["content"][0]["text"]}).json()["count"] == 6
    assert {name: response[name] for name in ("instructions", "max_output_tokens", "tool_choice", "background")} == {
        "instructions": "Be brief.", "max_output_tokens": 6, "tool_choice": "none", "background": False
    }  # fmt: skip
    whole = post(app, RESPONSES, {"input": [{"role": "user", "content": "Hello there"}]}).json()
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
    assert whole["usage"]["output_tokens"] == app.limits.output_tokens[1]


def test_the_events_of_a_response_have_openais_names_and_order(app: TwinApp) -> None:
    asked = {"input": "Hi", "max_output_tokens": 3, "ignore_eos": True, "stream": True}
    documents = response_events(post(app, RESPONSES, asked | {"include": ["message.output_text.logprobs"]}))
    around = ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    names = [f"response.{name}" for name in (*around, *["output_text.delta"] * 3, *ends)]
    assert [each["type"] for each in documents] == names
    first, last = documents[0]["response"], documents[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    text = "".join(each["delta"] for each in documents if "delta" in each)
    assert text == documents[-4]["text"] == last["output"][0]["content"][0]["text"]
    assert last["usage"]["output_tokens"] == 3
    assert [len(each["logprobs"]) for each in documents if "delta" in each] == [1, 1, 1]
    assert {each["item_id"] for each in documents if "item_id" in each} == {last["output"][0]["id"]}


def test_a_response_calls_the_function_that_is_demanded(app: TwinApp) -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        asked = {"input": "Hi", "tools": [WEATHER], "tool_choice": choice}
        (call,) = post(app, RESPONSES, asked).json()["output"]
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            "function_call", "weather", {"city": "lorem"}
        )  # fmt: skip
    documents = response_events(post(app, RESPONSES, asked | {"stream": True}))
    names = list(dict.fromkeys(each["type"].removeprefix("response.") for each in documents))
    kind = "function_call_arguments"
    items = ["output_item.added", f"{kind}.delta", f"{kind}.done", "output_item.done"]
    assert names == ["created", "in_progress", *items, "completed"]
    assert json.loads("".join(each["delta"] for each in documents if "delta" in each)) == {"city": "lorem"}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    turn = [{"role": "user", "content": "Hi"}, {"type": "reasoning", "summary": []}, call, result]
    assert post(app, RESPONSES, {"input": turn, "tools": [WEATHER]}).json()["output"][0]["type"] == "message"
    form = {"type": "json_schema", "name": "found", "schema": FOUND}
    text = post(app, RESPONSES, {"input": "Hi", "text": {"format": form}}).json()["output"][0]["content"][0]["text"]
    assert json.loads(text) == {"city": "lorem"}


def test_the_next_response_finds_the_conversation_in_the_cache(app: TwinApp) -> None:
    question = {"role": "user", "content": "Tell me a long story about a wind tunnel, please. " * 20}
    first = post(app, RESPONSES, {"input": [question], "max_output_tokens": 100, "ignore_eos": True}).json()
    more = {"input": [question, *first["output"], {"role": "user", "content": "More."}], "max_output_tokens": 1}
    known = first["usage"]["input_tokens"] + 99
    usage = post(app, RESPONSES, more).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == known // 16 * 16


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        ({"input": "a", "previous_response_id": "resp_1"}, 404, "Response with id 'resp_1' not found.", "response_id"),
        ({"input": "a", "background": True}, 400, "are not stored", "background"),
        ({"input": "a", "model": "other"}, 404, "does not exist", "model"),
        ({}, 400, "input is missing", "input"),
        ({"input": 5}, 400, "input must be a text or a list, not 5", "input"),
        ({"input": []}, 400, "the prompt is empty", "input"),
        ({"input": [5]}, 400, "items must be objects", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "'item_reference' is not simulated", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "is not simulated", "input"),
        ({"input": "a", "max_output_tokens": 0}, 400, "max_tokens must be at least 1, got 0.", "max_tokens"),
        ({"input": "a", "max_output_tokens": "b"}, 400, "max_output_tokens must be a whole", "max_output_tokens"),
        ({"input": "word " * 5000}, 400, "maximum context length is 4096 tokens", "input_tokens"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, 400, "a tool must be a function", "tools"),
        ({"input": "a", "tool_choice": "required"}, 400, "specified with 'tools' parameter", "tool_choice"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "f"}}, 400, "not found in 'tools'", "tool_choice"),
        ({"input": "a", "include": ["b"]}, 400, "include must be among", "include"),
        ({"input": "a", "prompt": {"id": "p"}}, 400, "prompt template is not supported", "prompt"),
        ({"input": "a", "text": {"format": {"type": "b"}}}, 400, "text.format must be of type", "text"),
        ({"input": "a", "temperature": 3}, 400, "temperature must be a number from 0 to 2", "temperature"),
    ],
)
def test_a_response_that_cannot_be_given_is_refused(
    app: TwinApp, body: dict[str, Any], status: int, words: str, param: str
) -> None:
    answer = post(app, RESPONSES, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, status, param)
    assert words in error["message"]


def test_no_response_is_kept(app: TwinApp) -> None:
    for method, path in (("GET", "resp_1"), ("POST", "resp_1/cancel")):
        answer = run(app, lambda client, at=(method, f"{RESPONSES}/{path}"): client.request(*at))
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Response with id 'resp_1' not found.")
    assert run(app, lambda client: client.delete(f"{RESPONSES}/resp_1")).status_code == 405
