"""The load that a benchmark client sends, as the text that starts it says."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.units import format_count

Tokens = int | dict[str, Any] | None
"""Lengths as in a workload; None: the text does not say them."""


@dataclass(frozen=True)
class ClientLoad:
    """Lengths, arrivals and the number of the requests; of several concurrencies each is a run of its own."""

    client: str
    """What the text calls the client."""
    input_tokens: Tokens = None
    output_tokens: Tokens = None
    concurrencies: tuple[int, ...] = ()
    rate_per_s: float | None = None
    """None: as fast as the concurrency allows."""
    gap_cv: float = 1.0
    """Coefficient of variation of the gaps between requests that a rate sends: 1 is Poisson, 0 equal gaps."""
    num_requests: int | None = None
    requests_per_client: int | None = None
    """Requests for each of the concurrency, in place of `num_requests`."""
    program: str | None = None
    """The client's name in the catalog."""
    shared_tokens: int = 0
    """Tokens with which all prompts begin, not among `input_tokens`."""
    left_out: tuple[str, ...] = ()
    """Sentences on what is not read."""

    @property
    def lengths(self) -> tuple[Tokens, Tokens]:
        return self.input_tokens, self.output_tokens

    def most_requests(self, concurrency: int | None = None) -> int:
        """Return the requests of the run with the given or the largest concurrency; 0 where nothing says them."""
        clients = concurrency or max(self.concurrencies, default=0)
        return self.num_requests or (self.requests_per_client or 0) * clients

    def workload(self, concurrency: int | None = None) -> dict[str, Any]:
        """Return the workload as builtins, of the largest concurrency where none is given."""
        clients = concurrency or max(self.concurrencies, default=None)
        fields = {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "arrivals": self._arrivals(clients) if clients or self.rate_per_s or self.num_requests else None,
            "num_requests": self.most_requests(clients) or None,
            "client": self.program,
            "shared_prompts": {"tokens": self.shared_tokens} if self.shared_tokens else None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _arrivals(self, clients: int | None) -> dict[str, Any]:
        if clients is not None:
            released = {} if self.rate_per_s is None else {"rate_per_s": self.rate_per_s, "cv": self.gap_cv}
            return {"type": "closed_loop", "concurrency": clients, **released}
        if self.rate_per_s is None:
            return {"type": "burst"}
        kind = {0.0: "static", 1.0: "poisson"}.get(self.gap_cv, "gamma")
        return {"type": kind, "rate_per_s": self.rate_per_s} | ({"cv": self.gap_cv} if kind == "gamma" else {})

    def sentence(self, workload: dict[str, Any], taken: Collection[str], is_sized: bool = False) -> str:
        """Say what of `workload` is taken, empty for nothing; `is_sized`: the clients, or the rate, are looked for."""
        arrivals = workload.get("arrivals", {})
        clients, rate = arrivals.get("concurrency"), arrivals.get("rate_per_s")
        sent = [
            *([f"concurrency {clients:,}"] if clients is not None else []),
            *([f"{rate:g} requests/s"] if rate is not None else []),
        ]
        if is_sized:
            sent = ["an open loop" if clients is None else "a closed loop"]
        shared = f" behind {self.shared_tokens:,} that all share" if self.shared_tokens else ""
        parts = {
            "input_tokens": f"prompts of {_tokens(workload.get('input_tokens'))}{shared}",
            "output_tokens": f"outputs of {_tokens(workload.get('output_tokens'))}",
            "arrivals": " at ".join(sent) or "all sent at once",
            "num_requests": format_count(workload.get("num_requests", 0), "request"),
        }
        said = ", ".join(text for name, text in parts.items() if name in taken and name in workload)
        if not said:
            return ""
        is_choice = "arrivals" in taken and len(self.concurrencies) > 1 and not is_sized
        others = _choices(self.concurrencies) if is_choice else ""
        return f"load of {self.client}: {said}{others}"


def _choices(concurrencies: Sequence[int]) -> str:
    every = ",".join(map(str, concurrencies))
    return (
        f"; the largest of its concurrencies {every.replace(',', ', ')}: --concurrency takes another, and windtunnel "
        f"whatif --vary concurrency={every} compares them"
    )


def _tokens(lengths: Tokens) -> str:
    if not isinstance(lengths, dict):
        return f"{lengths or 0:,} tokens"
    if "mean_tokens" in lengths:
        return f"{lengths['mean_tokens']:,} tokens in the mean (standard deviation {lengths['std_tokens']:,})"
    return f"{lengths['min_tokens']:,} to {lengths['max_tokens']:,} tokens"
