"""SGLang's own API of a twin."""

import json
from itertools import pairwise
from typing import Any

import pytest

from live_twins import post, run
from windtunnel.twin.server import TwinApp

ASKED = {"text": "Hello there", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0}}


def test_an_answer_has_sglangs_form(app: TwinApp) -> None:
    whole = post(app, "/generate", ASKED | {"return_logprob": True, "lora_path": "lora-a"}).json()
    meta = whole["meta_info"]
    assert post(app, "/tokenize", {"prompt": whole["text"]}).json()["tokens"] == whole["output_ids"]
    assert (meta["completion_tokens"], meta["finish_reason"]) == (5, {"type": "length", "length": 5})
    assert meta["prompt_tokens"] == post(app, "/tokenize", {"prompt": "Hello there"}).json()["count"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == whole["output_ids"]
    several = post(app, "/generate", {"input_ids": [[5, 6, 7], [8, 9]]} | {"sampling_params": {"n": 2}}).json()
    assert [each["meta_info"]["prompt_tokens"] for each in several] == [3, 3, 2, 2]
    assert all(each["meta_info"]["completion_tokens"] <= 128 for each in several)
    schema = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}})
    formed = post(app, "/generate", {"text": "Hi", "sampling_params": {"json_schema": schema}}).json()
    assert (json.loads(formed["text"]), formed["meta_info"]["finish_reason"]["type"]) == ({"city": "lorem"}, "stop")


def test_every_event_has_all_the_text_until_then(app: TwinApp) -> None:
    for more, count in (({}, 1), ({"text": ["Hello", "there"]}, 2)):
        answer = post(app, "/generate", ASKED | {"stream": True} | more)
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        events = [json.loads(line) for line in lines[:-1]]
        assert (lines[-1], len(events)) == ("[DONE]", 5 * count)
        for index in range(count):
            own = [each for each in events if each.get("index", 0) == index]
            assert [each["meta_info"]["completion_tokens"] for each in own] == [1, 2, 3, 4, 5]
            assert all(after["text"].startswith(before["text"]) for before, after in pairwise(own))
            assert [each["meta_info"]["finish_reason"] is None for each in own] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "Either text, input_ids or input_embeds should be provided."),
        ({"text": "a", "input_ids": [1]}, 400, "Either text, input_ids"),
        ({"text": "a", "sampling_params": 5}, 400, "sampling_params must be an object"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, 400, "max_tokens must be at least 1, got -1"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, 400, "sampling_params.regex is not simulated"),
        ({"text": "a", "image_data": "x"}, 400, "image_data is not simulated"),
        ({"text": "a", "lora_path": "other"}, 404, "The model `other` does not exist."),
        ({"input_ids": []}, 400, "the prompt is empty"),
        ({"input_ids": {"a": 1}}, 400, "prompt must be a list of token ids"),
        ({"input_ids": [1] * 5000}, 400, "maximum context length is 4096"),
    ],
)
def test_what_cannot_be_generated_is_refused(app: TwinApp, body: dict[str, Any], status: int, words: str) -> None:
    answer = post(app, "/generate", body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_sglang_says_what_it_serves(app: TwinApp) -> None:
    def get(path: str) -> Any:
        return run(app, lambda client: client.get(path)).json()

    assert get("/model_info") == get("/get_model_info")
    assert (get("/model_info")["served_model_name"], get("/model_info")["is_generation"]) == ("llama", True)
    assert get("/server_info")["context_length"] == 4096
    memory = app.twin.deployment.first.memory
    assert get("/server_info")["max_total_num_tokens"] == memory.num_blocks * memory.block_size
    assert run(app, lambda client: client.get("/health_generate")).status_code == 200
