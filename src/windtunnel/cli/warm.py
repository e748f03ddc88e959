"""`windtunnel warm`: compile the loops that runs need, so that the first run of each kind starts at once."""

import os
from pathlib import Path
from typing import Any

from windtunnel.api import capacity
from windtunnel.cli.output import remark, status
from windtunnel.cli.verbs import Options
from windtunnel.compiled.jit import SHIP_TO
from windtunnel.schema import read_yaml
from windtunnel.serving.shorthand import scenario
from windtunnel.serving.simulate import simulate
from windtunnel.twin.live import LiveLoop, prepare_live

KNOWN: Any = read_yaml(Path(__file__).with_suffix(".yaml"))
FORMS: dict[str, dict[str, Any]] = KNOWN["forms"]
"""What runs most often -> its settings; each compiles a form of the serving loop."""
SERVED = {f"a server of {name}": FORMS[name] for name in ("vLLM", "SGLang")}
"""Forms that `windtunnel serve` has, in code of their own."""
GREATEST_LOAD = "the greatest load"
"""The form that `capacity` runs: it ends early."""
NAMES = (*FORMS, *SERVED, GREATEST_LOAD)
ANY_PROCESSOR = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


def command(options: Options) -> None:
    """Simulate a few requests in each form, start a server in some, and look for the greatest load."""
    if options.out is not None:
        os.environ |= ANY_PROCESSOR  # before numba is imported, and before the processor is asked for
        SHIP_TO.append(options.out)
    with status() as show:
        for number, name in enumerate(NAMES, start=1):
            show(f"compiling form {number} of {len(NAMES)}: {name}, about ten seconds")
            run(name)
    remark(f"compiled {len(NAMES)} forms of the serving loop: {', '.join(NAMES)}")


def run(name: str) -> None:
    """Run a form."""
    settings = {"model": "llama-3.2-1b", **(FORMS | SERVED).get(name, {})}
    load: dict[str, Any] = {"rate_per_s": 1} if name in SERVED else {"concurrency": 2, "num_requests": 4}
    described = scenario(**KNOWN["common"], settings=settings, **load)
    if name in SERVED:
        LiveLoop(prepare_live(described, max_requests=4), 4).start()
    elif name == GREATEST_LOAD:
        capacity(described, "ttft_p99=10s", num_streams=1)
    else:
        simulate(described)
