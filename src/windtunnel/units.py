"""SI constants, and where text becomes a number: `80GiB`, `400Gbps`, `25us`, and release numbers such as `1.3.0rc5`.

Inside the program every quantity is SI and its unit is in its name: `_s`, `_bytes`, `_bytes_per_s`, `_flops`,
`_flops_per_s`, `_per_s`, `_w`. Files may use human units; `parse_quantity` converts them once, on load, choosing the
dimension by the name's suffix.
"""

import math
import re
from functools import lru_cache

from windtunnel.errors import InputError

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB, TIB = 2.0**10, 2.0**20, 2.0**30, 2.0**40
US, MS = 1e-6, 1e-3

_BYTES = {"B": 1.0, "kB": KB, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SECONDS = {"ns": 1e-9, "us": US, "ms": MS, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BITS_PER_S = {"bps": 0.125, "kbps": 125.0, "Kbps": 125.0, "Mbps": 125e3, "Gbps": 125e6, "Tbps": 125e9}
_FLOPS = {"FLOP": 1.0, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15}

UNITS_BY_SUFFIX: dict[str, dict[str, float]] = {
    "_bytes_per_s": {f"{unit}/s": scale for unit, scale in _BYTES.items()} | _BITS_PER_S,
    "_flops_per_s": {f"{unit}/s": scale for unit, scale in _FLOPS.items()} | {f"{u}S": s for u, s in _FLOPS.items()},
    "_usd_per_hour": {"USD/h": 1.0, "$/h": 1.0},
    "_per_s": {"/s": 1.0, "/min": 1 / 60, "/h": 1 / 3600, "Hz": 1.0, "MHz": 1e6, "GHz": 1e9},
    "_bytes": _BYTES,
    "_flops": _FLOPS,
    "_s": _SECONDS,
    "_w": {"W": 1.0, "kW": 1e3, "MW": 1e6},
}
"""Suffix of a quantity's name -> unit -> factor to SI. The first suffix that fits decides."""

_QUANTITY = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*$")


@lru_cache(maxsize=4096)
def units_for(name: str) -> dict[str, float] | None:
    """Return the units that a quantity called `name` accepts; None where its name has no unit."""
    return next((units for suffix, units in UNITS_BY_SUFFIX.items() if f"_{name}".endswith(suffix)), None)


def parse_quantity(name: str, text: str) -> float:
    """Return the SI value of `text`, read as the quantity called `name` (`memory_bytes`, `latency_s`, ...). InputError
    where `text` is not a number with a unit of that dimension."""
    units = units_for(name)
    match = _QUANTITY.match(text)
    if units is None or match is None:
        raise InputError(f"{name}: {text!r} is not a number" + (_allowed_units(units) if units else ""))
    number, unit = match.groups()
    if unit and unit not in units:
        near = " or ".join(known for known in units if known.lower().startswith(unit.lower()))
        raise InputError(f"{name}: {text!r} has the unit {unit!r}{_allowed_units(units)}", near and f"write {near}")
    value = float(number) * (units[unit] if unit else 1.0)
    if not math.isfinite(value):
        raise InputError(f"{name}: {text!r} is not a finite number")
    return value


_THOUSANDS = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "B": 1e9, "t": 1e12, "T": 1e12}
_THOUSANDS |= {"K": 2**10, "M": 2**20, "G": 2**30}


def whole(text: str) -> int:
    """Read `8192`, `8k` (8,000), `8K` (8,192), `1m`, `1M`, `1g` or `1G`, as vLLM does; `15T` tokens are 15e12.
    ValueError where it is none of these."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGbBtT]?)", text.replace(",", "").replace("_", ""))
    if match is None:
        raise ValueError("a whole number is needed")
    if not match[2]:
        return int(match[1])
    return int(float(match[1]) * _THOUSANDS[match[2]])


def _allowed_units(units: dict[str, float]) -> str:
    return f"; allowed: {', '.join(units)}"


def format_seconds(seconds: float) -> str:
    """Return seconds for people: three significant digits in the unit that fits (`12.3 ms`)."""
    for unit, scale in (("s", 1.0), ("ms", MS), ("us", US)):
        if abs(seconds) >= 0.9995 * scale:  # else three digits would be 1000 of the next unit
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def format_count(count: int, singular: str, plural: str | None = None) -> str:
    """Return `1 run` or `1,024 runs`; `plural` where it is not `singular` with an s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def format_bytes(num_bytes: float) -> str:
    """Return bytes for people, in binary units (`78.2 GiB`)."""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= scale:
            return f"{_three_digits(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} B"


def format_si(value: float, unit: str) -> str:
    """Return a value with an SI prefix (`1.98 PFLOP/s`)."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{_three_digits(value / scale)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def _three_digits(value: float) -> str:
    rounded = float(f"{value:.3g}")
    if rounded == 0 or not math.isfinite(rounded):
        return f"{rounded:.0f}"
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


@lru_cache(1024)
def version_key(version: str) -> tuple[int, ...]:
    """Return a version as six numbers that compare: `0.19.0` < `0.24`, `1.3.0rc5` < `1.3.0`, a nightly build newest.
    InputError where it is neither a number nor a nightly build."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:(rc|a|b|\.?dev|\.?post)(\d+))?", version)
    if match is None:
        if is_unreleased(version):
            return (10**6, 0, 0, 0, 0, 0)
        raise InputError(f"{version!r} is not a version", "write it as the engine does: 0.19.0, 1.3.0rc5, nightly")
    numbers = [int(part) for part in match[1].split(".")]
    stage = {"a": -3, "b": -2, "rc": -1, None: 0}.get(match[2], 1 if match[2] and "post" in match[2] else -4)
    return (*(numbers + [0] * 4)[:4], stage, int(match[3] or 0))


def is_unreleased(version: str) -> bool:
    """Whether a version is a build between releases, such as `nightly-5b8c30d` and `main`."""
    return re.match(r"nightly|main|latest|dev", version) is not None
