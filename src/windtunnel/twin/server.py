"""The HTTP server of a twin: the OpenAI API, and what engines offer beside it.

Tokens of all answers leave from one place when they are due: an answer that streams has no task that waits for its
tokens.
"""

import asyncio
import hashlib
import logging
import math
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import msgspec

from windtunnel.dashboard.listening import HOST, LocalServer
from windtunnel.errors import InputError, WindtunnelError
from windtunnel.twin import protocol
from windtunnel.twin.engine import Answer, OnTokens, Twin
from windtunnel.twin.live import BusyError, FailedError
from windtunnel.twin.messages import MessageEvents, ask_message, chat_of, error_document, message_document
from windtunnel.twin.metrics import CONTENT_TYPE, Metrics
from windtunnel.twin.native import NativeEvents, ask_native, native_document
from windtunnel.twin.pooling import POOLING, Pooling, cut, pooling_of
from windtunnel.twin.protocol import Asked, Events, Limits, RequestError, Words, ask, chat_prompt, malformed
from windtunnel.twin.responses import ResponseEvents, ask_response, response_document, unknown_response
from windtunnel.twin.tokens import Tokenizer
from windtunnel.units import format_count

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")
ANY_ORIGIN = ((b"access-control-allow-origin", b"*"),)
"""vLLM's default, `--allowed-origins '["*"]'`: pages of any site may ask."""
PREFLIGHT = (
    (b"access-control-allow-methods", b"DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"),
    (b"access-control-max-age", b"600"),
)
HEADERS = (*ANY_ORIGIN, (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Stream:
    """Sends the body of one response, piece by piece, without a task of its own.

    uvicorn's `send` frames a chunk, checks its message and starts a coroutine for every piece. A stream of tokens needs
    none of that: its chunks are written straight to the connection's transport, and the server is asked only to begin
    and end the response, and to wait where the client reads too slowly.

    Args:
        done: set once all has been sent.
    """

    __slots__ = ("_backlog", "_ended", "_flow", "_is_waiting", "_send", "_transport", "done")

    def __init__(self, send: Send, done: asyncio.Future[None]) -> None:
        self._send, self.done = send, done
        self._backlog: list[bytes] = []
        self._ended, self._is_waiting = False, True
        cycle = getattr(send, "__self__", None)  # uvicorn's RequestResponseCycle
        self._transport: Any = getattr(cycle, "transport", None)
        self._flow: Any = getattr(cycle, "flow", None)

    def begin(self, is_chunked: bool) -> None:
        """Send status and headers; `is_chunked`: with HTTP/1.1, whose bodies of unknown length are sent in chunks."""
        if not is_chunked or not hasattr(self._flow, "write_paused"):
            self._transport = None
        self._go_on(self._send({"type": "http.response.start", "status": 200, "headers": HEADERS}))

    def write(self, body: bytes, is_last: bool) -> None:
        """Send a piece now, or once the client has read those before it."""
        if not (is_last or self._is_waiting or self._transport is None or self._flow.write_paused):
            if self._transport.is_closing():
                return  # the client has left: asyncio warns on the terminal of every write from the fifth on
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        self._ended = self._ended or is_last
        if self._is_waiting:
            self._backlog.append(body)
        else:
            self._go_on(self._send({"type": "http.response.body", "body": body, "more_body": not is_last}))

    def _go_on(self, sending: Any) -> None:
        """Let the server send as far as it can; go on when what it waits for has come."""
        try:
            waited_for = sending.send(None)
        except StopIteration:
            self._is_waiting = False
            if self._backlog:
                body = b"".join(self._backlog)
                self._backlog.clear()
                self._go_on(self._send({"type": "http.response.body", "body": body, "more_body": not self._ended}))
            elif self._ended and not self.done.done():
                self.done.set_result(None)
            return
        except Exception as error:  # noqa: BLE001 whoever serves the request is told
            if not self.done.done():
                self.done.set_exception(error)
            return
        self._is_waiting = True
        waited_for._asyncio_future_blocking = False
        waited_for.add_done_callback(lambda _: self._go_on(sending))


BACKLOG = 2048
APART_BYTES = 1 << 14
"""Bytes of a body from which it is read and cut into tokens in a thread: 10 ms of work."""
SWITCH_S = 0.0002
"""How soon that thread lets the event loop run."""
MOST_BODY_BYTES = 64 << 20
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


class Form(NamedTuple):
    """How the requests of one API are read and answered."""

    kind: str
    id_prefix: str
    ask: Callable[..., Asked]
    document: Callable[[Asked, Sequence[Answer]], Any]
    events: type[Events]


GENERATING = {
    "/v1/chat/completions": Form("chat", "chatcmpl-", ask, protocol.document, protocol.Chunks),
    "/v1/completions": Form("completion", "cmpl-", ask, protocol.document, protocol.Chunks),
    RESPONSES: Form("response", "resp_", ask_response, response_document, ResponseEvents),
    MESSAGES: Form("message", "chatcmpl-", ask_message, message_document, MessageEvents),
    "/generate": Form("generate", "", ask_native, native_document, NativeEvents),
}
"""Path -> form of its requests, which are answered with text."""
GUARDED = ("/v1", "/v2", "/inference", "/generate")
"""Beginnings of the paths that need a key, of vLLM's `entrypoints/serve/utils/server_utils.py`, and SGLang's own."""
_LOG = logging.getLogger("windtunnel.twin")
_PLAIN = ((b"content-type", b"application/json"),)


class TwinApp:
    """The application: one twin behind an HTTP server."""

    def __init__(self, twin: Twin, tokenizer: Tokenizer, limits: Limits, metrics: Metrics) -> None:
        self.twin, self.tokenizer, self.limits, self.metrics = twin, tokenizer, limits, metrics
        self.name_model(limits.num_names)
        self.words = Words(tokenizer)
        self._keys: list[bytes] = []
        """SHA-256 of the keys of which requests need one; empty where they need none."""
        self.replica_of_port: dict[int, int] = {}
        """Empty where all replicas have one port."""
        self._number = 0
        self._thread = ThreadPoolExecutor(1)
        self._started = int(time.time())
        self._decode, self._encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
        first = twin.deployment.first.setup
        num_replicas = len(metrics.labels)
        speed = "as fast as it can" if twin.clock.speed is None else f"{twin.clock.speed:g}x real time"
        self.about = (
            f"as {first.engine.name} {first.engine.version} on {first.device.name}, "
            f"{format_count(num_replicas, 'replica')}, {speed}"
        )
        pages = {
            ("GET", "/health"): lambda _: self._health(),
            ("GET", "/ping"): lambda _: self._health(),
            ("POST", "/ping"): lambda _: self._health(),
            ("GET", "/version"): lambda _: {"version": str(twin.deployment.first.setup.engine.version)},
            ("GET", "/v1/models"): lambda _: self._models(),
            ("GET", "/load"): lambda _: {"server_load": twin.live.num_live},
            **dict.fromkeys((("GET", "/model_info"), ("GET", "/get_model_info")), lambda _: self._model_info()),
            **dict.fromkeys((("GET", "/server_info"), ("GET", "/get_server_info")), lambda _: self._server_info()),
            ("GET", "/health_generate"): lambda _: self._health(),
            ("POST", f"{MESSAGES}/count_tokens"): self._count_tokens,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }
        self._pages: Mapping[tuple[str, str], Callable[[Any], Any]] = pages

    def name_model(self, num_names: int) -> None:
        """Take the first so many names for the model's own; the others are those of LoRA adapters."""
        self.limits = replace(self.limits, num_names=num_names)
        self.metrics.describe(self.twin.deployment.prepared.pools, bool(self.limits.adapters))

    def require_key(self, keys: Sequence[str]) -> None:
        """Refuse requests that have none of these keys, where there are any."""
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def num_answered(self) -> int:
        """Requests that have been taken."""
        return self._number

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"].rstrip("/") or "/"
        try:
            await self._answer(method, path, scope, receive, send)
        except Exception as error:  # noqa: BLE001 whoever asks is told
            if isinstance(error, InputError | FailedError):
                failed = _refusal(error, 500 if isinstance(error, FailedError) else 400)
            elif isinstance(error, RequestError):
                failed = error
            else:
                _LOG.exception("%s %s failed", method, path)
                failed = RequestError(f"the twin failed: {type(error).__name__}", 500, "InternalServerError")
            document = error_document(failed) if path.startswith(MESSAGES) else failed.document
            await _reply(send, failed.status, self._encode(document))

    async def _answer(self, method: str, path: str, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        replica = self.replica_of_port.get((scope.get("server") or ("", 0))[1])
        if not self._is_let_in(method, scope):
            await _reply(send, 401, b'{"error":"Unauthorized"}')
        elif method == "POST" and path in GENERATING:
            model = self.twin.deployment.first.setup.model
            if model.is_encoder:
                raise RequestError(f"{model.name} is an encoder and makes no text; ask /v1/embeddings or /v1/rerank")
            form = GENERATING[path]
            body, size = await self._object(scope, receive)
            known = self.tokenizer, self.words, self.limits, self._number
            asked = await self._apart(size, form.ask, body, form.kind, *known)
            asked.replica = replica
            if form.ask in (ask, ask_message):  # vLLM's `_base_request_id`, of all but responses
                named = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
                asked.stream_id = named or str(body.get("request_id") or "")
            await self._complete(asked, form, receive, send, scope.get("http_version") == "1.1")
        elif method == "POST" and path in POOLING:
            body, size = await self._object(scope, receive)
            try:
                reply = await self._pool(body.get("model"), size, pooling_of(path, body), replica, receive)
            except RequestError as error:
                error.param = "input" if error.param == "prompt" else error.param
                raise
            if reply is not None:
                await _reply(send, 200, self._encode(reply))
        elif method == "GET" and path == "/metrics":
            self.twin.run_to(self.twin.clock.now_s())
            text = self.metrics.text(self.twin, self.twin.clock, replica)
            await _reply(send, 200, text.encode(), ((b"content-type", CONTENT_TYPE.encode()),))
        elif method == "OPTIONS" and b"access-control-request-method" in (headers := dict(scope["headers"])):
            allowed = headers.get(b"access-control-request-headers", b"authorization, content-type")
            await _reply(send, 200, b"OK", (*PREFLIGHT, (b"access-control-allow-headers", allowed)))
        elif (method, path) in self._pages:
            has_body = method == "POST" and path != "/ping"
            given, size = await self._object(scope, receive) if has_body else (None, 0)
            page = self._pages[method, path]
            await _reply(send, 200, await self._apart(size, lambda: self._body(page(given))))
        elif method == "GET" and path.startswith("/v1/models/"):  # names hold slashes
            name = self.limits.check_model(path.removeprefix("/v1/models/"), is_exact=True)
            await _reply(send, 200, self._encode(self._model(name)))
        else:
            above, _, name = path.removesuffix("/cancel").rpartition("/")
            if above == RESPONSES and (method == "GET" or (method == "POST" and path.endswith("/cancel"))):
                raise unknown_response(name)
            paths = {*(path for _, path in self._pages), "/metrics", *GENERATING, *POOLING}
            status = 405 if path in paths or above == RESPONSES else 404
            phrase = HTTPStatus(status).phrase  # vLLM's `http_exception_handler` gives it as message and type
            raise RequestError(phrase, status, phrase)

    async def _apart(self, size: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that is busy with so many bytes: where they are many in a thread, so that tokens leave."""
        if size < APART_BYTES:
            return function(*arguments)
        sys.setswitchinterval(SWITCH_S)
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _is_let_in(self, method: str, scope: Mapping[str, Any]) -> bool:
        """Whether a request may ask: it needs no key, or has one as its bearer token."""
        if not self._keys or method == "OPTIONS" or not scope["path"].startswith(GUARDED):
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        given = hashlib.sha256(key).digest()
        return scheme.lower() == b"bearer" and any(secrets.compare_digest(given, each) for each in self._keys)

    async def _object(self, scope: Mapping[str, Any], receive: Receive) -> tuple[dict[str, Any], int]:
        """Return the JSON object of a request's body, and its bytes."""
        body = await _body(receive)
        kind = dict(scope["headers"]).get(b"content-type", b"").lower().partition(b";")[0]
        if kind != b"application/json":
            raise malformed("Unsupported Media Type: Only 'application/json' is allowed")
        try:
            given = await self._apart(len(body), self._decode, body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(f"the body is no JSON: {error}", "body") from None
        if not isinstance(given, dict):
            raise malformed("the body must be a JSON object", "body")
        for name, value in given.items():  # 16.0 is a whole number for vLLM's schemas
            if type(value) is float and value.is_integer():
                given[name] = int(value)
        return given, len(body)

    async def _complete(self, asked: Asked, form: Form, receive: Receive, send: Send, is_chunked: bool) -> None:
        """Answer a request for a completion, whole or as a stream."""
        asked.created = int(time.time())
        asked.stream_id = f"{form.id_prefix}{asked.stream_id or uuid4().hex}"
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answers: list[Answer] = []
        if asked.streams:
            stream, ended = Stream(send, done), list[Answer]()
            events = [form.events(asked, i) for i in range(len(asked.choices))]

            def written(chunks: Events) -> OnTokens:
                def write(answer: Answer, begin: int, is_last: bool) -> None:
                    failure = self.twin.failure if answer.is_cancelled else None
                    event = chunks.tokens(begin, answer, is_last) if failure is None else b""
                    if is_last:
                        ended.append(answer)
                    is_end = len(ended) == len(asked.choices)
                    if is_end and failure is not None:
                        event = chunks.failed(_refusal(failure, 500))
                    elif is_end:
                        event += chunks.closing(answers)
                    stream.write(event, is_end)

                return write

            self._submit(asked, list(map(written, events)), answers)
            stream.begin(is_chunked)
            if opening := events[0].opening():
                stream.write(opening, False)
            await self._wait(answers, done, receive)
            return
        self._submit(asked, [_whole(done, len(asked.choices))] * len(asked.choices), answers)
        if await self._wait(answers, done, receive):
            self._check_failure(answers)
            await _reply(send, 200, self._encode(form.document(asked, answers)))

    def _check_failure(self, answers: Sequence[Answer]) -> None:
        """Raise FailedError where answers were ended because the scheduler or router has failed."""
        if self.twin.failure is not None and any(answer.is_cancelled for answer in answers):
            raise self.twin.failure

    def _body(self, value: Any) -> bytes:
        return b"" if value is None else self._encode(value)

    def _health(self) -> None:
        """Answer nothing, as vLLM does, or raise where the twin has failed."""
        if self.twin.failure is not None:
            raise _refusal(self.twin.failure, 503)

    def _submit(self, asked: Asked, on_tokens: Sequence[OnTokens], answers: list[Answer]) -> None:
        """Send a request to the twin, once for each answer that it asks for, and add these to `answers`."""
        self._number += len(asked.choices)
        adapter = asked.model if asked.model in self.limits.adapters else ""
        siblings: list[Answer] = []
        try:
            for choice, sink in zip(asked.choices, on_tokens, strict=True):
                lengths, ids = (len(choice.prompt), len(choice.ids)), choice.prompt + choice.ids
                answer = self.twin.submit(lengths, sink, ids, asked.priority, asked.session, asked.replica or 0)
                answers.append(answer)
                siblings = [] if len(siblings) == asked.num_answers else siblings
                siblings.append(answer)
                answer.finish_reason, answer.adapter, answer.siblings = choice.finish_reason, adapter, siblings
                answer.most_tokens = 0 if asked.is_pooled else choice.most_tokens
        except InputError as error:
            raise RequestError(error.message) from None
        except BusyError as error:
            for answer in answers:
                self.twin.cancel(answer)
            raise RequestError(error.message, 503, "ServiceUnavailable") from None

    async def _wait(self, answers: Sequence[Answer], done: asyncio.Future[None], receive: Receive) -> bool:
        """Wait until a request's answers have left, or its client has; returns whether they have."""
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((done, leaving), return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                done.result()
            else:
                for answer in answers:
                    self.twin.cancel(answer)
        finally:
            leaving.cancel()
        return done.done()

    async def _pool(
        self, model: Any, size: int, pooling: Pooling, replica: int | None, receive: Receive
    ) -> dict[str, Any] | None:
        """Compute prompts to their ends and return the reply; None: the client has left."""
        known = self.tokenizer, self.words, self.limits, self._number

        def prompt(given: Any) -> Asked:
            if isinstance(given, dict) and "messages" in given:
                return ask({"model": model, "max_tokens": 1, **given}, "chat", *known)
            if pooling.most_tokens is not None:
                most = min(pooling.most_tokens or math.inf, self.limits.max_model_len - 1)
                given = cut(given, int(most), self.tokenizer)
            return ask({"model": model, "max_tokens": 1, "prompt": given}, "completion", *known)

        asked = await self._apart(size, lambda: [prompt(given) for given in pooling.prompts])
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answers: list[Answer] = []
        sink = _whole(done, len(asked))
        for each in asked:
            each.replica, each.is_pooled = replica, True
            self._submit(each, [sink], answers)
        if asked and not await self._wait(answers, done, receive):
            return None
        self._check_failure(answers)
        total = sum(answer.input_tokens for answer in answers)
        usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}
        reply = pooling.reply([each.choices[0].prompt for each in asked])
        return reply | {"model": self.limits.check_model(model), "usage": usage}

    def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model(name) for name in self.limits.models]}

    def _model(self, name: str) -> dict[str, Any]:
        first = self.limits.models[0]
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "windtunnel",
            "root": first,
            "parent": first if name in self.limits.adapters else None,
            "max_model_len": self.limits.max_model_len,
            "permission": [],
        }

    def _model_info(self) -> dict[str, Any]:
        model, name = self.twin.deployment.first.setup.model, self.limits.models[0]
        facts = {"model_path": model.name, "served_model_name": name, "tokenizer_path": self.tokenizer.name}
        return facts | {"is_generation": not model.is_encoder, "weight_version": "default"}

    def _server_info(self) -> dict[str, Any]:
        """Return what SGLang says of itself, as far as clients read it."""
        first = self.twin.deployment.first
        drafts, tokens = first.setup.engine.speculative, first.memory.num_blocks * first.memory.block_size
        states = [{"avg_spec_accept_length": drafts.tokens_per_step}] if drafts is not None else [{}]
        facts = {"version": str(first.setup.engine.version), "context_length": self.limits.max_model_len}
        return self._model_info() | facts | {"max_total_num_tokens": tokens, "internal_states": states}

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        self.limits.check_model(body.get("model"))
        if isinstance(body.get("messages"), list):
            ids = chat_prompt(body, self.tokenizer)
        elif isinstance(body.get("prompt"), str):
            ids = self.tokenizer.encode(body["prompt"])
        else:
            raise RequestError("give a prompt or messages", param="prompt")
        texts = [self.tokenizer.decode([i]) for i in ids] if body.get("return_token_strs") else None
        return {"count": len(ids), "max_model_len": self.limits.max_model_len, "tokens": ids, "token_strs": texts}

    def _count_tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        self.limits.check_model(body.get("model"))
        count = len(chat_prompt(chat_of(body), self.tokenizer))
        return {"input_tokens": count, "context_management": {"original_input_tokens": count}}

    def _detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        self.limits.check_model(body.get("model"))
        return {"prompt": self.tokenizer.decode(self.limits.check_ids(body.get("tokens"), self.tokenizer, "tokens"))}


def _refusal(error: WindtunnelError, status: int) -> RequestError:
    """Return the answer to a request that an error ends."""
    kinds = {400: "BadRequestError", 500: "InternalServerError", 503: "ServiceUnavailable"}
    return RequestError(f"{error.message}{f'; {error.hint}' if error.hint else ''}", status, kinds[status])


def _whole(done: asyncio.Future[None], count: int) -> OnTokens:
    """Return what waits for the end of so many answers."""
    left = count

    def on_tokens(_answer: Answer, _begin: int, is_last: bool) -> None:
        nonlocal left
        left -= is_last
        if left == 0 and not done.done():
            done.set_result(None)

    return on_tokens


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(receive: Receive) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        return body
    parts, size = [body], len(body)
    while message.get("more_body"):
        message = await receive()
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > MOST_BODY_BYTES:
            raise RequestError("the body is too long", 413)
    return b"".join(parts)


async def _reply(send: Send, status: int, body: bytes, headers: Any = _PLAIN) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": (*ANY_ORIGIN, *headers, length)})
    await send({"type": "http.response.body", "body": body})


class TwinServer(LocalServer):
    """A server of one twin, with one port, or one for each replica from `port` on."""

    def __init__(self, app: TwinApp, host: str = HOST, port: int = 0, num_ports: int = 1) -> None:
        super().__init__(app, host, port, num_ports, backlog=BACKLOG, date_header=False)
        self.app = app
        if num_ports > 1:
            app.replica_of_port = {number: replica for replica, number in enumerate(self.ports)}
