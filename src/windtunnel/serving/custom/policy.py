"""Schedule by the user's function in Python, plain or compiled, which forms a replica's next batch."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from windtunnel.compiled.arrays import Floats, Ints
from windtunnel.errors import InputError, did_you_mean
from windtunnel.plugins import Registry
from windtunnel.serving.custom.time_limit import InTime
from windtunnel.serving.per_request import custom_batch
from windtunnel.serving.state.records import Speculation
from windtunnel.serving.state.tables import PoolTables, RunTables


class PolicyRequests(NamedTuple):
    """All requests, by index; arrays that a policy may read and must not change."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    """Tokens that the request will produce. A real engine does not know them."""
    priority: Ints
    prompt_tokens: Ints
    """Tokens to compute before the next output: the prompt, after a restart its outputs too."""
    processed_tokens: Ints
    """Tokens computed: of the prompt, then of the outputs too. Of a waiting request: found in the prefix cache."""
    num_blocks: Ints
    """KV blocks held."""
    is_prefilled: Ints
    """1: the request decodes, one token a step."""


class PolicyEngine(NamedTuple):
    """The replica whose batch is to be formed."""

    now_s: float
    free_blocks: int
    num_blocks: int
    block_size: int
    num_running: int
    """Requests that hold blocks, in batches under way or between two."""
    max_num_seqs: int
    max_num_batched_tokens: int
    decode_tokens: int
    """Tokens that a decoding request computes in a step: more than one with speculative decoding."""


Policy = Callable[[PolicyRequests, Ints, Ints, PolicyEngine], Any]
"""`policy(requests, waiting, ready, engine)` -> pairs of (request, tokens): the next batch.

`waiting` and `ready` are indices in order: requests that hold no blocks, and requests between two batches. A decoding
request takes 1 token, another as many as its prompt has left; 0 tokens restart a ready one. No pairs: nothing runs
until something arrives or ends. The pairs are a list of tuples or an int64 array [n, 2], so that the function may be
compiled with `numba.njit`."""


def load_function(name: str, registry: Registry) -> Any:
    """Import a function: `module:function`, from the working directory too, or the name of one that is installed.
    InputError where there is no such module or function, or the module cannot be imported."""
    if ":" not in name:
        return _function(registry.get(name), name, registry)
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(
            f"the {registry.what} {name!r} cannot be imported: {type(error).__name__}: {error}",
            "write it as module:function, the module being installed or in the working directory",
        ) from error
    policy = getattr(module, function_name, None)
    if policy is None or not callable(policy):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(
            f"the module {module_name!r} has no function {function_name!r}",
            did_you_mean(function_name, functions, f"it has: {', '.join(functions[:10])}" if functions else None),
        )
    return _function(policy, name, registry)


def _function(policy: Any, name: str, registry: Registry) -> Any:
    if callable(policy) and not isinstance(policy, type):
        return policy
    kind = "a class" if isinstance(policy, type) else f"of type {type(policy).__name__}"
    raise InputError(f"the {registry.what} {name!r} is {kind}, not a function", "name a function: module:function")


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view of an array of the loop that a user's function cannot change."""
    view = array.view()
    view.flags.writeable = False
    return view


def policy_name(policy: Callable[..., Any]) -> str:
    """Return `module:function`, as `load_function` takes it."""
    return f"{policy.__module__}:{getattr(policy, '__name__', type(policy).__name__)}"


PROBLEMS = {
    custom_batch.TWICE: "chose request {i} twice",
    custom_batch.NOT_HERE: "chose request {i}, which neither waits at this replica nor is ready",
    custom_batch.TOO_MANY_TOKENS: "gave request {i} more tokens than it has left to compute",
    custom_batch.TOO_FEW_TOKENS: "gave request {i} no tokens, or fewer",
    custom_batch.TOO_MANY_BLOCKS: "gave request {i} more tokens than there are free KV blocks for",
    custom_batch.TOO_MANY_SEQS: "chose more requests than max_num_seqs allows, with request {i}",
    custom_batch.TOO_LONG: "chose more tokens than max_num_batched_tokens allows, with request {i}",
}


class PolicyCaller:
    """Calls the policy of a pool; holds the arrays of one run, which the loop changes between two calls."""

    def __init__(
        self,
        policy: Policy,
        pool: PoolTables,
        speculation: Speculation | None,
        run: RunTables,
        most_call_s: float | None = None,
    ) -> None:
        assert run.waiting is not None
        self.call = InTime(f"the scheduler {getattr(policy, '__name__', type(policy).__name__)}", policy, most_call_s)
        self.settings, self.batches, self.waiting = pool.settings, read_only(pool.batches), read_only(run.waiting)
        self.decode_tokens = 1 if speculation is None else speculation.num_queries
        requests, progress = run.requests.view(np.ndarray), pool.sequences.view(np.ndarray)
        self.view = PolicyRequests(
            *(read_only(requests[name]) for name in ("arrival_s", "input_tokens", "output_tokens", "priority")),
            *(
                read_only(progress[name])
                for name in ("prompt_tokens", "processed_tokens", "num_blocks", "is_prefilled")
            ),
        )
        # A field of a record array costs 4 us a look; of its columns, seen as plain arrays, 0.1 us.
        registers, columns = run.clock.view(np.ndarray), pool.ranks.view(np.ndarray)
        self.slot, self.now_s, self.answered = registers["slot"], registers["event_s"], registers["answered"]
        self.culprit, self.problem = registers["culprit"], registers["problem"]
        self.free_blocks, self.num_running = columns["free_blocks"], columns["num_running"]
        self.num_ready, self.num_waiting = columns["num_ready"], columns["num_waiting"]

    def form_batch(self) -> Ints:
        """Return the policy's batch, `[n, 2]` request and tokens; InputError where it raises or returns none."""
        settings = self.settings
        replica = int(self.slot[0]) // settings.num_stages
        row = settings.num_replicas * settings.num_stages + replica
        engine = PolicyEngine(
            float(self.now_s[0]),
            int(self.free_blocks[replica]),
            settings.num_blocks,
            settings.block_size,
            int(self.num_running[replica]),
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            self.decode_tokens,
        )
        waiting, ready = self.waiting[: self.num_waiting[replica]], self.batches[row, 0, : self.num_ready[replica]]
        answer = self.call(engine.now_s, self.view, waiting, ready, engine)
        self.answered[0] = 1
        return self._as_pairs(answer)

    def refuse(self) -> NoReturn:
        """Raise InputError for the latest batch, which no engine can run."""
        problem = PROBLEMS[int(self.problem[0])].format(i=int(self.culprit[0]))
        raise InputError(f"{self.call.what} {problem}, at {float(self.now_s[0]):g} s")

    def _as_pairs(self, answer: Sequence[tuple[int, int]] | Ints | None) -> Ints:
        """Return the policy's answer as an int64 array [n, 2]."""
        try:
            given = np.asarray(answer if answer is not None else ()).reshape(-1, 2)
            with np.errstate(invalid="ignore"):
                pairs = given.astype(np.int64, copy=False)
            # A float that is whole is a number of tokens.
            if given.size and given.dtype.kind not in "iu" and not (given.dtype.kind == "f" and (given == pairs).all()):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"{self.call.what} returned {answer!r:.80}",
                "return (request, tokens) pairs: a list of tuples or an int64 array [n, 2]",
            ) from None
        return np.ascontiguousarray(pairs)
