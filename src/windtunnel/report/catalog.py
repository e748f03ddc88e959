"""The catalog on a terminal and as JSON: lists, and single entries with their sources."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import msgspec

from windtunnel import catalog
from windtunnel.catalog.add import AddedModel
from windtunnel.model.parameters import count_parameters
from windtunnel.report.layout import Column, layouts_beside, table_of
from windtunnel.report.numbers import number, quantity
from windtunnel.report.report import Cell, Facts, Report, Section
from windtunnel.schema import Schema, decode, encode, fields_of, plain, read_yaml
from windtunnel.search.prices import provider_entry
from windtunnel.serving.calibration import load_calibration
from windtunnel.serving.engines.contract import scheduler_of
from windtunnel.serving.engines.defaults import engine_defaults
from windtunnel.units import format_count, format_si, units_for
from windtunnel.workload.client import client_entry
from windtunnel.workload.schema import Trace
from windtunnel.workload.traces.media import described
from windtunnel.workload.traces.requests import read_requests

LAYOUT = layouts_beside(__file__)


class Attribution(Schema):
    """The origin of a trace, as its licence demands."""

    title: str
    author: str
    url: str
    licence: str
    changes: str
    cite: str


def list_report(kind: str, link: Callable[[str], str] = lambda _: "") -> Report:
    """Return everything of a kind in a table; `link` gives the address of an entry, for a page."""
    layout = LAYOUT[kind]
    columns: dict[str, Column] = {kind[:-1]: lambda thing: Cell(thing["name"], href=link(thing["name"]))}
    table = table_of(
        ({"name": name, **_listed(kind, name)} for name in catalog.names(kind)),
        columns | layout["columns"],
        left=layout.get("left", 1),
        notes=layout.get("notes", ()),
    )
    # Many columns have headers of two lines on a terminal.
    heads = [header.replace(" ", "\n") for header in table.headers] if layout.get("is_tall") else table.headers
    return Report("", [replace(table, headers=heads)], verdict=f"{len(table.rows)} {kind}.")


def _listed(kind: str, name: str) -> dict[str, Any]:
    """Return what the list of a kind shows of an entry."""
    thing = _LOADERS[kind](name)
    match kind:
        case "models":
            parameters, longest = count_parameters(thing), thing.max_context_tokens
            return {
                **fields_of(thing, "num_layers", "precision"),
                "context": f"{longest // 1024}k" if longest >= 1024 else str(longest),
                "attention": " + ".join(dict.fromkeys(attention.text for _, attention in thing.attentions)),
                "total": parameters.total,
                "active": parameters.active if parameters.active != parameters.total else None,
            }
        case "nodes":
            in_pairs = " in pairs" if thing.scale_up_group_size == 2 else ""
            return {**fields_of(thing, "num_devices", "device", "scale_up", "scale_out"), "in_pairs": in_pairs}
        case "engines":
            newest = [entry.settings for entry in thing.versions if entry.settings.scheduler][-1]
            forms = scheduler_of(newest).title or str(newest.scheduler)
            since = ", ".join(entry.since for entry in thing.versions)
            return {**fields_of(thing, "title", "default_version"), "forms": forms, "since": since}
        case "traces":
            return dict(thing)
        case "providers":
            cheapest = dict.fromkeys(LAYOUT[kind]["prices"], math.inf)
            for device, offer in (each for offers in thing.regions.values() for each in offers.items()):
                cheapest[device] = min(cheapest.get(device, math.inf), offer.on_demand_usd_per_hour or math.inf)
            prices = {device: None if usd == math.inf else usd for device, usd in cheapest.items()}
            return {**fields_of(thing, "title", "date"), "prices": prices}
    return msgspec.structs.asdict(thing.provenance if kind == "calibrations" else thing)


def entries(kind: str) -> list[dict[str, Any]]:
    """Return everything of a kind as documents."""
    return [entry(kind, name) for name in catalog.names(kind)]


def entry(kind: str, name: str) -> dict[str, Any]:
    """Return one entry as a document, every field present; InputError where there is no such entry."""
    thing = _LOADERS[kind](name)
    if kind == "models":
        parameters = count_parameters(thing)
        totals = {"total": parameters.total, "active": parameters.active}
        return {**plain(thing), "parameters": asdict(parameters) | totals}
    named = {"name": catalog.spelling(kind, name)} if kind not in ("devices", "nodes", "traces") else {}
    return {**named, **(encode(thing) if kind == "providers" else plain(thing))}


def entry_report(kind: str, name: str) -> Report:
    """Return the report of one entry: every field, then the sources of its values."""
    document = entry(kind, name)
    sources = list(document.pop("sources", {}).items())
    rows = _fields(document)
    names = dict(rows)
    width = max(len(label) for label, _ in [*rows, *sources])
    sections = [Section("", [Facts(rows, width)], kind[:-1].capitalize())]
    sections += [Section("sources", [Facts(sources, width)], "Sources")] if sources else []
    return Report(names.get("title") or names["name"], [], sections)


def added_document(added: AddedModel) -> dict[str, Any]:
    """Return a model that was added as a document: its entry, its file and the keys that were not read."""
    return {**entry("models", added.model.name), "file": str(added.file), **fields_of(added, "unread", "replaced")}


def added_report(added: AddedModel) -> Report:
    """Return the report of a model that was added: what was understood of it, and what was not."""
    model, whole = added.model, entry_report("models", added.model.name)
    parameters = count_parameters(model)
    size = f"{format_si(parameters.total, '')} parameters"
    size += f", {format_si(parameters.active, '')} of them active" if parameters.active != parameters.total else ""
    mixing = " + ".join(dict.fromkeys(attention.text for _, attention in model.attentions))
    like = f", taken to be those of {model.architecture}" if model.unknown_type else ""
    verdict = f"Understood: {size} in {format_count(model.num_layers, 'layer')} of {mixing or 'feed-forwards'}{like}."
    unread = f"not read: {', '.join(added.unread)}" if added.unread else "every key was read"
    place = f"{'replaced' if added.replaced else 'written to'} {added.file}"
    named = f"--model {model.name} is its name in every command"
    return replace(whole, lead=[named, unread, place], verdict=verdict)


def _fields(document: dict[str, Any], table: str = "", indent: str = "") -> list[tuple[str, str]]:
    """Return everything in a document as (indented name, text); `table` is the name of the enclosing table."""
    rows: list[tuple[str, str]] = []
    for key, value in document.items():
        parts = value if isinstance(value, list) and any(isinstance(part, dict) for part in value) else [value]
        for part in parts:
            if isinstance(part, dict):
                inside = _fields(part, key, f"{indent}  ")
                rows += [(indent + key, ""), *inside] if inside else []
            elif part is not None:
                rows.append((indent + key, _text(key if units_for(key) else table, part)))
    return rows


def _text(name: str, value: Any) -> str:
    """Return a value for people, in the unit of its name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_usd_per_hour"):
        return f"${value:,.2f}/h"
    if name.endswith("_w"):
        return f"{value:,.0f} W"
    if name.endswith("_per_s") and not name.endswith(("bytes_per_s", "flops_per_s")):
        return format_si(value, "Hz")
    return quantity(name, value) if units_for(name) else f"{value:,}" if isinstance(value, int) else number(value)


def _trace(name: str) -> dict[str, Any]:
    """Return a trace's size, and its origin if its folder names it."""
    path = catalog.find("traces", name)
    requests = read_requests(Trace(path=str(path)))
    assert requests.arrival_s is not None
    assert requests.input_tokens is not None
    assert requests.output_tokens is not None
    key = path.name.partition(".")[0]
    index = path.with_name("_attribution.yaml")
    known = decode(read_yaml(index), dict[str, Attribution], str(index)) if index.is_file() else {}
    return {
        "name": key,
        **(plain(known[key]) if key in known else {}),
        "num_requests": requests.num_requests,
        "duration_s": float(requests.arrival_s[-1] - requests.arrival_s[0]),
        "mean_input_tokens": float(requests.input_tokens.mean()),
        "mean_output_tokens": float(requests.output_tokens.mean()),
        **({} if requests.media is None else {"media": described(requests.media.padded())}),
    }


_LOADERS: Mapping[str, Callable[[str], Any]] = {
    "models": catalog.model,
    "devices": catalog.device,
    "nodes": catalog.node,
    "engines": engine_defaults,
    "traces": _trace,
    "clients": client_entry,
    "providers": provider_entry,
    "calibrations": load_calibration,
}
"""Kind -> its entry by name."""
