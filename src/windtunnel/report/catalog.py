"""The catalog on a terminal and as JSON: lists, and single entries with their sources."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from windtunnel import catalog
from windtunnel.model.parameters import count_parameters
from windtunnel.report.numbers import duration, number
from windtunnel.report.report import Cell, Facts, Report, Row, Section, Table
from windtunnel.schema import Schema, decode, read_yaml
from windtunnel.serving.calibration import load_calibration
from windtunnel.serving.engines.contract import scheduler_of
from windtunnel.serving.engines.defaults import engine_defaults
from windtunnel.units import GIB, format_bytes, format_seconds, format_si, units_for
from windtunnel.workload.schema import Trace
from windtunnel.workload.traces.requests import read_requests


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
    row_of, headers, left = _LISTS[kind]
    rows: list[Row] = [[Cell(name, href=link(name)), *row_of(name)] for name in catalog.names(kind)]
    heads = [header.replace(" ", "\n") for header in headers] if kind in TALL else headers
    return Report("", [Table(heads, rows, left, notes=_NOTES.get(kind, ()))])


TALL = ("models", "devices", "nodes")
"""Kinds whose headers take two lines on a terminal."""


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
    if name.endswith("bytes"):
        return format_bytes(value)
    if name.endswith(("bytes_per_s", "flops_per_s")):
        return format_si(value, "FLOP/s" if "flops" in name else "B/s")
    if name.endswith("_usd_per_hour"):
        return f"${value:,.2f}/h"
    if name.endswith("_per_s"):
        return format_si(value, "Hz")
    if name.endswith("_w"):
        return f"{value:,.0f} W"
    if name.endswith("_s"):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def _calibration_row(name: str) -> list[str]:
    record = load_calibration(name).provenance
    before, after = record.median_error_before, record.median_error
    errors = [f"{before[m]:.1%} to {after[m]:.1%}" if m in before and m in after else "" for m in ("tpot", "ttft")]
    return [str(record.num_runs), str(record.num_configurations), *errors]


def _model_row(name: str) -> list[str]:
    model = catalog.model(name)
    parameters = count_parameters(model)
    return [
        " + ".join(dict.fromkeys(attention.text for _, attention in model.attentions)),
        number(parameters.total / 1e9),
        number(parameters.active / 1e9) if parameters.active != parameters.total else "",
        f"{model.num_layers}",
        f"{model.max_context_tokens / 1024:.0f}k",
        model.precision.experts_format.value,
    ]


def _device_row(name: str) -> list[str]:
    device = catalog.device(name)
    return [
        f"{device.memory_bytes / GIB:.0f}",
        f"{device.memory_bytes_per_s / 1e12:.2f}",
        *(_scaled(device.peak_flops_per_s.get(rate), 1e12) for rate in ("bf16", "fp8", "fp4")),
        _scaled(device.scale_up_bytes_per_s, 1e9),
        _scaled(device.tdp_w, 1.0),
        f"{device.price_usd_per_hour:.2f}" if device.price_usd_per_hour else "",
        "yes" if device.measured_as else "",
    ]


def _scaled(value: float | None, scale: float) -> str:
    return f"{value / scale:.0f}" if value else ""


def _node_row(name: str) -> list[str]:
    node = catalog.node(name)
    joined = " in pairs" if node.scale_up_group_size == 2 else ""
    return [
        f"{node.num_devices} x {node.device}",
        f"{node.scale_up.name}{joined}",
        _scaled(node.scale_up.bytes_per_s, 1e9),
        _scaled(node.scale_out.bytes_per_s if node.scale_out else None, 1e9),
    ]


def _engine_row(name: str) -> list[str]:
    defaults = engine_defaults(name)
    newest = [entry.settings for entry in defaults.versions if entry.settings.scheduler][-1]
    forms = scheduler_of(newest).title or str(newest.scheduler)
    return [defaults.title, forms, defaults.default_version, ", ".join(entry.since for entry in defaults.versions)]


def _trace_row(name: str) -> list[str]:
    trace = _trace(name)
    return [
        f"{trace['num_requests']:,}",
        duration(trace["duration_s"]),
        f"{trace['mean_input_tokens']:,.0f}",
        f"{trace['mean_output_tokens']:,.0f}",
        trace.get("licence", "unknown"),
    ]


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


_LISTS: Mapping[str, tuple[Callable[[str], list[str]], tuple[str, ...], int]] = {
    "models": (
        _model_row,
        ("model", "attention", "params 10^9", "active 10^9", "layers", "context", "weights"),
        2,
    ),
    "devices": (
        _device_row,
        ("device", "memory GiB", "TB/s", "bf16", "fp8", "fp4", "link GB/s", "TDP W", "price $/h", "measured"),
        1,
    ),
    "nodes": (_node_row, ("node", "devices", "link", "inside GB/s", "outside GB/s"), 3),
    "engines": (_engine_row, ("engine", "title", "forms batches as", "default version", "defaults known since"), 5),
    "traces": (_trace_row, ("trace", "requests", "lasts", "mean input", "mean output", "licence"), 1),
    "calibrations": (_calibration_row, ("calibration", "runs", "configs", "TPOT error", "TTFT error"), 1),
}
"""Kind -> the cells of an entry behind its name, the headers, and how many columns are texts."""
_NOTES = {
    "devices": ("", "bf16, fp8, fp4: dense peaks in TFLOP/s. link: one way. measured: operators were timed on it.")
}
"""Kind -> the lines below its list."""
