"""Whatever a client sends, the twin answers in the API's form, loses no place, and serves the next request."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import cases_to_try
from fuzz.edits import EXTREME, SMALL, TEXTS
from live_twins import client_of
from windtunnel.twin.server import TwinApp

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "llama",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "temperature": 0.5,
        "n": 1,
        "stop": ["x"],
        "priority": 0,
        "seed": 1,
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "stream_options": {"include_usage": True},
        "top_logprobs": 2,
        "logprobs": True,
        "user": "u",
        "structured_outputs": {"choice": ["a", "b"]},
    },
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4, "logprobs": 1, "echo": True, "min_tokens": 1, "stop": "x"},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ],
        "instructions": "Be brief.",
        "max_output_tokens": 4,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "stream": True,
        "store": False,
        "previous_response_id": None,
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "truncation": "disabled",
    },
    "/v1/messages": {
        "model": "llama",
        "max_tokens": 40,
        "messages": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
        ],
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stream": True,
        "top_k": 5,
    },
    "/v1/messages/count_tokens": {
        "model": "llama",
        "messages": [{"role": "user", "content": "Hello"}],
        "system": "Be brief.",
        "tools": [],
    },
    "/generate": {
        "text": "Hello",
        "input_ids": None,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.5},
        "stream": True,
        "return_logprob": True,
        "lora_path": None,
    },
    "/score": {"queries": "a", "documents": ["b", "c"]},
    "/rerank": {"query": "a", "documents": ["b", "c"], "top_n": 1},
    "/classify": {"input": ["a", "b"]},
    "/pooling": {"messages": [{"role": "user", "content": "Hello"}], "dimensions": 8},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    "/tokenize": {"messages": [{"role": "user", "content": "Hello"}]},
    "/detokenize": {"tokens": [1, 2]},
}
scalars = st.one_of(
    st.sampled_from(SMALL),
    st.sampled_from(EXTREME),
    st.sampled_from(TEXTS),
    st.none(),
    st.booleans(),
    st.text(max_size=9),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(BODIES)))
    body = dict(BODIES[path])
    for name in draw(st.lists(st.sampled_from(sorted(body)), min_size=1, max_size=3)):
        if draw(st.booleans()):
            body[name] = draw(values)
        else:
            body.pop(name, None)
    return path, body


def post(app: TwinApp, path: str, body: Any) -> tuple[int, str]:
    async def talk() -> tuple[int, str]:
        async with client_of(app) as client:
            answer = await client.post(path, json=body)
            return answer.status_code, answer.text

    return asyncio.run(talk())


@pytest.mark.full
def test_any_request_is_answered_and_leaves_no_trace(app: TwinApp) -> None:
    free = len(app.twin.live._free)

    @settings(max_examples=cases_to_try(400), deadline=None)
    @given(requests())
    def answers(asked: tuple[str, dict[str, Any]]) -> None:
        try:
            status, text = post(app, *asked)
        except ValueError:  # what JSON cannot hold is not sent
            return
        assert status in (200, 400, 404, 422), (asked, text)
        assert status == 200 or '"message"' in text, (asked, text)
        assert len(app.twin.live._free) == free, asked

    answers()
    status, text = post(app, "/v1/completions", {"prompt": "Hello", "max_tokens": 2})
    assert status == 200, text
