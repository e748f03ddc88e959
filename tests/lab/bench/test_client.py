"""The client against a server whose delays are known."""

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.fake_server import fake_server
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.lab.bench.client import Endpoint, bench, shared_prompts
from windtunnel.lab.servers import started
from windtunnel.lab.tiny_models import TINY, write_tiny_model
from windtunnel.metrics.client import CLIENT_COLUMNS, client_summary
from windtunnel.report.lab.bench import vllm_document
from windtunnel.workload.arrivals import ClosedLoop
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

pytest.importorskip("httpx", reason="httpx is not installed; the client speaks with it")

FIRST_S, GAP_S = 0.05, 0.01


def load_of(n: int, **fields: Any) -> RequestArrays:
    load = RequestArrays(np.arange(n) * 0.01, np.full(n, 12), np.full(n, 4), np.zeros(n, np.int64))
    return replace(load, **fields)


def test_an_open_loop_measures_the_servers_delays() -> None:
    with fake_server(FIRST_S, GAP_S) as (url, seen):
        run = bench(Endpoint(url), load_of(12, num_warmup=2))
    assert run.model == "fake"
    assert set(run.requests.columns) == set(CLIENT_COLUMNS)
    summary = client_summary(run.requests, run.tokens)
    assert (summary.num_requests, summary.num_failed) == (10, 0)
    assert FIRST_S <= summary.ttft_s.p50 < FIRST_S + 0.3  # a busy machine adds to it
    assert summary.tpot_s is not None
    assert summary.itl_s is not None
    assert 0.9 * GAP_S <= summary.tpot_s.p50 < GAP_S + 0.1
    assert summary.itl_s.mean == pytest.approx(summary.tpot_s.mean)  # all answers are equally long
    assert summary.e2e_s.mean == pytest.approx(summary.ttft_s.mean + 3 * summary.tpot_s.mean)
    # Arrivals count from the start of the measurement, warm-up being over.
    planned_s = run.requests["arrival_s"] - run.requests["sent_late_s"]
    np.testing.assert_allclose(planned_s[2:], np.arange(2, 12) * 0.01, atol=1e-3)
    assert [len(body["prompt"]) for body in seen.bodies] == [12] * 12
    assert all(body["ignore_eos"] and body["stream"] for body in seen.bodies)
    assert seen.most_under_way > 4


def test_the_part_that_only_ends_a_stream_is_no_token() -> None:
    with fake_server(0.01, 0.002, counts=False) as (url, _):
        run = bench(Endpoint(url, token_ids=False), load_of(3))
    assert run.requests["output_tokens"].tolist() == [4, 4, 4]
    assert len(run.tokens) == 12
    assert run.num_uncounted == 3  # nobody says how many tokens they had
    with fake_server(0.01, 0.002) as (url, _):
        assert bench(Endpoint(url), load_of(3)).num_uncounted == 0


def test_what_the_servers_cache_had_is_kept_for_each_prompt() -> None:
    """vLLM and SGLang leave it out of an answer where it is nothing."""
    load = load_of(6, input_tokens=np.array([12, 20, 12, 20, 12, 20]), num_warmup=1)
    with fake_server(0.01, 0.001, cached=lambda length: 16 if length == 20 else 0) as (url, _):
        run = bench(Endpoint(url), load)
    assert run.requests["cached_tokens"].tolist() == [0, 16, 0, 16, 0, 16]
    assert client_summary(run.requests, run.tokens).cache_hit_fraction == pytest.approx(48 / 84)
    with fake_server(0.01, 0.001) as (url, _):
        silent = bench(Endpoint(url), load)
    assert "cached_tokens" not in silent.requests.columns
    assert client_summary(silent.requests, silent.tokens).cache_hit_fraction is None


def test_a_closed_loop_keeps_its_concurrency() -> None:
    with fake_server(0.02, 0.002) as (url, seen):
        run = bench(Endpoint(url), load_of(12, arrival_s=np.zeros(12), output_tokens=np.full(12, 3), concurrency=3))
    assert seen.most_under_way == 3
    assert 2 < client_summary(run.requests, run.tokens).mean_present <= 3.01


def test_a_capped_rate_sends_no_earlier_than_released_and_no_more_than_the_cap() -> None:
    released_s = np.arange(12) * 0.01
    with fake_server(0.05, 0.002) as (url, seen):
        run = bench(Endpoint(url), load_of(12, arrival_s=released_s, output_tokens=np.full(12, 3), concurrency=2))
    assert seen.most_under_way == 2
    assert (run.requests["arrival_s"] >= released_s).all()
    # Two at a time take 0.05 s and more each: the last is sent long after its release.
    assert run.requests["arrival_s"].max() > 0.2


def test_turns_wait_for_each_other_and_share_their_beginnings() -> None:
    # Two sessions of two turns; node 1 continues node 0.
    prefixes = PrefixArrays(np.array([-1, 0]), np.array([6, 4]), np.array([0, -1, 1, -1]), np.full(4, -1))
    shared = shared_prompts(prefixes, 500)
    load = load_of(
        4,
        arrival_s=np.zeros(4),
        input_tokens=np.array([8, 8, 14, 8]),
        output_tokens=np.full(4, 3),
        previous=np.array([-1, -1, 0, 1]),
        think_s=np.array([0, 0, 0.05, 0.05]),
        prefixes=prefixes,
    )
    with fake_server(0.02, 0.002) as (url, seen):
        run = bench(Endpoint(url, vocabulary=500), load)
    sent, end = run.requests["arrival_s"], run.requests["finish_s"]
    assert (sent[2:] >= end[:2] + 0.049).all()
    prompts = {len(body["prompt"]): body["prompt"] for body in seen.bodies}
    assert prompts[14][:6] == shared[0]
    assert prompts[14][:10] == shared[2]
    assert shared[2][:6] == shared[0]


def test_failures_are_counted_and_named() -> None:
    with fake_server(0.01, 0.001, fails=2) as (url, _):
        run = bench(Endpoint(url), load_of(6))
        assert client_summary(run.requests, run.tokens).num_failed == 2
        assert run.errors == ('status 500: {"error": "out of luck"}',)
        assert np.isnan(run.requests["e2e_s"][run.requests["failed"]]).all()
    with fake_server(fails=99) as (url, _), pytest.raises(WindtunnelError, match="every request failed: status 500"):
        bench(Endpoint(url), load_of(3))


def test_answers_that_do_not_come_or_are_no_stream_are_told_from_others() -> None:
    with (
        fake_server(5.0, 0.001) as (url, _),
        pytest.raises(WindtunnelError, match="every request failed: no part of the answer for 0"),
    ):
        bench(Endpoint(url, timeout_s=0.3), load_of(2))
    with (
        fake_server(fails=99, refusal=(200, "Welcome")) as (url, _),
        pytest.raises(WindtunnelError, match="the answer is application/json and no event stream") as raised,
    ):
        bench(Endpoint(url), load_of(2))
    assert raised.value.hint == "is it the address of an OpenAI-compatible API?"


def test_an_interrupted_run_keeps_what_has_ended() -> None:
    former = signal.getsignal(signal.SIGINT)
    load = load_of(12, arrival_s=np.arange(12) * 0.1, num_warmup=2)
    with fake_server(0.01, 0.001) as (url, seen):
        run = bench(Endpoint(url), load, notify=lambda done, _: done == 5 and signal.raise_signal(signal.SIGINT))
    assert run.num_left == 12 - len(run.requests) > 0
    assert len(run.requests) <= len(seen.bodies) < 12
    assert run.requests["is_warmup"].tolist() == [True, True] + [False] * (len(run.requests) - 2)
    assert run.asked_output_tokens == run.requests["output_tokens"][2:].sum() == 4 * (len(run.requests) - 2)
    assert not run.requests["failed"].any()
    assert signal.getsignal(signal.SIGINT) is former


def test_a_run_that_is_interrupted_before_the_first_answer_has_no_result() -> None:
    load = load_of(6, arrival_s=np.arange(6) * 0.1, num_warmup=2)
    with fake_server(0.01, 0.001) as (url, _), pytest.raises(KeyboardInterrupt):
        bench(Endpoint(url), load, notify=lambda done, _: done == 2 and signal.raise_signal(signal.SIGINT))
    threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
    with fake_server(3.0, 0.1) as (url, _), pytest.raises(KeyboardInterrupt):
        bench(Endpoint(url), load_of(2))


@pytest.mark.parametrize(("api", "words"), [("chat", True), ("completions", True)])
def test_servers_that_take_no_token_ids(api: str, words: bool) -> None:
    with fake_server(0.01, 0.001) as (url, seen):
        bench(Endpoint(url, "fake", api, not words, ignore_eos=False), load_of(2))
    body = seen.bodies[0]
    text = body["messages"][0]["content"] if api == "chat" else body["prompt"]
    assert len(text.split()) == 12
    assert "ignore_eos" not in body


def test_wrong_endpoints_are_answered_with_a_sentence() -> None:
    with pytest.raises(InputError, match="is not an endpoint"):
        Endpoint("localhost:8000/v1")
    with pytest.raises(InputError, match="is the address of one API"):
        Endpoint("http://localhost:8000/v1/chat/completions", api="chat")
    with pytest.raises(InputError, match="there is no API 'completion'"):
        Endpoint("http://localhost/v1", api="completion")
    with pytest.raises(InputError, match="no server answers at"):
        bench(Endpoint("http://127.0.0.1:9/v1"), load_of(1))
    with fake_server(models=False) as (url, _):
        for address, hint in ((url, "name the model: --served-model"), (url[:-3], "is /v1 in the address?")):
            with pytest.raises(InputError, match="models answers 404") as raised:
                bench(Endpoint(address), load_of(1))
            assert raised.value.hint == hint


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        ((404, "Not Found"), "is /v1 in the address?"),
        ((401, "Unauthorized"), "give the server's key: --api-key, or OPENAI_API_KEY"),
        ((400, "Token id 31999 is out of vocabulary"), "--vocabulary"),
        ((400, "This model's maximum context length is 16 tokens"), "shorter --input-tokens, --output-tokens"),
        ((400, "max_tokens=99 cannot be greater than max_model_len=16"), "shorter --input-tokens, --output-tokens"),
        ((404, "The model `fake` does not exist."), "name the model: --served-model"),
        ((400, "unknown field ignore_eos"), "compare `--api`, `--words` and `--no-ignore-eos`"),
    ],
)
def test_where_every_request_fails_the_hint_fits_the_reason(refusal: tuple[int, str], hint: str) -> None:
    with fake_server(fails=99, refusal=refusal) as (url, _), pytest.raises(WindtunnelError, match=refusal[1]) as raised:
        bench(Endpoint(url.removesuffix("/v1"), "fake"), load_of(2))
    assert raised.value.hint == hint


def test_the_result_is_read_as_that_of_vllms_client(tmp_path: Path) -> None:
    from windtunnel.formats.clients.read import read_client_results

    with fake_server(0.01, 0.001) as (url, _):
        run = bench(Endpoint(url), load_of(5))
    summary = client_summary(run.requests, run.tokens)
    path = tmp_path / "result.json"
    sent = ClosedLoop(concurrency=9, rate_per_s=100.0, cv=2.0)
    path.write_text(json.dumps(vllm_document(summary, run.requests, run.tokens, sent, run.model)))
    (found,) = read_client_results(path)
    assert found.num_requests == 5
    assert found.model == run.model
    assert (found.rate_per_s, found.gap_cv, found.concurrency) == (100.0, 2.0, 9)
    assert found.measured["ttft"] == pytest.approx(summary.ttft_s.mean)
    assert found.measured["throughput"] == pytest.approx(summary.output_tokens_per_s)
    document = json.loads(path.read_text())
    assert [len(gaps) for gaps in document["itls"]] == [3] * 5


@pytest.mark.full
def test_an_engine_that_dies_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'vlm' cannot be started"), started("vlm", "model"):
        pass
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such model\nexit 3\n")
    python.chmod(0o755)
    with (
        pytest.raises(WindtunnelError, match="vllm ended with 3: no such model"),
        started("vllm", "model", python=str(python)),
    ):
        pass


def test_the_tiny_model_is_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    last = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    assert len(content) == 8 + length + last
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(int(TINY["vocab_size"])))
    assert write_tiny_model(tmp_path / "again").joinpath("model.safetensors").read_bytes() == content
