"""The HTTP API of a twin: shapes, errors, lengths, and what becomes of clients that leave."""

import asyncio
import base64
import json
import math
import threading
from typing import Any

import httpx
import msgspec
import pytest

from live_twins import post, run, scenario_of
from windtunnel.twin import server
from windtunnel.twin.protocol import Limits, RequestError
from windtunnel.twin.server import TwinApp
from windtunnel.twin.start import twin_app

CHAT = "/v1/chat/completions"
HELLO = {"model": "llama", "messages": [{"role": "user", "content": "Hello there, how are you?"}]}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the documents of a stream, which ends as it should."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_answer_has_the_length_that_was_asked_for(app: TwinApp) -> None:
    answer = post(app, CHAT, HELLO | {"max_tokens": 20, "ignore_eos": True}).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    text = answer["choices"][0]["message"]["content"]
    tokens = post(app, "/tokenize", {"prompt": text}).json()
    assert tokens["count"] == answer["usage"]["completion_tokens"] == 20
    assert post(app, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    prompt = post(app, "/tokenize", {"messages": HELLO["messages"]}).json()
    assert answer["usage"]["prompt_tokens"] == prompt["count"]


def test_an_answer_that_ends_by_itself_is_as_long_as_the_workloads(app: TwinApp) -> None:
    lengths = app.limits.output_tokens
    for number in range(3):
        answer = post(app, CHAT, HELLO).json()
        assert answer["usage"]["completion_tokens"] == lengths[number]
        assert answer["choices"][0]["finish_reason"] == "stop"
    cut = post(app, CHAT, HELLO | {"max_tokens": 2}).json()
    assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (2, "length")
    least = post(app, CHAT, HELLO | {"min_tokens": 400}).json()
    assert least["usage"]["completion_tokens"] == 400


def test_an_answer_is_named_by_whoever_asks(app: TwinApp) -> None:
    short, named = HELLO | {"max_tokens": 1}, {"X-Request-Id": "gateway-7"}
    for body in (short, short | {"request_id": "own"}):
        answer = run(app, lambda client, body=body: client.post(CHAT, json=body, headers=named))
        assert answer.json()["id"] == "chatcmpl-gateway-7"
    (chunk, *_) = events(post(app, "/v1/completions", {"prompt": "x", "stream": True, "request_id": "own"}))
    assert chunk["id"] == "cmpl-own"
    assert post(app, CHAT, short).json()["id"] != post(app, CHAT, short).json()["id"]


def test_a_stream_has_an_event_for_every_token(app: TwinApp) -> None:
    asked = HELLO | {"max_tokens": 7, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(app, CHAT, asked))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    contents = [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]]
    assert len(contents) == 7
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 7 + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert post(app, "/tokenize", {"prompt": "".join(contents)}).json()["count"] == 7


def test_every_chunk_can_say_what_was_used(app: TwinApp) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(app, CHAT, HELLO | {"max_tokens": 3, "stream": True, "stream_options": options}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3]
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


def test_some_engines_take_any_name_of_the_model() -> None:
    limits = Limits(("llama", "lora-a"), 4096, [1], 1000, takes_any_name=True)
    names = (None, "default", "llama", "default:lora-a", "lora-a")
    assert [limits.check_model(name) for name in names] == ["llama", "default", "llama", "lora-a", "lora-a"]
    for name, is_exact in (("default:lora-b", False), ("default", True)):
        with pytest.raises(RequestError, match="does not exist"):
            limits.check_model(name, is_exact)


def test_a_completion_takes_token_ids_as_they_are(app: TwinApp) -> None:
    asked = {"model": "llama", "prompt": list(range(50, 150)), "max_tokens": 5, "ignore_eos": True}
    whole = post(app, "/v1/completions", asked).json()
    assert whole["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "total_tokens": 105,
        "prompt_tokens_details": 0,
    }
    chunks = events(post(app, "/v1/completions", asked | {"stream": True}))
    assert len(chunks) == 5
    assert all(chunk["object"] == "text_completion" for chunk in chunks)


def test_the_next_turn_finds_the_conversation_in_the_cache(app: TwinApp) -> None:
    question = {"role": "user", "content": "Tell me a long story about a wind tunnel, please. " * 20}
    first = post(app, CHAT, {"messages": [question], "max_tokens": 100, "ignore_eos": True}).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    turn = [question, first["choices"][0]["message"] | {"tool_calls": None}, {"role": "user", "content": "More."}]
    second = post(app, CHAT, {"messages": turn, "max_tokens": 10, "ignore_eos": True}).json()
    known = first["usage"]["prompt_tokens"] + 99  # the last token was never computed
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known // 16 * 16


@pytest.mark.full
def test_a_tool_is_called_where_the_request_demands_it(app: TwinApp) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 3}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    asked = HELLO | {"tools": tools, "tool_choice": "required", "max_tokens": 30, "ignore_eos": True}
    call = post(app, CHAT, asked).json()["choices"][0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "lorem", "days": 3}
    chunks = events(post(app, CHAT, asked | {"stream": True}))
    deltas = [chunk["choices"][0]["delta"]["tool_calls"][0]["function"] for chunk in chunks]
    assert deltas[0]["name"] == "weather"
    assert json.loads("".join(delta["arguments"] for delta in deltas)) == {"city": "lorem", "days": 3}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "array", "items": deep, "minItems": 1000}
    nested = HELLO | {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}}
    assert post(app, CHAT, nested).status_code == 200
    formatted = HELLO | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    text = post(app, CHAT, formatted).json()["choices"][0]["message"]["content"]
    assert set(json.loads(text)) == {"city", "days"}


def test_a_demanded_text_ends_where_it_is_complete_or_is_cut_at_max_tokens(app: TwinApp) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "weather"}}
    formatted = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    forms = {"tool_calls": {"tool_choice": "required"}, "stop": {"tool_choice": named}, "stop ": formatted}
    for reason, form in forms.items():
        for given in ({}, {"max_tokens": 64}):
            whole = post(app, CHAT, HELLO | {"tools": tools} | form | given).json()
            choice, count = whole["choices"][0], whole["usage"]["completion_tokens"]
            text = choice["message"]["content"] or choice["message"]["tool_calls"][0]["function"]["arguments"]
            assert (choice["finish_reason"], json.loads(text)) == (reason.strip(), {"city": "lorem"})
            assert count == post(app, "/tokenize", {"prompt": text}).json()["count"]
        just = post(app, CHAT, HELLO | {"tools": tools, "max_tokens": count} | form).json()
        assert just["choices"][0]["finish_reason"] == reason.strip()
        cut = post(app, CHAT, HELLO | {"tools": tools, "max_tokens": count - 1} | form).json()
        message = cut["choices"][0]["message"]
        part = message["content"] or message["tool_calls"][0]["function"]["arguments"]
        assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", count - 1)
        assert part == text[: len(part)] != text


def test_several_answers_to_one_prompt(app: TwinApp) -> None:
    asked = HELLO | {"n": 3, "max_tokens": 6, "ignore_eos": True}
    whole = post(app, CHAT, asked).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 18
    assert (
        whole["usage"]["prompt_tokens"] == post(app, CHAT, HELLO | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
    )
    chunks = events(post(app, CHAT, asked | {"stream": True, "stream_options": {"include_usage": True}}))
    assert chunks[-1]["usage"]["completion_tokens"] == 18
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own] == [None] * 6 + ["length"]


def test_several_prompts_have_their_answers_one_behind_the_other(app: TwinApp) -> None:
    asked = {"prompt": ["Once upon a time", [5, 6, 7]], "n": 2, "max_tokens": 6, "ignore_eos": True, "echo": True}
    whole = post(app, "/v1/completions", asked).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"].startswith("Once upon a time") for choice in whole["choices"]] == [True, True, False, False]
    alone = post(app, "/v1/completions", asked | {"prompt": "Once upon a time"}).json()["usage"]["prompt_tokens"]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (alone + 3, 24)
    chunks = events(post(app, "/v1/completions", asked | {"stream": True, "stream_options": {"include_usage": True}}))
    assert chunks[-1]["usage"] | {"prompt_tokens_details": 0} == whole["usage"] | {"prompt_tokens_details": 0}
    for index in range(4):
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * 5 + ["length"]


def test_ids_of_a_prompt_are_the_models_or_the_tokenizers(app: TwinApp) -> None:
    tokens = post(app, "/tokenize", {"prompt": "Grüße, 12345 wind tunnels", "return_token_strs": True}).json()
    assert "".join(tokens["token_strs"]).startswith("Gr")
    asked = {"prompt": [*tokens["tokens"], 128255], "max_tokens": 1}
    assert post(app, "/v1/completions", asked).json()["usage"]["prompt_tokens"] == tokens["count"] + 1


def test_an_answer_is_one_of_the_choices_that_are_demanded(app: TwinApp) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    forms = {"yes": {"choice": ["yes", "no"]}, '{"city": "lorem"}': {"json": schema}, "{}": {"json_object": True}}
    for text, form in forms.items():
        choice = post(app, CHAT, HELLO | {"structured_outputs": form}).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_pages_of_any_site_may_ask(app: TwinApp) -> None:
    origin = {"Origin": "http://localhost:3000"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    before = run(app, lambda client: client.options(CHAT, headers=origin | asked))
    assert before.status_code == 200
    assert before.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in before.headers["access-control-allow-methods"]
    answers = [before, *(post(app, CHAT, HELLO | more) for more in ({"stream": True}, {"max_tokens": 1}, {"n": 0}))]
    answers += [run(app, lambda client: client.get("/metrics"))]
    assert [each.headers.get_list("access-control-allow-origin") for each in answers] == [["*"]] * 5
    assert run(app, lambda client: client.options(CHAT)).status_code == 405


@pytest.mark.full
def test_a_completion_without_a_length_has_16_tokens_and_a_chat_all_the_context(app: TwinApp) -> None:
    body = {"prompt": [1] * 4046, "ignore_eos": True}
    for more in ({}, {"max_tokens": None}):
        assert post(app, "/v1/completions", body | more).json()["usage"]["completion_tokens"] == 16
    usage = post(app, CHAT, HELLO | {"max_tokens": None, "ignore_eos": True}).json()["usage"]
    assert usage["total_tokens"] == 4096


def test_a_prompt_may_be_part_of_the_text(app: TwinApp) -> None:
    prompt = "Once upon a time, there was"
    asked = {"prompt": prompt, "echo": True, "max_tokens": 3, "ignore_eos": True}
    text = post(app, "/v1/completions", asked).json()["choices"][0]["text"]
    assert text.startswith(prompt)
    assert post(app, "/tokenize", {"prompt": text.removeprefix(prompt)}).json()["count"] == 3
    chunks = events(post(app, "/v1/completions", asked | {"stream": True}))
    assert [chunk["choices"][0]["text"].startswith(prompt) for chunk in chunks] == [True, False, False]
    alone = post(app, "/v1/completions", asked | {"max_tokens": 0, "logprobs": 1}).json()["choices"][0]
    assert alone["text"] == "".join(alone["logprobs"]["tokens"]) == prompt
    assert alone["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in alone["logprobs"]["token_logprobs"][1:])
    streamed = events(post(app, "/v1/completions", asked | {"max_tokens": 0, "logprobs": 1, "stream": True}))
    assert streamed[0]["choices"][0]["logprobs"] == alone["logprobs"]


def test_log_probabilities_have_the_form_of_the_api(app: TwinApp) -> None:
    asked = {"prompt": list(range(1000, 1032)), "logprobs": 3, "max_tokens": 5, "ignore_eos": True}
    choice = post(app, "/v1/completions", asked).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset, value, top in zip(
        logprobs["tokens"], logprobs["text_offset"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert choice["text"][offset:].startswith(token)
        assert next(iter(top)) == token
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert len(top) == 3
        assert top[token] == value < 0
        assert sum(math.exp(each) for each in top.values()) < 1
    talk = HELLO | {"logprobs": True, "top_logprobs": 2, "max_tokens": 4, "ignore_eos": True}
    choice = post(app, CHAT, talk).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    chunks = events(post(app, CHAT, talk | {"stream": True}))
    assert [len(chunk["choices"][0]["logprobs"]["content"]) for chunk in chunks[1:]] == [1] * 4


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, HELLO | {"model": "other"}, 404, "The model `other` does not exist."),
        (CHAT, HELLO | {"n": 0}, 400, "n must be from 1 to 128"),
        (CHAT, HELLO | {"best_of": 2}, 400, "best_of=2 is not simulated"),
        (CHAT, HELLO | {"top_logprobs": 2}, 400, "needs logprobs to be true"),
        (CHAT, HELLO | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs must be from 0 to 20"),
        ("/v1/completions", {"prompt": "a", "logprobs": "b"}, 400, "logprobs must be a whole number"),
        (CHAT, HELLO | {"max_tokens": 5000}, 400, "max_tokens=5000 cannot be greater than max_model_len=4096"),
        (CHAT, HELLO | {"max_tokens": 4090}, 400, "maximum context length is 4096 tokens. However, you requested 4090"),
        (CHAT, HELLO | {"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        (CHAT, HELLO | {"max_tokens": "many"}, 400, "max_tokens must be a whole number"),
        (CHAT, {"messages": []}, 400, "the prompt is empty"),
        (CHAT, {"messages": "hello"}, 400, "messages must be a list"),
        (CHAT, [], 400, "the body must be a JSON object"),
        ("/v1/completions", {"prompt": ["a", ""]}, 400, "the prompt is empty"),
        ("/v1/completions", {"prompt": ["a", [1.5]]}, 400, "prompt must be a list of token ids"),
        ("/v1/completions", {"prompt": [1, -2]}, 400, "not negative"),
        ("/v1/completions", {"prompt": [1, 128256]}, 400, "Token id 128256 is out of vocabulary"),
        ("/v1/completions", {"prompt": [[1], [10**15]]}, 400, "out of vocabulary"),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens=5 is not"),
        ("/v1/completions", {"prompt": "a", "stream": "false"}, 400, "stream must be true or false, not 'false'"),
        ("/detokenize", {"tokens": [10**18]}, 400, "out of vocabulary"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "does not exist"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "does not exist"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "xx"}, 400, "encoding_format must be float or base64"),
        (CHAT, HELLO | {"n": 2, "temperature": 0}, 400, "n must be 1 when using greedy sampling, got 2."),
        (CHAT, HELLO | {"stop": ["a", ""]}, 400, "none of them empty"),
        (CHAT, HELLO | {"stream": True, "stream_options": 5}, 400, "stream_options must be an object"),
        (CHAT, HELLO | {"tools": 5}, 400, "tools must be a list"),
        (CHAT, HELLO | {"logit_bias": 5}, 400, "logit_bias must be an object"),
        (CHAT, HELLO | {"logit_bias": {"the": 5}}, 400, "logit_bias must give a number for each token id"),
        (CHAT, HELLO | {"logit_bias": {"5": "a"}}, 400, "logit_bias must give a number for each token id"),
        (CHAT, HELLO | {"logit_bias": {"1": 2, "128256": 5}}, 400, "token_id(s) [128256] in logit_bias contain out-of"),
        (CHAT, HELLO | {"structured_outputs": {"choice": []}}, 400, "structured_outputs cannot be read"),
        (CHAT, HELLO | {"structured_outputs": {"json": "{bad"}}, 400, "structured_outputs cannot be read"),
        (CHAT, HELLO | {"structured_outputs": {"regex": "a+"}}, 400, "structured_outputs.regex is not simulated"),
        (CHAT, {"messages": [{"content": "a"}]}, 400, "a message needs a role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "a content of text or parts"),
        ("/v1/completions", {"prompt": [1] * 5000}, 400, "maximum context length"),
        ("/detokenize", {"tokens": ["a"]}, 400, "a list of token ids"),
        (CHAT, HELLO | {"tools": [{"function": "f"}], "tool_choice": {"function": 5}}, 400, "cannot be read"),
        (CHAT, HELLO | {"response_format": {"type": "json_schema", "json_schema": 7}}, 400, "cannot be read"),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**9}, 400, "dimensions must be a whole number"),
        ("/v1/embeddings", {"input": {"messages": []}}, 400, "input must be a text, token ids, or a list of either"),
        ("/v1/embeddings", {}, 400, "give an input, or messages"),
        (
            "/pooling",
            {"input": "a", "truncate_prompt_tokens": -2},
            400,
            "truncate_prompt_tokens must be a whole number",
        ),
        ("/v1/completions", {}, 400, "Either prompt or prompt_embeds must be provided"),
        (CHAT, HELLO | {"model": [1]}, 400, "model must be a text"),
        (CHAT, HELLO | {"max_tokens": 2.5}, 400, "max_tokens must be a whole number, not 2.5"),
        ("/v1/embeddings", {"input": [[" ", " "]]}, 400, "input must be a text, token ids, or a list of either"),
        ("/v1/embeddings", {"input": [[]]}, 400, "input must be a text, token ids, or a list of either"),
        ("/v1/completions", {"prompt": "a", "min_tokens": "b"}, 400, "min_tokens must be a whole number"),
        (CHAT, HELLO | {"priority": 10**22}, 400, "priority must be a whole number of 64 bits"),
        ("/tokenize", {"messages": [5]}, 400, "messages must be a list of messages"),
        (CHAT, HELLO | {"temperature": -1}, 400, "temperature must be a number from 0 to 2, not -1"),
        (CHAT, HELLO | {"temperature": 2.1}, 400, "temperature must be a number from 0 to 2"),
        (CHAT, HELLO | {"temperature": "x"}, 400, "temperature must be a number"),
        (CHAT, HELLO | {"temperature": True}, 400, "temperature must be a number"),
        (CHAT, HELLO | {"top_p": 2}, 400, "top_p must be a number above 0 and up to 1"),
        (CHAT, HELLO | {"top_p": 0}, 400, "top_p must be"),
        (CHAT, HELLO | {"stop": 5}, 400, "stop must be a text or a list of texts"),
        (CHAT, HELLO | {"stop": ["a", 5]}, 400, "stop must be"),
        (CHAT, HELLO | {"response_format": {"type": "zzz"}}, 400, "response_format must be one of text, json_object"),
        (CHAT, HELLO | {"response_format": "json"}, 400, "response_format must be one of"),
        (CHAT, HELLO | {"tool_choice": "required"}, 400, "tool_choice needs tools"),
        (CHAT, HELLO | {"tool_choice": "maybe", "tools": []}, 400, "tool_choice must be none, auto, required"),
        (
            CHAT,
            HELLO | {"min_tokens": 10, "max_tokens": 2},
            400,
            "min_tokens is 10, which is more than max_tokens of 2",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "a part of type 'image_url' is not simulated",
        ),
        (CHAT, HELLO | {"stream_options": {"include_usage": True}}, 400, "only be defined when `stream=True`"),
        ("/v1/nothing", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_what_cannot_be_served_is_answered_with_a_reason(
    app: TwinApp, path: str, body: Any, status: int, words: str
) -> None:
    answer = post(app, path, body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == status
    if "Not" in words:  # as of vLLM's routes
        assert answer.json()["error"]["type"] == words


def test_a_prompt_that_is_surely_too_long_is_not_cut_into_tokens(app: TwinApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(app.tokenizer), "encode", lambda *_: pytest.fail("it was cut into tokens"))
    long = {"role": "user", "content": "a b c d " * 2049}
    for path, body in (("/v1/completions", {"prompt": long["content"]}), (CHAT, {"messages": [long]})):
        answer = post(app, path, body)
        assert answer.status_code == 400
        assert "your prompt contains at least 4098 input tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "word " * 400}),
        ("/v1/completions", {"prompt": "word " * 400}),
        ("/v1/embeddings", {"input": ["word " * 400]}),
    ],
)
def test_others_are_answered_while_a_long_text_is_cut(
    app: TwinApp, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(server, "APART_BYTES", 1000)
    order, goes_on = [], threading.Event()

    def encode(text: str) -> list[int]:
        if text:
            order.append("cut" if goes_on.wait(10) else "nobody else")
        return [5] * 10

    monkeypatch.setattr(app.tokenizer, "encode", encode)

    async def talk(client: httpx.AsyncClient) -> int:
        cutting = asyncio.create_task(client.post(path, json=body))
        await asyncio.sleep(0.1)
        order.append(str((await client.get("/health")).status_code))
        goes_on.set()
        return (await cutting).status_code

    assert run(app, talk) == 200
    assert order == ["200", "cut"]


def test_fields_with_usual_values_are_accepted(app: TwinApp) -> None:
    usual = {"temperature": 0.7, "top_p": 1, "top_k": -1, "min_p": 0, "seed": 7, "stop": ["a"], "tool_choice": "none"}
    given = {"presence_penalty": -2, "repetition_penalty": 1.1, "response_format": {"type": "text"}, "priority": -1}
    assert post(app, CHAT, HELLO | usual | given | {"min_tokens": 2, "max_tokens": 2}).status_code == 200


def test_pages_beside_the_api(app: TwinApp) -> None:
    def get(path: str) -> Any:
        return run(app, lambda client: client.get(path)).json()

    models = get("/v1/models")["data"]
    assert [model["id"] for model in models] == ["llama", "lora-a"]
    assert models[0]["max_model_len"] == 4096
    assert [get(f"/v1/models/{model['id']}") for model in models] == models
    unknown = run(app, lambda client: client.get("/v1/models/org/other"))
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    healthy = run(app, lambda client: client.get("/health"))
    assert (healthy.status_code, healthy.content) == (200, b"")
    assert get("/version")["version"] == str(app.twin.deployment.first.setup.engine.version)
    assert post(app, CHAT, HELLO | {"model": "lora-a", "max_tokens": 1}).json()["model"] == "lora-a"


def test_embeddings_have_the_size_that_was_asked_for(app: TwinApp) -> None:
    asked = {"input": ["one text", "another text"], "dimensions": 32}
    answer = post(app, "/v1/embeddings", asked).json()
    vectors = [entry["embedding"] for entry in answer["data"]]
    assert [len(vector) for vector in vectors] == [32, 32]
    assert post(app, "/v1/embeddings", {"input": [10**9]}).json()["error"]["param"] == "input"
    assert vectors[0] != vectors[1]
    coded = post(app, "/v1/embeddings", asked | {"encoding_format": "base64"}).json()
    assert len(base64.b64decode(coded["data"][0]["embedding"])) == 4 * 32


@pytest.mark.full
def test_an_encoder_answers_with_vectors_and_scores_and_no_text() -> None:
    app = twin_app(msgspec.structs.replace(scenario_of({}), model="BAAI/bge-m3"), None)
    answer = post(app, "/v1/embeddings", {"input": ["one text", "another"], "dimensions": 8}).json()
    assert [len(entry["embedding"]) for entry in answer["data"]] == [8, 8]
    asked = {"query": "what", "documents": ["one", "another text", "one"], "top_n": 2}
    ranked = post(app, "/v1/rerank", asked).json()["results"]
    assert len(ranked) == 2
    assert ranked[0]["relevance_score"] >= ranked[1]["relevance_score"]
    assert all(entry["document"]["text"] == asked["documents"][entry["index"]] for entry in ranked)  # type: ignore[index]
    refused = post(app, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert (refused.status_code, "makes no text" in refused.text) == (400, True)
    assert len(post(app, "/v2/rerank", asked | {"top_n": 0}).json()["results"]) == 3
    for body in ({"documents": ["a"]}, {"query": "a", "documents": []}, asked | {"top_n": -1}):
        assert post(app, "/rerank", body).status_code == 400


def test_a_failure_has_the_form_of_the_api_and_takes_no_place(caplog: pytest.LogCaptureFixture) -> None:
    app, asked = twin_app(scenario_of({}), None, max_requests=1), {"prompt": "hi", "max_tokens": 2}
    place = app.twin.live.requests.__setitem__
    app.twin.live._reset = lambda row: place("no such field", row)  # type: ignore[method-assign]
    failed = post(app, "/v1/completions", asked)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "InternalServerError")
    assert "POST /v1/completions failed" in caplog.text
    del app.twin.live._reset
    assert post(app, "/v1/completions", asked).status_code == 200


def test_a_full_twin_refuses_more() -> None:
    app = twin_app(scenario_of({}), 1.0, max_requests=2)

    async def talk(client: httpx.AsyncClient) -> list[int]:
        asked = HELLO | {"model": None, "max_tokens": 60, "ignore_eos": True}
        return [each.status_code for each in await asyncio.gather(*(client.post(CHAT, json=asked) for _ in range(3)))]

    assert sorted(run(app, talk)) == [200, 200, 503]


def test_scores_of_pairs_have_vllms_form(app: TwinApp) -> None:
    forms = ({"queries": "a", "documents": ["b", "c"]}, {"text_1": "a", "text_2": ["b", "c"]})
    whole = [post(app, path, form).json() for path, form in zip(("/score", "/v1/score"), forms, strict=True)]
    rows = whole[0]["data"]
    assert [(row["index"], row["object"], 0 <= row["score"] <= 1) for row in rows] == [
        (0, "score", True), (1, "score", True)
    ]  # fmt: skip
    assert whole[1]["data"] == rows
    assert whole[0]["usage"]["prompt_tokens"] == whole[0]["usage"]["total_tokens"] > 0
    both = post(app, "/score", {"data_1": ["a", "a"], "data_2": ["b", "c"]}).json()
    assert [row["score"] for row in both["data"]] == [row["score"] for row in rows]
    for body, words in (
        ({"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "Input lengths must be either 1:1, 1:N or N:N"),
        ({"queries": [], "documents": ["c"]}, "queries must be a text or a list of texts"),
        ({"queries": "a"}, "give queries and documents"),
    ):
        assert words in post(app, "/score", body).json()["error"]["message"]


def test_classes_and_pooled_vectors_have_vllms_form(app: TwinApp) -> None:
    (row,) = post(app, "/classify", {"input": "good"}).json()["data"]
    assert row["label"] in ("LABEL_0", "LABEL_1")
    assert (row["num_classes"], sum(row["probs"])) == (2, pytest.approx(1))
    (pooled,) = post(app, "/pooling", {"messages": HELLO["messages"], "dimensions": 8}).json()["data"]
    assert (pooled["object"], len(pooled["data"])) == ("pooling", 8)


def test_prompts_for_vectors_and_scores_are_cut_where_that_is_asked_for(app: TwinApp) -> None:
    """`vllm bench serve` asks for it with -1."""
    asked = {"query": "a", "documents": ["b " * 20000], "truncate_prompt_tokens": -1}
    assert post(app, "/rerank", asked).json()["usage"]["prompt_tokens"] == 4095
    for given in ("word " * 100, list(range(100))):
        body = {"input": given, "truncate_prompt_tokens": 7}
        assert post(app, "/v1/embeddings", body).json()["usage"]["prompt_tokens"] == 7
    assert post(app, "/rerank", asked | {"truncate_prompt_tokens": None}).status_code == 400


def test_a_whole_number_may_be_written_as_a_fraction(app: TwinApp) -> None:
    answer = post(app, CHAT, HELLO | {"max_tokens": 3.0, "n": 1.0, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_key_is_needed_where_vllm_needs_it(app: TwinApp) -> None:
    app.require_key(["one", "two"])
    for header in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}):
        answer = run(app, lambda client, headers=header: client.get("/v1/models", headers=headers))
        assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    for key in ("one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        assert run(app, lambda client, given=headers: client.get("/v1/models", headers=given)).status_code == 200
    assert post(app, "/generate", {"text": "a"}).status_code == 401
    for path in ("/health", "/metrics", "/version", "/load"):
        assert run(app, lambda client, at=path: client.get(at)).status_code == 200


def test_a_body_that_vllm_cannot_read_is_a_bad_request(app: TwinApp) -> None:
    plain = run(app, lambda client: client.post(CHAT, content=json.dumps(HELLO)))
    assert "Only 'application/json' is allowed" in plain.json()["error"]["message"]
    headers = {"content-type": "application/json; charset=utf-8"}
    for content in ("{bad", "[]", "", "\xff", '{"a":' * 3000 + "1" + "}" * 3000):
        answer = run(
            app, lambda client, body=content: client.post(CHAT, content=body.encode("latin-1"), headers=headers)
        )
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "Bad Request")
