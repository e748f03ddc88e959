"""Draws of requests from a model of a service's clients."""

from pathlib import Path

import numpy as np

from windtunnel.compiled.arrays import Bools, Floats
from windtunnel.errors import InputError
from windtunnel.limits import check_size
from windtunnel.workload.arrivals import MAX_REQUESTS
from windtunnel.workload.generate.draws import Counts, Seconds, draw_indices
from windtunnel.workload.schema import ClientModel
from windtunnel.workload.traces.servegen import LENGTHS, Client, read_clients


def draw_clients(
    model: ClientModel, limit: int | None, duration_s: float | None, rngs: dict[str, np.random.Generator]
) -> tuple[Seconds, Counts, Counts]:
    """Draw the requests of all clients, until `limit`, `duration_s` or the end of the model. InputError where the model
    cannot be read, or no client sends a request before the end.

    Returns:
        (arrival times, prompt tokens, output tokens), arrays of shape `[num_requests]`, in order of arrival.
    """
    every = _with_lengths(read_clients(Path(model.path)), model)
    by_rate = sorted(every, key=lambda client: -float(client.rate_per_s.sum()))
    clients = sorted(by_rate[: model.num_clients], key=lambda client: client.number)
    starts = clients[0].start_s
    window_s = float(starts[1] - starts[0])
    end_s = float(starts[-1]) + window_s
    last_s = end_s if duration_s is None else min(model.start_s + duration_s, end_s)
    if model.start_s >= end_s:
        raise InputError(f"{model.path} ends at {end_s:g} s; start_s is {model.start_s:g} s")

    def recorded(until_s: float) -> float:
        """Return the recorded requests from the model's start on."""
        return float(sum(_expected(client, model.start_s, until_s, window_s).sum() for client in clients))

    factor, rated_s = 1.0, last_s if limit is None else end_s
    if model.rate_per_s is not None:
        if recorded(rated_s) == 0:
            raise InputError(f"no client of {model.path} sends a request from {model.start_s:g} s to {rated_s:g} s")
        factor = model.rate_per_s / (recorded(rated_s) / (rated_s - model.start_s))
    if limit is not None:
        last_s = min(last_s, _end_of(clients, model.start_s, window_s, limit / factor))
    expected = recorded(last_s) * factor
    if expected > MAX_REQUESTS:
        raise InputError(f"the workload has about {expected:.3g} requests, but at most {MAX_REQUESTS} can be simulated")
    check_size(requests_drawn=expected)
    parts = [_requests_of(client, model.start_s, last_s, window_s, factor, rngs) for client in clients]
    arrival_s, inputs, outputs = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(arrival_s, kind="stable")[:limit]
    if not order.size:
        raise InputError(f"no client of {model.path} sends a request from {model.start_s:g} s to {last_s:g} s")
    return arrival_s[order], inputs[order], outputs[order]


def _with_lengths(clients: list[Client], model: ClientModel) -> list[Client]:
    """Return the clients with known lengths; raise InputError where the model refuses clients without them."""
    known = [client for client in clients if client.lengths or not client.rate_per_s.any()]
    unknown = [client for client in clients if client.rate_per_s.any() and not client.lengths]
    if (unknown and model.without_lengths == "refuse") or not known:
        rates = [float(client.rate_per_s.sum()) for client in (*unknown, *known)]
        share = sum(rates[: len(unknown)]) / sum(rates)
        raise InputError(
            f"{model.path}: {len(unknown)} of {len(clients)} clients, who send {share:.0%} of the requests, have no "
            f"file of lengths (client {unknown[0].number}, for instance)",
            "go on without them: workload.clients.without_lengths: leave_out",
        )
    return known


def _expected(client: Client, start_s: float, last_s: float, window_s: float) -> Floats:
    """Return the recorded requests of each window between the two times."""
    ends = np.minimum(client.start_s + window_s, last_s)
    return np.asarray(client.rate_per_s * np.maximum(ends - np.maximum(client.start_s, start_s), 0.0))


def _end_of(clients: list[Client], start_s: float, window_s: float, count: float) -> float:
    """Return the end of the window in which `count` requests have come, and one more window for chance."""
    expected = sum(_expected(client, start_s, np.inf, window_s) for client in clients)
    window = int(np.searchsorted(np.cumsum(expected), count * 1.01 + len(clients)))
    starts = clients[0].start_s
    return float(starts[min(window + 1, starts.size - 1)]) + window_s


def _requests_of(
    client: Client, start_s: float, last_s: float, window_s: float, factor: float, rngs: dict[str, np.random.Generator]
) -> tuple[Seconds, Counts, Counts]:
    """Draw one client's requests: whole windows, of which requests outside the span are left out."""
    inside = (client.start_s + window_s > start_s) & (client.start_s < last_s)
    expected = client.rate_per_s[inside] * window_s * factor
    counts = np.floor(expected + rngs["turns"].random(expected.size)).astype(np.int64)
    window = np.repeat(np.flatnonzero(inside), counts)
    arrival_s = client.start_s[window] + window_s * _spread(client, inside, counts, rngs["arrivals"])
    arrival_s = np.minimum(arrival_s, np.nextafter(client.start_s[window] + window_s, 0.0))
    kept = (arrival_s >= start_s) & (arrival_s < last_s)
    inputs, outputs = _lengths_of(client, arrival_s, rngs)
    return arrival_s[kept] - start_s, inputs[kept], outputs[kept]


def _spread(client: Client, inside: Bools, counts: Counts, rng: np.random.Generator) -> Floats:
    """Draw the position of each request in its window, from 0 to 1: gaps are scaled to fill the window."""
    sizes = counts + 1
    shape = np.repeat(client.shape[inside], sizes)
    is_weibull = np.repeat(client.is_weibull[inside], sizes)
    gaps = np.where(is_weibull, rng.standard_exponential(shape.size) ** (1 / shape), rng.standard_gamma(shape))
    ends = np.cumsum(sizes)
    sums = np.cumsum(gaps)
    before = np.concatenate([[0.0], sums[ends[:-1] - 1]])
    total = sums[ends - 1] - before
    fraction = (sums - np.repeat(before, sizes)) / np.repeat(np.maximum(total, np.finfo(float).tiny), sizes)
    is_last = np.zeros(gaps.size, bool)
    is_last[ends - 1] = True
    return np.asarray(fraction[~is_last])


def _lengths_of(client: Client, arrival_s: Seconds, rngs: dict[str, np.random.Generator]) -> tuple[Counts, Counts]:
    """Draw lengths from those recorded for the period of each arrival."""
    inputs, outputs = np.zeros(arrival_s.size, np.int64), np.zeros(arrival_s.size, np.int64)
    if not arrival_s.size:
        return inputs, outputs
    period = np.maximum(np.searchsorted(client.lengths_start_s, arrival_s, side="right") - 1, 0)
    for index in np.unique(period):
        rows = np.flatnonzero(period == index)
        for column, table, stream in zip((inputs, outputs), client.lengths[index], LENGTHS, strict=True):
            column[rows] = table.tokens[draw_indices(table.weights, rows.size, rngs[stream])]
    return inputs, outputs
