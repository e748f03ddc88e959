"""Numbers as people read them."""

from collections.abc import Mapping

from windtunnel.model.precision import Precision
from windtunnel.units import format_bytes, format_seconds, format_si


def percent(share: float, limit: float = 1.0) -> str:
    """Return a ratio as a percentage with three significant digits at most: `12.3%`.

    A share that is not 0 is never rounded to it, and one below `limit` not up to that: `<0.1%`, `>99.9%`.
    """
    text = f"{share:.0%}" if share >= 0.9995 else f"{share:.1%}"
    if 0 < abs(share) < 0.0005:
        return "<0.1%" if share > 0 else ">-0.1%"
    if 0.9995 <= share < 1 - _ROUNDING:
        return ">99.9%"
    if share < limit - _ROUNDING and float(text[:-1]) >= 100 * limit:
        return f"just below {text}"
    return text


_ROUNDING = 1e-9
"""Sums of shares are off by less."""


def words(name: str) -> str:
    """Return a name as words: `KV capacity`."""
    return name.replace("_", " ").replace("kv ", "KV ")


def shares_of(seconds: Mapping[str, float], has_words: bool = True) -> dict[str, float]:
    """Return the shares of a whole by name; names that are words get spaces."""
    total_s = sum(seconds.values()) or 1.0
    return {words(name) if has_words else name: part / total_s for name, part in seconds.items()}


def billions(count: float) -> str:
    """Return a large count for people: `2.62 million`, `300 billion`, `15.0 trillion`."""
    sizes = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
    return next((f"{number(count / size)} {name}" for size, name in sizes if count >= size), f"{count:,.0f}")


def dollars(usd: float) -> str:
    """Return a price for people: `$1,234,567`, `$12.30`, `<$0.01`."""
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:.2f}" if usd >= 0.01 else "<$0.01"


def energy(joules: float) -> str:
    """Return an energy for people: `12,300 MWh`, `75.2 Wh`."""
    return f"{number(joules / 3.6e9)} MWh" if joules >= 3.6e9 else format_si(joules / 3600, "Wh")


def duration(seconds: float) -> str:
    """Return a duration for people: `188 s`, `27.2 min`, `8.08 h`, `238 days`."""
    if seconds >= 3 * 86400:
        return f"{number(seconds / 86400)} days"
    if seconds >= 3600:
        return f"{number(seconds / 3600)} h"
    return f"{number(seconds / 60)} min" if seconds >= 600 else format_seconds(seconds)


def number(value: float) -> str:
    """Return a count or a rate for people: `3,486`, `55.9`, `0.0312`."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def times(ratio: float) -> str:
    """Return a ratio for people, three digits of it: `2`, `11.7`, `4,470,000`."""
    return f"{float(f'{ratio:.3g}'):,.10g}"


def quantity(name: str, value: float) -> str:
    """Return a figure for people, in the unit that its name says: `ttft_p99_s`, `busy_fraction`, `num_devices`."""
    if name.endswith("_s") and not name.endswith("_per_s"):
        return format_seconds(value)
    if name.endswith(("_fraction", "_error")) or name in ("mfu", "hfu"):
        return percent(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("bytes_per_s"):
        return format_si(value, "B/s")
    if name.endswith(("_flops", "flops_per_s")):
        return format_si(value, "FLOP" if name.endswith("_flops") else "FLOP/s")
    if name.startswith("mean_"):
        return f"{value:,.1f}"
    if "usd" in name:
        return f"{value:#.2g}" if 0 < value < 0.0995 else f"{value:,.2f}"
    return f"{value:,.0f}" if name.startswith("num_") else number(value)


def formats(precision: Precision) -> str:
    """Return the formats of a deployed model in a few words: `fp8 weights, bf16 KV cache`."""
    parts = [f"{precision.weights} weights"]
    if precision.experts_format != precision.weights:
        parts.append(f"{precision.experts_format} experts")
    if precision.attention_format != precision.weights:
        parts.append(f"{precision.attention_format} attention")
    if precision.attention_output_format != precision.attention_format:
        parts.append(f"{precision.attention_output_format} output projections")
    return ", ".join([*parts, f"{precision.kv_cache} KV cache"])


def span_text(low: str, high: str) -> str:
    """Join `43.4 ms` and `101 ms` to `43.4-101 ms`; both units where they differ."""
    number_of, _, unit = low.partition(" ")
    return f"{number_of}\u2013{high}" if unit and unit == high.partition(" ")[2] else f"{low}\u2013{high}"
