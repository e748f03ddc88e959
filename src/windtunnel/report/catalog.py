"""The catalog on a terminal and as JSON: lists, and single entries with their sources."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec

from windtunnel import catalog
from windtunnel.model.parameters import count_parameters
from windtunnel.report.layout import Column, layouts_beside, table_of
from windtunnel.report.numbers import number, quantity
from windtunnel.report.report import Cell, Facts, Report, Section
from windtunnel.schema import Schema, decode, encode, fields_of, read_yaml
from windtunnel.search.prices import provider_entry
from windtunnel.serving.calibration import load_calibration
from windtunnel.serving.engines.contract import scheduler_of
from windtunnel.serving.engines.defaults import engine_defaults
from windtunnel.units import format_si, units_for
from windtunnel.workload.client import client_entry
from windtunnel.workload.schema import Trace
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
    return Report("", [replace(table, headers=heads)])


def _listed(kind: str, name: str) -> dict[str, Any]:
    """Return what the list of a kind shows of an entry."""
    match kind:
        case "models":
            model = catalog.model(name)
            parameters = count_parameters(model)
            return {
                **fields_of(model, "num_layers", "max_context_tokens", "precision"),
                "attention": " + ".join(dict.fromkeys(attention.text for _, attention in model.attentions)),
                "total": parameters.total,
                "active": parameters.active if parameters.active != parameters.total else None,
            }
        case "nodes":
            node = catalog.node(name)
            in_pairs = " in pairs" if node.scale_up_group_size == 2 else ""
            return {**fields_of(node, "num_devices", "device", "scale_up", "scale_out"), "in_pairs": in_pairs}
        case "engines":
            defaults = engine_defaults(name)
            newest = [entry.settings for entry in defaults.versions if entry.settings.scheduler][-1]
            forms = scheduler_of(newest).title or str(newest.scheduler)
            since = ", ".join(entry.since for entry in defaults.versions)
            return {**fields_of(defaults, "title", "default_version"), "forms": forms, "since": since}
        case "traces":
            return _trace(name)
        case "clients":
            return msgspec.structs.asdict(client_entry(name))
        case "providers":
            provider = provider_entry(name)
            cheapest = dict.fromkeys(LAYOUT[kind]["prices"], math.inf)
            for device, offer in (each for offers in provider.regions.values() for each in offers.items()):
                cheapest[device] = min(cheapest.get(device, math.inf), offer.on_demand_usd_per_hour or math.inf)
            prices = {device: None if usd == math.inf else usd for device, usd in cheapest.items()}
            return {**fields_of(provider, "title", "date"), "prices": prices}
        case "calibrations":
            return msgspec.structs.asdict(load_calibration(name).provenance)
    return msgspec.structs.asdict(catalog.device(name))


def entries(kind: str) -> list[dict[str, Any]]:
    """Return everything of a kind as documents."""
    return [entry(kind, name) for name in catalog.names(kind)]


def entry(kind: str, name: str) -> dict[str, Any]:
    """Return one entry as a document, every field present.

    Raises:
        InputError: there is no such entry.
    """
    if kind == "models":
        model = catalog.model(name)
        parameters = count_parameters(model)
        totals = {"total": parameters.total, "active": parameters.active}
        return {**_plain(model), "parameters": asdict(parameters) | totals}
    if kind == "traces":
        return _trace(name)
    if kind == "engines":
        return {"name": catalog.spelling(kind, name), **_plain(engine_defaults(name))}
    if kind == "calibrations":
        return {"name": catalog.spelling(kind, name), **_plain(load_calibration(name))}
    if kind == "clients":
        return {"name": catalog.spelling(kind, name), **_plain(client_entry(name))}
    if kind == "providers":
        return {"name": catalog.spelling(kind, name), **encode(provider_entry(name))}
    return dict(_plain(catalog.device(name) if kind == "devices" else catalog.node(name)))


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


def _plain(value: Any) -> Any:
    """Return a struct as JSON types, defaults included."""
    if isinstance(value, Schema):
        fields = {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        return {"type": tag, **fields} if tag is not None else fields
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return msgspec.to_builtins(value)


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
        **(_plain(known[key]) if key in known else {}),
        "num_requests": requests.num_requests,
        "duration_s": float(requests.arrival_s[-1] - requests.arrival_s[0]),
        "mean_input_tokens": float(requests.input_tokens.mean()),
        "mean_output_tokens": float(requests.output_tokens.mean()),
    }
