"""Workloads: the arrivals, lengths and sessions of requests, from distributions, from files, or both.

    workload:                                          workload:
      arrivals: {type: poisson, rate_per_s: 6.5}         trace: {path: requests.csv}
      input_tokens: 1024                                 num_requests: 500
      output_tokens: {type: uniform, min_tokens: 819, max_tokens: 1024}
      num_requests: 1000

`arrivals`, `input_tokens` and `output_tokens` are three independent streams; each is taken from the trace where it is
left out. So a trace's lengths are replayed under another load by giving both `trace` and `arrivals`.

`sessions` makes each arrival the first turn of a conversation; `shared_prompts` puts a system prompt before it;
`tenants` divides the arrivals among customers with lengths, priorities and limits of their own; `clients` draws
everything from a published model of a service's clients.
"""

from functools import partial
from typing import Annotated, Literal

from windtunnel.metrics.limits import Slo
from windtunnel.model.sampling import GREEDY, NEUTRAL, Sampling
from windtunnel.model.shape import ModelSpec
from windtunnel.schema import Fraction, NonNegative, Positive, Schema, check_between
from windtunnel.workload.arrivals import Arrivals, Burst, ClosedLoop, Count, Rate, Recorded
from windtunnel.workload.client import Client
from windtunnel.workload.lengths import MAX_TOKENS, Lengths, Tokens, Uniform
from windtunnel.workload.media import NEEDS_SIZES, Images, Videos, Vision
from windtunnel.workload.sessions import Sessions, SharedPrompts

LENGTHS = ("input_tokens", "output_tokens")
CHANGES = {"input_scale": {LENGTHS[0]}, "output_scale": {LENGTHS[1]}, "max_tokens": set(LENGTHS)}
"""Field of a trace that changes lengths -> the lengths that it changes."""


class ClientModel(Schema):
    """The clients of a real service, as ServeGen publishes them: rates and burstiness in windows, lengths by client.

    Each window of a client holds its recorded number of requests (a fraction of one by chance), spaced by gaps of the
    recorded distribution that fill the window; lengths are drawn from those recorded for that client and time.
    Source: Xiang et al., ServeGen: Workload Characterization and Generation of Large Language Model Serving in
    Production (NSDI 2026); data at https://github.com/alibaba/ServeGen.
    """

    path: str
    """A folder of `chunk-N-trace.csv` and `chunk-N-dataset.json`, or a tar archive of one."""
    rate_per_s: Rate | None = None
    """Mean rate of all clients together from `start_s` on; None keeps the recorded one."""
    start_s: NonNegative = 0.0
    """Time in the model that becomes 0 s."""
    num_clients: Count | None = None
    """Keep only so many clients, the busiest; None keeps all."""
    without_lengths: Literal["refuse", "leave_out"] = "refuse"
    """Treatment of clients whose file of lengths is missing."""


class WorkloadAdapters(Schema):
    """LoRA adapters of the requests: each request has one, all turns of a session the same."""

    count: Count
    popularity: Literal["zipf", "uniform"] = "zipf"
    """Share of the k-th adapter: in proportion to k to the power of minus `exponent`, or equal."""
    exponent: NonNegative = 1.0
    base_fraction: Fraction = 0.0
    """Share of the requests (or sessions) that use the base model."""


class TraceColumns(Schema):
    """The names of a requests file's columns, where they are not those of a known layout."""

    arrival: str | None = None
    arrival_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of `arrival`, where it holds numbers; dates and times need no unit."""
    input_tokens: str | None = None
    output_tokens: str | None = None
    priority: str | None = None
    """Integers; smaller values are served first."""
    tenant: str | None = None
    """Names; the entry of `workload.tenants` with that name gives a tenant's priority and limits."""
    session: str | None = None
    """Conversation of a request, for routers that keep it on one replica; times stay as recorded."""
    hash_ids: str | None = None
    """List of block ids of a prompt; each id stands for its block and all blocks before it."""
    images: str | None = None
    """List of a request's images, each `[width, height]`, `[width, height, id]` or an object of these; an id that comes
    again is the same image. In CSV, as JSON."""
    videos: str | None = None
    """List of a request's videos, each an object of `width`, `height`, `frames` (or `seconds` and `fps`) and `id`."""
    num_images: str | None = None
    """Number of a request's images, in place of `images`, where all have the size of the next two columns."""
    image_width: str | None = None
    """Pixels, before the model's processor resizes it."""
    image_height: str | None = None
    image_id: str | None = None
    """Id of a request's only image; an id that comes again is the same image."""


class Trace(Schema):
    """Recorded requests. Times count from the file's zero; dates count from the first request."""

    path: str
    """CSV, JSON Lines, JSON or Parquet with named columns (`.csv`, `.jsonl`, `.json`, `.parquet`, also `.gz` and
    `.zst`)."""
    columns: TraceColumns = TraceColumns()
    start_s: NonNegative = 0.0
    """Skip the requests before this time; it becomes 0 s."""
    time_scale: Positive = 1.0
    """Factor on every arrival time after `start_s`: 0.5 doubles the load."""
    input_scale: Positive = 1.0
    """Factor on every prompt length, rounded down to at least 1, and on the blocks that prompts share."""
    output_scale: Positive = 1.0
    max_tokens: Annotated[int, partial(check_between, 2, MAX_TOKENS)] | None = None
    """Requests with more tokens than this, prompt and output together, are shortened to it. A prompt loses its end, so
    what is left of the blocks that it shares stays shared."""
    shorten: Literal["both", "input"] = "both"
    """Lengths that `max_tokens` cuts: both in proportion, or the prompt first."""
    order: Literal["file", "shuffled", "resampled"] = "file"
    """Order of the pairs of lengths: as in the file, shuffled, or drawn with replacement (as many as are needed).
    Orders other than `file` need `arrivals`."""
    hash_block_tokens: Tokens | None = None
    """Tokens in a block of `hash_ids`. None takes the publisher's: 512 in Mooncake, 16 in Bailian, 512 elsewhere."""
    failed: Literal["refuse", "leave_out"] | None = None
    """Requests without output. None leaves them out where the trace's publisher says that they failed (BurstGPT)."""
    characters_per_token: Positive | None = None
    """Characters counted as one token, in files that hold conversations as text, such as ShareGPT."""
    media: Literal["read", "leave_out"] = "read"
    """Images and videos of the file's requests."""
    input_includes_media: bool = False
    """Whether the file's prompt lengths count the tokens of images and videos, as a server's `prompt_tokens` do; else
    these come on top."""

    def check(self) -> None:
        if self.input_includes_media and (self.input_scale != 1 or self.max_tokens is not None):
            raise ValueError("input_scale and max_tokens change text alone; leave them or input_includes_media out")


class RequestSource(Schema):
    """Sources of a stream of requests. Streams that are left out come from `trace`."""

    arrivals: Arrivals | None = None
    input_tokens: Lengths | None = None
    """Prompt tokens of each request; with `sessions` or `shared_prompts`, only those of its new text."""
    output_tokens: Lengths | None = None
    """Tokens that each request generates."""
    total_tokens: Lengths | None = None
    """Prompt and output tokens together, in place of both: outputs are ceil(total / (1 + input_to_output_ratio)),
    prompts the rest."""
    input_to_output_ratio: Positive | None = None
    trace: Trace | None = None
    sessions: Sessions | None = None
    shared_prompts: SharedPrompts | None = None

    @property
    def is_pooling(self) -> bool:
        """Whether requests end with their prompt: embeddings or scores."""
        return False

    def check(self) -> None:
        if (self.total_tokens is None) != (self.input_to_output_ratio is None):
            raise ValueError("total_tokens and input_to_output_ratio must be given together")
        if self.total_tokens is not None and (self.input_tokens is not None or self.output_tokens is not None):
            raise ValueError("total_tokens stands in place of input_tokens and output_tokens; give one or the other")
        if self.sessions is not None and (self.trace is not None or self.total_tokens is not None):
            raise ValueError(
                "sessions draw the lengths of every turn: give input_tokens and output_tokens, and for the times of a "
                "file arrivals: {type: recorded, path: FILE}"
            )

    def _check_lengths_given(self, *others: str) -> None:
        """Raise ValueError unless the lengths and the streams `others` are all given or come from a trace."""
        streams = [*others, "input_tokens", *([] if self.is_pooling else ["output_tokens"])]
        given = {name for name in LENGTHS if getattr(self, name) is not None or self.total_tokens is not None}
        missing = [stream for stream in streams if getattr(self, stream) is None and stream not in given]
        for change, changed in CHANGES.items():
            beside = sorted(given & changed) if self.trace is not None else []
            if beside and getattr(self.trace, change) not in (None, 1):
                raise ValueError(f"the trace's {change} cannot change {beside[0]} given beside it; leave {change} out")
        if self.trace is None and missing:
            raise ValueError(f"{missing[0]} is missing; give {missing[0]} or a trace")
        if self.trace is not None and not missing:
            raise ValueError(f"the trace is not used: {', '.join(streams[:-1])} and {streams[-1]} are all given")
        keeps_times = self.arrivals is None and "arrivals" in others
        if self.trace is not None and not keeps_times and (self.trace.start_s != 0 or self.trace.time_scale != 1):
            raise ValueError("the trace's start_s and time_scale have no effect where arrivals are given")
        if self.trace is not None and keeps_times and self.trace.order != "file":
            raise ValueError(f"a trace that is {self.trace.order} cannot keep its times; give arrivals")

    @property
    def _ends_by_time(self) -> bool:
        return not (
            (isinstance(self.arrivals, ClosedLoop) and self.arrivals.rate_per_s is None)
            or (isinstance(self.arrivals, Burst) and self.arrivals.interval_s is None)
        )


class Tenant(RequestSource, kw_only=True):
    """A customer of the service, whose requests have their own lengths, priority and limits.

    It takes a `share` of the workload's arrivals, or has `arrivals` of its own. In a workload whose trace names tenants
    it has neither, and no lengths: it owns the requests of that name.
    """

    name: str
    share: Positive | None = None
    """Relative to the other tenants' shares."""
    priority: int = 0
    """Smaller values are served first."""
    slo: Slo | None = None
    """Limits of the tenant; None takes the scenario's."""

    def check(self) -> None:
        super().check()
        if self.share is not None and self.arrivals is not None:
            raise ValueError(f"tenant {self.name!r} has both a share and arrivals; give one or the other")
        if isinstance(self.arrivals, ClosedLoop):
            raise ValueError(f"tenant {self.name!r} cannot be a closed loop; only the whole workload can")

    @property
    def is_label(self) -> bool:
        """Whether the tenant is only a name with priority and limits, for requests that a trace holds."""
        sources = (self.share, self.arrivals, self.input_tokens, self.output_tokens, self.total_tokens, self.trace)
        return all(source is None for source in sources)


GREEDY_CLIENT = "as benchmark clients ask; lengths are drawn"
"""Source of the sampling of requests whose lengths are drawn."""
GREEDY_ASSUMED = "assumed; the model's generation config is not known"
PUBLISHED = "the model's generation config"

MAX_LEGACY_SEED = 2**32
"""Upper bound of the seeds of NumPy's `RandomState`, exclusive."""


class Workload(RequestSource):
    """The requests of one run.

    It ends with `num_requests`, at `duration_s` (arrivals only; requests under way finish, sessions end) or with the
    trace, whichever is first.
    """

    task: Literal["generate", "embed", "rerank"] = "generate"
    """`embed`: a request is one prompt, which is pooled into a vector; `rerank`: a query with `documents` of them, each
    pair a prompt that gets a score. Neither has outputs."""
    documents: Count = 1
    """Documents of a reranking query; `input_tokens` are those of a pair."""
    num_requests: Count | None = None
    duration_s: Positive | None = None
    tenants: tuple[Tenant, ...] = ()
    clients: ClientModel | None = None
    lengths_seed: Annotated[int, partial(check_between, 0, MAX_LEGACY_SEED - 1)] | None = None
    """Seed of NumPy's `RandomState`, which draws all prompts before all outputs, as a benchmark client does: lengths
    are exactly those of its run, and depend on `num_requests`. None draws them from the scenario's seed.
    Source: https://github.com/kimbochen/bench_serving, `benchmark_serving.py`, whose own default is 0."""
    client: str | Client | None = None
    """Program that sends the requests, by its name in the catalog, or its times; None: a Python client. Beside the
    server's, its own time is part of TTFT."""
    random_tokens: bool | None = None
    """Whether prompts are random tokens, which choose other experts than text. None: as the client's usually are;
    recorded requests are text."""
    images: Images | None = None
    """Images of every request, whose tokens come at the end of its prompt unless `position` says otherwise."""
    videos: Videos | None = None
    """Videos of every request, whose tokens come at the end of its prompt, behind those of images there."""
    adapters: WorkloadAdapters | None = None
    """None: all requests use the model itself."""
    media_tokens: tuple[int, ...] | None = None
    """Tokens of one image of each size and of one video; filled in from the model, whatever is given."""
    vision: Vision | None = None
    """The model that sees the images and videos of a trace; filled in, whatever is given."""
    sampling: Sampling | None = None
    """Sampling parameters of every request. None: greedy, as benchmark clients ask, where lengths are drawn; the
    model's generation config for real traffic, which a trace or a model of clients gives."""

    def check(self) -> None:
        super().check()
        self._check_task()
        self._check_lengths_seed()
        if self.has_media and self.sessions is not None and self.sessions.max_context_tokens is not None:
            raise ValueError("max_context_tokens of sessions counts text alone; leave it out where there are images")
        if self.images is not None and self.images.position == "start" and self.tenants:
            raise ValueError("images at the start need a workload without tenants; leave tenants or position out")
        if self.draws_media and self.images is not None and self.images.position == "start" and self.trace is not None:
            raise ValueError("images at the start need drawn prompts: leave out trace")
        undrawn = [media for media in (self.images, self.videos) if media is not None and not media.is_drawn]
        if undrawn and self.draws_media:
            raise ValueError("of images and videos one has a size and the other has none; give both, or leave one out")
        if undrawn and not self.traces:
            what = NEEDS_SIZES if self.images is not None else "a video needs width and height"
            raise ValueError(f"{what}, or a trace that has them")
        if self.clients is not None:
            others = ("arrivals", "input_tokens", "output_tokens", "total_tokens", "trace", "sessions", "tenants")
            for name in others:
                if getattr(self, name):
                    raise ValueError(f"clients give times and lengths; {name} cannot be given too")
        elif self.tenants and not all(tenant.is_label for tenant in self.tenants):
            self._check_tenants()
        else:
            self._check_lengths_given("arrivals")
            if self.tenants and self.trace is None:
                raise ValueError(f"tenant {self.tenants[0].name!r} has neither a share nor arrivals; give one")
        names = [tenant.name for tenant in self.tenants]
        if repeated := [name for index, name in enumerate(names) if name in names[:index]]:
            raise ValueError(f"two tenants are called {repeated[0]!r}")
        self._check_end()

    @property
    def is_pooling(self) -> bool:
        """Whether requests end with their prompt: embeddings or scores."""
        return self.task != "generate"

    def _check_task(self) -> None:
        if self.documents > 1 and self.task != "rerank":
            raise ValueError(f"documents is {self.documents}, but task is {self.task!r}; only rerank has documents")
        if self.documents > 1 and isinstance(self.arrivals, ClosedLoop):
            raise ValueError("a closed loop sends prompts one by one; leave documents out, or give other arrivals")
        if not self.is_pooling:
            return
        for name in ("output_tokens", "total_tokens", "sessions", "tenants", "clients", "lengths_seed"):
            if getattr(self, name):
                raise ValueError(f"task is {self.task!r}, whose requests have no output; leave {name} out")

    @property
    def has_media(self) -> bool:
        """Whether requests have images or videos."""
        return self.draws_media or self.vision is not None

    @property
    def draws_media(self) -> bool:
        """Whether images and videos are drawn: those of a trace are then left out."""
        return any(media is not None and media.is_drawn for media in (self.images, self.videos))

    @property
    def traces(self) -> tuple[Trace, ...]:
        return tuple(source.trace for source in (self, *self.tenants) if source.trace is not None)

    @property
    def is_real_traffic(self) -> bool:
        """Whether lengths come from recorded requests, and not from distributions."""
        return self.clients is not None or bool(self.traces)

    def has_random_tokens(self, client: Client) -> bool:
        """Whether prompts are random tokens: as given, or as `client` sends where no requests were recorded."""
        usual = bool(client.random_tokens) and not self.is_real_traffic
        return usual if self.random_tokens is None else self.random_tokens

    def sampling_of(self, model: ModelSpec) -> tuple[Sampling, str]:
        """Return the sampling of requests to `model`, without gaps, and where such a sampling comes from."""
        published = model.generation
        own = (published or NEUTRAL).over(NEUTRAL)
        default, source = GREEDY, GREEDY_CLIENT
        if self.is_real_traffic:
            default, source = (GREEDY, GREEDY_ASSUMED) if published is None else (own, PUBLISHED)
        if self.sampling is None:
            return default, source
        given = self.sampling.over(own)
        if given == default or (given.is_greedy and given.text == default.text):
            return given, source
        return given, PUBLISHED if published is not None and given == own else "as given"

    def _check_lengths_seed(self) -> None:
        if self.lengths_seed is None:
            return
        drawn = isinstance(self.input_tokens, int | Uniform) and isinstance(self.output_tokens, int | Uniform)
        if not drawn or self.tenants or self.sessions is not None or self.shared_prompts is not None:
            raise ValueError("lengths_seed needs input_tokens and output_tokens, numbers or uniform, and nothing else")

    def _check_tenants(self) -> None:
        for name in ("input_tokens", "output_tokens", "total_tokens", "trace", "sessions", "shared_prompts"):
            if getattr(self, name) is not None:
                raise ValueError(f"with tenants, {name} belongs to each of them")
        for tenant in self.tenants:
            if tenant.share is None and tenant.arrivals is None and tenant.trace is None:
                raise ValueError(f"tenant {tenant.name!r} has neither a share nor arrivals; give one")
            if tenant.share is not None and self.arrivals is None:
                raise ValueError(f"tenant {tenant.name!r} has a share, but the workload has no arrivals to share")
            tenant._check_lengths_given(*(["arrivals"] if tenant.share is None else []))
        if self.arrivals is not None and all(tenant.share is None for tenant in self.tenants):
            raise ValueError("no tenant has a share of the workload's arrivals; give shares, or leave arrivals out")

    def _check_end(self) -> None:
        if self.duration_s is not None and self.arrivals is not None and not self._ends_by_time:
            raise ValueError("duration_s cannot end a closed loop or a single burst; give num_requests")
        bursts = (each.name for each in self.tenants if not each._ends_by_time and each.trace is None)
        endless = next(bursts, None)
        if endless is not None and self.num_requests is None:
            raise ValueError(f"duration_s cannot end the single burst of tenant {endless!r}; give num_requests")
        if self.num_requests is not None or self.duration_s is not None or self.trace is not None:
            return
        sources = [self.arrivals, *(tenant.arrivals for tenant in self.tenants)]
        if not all(source is None or isinstance(source, Recorded) for source in sources) or self.clients is not None:
            raise ValueError("num_requests is missing; give num_requests or duration_s")
