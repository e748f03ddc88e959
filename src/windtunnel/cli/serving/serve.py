"""`windtunnel serve`: a server that answers as a scenario's deployment would."""

import gc
import re
from itertools import pairwise

import click

from windtunnel.cli.options import launched, scenario_of
from windtunnel.cli.output import compiling, remark
from windtunnel.cli.verbs import Options
from windtunnel.errors import needing
from windtunnel.schema import json_text
from windtunnel.serving.engines.command_line import Reading
from windtunnel.units import format_count

DEFAULTS = {"input_tokens": "1024", "output_tokens": "256", "rate": 1.0}
"""Load of a command line that gives none: only the lengths of answers that end by themselves come from it."""
NUM_PARTS = 3
"""Kernels of a twin: the loop, the tokens that it has given, and cancelling."""
JSON_NAMED = re.compile(r'\{[^}]*"name"\s*:\s*"([^"]+)"[^}]*\}')
"""A LoRA adapter that vLLM's `--lora-modules` describes as JSON."""
GC_THRESHOLDS = 100_000, 20, 20
"""Objects, and collections of younger ones, between looks for garbage: answers leave none that needs one."""


def command(options: Options) -> None:
    """Serve a scenario's twin until Ctrl-C."""
    launch = launched(options)
    described = scenario_of(_with_load(options), None, launch.raw)
    from windtunnel.twin.clock import speed_of
    from windtunnel.twin.faults import fault_of

    speed, faults = speed_of(options.speed), [fault_of(text) for text in options.faults]
    with needing("serve", "uvicorn"):
        from windtunnel.dashboard.listening import HOST, is_loopback
        from windtunnel.twin.server import TwinServer
        from windtunnel.twin.start import ForwardPasses, KvEvents, twin_app

    served, adapters, keys = _named_by(launch, described.model_name)
    if options.served_names:
        served, adapters = options.served_names[:1], options.served_names[1:]
    names, keys = [*served, *adapters], options.api_keys or keys
    own = options.tokenizer, names, options.hub, options.max_requests, faults, options.ports_per_replica
    with compiling(NUM_PARTS):
        app = twin_app(described, speed, *own)
    app.name_model(len(served))
    app.require_key(keys)
    host = options.host or HOST
    if options.kv_events is not None:
        KvEvents(app.twin, host, options.kv_events)
    passes = None if options.forward_passes is None else ForwardPasses(app.twin, options.forward_passes)
    num_ports = len(app.metrics.labels) if options.ports_per_replica else 1
    with TwinServer(app, host, port_of(launch) if options.port is None else options.port, num_ports) as server:

        def announce() -> None:
            if options.host is not None and not is_loopback(options.host) and not keys:
                remark(f"warning: anyone who reaches {options.host} can send requests here; --api-key asks for a key")
            document = {
                "url": f"{server.url}/v1",
                "urls": [f"{url}/v1" for url in server.urls],
                "models": list(app.limits.models),
                "speed": speed or "max",
            }
            model = app.limits.models[0]
            last = f" to {server.urls[-1].rpartition(':')[2]}" if num_ports > 1 else ""
            line = f"{model} at {server.url}/v1{last}, {app.about} (Ctrl-C ends it)"
            click.echo(json_text({**document, **launch.document}) if options.json else line)

        # Nothing of the start is ever garbage, and looking through it would hold tokens up.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        for line in () if options.json else (*launch.not_starting, *launch.remarks):
            remark(line)
        try:
            server.serve(announce)
        except KeyboardInterrupt:
            remark(f"the twin has ended after {format_count(app.num_answered, 'request')}")
        finally:
            if passes is not None:
                passes.close()


def port_of(launch: Reading) -> int:
    """Return the port that a command says; 8000 where it says none."""
    options = [pair for other in launch.others.values() for pair in pairwise(other.words)]
    return next((int(value) for option, value in options if option == "--port" and value.isdecimal()), 8000)


def _named_by(launch: Reading, model: str) -> tuple[list[str], list[str], list[str]]:
    """Return the names under which a command serves its model, those of its LoRA adapters, and its API keys.

    An adapter is NAME=PATH or JSON.
    """
    values = {"api-key": "", "served-model-name": "", "lora-modules": "", "lora-paths": ""}
    option = ""
    for word in (word for other in launch.others.values() for word in other.words):
        if word.startswith("--"):
            option = word[2:].replace("_", "-")
        elif option in values:
            values[option] += f" {word}"
    keys, served = values.pop("api-key").split(), values.pop("served-model-name").split() or [model]
    adapters = (JSON_NAMED.sub(r"\1", text) for text in values.values())
    return served, [word.partition("=")[0] for text in adapters for word in text.split()], keys


def _with_load(options: Options) -> Options:
    """Return options with a load, where there is neither a file nor a load."""
    given = vars(options)
    if options.scenario is not None or options.trace is not None:
        return options
    filled = {name: value for name, value in DEFAULTS.items() if given[name] is None}
    if options.task not in (None, "generate"):
        filled.pop("output_tokens", None)
    if options.concurrency is not None:
        filled.pop("rate", None)
    return Options(**{**given, **filled})
