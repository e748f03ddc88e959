"""Drive an OpenAI-compatible server with the simulator's workloads, streaming, open or closed loop."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from windtunnel.compiled.arrays import Ints
from windtunnel.errors import InputError, WindtunnelError, check_known, import_extra
from windtunnel.metrics.client import client_tables
from windtunnel.metrics.records import Table
from windtunnel.workload.generate.prefixes import PrefixArrays
from windtunnel.workload.generate.requests import RequestArrays

if TYPE_CHECKING:
    import httpx

APIS = ("completions", "chat")
FIRST_TOKEN_ID = 10
"""First token id of random prompts: smaller ones often mean begin, end and padding."""
NO_TOKEN = "the stream ended without a token"
WORD = "tok"
"""Word that prompts repeat, for servers that take no token ids."""

Notify = Callable[[int, int], None]
"""Called with (requests answered, requests in all)."""
NAME_MODEL = "name the model: --served-model"
GIVE_KEY = "give the server's key: --api-key, or OPENAI_API_KEY"
MODELS_S = 30.0
"""Longest wait for a server's list of models."""
SILENCE_S = 10.0
"""Time without any answer after which the user is told, and again whenever it has doubled."""
TellSilence = Callable[[float], None]
"""Called with the seconds since the last answer."""


@dataclass(frozen=True)
class Endpoint:
    """A server's address, model and API."""

    url: str
    """Address, including the version: `http://localhost:8000/v1`."""
    model: str | None = None
    """Model to request; None: the first that the server lists."""
    api: str = "completions"
    token_ids: bool = True
    """Prompts are lists of token ids, of exactly the planned length; False: as many words."""
    vocabulary: int = 1000
    """Upper bound of the token ids of prompts."""
    ignore_eos: bool = True
    """Answers have exactly the planned length (vLLM, SGLang); other servers refuse the field."""
    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": 0.0})
    """Sampling parameters of every request, by their names in the API."""
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_known(self.api, APIS, f"there is no API {self.api!r}")
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"{self.url!r} is not an endpoint", "for instance http://localhost:8000/v1")
        if self.url.rstrip("/").endswith("completions"):
            raise InputError(f"{self.url} is the address of one API", "end it with /v1; --api says which API")


@dataclass
class _BenchAnswer:
    input_tokens: int
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache; None where the server does not say."""
    sent_s: float = np.nan
    late_s: float = 0.0
    part_times_s: list[float] = field(default_factory=list)
    is_counted: bool = False
    """Whether the server says how many tokens it has; else its parts are counted."""
    error: str | None = None
    has_ended: bool = False
    """Answered whole, or failed."""


@dataclass(frozen=True)
class BenchRun:
    """The result of a run, finished or interrupted."""

    model: str
    requests: Table
    tokens: Table
    errors: tuple[str, ...]
    """Distinct reasons of failed requests."""
    asked_output_tokens: int
    asked_input_tokens: int
    num_uncounted: int = 0
    """Answers of which the server did not say how many tokens they have: one for each part was taken."""
    num_left: int = 0
    """Requests without an answer when the run was interrupted; they are in no table."""


def bench(
    endpoint: Endpoint,
    load: RequestArrays,
    seed: int = 0,
    notify: Notify = lambda _done, _total: None,
    tell_silence: TellSilence = lambda _silence_s: None,
) -> BenchRun:
    """Send a workload to a server and record the answers.

    Args:
        load: the requests to send; in a closed loop each at its arrival time or later.

    Raises:
        MissingExtraError: httpx is not installed.
        InputError: nobody answers there, or it has no such model.
        WindtunnelError: every request failed.
        KeyboardInterrupt: it was interrupted before any measured request was answered; later than that, the answers
            until then are returned.
    """
    httpx = import_extra("httpx", "bench")
    client = _BenchClient(endpoint, load, seed, (notify, tell_silence))
    asyncio.run(client.measure(httpx))
    return _result(client, load)


def _result(client: _BenchClient, load: RequestArrays) -> BenchRun:
    """Return the records of the requests that have ended."""
    rows = np.flatnonzero([answer.has_ended for answer in client.answers])
    answers, measured = [client.answers[row] for row in rows.tolist()], rows[rows >= load.num_warmup]
    if not measured.size:
        raise KeyboardInterrupt
    errors = tuple(dict.fromkeys(answer.error for answer in answers if answer.error))
    num_warmup = rows.size - measured.size
    if errors and all(answer.error for answer in answers[num_warmup:]):
        raise WindtunnelError(f"every request failed: {errors[0]}", _hint(errors[0], client.endpoint.url))
    requests, tokens = client_tables(
        np.array([answer.sent_s for answer in answers]),
        np.array([answer.late_s for answer in answers]),
        np.array([answer.input_tokens for answer in answers], np.int64),
        np.array([answer.output_tokens for answer in answers], np.int64),
        [np.array([] if answer.error else answer.part_times_s) for answer in answers],
        num_warmup,
        cached_tokens=_cached_tokens(answers),
    )
    num_uncounted = sum(not (answer.error or answer.is_counted) for answer in answers[num_warmup:])
    asked = int(load.output_tokens[measured].sum()), int(load.input_tokens[measured].sum())
    return BenchRun(client.model, requests, tokens, errors, *asked, num_uncounted, len(client.answers) - rows.size)


@contextmanager
def _ended_by_signals(task: asyncio.Task[Any]) -> Iterator[list[int]]:
    """Let Ctrl-C, SIGTERM and SIGHUP cancel a task, and tell their own handlers; yields the signals that came."""
    loop, came, former = asyncio.get_running_loop(), list[int](), dict[int, Any]()

    def end(number: int, frame: Any) -> None:
        came.append(number)
        loop.call_soon_threadsafe(task.cancel)
        with suppress(KeyboardInterrupt):
            former[number](number, frame)

    try:
        is_main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
        for name in ("SIGINT", "SIGTERM", "SIGHUP") if is_main else ():
            handler = signal.getsignal(number) if (number := getattr(signal, name, None)) else None
            if number and callable(handler):
                former[number] = handler
                signal.signal(number, end)
        yield came
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _cached_tokens(answers: Sequence[_BenchAnswer]) -> Ints | None:
    """Return the cached tokens of every prompt; None where the server says none.

    vLLM (--enable-prompt-tokens-details) and SGLang (--enable-cache-report) leave them out where none were found.
    """
    if all(answer.cached_tokens is None for answer in answers):
        return None
    return np.array([answer.cached_tokens or 0 for answer in answers], np.int64)


async def _first_model(http: httpx.AsyncClient, url: str, timeout_s: float) -> str:
    import httpx

    try:
        answer = await http.get(f"{url.rstrip('/')}/models", timeout=min(timeout_s, MODELS_S))
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = "is /v1 in the address?" if status == 404 and "/v1" not in url else NAME_MODEL
        hint = GIVE_KEY if status in (401, 403) else hint
        raise InputError(f"{url.rstrip('/')}/models answers {status}", hint) from None
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise InputError(f"no server answers at {url}: {why}", "is it running, and is /v1 in the address?") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise InputError(f"{url}/models lists no model", "name it: --served-model") from None


def _hint(error: str, url: str) -> str:
    """Return what to do about the error of every request."""
    if "status 404" in error and "model" in error.lower():
        return NAME_MODEL
    shorter = dict.fromkeys(("context length", "max_model_len"), "shorter --input-tokens, --output-tokens")
    other = {
        "no part of the answer": "is the server stuck, or overloaded? --timeout waits longer",
        "no event stream": "is it the address of an OpenAI-compatible API?",
    }
    for said, hint in {**other, "status 401": GIVE_KEY, "vocabulary": "--vocabulary", **shorter}.items():
        if said in error:
            return hint
    is_elsewhere = "status 404" in error and "/v1" not in url
    return "is /v1 in the address?" if is_elsewhere else "compare `--api`, `--words` and `--no-ignore-eos`"


class _BenchClient:
    """The client of one run: sends requests and collects their answers."""

    http: httpx.AsyncClient
    model: str

    def __init__(self, endpoint: Endpoint, load: RequestArrays, seed: int, tell: tuple[Notify, TellSilence]) -> None:
        self.endpoint, self.load = endpoint, load
        self.notify, self.tell_silence = tell
        self.seed = seed
        self.shared = {} if load.prefixes is None else shared_prompts(load.prefixes, endpoint.vocabulary, seed)
        self.answers = [_BenchAnswer(tokens) for tokens in load.input_tokens.tolist()]
        self.num_answered = self.num_sent = 0
        self.answered_s = 0.0
        self.started_s = 0.0

    async def measure(self, httpx: Any) -> None:
        """Send the warm-up, then the other requests; signals end it early."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        about = {"timeout": self.endpoint.timeout_s, "limits": limits, "headers": dict(self.endpoint.headers)}
        task = asyncio.current_task()
        assert task is not None
        with _ended_by_signals(task) as signals:
            try:
                async with httpx.AsyncClient(**about) as self.http:
                    url, timeout_s = self.endpoint.url, self.endpoint.timeout_s
                    self.model = self.endpoint.model or await _first_model(self.http, url, timeout_s)
                    await self.run(np.arange(self.load.num_warmup))
                    await self.run(np.arange(self.load.num_warmup, self.load.arrival_s.size))
            except asyncio.CancelledError:
                if not signals:
                    raise

    async def run(self, rows: Ints) -> None:
        """Send the requests of these rows, timed from now, and wait for all answers."""
        if not rows.size:
            return
        self.started_s, self.answered_s = time.perf_counter(), 0.0
        places = asyncio.Semaphore(self.load.concurrency) if self.load.concurrency else None
        chains = _chains(rows, self.load.previous)
        # Chains begin in the order of their first rows, which is the order that a semaphore serves.
        listening = asyncio.create_task(self._listen())
        await asyncio.gather(*(self._chain(chain, places) for chain in chains))
        listening.cancel()

    async def _listen(self) -> None:
        """Tell of long times without an answer, for as long as the run lasts."""
        limit_s = SILENCE_S
        while True:
            await asyncio.sleep(SILENCE_S / 10)
            silence_s = self._now_s() - self.answered_s if self.num_sent > self.num_answered else 0.0
            if silence_s < SILENCE_S:
                limit_s = SILENCE_S
            elif silence_s >= limit_s:
                self.tell_silence(silence_s)
                limit_s *= 2

    def _now_s(self) -> float:
        return time.perf_counter() - self.started_s

    async def _chain(self, rows: list[int], places: asyncio.Semaphore | None) -> None:
        """Send a chain of requests, one after the other."""
        async with AsyncExitStack() as stack:
            if places is not None:
                await stack.enter_async_context(places)
            for position, row in enumerate(rows):
                planned_s = float(self.load.arrival_s[row])
                if position:
                    planned_s = self._now_s() + (0.0 if self.load.think_s is None else float(self.load.think_s[row]))
                elif places is not None:
                    planned_s = max(planned_s, self._now_s())
                await asyncio.sleep(max(planned_s - self._now_s(), 0.0))
                await self._send(row, planned_s)

    async def _send(self, row: int, planned_s: float) -> None:
        import httpx

        answer, body = self.answers[row], self._body(row)
        path = "chat/completions" if self.endpoint.api == "chat" else "completions"
        answer.sent_s = self._now_s()
        if self.num_sent == self.num_answered:
            self.answered_s = answer.sent_s
        self.num_sent += 1
        answer.late_s = max(answer.sent_s - planned_s, 0.0)
        try:
            async with self.http.stream("POST", f"{self.endpoint.url.rstrip('/')}/{path}", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    answer.error = f"status {response.status_code}: {text[:200]}"
                else:
                    await self._receive(answer, response.aiter_lines())
                    kind = response.headers.get("content-type", "event-stream")
                    if answer.error == NO_TOKEN and "event-stream" not in kind:
                        answer.error = f"the answer is {kind} and no event stream"
        except httpx.TimeoutException:
            answer.error = f"no part of the answer for {self.endpoint.timeout_s:g} s"
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.has_ended = True
        self.num_answered += 1
        self.answered_s = self._now_s()
        self.notify(self.num_answered, len(self.answers))

    async def _receive(self, answer: _BenchAnswer, lines: AsyncIterator[str]) -> None:
        """Read the events of a stream: `data: {...}` a part, the last one `data: [DONE]`."""
        counted, ends_empty = None, False
        async for line in lines:
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                break
            event = json.loads(data)
            if event.get("error"):
                answer.error = str(event["error"])[:200]
                return
            counted = event.get("usage") or counted
            if _has_text(event):
                answer.part_times_s.append(self._now_s())
                # llama.cpp's last part, and vLLM's last token, have the reason why the answer ends and no text.
                choice = event["choices"][0]
                ends_empty = bool(choice.get("finish_reason")) and not choice.get("text")
        if ends_empty and (counted is None or len(answer.part_times_s) > int(counted.get("completion_tokens") or 0)):
            answer.part_times_s.pop()
        if not answer.part_times_s:
            answer.error = NO_TOKEN
            return
        answer.is_counted = bool((counted or {}).get("completion_tokens"))
        answer.output_tokens = int((counted or {}).get("completion_tokens") or len(answer.part_times_s))
        answer.input_tokens = int((counted or {}).get("prompt_tokens") or answer.input_tokens)
        details = (counted or {}).get("prompt_tokens_details")
        if isinstance(details, Mapping):
            answer.cached_tokens = int(details.get("cached_tokens") or 0)

    def _body(self, row: int) -> dict[str, Any]:
        """Return the JSON of one request; token ids are a shared beginning, then random ones."""
        tokens = int(self.load.input_tokens[row])
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": int(self.load.output_tokens[row]),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.endpoint.sampling,
        }
        if self.endpoint.ignore_eos:
            body["ignore_eos"] = True
        words = f"{self.seed % 997 * 10_000 + row} " + " ".join([WORD] * max(tokens - 1, 0))
        if self.endpoint.api == "chat":
            return body | {"messages": [{"role": "user", "content": words}]}
        if not self.endpoint.token_ids:
            return body | {"prompt": words}
        shared, rng = self.shared.get(row, [])[:tokens], np.random.default_rng([self.seed, row])
        drawn = rng.integers(FIRST_TOKEN_ID, self.endpoint.vocabulary, tokens - len(shared))
        return body | {"prompt": [*shared, *drawn.tolist()]}


def _has_text(event: Mapping[str, Any]) -> bool:
    """Whether an event of a stream has a token: any part of a completion, or a part of a chat that has content."""
    choices = event.get("choices")
    if not choices:
        return False
    delta = choices[0].get("delta")
    if delta is None:
        return "text" in choices[0]
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


def _chains(rows: Ints, previous: Ints | None) -> list[list[int]]:
    """Return chains of rows that follow one another, in the order of their first rows."""
    if previous is None:
        return [[int(row)] for row in rows]
    chains: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    for row in map(int, rows):
        first = last.get(int(previous[row]), row)
        last[row] = first
        chains.setdefault(first, []).append(row)
    return list(chains.values())


def shared_prompts(prefixes: PrefixArrays, vocabulary: int, seed: int = 0) -> dict[int, list[int]]:
    """Return by row the token ids that a prompt begins with; prompts share what their paths of segments share.

    Outputs that later turns repeat are stand-ins: a server finds earlier prompts in its cache, not its own answers.
    """
    texts: dict[int, list[int]] = {-1: []}

    def text(node: int) -> list[int]:
        if node not in texts:
            rng = np.random.default_rng([seed, 1 << 20, node])
            drawn = rng.integers(FIRST_TOKEN_ID, vocabulary, prefixes.node_tokens[node])
            texts[node] = [*text(int(prefixes.node_parent[node])), *drawn.tolist()]
        return texts[node]

    return {row: text(int(node)) for row, node in enumerate(prefixes.request_node) if node >= 0}
