"""Drive requests through an engine in this process, on a virtual clock that advances by the time of each step.

Idle time is jumped over and never slept through. On a clock of CPU time the run does not depend on what else the
machine does, so that a real engine can be compared with a simulated one on a busy machine.
"""

import numpy as np
from numpy.typing import NDArray

from readers.engine_run import RawRun, RecordedRequest, RecordedStep
from windtunnel.lab.stepped import FIRST_TOKEN_ID, SteppedEngine
from windtunnel.lab.timing import measure_pressure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def drive(
    engine: SteppedEngine, arrival_s: Floats, input_tokens: Ints, output_tokens: Ints, vocabulary: int, seed: int = 0
) -> RawRun:
    """Serve requests as they arrive; times are those of the engine's own clock.

    Args:
        engine: idle.
        arrival_s: ascending.
        input_tokens, output_tokens: of each request; prompts are random.
        vocabulary: token ids to draw from.
        seed: of the prompts.

    Returns:
        Requests, steps and the time of every output token, as `readers.engine_run` keeps them.
    """
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(FIRST_TOKEN_ID, vocabulary, n).tolist() for n in input_tokens]
    token_times: dict[str, list[float]] = {str(i): [] for i in range(arrival_s.size)}
    steps: list[RecordedStep] = []
    now_s, sent, num_missing = 0.0, 0, 0
    pressure = measure_pressure()
    while sent < arrival_s.size or num_missing:
        if not num_missing:
            now_s = max(now_s, float(arrival_s[sent]))
        before_s = engine.now()
        while sent < arrival_s.size and arrival_s[sent] <= now_s:
            engine.add(str(sent), prompts[sent], int(output_tokens[sent]))
            num_missing += int(output_tokens[sent])
            sent += 1
        step = engine.step()
        spent_s = engine.now() - before_s
        now_s += spent_s
        for name, count in step.progressed.items():
            times = token_times[name]
            num_missing -= count - len(times)
            times += [now_s] * (count - len(times))
        scheduled = tuple((int(name), count) for name, count in step.scheduled.items())
        steps.append(RecordedStep(cpu_s=spent_s, wall_s=spent_s, scheduled=scheduled))
    requests = tuple(
        RecordedRequest(float(sent_s), int(n), int(m))
        for sent_s, n, m in zip(arrival_s, input_tokens, output_tokens, strict=True)
    )
    by_request = {name: tuple(times_s) for name, times_s in token_times.items()}
    return RawRun(requests, tuple(steps), by_request, cpu_pressure=pressure() or 0.0)
