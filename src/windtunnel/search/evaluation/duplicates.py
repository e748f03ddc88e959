"""Find duplicate deployments: they differ only in bounds that neither reaches, so that both have the same run."""

from dataclasses import dataclass, field

import msgspec

from windtunnel.search.capacity.capacity import Capacity
from windtunnel.search.capacity.load import Stream
from windtunnel.search.evaluation.schema import Evaluation
from windtunnel.serving.deployment import EngineSettings
from windtunnel.serving.engines.contract import scheduler_of
from windtunnel.serving.prepared import PreparedDeployment
from windtunnel.serving.setup.fleet_plan import has_fleet
from windtunnel.serving.setup.per_request import schedules_per_request
from windtunnel.serving.state import records as state

BOUNDS = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "gpu_memory_utilization", "num_gpu_blocks")
"""Engine settings that bound a scheduler; bounds that are never reached make no difference."""

Unbounded = tuple[state.KernelSettings, EngineSettings]
"""A deployment's settings without its bounds."""


@dataclass(frozen=True, eq=False)
class Done:
    """An evaluation with the figures that decide whether it is another point's too."""

    settings: state.KernelSettings
    running: int
    """Most requests at a time at the load sustained and the next, which fails; so `step_tokens` and `blocks`."""
    step_tokens: int
    blocks: int
    used_blocks: int
    """Most blocks at the load sustained alone."""
    evaluation: Evaluation


@dataclass(eq=False)
class Neighbours:
    """Answers of points that differ in knobs only: the load to begin at, and runs that serve duplicates."""

    near: float | None = None
    """Load that the last point sustains."""
    done: dict[tuple[int, Unbounded], list[Done]] = field(default_factory=dict)
    """Requests of a stream and settings -> answers."""

    def answer(self, server: PreparedDeployment, stream: Stream) -> Evaluation | None:
        """Return the answer of a duplicate deployment; None where it needs a run."""
        if not _is_plain(server):
            return None
        others = self.done.get((stream.unit.num_requests, _unbounded(server)), [])
        earlier = next((done for done in others if _same(done, server, stream)), None)
        if earlier is None:
            return None
        figures = earlier.evaluation.figures
        if earlier.used_blocks:
            num_blocks = server.pools[0].memory.num_blocks * server.pools[0].settings.ranks_per_replica
            figures = figures | {"kv_peak_fraction": earlier.used_blocks / num_blocks}
        return msgspec.structs.replace(earlier.evaluation, num_runs=0, num_requests=0, figures=figures)

    def add(self, server: PreparedDeployment, stream: Stream, capacity: Capacity, evaluation: Evaluation) -> None:
        """Keep an answer, with the runs that decided it."""
        self.near = capacity.load or self.near
        passing, beyond = (
            probe.served.steps if probe and probe.served else None for probe in (capacity.passing, capacity.beyond)
        )
        steps = [table for table in (passing, beyond) if table is not None]
        if not steps or not _is_plain(server):
            return
        done = Done(
            settings=server.pools[0].settings,
            running=max(int(table["num_running"].max()) for table in steps),
            step_tokens=max(int((table["prefill_tokens"] + table["decode_tokens"]).max()) for table in steps),
            blocks=max(int(table["used_blocks"].max()) for table in steps),
            used_blocks=0 if passing is None else int(passing["used_blocks"].max()),
            evaluation=evaluation,
        )
        self.done.setdefault((stream.unit.num_requests, _unbounded(server)), []).append(done)


def _is_plain(server: PreparedDeployment) -> bool:
    """Whether a deployment has one pool, a router that holds nothing back and no per-request scheduling."""
    is_simple = len(server.pools) == 1 and server.encoder is None and not has_fleet(server.scenario.deployment)
    return is_simple and not schedules_per_request(server.pools[0].setup)


def _unbounded(server: PreparedDeployment) -> Unbounded:
    """Return the settings that duplicate deployments must share; where the scheduler counts free blocks, all but the
    bound on requests.
    """
    settings, engine = server.pools[0].settings, server.pools[0].setup.engine
    unbounded = msgspec.structs.replace(engine, **dict.fromkeys(BOUNDS))
    if scheduler_of(engine).counts_free_blocks:
        return settings._replace(max_num_seqs=0), unbounded
    return settings._replace(max_num_seqs=0, max_num_batched_tokens=0, max_prefill_tokens=0, num_blocks=0), unbounded


def _same(done: Done, server: PreparedDeployment, stream: Stream) -> bool:
    """Whether a deployment serves both loads that decided `done` step by step as that one did.

    It does where they differ only in bounds that neither met: requests at a time, tokens of a step, KV blocks with room
    to spare for the longest request and for a block of each running one.
    """
    ours, theirs = server.pools[0].settings, done.settings
    if ours.max_num_seqs != theirs.max_num_seqs and done.running >= min(ours.max_num_seqs, theirs.max_num_seqs):
        return False
    budgets = ours.max_num_batched_tokens, theirs.max_num_batched_tokens
    if budgets[0] != budgets[1] and done.step_tokens >= min(budgets):
        return False
    if ours.num_blocks == theirs.num_blocks:
        return True
    if server.pools[0].setup.engine.enable_prefix_caching and stream.unit.prefixes is not None:
        return False
    if ours.window_tokens:
        return False
    tokens = stream.unit.input_tokens + stream.unit.output_tokens
    longest = -(-int(tokens.max()) // ours.block_size) + ours.blocks_per_request
    return done.blocks + longest + done.running < min(ours.num_blocks, theirs.num_blocks)
