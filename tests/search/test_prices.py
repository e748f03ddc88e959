"""Prices of devices by provider and of owned ones, and where they meet an API's."""

from pathlib import Path

import pytest

from windtunnel import catalog
from windtunnel.errors import InputError
from windtunnel.metrics.limits import parse_limits
from windtunnel.report.search.recommendation import against_api
from windtunnel.search.prices import (
    ApiPrice,
    Offer,
    asked_prices,
    chosen_prices,
    parse_api_price,
    provider_entry,
    read_prices,
)
from windtunnel.search.recommend import deployments_space
from windtunnel.search.space.space import Space
from windtunnel.search.store import Store
from windtunnel.search.study import search

FILE = """\
h200_sxm: 3.10
h100_sxm:
  cloud-a/us-east: {on_demand_usd_per_hour: 3.00, spot_usd_per_hour: 1.20, source: price list, date: 2026-08-01}
  cloud-b: {on_demand_usd_per_hour: 2.50, reserved_usd_per_hour: 1.90}
l40s:
  own: {purchase_usd: 17520, years: 2, power_w: 500, pue: 1.2, usd_per_kwh: 0.10, hosting_usd_per_month: 73}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prices.yaml"
    path.write_text(FILE)
    return path


def test_the_cheapest_offer_of_a_term_is_taken(file: Path) -> None:
    offers = read_prices(file)
    chosen = chosen_prices(offers, ["h100_sxm", "h200_sxm", "b200_sxm"])
    assert {name: price.usd_per_hour for name, price in chosen.items()} == {"h100_sxm": 2.5, "h200_sxm": 3.1}
    assert chosen["h100_sxm"].text == "h100_sxm: $2.50/h on demand, cloud-b"
    spot = chosen_prices(offers, ["h100_sxm"], "spot")["h100_sxm"]
    assert (spot.usd_per_hour, spot.text) == (1.2, "h100_sxm: $1.20/h spot, cloud-a/us-east (price list, 2026-08-01)")
    assert chosen_prices(offers, ["l40s"], "spot")["l40s"].text.endswith("/h owned, own")


def test_owning_is_capital_power_and_hosting() -> None:
    l40s = catalog.device("l40s")
    # 17,520 USD over 2 years of 8,760 h; 0.5 kW x 1.2 x 0.10 USD; 73 USD a month of 730 h.
    owned = Offer(purchase_usd=17520, years=2, power_w=500, pue=1.2, usd_per_kwh=0.10, hosting_usd_per_month=73)
    assert owned.owned(l40s) == pytest.approx(1.0 + 0.06 + 0.10)
    # The annuity of 1 at 10% over 2 years is 0.576190; half of the price comes back, discounted by 1.21.
    borrowed = Offer(purchase_usd=8760, years=2, interest_fraction=0.1, residual_fraction=0.5)
    assert borrowed.owned(l40s) == pytest.approx(0.576190 * (1 - 0.5 / 1.21), rel=1e-5)
    # Without a draw, the device's TDP of 350 W.
    assert Offer(purchase_usd=8760, years=1, usd_per_kwh=1.0).owned(l40s) == pytest.approx(1.0 + 0.35)
    assert Offer(spot_usd_per_hour=1.0).owned(l40s) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100_sxm: -1", r"h100_sxm is -1.0; more than 0"),
        ("h100_sxm: {a: {}}", "there is no price"),
        ("h100_sxm: {a: {purchase_usd: 100}}", "purchase_usd and years belong together"),
        ("h100_sxm: {a: {spot_usd_per_hour: 1, pue: 0.5}}", "pue is 0.5; at least 1"),
        ("h100_sxm: {a: {spot_usd: 1}}", "spot_usd"),
        ("h100_sxn: 1", "h100_sxn"),
        ("h100_sxm: {a: {spot_usd_per_hour: 1}}", "h100_sxm has no price on demand"),
    ],
)
def test_wrong_prices_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        chosen_prices(read_prices(tmp_path / "prices.yaml"), ["h100_sxm"])


def test_providers_of_the_catalog_are_offers_with_their_source() -> None:
    rented = asked_prices(None, "lambda,coreweave", None, ["h100_sxm", "b200_sxm"])
    assert {name: price.usd_per_hour for name, price in rented.items()} == {"h100_sxm": 3.99, "b200_sxm": 6.69}
    assert rented["h100_sxm"].text == "h100_sxm: $3.99/h on demand, lambda (https://lambda.ai/instances, 2026-09-20)"
    spot = asked_prices(None, None, "spot", ["h100_sxm"])["h100_sxm"]
    assert (spot.usd_per_hour, "coreweave/north_america" in spot.text) == (2.46, True)
    region = asked_prices(None, "runpod/secure", None, ["h100_sxm"])["h100_sxm"]
    assert region.usd_per_hour > asked_prices(None, "runpod", None, ["h100_sxm"])["h100_sxm"].usd_per_hour
    assert asked_prices(None, None, None, ["h100_sxm"]) == {}


def test_a_user_adds_a_provider_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "providers").mkdir()
    ours = "{title: Ours, source: contract, date: 2026-10-01, regions: {hall-2: {l40s: {reserved_usd_per_hour: 0.4}}}}"
    (tmp_path / "providers" / "ours.yaml").write_text(ours)
    monkeypatch.setenv("WINDTUNNEL_CATALOG", str(tmp_path))
    assert asked_prices(None, "any", "reserved", ["l40s"])["l40s"].usd_per_hour == 0.4
    with pytest.raises(InputError, match="l40s has no price on demand"):
        asked_prices(None, "ours", None, ["l40s"])


def test_every_provider_says_when_and_where_and_names_devices_of_the_catalog() -> None:
    for name in catalog.names("providers"):
        provider = provider_entry(name)
        assert provider.source, name
        assert provider.date.startswith("20"), name
        for offers in provider.regions.values():
            assert {catalog.known_name("devices", device) for device in offers} == set(offers), name


@pytest.mark.parametrize("text", ["1", "1/2/3", "a/1", "0/1", "1/nan", ""])
def test_an_api_price_is_a_pair(text: str) -> None:
    assert parse_api_price("0.60/2.40") == ApiPrice(0.6, 2.4)
    assert parse_api_price("0.02/0") == ApiPrice(0.02, 0.0)
    with pytest.raises(InputError, match="is no INPUT/OUTPUT"):
        parse_api_price(text)


@pytest.fixture(scope="module")
def space() -> Space:
    workload = {
        "arrivals": {"type": "poisson", "rate_per_s": 1},
        "input_tokens": 500,
        "output_tokens": 50,
        "num_requests": 60,
    }
    shared = {"model": "llama-3.1-8b", "deployment": {"device": "l40s"}, "workload": workload}
    return deployments_space(shared, ["l40s"], parse_limits("ttft_p90=1s"), {"devices": 1}, {"l40s": 1.8})


@pytest.mark.full
@pytest.mark.compiled
def test_owning_pays_from_the_load_at_which_the_api_costs_as_much(space: Space) -> None:
    study = search(space, Store(None, print))
    api = ApiPrice(0.2, 2.0)  # 500 x 0.2 + 50 x 2 = 200 USD for a million requests
    assert api.usd_per_request(space) == pytest.approx(2e-4)
    text = against_api(study, api, 40.0)
    # 1.80 USD/h are 0.0005 USD/s, which pays 2.5 requests/s.
    assert text.startswith("From 2.50 requests/s on, a replica of l40s TP 1"), text
    assert "the API asks $0.20 for 1,000 of these requests" in text
    assert "For 40.0 requests/s it asks $28.80/h and the replicas $" in text
    cheap = against_api(study, ApiPrice(1e-4, 1e-4), None)
    assert cheap.startswith("The API costs less at any load"), cheap
