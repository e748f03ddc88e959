"""Prices of devices by the hour: given, of providers, or of hardware that is owned; and what an API asks for tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from msgspec.structs import replace

from windtunnel import catalog
from windtunnel.errors import InputError, check_known
from windtunnel.hardware import Device
from windtunnel.schema import Fraction, NonNegative, Positive, Schema, check_at_least, decode, read_yaml
from windtunnel.search.capacity.load import Stream, stream_of
from windtunnel.search.space.space import Space, point_at, scenario_at

Term = Literal["on_demand", "reserved", "spot"]
TERMS: tuple[Term, ...] = get_args(Term)
HOURS_PER_YEAR, MONTHS_PER_YEAR = 8760.0, 12.0


class Offer(Schema):
    """What one device costs at a provider, or where it is owned."""

    on_demand_usd_per_hour: Positive | None = None
    reserved_usd_per_hour: Positive | None = None
    spot_usd_per_hour: Positive | None = None
    purchase_usd: Positive | None = None
    """Price of an owned device with its share of the server, network and installation."""
    years: Positive | None = None
    """Time over which it is written off."""
    interest_fraction: NonNegative = 0.0
    """Cost of capital a year."""
    power_w: Positive | None = None
    """Mean draw with its share of the server; None: the device's TDP."""
    usd_per_kwh: NonNegative = 0.0
    pue: float = 1.0
    """Energy of the data centre over that of its servers (power usage effectiveness)."""
    hosting_usd_per_month: NonNegative = 0.0
    """Space, network, maintenance and staff."""
    residual_fraction: Fraction = 0.0
    """Share of the purchase price that it sells for at the end."""
    source: str = ""
    date: str = ""

    def check(self) -> None:
        check_at_least(1, pue=self.pue)
        if (self.purchase_usd is None) != (self.years is None):
            raise ValueError("purchase_usd and years belong together")
        if self.purchase_usd is None and all(self.rented(term) is None for term in TERMS):
            raise ValueError(f"there is no price: give {TERMS[0]}_usd_per_hour, or purchase_usd and years")

    def rented(self, term: Term) -> float | None:
        """Return the price of renting, in USD an hour; None where there is none."""
        price: float | None = getattr(self, f"{term}_usd_per_hour")
        return price

    def owned(self, device: Device) -> float | None:
        """Return what owning costs in USD an hour of the whole year, busy or not; None where it is not owned.

        Capital as an annuity over the years, power with the data centre's share, and hosting. Source: Barroso, Hölzle
        and Ranganathan, The Datacenter as a Computer (3rd edition, 2018), chapter 6; the annuity at interest i over n
        years is i / (1 - (1 + i)^-n) of the price, of which the residual value, discounted to today, is taken off.
        InputError where power has a price, and the draw is not known.
        """
        if self.purchase_usd is None or self.years is None:
            return None
        rate, watts = self.interest_fraction, self.power_w or device.tdp_w
        if watts is None and self.usd_per_kwh:
            raise InputError(f"the power of {device.name} is not known", "give power_w beside purchase_usd")
        share: float = rate / (1 - (1 + rate) ** -self.years) if rate else 1 / self.years
        capital: float = self.purchase_usd * (1 - self.residual_fraction * (1 + rate) ** -self.years)
        power = (watts or 0.0) / 1e3 * self.pue * self.usd_per_kwh
        return capital * share / HOURS_PER_YEAR + power + self.hosting_usd_per_month * MONTHS_PER_YEAR / HOURS_PER_YEAR


class Provider(Schema):
    """An entry of the catalog: what a provider asks, region -> device -> offer; `all` is every region."""

    title: str
    source: str
    date: str
    regions: dict[str, dict[str, Offer]]
    about: str = ""


@dataclass(frozen=True)
class Price:
    """The price of one device, and where it comes from."""

    usd_per_hour: float
    text: str = ""


Offers = Mapping[str, float | dict[str, Offer]]
"""Device -> USD an hour, or name of a provider -> its offer."""


def read_prices(path: Path) -> Offers:
    """Read a YAML file of prices; InputError names the path of what is wrong in it."""
    offers = decode(read_yaml(path), dict[str, float | dict[str, Offer]], f"--prices: {path}")
    wrong = next((name for name, usd in offers.items() if isinstance(usd, float) and not 0 < usd < math.inf), None)
    if wrong is not None:
        raise InputError(f"--prices: {path}: $.{wrong} is {offers[wrong]}; more than 0 USD an hour is needed")
    return offers


def provider_entry(name: str) -> Provider:
    """Return a provider of the catalog; InputError where there is none of that name."""
    return catalog.entry(catalog.find("providers", name), Provider)


def offers_of(places: Sequence[str], devices: Sequence[str]) -> Offers:
    """Return what providers of the catalog ask for devices; a place is `lambda`, `aws/us-east-1` or `any`. InputError
    where the catalog has no such provider or region, or none of them offers a device."""
    found: dict[str, dict[str, Offer]] = {catalog.known_name("devices", name): {} for name in devices}
    for place in catalog.names("providers") if "any" in places else places:
        name, _, region = place.partition("/")
        provider = provider_entry(name)
        if region:
            check_known(region, provider.regions, f"{name} has no prices of {region!r}", ", ".join(provider.regions))
        for each in (region,) if region else provider.regions:
            label = name if each == "all" else f"{name}/{each}"
            for device in provider.regions[each].keys() & found.keys():
                offer = provider.regions[each][device]
                found[device][label] = replace(offer, source=provider.source, date=provider.date)
    missing = next((device for device, offers in found.items() if not offers), None)
    if missing is not None:
        regions = {name: provider_entry(name).regions.values() for name in catalog.names("providers")}
        having = [name for name, every in regions.items() if any(missing in offers for offers in every)]
        hint = f"the catalog has prices of {', '.join(having)}" if having else f"give one: --prices {missing}=10.50"
        raise InputError(f"{' and '.join(places)}: no price of {missing}", hint)
    return found


def chosen_prices(offers: Offers, devices: Sequence[str], term: Term = "on_demand") -> dict[str, Price]:
    """Return the price of each device that has an offer: the cheapest of renting on `term` and of owning. InputError
    where a device has offers, and none for the term."""
    by_name = {catalog.known_name("devices", name): offer for name, offer in offers.items()}
    chosen: dict[str, Price] = {}
    for name in devices:
        device = catalog.device(name)
        offer = by_name.get(device.name)
        if isinstance(offer, dict):
            prices = [price for place, each in offer.items() for price in _prices(place, each, device, term)]
            if not prices:
                known = [each for each in TERMS if any(one.rented(each) for one in offer.values())]
                hint = f"--price-term {' or '.join(known)}, or other devices than {name}"
                raise InputError(f"{name} has no price {_words(term)}", hint)
            chosen[name] = min(prices, key=lambda price: price.usd_per_hour)
        elif offer is not None:
            chosen[name] = Price(offer)
    return chosen


def asked_prices(
    prices: str | None, provider: str | None, term: Term | None, devices: Sequence[str]
) -> dict[str, Price]:
    """Return what devices cost: by pairs `gb200=10.50,mi300x=2.50`, a file of `prices`, or providers of the catalog.

    Without any of these nothing is returned: the list prices of the catalog's devices hold. InputError where prices and
    providers are given, or one of them is wrong.
    """
    if prices is not None and provider is not None:
        raise InputError("--prices and --provider both say what devices cost", "give one of them")
    if prices is not None and "=" in prices:
        if term is not None:
            raise InputError("--price-term chooses among offers, and --prices gives one price", "leave it out")
        return {name: Price(usd) for name, usd in parse_prices(prices).items()}
    if prices is not None:
        return chosen_prices(read_prices(Path(prices)), devices, term or "on_demand")
    if provider is None and term is None:
        return {}
    return chosen_prices(offers_of(names_in(provider or "any"), devices), devices, term or "on_demand")


def _prices(place: str, offer: Offer, device: Device, term: Term) -> list[Price]:
    """Return the prices of one offer, with a sentence on each."""
    ways = {_words(term): offer.rented(term), "owned": offer.owned(device)}
    said = ", ".join(filter(None, (offer.source, offer.date)))
    origin = f" ({said})" if said else ""
    return [
        Price(usd, f"{device.name}: ${usd:,.2f}/h {way}, {place}{origin}")
        for way, usd in ways.items()
        if usd is not None
    ]


def _words(term: Term) -> str:
    return term.replace("_", " ")


def names_in(text: str) -> list[str]:
    """Return the names of a list that commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_prices(text: str) -> dict[str, float]:
    """Parse `gb200=10.50,mi300x=2.50`: device -> USD an hour for one; InputError where a part is no such pair."""
    prices: dict[str, float] = {}
    for part in names_in(text):
        name, _, price = part.partition("=")
        usd = _positive(price)
        if not name or usd is None:
            raise InputError(f"--prices: {part!r} is no DEVICE=USD", "for instance gb200=10.50,mi300x=2.50")
        prices[name.strip()] = usd
    return prices


def _positive(text: str, takes_zero: bool = False) -> float | None:
    """Return a finite number above 0, or 0; None where the text is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf or (takes_zero and value == 0) else None


@dataclass(frozen=True)
class ApiPrice:
    """What an API asks, in USD per million tokens."""

    input_usd: float
    output_usd: float

    def usd_per_request(self, space: Space) -> float:
        """Return the price of a request of mean lengths of a space's workload; prefixes in a cache cost as others."""
        requests = _stream(space).unit
        tokens = float(requests.input_tokens.mean()), float(requests.output_tokens.mean())
        return (tokens[0] * self.input_usd + tokens[1] * self.output_usd) / 1e6


def requests_per_arrival(space: Space) -> float:
    """Return the requests of one arrival of a space's workload: more than 1 where arrivals begin sessions."""
    return _stream(space).requests_per_arrival


def _stream(space: Space) -> Stream:
    return stream_of(scenario_at(space, point_at(space, 0).settings).workload, space.seed)


def parse_api_price(text: str) -> ApiPrice:
    """Parse `0.60/2.40`, USD a million input and output tokens, of embeddings `0.02/0`; InputError for no such pair."""
    prices = [_positive(part, takes_zero=number == 1) for number, part in enumerate(text.split("/"))]
    if len(prices) != 2 or prices[0] is None or prices[1] is None:
        hint = "USD per million input and output tokens: --api-price 0.60/2.40; of embeddings 0.02/0"
        raise InputError(f"--api-price: {text!r} is no INPUT/OUTPUT", hint)
    return ApiPrice(prices[0], prices[1])
