"""Generation of a workload's requests: arrival times, token counts and the common beginnings of prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.model.towers import Patches
from windtunnel.workload.arrivals import ClosedLoop
from windtunnel.workload.generate import media as media_draws
from windtunnel.workload.generate.arrival_times import draw_times
from windtunnel.workload.generate.clients import draw_clients
from windtunnel.workload.generate.draws import Counts, Seconds, child, client_lengths, draw_indices, draw_lengths, spawn
from windtunnel.workload.generate.prefixes import REQUEST_NODES, PrefixArrays, forest, inverse
from windtunnel.workload.generate.turns import Turns, begins, draw_prompts, draw_turns, within
from windtunnel.workload.lengths import Lengths
from windtunnel.workload.media import tower_of
from windtunnel.workload.schema import RequestSource, Trace, Workload, WorkloadAdapters
from windtunnel.workload.sessions import SharedPrompts
from windtunnel.workload.traces.media import FRAMES, NUMBER, ROW, described
from windtunnel.workload.traces.requests import RecordedRequests, read_requests

_WARMUP = {
    **dict.fromkeys(("arrival_s", "think_s"), 0.0),
    **dict.fromkeys(("previous", "session", *REQUEST_NODES), -1),
    "ttft_limit_s": math.inf,
}
"""Column -> its value in warm-up requests; others are those of the first request."""
TENANT_KEY = 1000
"""The j-th tenant's streams are spawned from the seed's child of this number and j."""
ADAPTER_KEY = 3000
"""LoRA adapters are drawn from the seed's child of this number."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestArrays:
    """One row per request, in order of arrival; every array has shape [num_warmup + num_requests].

    A turn with a predecessor arrives when the predecessor is done, wherever its row is.

    The first `num_warmup` rows are warm-up: copies of the first measured request, released at 0 s and all finished
    before the measured requests start, whose `arrival_s` count from that moment.
    """

    arrival_s: Seconds
    """Arrival time in an open loop, earliest time of sending in a closed loop; sorted."""
    input_tokens: Counts
    output_tokens: Counts
    priority: Counts
    """The smaller is served first."""
    concurrency: int = 0
    """Requests that the client keeps under way, or sessions where turns follow one another; 0: an open loop."""
    num_warmup: int = 0
    previous: Counts | None = None
    """Row, further up, of the request whose completion lets this one be sent, or -1; None: all -1. At most one request
    waits for another."""
    think_s: Seconds | None = None
    """Time from the completion of `previous` to the sending; None: no time."""
    session: Counts | None = None
    """Number of the session, from 0, or -1; routers may keep a session on one replica. None: all -1."""
    prefixes: PrefixArrays | None = None
    """Common beginnings of prompts; None: there are none."""
    tenant: Counts | None = None
    """Position in `tenant_names`; None: there are no tenants."""
    tenant_names: tuple[str, ...] = ()
    ttft_limit_s: Seconds | None = None
    """Time from the sending to the deadline of the first token; inf: no deadline. None: all inf."""
    media: Counts | None = None
    """`[num_warmup + num_requests, most of a prompt, 3]` Images and videos of each prompt in their order, as (kind, a
    position in `media_tokens`; number of the image, equal numbers being the same image; position of its first token in
    the prompt); kind -1 behind the last. None: requests of text."""
    media_tokens: tuple[int, ...] = (0, 0)
    """Tokens of one image of each size, and of one video; of each kind that a trace has."""
    media_patches: tuple[Patches, ...] = ()
    """Patches of each kind that a trace has; empty where images are drawn."""
    recorded_media: Counts | None = None
    """`[num_requests, most of a request, 5]` Images and videos of a trace, as in `RowMedia.padded`, until a model makes
    them `media`."""
    ready_s: Seconds | None = None
    """When each request reaches a replica at the earliest, in an open loop; None: on its arrival."""
    adapter: Counts | None = None
    """LoRA adapter, those used most first, or -1: the base model. None: no request has one."""
    remarks: tuple[str, ...] = ()
    """How they differ from the rows of the trace that they come from."""

    @property
    def num_requests(self) -> int:
        """Number of requests without warm-up."""
        return len(self.arrival_s) - self.num_warmup

    @property
    def is_open_loop(self) -> bool:
        """Whether no request waits for the completion of another."""
        return not self.concurrency and self.previous is None

    def mapped(self, change: Callable[[str, NDArray[Any]], NDArray[Any]]) -> "RequestArrays":
        """Return the requests with all their columns changed, also those in `prefixes`.

        `change` takes the name of a column and the column.
        """
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            name: change(name, column) for name, column in known.items() if isinstance(column, np.ndarray)
        }
        if self.prefixes is not None:
            nodes = {name: change(name, getattr(self.prefixes, name)) for name in REQUEST_NODES}
            changed["prefixes"] = replace(self.prefixes, **nodes)
        return replace(self, **changed)


def generate(workload: Workload, seed: np.random.SeedSequence | int) -> RequestArrays:
    """Generate the requests of `workload`: the same bytes for the same seed.

    A rate only stretches the times that a seed gives, and few requests are the first of many (common random numbers).
    InputError for a file that cannot be read or is too short, or no request before `duration_s`.

    Args:
        workload: distributions, traces, tenants, or a client model.
        seed: seed of the scenario; a `SeedSequence` is not changed.
    """
    warmup = workload.arrivals.num_warmup_requests if isinstance(workload.arrivals, ClosedLoop) else 0
    check_size(requests_drawn=(workload.num_requests or 0) + warmup)
    root = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    if workload.clients is not None:
        drawn = draw_clients(workload.clients, workload.num_requests, workload.duration_s, spawn(root))
        requests = RequestArrays(*drawn, priority=np.zeros(len(drawn[0]), np.int64))
    elif workload.tenants and not all(tenant.is_label for tenant in workload.tenants):
        requests = _tenant_requests(workload, root)
    else:
        limits = workload.num_requests, workload.duration_s
        requests = stream_requests(workload, root, *limits, with_media=not workload.draws_media)
    if workload.lengths_seed is not None:
        lengths = (workload.input_tokens, workload.output_tokens)
        inputs, outputs = client_lengths(*lengths, requests.num_requests, workload.lengths_seed)
        requests = replace(requests, input_tokens=inputs, output_tokens=outputs)
    requests = _with_limits(requests, workload)
    if workload.draws_media:
        requests = _with_media(requests, workload, root)
    else:
        requests = _with_recorded_media(requests, workload)
    if workload.documents > 1:
        requests = requests.mapped(lambda _, column: np.repeat(column, workload.documents, axis=0))
    if workload.adapters is not None:
        rng = np.random.default_rng(child(root, ADAPTER_KEY))
        requests = _with_adapters(requests, draw_adapters(workload.adapters, requests, rng))
    return _behind_client(requests, workload.arrivals) if isinstance(workload.arrivals, ClosedLoop) else requests


def stream_requests(
    source: RequestSource,
    seed: np.random.SeedSequence,
    limit: int | None,
    duration_s: float | None,
    arrival_s: Seconds | None = None,
    with_media: bool = True,
) -> RequestArrays:
    """Generate the requests of one stream: a workload without tenants, or one of its tenants.

    Args:
        limit, duration_s: end of the stream.
        arrival_s: arrival times of requests (or sessions) that were drawn elsewhere.
    """
    rngs = spawn(seed)
    if arrival_s is None and source.arrivals is not None and source.trace and source.trace.order == "resampled":
        arrival_s = arrival_times(source, None, limit, duration_s, rngs["arrivals"])
    recorded = None
    if source.trace:
        recorded = _read_trace(source, source.trace, limit, arrival_s, rngs["order"], with_media)
    if arrival_s is None:
        arrival_s = arrival_times(source, recorded, limit, duration_s, rngs["arrivals"])
    if source.sessions is not None:
        return _session_requests(draw_turns(source, len(arrival_s), limit, seed), arrival_s)
    num_requests = len(arrival_s)
    input_tokens, output_tokens = _both_lengths(source, recorded, num_requests, rngs)
    requests = RequestArrays(arrival_s, input_tokens, output_tokens, np.zeros(num_requests, np.int64))
    if recorded is not None:
        first = slice(0, requests.num_requests)
        requests = replace(
            requests,
            priority=requests.priority if recorded.priority is None else recorded.priority[first],
            session=None if recorded.session is None else recorded.session[first],
            prefixes=None if recorded.blocks is None else forest(recorded.blocks, recorded.input_tokens, first),
            recorded_media=None if recorded.media is None else recorded.media.take(first).padded(),
            tenant=None if recorded.tenant is None else recorded.tenant[first],
            tenant_names=recorded.tenant_names,
            remarks=recorded.remarks,
        )
    return _with_prompts(requests, source.shared_prompts, rngs) if source.shared_prompts else requests


def _session_requests(turns: Turns, start_s: Seconds) -> RequestArrays:
    """Return the turns of sessions in order of the earliest time at which each can be sent, if answers took no time."""
    is_first = begins(turns.session)
    num_requests, num_prompts = is_first.size, turns.prompt_tokens.size
    earliest_s = start_s[turns.session] + within(turns.wait_s, is_first)
    order = np.argsort(earliest_s, kind="stable")
    place = inverse(order)
    previous = np.where(is_first, -1, place[np.arange(num_requests) - 1])

    texts = num_prompts + 2 * np.arange(num_requests)
    node_parent = np.full(num_prompts + 2 * num_requests, -1, np.int64)
    node_parent[texts] = np.where(is_first, turns.prompt, texts - 1)
    node_parent[texts + 1] = texts
    node_tokens = np.empty(node_parent.size, np.int64)
    node_tokens[:num_prompts] = turns.prompt_tokens
    node_tokens[texts], node_tokens[texts + 1] = turns.new_tokens, turns.output_tokens
    return RequestArrays(
        arrival_s=earliest_s[order],
        input_tokens=turns.input_tokens[order],
        output_tokens=turns.output_tokens[order],
        priority=np.zeros(num_requests, np.int64),
        previous=previous[order],
        think_s=turns.wait_s[order],
        session=turns.session[order],
        prefixes=PrefixArrays(node_parent, node_tokens, texts[order], texts[order] + 1),
    )


def _with_prompts(
    requests: RequestArrays, prompts: SharedPrompts, rngs: dict[str, np.random.Generator]
) -> RequestArrays:
    """Put one of the shared prompts before each of `requests`, which are not in sessions."""
    if requests.prefixes is not None:
        raise InputError("the trace's hash_ids say what its prompts share; shared_prompts cannot be put before them")
    prompt, tokens = draw_prompts(prompts, requests.num_requests, rngs)
    no_output = np.full(requests.num_requests, -1, np.int64)
    roots = np.full(prompts.count, -1, np.int64)
    return replace(
        requests,
        input_tokens=requests.input_tokens + tokens[prompt],
        prefixes=PrefixArrays(roots, tokens, prompt, no_output),
    )


def _tenant_requests(workload: Workload, seed: np.random.SeedSequence) -> RequestArrays:
    """Generate the requests of all tenants, in order of arrival; tenants' draws are independent."""
    limit, duration_s = workload.num_requests, workload.duration_s
    shared_s, of_arrival = np.zeros(0), np.zeros(0, np.int64)
    if workload.arrivals is not None:
        rngs = spawn(seed)
        shared_s = arrival_times(workload, None, limit, duration_s, rngs["arrivals"])
        shares = np.array([tenant.share or 0.0 for tenant in workload.tenants])
        of_arrival = draw_indices(shares, shared_s.size, rngs["tenants"])
    parts = []
    for index, tenant in enumerate(workload.tenants):
        tenant_seed = child(child(seed, TENANT_KEY), index)
        arrival_s = shared_s[of_arrival == index] if tenant.share is not None else None
        if arrival_s is not None and not arrival_s.size:
            continue
        try:
            part = stream_requests(tenant, tenant_seed, limit, duration_s, arrival_s, not workload.draws_media)
        except InputError as error:
            raise InputError(f"tenant {tenant.name}: {error.message}", error.hint) from None
        parts.append(replace(part, tenant=np.full(part.num_requests, index, np.int64)))
    merged = _merged(parts)
    names = tuple(tenant.name for tenant in workload.tenants)
    return replace(merged.mapped(lambda _, column: column[:limit]), tenant_names=names)


def _merged(parts: Sequence[RequestArrays]) -> RequestArrays:
    """Merge requests in order of arrival, renumbering the rows, sessions and nodes that they refer to."""
    sizes = [part.num_requests for part in parts]
    order = np.argsort(np.concatenate([part.arrival_s for part in parts]), kind="stable")
    place = inverse(order)

    def joined(name: str, absent: float) -> NDArray[np.generic]:
        columns = [getattr(part, name) for part in parts]
        filled = [
            np.full(size, absent) if column is None else column for size, column in zip(sizes, columns, strict=True)
        ]
        return np.concatenate(filled)

    columns = {name: joined(name, 0) for name in ("arrival_s", "input_tokens", "output_tokens", "priority", "tenant")}
    rows = np.concatenate([[0], np.cumsum(sizes)])
    if any(part.previous is not None for part in parts):
        moved = [_moved(part.previous, size, row) for part, size, row in zip(parts, sizes, rows, strict=False)]
        previous = np.concatenate(moved)
        columns["previous"] = np.where(previous < 0, -1, place[previous])
        columns["think_s"] = joined("think_s", 0.0)
    if any(part.session is not None for part in parts):
        ends = np.cumsum([0, *(0 if part.session is None else int(part.session.max()) + 1 for part in parts)])
        moved = [_moved(part.session, size, end) for part, size, end in zip(parts, sizes, ends, strict=False)]
        columns["session"] = np.concatenate(moved)
    remarks = tuple(dict.fromkeys(remark for part in parts for remark in part.remarks))
    media = media_draws.merged_media([part.recorded_media for part in parts], sizes)
    forests = _merged_forests(parts)
    merged = RequestArrays(**columns, prefixes=forests, recorded_media=media, remarks=remarks)  # type: ignore[arg-type]
    return merged.mapped(lambda _, column: column[order])


def _moved(column: Counts | None, size: int, by: int) -> Counts:
    """Return a column of row numbers increased by `by`; -1 stays, and an absent column is all -1."""
    return np.full(size, -1, np.int64) if column is None else np.where(column < 0, -1, column + by)


def _merged_forests(parts: Sequence[RequestArrays]) -> PrefixArrays | None:
    if all(part.prefixes is None for part in parts):
        return None
    nothing = np.zeros(0, np.int64)
    moved: dict[str, list[Counts]] = {field.name: [nothing] for field in fields(PrefixArrays)}
    nodes = 0
    for part in parts:
        forest, size = part.prefixes, part.num_requests
        if forest is not None:
            moved["node_parent"].append(_moved(forest.node_parent, 0, nodes))
            moved["node_tokens"].append(forest.node_tokens)
        for name in REQUEST_NODES:
            moved[name].append(_moved(None if forest is None else getattr(forest, name), size, nodes))
        nodes += 0 if forest is None else forest.node_parent.size
    return PrefixArrays(**{name: np.concatenate(columns) for name, columns in moved.items()})


def _with_limits(requests: RequestArrays, workload: Workload) -> RequestArrays:
    """Return `requests` with the priority and the deadline of their tenants."""
    if not workload.tenants:
        return requests
    if requests.tenant is None:
        raise InputError(
            f"tenant {workload.tenants[0].name!r}: the trace does not say whose requests are whose",
            "name the column: workload.trace.columns: {tenant: NAME}",
        )
    known = {tenant.name: tenant for tenant in workload.tenants}
    if unknown := [name for name in known if name not in requests.tenant_names]:
        names = ", ".join(requests.tenant_names[:8])
        raise InputError(f"no request of the trace is of tenant {unknown[0]!r}; it has {names}")
    tenants = [known.get(name) for name in requests.tenant_names]
    priority = np.array([0 if tenant is None else tenant.priority for tenant in tenants], np.int64)
    limits = [None if tenant is None or tenant.slo is None else tenant.slo.ttft_s for tenant in tenants]
    limit_s = np.array([math.inf if limit is None else limit for limit in limits])
    return replace(
        requests,
        priority=np.where(priority[requests.tenant] != 0, priority[requests.tenant], requests.priority),
        ttft_limit_s=limit_s[requests.tenant] if np.isfinite(limit_s).any() else None,
    )


def draw_adapters(adapters: WorkloadAdapters, requests: RequestArrays, rng: np.random.Generator) -> Counts:
    """Draw the adapter of each request, -1 for the base model; turns of one session have that of its first."""
    exponent = adapters.exponent if adapters.popularity == "zipf" else 0.0
    shares = np.arange(1, adapters.count + 1, dtype=np.float64) ** -exponent
    drawn = np.searchsorted(np.cumsum(shares / shares.sum()), rng.random(requests.num_requests), side="right")
    drawn = np.minimum(drawn, adapters.count - 1)
    drawn[rng.random(requests.num_requests) < adapters.base_fraction] = -1
    if requests.session is not None:
        has = requests.session >= 0
        _, first, of_row = np.unique(requests.session[has], return_index=True, return_inverse=True)
        drawn[has] = drawn[has][first][of_row.ravel()]
    return drawn


def _with_adapters(requests: RequestArrays, adapter: Counts) -> RequestArrays:
    """Give each request its adapter; prompts of different adapters share no beginning.

    vLLM hashes the adapter into a block's key (`_gen_lora_extra_hash_keys`, vllm/v1/core/kv_cache_utils.py, 0.8 to
    0.33); SGLang's radix cache has a name space for each (`extra_key`, 0.5).
    """
    if requests.prefixes is None:
        return replace(requests, adapter=adapter)
    forest, base = requests.prefixes, int(adapter.max()) + 2
    ends = {name: getattr(forest, name) for name in REQUEST_NODES}
    keys = {name: np.where(node >= 0, node * base + adapter + 1, -1) for name, node in ends.items()}
    known = reached = np.unique(np.concatenate(list(keys.values())))
    while (reached := reached[reached >= 0]).size:
        parent = forest.node_parent[reached // base]
        reached = np.setdiff1d(np.where(parent >= 0, parent * base + reached % base, -1), known)
        known = np.union1d(known, reached)
    known = known[known >= 0]
    node, parent = known // base, forest.node_parent[known // base]
    split = PrefixArrays(
        node_parent=np.where(parent >= 0, np.searchsorted(known, parent * base + known % base), -1),
        node_tokens=forest.node_tokens[node],
        **{name: np.where(key >= 0, np.searchsorted(known, key), -1) for name, key in keys.items()},
    )
    return replace(requests, adapter=adapter, prefixes=split)


def _with_media(requests: RequestArrays, workload: Workload, seed: np.random.SeedSequence) -> RequestArrays:
    """Put images and videos into the prompts; a turn of a session also has those of the turns before it."""
    if workload.media_tokens is None:
        raise _no_model()
    tokens, images, prefixes = np.array(workload.media_tokens), workload.images, requests.prefixes
    drawn = media_draws.draw_media(workload, requests.num_requests, seed)
    own_text = requests.input_tokens
    if workload.sessions is not None and prefixes is not None:
        own_text = prefixes.node_tokens[prefixes.request_node]
    elif images is not None and images.position == "start" and prefixes is not None:
        own_text = own_text - prefixes.node_tokens[prefixes.request_node]
    begins, added = media_draws.own_begins(drawn, tokens, images, own_text)
    previous = np.full(added.size, -1) if requests.previous is None else requests.previous
    own = np.concatenate([drawn, begins[..., None]], axis=2)
    media, earlier = media_draws.with_earlier(own, requests.input_tokens - own_text, previous, added)
    if workload.sessions is not None and prefixes is not None:
        node_tokens = prefixes.node_tokens.copy()
        node_tokens[prefixes.request_node] += added
        prefixes = replace(prefixes, node_tokens=node_tokens)
    elif images is not None and images.position == "start" and images.distinct is not None:
        prefixes = _with_image_nodes(prefixes, np.where(drawn[..., :1] < tokens.size - 1, drawn, -1), tokens)
    return replace(
        requests,
        input_tokens=requests.input_tokens + added + earlier,
        prefixes=prefixes,
        media=media,
        media_tokens=workload.media_tokens,
    )


def _with_recorded_media(requests: RequestArrays, workload: Workload) -> RequestArrays:
    """Put the images and videos of a trace into its prompts."""
    paths = " and ".join(trace.path for trace in workload.traces)
    if requests.recorded_media is None or requests.recorded_media.shape[1] == 0:
        undrawn = next((name for name in ("images", "videos") if getattr(workload, name) is not None), None)
        if undrawn is not None:
            raise InputError(
                f"workload.{undrawn} gives no width and height, and {paths} has no images or videos",
                f"give workload.{undrawn}: {{width: 1024, height: 768}}, or leave it out",
            )
        return replace(requests, recorded_media=None)
    vision, images, found = workload.vision, workload.images, requests.recorded_media
    if vision is None:
        raise _no_model()
    first = int(np.argmax(found[:, 0, ROW] >= 0))
    tower_of(vision, f"{paths} row {found[first, 0, ROW]}", "set workload.trace.media to leave_out")
    kinds, patches = media_draws.recorded_kinds(found, vision, (images, workload.videos), paths)
    tokens = np.array([each.tokens for each in patches], np.int64)
    media = np.stack([kinds, found[..., NUMBER]], axis=2)
    includes = workload.trace is not None and workload.trace.input_includes_media
    added = media_draws.placed(kinds, tokens, kinds >= 0, requests.input_tokens)[1].sum(axis=1)
    own_text = requests.input_tokens - added if includes else requests.input_tokens
    if (own_text < 1).any():
        row = int(np.argmax(own_text < 1))
        raise InputError(
            f"{paths} row {found[row, 0, ROW]}: {added[row]:,} tokens of images and videos, and a prompt of "
            f"{requests.input_tokens[row]:,} tokens that includes them",
            "leave workload.trace.input_includes_media out, if the file counts text alone",
        )
    at_start = images is not None and images.position == "start"
    prefixes = requests.prefixes
    if at_start and not includes and prefixes is not None:
        raise InputError(
            f"{paths} says by hash_ids what its prompts of text share, and images at their start would part them",
            "leave workload.images.position out, or say that lengths and hash_ids count images: "
            "workload.trace.input_includes_media: true",
        )
    is_video = found[..., FRAMES] > 0
    begins, _ = media_draws.placed(kinds, tokens, is_video | (not at_start), own_text)
    if at_start and prefixes is None:
        prefixes = _with_image_nodes(None, np.where(is_video[..., None], -1, media), tokens)
    return replace(
        requests,
        input_tokens=own_text + added,
        prefixes=prefixes,
        media=np.concatenate([media, np.where(kinds < 0, -1, begins)[..., None]], axis=2),
        media_tokens=tuple(tokens.tolist()),
        media_patches=tuple(patches),
        recorded_media=None,
        remarks=(*requests.remarks, described(found)),
    )


def _no_model() -> InputError:
    return InputError(
        "images and videos become tokens by the rule of a model, which is not known here",
        "name a model of the catalog, or the path of its config.json",
    )


def _with_image_nodes(prefixes: PrefixArrays | None, images: Counts, tokens: Counts) -> PrefixArrays:
    """Let prompts share the images that they begin with, behind a shared prompt; kinds of others are -1."""
    none = np.full(len(images), -1, np.int64)
    before = prefixes or PrefixArrays(none[:0], none[:0], none, none)
    nodes = media_draws.image_nodes(images, tokens, before.request_node, before.node_parent.size)
    return PrefixArrays(
        node_parent=np.concatenate([before.node_parent, nodes[0]]),
        node_tokens=np.concatenate([before.node_tokens, nodes[1]]),
        request_node=nodes[2],
        request_output_node=before.request_output_node,
    )


def _behind_client(requests: RequestArrays, client: ClosedLoop) -> RequestArrays:
    """Return the requests of a closed loop, with its warm-up requests in front."""
    count = client.num_warmup_requests

    def warmed(name: str, column: NDArray[Any]) -> NDArray[Any]:
        moved = np.where(column < 0, -1, column + count) if name == "previous" else column
        first = np.full_like(column[:1], _WARMUP.get(name, column[0]))
        return np.concatenate([np.repeat(first, count, axis=0), moved])

    return replace(requests.mapped(warmed), concurrency=client.concurrency, num_warmup=count)


def _read_trace(
    source: RequestSource,
    trace: Trace,
    limit: int | None,
    arrival_s: Seconds | None,
    rng: np.random.Generator,
    with_media: bool,
) -> RecordedRequests:
    """Read the columns that `source` leaves to its trace, from `start_s` on and in the trace's order."""
    lengths_given = source.total_tokens is not None
    given = {
        "arrival": source.arrivals is not None or arrival_s is not None,
        "input_tokens": lengths_given or source.input_tokens is not None,
        "output_tokens": lengths_given or source.output_tokens is not None,
    }
    in_order = trace.order == "file"
    max_rows = limit if in_order and source.arrivals is None and trace.start_s == 0 else None
    needed_streams = [stream for stream, is_given in given.items() if not is_given]
    recorded = read_requests(trace, needed_streams, max_rows, with_media)
    if recorded.leaves_blocks:
        raise InputError(
            f"{trace.path} says by hash_ids what its prompts share, and prompts of drawn lengths would share nothing",
            "leave out input_tokens (trace.input_scale changes them), or for the times alone give "
            "arrivals: {type: recorded, path: FILE}",
        )
    if recorded.arrival_s is not None:
        later_s = (recorded.arrival_s - trace.start_s) * trace.time_scale
        first = np.searchsorted(recorded.arrival_s, trace.start_s)
        recorded = replace(recorded, arrival_s=later_s).take(slice(int(first), None))
    needed = limit if arrival_s is None else len(arrival_s)
    if needed is not None and needed > recorded.num_requests and trace.order != "resampled":
        from_start = f" from {trace.start_s:g} s on" if trace.start_s else ""
        arrivals = " with arrivals (--rate)" if source.arrivals is None else ""
        raise InputError(
            f"the workload asks for {needed} requests, but {trace.path} has {recorded.num_requests}{from_start}",
            f"ask for at most {recorded.num_requests}, or take rows more than once: trace.order: resampled "
            f"(--set workload.trace.order=resampled){arrivals}",
        )
    if trace.order == "shuffled":
        recorded = recorded.take(rng.permutation(recorded.num_requests))
    if trace.order == "resampled":
        assert needed is not None, "Workload checks that a resampled trace has arrivals"
        recorded = recorded.take(rng.integers(recorded.num_requests, size=needed))
    return recorded


def arrival_times(
    source: RequestSource,
    recorded: RecordedRequests | None,
    limit: int | None,
    duration_s: float | None,
    rng: np.random.Generator,
) -> Seconds:
    """Return the sorted arrival times of all requests; with sessions, of their first turns."""
    max_requests = limit or (recorded.num_requests if recorded is not None else None)
    if source.arrivals is not None:
        arrival_s = draw_times(source.arrivals, max_requests, duration_s, rng)
    else:
        assert recorded is not None, "Workload checks that there is a trace"
        assert recorded.arrival_s is not None, "_read_trace asks for what is left out"
        arrival_s = recorded.arrival_s[:max_requests]
    if duration_s is not None:
        arrival_s = arrival_s[: np.searchsorted(arrival_s, duration_s)]
    if not len(arrival_s):
        when = f"within duration_s, {duration_s:g} s" if duration_s else "after the trace's start_s"
        raise InputError(f"no request of the workload arrives {when}")
    return arrival_s


def _both_lengths(
    source: RequestSource, recorded: RecordedRequests | None, num_requests: int, rngs: dict[str, np.random.Generator]
) -> tuple[Counts, Counts]:
    """Return the prompt and output tokens of each request."""
    if source.total_tokens is not None:
        assert source.input_to_output_ratio is not None, "RequestSource checks that they are given together"
        total = np.maximum(draw_lengths(source.total_tokens, num_requests, rngs["input_tokens"]), 2)
        output = np.ceil(total / (1 + source.input_to_output_ratio)).astype(np.int64)
        output = np.minimum(output, total - 1)
        return total - output, output

    def token_counts(stream: str) -> Counts:
        lengths: Lengths | None = getattr(source, stream)
        if lengths is not None:
            return draw_lengths(lengths, num_requests, rngs[stream], stream)
        column: Counts = getattr(recorded, stream)
        return column[:num_requests]

    if source.is_pooling:
        return token_counts("input_tokens"), np.ones(num_requests, np.int64)
    return token_counts("input_tokens"), token_counts("output_tokens")
