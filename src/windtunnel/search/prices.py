"""Prices of devices by the hour: pairs on a command line."""

import math

from windtunnel.errors import InputError


def parse_prices(text: str) -> dict[str, float]:
    """Parse `gb200=10.50,mi300x=2.50`: device -> USD an hour for one device.

    Raises:
        InputError: a part is no such pair.
    """
    prices: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, price = part.partition("=")
        try:
            usd = float(price)
        except ValueError:
            usd = 0.0
        if not name or not 0 < usd < math.inf:
            raise InputError(f"prices: {part!r} is no DEVICE=USD", "for instance gb200=10.50,mi300x=2.50")
        prices[name.strip()] = usd
    return prices
