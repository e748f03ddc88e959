"""Faults of a twin at times that its user chooses: slow steps, a KV link that is down, a cold cache, lost memory.

Failures of replicas belong to the scenario (`deployment.faults`); what is here changes the tables of a run under way.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from windtunnel.errors import InputError, check_known
from windtunnel.twin.live import LiveLoop

DEVICE_TIMES = (
    *("decode_token_s", "mixed_token_s", "sample_s", "decode_attention_s", "prefill_attention_s", "group_token_s"),
    *("draft_s", "mixed_decode_attention_s", "waiting_attention_s"),
)
"""Fields of `StepCost` that are times of the device; those of the host stay."""
SLOWDOWNS = ("slow_rank", "throttled_clock")
FAULTS = (*SLOWDOWNS, "kv_link_down", "cold_cache", "preemption_storm")
FORM = "NAME=AMOUNT@FROM..TO, in simulated seconds, for instance slow_rank=1.5@60..120 or cold_cache@60"
_NUMBER = r"\d+(?:\.\d+)?"
_TEXT = re.compile(rf"(?P<name>\w+)(=(?P<amount>{_NUMBER}))?@(?P<begin>{_NUMBER})(\.\.(?P<end>{_NUMBER}))?")


class TwinFault(NamedTuple):
    """One fault."""

    name: str
    """`slow_rank` and `throttled_clock`: the device takes `amount` times as long for every step, as all ranks wait for
    the slowest. `kv_link_down`: KV transfers that would begin wait until `end_s`. `cold_cache`: nothing is found in the
    prefix caches that was there before. `preemption_storm`: a share `amount` of all KV blocks is gone, as soon as they
    are free."""
    amount: float
    begin_s: float
    end_s: float


def fault_of(text: str) -> TwinFault:
    """Parse `--fault`; InputError where it has another form, or no such fault is known."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"--fault {text} cannot be read", f"its form is {FORM}")
    name = match["name"]
    check_known(name, FAULTS, f"--fault: there is no fault {name!r}", f"known: {', '.join(FAULTS)}")
    amount, begin_s, end_s = float(match["amount"] or 0.0), float(match["begin"]), float(match["end"] or math.inf)
    if end_s <= begin_s:
        raise InputError(f"--fault {text} ends before it begins", f"its form is {FORM}")
    if name in SLOWDOWNS and not amount > 0:
        raise InputError(f"--fault {text} needs how many times as long steps take", f"for instance {name}=1.5@60..120")
    if match["amount"] and name in ("kv_link_down", "cold_cache"):
        raise InputError(f"--fault {text} has an amount, and {name} takes none", f"for instance {name}@60..120")
    if name == "preemption_storm" and not 0 < amount < 1:
        raise InputError(
            f"--fault {text} needs the share of KV blocks that is gone", f"for instance {name}=0.5@60..120"
        )
    if name == "kv_link_down" and math.isinf(end_s):
        raise InputError(f"--fault {text} has no end", "for instance kv_link_down@60..120")
    return TwinFault(name, amount, begin_s, end_s)


class FaultPlan:
    """Applies faults to a run at their times; InputError where the deployment has nothing that one could change."""

    def __init__(self, live: LiveLoop, faults: Sequence[TwinFault]) -> None:
        self._live = live
        begins = [(fault.begin_s, number, True) for number, fault in enumerate(faults)]
        ends = [(fault.end_s, number, False) for number, fault in enumerate(faults) if math.isfinite(fault.end_s)]
        self._faults, self._changes = list(faults), sorted(begins + ends, reverse=True)
        self._taken: dict[int, np.ndarray[Any, Any]] = {}
        """Fault -> blocks of each rank that it has taken."""
        names = {fault.name for fault in faults}
        if "kv_link_down" in names and live.loop.pools is None:
            raise InputError("--fault kv_link_down: the deployment has no pools between which KV is sent")
        if "cold_cache" in names and live.forest is None:
            raise InputError("--fault cold_cache: the deployment has no prefix cache")

    def next_s(self) -> float:
        """Return when the next fault begins or ends."""
        return self._changes[-1][0] if self._changes else math.inf

    def apply(self, now_s: float) -> None:
        """Let the faults begin and end that do so by `now_s`."""
        while self._changes and self._changes[-1][0] <= now_s:
            _, number, begins = self._changes.pop()
            fault = self._faults[number]
            if fault.name in SLOWDOWNS:
                cost = self._live.cost if self._live.loop.pools is None else self._live.loop.pools.cost
                for name in DEVICE_TIMES:
                    times = getattr(cost, name)
                    times *= fault.amount if begins else 1 / fault.amount
            elif fault.name == "kv_link_down" and begins:
                handoffs = self._live.tables.handoffs
                handoffs["link_free_s"] = np.maximum(handoffs["link_free_s"], fault.end_s)
            elif fault.name == "cold_cache" and begins:
                assert self._live.forest is not None
                self._live.forest.known.clear()
            elif fault.name == "preemption_storm" and begins:
                self._taken[number] = np.zeros(self._live.tables.ranks.size, np.int64)
            elif fault.name == "preemption_storm":
                self._live.tables.ranks["free_blocks"] += self._taken.pop(number)
        if self._taken:
            self.take_blocks()

    def take_blocks(self) -> None:
        """Take free blocks, as far as a fault has not had its share yet."""
        ranks = self._live.tables.ranks
        for number, taken in self._taken.items():
            wanted = (self._live.num_blocks * self._faults[number].amount).astype(np.int64) - taken
            more = np.clip(np.minimum(wanted, ranks["free_blocks"]), 0, None)
            ranks["free_blocks"] -= more
            taken += more

    @property
    def takes_blocks(self) -> bool:
        return bool(self._taken)
