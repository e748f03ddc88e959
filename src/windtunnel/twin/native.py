"""SGLang's own API: `/generate`, as of `sglang/srt/managers/io_struct.py` and `tokenizer_manager.py` in 0.5.23."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windtunnel.schema import read_yaml
from windtunnel.twin.engine import Answer
from windtunnel.twin.protocol import Asked, Events, Limits, RequestError, Words, ask, malformed
from windtunnel.twin.tokens import Tokenizer

MOST_TOKENS = 128
"""`max_new_tokens` of a request that says none."""
_FIELDS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))


def ask_native(
    body: Mapping[str, Any], kind: str, tokenizer: Tokenizer, words: Words, limits: Limits, number: int
) -> Asked:
    """Read the body of a request; arguments and errors are those of `ask`."""
    sampling, text, ids = body.get("sampling_params") or {}, body.get("text"), body.get("input_ids")
    if not isinstance(sampling, dict):
        raise malformed("sampling_params must be an object", "sampling_params")
    if (text is None) == (ids is None):
        raise malformed("Either text, input_ids or input_embeds should be provided.", "text")
    for name, harmless in _FIELDS["refused"].items():
        if body.get(name) not in (None, harmless):
            raise RequestError(f"{name} is not simulated", param=name)
    for name in ("regex", "ebnf", "structural_tag"):
        if sampling.get(name):
            raise RequestError(f"sampling_params.{name} is not simulated", param=name)
    asked: dict[str, Any] = {"prompt": ids if text is None else text, "max_tokens": MOST_TOKENS}
    named = _FIELDS["sampling"].items()
    asked |= {other: sampling[name] for name, other in named if sampling.get(name) is not None}
    limits.check_model(body.get("lora_path"), is_exact=True)
    asked |= {"model": body.get("lora_path"), "stream": body.get("stream"), "priority": body.get("priority")}
    if sampling.get("json_schema"):
        asked["structured_outputs"] = {"json": sampling["json_schema"]}
    if body.get("return_logprob"):
        asked["logprobs"] = 0
    read = ask(asked, "completion", tokenizer, words, limits, number)
    read.kind = kind
    read.given = {
        "is_list": len(read.choices) > 1 or isinstance(text, list) or (ids is not None and isinstance(ids[0], list))
    }
    return read


def _meta(asked: Asked, index: int, answer: Answer, is_last: bool = True) -> dict[str, Any]:
    choice, count = asked.choices[index], answer.sent
    reason = (
        {"type": "length", "length": count} if choice.finish_reason == "length" else {"type": "stop", "matched": None}
    )
    meta: dict[str, Any] = {
        "id": asked.stream_id + (f"-{index}" if asked.given["is_list"] else ""),
        "finish_reason": reason if is_last else None,
        "prompt_tokens": answer.input_tokens,
        "weight_version": "default",
        "num_retractions": answer.num_preemptions,
        "completion_tokens": count,
        "cached_tokens": answer.cached_tokens,
    }
    if is_last:
        meta["e2e_latency"] = answer.finish_s - answer.arrival_s
    if choice.logprobs is not None:
        values = choice.logprobs.document(0, count)["token_logprobs"]
        rows = [[value, token, None] for value, token in zip(values, choice.ids, strict=False)]
        meta |= {"input_token_logprobs": [], "output_token_logprobs": rows}
    return meta


def native_document(asked: Asked, answers: Sequence[Answer]) -> Any:
    """Return the whole reply to a request that does not stream: one answer, or a list of them."""
    rows = [
        {
            "text": json.loads(b'"' + b"".join(choice.pieces) + b'"'),
            "output_ids": choice.ids,
            "meta_info": _meta(asked, index, answer),
        }
        for index, (choice, answer) in enumerate(zip(asked.choices, answers, strict=True))
    ]
    return rows if asked.given["is_list"] else rows[0]


class NativeEvents(Events):
    """Makes events each of which has all the answer's text until then."""

    _text = b""

    def tokens(self, begin: int, answer: Answer, is_last: bool) -> bytes:
        self._text += b"".join(self.choice.pieces[begin : answer.sent])
        rest: dict[str, Any] = {"output_ids": self.choice.ids[: answer.sent]}
        rest["meta_info"] = _meta(self.asked, self.index, answer, is_last)
        if self.asked.given["is_list"]:
            rest["index"] = self.index
        return b'data: {"text":"%b",%b\n\n' % (self._text, json.dumps(rest, separators=(",", ":")).encode()[1:])
