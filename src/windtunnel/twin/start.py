"""From a scenario to a server of its twin."""

from collections.abc import Sequence
from pathlib import Path

from windtunnel.errors import InputError
from windtunnel.serving.scenario import Scenario
from windtunnel.twin.clock import TwinClock
from windtunnel.twin.engine import Twin
from windtunnel.twin.faults import TwinFault
from windtunnel.twin.kv_events import KvEvents
from windtunnel.twin.live import MAX_REQUESTS, LiveDeployment, prepare_live
from windtunnel.twin.metrics import Metrics
from windtunnel.twin.passes import ForwardPasses
from windtunnel.twin.protocol import Limits
from windtunnel.twin.server import TwinApp
from windtunnel.twin.tokens import ModelTokenizer, PieceTokenizer
from windtunnel.workload.generate.requests import generate


def twin_app(
    scenario: Scenario,
    speed: float | None = 1.0,
    tokenizer: Path | None = None,
    names: Sequence[str] = (),
    allow_download: bool = False,
    max_requests: int = MAX_REQUESTS,
    faults: Sequence[TwinFault] = (),
    by_port: bool = False,
) -> TwinApp:
    """Return the application of a scenario's twin.

    Args:
        scenario: its deployment answers; of its workload only the lengths of answers count.
        speed: simulated seconds in a second; None: as fast as it can.
        tokenizer: folder of a model's own; None: one that needs no file.
        names: under which the model is served, LoRA adapters behind it; empty: the scenario's name of the model.
        allow_download: look models up on the Hugging Face hub too.
        max_requests: requests that may be under way.
        faults: what goes wrong, and when.
        by_port: every replica has a port of its own, and the deployment's router does nothing.

    Raises:
        InputError: the scenario, or the tokenizer, cannot be served.
    """
    if max_requests < 1:
        raise InputError(f"max_requests is {max_requests}; at least 1 is needed")
    output_tokens = generate(scenario.workload, scenario.seed).output_tokens.tolist()
    deployment: LiveDeployment = prepare_live(scenario, allow_download=allow_download, max_requests=max_requests)
    first, clock = deployment.first, TwinClock(speed)
    num_replicas = sum(pool.settings.num_replicas for pool in deployment.prepared.pools)
    models = list(names) or [scenario.model_name]
    metrics = Metrics(first.setup.engine.name, models[0], num_replicas, deployment.max_model_len)
    twin = Twin(deployment, clock, max_requests, metrics, faults, by_port)
    twin.live.on_steps = metrics.steps
    own = PieceTokenizer() if tokenizer is None else ModelTokenizer(tokenizer)
    return TwinApp(twin, own, Limits(models, deployment.max_model_len, output_tokens), metrics)


def write_forward_passes(twin: Twin, path: Path) -> ForwardPasses:
    """Write every step of a twin to a `.jsonl` file from now on.

    Raises:
        InputError: the file cannot be written.
    """
    speculation = twin.deployment.first.plan.speculation
    return ForwardPasses(twin.live, path, 1 if speculation is None else speculation.num_queries)


def publish_kv_events(twin: Twin, host: str, port: int) -> KvEvents:
    """Publish what the prefix caches of a twin have, from now on; each replica has a port, from `port` on.

    Raises:
        InputError: there are no prefix caches, or a port is taken.
    """
    if twin.live.forest is None:
        raise InputError("there are no KV events without a prefix cache", "set engine.enable_prefix_caching")
    ranks = [pool.settings.ranks_per_replica for pool in twin.deployment.prepared.pools]
    events = KvEvents(twin.live.forest, ranks, host, port)
    twin.on_look = events.look_sometimes
    return events
